"""Errors of kda_core. Bad arguments raise the built-in ValueError and TypeError instead."""

from __future__ import annotations


class KdaError(Exception):
    """Base class of every error that kda_core defines."""


class UnsupportedCall(KdaError, NotImplementedError):
    """A well-formed call that no installed backend (or not the named one) can serve.

    The message gives the reason of the backend that was named; where none was, it lists every known backend with
    its reason and, for one that is not installed, the command that installs it.
    """


class BackendNotFound(KdaError, LookupError):
    """A backend was named (argument, ``use_backend`` or ``KDA_BACKEND``) that is not installed."""


class BrokenBackend(KdaError, ImportError):
    """A backend was named whose wheel is installed but could not be loaded.

    The ledger of ``python -m kda_core info`` shows the same reason; other backends are not affected.
    """


class ContractViolation(KdaError, RuntimeError):
    """A backend broke the plugin contract while serving a call (for example, a hook returned None)."""


class UnsupportedStack(KdaError, RuntimeError):
    """An adapter (``kda_core.integrations``) does not serve this version, model or setting of the stack.

    ``install()`` raises it before it has changed anything; the message says what to do.
    """


class CheckFailed(KdaError, ArithmeticError):
    """A call that was checked (``KDA_CHECK=1``, ``checked_calls``) had wrong inputs or gave wrong results.

    Attributes:
        op: the public function.
        backend: the backend that served it.
        direction: "forward" or "backward".
        problems: what is wrong, a sentence for each argument or result.
    """

    op: str = ""
    backend: str = ""
    direction: str = ""
    problems: tuple[str, ...] = ()


class CheckWarning(RuntimeWarning):
    """The message of ``CheckFailed``, with ``KDA_CHECK=warn``; or a call that could not be checked."""


NO_DOUBLE_BACKWARD = (
    "{op}: double backward is not supported (the backward has no gradient of its own); leave out create_graph=True, "
    "or detach what the first gradients depend on"
)
NO_FORWARD_MODE = (
    "{op}: forward-mode differentiation is not supported; use reverse mode: torch.func.vjp, or jacrev instead of jacfwd"
)
"""Texts of the RuntimeErrors of autograd's unserved modes."""

"""Adapters that let other stacks (fla, transformers) call kda_core: which are installed, and whether they fit.

An adapter is a wheel with an entry point in the group ``kda_core.integrations``: its name is the stack's, its value the
module with ``install()`` and ``uninstall()``, or with what the stack reads itself. The wheel's first requirement that
is none of kda_core's own wheels names the stack and its supported versions; pip reads it, and ``admit`` checks it again
at run time. Nothing here imports a stack or an adapter.

``install()`` returns whether the stack calls kda_core: False where the adapter's environment variable switches it off.
It raises UnsupportedStack, with what to do, for a stack that is missing, in another version or set up so that the
adapter cannot serve it, and for a model that the adapter does not know; nothing has changed then.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kda_core.errors import UnsupportedStack

ENTRY_POINT_GROUP = "kda_core.integrations"


@dataclass(frozen=True)
class Integration:
    """An adapter wheel.

    Attributes:
        name: the stack's name, such as "fla".
        distribution: the wheel and its version.
        supports: the stack's distribution and the versions that the wheel was tested with.
        variable: the environment variable that switches the adapter off with the value 0.
        state: "ready", "switched off", "unsupported" (another version of the stack) or "not installed" (the stack).
        reason: why it is not ready and how to change that; empty when it is.
    """

    name: str
    distribution: str
    supports: str
    variable: str
    state: str
    reason: str


def integrations() -> tuple[Integration, ...]:
    """Every adapter wheel of this environment, by name."""
    found = metadata.entry_points(group=ENTRY_POINT_GROUP)
    return tuple(_integration(entry_point) for entry_point in sorted(found, key=lambda e: e.name))


def admit(name: str) -> bool:
    """Whether an adapter's ``install()`` may go on: False where its environment variable switches it off.

    Raises:
        UnsupportedStack: the stack is not installed, or in a version that the adapter was not tested with; or the
            adapter itself is not installed as a wheel, so that its versions are unknown.
    """
    for found in integrations():
        if found.name == name:
            if found.state in ("unsupported", "not installed"):
                raise UnsupportedStack(f"{name}: {found.reason}")
            return found.state == "ready"
    raise UnsupportedStack(f"{name}: no adapter is installed: pip install ./integrations/{name} in a checkout")


def expect_models(stack: str, models: Collection[str], served: Collection[str]) -> None:
    """Raise UnsupportedStack for a name among ``models`` that an adapter does not serve."""
    for name in models:
        if name not in served:
            raise UnsupportedStack(f"{stack}: model {name!r} is not served; take {', '.join(served)}")


def named(function: Callable) -> Callable[..., dict[str, Any]]:
    """The arguments of a call of a stack's function by name, with its defaults; also names that it does not know."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names, defaults = [p.name for p in parameters], {p.name: p.default for p in parameters if p.default is not p.empty}
    return lambda *args, **kwargs: defaults | dict(zip(names, args)) | kwargs  # noqa: B905


def gradients(
    function: Callable, call: dict[str, Any], inputs: Collection[str], given: Iterable[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of ``function(**call)``, for stacks that have a function apart for them.

    Args:
        inputs: names of the arguments to differentiate, as far as the call has them; None stays None.
        given: the gradients of the results that have one, in their order.
    """
    leaves = {n: call[n] if call[n] is None else call[n].detach().requires_grad_() for n in inputs if n in call}
    with torch.enable_grad():
        results = function(**call | leaves)
    results = (results,) if isinstance(results, Tensor) else results
    pairs = [(y, grad.view_as(y)) for y, grad in zip(results, given) if grad is not None]  # noqa: B905
    torch.autograd.backward([y for y, _ in pairs], [grad for _, grad in pairs])
    return tuple(t if t is None else t.grad for t in leaves.values())


def advance_convolution(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The short convolution of one token on a CPU, for stacks that keep the W last inputs: a tenth of torch's time.

    Args:
        x: [B, D, 1]; the result has its shape and dtype.
        state: [B, D, W], advanced in place.
        weight: [D, W].
        bias: [D] or None.
    """
    # In one row every input moves by one place, which is a third of the time of a concatenation.
    y = state.roll(-1)
    y[..., -1:] = x
    state.copy_(y)
    # float() and type_as() return at once where the dtype stays; to() takes as long as a small operator.
    y = y.float().mul_(weight).sum(-1, keepdim=True)
    y = y if bias is None else y + bias[:, None]
    return (F.silu(y) if silu else y).type_as(x)


def _integration(entry_point: metadata.EntryPoint) -> Integration:
    # Not at the top: the parser of requirements would be a tenth of what the import of kda_core takes.
    from packaging.requirements import Requirement

    dist = entry_point.dist
    assert dist is not None  # entry points of an environment have one
    name = entry_point.name
    needs = next(r for r in map(Requirement, dist.requires or ()) if not r.name.startswith("kda-core"))
    variable = f"KDA_{name.upper()}"
    state, reason = "ready", ""
    try:
        version = metadata.version(needs.name)
        if not needs.specifier.contains(version, prereleases=True):
            state, reason = "unsupported", f"{needs.name} {version} is installed; pip install '{needs}'"
    except metadata.PackageNotFoundError:
        state, reason = "not installed", f"{needs.name} is not installed; pip install '{needs}'"
    if os.environ.get(variable) == "0":
        state, reason = "switched off", f"unset {variable} to switch it on"
    return Integration(name, f"{dist.name} {dist.version}", str(needs), variable, state, reason)

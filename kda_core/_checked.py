"""Check calls while a program runs, to find the call that makes a run diverge.

With ``KDA_CHECK=1`` in the environment when kda_core is imported, or within ``checked_calls()``, every result of a
backend is compared with the float64 reference, forward and backward, within the budget of the conformance kit
(``kda_core.testing.call_checks``). Otherwise calls pay nothing and the kit is not imported.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kda_core import _expect, _loaded
from kda_core._checks import check_values
from kda_core._loaded import DEFAULT_ELEMENTS, ROWS, Backend, CheckSettings
from kda_core._plugins import registry
from kda_core._torch_private import autocasts

COMMIT = "kda_core_commit"
VARIABLE = "KDA_CHECK"
DUMP_VARIABLE = "KDA_CHECK_DUMP"

_lock = threading.Lock()
_in_force: list[CheckSettings] = []


@contextmanager
def checked_calls(
    *, warn: bool = False, dump: str | os.PathLike[str] | None = None, elements: int = DEFAULT_ELEMENTS
) -> Iterator[None]:
    """Within the block, compare every call of this process, of any thread, with the float64 reference.

    Checked are ``chunk_kda``, ``fused_recurrent_kda`` and ``kda_gate``, forward and backward, eager and compiled, with
    their checkpoints and records, and what ``commit_kda`` makes of the records that it is given: that inputs and
    results are finite, that results lie within the conformance kit's budget (twice the error that rounding to the
    call's dtypes makes), that rows of padding are zero, and that inputs and slots which the call must not write stay as
    they are. Calls take seconds rather than milliseconds.

    Args:
        warn: warn (``CheckWarning``) rather than raise ``CheckFailed``.
        dump: file for ``torch.save``: the arguments and results of the first call that fails.
        elements: tokens times value heads times K times V that the reference computes for one call. Larger calls
            are compared in some heads, drawn anew for each call, then in some sequences; a sequence that is larger by
            itself in its first tokens (its final state and its gradients, except dq, are then not compared).

    Raises:
        CheckFailed: from a call within the block, unless ``warn``.
        TypeError, ValueError: an argument is wrong.
    """
    _expect.flag("warn", warn)
    if dump is not None and not isinstance(dump, (str, os.PathLike)):
        raise TypeError(f"dump: expected a path or None, got {type(dump).__name__}")
    _expect.integer("elements", elements)
    if elements < 1:
        raise ValueError(f"elements: expected a number of at least 1, got {elements}")
    settings = CheckSettings(warn, None if dump is None else os.fspath(dump), elements)
    with _lock:
        _in_force.append(settings)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _in_force.remove(settings)
            _apply()


def check_as_environment_says() -> None:
    """Switch checking on for the life of the process where ``KDA_CHECK`` asks for it.

    Raises:
        ValueError: it holds something else than 0, 1, warn or nothing.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked in ("", "0"):
        return
    if asked not in ("1", "warn"):
        problem = f"{VARIABLE}: expected 0, 1 or warn, got {asked!r}"
        if _is_command_line():
            print(problem, file=sys.stderr)
            sys.exit(2)
        raise ValueError(problem)
    with _lock:
        _in_force.append(CheckSettings(asked == "warn", os.environ.get(DUMP_VARIABLE) or None))
        # No backend is loaded yet, so no cached caller has to be dropped.
        _loaded.watch = _watch


def _is_command_line() -> bool:
    """Whether this process is ``kda`` or ``python -m kda_core``, which import this package before they run."""
    arguments = sys.orig_argv[1:]
    module = "-m" in arguments and arguments[arguments.index("-m") + 1 :][:1] == [__package__]
    return module or os.path.basename(sys.argv[0]) in ("kda", "kda.exe")


def _apply() -> None:
    _loaded.watch = _watch if _in_force else None
    for backend in registry.backends:
        backend.forget_callers()


def _watch(backend: Backend, hook: str, caller: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook: a hook that computes is checked with the settings in force at the time of the call."""
    if hook not in ROWS:
        return caller

    def checked(request: Any) -> Any:
        from kda_core.testing.call_checks import run_checked
        from kda_core.testing.call_samples import on_cpu
        from kda_core.testing.commit_checks import run_checked_commit

        # No lock: a child that is forked while a thread holds one would wait for ever.
        settings = _in_force[-1:]
        if not settings:
            return caller(request=request)
        if hook != COMMIT and getattr(request, "commit", None) is not None:
            # The same bits in two calls, each of which can be compared. Faults of the second are said before
            # the first writes.
            check_values(on_cpu(request))
            backend.result(COMMIT, request.committing())
            request = request.after_commit()
        check = run_checked_commit if hook == COMMIT else run_checked
        kind = request.device.type
        if not autocasts(kind):
            return check(backend, hook, caller, request, settings[0])

        def as_called(request: Any) -> Any:
            with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind)):
                return caller(request=request)

        with torch.autocast(kind, enabled=False):  # in it torch refuses to put some dtypes together
            return check(backend, hook, as_called, request, settings[0])

    return checked

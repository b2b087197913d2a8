"""Questions about calls, which run nothing: who would serve one, why, and with which kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from kda_core import _plugins
from kda_core._bind import bind, is_sharded
from kda_core._ledger import Explanation
from kda_core._plugins import registry
from kda_core.api import chunk_kda, fused_recurrent_kda, kda_gate
from kda_core.call_plan import CallPlan


def explain(*args: Any, op: str = "chunk_kda", **kwargs: Any) -> Explanation:
    """Say which backend would serve a call and why the others would not; runs nothing.

    Args:
        *args: the arguments of the call, as the function ``op`` takes them.
        **kwargs: those that are given by name.
        op: "chunk_kda", "fused_recurrent_kda" or "kda_gate".

    Returns:
        A verdict for every known backend; ``print`` shows it.

    Raises:
        ValueError, TypeError: the arguments are wrong, as in the call itself.
        BackendNotFound, BrokenBackend: ``backend=`` names one that cannot be used at all.
    """
    return _ask(registry.explain, op, args, kwargs)


def plan(*args: Any, op: str = "chunk_kda", chip: str | None = None, **kwargs: Any) -> tuple[CallPlan, ...]:
    """Say what a call would allocate and launch, in its forward and in the backward that it may have; runs nothing.

    Arguments and errors are those of ``explain``, and UnsupportedCall where no backend serves the call or makes plans.
    ``chip``: name of the chip to plan for, such as "sm_90", beside ``backend``; None: the device of the arguments.
    """
    if chip is not None and not isinstance(chip, str):
        raise TypeError(f"chip: expected the name of a chip or None, got {type(chip).__name__}")
    return _ask(lambda request, name: registry.plan(request, name, chip), op, args, kwargs)


def _ask(question: Callable[[Any, str | None], Any], op: str, args: Any, kwargs: Any) -> Any:
    """The answer to a question about a call: ``question`` takes its request and the name of the wanted backend."""
    try:
        given = _signature(op).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{op}() {error}") from None
    given.apply_defaults()
    name = _plugins.requested_name(given.arguments.pop("backend"))
    if name is not None:
        registry.named(name)
    r = bind(op, given.arguments)
    if is_sharded(getattr(r, "q", r.g)):
        from kda_core.distributed import _shards

        r = bind(op, _shards.local(r)[0])
    if op != "chunk_kda" or r.cp_context is None:
        return question(r, name)
    from kda_core.distributed import _call

    return _call.answered(r, lambda part: question(part, name))


def _signature(op: str) -> inspect.Signature:
    signature = _SIGNATURES.get(op) if isinstance(op, str) else None
    if signature is None:
        raise ValueError(f"op: expected one of {', '.join(_SIGNATURES)}, got {op!r}")
    return signature


_SIGNATURES = {f.__name__: inspect.signature(f) for f in (chunk_kda, fused_recurrent_kda, kda_gate)}


def supports(op: str, /, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Say whether a call would be served, and if not, why; runs nothing.

    A verdict is kept by shapes, strides, dtypes, devices and options, so that an adapter can ask before every call.
    The values of tensors are not read: a call that is supported still raises for a wrong slot or boundary.

    Args:
        op: the function's name, as of ``explain``.
        *args: its arguments.
        **kwargs: its arguments by name.

    Returns:
        ``(True, "")``, or False and the text of the error that the call would raise: wrong arguments (ValueError,
        TypeError) or no backend for them (UnsupportedCall).

    Raises:
        ValueError: there is no such ``op``.
        BackendNotFound, BrokenBackend: ``backend=`` names one that cannot be used at all.
    """
    name = _plugins.requested_name(kwargs.get("backend"))
    answer = registry.answered(op, args, kwargs, name)
    if answer is not None:
        return answer
    _signature(op)
    try:
        return _ask(lambda r, name: registry.supports(r, args, kwargs, name), op, args, kwargs)
    except (ValueError, TypeError) as error:
        return False, str(error)

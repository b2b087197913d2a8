"""Questions about calls, which run nothing: who would serve one, why, with which kernels and on which device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from kda_core import _plugins, platforms
from kda_core._bind import bind, is_sharded
from kda_core._ledger import Explanation
from kda_core._plugins import registry
from kda_core.api import chunk_kda, fused_recurrent_kda, kda_gate
from kda_core.call_plan import CallPlan
from kda_core.capabilities import Available
from kda_core.errors import UnsupportedCall


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
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    answer = registry.answered(op, values, name)
    if answer is not None:
        return answer
    _signature(op)
    try:
        return _ask(lambda r, name: registry.supports(r, values, name), op, args, kwargs)
    except (ValueError, TypeError) as error:
        return False, str(error)


def default_device() -> torch.device:
    """The best device of this machine that an installed backend can serve.

    Where ``use_backend`` or ``KDA_BACKEND`` names a backend: the best device that this one can serve, even if it
    serves only when it is named.

    Raises:
        UnsupportedCall: no installed backend, or not the named one, can serve a device of this machine.
        BackendNotFound, BrokenBackend: the named backend is not installed, or could not be loaded.
    """
    return best_device([_current_device(t) for t in platforms.device_types()], _plugins.registry)


def best_device(machine: list[torch.device], registry: _plugins.Registry) -> torch.device:
    """``default_device`` among the devices of a machine, the best first."""
    name = _plugins.requested_name(None)
    if name is not None:
        backend, reasons = registry.named(name), []
        for device in backend.devices_among(machine):
            available = backend.availability(device)
            if isinstance(available, Available):
                return device
            reasons.append(f"{device}: {available.reason}")
        raise UnsupportedCall(f"backend {name!r} can serve no device of this machine: {'; '.join(reasons)}")
    reasons, installed = [], {b.info.name for b in registry.backends}
    for device in machine:
        # Those that serve only when named come last.
        for backend in registry.backends:
            own, if_named = backend.info.name, backend.info.priority is None
            if if_named and device.type == "cpu":
                continue
            available = backend.availability(device)
            if isinstance(available, Available) and not if_named:
                return device
            if isinstance(available, Available):
                reasons.append(f"{own} on {device}: it serves only calls that name it, e.g. with KDA_BACKEND={own}")
            elif not if_named:
                reasons.append(f"{own} on {device}: {available.reason}")
        wheel = platforms.WHEEL_OF_RUNTIME.get(platforms.runtime(device.type))
        if wheel is not None and platforms.BACKEND_OF_WHEEL[wheel] not in installed:
            reasons.append(f"{device}: {platforms.install_command(wheel)}")
    raise UnsupportedCall("no installed backend can serve a device of this machine: " + "; ".join(reasons))


def _current_device(device_type: str) -> torch.device:
    index = torch.accelerator.current_device_index() if device_type != "cpu" else None
    return torch.device(device_type) if index is None else torch.device(device_type, index)

"""The device that a program without one of its own should use."""

from __future__ import annotations

import torch

from kda_core import _plugins, platforms
from kda_core.capabilities import Available
from kda_core.errors import UnsupportedCall


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

"""The choice of the device that a backend is tested on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kda_core._plugins import registry
from kda_core.capabilities import Available, BackendInfo
from kda_core.errors import UnsupportedCall


@dataclass(frozen=True)
class Target:
    """A backend and the device that it is tested on."""

    backend: str
    device: torch.device
    interpreted: bool = False  # kernels run in Triton's interpreter, on the CPU
    foreign: bool = False  # the backend is not made for this device


def devices_of(info: BackendInfo, only_cpu: bool) -> Iterator[torch.device]:
    """The devices of this machine that a backend may run on, the accelerator before the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and not only_cpu and accelerator.type in info.device_types:
        yield torch.device(accelerator.type, torch.accelerator.current_device_index())
    known = {"cpu"} | ({accelerator.type} if accelerator is not None else set())
    if not only_cpu:
        yield from (torch.device(t) for t in info.device_types if t not in known)
    if "cpu" in info.device_types:
        yield torch.device("cpu")


def find_target(backend: str, interpret: bool = False, foreign: bool = False) -> Target:
    """The backend on the best device of this machine that it can run on.

    ``foreign``: before it was loaded, ``kda_core.capabilities.FOREIGN_VARIABLE`` allowed it other devices than its own.

    Raises:
        BackendNotFound, BrokenBackend: no such backend can be used.
        UnsupportedCall: it cannot run here; the message holds its reasons.
    """
    loaded = registry.named(backend)
    if foreign and not loaded.info.foreign_device:
        raise UnsupportedCall(f"backend {backend!r} does not declare that it can run on a foreign device")
    if foreign and loaded.info.priority is not None:
        raise UnsupportedCall(f"backend {backend!r} would serve calls that do not name it from a foreign device")
    reasons = []
    for device in devices_of(loaded.info, only_cpu=interpret):
        available = loaded.availability(device)
        if isinstance(available, Available):
            # A backend for accelerators that also serves the CPU does so through the interpreter.
            return Target(backend, device, interpret and set(loaded.info.device_types) != {"cpu"}, foreign)
        reasons.append(f"{device}: {available.reason}")
    serves = " or ".join(loaded.info.device_types)
    where = "the CPU, where the interpreter runs" if interpret else "this machine"
    raise UnsupportedCall(
        f"backend {backend!r} cannot run on {where}: "
        + ("; ".join(reasons) or f"it serves tensors on {serves}, of which there is none")
    )

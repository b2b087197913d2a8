"""Facts about this machine, computed at first use.

Importing this module starts no device. ``platforms.IS_NVIDIA`` and its neighbours are computed at the
first access. Only this module and the command line know names of vendors.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    IS_NVIDIA: bool
    IS_NVIDIA_HOPPER: bool
    IS_NVIDIA_BLACKWELL: bool
    IS_AMD: bool
    IS_AMD_CDNA: bool
    IS_AMD_RDNA: bool

WHEEL_OF_RUNTIME = {"cpu": "kda-core-cpu", "cuda": "kda-core-nvidia", "hip": "kda-core-amd"}
"""Runtime -> distribution of the first-party backend that serves it."""

BACKEND_OF_WHEEL = {"kda-core-cpu": "cpu", "kda-core-nvidia": "nvidia", "kda-core-amd": "amd"}


def runtime(device_type: str) -> str:
    """ "cpu", "cuda", "hip", or the torch device type itself for any other; looks only at the torch build."""
    if device_type == "cuda" and torch.version.hip is not None:
        return "hip"
    return device_type


def device_types() -> tuple[str, ...]:
    """Device types of this machine, the accelerator (if there is one) before the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else (accelerator.type, "cpu")


def install_command(wheel: str) -> str:
    """The command that installs a first-party backend: the wheels are on no index yet."""
    return f"pip install ./backends/{BACKEND_OF_WHEEL[wheel]} in a checkout of kda-core"


@cache
def _compute_capability() -> tuple[int, int]:
    """Compute capability of the current device on a CUDA build; (0, 0) elsewhere."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability()


@cache
def _gcn_arch() -> str:
    """Architecture of the current device on a ROCm build, e.g. "gfx942"; "" elsewhere."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return ""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.split(":")[0]


_FLAGS = {
    "IS_NVIDIA": lambda: _compute_capability() != (0, 0),
    "IS_NVIDIA_HOPPER": lambda: _compute_capability()[0] == 9,
    "IS_NVIDIA_BLACKWELL": lambda: _compute_capability()[0] in (10, 11, 12),
    "IS_AMD": lambda: _gcn_arch() != "",
    "IS_AMD_CDNA": lambda: _gcn_arch().startswith("gfx9"),
    "IS_AMD_RDNA": lambda: _gcn_arch().startswith(("gfx10", "gfx11", "gfx12")),
}


def __getattr__(name: str) -> bool:
    flag = _FLAGS.get(name)
    if flag is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return flag()


def flags() -> dict[str, bool]:
    """Every platform flag with its value."""
    return {name: flag() for name, flag in _FLAGS.items()}

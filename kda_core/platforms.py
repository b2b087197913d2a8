"""Facts about this machine, computed at first use.

Importing this module starts no device. ``platforms.IS_NVIDIA`` and its neighbours are computed at the
first access. Only this module and the command line know names of vendors. Tests and the conformance kit ask
this module, and nothing else, which chip is there: ``@pytest.mark.platform("nvidia_hopper")`` skips by a flag,
and budgets take a platform's arithmetic from ``flushed_below``.
"""

from __future__ import annotations

from functools import cache

import torch

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


FLAGS = {
    "IS_CPU": lambda: device_types() == ("cpu",),
    "IS_NVIDIA": lambda: _compute_capability() != (0, 0),
    "IS_NVIDIA_HOPPER": lambda: _compute_capability()[0] == 9,
    "IS_NVIDIA_BLACKWELL": lambda: _compute_capability()[0] in (10, 11, 12),
    "IS_AMD": lambda: _gcn_arch() != "",
    "IS_AMD_CDNA": lambda: _gcn_arch().startswith("gfx9"),
    "IS_AMD_RDNA": lambda: _gcn_arch().startswith(("gfx10", "gfx11", "gfx12")),
    # MI200: https://rocm.docs.amd.com/projects/MIOpen/en/latest/MI200AlternateImplementation.html
    "FLUSHES_16BIT_SUBNORMALS": lambda: _gcn_arch() == "gfx90a",
}
"""How every flag is computed. IS_CPU: torch has no accelerator."""


def __getattr__(name: str) -> bool:
    flag = FLAGS.get(name)
    if flag is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return flag()


def flags() -> dict[str, bool]:
    """Every platform flag with its value."""
    return {name: flag() for name, flag in FLAGS.items()}


def platform_names() -> list[str]:
    """Names of platforms, which ``pytest.mark.platform`` takes: "nvidia_hopper" stands for IS_NVIDIA_HOPPER."""
    return [name.removeprefix("IS_").lower() for name in FLAGS if name.startswith("IS_")]


def is_platform(name: str) -> bool:
    """Whether this machine is the platform that one of ``platform_names`` stands for."""
    return FLAGS[f"IS_{name.upper()}"]()


def this_platform() -> str:
    """The most specific platform that this machine is, or the type of an accelerator that has no flag."""
    found = [name for name in platform_names() if is_platform(name)]
    return max(found, key=len) if found else device_types()[0]


def flushed_below(device: torch.device, dtype: torch.dtype, flushes: bool | None = None) -> float:
    """The magnitude below which the device's matrix units take an operand of ``dtype`` for zero; 0.0 if they do not.

    ``flushes`` stands for FLUSHES_16BIT_SUBNORMALS.
    """
    if device.type == "cpu" or dtype.itemsize != 2:
        return 0.0
    flushes = FLAGS["FLUSHES_16BIT_SUBNORMALS"]() if flushes is None else flushes
    return torch.finfo(dtype).smallest_normal if flushes else 0.0

"""The NVIDIA backend's plugin: what it declares, where it runs and what it rejects."""

from __future__ import annotations

import torch

from kda_core.capabilities import Available, Unavailable
from kda_core.request import AnyRequest, Request
from kda_core.triton_lib.hooks import TritonBackend
from kda_core.triton_lib.run import INTERPRET
from kda_core_nvidia import __version__

LEAST_CAPABILITY = (8, 0)


class NvidiaBackend(TritonBackend):
    """The hooks for CUDA devices."""

    def availability_on(self, device: torch.device, triton: str) -> Available | Unavailable:
        if device.type != "cuda":
            return Unavailable(f"serves cuda tensors, not {device.type}")
        if torch.version.hip is not None:
            return Unavailable("this torch is built for ROCm")
        if not torch.cuda.is_available():
            return Unavailable("torch sees no CUDA device")
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"
        if (major, minor) < LEAST_CAPABILITY:
            return Unavailable(f"{name}: sm_{LEAST_CAPABILITY[0]}{LEAST_CAPABILITY[1]} or later is needed")
        return Available(f"{name}, triton {triton}")

    def rejection(self, request: AnyRequest) -> str | None:
        if isinstance(request, Request) and request.cp_context:
            from kda_core_nvidia.choose.fragments import rejected

            return rejected(request)
        return None


BACKEND = NvidiaBackend(
    f"{__package__}.calls",
    name="nvidia",
    version=__version__,
    # How much of the conformance kit has passed on an H200, with which code, and what has not: docs/notes/nvidia.md.
    # Tensors on the CPU belong to others: the interpreter is for tests.
    priority=None if INTERPRET else 100,
    summary="Triton for sm_80 and later, TensorDescriptor from sm_90: forward and backward, any log decay",
)

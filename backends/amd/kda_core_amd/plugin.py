"""The AMD backend's plugin: what it declares, where it runs and what it rejects."""

from __future__ import annotations

import torch

from kda_core.capabilities import FOREIGN_VARIABLE, Available, Unavailable
from kda_core.request import AnyRequest, CommitRequest
from kda_core.triton_lib.hooks import TritonBackend
from kda_core_amd import __version__
from kda_core_amd.choose import FOREIGN, halves_rejected

SERVED_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100")

MAX_PROGRAMS = 2**24
"""A launch counts its lanes in 32 bits: this many programs of four waves."""


class AmdBackend(TritonBackend):
    """The hooks for devices of a ROCm build of torch."""

    def availability_on(self, device: torch.device, triton: str) -> Available | Unavailable:
        if device.type != "cuda":
            return Unavailable(f"serves cuda tensors of a ROCm build of torch, not {device.type}")
        if torch.version.hip is None and not FOREIGN:
            return Unavailable("this torch is not built for ROCm")
        if not torch.cuda.is_available():
            return Unavailable("torch sees no GPU")
        device_name = torch.cuda.get_device_name(device)
        if torch.version.hip is None:
            return Available(f"{device_name}, a foreign device ({FOREIGN_VARIABLE}): for tests only")
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        if name not in SERVED_ARCHITECTURES:
            return Unavailable(f"{name}: kernels are configured for {', '.join(SERVED_ARCHITECTURES)}")
        return Available(f"{device_name}, {name}, triton {triton}")

    def rejection(self, request: AnyRequest) -> str | None:
        if isinstance(request, CommitRequest):
            if request.N * request.HV * -(-request.V // 16) <= MAX_PROGRAMS:
                return None
            return f"N · HV · V = {request.N * request.HV * request.V} is more than one launch holds; split the batch"
        chunks = (request.B * request.T // 16 + request.N + 1) * request.HV
        # Recurrences: blocks of 16 value channels at least.
        if max(chunks, request.N * request.HV * -(-request.V // 16)) > MAX_PROGRAMS:
            rows, columns = request.B * request.T * request.HV, request.N * request.HV * request.V
            return f"B · T · HV = {rows} or N · HV · V = {columns} is more than one launch holds; split the batch"
        return halves_rejected(request) if request.cp_context else None


BACKEND = AmdBackend(
    f"{__package__}.calls",
    # Names of ROCm builds of torch come after the plain one.
    distributions=("triton", "triton-rocm", "pytorch-triton-rocm"),
    name="amd",
    version=__version__,
    # Only when named, until the conformance kit has passed on AMD hardware; and neither the interpreter nor a foreign
    # device may serve a call that did not ask for it.
    priority=None,
    summary=f"Triton for ROCm ({', '.join(SERVED_ARCHITECTURES)}), any log decay; not yet run on AMD hardware",
    foreign_device=True,
)

"""The AMD backend's hooks and what it declares. Kernels (and triton) are imported by the hooks that run them."""

from __future__ import annotations

from importlib import metadata

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from kda_core.call_plan import CallPlan
from kda_core.capabilities import (
    FEATURES_1_2,
    FOREIGN_VARIABLE,
    Available,
    BackendInfo,
    Capabilities,
    Feature,
    Unavailable,
)
from kda_core.hookspecs import hookimpl
from kda_core.request import (
    AnyRequest,
    BackwardResult,
    Begun,
    CommitRequest,
    DecodeStepRequest,
    ForwardResult,
    GatedNormRequest,
    GateRequest,
    Request,
    ShortConvolutionRequest,
    TensorSpec,
)
from kda_core_amd import __version__
from kda_core_amd.switches import FOREIGN, INTERPRET, NAME

SERVED_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100")

TRITON = SpecifierSet(">=3.6")
TRITON_DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton-rocm")
"""Names under which triton is distributed; those of ROCm builds of torch come after the plain one."""

MAX_PROGRAMS = 2**24
"""A launch counts its lanes in 32 bits: this many programs of four waves."""

_INFO = BackendInfo(
    name=NAME,
    version=__version__,
    contract=SpecifierSet("~=1.2"),
    device_types=("cuda", "cpu") if INTERPRET else ("cuda",),
    # Neither the interpreter nor a foreign device may serve a call that did not ask for it by name.
    # Only when named, until the conformance kit has passed on AMD hardware.
    priority=None,
    capabilities=Capabilities(
        features=FEATURES_1_2 | {Feature.CONTEXT_PARALLEL},
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        max_head_dim_k=256,
        max_head_dim_v=256,
    ),
    summary=f"Triton for ROCm ({', '.join(SERVED_ARCHITECTURES)}), any log decay; not yet run on AMD hardware",
    foreign_device=True,
)


@hookimpl
def kda_core_backend() -> BackendInfo:
    return _INFO


@hookimpl
def kda_core_availability(device: torch.device) -> Available | Unavailable:
    version = _triton_version()
    if version is None:
        return Unavailable(f"triton is not installed (triton{TRITON} is needed)")
    if not TRITON.contains(version, prereleases=True):
        return Unavailable(f"triton {version} is installed, triton{TRITON} is needed")
    if INTERPRET:
        return Available(f"triton {version}, interpreted on the CPU")
    if device.type != "cuda":
        return Unavailable(f"serves cuda tensors of a ROCm build of torch, not {device.type}")
    if torch.version.hip is None and not FOREIGN:
        return Unavailable("this torch is not built for ROCm")
    if not torch.cuda.is_available():
        return Unavailable("torch sees no GPU")
    if torch.version.hip is None:
        return Available(f"{torch.cuda.get_device_name(device)}, a foreign device ({FOREIGN_VARIABLE}): for tests only")
    name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    if name not in SERVED_ARCHITECTURES:
        return Unavailable(f"{name}: kernels are configured for {', '.join(SERVED_ARCHITECTURES)}")
    return Available(f"{torch.cuda.get_device_name(device)}, {name}, triton {version}")


def _triton_version() -> str | None:
    for distribution in TRITON_DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


@hookimpl
def kda_core_reject(request: AnyRequest) -> str | None:
    if isinstance(request, GateRequest):
        if request.g.dtype == torch.float64:
            return "computes in float32; a float64 gate input would lose digits"
        if request.g.shape[-1] > _INFO.capabilities.max_head_dim_k:
            return f"K = {request.g.shape[-1]} is above {_INFO.capabilities.max_head_dim_k}"
        return None
    if isinstance(request, CommitRequest):
        if request.N * request.HV * -(-request.V // 16) <= MAX_PROGRAMS:
            return None
        return f"N · HV · V = {request.N * request.HV * request.V} is more than one launch holds; split the batch"
    chunks = (request.B * request.T // 16 + request.N + 1) * request.HV
    # Recurrences: blocks of 16 value channels at least.
    if max(chunks, request.N * request.HV * -(-request.V // 16)) > MAX_PROGRAMS:
        rows, columns = request.B * request.T * request.HV, request.N * request.HV * request.V
        return f"B · T · HV = {rows} or N · HV · V = {columns} is more than one launch holds; split the batch"
    if request.cp_context:
        from kda_core_amd.choose import halves_rejected

        return halves_rejected(request)
    return None


@hookimpl
def kda_core_saved_spec(request: Request) -> tuple[TensorSpec, ...]:
    """Nothing, with ``disable_recompute`` as well: the backward computes everything again from the inputs. A call in
    halves saves states."""
    if not request.cp_context:
        return ()
    from kda_core_amd.plans.fragments import saved_specs

    return saved_specs(request)


@hookimpl
def kda_core_chunk_forward(request: Request) -> ForwardResult:
    from kda_core_amd.calls import CALLS

    return CALLS.chunk_forward(request)


@hookimpl
def kda_core_chunk_backward(request: Request) -> BackwardResult:
    from kda_core_amd.calls import CALLS

    return CALLS.chunk_backward(request)


@hookimpl
def kda_core_chunk_begin(request: Request) -> Begun:
    from kda_core_amd.calls import CALLS

    return CALLS.chunk_begin(request)


@hookimpl
def kda_core_chunk_finish(request: Request, kept: tuple[Tensor, ...], starts: Tensor) -> ForwardResult:
    from kda_core_amd.calls import CALLS

    return CALLS.chunk_finish(request, kept, starts)


@hookimpl
def kda_core_chunk_begin_backward(request: Request) -> Begun:
    from kda_core_amd.calls import CALLS

    return CALLS.chunk_begin_backward(request)


@hookimpl
def kda_core_chunk_finish_backward(request: Request, kept: tuple[Tensor, ...], ends: Tensor) -> BackwardResult:
    from kda_core_amd.calls import CALLS

    return CALLS.chunk_finish_backward(request, kept, ends)


@hookimpl
def kda_core_recurrent_forward(request: Request) -> ForwardResult:
    from kda_core_amd.calls import CALLS

    return CALLS.recurrent_forward(request)


@hookimpl
def kda_core_recurrent_backward(request: Request) -> BackwardResult:
    from kda_core_amd.calls import CALLS

    return CALLS.recurrent_backward(request)


@hookimpl
def kda_core_commit(request: CommitRequest) -> Tensor:
    from kda_core_amd.calls import CALLS

    return CALLS.commit(request)


@hookimpl
def kda_core_gate_forward(request: GateRequest) -> Tensor:
    from kda_core_amd.calls import CALLS

    return CALLS.gate_forward(request)


@hookimpl
def kda_core_gate_backward(request: GateRequest) -> BackwardResult:
    from kda_core_amd.calls import CALLS

    return CALLS.gate_backward(request)


@hookimpl
def kda_core_short_convolution_forward(request: ShortConvolutionRequest) -> ForwardResult:
    from kda_core_amd.calls import CALLS

    return CALLS.short_convolution_forward(request)


@hookimpl
def kda_core_short_convolution_backward(request: ShortConvolutionRequest) -> BackwardResult:
    from kda_core_amd.calls import CALLS

    return CALLS.short_convolution_backward(request)


@hookimpl
def kda_core_gated_rms_norm_forward(request: GatedNormRequest) -> Tensor:
    from kda_core_amd.calls import CALLS

    return CALLS.gated_rms_norm_forward(request)


@hookimpl
def kda_core_gated_rms_norm_backward(request: GatedNormRequest) -> BackwardResult:
    from kda_core_amd.calls import CALLS

    return CALLS.gated_rms_norm_backward(request)


@hookimpl
def kda_core_plan(request: AnyRequest, chip: str | None) -> tuple[CallPlan, ...]:
    from kda_core_amd.calls import CALLS

    return CALLS.describe(request, chip)


@hookimpl
def kda_core_decode_step(request: DecodeStepRequest) -> Tensor:
    from kda_core_amd.calls import CALLS

    return CALLS.decode_step(request)

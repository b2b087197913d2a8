"""The NVIDIA backend's hooks and what it declares. Kernels (and triton) are imported by the hooks that run them."""

from __future__ import annotations

import os
from importlib import metadata

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from kda_core.call_plan import CallPlan
from kda_core.capabilities import FEATURES_1_2, Available, BackendInfo, Capabilities, Feature, Unavailable
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
from kda_core_nvidia import __version__

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels, on CPU tensors."""

TRITON = SpecifierSet(">=3.6")
LEAST_CAPABILITY = (8, 0)

_INFO = BackendInfo(
    name="nvidia",
    version=__version__,
    contract=SpecifierSet("~=1.2"),
    device_types=("cuda", "cpu") if INTERPRET else ("cuda",),
    # How much of the conformance kit has passed on an H200, with which code, and what has not: docs/notes/nvidia.md.
    # Tensors on the CPU belong to others: the interpreter is for tests.
    priority=None if INTERPRET else 100,
    capabilities=Capabilities(
        features=FEATURES_1_2 | {Feature.CONTEXT_PARALLEL},
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        max_head_dim_k=256,
        max_head_dim_v=256,
    ),
    summary="Triton for sm_80 and later, TensorDescriptor from sm_90: forward and backward, any log decay",
)


@hookimpl
def kda_core_backend() -> BackendInfo:
    return _INFO


@hookimpl
def kda_core_availability(device: torch.device) -> Available | Unavailable:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return Unavailable(f"triton is not installed (triton{TRITON} is needed)")
    if not TRITON.contains(version, prereleases=True):
        return Unavailable(f"triton {version} is installed, triton{TRITON} is needed")
    if INTERPRET:
        return Available(f"triton {version}, interpreted on the CPU")
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
    return Available(f"{name}, triton {version}")


@hookimpl
def kda_core_reject(request: AnyRequest) -> str | None:
    if isinstance(request, GateRequest):
        if request.g.dtype == torch.float64:
            return "computes in float32; a float64 gate input would lose digits"
        if request.g.shape[-1] > _INFO.capabilities.max_head_dim_k:
            return f"K = {request.g.shape[-1]} is above {_INFO.capabilities.max_head_dim_k}"
    elif isinstance(request, Request) and request.cp_context:
        from kda_core_nvidia.choose.fragments import rejected

        return rejected(request)
    return None


@hookimpl
def kda_core_saved_spec(request: Request) -> tuple[TensorSpec, ...]:
    if request.op != "chunk_kda":
        return ()
    from kda_core_nvidia.plans.forward import saved_specs

    return saved_specs(request)


@hookimpl
def kda_core_chunk_forward(request: Request) -> ForwardResult:
    from kda_core_nvidia.calls import CALLS

    return CALLS.chunk_forward(request)


@hookimpl
def kda_core_chunk_backward(request: Request) -> BackwardResult:
    from kda_core_nvidia.calls import CALLS

    return CALLS.chunk_backward(request)


@hookimpl
def kda_core_chunk_begin(request: Request) -> Begun:
    from kda_core_nvidia.calls import CALLS

    return CALLS.chunk_begin(request)


@hookimpl
def kda_core_chunk_finish(request: Request, kept: tuple[Tensor, ...], starts: Tensor) -> ForwardResult:
    from kda_core_nvidia.calls import CALLS

    return CALLS.chunk_finish(request, kept, starts)


@hookimpl
def kda_core_chunk_begin_backward(request: Request) -> Begun:
    from kda_core_nvidia.calls import CALLS

    return CALLS.chunk_begin_backward(request)


@hookimpl
def kda_core_chunk_finish_backward(request: Request, kept: tuple[Tensor, ...], ends: Tensor) -> BackwardResult:
    from kda_core_nvidia.calls import CALLS

    return CALLS.chunk_finish_backward(request, kept, ends)


@hookimpl
def kda_core_recurrent_forward(request: Request) -> ForwardResult:
    from kda_core_nvidia.calls import CALLS

    return CALLS.recurrent_forward(request)


@hookimpl
def kda_core_recurrent_backward(request: Request) -> BackwardResult:
    from kda_core_nvidia.calls import CALLS

    return CALLS.recurrent_backward(request)


@hookimpl
def kda_core_commit(request: CommitRequest) -> Tensor:
    from kda_core_nvidia.calls import CALLS

    return CALLS.commit(request)


@hookimpl
def kda_core_gate_forward(request: GateRequest) -> Tensor:
    from kda_core_nvidia.calls import CALLS

    return CALLS.gate_forward(request)


@hookimpl
def kda_core_gate_backward(request: GateRequest) -> BackwardResult:
    from kda_core_nvidia.calls import CALLS

    return CALLS.gate_backward(request)


@hookimpl
def kda_core_short_convolution_forward(request: ShortConvolutionRequest) -> ForwardResult:
    from kda_core_nvidia.calls import CALLS

    return CALLS.short_convolution_forward(request)


@hookimpl
def kda_core_short_convolution_backward(request: ShortConvolutionRequest) -> BackwardResult:
    from kda_core_nvidia.calls import CALLS

    return CALLS.short_convolution_backward(request)


@hookimpl
def kda_core_gated_rms_norm_forward(request: GatedNormRequest) -> Tensor:
    from kda_core_nvidia.calls import CALLS

    return CALLS.gated_rms_norm_forward(request)


@hookimpl
def kda_core_gated_rms_norm_backward(request: GatedNormRequest) -> BackwardResult:
    from kda_core_nvidia.calls import CALLS

    return CALLS.gated_rms_norm_backward(request)


@hookimpl
def kda_core_plan(request: AnyRequest, chip: str | None) -> tuple[CallPlan, ...]:
    from kda_core_nvidia.calls import CALLS

    return CALLS.describe(request, chip)


@hookimpl
def kda_core_decode_step(request: DecodeStepRequest) -> Tensor:
    from kda_core_nvidia.calls import CALLS

    return CALLS.decode_step(request)

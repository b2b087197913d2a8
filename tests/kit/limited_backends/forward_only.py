"""A backend with every forward and no gradient yet: the oracle's forward behind other capabilities."""

from __future__ import annotations

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from kda_core import reference
from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature, Unavailable
from kda_core.hookspecs import hookimpl
from kda_core.request import AnyRequest, ForwardResult, GateRequest, Request

NO_GRADIENTS = "forward only so far"
GRADIENTS = (Feature.BACKWARD, Feature.RECURRENT_BACKWARD, Feature.GATE_BACKWARD, Feature.STATE_GRADIENT)

INFO = BackendInfo(
    name="forward-only",
    version="0.1",
    contract=SpecifierSet("~=1.0"),
    device_types=("cpu",),
    priority=None,
    capabilities=Capabilities(
        features=frozenset(
            {
                Feature.CHUNK, Feature.RECURRENT, Feature.GATE, Feature.VARLEN, Feature.GVA, Feature.UNEQUAL_HEAD_DIMS,
                Feature.ODD_HEAD_DIMS, Feature.INITIAL_STATE, Feature.FINAL_STATE, Feature.STATE_V_FIRST,
                Feature.BF16_STATE, Feature.INTERMEDIATE_STATES, Feature.PAGED_STATE, Feature.SPEC_DECODE,
                Feature.QK_L2NORM, Feature.SOFTPLUS_GATE, Feature.LOWER_BOUND_GATE, Feature.BETA_SIGMOID,
                Feature.NEG_EIGVAL, Feature.SAFE_GATE, Feature.CHUNK_32, Feature.DISABLE_RECOMPUTE, Feature.OUT,
                Feature.STRIDED_INPUT,
            }
        ),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        closed=dict.fromkeys(GRADIENTS, NO_GRADIENTS),
    ),
    summary="forward only",
)  # fmt: skip


@hookimpl
def kda_core_backend() -> BackendInfo:
    return INFO


@hookimpl
def kda_core_availability(device: torch.device) -> Available | Unavailable:
    return Available() if device.type == "cpu" else Unavailable("runs on the CPU only")


@hookimpl
def kda_core_reject(request: AnyRequest) -> str | None:
    return None


@hookimpl
def kda_core_chunk_forward(request: Request) -> ForwardResult:
    return reference.forward(request)


@hookimpl
def kda_core_recurrent_forward(request: Request) -> ForwardResult:
    return reference.forward(request)


@hookimpl
def kda_core_gate_forward(request: GateRequest) -> Tensor:
    A_log = None if request.A_log is None else request.A_log.double()
    dt_bias = None if request.dt_bias is None else request.dt_bias.double()
    return reference.gate(request.g.double(), A_log, dt_bias, request.lower_bound).to(request.output_dtype).contiguous()

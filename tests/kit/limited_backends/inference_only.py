"""A kernel of one shape, as a first kernel is: bfloat16, heads of 128, dense, no states, no gradients, no options."""

from __future__ import annotations

import torch
from packaging.specifiers import SpecifierSet

from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature, Unavailable
from kda_core.hookspecs import hookimpl
from kda_core.request import AnyRequest, ForwardResult, Request

HEAD_DIM = 128

INFO = BackendInfo(
    name="inference-only",
    version="0.1",
    contract=SpecifierSet("~=1.0"),
    device_types=("cpu",),
    priority=None,
    capabilities=Capabilities(
        features=frozenset({Feature.CHUNK}),
        dtypes=frozenset({torch.bfloat16}),
        max_head_dim_k=HEAD_DIM,
        max_head_dim_v=HEAD_DIM,
        closed={Feature.BACKWARD: "for inference"},
    ),
    summary="one dtype, one head dimension, no states",
)


@hookimpl
def kda_core_backend() -> BackendInfo:
    return INFO


@hookimpl
def kda_core_availability(device: torch.device) -> Available | Unavailable:
    return Available() if device.type == "cpu" else Unavailable("runs on the CPU only")


@hookimpl
def kda_core_reject(request: AnyRequest) -> str | None:
    # Without UNEQUAL_HEAD_DIMS, V is K.
    return None if request.K == HEAD_DIM else f"takes K = {HEAD_DIM} only, got {request.K}"


@hookimpl
def kda_core_chunk_forward(request: Request) -> ForwardResult:
    # float64: a float32 state that is rounded in every token drifts past the kit's budgets.
    q, k, v, g, beta = (getattr(request, name).double() for name in ("q", "k", "v", "g", "beta"))
    state = q.new_zeros(request.state_shape)
    o = torch.empty_like(v)
    for t in range(request.T):
        state = state * g[:, t].exp()[..., None]
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], error)
        o[:, t] = request.scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return ForwardResult(o.to(request.q.dtype))

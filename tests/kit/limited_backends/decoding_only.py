"""A server's decoding kernel: fused_recurrent_kda over a pool of bfloat16 states, a few tokens a call, nothing else."""

from __future__ import annotations

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature, Unavailable
from kda_core.hookspecs import hookimpl
from kda_core.request import AnyRequest, ForwardResult, Request

MOST_TOKENS = 8

INFO = BackendInfo(
    name="decoding-only",
    version="0.1",
    contract=SpecifierSet("~=1.0"),
    device_types=("cpu",),
    priority=None,
    capabilities=Capabilities(
        features=frozenset(
            {
                Feature.RECURRENT, Feature.INITIAL_STATE, Feature.FINAL_STATE, Feature.BF16_STATE, Feature.PAGED_STATE,
                Feature.SPEC_DECODE, Feature.GVA, Feature.UNEQUAL_HEAD_DIMS, Feature.QK_L2NORM,
                Feature.LOWER_BOUND_GATE, Feature.BETA_SIGMOID, Feature.OUT,
            }
        ),
        dtypes=frozenset({torch.bfloat16}),
        max_head_dim_k=128,
        max_head_dim_v=128,
        closed={Feature.CHUNK: "decodes only", Feature.VARLEN: "a request is a row of the batch"},
    ),
    summary="decoding over pools of bfloat16 states",
)  # fmt: skip


@hookimpl
def kda_core_backend() -> BackendInfo:
    return INFO


@hookimpl
def kda_core_availability(device: torch.device) -> Available | Unavailable:
    return Available() if device.type == "cpu" else Unavailable("runs on the CPU only")


@hookimpl
def kda_core_reject(request: AnyRequest) -> str | None:
    if not request.inplace_final_state:
        return "decodes over a pool of states only (ssm_state_indices or inplace_final_state)"
    if request.initial_state.dtype != torch.bfloat16:
        return f"keeps states in bfloat16 only, got {request.initial_state.dtype}"
    return None if request.T <= MOST_TOKENS else f"takes up to {MOST_TOKENS} tokens a call, got {request.T}"


@hookimpl
def kda_core_recurrent_forward(request: Request) -> ForwardResult:
    r = request
    q, k, v, log_decay, beta = _prepared(r)
    slots = _slots(r)
    start = slots[:, 0] if r.num_accepted_tokens is None else slots[torch.arange(r.N), r.num_accepted_tokens.long() - 1]
    o = r.out if r.out is not None else torch.empty(r.v.shape, dtype=r.v.dtype)
    o.zero_()
    every_token = slots.shape[1] > 1
    for n in range(r.N):
        if start[n] < 0 or not r.T:
            continue
        state = r.initial_state[start[n]].double()
        for t in range(r.T):
            state = state * log_decay[n, t].exp()[..., None]
            error = v[n, t] - torch.einsum("hk,hkv->hv", k[n, t], state)
            state = state + torch.einsum("hk,hv->hkv", k[n, t] * beta[n, t, :, None], error)
            o[n, t] = (r.scale * torch.einsum("hk,hkv->hv", q[n, t], state)).to(o.dtype)
            written = slots[n, t] if every_token else slots[n, 0]
            if (every_token or t == r.T - 1) and written >= 0:
                r.initial_state[written] = state.to(torch.bfloat16)
    return ForwardResult(o)


def _prepared(r: Request) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q and k for every value head, v, log decay and beta, in float64."""
    q, k = (t.double().repeat_interleave(r.HV // r.H, 2) for t in (r.q, r.k))
    if r.use_qk_l2norm_in_kernel:
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    log_decay, beta = r.g.double(), r.beta.double()
    if r.use_gate_in_kernel:
        x = log_decay if r.dt_bias is None else log_decay + r.dt_bias.double()
        x = x if r.A_log is None else r.A_log.double().exp()[:, None] * x
        log_decay = r.lower_bound * torch.sigmoid(x)
    if r.use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta)
    return q, k, r.v.double(), log_decay, beta


def _slots(r: Request) -> Tensor:
    """[N, W] slots of the pool, padding as -1."""
    if r.ssm_state_indices is None:
        return torch.arange(r.N)[:, None]
    slots = r.ssm_state_indices.long()
    slots = slots[:, None] if slots.dim() == 1 else slots
    return torch.where((slots < 0) | (slots == r.pad_slot_id), -1, slots)

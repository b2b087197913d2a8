"""Host side of ``fused_recurrent_kda``: configurations, one launch, and the backward (the one of ``chunk_kda``).

Nothing waits for the device, and nothing but the result is allocated, so that a call can be captured in a CUDA graph whose
replays read whatever the indices hold by then. Inputs are read where they lie, at any stride of batch, token and head; one
whose last dimension is not contiguous (or parameters, boundaries that are not contiguous) is copied first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from kda_core.request import BackwardResult, ForwardResult, Request
from kda_core_nvidia.chunk_forward import gate_kind, rows_contiguous
from kda_core_nvidia.launch import on_device
from kda_core_nvidia.recurrent import recurrent


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Launch configuration of ``recurrent``: value channels of a program, warps."""

    block_v: int
    num_warps: int


FEW_STATES = 256
"""N · HV up to which states are spread over as many programs as there are: less than two of them a multiprocessor."""


@cache
def recurrent_config(states: int, K: int, V: int, v_first: bool, state_dtype: torch.dtype) -> RecurrentConfig:
    """Configuration for ``states`` = N · HV states. Measured on an H200 at K = V = 128, H = 32."""
    if v_first:
        block_v, num_warps = 8, 1
    elif states <= FEW_STATES:
        block_v, num_warps = 16, 1
    else:
        block_v, num_warps = 64, 4
    if K > 128:
        block_v //= 2  # the same registers a thread
    return RecurrentConfig(min(block_v, triton.next_power_of_2(V)), num_warps)


def _strides(x: Tensor, packed: bool) -> tuple[int, int, int]:
    """Strides by sequence (a token's, when sequences are found by their first token), token and head."""
    s_b, s_t, s_h = x.stride()[:3]
    return (s_t if packed else s_b), s_t, s_h


def _state_strides(state: Tensor | None, v_first: bool) -> tuple[int, int, int, int]:
    """Strides by sequence or slot, head, key channel and value channel."""
    if state is None:
        return 0, 0, 0, 0
    s_n, s_h, s_row, s_last = state.stride()
    return (s_n, s_h, s_last, s_row) if v_first else (s_n, s_h, s_row, s_last)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _allocated(request: Request) -> tuple[Tensor, Tensor | None]:
    """The output, and the tensor that final states are written to, if any."""
    q = request.q
    o = request.out
    if o is None:
        o = q.new_empty((request.B, request.T, request.HV, request.V))
    if request.inplace_final_state:
        return o, request.initial_state
    if not request.output_final_state:
        return o, None
    return o, q.new_empty(request.state_shape, dtype=request.state_dtype)


def recurrent_forward(request: Request) -> ForwardResult:
    """Run ``fused_recurrent_kda`` for a call that the plugin accepted."""
    with on_device(request.device):
        o, final_state = _allocated(request)
        _launch(request, o, final_state)
    return ForwardResult(o=o, final_state=None if request.inplace_final_state else final_state)


def _launch(request: Request, o: Tensor, final_state: Tensor | None) -> None:
    q, k, v, g = (rows_contiguous(x) for x in (request.q, request.k, request.v, request.g))
    beta, initial_state = request.beta, request.initial_state
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    N, T = request.N, q.shape[1]
    packed = request.cu_seqlens is not None
    gate = gate_kind(request)
    indices, accepted = request.ssm_state_indices, request.num_accepted_tokens
    s_index, s_slot, width = 0, 0, 1
    if indices is not None:
        s_index = indices.stride(0)
        if indices.dim() == 2:
            s_slot, width = indices.stride(1), indices.shape[1]
    config = recurrent_config(N * HV, K, V, request.state_v_first, request.state_dtype)
    # With packed sequences one more set of programs zeroes the rows behind the last one.
    programs = (N + packed) * HV * -(-V // config.block_v)
    recurrent[(programs,)](
        q,
        k,
        v,
        g,
        beta,
        _contiguous(request.A_log) if gate != "none" else None,
        _contiguous(request.dt_bias) if gate != "none" else None,
        initial_state,
        final_state,
        o,
        _contiguous(request.cu_seqlens),
        indices,
        accepted,
        request.scale,
        0.0 if request.lower_bound is None else request.lower_bound,
        T,
        N,
        *_strides(q, packed),
        *_strides(k, packed),
        *_strides(v, packed),
        *_strides(g, packed),
        *_strides(beta, packed),
        *_strides(o, packed),
        o.stride(3),
        *_state_strides(initial_state, request.state_v_first),
        *_state_strides(final_state, request.state_v_first),
        s_index,
        s_slot,
        0 if accepted is None else accepted.stride(0),
        width,
        request.pad_slot_id,
        HV=HV,
        GROUP=HV // H,
        K=K,
        V=V,
        KP=triton.next_power_of_2(K),
        VP=triton.next_power_of_2(V),
        BV=config.block_v,
        GATE=gate,
        L2NORM=request.use_qk_l2norm_in_kernel,
        SIGMOID=request.use_beta_sigmoid_in_kernel,
        NEG_EIGVAL=request.allow_neg_eigval,
        V_FIRST=request.state_v_first,
        IN_PLACE=request.inplace_final_state,
        EVERY_TOKEN=width > 1,
        ONE_TOKEN=T == 1 and not packed,
        num_warps=config.num_warps,
    )


def recurrent_backward(request: Request) -> BackwardResult:
    """Gradients of ``fused_recurrent_kda``: the same function as ``chunk_kda``, so the same backward.

    What that function alone has (a pool, ``num_accepted_tokens``) is not differentiable and never comes this far.
    """
    from kda_core_nvidia.chunk_backward import chunk_backward

    return chunk_backward(replace(request, op="chunk_kda"))


def shipped() -> Iterator[tuple[str, Request]]:
    """Small calls, on the CPU, that between them launch every configuration; for compilation without a GPU."""
    for v_first in (False, True):
        for state_dtype in (torch.float32, torch.bfloat16):
            for N in (1, 9):
                for T in (1, 2):
                    name = f"recurrent N={N} T={T} {'V first' if v_first else 'K first'} {str(state_dtype)[6:]}"
                    yield name, _example(N, T, v_first, state_dtype)


def _example(N: int, T: int, v_first: bool, state_dtype: torch.dtype) -> Request:
    """A decoding step (or a short prefill) of K3: everything in the kernel, states in a pool."""
    H, K = 32, 128
    x = torch.empty(N, T, H, K, dtype=torch.bfloat16)
    return Request(
        op="fused_recurrent_kda",
        q=x,
        k=x,
        v=x,
        g=x,
        beta=x[..., 0].contiguous(),
        scale=K**-0.5,
        A_log=torch.empty(H),
        dt_bias=torch.empty(H, K),
        initial_state=torch.empty(N, H, K, K, dtype=state_dtype),
        ssm_state_indices=torch.empty(N, dtype=torch.int32),
        lower_bound=-5.0,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        inplace_final_state=True,
        state_v_first=v_first,
    )

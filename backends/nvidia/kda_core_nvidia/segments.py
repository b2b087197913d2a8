"""Kernels for sequences that are cut into segments (``kda_core.triton_lib.segments`` has the algorithm)."""

import triton
import triton.language as tl

from kda_core_nvidia.backward_states import load_state, store_state


@triton.jit(do_not_specialize=["count"])
def join_kernel(
    given, transitions, additions, states, count,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, V_FIRST: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``chain_kernel`` for the segments of one sequence with heads of more than 128 key channels, whose matrices do not
    fit into registers: a state passes from one segment to the next through ``states`` [count, HV, V, K], in blocks.

    Grid: (VP / BV, HV).
    """
    i_v = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, KP)
    mask = (o_v < V)[:, None] & (o_k < K)[None, :]
    at = states + i_h * (V * K) + o_v[:, None] * K + o_k[None, :]
    step = tl.full([], HV * V * K, tl.int64)
    matrices = transitions + i_h * ((VP + KP) * KP)
    matrix_step = tl.full([], HV * (VP + KP) * KP, tl.int64)
    b_x = tl.zeros([BV, KP], tl.float32)
    if given is not None:
        b_x = load_state(given, i_h, o_v, o_k, K, V, V_FIRST)
    i = (count - 1) * REVERSE
    tl.store(at + i * step, b_x, mask=mask)
    for _ in range(1, count):
        if REVERSE:
            own = additions + (i * HV + i_h) * (VP * KP)
        else:
            own = matrices + i * matrix_step
        b_x = tl.load(own + o_v[:, None] * KP + o_k[None, :])
        # Other threads of this program read in blocks what it has just stored.
        tl.debug_barrier()
        m = matrices + i * matrix_step + VP * KP
        for first in range(0, KP, BK):
            o_b = first + tl.arange(0, BK)
            m_b = (o_v < V)[:, None] & (o_b < K)[None, :]
            b_a = tl.load(states + i * step + i_h * (V * K) + o_v[:, None] * K + o_b[None, :], mask=m_b, other=0.0)
            if REVERSE:
                # Σ_k x[v, k] Mᵀ[j, k]
                b_m = tl.trans(tl.load(m + o_k[:, None] * KP + o_b[None, :]))
            else:
                # Σ_j x[v, j] Mᵀ[j, k]
                b_m = tl.load(m + o_b[:, None] * KP + o_k[None, :])
            b_x = tl.dot(b_a, b_m, b_x, input_precision=PRECISION)
        i += 1 - 2 * REVERSE
        tl.store(at + i * step, b_x, mask=mask)


@triton.jit(do_not_specialize=["rows", "per"])
def first_segments_kernel(
    grad_starts,  # float32 [S, HV, V, K]: of segments, as ``segments_kernel`` numbers them
    grad_initial_state,  # [N, HV, K, V] (or [N, HV, V, K]): those of each sequence's first segment, written
    cu_seqlens, rows, per,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """Gradients of the states at the starts of sequences. Grid: (V / BV, N · HV)."""
    i_nh = tl.program_id(1)
    n = i_nh // HV
    if cu_seqlens is None:
        first = (n * per).to(tl.int64)
    else:
        first = tl.load(cu_seqlens + n).to(tl.int64) // rows + n
    o_k = tl.arange(0, K)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    x = tl.load(grad_starts + (first * HV + i_nh % HV) * (V * K) + o_v[:, None] * K + o_k[None, :])
    store_state(grad_initial_state, x, i_nh, o_v, o_k, K, V, V_FIRST)

"""Kernel for several sequences that are cut into segments (``kda_core.triton_lib.segments`` has the algorithm)."""

import triton
import triton.language as tl

from kda_core_nvidia.backward_states import store_state


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

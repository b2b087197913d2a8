"""Sequential kernel for prompts of ``fused_recurrent_kda``: from the blocks' tensors to outputs and final states.

    r = v − ke S        o = qg S + P r        S ← D ⊙ S + kAᵀ r

The state is held transposed, Sᵀ [BV, KP] in float32 registers, so that its halves are the left operands of products,
which wgmma takes from registers. Where the chip can, this kernel starts before ``blocks_prepare`` ends, loads its
state, and waits.

Grid: sequences · HV · ceil(V / BV) programs, value blocks fastest, then heads.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kda_core.triton_lib.factor import decayed
from kda_core.triton_lib.packing import is_padding, starts_from_state
from kda_core_nvidia.recurrent_blocks import PLANES, ROWS, TOP, locate, product, scaled_halves


@triton.jit
def follow(
    planes, squares, factors, v, initial_state, final_state, o, p_has, p_final, i_state, row, length, slot, i_h, i_v,
    pad_slot_id, final_slots, s_vn, s_vt, s_vh, s_on, s_ot, s_oh, s_ov, s_in, s_ih, s_fn, s_fh,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, I_K: tl.constexpr,
    I_V: tl.constexpr, F_K: tl.constexpr, F_V: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One sequence: its state from its one load to its one store.

    Args:
        p_has: whether it starts from its state, or None: it does.
        p_final: the slot that it writes, of ``final_slots``, or None: that of ``i_state``.
        i_state: where its state lies; row, length, slot: its first row, its rows, its first block.
        i_h, i_v: value head, block of value channels. The others are those of ``blocks_recurrence``.
    """
    r = tl.arange(0, ROWS)
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_state = m_v[:, None] & (o_k < K)[None, :]
    S = tl.zeros([BV, KP], tl.float32)
    if initial_state is not None:
        p_state = initial_state + i_state * s_in + i_h * s_ih
        p_state += o_v[:, None].to(tl.int64) * I_V + o_k[None, :].to(tl.int64) * I_K
        m_read = m_state if p_has is None else tl.where(starts_from_state(p_has, 0, 0), m_state, False)
        S = tl.load(p_state, mask=m_read, other=0.0).to(tl.float32)
    p_v = v + row * s_vn + i_h * s_vh + o_v[None, :]
    # Values are fetched a block ahead, here and below: the compiler does that only to what products take.
    next_v = tl.load(p_v + r[:, None].to(tl.int64) * s_vt, mask=(r < length)[:, None] & m_v[None, :], other=0.0)
    if OVERLAP:
        # Boundaries, indices and states are older than the kernel whose results are awaited.
        gdc_wait()
    p_o = o + row * s_on + i_h * s_oh + o_v[None, :].to(tl.int64) * s_ov
    o_plane = r[:, None] * KP + o_k[None, :]
    o_both = tl.arange(0, 2 * ROWS)[:, None] * KP + o_k[None, :]
    for i in tl.range(0, tl.cdiv(length, ROWS), num_stages=STAGES):
        rows = i * ROWS + r
        m_o = (rows < length)[:, None] & m_v[None, :]
        b_v = next_v.to(tl.float32)
        m_next = (rows + ROWS < length)[:, None] & m_v[None, :]
        next_v = tl.load(p_v + (rows + ROWS)[:, None].to(tl.int64) * s_vt, mask=m_next, other=0.0)
        at = (slot + i) * HV + i_h
        p_plane = planes + at * (PLANES * ROWS * KP)
        both = tl.load(p_plane + o_both)
        both_low = tl.load(p_plane + 2 * ROWS * KP + o_both)
        ka_high = tl.load(p_plane + 4 * ROWS * KP + o_plane)
        ka_low = tl.load(p_plane + 5 * ROWS * KP + o_plane)
        p_square = squares + at * (2 * ROWS * ROWS) + r[:, None] * ROWS + r[None, :]
        p_high = tl.load(p_square)
        p_low = tl.load(p_square + ROWS * ROWS)
        p_factor = factors + at * (3 * ROWS + KP)
        k_factor = tl.load(p_factor + r)
        a_factor = tl.load(p_factor + ROWS + r)
        q_factor = tl.load(p_factor + 2 * ROWS + r)
        decay = tl.load(p_factor + 3 * ROWS + o_k)
        rows = rows.to(tl.int64)

        s_high, s_low, s_factor = scaled_halves(S)
        # ke and qg at once: sixteen columns more cost the matrix unit nothing.
        known = product(s_high, s_low, tl.trans(both), tl.trans(both_low), None, True)
        known, b_o = tl.split(tl.permute(tl.reshape(known, [BV, 2, ROWS]), (0, 2, 1)))
        b_r = tl.fma(known * s_factor[:, None], -k_factor[None, :], tl.trans(b_v))
        r_high, r_low, r_factor = scaled_halves(b_r * a_factor[None, :])
        b_p = product(r_high, r_low, tl.trans(p_high), tl.trans(p_low), None, True)
        b_o = tl.fma(b_p, (r_factor * 2.0**TOP)[:, None], b_o * s_factor[:, None]) * q_factor[None, :]
        S = decayed(S, decay[None, :])
        S = tl.fma(product(r_high, r_low, ka_high, ka_low, None, True), r_factor[:, None], S)
        tl.store(p_o + rows[:, None] * s_ot, tl.trans(b_o).to(o.dtype.element_ty), mask=m_o)

    if final_state is not None:
        if p_final is not None:
            i_state = tl.load(p_final).to(tl.int64)
            m_state = tl.where(is_padding(i_state, pad_slot_id, final_slots), False, m_state)
        p_state = final_state + i_state * s_fn + i_h * s_fh
        p_state += o_v[:, None].to(tl.int64) * F_V + o_k[None, :].to(tl.int64) * F_K
        tl.store(p_state, S.to(final_state.dtype.element_ty), mask=m_state)


@triton.jit(
    do_not_specialize=["T", "N", "blocks", "s_index", "pad_slot_id", "slots", "s_has", "s_final", "final_slots"],
    do_not_specialize_on_alignment=["cu_seqlens", "indices", "has_state", "final_indices"],
)
def blocks_recurrence(
    planes, squares, factors,  # as in blocks_prepare
    v,  # [B, T, HV, V]
    initial_state,  # [N or slots of a pool, HV, K, V] (or [..., V, K]) or None
    final_state,  # likewise; the same tensor when it is advanced in place
    o,  # [B, T, HV, V]
    cu_seqlens,  # [N + 1] or None
    indices,  # [N] slots or None
    has_state,  # [N] bool or None
    final_indices,  # [N] slots of final_state, or None: indices
    T, N, blocks, s_vn, s_vt, s_vh, s_on, s_ot, s_oh, s_ov, s_in, s_ih, s_fn, s_fh,
    s_index: tl.int64, pad_slot_id: tl.int64, slots, s_has: tl.int64, s_final: tl.int64, final_slots,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    I_K: tl.constexpr, I_V: tl.constexpr, F_K: tl.constexpr, F_V: tl.constexpr, STAGES: tl.constexpr,
    STEP: tl.constexpr,  # packed: a program takes every STEP-th long sequence; 0: one each
    OVERLAP: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    # The last heads first: what was written for them last is still in the L2 cache.
    pid = tl.num_programs(0) - 1 - pid
    i_v = pid % BLOCKS
    i_h = (pid // BLOCKS % HV).to(tl.int64)
    i_n = (pid // (BLOCKS * HV)).to(tl.int64)
    given = (planes, squares, factors, v, initial_state, final_state, o)
    numbers = (pad_slot_id, final_slots, s_vn, s_vt, s_vh, s_on, s_ot, s_oh, s_ov, s_in, s_ih, s_fn, s_fh)
    if cu_seqlens is None:
        row = i_n
        length = tl.full([], 1, tl.int32) * T
        slot = i_n * blocks
        i_state = i_n
        if indices is not None:
            i_state = tl.load(indices + i_n * s_index).to(tl.int64)
            if is_padding(i_state, pad_slot_id, slots):
                if OVERLAP and pid == 0:
                    # One program waits, so that no kernel behind this one finds those before it still running.
                    gdc_wait()
                return
        p_has = has_state if has_state is None else has_state + i_n * s_has
        p_final = final_indices if final_indices is None else final_indices + i_n * s_final
        follow(
            *given, p_has, p_final, i_state, row, length, slot, i_h, i_v, *numbers, HV, K, V, KP, BV, I_K, I_V, F_K,
            F_V, STAGES, OVERLAP,
        )  # fmt: skip
    else:
        rank = i_n.to(tl.int32)
        while rank < N:
            n, before = locate(cu_seqlens, N, rank, False)
            rank = tl.where((n < N) & (STEP > 0), rank + STEP, N)
            if n < N:
                i_n = n.to(tl.int64)
                slot = before.to(tl.int64)
                row = tl.load(cu_seqlens + i_n).to(tl.int64)
                length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - row).to(tl.int32)
                i_state = i_n
                skip = n < 0
                if indices is not None:
                    i_state = tl.load(indices + i_n * s_index).to(tl.int64)
                    skip = is_padding(i_state, pad_slot_id, slots)
                p_has = has_state if has_state is None else has_state + i_n * s_has
                p_final = final_indices if final_indices is None else final_indices + i_n * s_final
                if not skip:
                    follow(
                        *given, p_has, p_final, i_state, row, length, slot, i_h, i_v, *numbers, HV, K, V, KP, BV, I_K,
                        I_V, F_K, F_V, STAGES, OVERLAP,
                    )  # fmt: skip
        if OVERLAP and pid == 0:
            # One program of those that found nothing waits, too.
            gdc_wait()

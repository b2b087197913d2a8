"""Sequential kernel of the forward: from ``prepare``'s tensors to outputs, final and intermediate states.

    r = v − ke S        o = o_scale · (qg S + P r)        S ← D ⊙ S + kAᵀ r

The state is held transposed, Sᵀ [BV, KP] in float32 registers, so that it (and r) is the left operand of every product:
wgmma takes left operands from registers, and no product waits for the state to pass through shared memory.

Grid: (N · HV, ceil(V / BV)); one program a sequence, value head and block of BV value channels. Index arithmetic is
int64 from the sequence up.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.packing import (
    checkpoint_slot,
    chunk_of_pieces,
    chunks_before,
    chunks_of_pieces,
    first_piece_of,
    is_padding,
    rows_of_sequence,
    starts_from_state,
)

_NUMBERS = [
    "T", "chunks", "HV", "s_vb", "s_ob", "s_index", "pad_slot_id", "slots", "s_has", "s_final", "final_slots",
    "o_scale", "s_row",
    "s_column", "columns", "checkpoint_slots", "every", "piece",
]  # fmt: skip
"""Parameters that the compiler must not look at: most of them change with the lengths of the sequences."""


@triton.jit
def _keep(pool, S, i_kept, i_h, o_v, o_k, m_k, s_n, s_h, s_k, s_v, V: tl.constexpr):
    """Store a state in slot ``i_kept`` of a pool; -1: nowhere."""
    p_kept = pool + i_kept * s_n + i_h * s_h
    p_kept += o_v[:, None].to(tl.int64) * s_v + o_k[None, :].to(tl.int64) * s_k
    m_kept = (o_v < tl.where(i_kept < 0, 0, V))[:, None] & m_k[None, :]
    tl.store(p_kept, S.to(pool.dtype.element_ty), mask=m_kept)


@triton.jit(do_not_specialize=_NUMBERS)
def recurrence(
    keys,  # [slots, HV, 3, C, KP]: a pointer, or a descriptor of [slots · HV · 3 · C, KP] by [C, KP]
    P,  # [slots, HV, C, C]: a pointer, or a descriptor of [slots · HV · C, C] by [C, C]
    D,  # [slots, HV, KP]
    v, o,  # [B, T, HV, V]
    initial_state,  # [N or slots of a pool, HV, K, V] (or [..., V, K]) or None
    final_state,  # likewise; the pool itself when indices is given
    h,  # [B, NT, HV, K, V] (or [..., V, K]) contiguous, or None
    cu_seqlens, indices, has_state,  # [N + 1], [N] and [N] bool, or None
    final_indices,  # [N] slots of final_state, or None: indices
    checkpoints,  # [N, columns] slots of checkpoint_pool, or None
    checkpoint_pool,  # [checkpoint_slots, HV, K, V] (or [..., V, K]) or None
    T,
    chunks,  # chunks of a dense sequence
    HV, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk, s_fv, s_index, pad_slot_id, slots,
    s_has, s_final, final_slots, s_cn, s_ch, s_ck, s_cv, s_row, s_column, columns, checkpoint_slots,
    every, piece,  # chunks, and rows, from checkpoint to checkpoint
    o_scale,  # what qg and P leave of the scale
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, LIFT: tl.constexpr, UNIT: tl.constexpr,
    V_FIRST: tl.constexpr,
    LAST_CONTIGUOUS: tl.constexpr,  # the states' last stride is 1
    PIECES: tl.constexpr,  # chunks begin anew behind each checkpoint
    LAST_STATE: tl.constexpr,  # of final states only the last sequence's is wanted, and stored as the only one
    BV: tl.constexpr,
    H_EVERY: tl.constexpr,  # a state goes to h every so many chunks
    DESCRIPTORS: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    i_n = (tl.program_id(0) // HV).to(tl.int64)
    i_h = (tl.program_id(0) % HV).to(tl.int64)
    i_v = tl.program_id(1)
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    o_r = tl.arange(0, C)
    m_k = o_k < K
    m_v = o_v < V

    i_b, bos, length, first_slot = rows_of_sequence(cu_seqlens, i_n, T, chunks, C)
    i_b *= UNIT
    i_state = i_n
    if indices is not None:
        i_state = tl.load(indices + i_n * s_index).to(tl.int64)
        if is_padding(i_state, pad_slot_id, slots):
            return

    if LAST_CONTIGUOUS:
        if V_FIRST:
            s_ik = 1
            s_fk = 1
            s_ck = 1
        else:
            s_iv = 1
            s_fv = 1
            s_cv = 1
    m_state = m_v[:, None] & m_k[None, :]
    S = tl.zeros([BV, KP], tl.float32)
    if initial_state is not None:
        p_state = initial_state + i_state * s_in + i_h * s_ih
        p_state += o_v[:, None].to(tl.int64) * s_iv + o_k[None, :].to(tl.int64) * s_ik
        m_read = m_state
        if has_state is not None:
            m_read = tl.where(starts_from_state(has_state, i_n, s_has), m_read, False)
        S = tl.load(p_state, mask=m_read, other=0.0).to(tl.float32)

    dtype = v.dtype.element_ty
    o_vr = o_r[:, None].to(tl.int64) * s_vt + o_v[None, :]
    o_or = o_r[:, None].to(tl.int64) * s_ot + o_v[None, :]
    p_v = v + i_b * s_vb + bos * s_vt + i_h * s_vh
    p_o = o + i_b * s_ob + bos * s_ot + i_h * s_oh
    rows_of_chunk = tl.full([], C, tl.int64)
    minus_one = tl.where(o_r[:, None] == o_r[None, :], -LIFT, 0.0).to(dtype)
    if h is not None:
        i_state_out = chunks_before(cu_seqlens, i_n, length, C * H_EVERY)
    count = tl.cdiv(length, C)
    if PIECES:
        count = chunks_of_pieces(length, piece, C)
        begin, first_piece = first_piece_of(cu_seqlens, i_n, bos, T, piece)
    for i in tl.range(0, count, num_stages=STAGES):
        slot = first_slot + i
        first = rows_of_chunk * i
        left = length - i * C
        if PIECES:
            # Chunks are few enough for 32 bits; with a division of 64 bits the kernel spills.
            first, left, slot = chunk_of_pieces(tl.cast(i, tl.int32), begin, first_piece, piece, C)
            left = tl.minimum(left, length - first)
        slot = slot * HV + i_h
        if DESCRIPTORS:
            row = slot.to(tl.int32) * (3 * C)
            k_e = keys.load([row, 0])
            q_g = keys.load([row + C, 0])
            k_a = keys.load([row + 2 * C, 0])
            b_p = P.load([slot.to(tl.int32) * C, 0])
        else:
            p_keys = keys + slot * (3 * C * KP) + (o_r[:, None] * KP + o_k[None, :])
            k_e = tl.load(p_keys)
            q_g = tl.load(p_keys + C * KP)
            k_a = tl.load(p_keys + 2 * C * KP)
            b_p = tl.load(P + slot * (C * C) + (o_r[:, None] * C + o_r[None, :]))
        b_d = tl.load(D + slot * KP + o_k)
        m_r = o_r < left
        m_o = m_r[:, None] & m_v[None, :]
        b_v = tl.load(p_v + first * s_vt + o_vr, mask=m_o, other=0.0)
        if h is not None:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
            if i % H_EVERY == 0:
                p_h = h + ((i_state_out + i // H_EVERY) * HV + i_h) * (K * V)
                if V_FIRST:
                    p_h += o_v[:, None] * K + o_k[None, :]
                else:
                    p_h += o_v[:, None] + o_k[None, :] * V
                tl.store(p_h, S.to(h.dtype.element_ty), mask=m_state)
        if checkpoints is not None:
            i_kept = checkpoint_slot(
                checkpoints, i_n, i, every, columns, s_row, s_column, pad_slot_id, checkpoint_slots
            )  # fmt: skip
            _keep(checkpoint_pool, S, i_kept, i_h, o_v, o_k, m_k, s_cn, s_ch, s_ck, s_cv, V)
        b_s = S.to(dtype)
        if dtype == tl.float32:
            b_r = tl.trans(b_v) - tl.dot(b_s, tl.trans(k_e), input_precision=DOT)
        else:
            # vᵀ enters through a product with −I (times LIFT), which is exact: only operands of products are fetched to
            # shared memory ahead of their use in 16-bit types, and no thread has to gather transposed elements.
            b_r = -tl.dot(b_s, tl.trans(k_e), tl.dot(tl.trans(b_v), minus_one)) * (1 / LIFT)
        b_r = b_r.to(dtype)
        b_o = tl.dot(b_s, tl.trans(q_g), input_precision=DOT) * (1 / LIFT)
        b_o = tl.dot(b_r, tl.trans(b_p), b_o, input_precision=DOT)
        S = tl.dot(b_r, k_a, S * b_d[None, :], input_precision=DOT)
        tl.store(p_o + first * s_ot + o_or, tl.trans((b_o * o_scale).to(o.dtype.element_ty)), mask=m_o)

    if checkpoints is not None:
        ends = length % (piece if PIECES else C) == 0
        i_kept = checkpoint_slot(
            checkpoints, i_n, tl.where(ends, count, 0), every, columns, s_row, s_column, pad_slot_id, checkpoint_slots
        )  # fmt: skip
        _keep(checkpoint_pool, S, i_kept, i_h, o_v, o_k, m_k, s_cn, s_ch, s_ck, s_cv, V)
    if LAST_STATE:
        if i_n < tl.num_programs(0) // HV - 1:
            return
        i_state -= i_n
    if final_state is not None:
        if final_indices is not None:
            i_state = tl.load(final_indices + i_n * s_final).to(tl.int64)
            m_state = tl.where(is_padding(i_state, pad_slot_id, final_slots), False, m_state)
        p_state = final_state + i_state * s_fn + i_h * s_fh
        p_state += o_v[:, None].to(tl.int64) * s_fv + o_k[None, :].to(tl.int64) * s_fk
        if (has_state is not None) | (final_indices is not None):
            # A sequence without tokens leaves its slot alone.
            m_state = tl.where(length > 0, m_state, False)
        tl.store(p_state, S.to(final_state.dtype.element_ty), mask=m_state)

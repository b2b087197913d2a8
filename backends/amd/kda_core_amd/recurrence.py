"""The sequential kernels: from ``prepare``'s tensors to outputs, final and intermediate states, and backwards.

    r = v − ke S        o = qg S + P r        z = X r        S ← D ⊙ S + kAᵀ r

A backward stores z of every row (the delta rule writes the rows β ⊙ z) and the state at the start of every slot, and no
outputs. The transitions of segments (``kda_core.triton_lib.segments``) store neither: b is what the recurrence makes of
no state, M what it makes of the identity without values.

``reverse_kernel`` finds dv of all rows and the gradient of the state at the end of every slot:

    dv = Pᵀ do + kA dS        dS ← D ⊙ dS + qgᵀ do − keᵀ dv

dS ends as the gradient of the initial state. With ``additions`` it only says what segments add to the gradients at
their starts.

The state is held transposed, Sᵀ [BV, KP] in float32 registers, so that it (and r) is the left operand of every product
and its accumulator: an accumulator's rows stay in the lanes that hold them, and turn into a left operand there. It is a
tuple of KP / BK blocks of key channels: a product holds the operands of one block at a time, which is what bounds its
registers on chips whose lanes hold whole rows of them.

Grid: N · HV · ceil(V / BV) programs along axis 0, one a sequence, value head and block of BV value channels. Blocks of
one head are N · HV apart: workgroups go round the dies of a chip in turn, and those that read the same keys then tend
to share a die's cache. Every offset is int64, from the program id up.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.packing import (
    checkpoint_slot,
    chunks_before,
    chunks_of_piece,
    chunks_of_pieces,
    first_piece_of,
    is_padding,
    rows_of_sequence,
    starts_from_state,
)
from kda_core.triton_lib.state_blocks import load_state, store_state

_NUMBERS = [
    "T", "chunks", "HV", "programs", "s_vb", "s_ob", "s_index", "pad_slot_id", "slots", "s_has", "s_final",
    "final_slots", "s_row", "s_column", "columns", "checkpoint_slots", "every", "piece",
]  # fmt: skip
"""Parameters that are not specialised: most of them change with the lengths of the sequences."""


@triton.jit(do_not_specialize=_NUMBERS)
def recurrence(
    keys,  # [slots, HV, 3, C, KP]
    P, X,  # [slots, HV, C, C]; P for o, X for z
    D,  # [slots, HV, KP]
    v, o,  # [B, T, HV, V]; o may be None
    z,  # [slots, HV, C, VP] or None
    states,  # [slots, HV, VP, KP] or None
    transitions,  # [N, HV, VP + KP, KP]: bᵀ and below it Mᵀ of sequences that are segments; or None
    initial_state,  # [N or slots of a pool, HV, K, V] (or [..., V, K]) or None
    final_state,  # likewise; the pool itself when indices is given
    h,  # [B, NT, HV, K, V] (or [..., V, K]) contiguous, or None
    cu_seqlens, indices, has_state,  # [N + 1], [N] and [N] bool, or None
    final_indices,  # [N] slots of final_state, or None: indices
    checkpoints,  # [N, columns] slots of checkpoint_pool, or None
    checkpoint_pool,  # [checkpoint_slots, HV, K, V] (or [..., V, K]) or None
    T, chunks,  # chunks of a dense sequence
    HV, programs,  # N · HV
    s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk, s_fv, s_index, pad_slot_id, slots,
    s_has, s_final, final_slots, s_cn, s_ch, s_ck, s_cv, s_row, s_column, columns, checkpoint_slots,
    every, piece,  # chunks, and rows, from checkpoint to checkpoint
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr,  # key channels of a block of the state
    C: tl.constexpr, LIFT: tl.constexpr,
    UNIT: tl.constexpr,  # batch strides are given in this many elements, so that alignment shows
    V_FIRST: tl.constexpr,
    PIECES: tl.constexpr,  # chunks begin anew behind each checkpoint
    H_EVERY: tl.constexpr,  # a state goes to h every so many chunks
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    i_v = pid // programs
    i_nh = pid % programs
    i_n = i_nh // HV
    i_h = i_nh % HV
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)  # past VP: a row of Mᵀ, which starts as one of the identity's and has no values
    o_r = tl.arange(0, C)
    m_v = o_v < V

    i_b, bos, length, first_slot = rows_of_sequence(cu_seqlens, i_n, T.to(tl.int64), chunks, C)
    i_b *= UNIT
    i_state = i_n
    if indices is not None:
        i_state = tl.load(indices + i_n * s_index).to(tl.int64)
        if is_padding(i_state, pad_slot_id, slots):
            return

    p_state = initial_state
    if initial_state is not None:
        p_state += i_state * s_in + i_h * s_ih
    m_read = m_v
    if has_state is not None:
        m_read = tl.where(starts_from_state(has_state, i_n, s_has), m_read, False)
    S = load_state(p_state, o_v, m_read, s_ik, s_iv, K, KP, BV, BK)
    if transitions is not None:
        S = ()
        for i_k in tl.static_range(KP // BK):
            S += (((o_v - VP)[:, None] == (i_k * BK + o_k)[None, :]).to(tl.float32),)

    dtype = v.dtype.element_ty
    count = (length + C - 1) // C
    if PIECES:
        piece = tl.cast(piece, tl.int64)  # enters addresses
        count = chunks_of_pieces(length, piece, C)
        begin, first_piece = first_piece_of(cu_seqlens, i_n, bos, T, piece)
        first_slot *= 0  # each chunk has its own
        each = chunks_of_piece(piece, C)
        at = tl.zeros_like(i_n)
        within = tl.zeros_like(i_n)
    v += i_b * s_vb + bos * s_vt + i_h * s_vh
    o_row = o_r.to(tl.int64)[None, :]
    o_vr = o_row * s_vt + o_v[:, None]
    if o is not None:
        o += i_b * s_ob + bos * s_ot + i_h * s_oh
        o_or = o_row * s_ot + o_v[:, None]
    o_cc = o_r[None, :] * C + o_r[:, None]
    o_ck = o_r[:, None] * KP + o_k[None, :]
    o_kc = o_r[None, :] * KP + o_k[:, None]
    o_s = o_v[:, None] * KP + o_k[None, :]
    if h is not None:
        h += (chunks_before(cu_seqlens, i_n, length, C * H_EVERY) * HV + i_h) * (K * V)
        if V_FIRST:
            h += i_v * (BV * K)
        else:
            h += i_v * BV
    # Masks and offsets are formed again in every chunk: kept across chunks they would fill the registers.
    for i in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        i_chunk = tl.cast(i, tl.int64)  # plain Python numbers in the interpreter
        first = i_chunk * C
        left = length - first
        if PIECES:
            first = at + within * C
            left = tl.minimum(piece - within * C, length - first)
            i_chunk = (begin + at) // C + first_piece + within
        i_slot = (first_slot + i_chunk) * HV + i_h
        p_keys = keys + i_slot * (3 * C * KP)
        m_row = (o_r < left)[None, :] & m_v[:, None]
        b_v = tl.load(v + first * s_vt + o_vr, mask=m_row, other=0.0).to(tl.float32)
        if h is not None:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
            if i % H_EVERY == 0:
                p_h = h + (i_chunk // H_EVERY) * HV * (K * V)
                o_block = tl.arange(0, BV)
                for i_k in tl.static_range(KP // BK):
                    if V_FIRST:
                        o_h = o_block[:, None] * K + (i_k * BK + o_k)[None, :]
                    else:
                        o_h = o_block[:, None] + (i_k * BK + o_k)[None, :] * V
                    m_state = m_v[:, None] & (i_k * BK + o_k < K)[None, :]
                    tl.store(p_h + o_h, S[i_k].to(h.dtype.element_ty), mask=m_state)
        if checkpoints is not None:
            i_kept = checkpoint_slot(
                checkpoints, i_n, i, every, columns, s_row, s_column, pad_slot_id, checkpoint_slots
            )  # fmt: skip
            if i_kept >= 0:
                store_state(checkpoint_pool + i_kept * s_cn + i_h * s_ch, S, o_v, m_v, s_ck, s_cv, K, KP, BK)
        b_o = tl.zeros([BV, C], tl.float32)
        known = tl.zeros([BV, C], tl.float32)
        for i_k in tl.static_range(KP // BK):
            b_s = S[i_k].to(dtype)
            if states is not None:
                tl.store(states + i_slot * (VP * KP) + i_k * BK + o_s, b_s)
            if o is not None:
                b_o = tl.dot(b_s, tl.load(p_keys + C * KP + i_k * BK + o_kc), b_o, input_precision=DOT)
            known = tl.dot(b_s, tl.load(p_keys + i_k * BK + o_kc), known, input_precision=DOT)
        if LIFT != 1:
            b_o *= 1 / LIFT
            known *= 1 / LIFT
        b_r = (b_v - known).to(dtype)
        if z is not None:
            b_z = tl.dot(b_r, tl.load(X + i_slot * (C * C) + o_cc), input_precision=DOT)
            tl.store(z + i_slot * (C * VP) + o_r[None, :] * VP + o_v[:, None], b_z.to(dtype))
        if o is not None:
            b_o = tl.dot(b_r, tl.load(P + i_slot * (C * C) + o_cc), b_o, input_precision=DOT)
        after = ()
        for i_k in tl.static_range(KP // BK):
            decayed = S[i_k] * tl.load(D + i_slot * KP + o_k + i_k * BK)[None, :]
            b_ka = tl.load(p_keys + 2 * C * KP + i_k * BK + o_ck)
            after += (tl.dot(b_r, b_ka, decayed, input_precision=DOT),)
        S = after
        if o is not None:
            tl.store(o + first * s_ot + o_or, b_o.to(o.dtype.element_ty), mask=m_row)
        if PIECES:
            # Counted: with ``chunk_of_pieces``, whose divisions are of 64 bits, lanes of RDNA spill.
            within += 1
            ends = within == each
            at += tl.where(ends, piece, 0)
            first_piece += tl.where(ends, 1, 0)
            within = tl.where(ends, 0, within)

    if checkpoints is not None:
        ends = length % (piece if PIECES else C) == 0
        i_kept = checkpoint_slot(
            checkpoints, i_n, tl.where(ends, count, 0), every, columns, s_row, s_column, pad_slot_id, checkpoint_slots
        )  # fmt: skip
        if i_kept >= 0:
            store_state(checkpoint_pool + i_kept * s_cn + i_h * s_ch, S, o_v, m_v, s_ck, s_cv, K, KP, BK)
    if transitions is not None:
        store_state(transitions + i_nh * ((VP + KP) * KP), S, o_v, o_v < VP + KP, 1, KP, KP, KP, BK)
    if final_state is not None:
        if final_indices is not None:
            i_state = tl.load(final_indices + i_n * s_final).to(tl.int64)
            m_v = tl.where(is_padding(i_state, pad_slot_id, final_slots), False, m_v)
        if (has_state is not None) | (final_indices is not None):
            # A sequence without tokens leaves its slot alone.
            m_v = tl.where(length > 0, m_v, False)
        store_state(final_state + i_state * s_fn + i_h * s_fh, S, o_v, m_v, s_fk, s_fv, K, KP, BK)


@triton.jit(do_not_specialize=["T", "chunks", "HV", "programs", "s_ob", "s_vb"])
def reverse_kernel(
    keys,  # [slots, HV, 3, C, KP]
    P,  # [slots, HV, C, C]
    D,  # [slots, HV, KP]
    do,  # [B, T, HV, V]
    grad_final_state,  # [N, HV, K, V] (or [..., V, K]) or None
    dv,  # [B, T, HV, V]; with additions None, as state_grads
    state_grads,  # [slots, HV, VP, KP]
    grad_initial_state,  # as grad_final_state
    additions,  # [N, HV, VP, KP] of sequences that are segments; or None
    cu_seqlens,  # [N + 1] or None
    T, chunks,  # chunks of a dense sequence
    HV, programs,  # N · HV
    s_ob, s_ot, s_oh, s_vb, s_vt, s_vh, s_fn, s_fh, s_fk, s_fv, s_in, s_ih, s_ik, s_iv,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr,  # key channels of a block of the state
    C: tl.constexpr, LIFT: tl.constexpr,
    UNIT: tl.constexpr,  # batch strides are given in this many elements, so that alignment shows
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    i_v = pid // programs
    i_n = pid % programs // HV
    i_h = pid % programs % HV
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_r = tl.arange(0, C)
    m_v = o_v < V
    p_state = grad_final_state
    i_b, bos, length, first_slot = rows_of_sequence(cu_seqlens, i_n, T.to(tl.int64), chunks, C)
    if grad_final_state is not None:
        p_state += i_n * s_fn + i_h * s_fh
    dS = load_state(p_state, o_v, m_v, s_fk, s_fv, K, KP, BV, BK)

    dtype = do.dtype.element_ty
    do += i_b * UNIT * s_ob
    do += bos * s_ot + i_h * s_oh
    if dv is not None:
        dv += i_b * UNIT * s_vb + bos * s_vt + i_h * s_vh
    o_row = o_r.to(tl.int64)[None, :]
    o_or = o_row * s_ot + o_v[:, None]
    if dv is not None:
        o_vr = o_row * s_vt + o_v[:, None]
    o_ck = o_r[:, None] * KP + o_k[None, :]
    o_kc = o_r[None, :] * KP + o_k[:, None]
    o_cc = o_r[:, None] * C + o_r[None, :]
    o_s = o_v[:, None] * KP + o_k[None, :]
    count = (length + C - 1) // C
    # Masks and offsets are formed again in every chunk: kept across chunks they would fill the registers.
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        i = count - 1 - j
        i_row = i * C
        i_chunk = (first_slot + i) * HV + i_h
        m_row = (o_r < length - i_row)[None, :] & m_v[:, None]
        b_do = tl.load(do + i_row * s_ot + o_or, mask=m_row, other=0.0)
        p_keys = keys + i_chunk * (3 * C * KP)
        b_dv = tl.zeros([BV, C], tl.float32)
        for i_k in tl.static_range(KP // BK):
            b_s = dS[i_k].to(dtype)
            if state_grads is not None:
                tl.store(state_grads + i_chunk * (VP * KP) + i_k * BK + o_s, b_s)
            b_dv = tl.dot(b_s, tl.load(p_keys + 2 * C * KP + i_k * BK + o_kc), b_dv, input_precision=DOT)
        b_dv = tl.dot(b_do, tl.load(P + i_chunk * (C * C) + o_cc), b_dv, input_precision=DOT).to(dtype)
        if dv is not None:
            tl.store(dv + i_row * s_vt + o_vr, b_dv, mask=m_row)
        before = ()
        for i_k in tl.static_range(KP // BK):
            # One address and a block's channels: a block of addresses would fill registers.
            block = dS[i_k] * tl.load(D + i_chunk * KP + i_k * BK + o_k)[None, :]
            if LIFT != 1:
                block *= LIFT
            block = tl.dot(b_do, tl.load(p_keys + C * KP + i_k * BK + o_ck), block, input_precision=DOT)
            block -= tl.dot(b_dv, tl.load(p_keys + i_k * BK + o_ck), input_precision=DOT)
            if LIFT != 1:
                block *= 1 / LIFT
            before += (block,)
        dS = before
    if grad_initial_state is not None:
        store_state(grad_initial_state + i_n * s_in + i_h * s_ih, dS, o_v, m_v, s_ik, s_iv, K, KP, BK)
    if additions is not None:
        store_state(additions + pid % programs * (VP * KP), dS, o_v, o_v < VP, 1, KP, KP, KP, BK)

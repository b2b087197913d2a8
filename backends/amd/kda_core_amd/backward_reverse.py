"""The reverse recurrence: dv of all rows and the gradient of the state at the end of every slot.

    dv = Pᵀ do + kA dS        dS ← D ⊙ dS + qgᵀ do − keᵀ dv

dS is held transposed, in blocks as the state in ``recurrence``, and ends as the gradient of the initial state. Grid and
block order are those of ``recurrence``. Every offset is int64, from the program id up.

With ``additions`` it only says what segments add to the gradients at their starts (``kda_core.triton_lib.segments``).
"""

import triton
import triton.language as tl

from kda_core.triton_lib.packing import rows_of_sequence
from kda_core.triton_lib.state_blocks import load_state, store_state


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

"""Forward recurrence of the backward: z of every row and the state at the start of every slot.

    r = v − ke S        z = X r        S ← D ⊙ S + kAᵀ r

(The delta rule writes the rows β ⊙ z.) The state is held transposed, in blocks, as in ``recurrence``, whose
grid and block order this kernel shares. Every offset is int64, from the program id up.

The same recurrence gives the transitions of segments (``kda_core.triton_lib.segments``): b is what it makes of no
state, M what it makes of the identity without values. Neither z nor states are stored then.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.packing import rows_of_sequence
from kda_core.triton_lib.state_blocks import load_state, store_state
from kda_core_amd.recurrence import step


@triton.jit(do_not_specialize=["T", "chunks", "HV", "programs", "s_vb"])
def states_kernel(
    keys,  # [slots, HV, 3, C, KP]
    X,  # [slots, HV, C, C]; of transitions None, as z and states
    D,  # [slots, HV, KP]
    v,  # [B, T, HV, V]
    initial_state,  # [N, HV, K, V] (or [..., V, K]) or None
    z,  # [slots, HV, C, VP]
    states,  # [slots, HV, VP, KP]
    transitions,  # [N, HV, VP + KP, KP]: bᵀ and below it Mᵀ of sequences that are segments; or None
    cu_seqlens,  # [N + 1] or None
    T, chunks,  # chunks of a dense sequence
    HV, programs,  # N · HV
    s_vb, s_vt, s_vh, s_in, s_ih, s_ik, s_iv,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr,  # key channels of a block of the state
    C: tl.constexpr, LIFT: tl.constexpr,
    UNIT: tl.constexpr,  # the batch stride is given in this many elements, so that alignment shows
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    i_v = pid // programs
    i_n = pid % programs // HV
    i_h = pid % programs % HV
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)  # past VP: a row of Mᵀ, which starts as one of the identity's and has no values
    o_r = tl.arange(0, C)
    m_v = o_v < V
    p_state = initial_state
    i_b, bos, length, first_slot = rows_of_sequence(cu_seqlens, i_n, T.to(tl.int64), chunks, C)
    if initial_state is not None:
        p_state += i_n * s_in + i_h * s_ih
    S = load_state(p_state, o_v, m_v, s_ik, s_iv, K, KP, BV, BK)
    if transitions is not None:
        S = ()
        for i_k in tl.static_range(KP // BK):
            S += (((o_v - VP)[:, None] == (i_k * BK + o_k)[None, :]).to(tl.float32),)

    dtype = v.dtype.element_ty
    v += i_b * UNIT * s_vb
    v += bos * s_vt + i_h * s_vh
    o_vr = o_r.to(tl.int64)[None, :] * s_vt + o_v[:, None]
    o_ck = o_r[:, None] * KP + o_k[None, :]
    o_kc = o_r[None, :] * KP + o_k[:, None]
    o_cc = o_r[None, :] * C + o_r[:, None]
    o_zr = o_r[None, :] * VP + o_v[:, None]
    o_s = o_v[:, None] * KP + o_k[None, :]
    # Masks and offsets are formed again in every chunk: kept across chunks they would fill the registers.
    for i in tl.range(0, (length + C - 1) // C, num_stages=STAGES, disable_licm=True):
        i_row = tl.cast(i, tl.int64) * C
        i_chunk = (first_slot + tl.cast(i, tl.int64)) * HV + i_h
        m_row = (o_r < length - i_row)[None, :] & m_v[:, None]
        b_v = tl.load(v + i_row * s_vt + o_vr, mask=m_row, other=0.0).to(tl.float32)
        p_keys = keys + i_chunk * (3 * C * KP)
        known = tl.zeros([BV, C], tl.float32)
        for i_k in tl.static_range(KP // BK):
            b_s = S[i_k].to(dtype)
            if states is not None:
                tl.store(states + i_chunk * (VP * KP) + i_k * BK + o_s, b_s)
            known = tl.dot(b_s, tl.load(p_keys + i_k * BK + o_kc), known, input_precision=DOT)
        if LIFT != 1:
            known *= 1 / LIFT
        b_r = (b_v - known).to(dtype)
        if z is not None:
            b_z = tl.dot(b_r, tl.load(X + i_chunk * (C * C) + o_cc), input_precision=DOT)
            tl.store(z + i_chunk * (C * VP) + o_zr, b_z.to(dtype))
        S = step(S, b_r, p_keys, D + i_chunk * KP + o_k, o_ck, C, KP, BK, DOT)
    if transitions is not None:
        p_out = transitions + (i_n * HV + i_h) * ((VP + KP) * KP)
        store_state(p_out, S, o_v, o_v < VP + KP, 1, KP, KP, KP, BK)

"""Sequential kernel of the forward: from ``prepare``'s tensors to outputs, final and intermediate states.

    r = v − ke S        o = qg S + P r        S ← D ⊙ S + kAᵀ r

The state is held transposed, Sᵀ [BV, KP] in float32 registers, so that it (and r) is the left operand of every product
and its accumulator: an accumulator's rows stay in the lanes that hold them, and turn into a left operand there.

Grid: N · HV · ceil(V / BV) programs along axis 0, one a sequence, value head and block of BV value channels. Blocks of
one head are N · HV apart: workgroups go round the dies of a chip in turn, and those that read the same keys then tend
to share a die's cache. Every offset is int64, from the program id up.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.packing import chunks_before

_NUMBERS = ["T", "chunks", "HV", "programs", "s_vb", "s_ob", "s_index", "pad_slot_id"]
"""Parameters that the compiler must not look at: most of them change with the lengths of the sequences."""


@triton.jit
def state_offsets(o_v, o_k, s_k, s_v):
    """Offsets of a transposed block [BV, KP] inside one state; o_v is int64."""
    return o_v[:, None] * s_v + o_k[None, :].to(tl.int64) * s_k


@triton.jit(do_not_specialize=_NUMBERS)
def recurrence(
    keys,  # [slots, HV, 3, C, KP]
    P,  # [slots, HV, C, C]
    D,  # [slots, HV, KP]
    v,  # [B, T, HV, V]
    o,  # [B, T, HV, V]
    initial_state,  # [N or slots of a pool, HV, K, V] (or [..., V, K]) or None
    final_state,  # likewise; the pool itself when indices is given
    h,  # [B, NT, HV, K, V] (or [..., V, K]) contiguous, or None
    cu_seqlens,  # [N + 1] or None
    indices,  # [N] or None
    T,
    chunks,  # chunks of a dense sequence
    HV,
    programs,  # N · HV
    s_vb,
    s_vt,
    s_vh,
    s_ob,
    s_ot,
    s_oh,
    s_in,
    s_ih,
    s_ik,
    s_iv,
    s_fn,
    s_fh,
    s_fk,
    s_fv,
    s_index,
    pad_slot_id,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    UNIT: tl.constexpr,  # batch strides are given in this many elements, so that alignment shows
    V_FIRST: tl.constexpr,
    H_EVERY: tl.constexpr,  # a state goes to h every so many chunks
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_v = pid // programs
    i_nh = pid % programs
    i_n = i_nh // HV
    i_h = i_nh % HV
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    o_r = tl.arange(0, C)
    m_k = o_k < K
    m_v = o_v < V

    if cu_seqlens is None:
        i_b = i_n * UNIT
        bos = tl.zeros_like(i_n)
        length = T.to(tl.int64)
        first_slot = i_n * chunks
    else:
        i_b = tl.zeros_like(i_n)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos
        first_slot = bos // C + i_n
    i_state = i_n
    if indices is not None:
        i_state = tl.load(indices + i_n * s_index).to(tl.int64)
        if (i_state < 0) | (i_state == pad_slot_id):
            return

    m_state = m_v[:, None] & m_k[None, :]
    S = tl.zeros([BV, KP], tl.float32)
    if initial_state is not None:
        p_state = initial_state + i_state * s_in + i_h * s_ih + state_offsets(o_v, o_k, s_ik, s_iv)
        S = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)

    dtype = v.dtype.element_ty
    first_chunk = first_slot * HV + i_h
    keys += first_chunk * (3 * C * KP)
    P += first_chunk * (C * C)
    D += first_chunk * KP
    v += i_b * s_vb + bos * s_vt + i_h * s_vh
    o += i_b * s_ob + bos * s_ot + i_h * s_oh
    o_row = o_r.to(tl.int64)[None, :]
    o_vr = o_row * s_vt + o_v[:, None]
    o_or = o_row * s_ot + o_v[:, None]
    o_ck = o_r[:, None] * KP + o_k[None, :]
    o_kc = o_r[None, :] * KP + o_k[:, None]
    if h is not None:
        h += (chunks_before(cu_seqlens, i_n, length, C * H_EVERY) * HV + i_h) * (K * V)
        if V_FIRST:
            h += i_v * (BV * K)
        else:
            h += i_v * BV
    # Masks and offsets formed anew in every chunk: kept from one to the next they would fill the registers.
    for i in tl.range(0, (length + C - 1) // C, num_stages=STAGES, disable_licm=True):
        i_chunk = tl.cast(i, tl.int64)  # plain Python numbers in the interpreter
        p_keys = keys + i_chunk * HV * (3 * C * KP)
        first = i_chunk * C
        m_row = (o_r < length - first)[None, :] & m_v[:, None]
        b_v = tl.load(v + first * s_vt + o_vr, mask=m_row, other=0.0).to(tl.float32)
        b_d = tl.load(D + i_chunk * HV * KP + o_k)
        b_s = S.to(dtype)
        if h is not None:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
            if i % H_EVERY == 0:
                p_h = h + (i_chunk // H_EVERY) * HV * (K * V)
                o_block = tl.arange(0, BV)
                if V_FIRST:
                    o_h = o_block[:, None] * K + o_k[None, :]
                else:
                    o_h = o_block[:, None] + o_k[None, :] * V
                tl.store(p_h + o_h, S.to(h.dtype.element_ty), mask=m_state)
        b_o = tl.dot(b_s, tl.load(p_keys + C * KP + o_kc), input_precision=DOT)
        b_r = (b_v - tl.dot(b_s, tl.load(p_keys + o_kc), input_precision=DOT)).to(dtype)
        b_p = tl.load(P + i_chunk * HV * (C * C) + (o_r[None, :] * C + o_r[:, None]))
        b_o = tl.dot(b_r, b_p, b_o, input_precision=DOT)
        S = tl.dot(b_r, tl.load(p_keys + 2 * C * KP + o_ck), S * b_d[None, :], input_precision=DOT)
        tl.store(o + first * s_ot + o_or, b_o.to(o.dtype.element_ty), mask=m_row)

    if final_state is not None:
        p_state = final_state + i_state * s_fn + i_h * s_fh + state_offsets(o_v, o_k, s_fk, s_fv)
        tl.store(p_state, S.to(final_state.dtype.element_ty), mask=m_state)

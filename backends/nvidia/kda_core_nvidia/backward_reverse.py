"""The reverse recurrence: dv of all tokens and the gradient of the state at the end of every slot.

    dv = Pᵀ do + kX dS      dS <- Diag(D) dS + qgᵀ do - keᵀ dv

Grid: (ceil(VP / BV), N · HV), as in backward_states; dS is held transposed, [BV, KP], and ends as the gradient of the
initial state. dv: [B, T, HV, V] in v's dtype, finished; state_grads: [slots, HV, VP, KP].
"""

import triton
import triton.language as tl

from kda_core_nvidia.backward_states import load_state, slots_of, store_state


@triton.jit(do_not_specialize=["T", "T_row", "NT"])
def reverse_kernel(
    ke, qg, kx, P, decay, do, grad_final_state, dv, state_grads, grad_initial_state,
    first_slot, cu_seqlens, do_b, do_t, do_h, T, T_row, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, HAS_DO: tl.constexpr, HAS_FINAL: tl.constexpr,
    WANT_INITIAL: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    i_v = tl.program_id(0)
    i_nh = tl.program_id(1)
    i_n = i_nh // HV
    i_h = i_nh % HV
    dt = qg.dtype.element_ty
    slot0, n_slots = slots_of(i_n, first_slot, cu_seqlens, NT, C, VARLEN)
    if VARLEN:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
        do += bos * do_t + i_h * do_h
        dv += (bos * HV + i_h) * V
    else:
        i_b = i_n.to(tl.int64)
        length = T
        do += i_b * do_b + i_b * T_row * do_t + i_h * do_h
        dv += (i_b * T * HV + i_h) * V
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    o_ck = o_c[:, None] * KP + o_k[None, :]
    o_cc = o_c[:, None] * C + o_c[None, :]
    o_s = o_v[:, None] * KP + o_k[None, :]
    b_s = tl.zeros([BV, KP], tl.float32)
    if HAS_FINAL:
        b_s = load_state(grad_final_state, i_nh, o_v, o_k, K, V, V_FIRST)
    block0 = slot0.to(tl.int64) * HV + i_h
    for j in tl.range(0, n_slots, num_stages=STAGES):
        i = n_slots - 1 - j
        block = block0 + tl.cast(i, tl.int64) * HV
        b_ke = tl.load(ke + block * (C * KP) + o_ck)
        b_kx = tl.load(kx + block * (C * KP) + o_ck)
        b_d = tl.load(decay + block * KP + o_k)
        t = i * C + o_c
        m_cv = (t < length)[:, None] & (o_v < V)[None, :]
        b_sh = b_s.to(dt)
        tl.store(state_grads + block * (KP * VP) + o_s, b_sh)
        b_dv = tl.dot(b_sh, tl.trans(b_kx), input_precision=PRECISION)
        b_s *= b_d[None, :]
        if HAS_DO:
            o_do = tl.cast(i, tl.int64) * C * do_t + o_c[:, None] * do_t + o_v[None, :]
            b_do = tl.trans(tl.load(do + o_do, mask=m_cv, other=0.0).to(dt))
            b_p = tl.load(P + block * (C * C) + o_cc)
            b_qg = tl.load(qg + block * (C * KP) + o_ck)
            b_dv = tl.dot(b_do, b_p, b_dv, input_precision=PRECISION)
            b_s = tl.dot(b_do, b_qg, b_s, input_precision=PRECISION)
        b_dv = b_dv.to(dt)
        b_s = tl.dot(-b_dv, b_ke, b_s, input_precision=PRECISION)
        o_dv = tl.cast(i, tl.int64) * (C * HV * V) + o_c[:, None] * (HV * V) + o_v[None, :]
        tl.store(dv + o_dv, tl.trans(b_dv), mask=m_cv)
    if WANT_INITIAL:
        store_state(grad_initial_state, b_s, i_nh, o_v, o_k, K, V, V_FIRST)

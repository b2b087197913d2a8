"""The reverse recurrence: dv of all tokens and the gradient of the state at the end of every slot.

    dv = Pᵀ do + kA dS      dS ← D ⊙ dS + qgᵀ do − keᵀ dv

qg and P hold a power of two of the scale (``split_scale``), and the rest, ``o_scale``, belongs to do: all is divided by
it on the way, dv and the initial state's gradient are multiplied at their end, the stored dS are not. dS is held times
LIFT, as qg and ke come, and stored without it.

Grid: N · HV · VP / BV, as in backward_states; dS is held transposed, [BV, KP], and ends as the gradient of the
initial state. dv: [B, T, HV, V] in v's dtype, finished; state_grads: [slots, HV, VP, KP].

With EVERY_SECOND only the gradient at the end of every pair of chunks is stored, [pairs, HV, VP, KP], and at the end of
a last chunk that is alone in its pair.

``recurrences_kernel`` runs it and ``backward_states``, which goes from a sequence's start to its end, in one launch:
neither reads what the other writes. With few sequences and heads each of them leaves multiprocessors idle, and both
together take as long as one. Grid: the programs of states, then those of reverse.

The transitions of segments are the same launch, without X: then the gradient at a segment's start is stored in
``additions``, and dv and the gradients at the ends of slots are not. A forward has no do, and no programs of reverse.
"""

import triton
import triton.language as tl

from kda_core_nvidia.backward_states import load_state, rows_of, states_of_sequence, store_state


@triton.jit
def reverse_of_sequence(
    program, keys, P, D, do, grad_final_state, dv, state_grads, grad_initial_state, additions, cu_seqlens,
    s_ob, s_ot, s_oh, T, T_row, NT, o_scale,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LIFT: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, EVERY_SECOND: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = VP // BV
    i_v = program % NV
    i_nh = program // NV
    i_h = i_nh % HV
    dt = keys.dtype.element_ty
    slot0, length, first, row = rows_of(i_nh // HV, cu_seqlens, T, T_row, NT, s_ob, s_ot, C)
    pair0, _, _, _ = rows_of(i_nh // HV, cu_seqlens, T, T_row, (NT + 1) // 2, s_ob, s_ot, 2 * C)
    do += first + i_h.to(tl.int64) * s_oh
    if dv is not None:
        dv += (row * HV + i_h) * V
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    o_ck = o_c[:, None] * KP + o_k[None, :]
    o_cc = o_c[:, None] * C + o_c[None, :]
    o_s = o_v[:, None] * KP + o_k[None, :]
    b_s = tl.zeros([BV, KP], tl.float32)
    if grad_final_state is not None:
        # A gradient that passes through an empty sequence is not rounded by two factors.
        into = tl.where(length == 0, 1.0, LIFT / o_scale)
        b_s = load_state(grad_final_state, i_nh, o_v, o_k, K, V, V_FIRST) * into
    last = tl.cdiv(length, C) - 1
    for j in tl.range(0, last + 1, num_stages=STAGES):
        i = last - j
        block = (slot0 + i) * HV + i_h
        p_keys = keys + block * (3 * C * KP)
        b_ke = tl.load(p_keys + o_ck)
        b_ka = tl.load(p_keys + 2 * C * KP + o_ck)
        b_d = tl.load(D + block * KP + o_k)
        m_cv = (i * C + o_c < length)[:, None] & (o_v < V)[None, :]
        b_sh = (b_s * (1 / LIFT)).to(dt)
        if EVERY_SECOND:
            pair = (pair0 + i // 2) * HV + i_h
            chunk = tl.full([BV], i, tl.int32)
            ends_pair = (chunk % 2 == 1) | (chunk == last)
            tl.store(state_grads + pair * (KP * VP) + o_s, b_sh, mask=ends_pair[:, None])
        elif state_grads is not None:
            tl.store(state_grads + block * (KP * VP) + o_s, b_sh)
        b_dv = tl.dot(b_sh, tl.trans(b_ka), input_precision=PRECISION)
        b_s *= b_d[None, :]
        o_do = tl.cast(i, tl.int64) * C * s_ot + o_c[:, None] * s_ot + o_v[None, :]
        b_do = tl.trans(tl.load(do + o_do, mask=m_cv, other=0.0).to(dt))
        b_p = tl.load(P + block * (C * C) + o_cc)
        b_qg = tl.load(p_keys + C * KP + o_ck)
        b_dv = tl.dot(b_do, b_p, b_dv, input_precision=PRECISION)
        b_s = tl.dot(b_do, b_qg, b_s, input_precision=PRECISION)
        b_s = tl.dot(-b_dv.to(dt), b_ke, b_s, input_precision=PRECISION)
        if dv is not None:
            o_dv = tl.cast(i, tl.int64) * (C * HV * V) + o_c[:, None] * (HV * V) + o_v[None, :]
            tl.store(dv + o_dv, tl.trans((b_dv * o_scale).to(dt)), mask=m_cv)
    if grad_initial_state is not None:
        back = tl.where(length == 0, 1.0, o_scale * (1 / LIFT))
        store_state(grad_initial_state, b_s * back, i_nh, o_v, o_k, K, V, V_FIRST)
    if additions is not None:
        tl.store(additions + i_nh.to(tl.int64) * (VP * KP) + o_s, b_s * (o_scale * (1 / LIFT)))


@triton.jit(do_not_specialize=["T", "T_row", "NT", "o_scale", "programs"])
def recurrences_kernel(
    v, do,  # [B, T, HV, V], rows as their strides say; do may be None
    keys,  # [slots, HV, 3, C, KP]: ke, qg and kA
    X, P,  # [slots, HV, C, C]; of transitions X is None, as z, states, state_grads and dv
    D,  # [slots, HV, KP]
    initial_state, grad_final_state,  # [N, HV, K, V] ([N, HV, V, K]), or None
    z,  # [slots, HV, C, VP], or by pairs
    states, state_grads,  # [slots, HV, VP, KP], or by pairs
    dv,  # [B, T, HV, V]
    grad_initial_state,  # as initial_state, or None
    transitions,  # [N, HV, VP + KP, KP] float32: [bᵀ | Mᵀ] of sequences that are segments; or None
    additions,  # [N, HV, VP, KP] float32: what they add to gradients of states at their starts; or None
    cu_seqlens,  # [N + 1] or None
    s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, T, T_row, NT, o_scale,
    programs,  # of states; as many of reverse follow
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LIFT: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BV: tl.constexpr, V_AS_OPERAND: tl.constexpr, V_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, EVERY_SECOND: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < programs:
        states_of_sequence(
            tl.program_id(0), v, keys, X, D, initial_state, z, states, transitions, cu_seqlens, s_vb, s_vt, s_vh, T,
            T_row, NT, HV, K, V, C, LIFT, KP, VP, BV, V_AS_OPERAND, V_FIRST, PRECISION, STAGES, EVERY_SECOND,
        )  # fmt: skip
    elif do is not None:
        reverse_of_sequence(
            tl.program_id(0) - programs, keys, P, D, do, grad_final_state, dv, state_grads, grad_initial_state,
            additions, cu_seqlens, s_ob, s_ot, s_oh, T, T_row, NT, o_scale,
            HV, K, V, C, LIFT, KP, VP, BV, V_FIRST, PRECISION, STAGES, EVERY_SECOND,
        )  # fmt: skip

"""The forward recurrence of the backward: scaled residuals z of all tokens and the state at the start of every slot.

    r = v − ke S      z = X r      S ← D ⊙ S + kAᵀ r

(β ⊙ z are the values that the delta rule writes.) Grid: N · HV · VP / BV, along the axis that takes more than 65,535;
one program runs a head's sequence for BV value channels. The state is held transposed, [BV, KP], in registers: it is
the A operand of both products, and A operands need not pass through shared memory. Inputs: ``triton_lib.layout``.
z: [slots, HV, C, VP]; states: [slots, HV, VP, KP].

The same recurrence gives the transitions of segments (``triton_lib.segments``): b is what it makes of no state, M what
it makes of the identity without values. Neither z nor states are stored then, and rows of Mᵀ follow those of bᵀ.

With EVERY_SECOND only the state at the start of every pair of chunks is stored: states and z are numbered by pairs, as
slots of 2 C rows, z: [pairs, HV, 2 C, VP]. The last pair of a sequence may have one chunk.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.packing import rows_of_sequence


@triton.jit
def load_state(state, i_nh, o_v, o_k, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Transposed block [BV, KP] of a dense state [N, HV, K, V] (or [N, HV, V, K]), in fp32."""
    at = state + i_nh.to(tl.int64) * (K * V)
    mask = (o_v < V)[:, None] & (o_k < K)[None, :]
    if V_FIRST:
        return tl.load(at + o_v[:, None] * K + o_k[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.load(at + o_k[None, :] * V + o_v[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_state(state, b_s, i_nh, o_v, o_k, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """The counterpart of :func:`load_state`."""
    at = state + i_nh.to(tl.int64) * (K * V)
    mask = (o_v < V)[:, None] & (o_k < K)[None, :]
    b_s = b_s.to(state.dtype.element_ty)
    if V_FIRST:
        tl.store(at + o_v[:, None] * K + o_k[None, :], b_s, mask=mask)
    else:
        tl.store(at + o_k[None, :] * V + o_v[:, None], b_s, mask=mask)


@triton.jit
def rows_of(i_n, cu_seqlens, T, T_row, NT, s_b, s_t, C: tl.constexpr):
    """(first slot, length, offset of the first row, first row of a contiguous [B · T] axis) of sequence ``i_n``."""
    i_b, bos, length, slot0 = rows_of_sequence(cu_seqlens, i_n.to(tl.int64), T, NT, C)
    return slot0, length, i_b * s_b + (i_b * T_row + bos) * s_t, i_b * T + bos


@triton.jit
def states_of_sequence(
    program, v, keys, X, D, initial_state, z, states, transitions, cu_seqlens, s_vb, s_vt, s_vh, T, T_row, NT,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LIFT: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BV: tl.constexpr, V_AS_OPERAND: tl.constexpr, V_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, EVERY_SECOND: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (VP if transitions is None else VP + KP) // BV
    i_v = program % NV
    i_nh = program // NV
    i_h = i_nh % HV
    dt = keys.dtype.element_ty
    slot0, length, first, _ = rows_of(i_nh // HV, cu_seqlens, T, T_row, NT, s_vb, s_vt, C)
    pair0, _, _, _ = rows_of(i_nh // HV, cu_seqlens, T, T_row, (NT + 1) // 2, s_vb, s_vt, 2 * C)
    v += first + i_h.to(tl.int64) * s_vh
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    o_ck = o_c[:, None] * KP + o_k[None, :]
    o_cv = o_c[:, None] * VP + o_v[None, :]
    o_cc = o_c[:, None] * C + o_c[None, :]
    o_s = o_v[:, None] * KP + o_k[None, :]
    b_s = tl.zeros([BV, KP], tl.float32)
    if initial_state is not None:
        b_s = load_state(initial_state, i_nh, o_v, o_k, K, V, V_FIRST)
    if transitions is not None:
        b_s = tl.where((o_v - VP)[:, None] == o_k[None, :], 1.0, 0.0)
    minus_eye = tl.where(o_c[:, None] == o_c[None, :], -LIFT, 0.0).to(dt)
    for i in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        block = (slot0 + i) * HV + i_h
        m_cv = (i * C + o_c < length)[:, None] & (o_v < V)[None, :]
        b_v = tl.load(v + tl.cast(i, tl.int64) * C * s_vt + o_c[:, None] * s_vt + o_v[None, :], mask=m_cv, other=0.0)
        p_keys = keys + block * (3 * C * KP)
        b_ke = tl.load(p_keys + o_ck)
        b_ka = tl.load(p_keys + 2 * C * KP + o_ck)
        if X is not None:
            b_x = tl.load(X + block * (C * C) + o_cc)
        b_d = tl.load(D + block * KP + o_k)
        b_sh = b_s.to(dt)
        if EVERY_SECOND:
            # Predicated, not a branch: the loop's loads run ahead of it.
            pair = (pair0 + i // 2) * HV + i_h
            tl.store(states + pair * (KP * VP) + o_s, b_sh, mask=(tl.full([BV], i % 2, tl.int32) == 0)[:, None])
            p_z = z + pair * (2 * C * VP) + i % 2 * (C * VP)
        elif states is not None:
            tl.store(states + block * (KP * VP) + o_s, b_sh)
            p_z = z + block * (C * VP)
        if V_AS_OPERAND:
            # A product with -I: as an operand of wgmma, v needs no change of layout.
            b_r = tl.dot(tl.trans(b_v.to(dt)), minus_eye, input_precision=PRECISION)
            b_r = (-tl.dot(b_sh, tl.trans(b_ke), b_r, input_precision=PRECISION) * (1 / LIFT)).to(dt)
        else:
            b_r = tl.dot(b_sh, tl.trans(b_ke), input_precision=PRECISION) * (1 / LIFT)
            b_r = (tl.trans(b_v).to(tl.float32) - b_r).to(dt)
        b_s = tl.dot(b_r, b_ka, b_s * b_d[None, :], input_precision=PRECISION)
        if X is not None:
            b_z = tl.dot(b_r, tl.trans(b_x), input_precision=PRECISION)
            tl.store(p_z + o_cv, tl.trans(b_z.to(dt)))
    if transitions is not None:
        tl.store(transitions + i_nh.to(tl.int64) * ((VP + KP) * KP) + o_s, b_s)

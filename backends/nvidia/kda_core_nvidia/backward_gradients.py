"""Gradients of q, k, g and β (and partial sums for the gate's parameters), one program a slot and value head.

With S the state at the start of the slot's C rows, dS the gradient of the one at their end, z and dv of the
recurrences, do scaled by the output scale, E_rs = exp(G_r - G_s), and Mu = do zᵀ, Lu = -dv zᵀ:

    dq = exp G ⊙ do Sᵀ + Σ_s (Mu_rs β_s) k_s E_rs                            (s <= r)
    row part of dk     = -exp G ⊙ dv Sᵀ + Σ_s (Lu_rs β_s) k_s E_rs           (s < r)
    column part of dk  = exp(G_C - G) ⊙ z dSᵀ + Σ_r (Mu_rs q_r [s <= r] + Lu_rs k_r [s < r]) E_rs, to be scaled by β
    dk = row + β column        dβ = Σ_c k ⊙ column

The sums over pairs run over the levels of backward_levels: in each, every row is either a second half's (row part) or a
first half's (column part), so that one product [C, C] x [C, BK] serves both for k.

Decays: dγ_t collects q ⊙ dq and k ⊙ dk of the pairs (r, s), s < t <= r. Within a level those are the rows from t to the
end of t's second half, or from the start of t's first half to the row before t: sums of what straddles the row, in which
nothing has to cancel (as it must in a reverse cumulative sum of q dq - k dk). The terms through S reach rows r >= t, those
through dS rows s < t, and exp G_C ⊙ Σ_v S ⊙ dS reaches all.

Grid: (slots, HV). Outputs per value head, contiguous [B, T, HV, K or 1]. Addresses: int64 from the program's base.
"""

import triton
import triton.language as tl

from kda_core_nvidia.backward_levels import (
    interval_sum,
    level_interval,
    level_mirror,
    level_pairs,
    level_reach,
    load_gate,
    locate,
    log2_decay,
    softplus,
    split3,
)


@triton.jit(do_not_specialize=["T", "T_row", "NT", "N"])
def gradients_kernel(
    q, k, g, beta, A_log, dt_bias, do, dv, z, states, state_grads, rstd,
    dq, dk, dg, dbeta, dA_partial, dbias_partial,
    slot_sequence, first_slot, cu_seqlens,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, do_b, do_t, do_h,
    scale, lower_bound, T, T_row, NT, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, SUB: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr, BETA_SCALE: tl.constexpr, HAS_DO: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    i_slot = tl.program_id(0)
    i_h = tl.program_id(1)
    i_b, eos, t0, i_n = locate(i_slot, slot_sequence, first_slot, cu_seqlens, T, NT, N, C, VARLEN)
    if VARLEN:
        if i_n < 0:
            return
    dt = z.dtype.element_ty
    EXACT: tl.constexpr = PRECISION == "ieee"
    o_c = tl.arange(0, C)
    m_c = t0 + o_c < eos
    out = (i_b.to(tl.int64) * T + t0) * HV + i_h
    dq += out * K
    dk += out * K
    dg += out * K
    dv += out * V
    dbeta += out
    if VARLEN:
        if i_n >= N:
            # Rows behind the last sequence: their gradients are zero.
            for i_k in range(0, KP // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                m_ck = m_c[:, None] & (o_k < K)[None, :]
                o_out = o_c[:, None] * (HV * K) + o_k[None, :]
                zero = tl.zeros([C, BK], tl.float32)
                tl.store(dq + o_out, zero.to(dq.dtype.element_ty), mask=m_ck)
                tl.store(dk + o_out, zero.to(dk.dtype.element_ty), mask=m_ck)
                tl.store(dg + o_out, zero.to(dg.dtype.element_ty), mask=m_ck)
            for i_v in range(0, VP // BV):
                o_v = i_v * BV + tl.arange(0, BV)
                o_out = o_c[:, None] * (HV * V) + o_v[None, :]
                zero = tl.zeros([C, BV], dv.dtype.element_ty)
                tl.store(dv + o_out, zero, mask=m_c[:, None] & (o_v < V)[None, :])
            tl.store(dbeta + o_c * HV, tl.zeros([C], dbeta.dtype.element_ty), mask=m_c)
            return
    i_b = i_b.to(tl.int64)
    row0 = i_b * T_row + t0
    q += i_b * q_b + row0 * q_t + (i_h // (HV // H)) * q_h
    k += i_b * k_b + row0 * k_t + (i_h // (HV // H)) * k_h
    g += i_b * g_b + row0 * g_t + i_h * g_h
    beta += i_b * beta_b + row0 * beta_t + i_h * beta_h
    do += i_b * do_b + row0 * do_t + i_h * do_h
    slot = i_slot.to(tl.int64)
    states += (slot * HV + i_h) * (KP * VP)
    state_grads += (slot * HV + i_h) * (KP * VP)
    # Rows of a slot lie in SUB chunks, HV chunks apart.
    CS: tl.constexpr = C // SUB
    block = (slot * SUB + o_c // CS) * HV + i_h
    z += block * (CS * VP) + (o_c % CS) * VP

    b_beta = tl.load(beta + o_c * beta_t, mask=m_c, other=0.0).to(tl.float32)
    beta_slope = tl.full([C], 1.0, tl.float32)
    if BETA_SIGMOID:
        b_sigmoid = tl.sigmoid(b_beta)
        b_beta = tl.where(m_c, BETA_SCALE * b_sigmoid, 0.0)
        beta_slope = b_beta * (1.0 - b_sigmoid)
    rq = tl.full([C], 1.0, tl.float32)
    rk = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        rq = tl.load(rstd + block * (2 * CS) + o_c % CS)
        rk = tl.load(rstd + block * (2 * CS) + CS + o_c % CS)

    b_mu = tl.zeros([C, C], tl.float32)
    b_lu = tl.zeros([C, C], tl.float32)
    for i_v in range(0, VP // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_cv = m_c[:, None] & (o_v < V)[None, :]
        b_z = tl.trans(tl.load(z[:, None] + o_v[None, :]))
        if HAS_DO:
            b_do = tl.load(do + o_c[:, None] * do_t + o_v[None, :], mask=m_cv, other=0.0).to(dt)
            b_mu = tl.dot(b_do, b_z, b_mu, input_precision=PRECISION)
        b_dv = tl.load(dv + o_c[:, None] * (HV * V) + o_v[None, :], mask=m_cv, other=0.0)
        b_lu = tl.dot(b_dv, b_z, b_lu, input_precision=PRECISION)
    b_mu *= scale
    b_lu = -b_lu
    diagonal = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_mu, 0.0), 1)
    b_mt = tl.trans(b_mu.to(dt))
    b_mr = (b_mu * b_beta[None, :]).to(dt)
    below = o_c[:, None] > o_c[None, :]
    b_x = tl.where(below, b_lu * b_beta[None, :], 0.0).to(dt) + tl.trans(tl.where(below, b_lu, 0.0).to(dt))

    b_dbeta = tl.zeros([C], tl.float32)
    sum_q = tl.zeros([C], tl.float32)
    sum_k = tl.zeros([C], tl.float32)
    dA = 0.0
    for i_k in range(0, KP // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_ck = m_c[:, None] & m_k[None, :]
        b_dq = tl.zeros([C, BK], tl.float32)
        b_dkr = tl.zeros([C, BK], tl.float32)
        b_dkc = tl.zeros([C, BK], tl.float32)
        through_state = tl.zeros([BK], tl.float32)
        for i_v in range(0, VP // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            m_cv = m_c[:, None] & (o_v < V)[None, :]
            o_s = o_v[:, None] * KP + o_k[None, :]
            b_s = tl.load(states + o_s)
            b_ds = tl.load(state_grads + o_s)
            if HAS_DO:
                b_do = tl.load(do + o_c[:, None] * do_t + o_v[None, :], mask=m_cv, other=0.0).to(dt)
                b_dq = tl.dot(b_do, b_s, b_dq, input_precision=PRECISION)
            b_dv = tl.load(dv + o_c[:, None] * (HV * V) + o_v[None, :], mask=m_cv, other=0.0)
            b_dkr = tl.dot(b_dv, b_s, b_dkr, input_precision=PRECISION)
            b_z = tl.load(z[:, None] + o_v[None, :])
            b_dkc = tl.dot(b_z, b_ds, b_dkc, input_precision=PRECISION)
            through_state += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 0)

        b_g = tl.load(g + o_c[:, None] * g_t + o_k[None, :], mask=m_ck, other=0.0).to(tl.float32)
        a, b_bias = load_gate(A_log, dt_bias, i_h, o_k, m_k, K, HAS_A, HAS_BIAS)
        b_g = tl.where(m_ck, log2_decay(b_g, a, b_bias, lower_bound, GATE), 0.0)
        through_state *= tl.exp2(tl.sum(b_g, 0))
        hi, mid, lo = split3(b_g, EXACT)
        b_q = tl.load(q + o_c[:, None] * q_t + o_k[None, :], mask=m_ck, other=0.0).to(tl.float32) * rq[:, None]
        b_k = tl.load(k + o_c[:, None] * k_t + o_k[None, :], mask=m_ck, other=0.0).to(tl.float32) * rk[:, None]

        e = tl.exp2(interval_sum(o_c[:, None] >= o_c[None, :], hi, mid, lo, EXACT))
        b_dq *= e * scale
        b_dk = -e * b_dkr
        b_p = (b_q * b_dq + b_k * b_dk).to(dt)
        b_dgamma = tl.dot((o_c[:, None] <= o_c[None, :]).to(dt), b_p, input_precision=PRECISION)
        e = tl.exp2(interval_sum(o_c[:, None] < o_c[None, :], hi, mid, lo, EXACT))
        b_dkc *= e
        b_dbeta += tl.sum(b_k * b_dkc, 1)
        b_dkc *= b_beta[:, None]
        b_dk += b_dkc
        b_p = (b_k * b_dkc).to(dt)
        b_dgamma = tl.dot((o_c[:, None] > o_c[None, :]).to(dt), b_p, b_dgamma, input_precision=PRECISION)
        b_dgamma += through_state[None, :]
        b_dq += (diagonal * b_beta)[:, None] * b_k
        b_dbeta += diagonal * tl.sum(b_q * b_k, 1)
        b_dk += (diagonal * b_beta)[:, None] * b_q
        for level in tl.static_range(LEVELS):
            b: tl.constexpr = C >> (level + 1)
            second = ((o_c // b) % 2 == 1)[:, None]
            pairs = level_pairs(o_c, o_c, b)
            mirror = level_mirror(o_c, o_c, b)
            e = tl.exp2(interval_sum(level_interval(o_c, o_c, b), hi, mid, lo, EXACT))
            b_ke = (b_k * e).to(dt)
            b_qe = (b_q * e).to(dt)
            b_dql = e * tl.dot(tl.where(pairs, b_mr, 0.0).to(dt), b_ke, input_precision=PRECISION)
            b_dkl = tl.dot(tl.where(pairs | mirror, b_x, 0.0).to(dt), b_ke, input_precision=PRECISION)
            b_dkl = tl.dot(tl.where(mirror, b_mt, 0.0).to(dt), b_qe, b_dkl, input_precision=PRECISION)
            b_dkl *= e
            b_dbeta += tl.sum(tl.where(second, 0.0, b_k * b_dkl), 1)
            b_dkl *= tl.where(second, 1.0, b_beta[:, None])
            b_dq += b_dql
            b_dk += b_dkl
            b_p = (b_q * b_dql + b_k * b_dkl).to(dt)
            b_dgamma = tl.dot(level_reach(o_c, o_c, b).to(dt), b_p, b_dgamma, input_precision=PRECISION)

        o_out = o_c[:, None] * (HV * K) + o_k[None, :]
        if L2NORM:
            sum_q += tl.sum(b_q * b_dq, 1)
            sum_k += tl.sum(b_k * b_dk, 1)
            if KP == BK:
                b_dq = rq[:, None] * (b_dq - b_q * sum_q[:, None])
                b_dk = rk[:, None] * (b_dk - b_k * sum_k[:, None])
        tl.store(dq + o_out, b_dq.to(dq.dtype.element_ty), mask=m_ck)
        tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=m_ck)
        if GATE != 0:
            b_x0 = tl.load(g + o_c[:, None] * g_t + o_k[None, :], mask=m_ck, other=0.0).to(tl.float32)
            b_x0 += b_bias[None, :]
            b_dgamma = tl.where(m_ck, b_dgamma, 0.0)
            if GATE == 1:
                dA += tl.sum(b_dgamma * (-a * softplus(b_x0)))
                b_dgamma *= -a * tl.sigmoid(b_x0)
            else:
                b_sig = tl.sigmoid(a * b_x0)
                b_dgamma *= (lower_bound * a) * b_sig * (1.0 - b_sig)
                dA += tl.sum(b_dgamma * b_x0)
            if HAS_BIAS:
                tl.store(dbias_partial + (slot * HV + i_h) * K + o_k, tl.sum(b_dgamma, 0), mask=m_k)
        tl.store(dg + o_out, b_dgamma.to(dg.dtype.element_ty), mask=m_ck)
    if HAS_A:
        tl.store(dA_partial + slot * HV + i_h, dA)
    tl.store(dbeta + o_c * HV, (b_dbeta * beta_slope).to(dbeta.dtype.element_ty), mask=m_c)
    if L2NORM and KP != BK:
        # The norm's gradient needs the sum over all channels: correct what this program has just written.
        tl.debug_barrier()
        for i_k in range(0, KP // BK):
            o_k = i_k * BK + tl.arange(0, BK)
            m_ck = m_c[:, None] & (o_k < K)[None, :]
            o_out = o_c[:, None] * (HV * K) + o_k[None, :]
            b_q = tl.load(q + o_c[:, None] * q_t + o_k[None, :], mask=m_ck, other=0.0).to(tl.float32) * rq[:, None]
            b_dq = tl.load(dq + o_out, mask=m_ck, other=0.0).to(tl.float32)
            b_dq = rq[:, None] * (b_dq - b_q * sum_q[:, None])
            tl.store(dq + o_out, b_dq.to(dq.dtype.element_ty), mask=m_ck)
            b_k = tl.load(k + o_c[:, None] * k_t + o_k[None, :], mask=m_ck, other=0.0).to(tl.float32) * rk[:, None]
            b_dk = tl.load(dk + o_out, mask=m_ck, other=0.0).to(tl.float32)
            b_dk = rk[:, None] * (b_dk - b_k * sum_k[:, None])
            tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=m_ck)

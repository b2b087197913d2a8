"""Gradients of q and k (as the recurrence sees them: normalised), g and β, one program a slot and value head.

With S the state at the start of the slot's C rows, dS the gradient of the one at their end, z and dv of the
recurrences, E_rs = exp(G_r − G_s), Mu = scale · do zᵀ and Lu = −dv zᵀ:

    dq        = scale · exp G ⊙ do Sᵀ + Σ_s Mu_rs β_s k_s E_rs                           (s ≤ r)
    row       = −exp G ⊙ dv Sᵀ + Σ_s Lu_rs β_s k_s E_rs                                  (s < r)
    column_s  = exp(G_C − G_s) ⊙ z dSᵀ + Σ_r (Mu_rs q_r [s ≤ r] + Lu_rs k_r [s < r]) E_rs
    dk = row + β column        dβ = Σ_c k ⊙ column

The sums over pairs run over hierarchical reference points: for half blocks of b = 16, 8, …, 1 rows the pairs that
straddle the middle of a 2b-block, with no exponent above 0.

Decays: dγ_t collects what every pair (r, s), s < t ≤ r, gives. Within a level these are the rows from t to the end of
t's second half, or those before t in t's first half: sums of the terms that reach t, in which nothing has to cancel (as
it must in a reverse cumulative sum of q dq − k dk). Terms through S reach rows up to their own, those through dS rows
after it, and exp G_C ⊙ Σ_v S ⊙ dS reaches all.

Grid: slots · HV programs along axis 0, heads fastest. Outputs are contiguous. Every offset is int64, from the program
id up.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.decay import after, selected_sum, split, straddles, through, to_reference
from kda_core.triton_lib.gate import NORM_EPS, gate_gradient, gate_rate, log2_decay, sigmoid, write_strength
from kda_core_amd.slots import rows_of_slot

_NUMBERS = ["scale", "lower_bound", "T", "N", "chunks", "HV", "group", "s_qb", "s_kb", "s_gb", "s_bb", "s_ob"]
"""Parameters that the compiler must not look at: most of them change with the lengths of the sequences."""


@triton.jit
def _inverse_norms(x, o_row, s_t, m_row, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """1 / sqrt(Σ x² + ε) of C rows."""
    squares = tl.zeros([C, BK], tl.float32)
    for i_k in range(0, KP, BK):
        o_k = i_k + tl.arange(0, BK)
        mask = m_row[:, None] & (o_k < K)[None, :]
        b_x = tl.load(x + o_row[:, None] * s_t + o_k[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += b_x * b_x
    return tl.rsqrt(tl.sum(squares, 1) + NORM_EPS)


@triton.jit
def _level(
    b_dq,
    b_row,
    b_column,
    b_dgamma,
    b_q,
    b_k,
    b_beta,
    b_mu,
    b_lu,
    parts,
    r,
    b: tl.constexpr,
    TERMS: tl.constexpr,
    DOT: tl.constexpr,
    dtype: tl.constexpr,
):
    """Add the pairs of the level with half blocks of b rows."""
    pairs = straddles(r, r, b)
    mu = tl.where(pairs, b_mu, 0.0).to(dtype)
    lu = tl.where(pairs, b_lu, 0.0).to(dtype)
    reference = to_reference(r, r, b)
    e = tl.exp2(selected_sum(reference, parts, TERMS))
    k_e = b_k * e
    written = (k_e * b_beta[:, None]).to(dtype)
    # Rows of second halves have entries in mu and lu, rows of first halves in their transposes; the others get zeros.
    dq = tl.dot(mu, written, input_precision=DOT) * e
    row = tl.dot(lu, written, input_precision=DOT) * e
    column = tl.dot(tl.trans(lu), k_e.to(dtype), input_precision=DOT)
    column = tl.dot(tl.trans(mu), (b_q * e).to(dtype), column, input_precision=DOT) * e
    reach = b_q * dq + b_k * (row + b_beta[:, None] * column)
    b_dgamma += selected_sum(tl.trans(reference.to(tl.float32)), split(reach, TERMS), TERMS)
    return b_dq + dq, b_row + row, b_column + column, b_dgamma


@triton.jit(do_not_specialize=_NUMBERS)
def gradients_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, K] or None
    do,  # [B, T, HV, V]
    z,  # [slots, HV, C, VP]
    states,  # [slots, HV, VP, KP]
    state_grads,  # [slots, HV, VP, KP]
    dq,  # [B, T, HV, K]
    dk,  # [B, T, HV, K]
    dv,  # [B, T, HV, V]; read, and zeroed behind the last sequence
    dg,  # [B, T, HV, K]
    dbeta,  # [B, T, HV]
    dA_log,  # [slots, HV] float32 or None
    ddt_bias,  # [slots, HV, K] float32 or None
    cu_seqlens,  # [N + 1] or None
    scale,
    lower_bound,
    T,
    N,
    chunks,  # chunks of a dense sequence
    HV,
    group,  # value heads a key head
    s_qb,
    s_qt,
    s_qh,
    s_kb,
    s_kt,
    s_kh,
    s_gb,
    s_gt,
    s_gh,
    s_bb,
    s_bt,
    s_bh,
    s_ob,
    s_ot,
    s_oh,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    UNIT: tl.constexpr,  # batch strides are given in this many elements, so that alignment shows
    GATE: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    TERMS: tl.constexpr,
    DOT: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_slot = pid // HV
    i_h = pid % HV
    i_kh = i_h // group
    i_n, i_b, first_row, count = rows_of_slot(cu_seqlens, i_slot, T, N, chunks, C)
    if count <= 0:
        return
    r = tl.arange(0, C)
    o_row = r.to(tl.int64)
    m_row = r < count
    out = (i_b * T + first_row) * HV + i_h
    o_out = o_row * HV
    dq += out * K
    dk += out * K
    dg += out * K
    dv += out * V
    dbeta += out
    if i_n == N:
        # Rows behind the last packed sequence.
        for i_k in range(0, KP, BK):
            o_k = i_k + tl.arange(0, BK)
            mask = m_row[:, None] & (o_k < K)[None, :]
            offsets = o_out[:, None] * K + o_k[None, :]
            tl.store(dq + offsets, tl.zeros([C, BK], dq.dtype.element_ty), mask=mask)
            tl.store(dk + offsets, tl.zeros([C, BK], dk.dtype.element_ty), mask=mask)
            tl.store(dg + offsets, tl.zeros([C, BK], dg.dtype.element_ty), mask=mask)
        for i_v in range(0, VP, BV):
            o_v = i_v + tl.arange(0, BV)
            offsets = o_out[:, None] * V + o_v[None, :]
            zero = tl.zeros([C, BV], dv.dtype.element_ty)
            tl.store(dv + offsets, zero, mask=m_row[:, None] & (o_v < V)[None, :])
        tl.store(dbeta + o_out, tl.zeros([C], dbeta.dtype.element_ty), mask=m_row)
        return

    i_b *= UNIT
    q += i_b * s_qb + first_row * s_qt + i_kh * s_qh
    k += i_b * s_kb + first_row * s_kt + i_kh * s_kh
    g += i_b * s_gb + first_row * s_gt + i_h * s_gh
    beta += i_b * s_bb + first_row * s_bt + i_h * s_bh
    do += i_b * s_ob + first_row * s_ot + i_h * s_oh
    i_chunk = i_slot * HV + i_h
    z += i_chunk * (C * VP)
    states += i_chunk * (VP * KP)
    state_grads += i_chunk * (VP * KP)
    dtype = z.dtype.element_ty
    raw_beta = tl.load(beta + o_row * s_bt, mask=m_row, other=0.0).to(tl.float32)
    b_beta = tl.where(m_row, write_strength(raw_beta, SIGMOID, NEG_EIGVAL), 0.0)
    rate = gate_rate(A_log, i_h)
    q_norm = tl.full([C], 1.0, tl.float32)
    k_norm = q_norm
    if L2NORM:
        q_norm = _inverse_norms(q, o_row, s_qt, m_row, K, KP, BK, C)
        k_norm = _inverse_norms(k, o_row, s_kt, m_row, K, KP, BK, C)

    b_mu = tl.zeros([C, C], tl.float32)
    b_lu = tl.zeros([C, C], tl.float32)
    for i_v in range(0, VP, BV):
        o_v = i_v + tl.arange(0, BV)
        m_rv = m_row[:, None] & (o_v < V)[None, :]
        b_z = tl.trans(tl.load(z + r[:, None] * VP + o_v[None, :]))
        b_do = tl.load(do + o_row[:, None] * s_ot + o_v[None, :], mask=m_rv, other=0.0)
        b_dv = tl.load(dv + o_out[:, None] * V + o_v[None, :], mask=m_rv, other=0.0)
        b_mu = tl.dot(b_do, b_z, b_mu, input_precision=DOT)
        b_lu = tl.dot(b_dv, b_z, b_lu, input_precision=DOT)
    b_mu *= scale
    b_lu = -b_lu
    diagonal = tl.sum(tl.where(r[:, None] == r[None, :], b_mu, 0.0), 1)

    b_dbeta = tl.zeros([C], tl.float32)
    dA = tl.zeros([C], tl.float32)
    everything = (r[:, None] + r[None, :]) >= 0
    # Masks formed anew in every block of channels: kept from one to the next they would fill the registers.
    for i_k in tl.range(0, KP, BK, disable_licm=True):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        mask = m_row[:, None] & m_k[None, :]
        b_dq = tl.zeros([C, BK], tl.float32)
        b_row = tl.zeros([C, BK], tl.float32)
        b_column = tl.zeros([C, BK], tl.float32)
        products = tl.zeros([BV, BK], tl.float32)
        for i_v in range(0, VP, BV):
            o_v = i_v + tl.arange(0, BV)
            m_rv = m_row[:, None] & (o_v < V)[None, :]
            o_s = o_v[:, None] * KP + o_k[None, :]
            b_s = tl.load(states + o_s)
            b_ds = tl.load(state_grads + o_s)
            products += b_s.to(tl.float32) * b_ds.to(tl.float32)
            b_z = tl.load(z + r[:, None] * VP + o_v[None, :])
            b_do = tl.load(do + o_row[:, None] * s_ot + o_v[None, :], mask=m_rv, other=0.0)
            b_dv = tl.load(dv + o_out[:, None] * V + o_v[None, :], mask=m_rv, other=0.0)
            b_dq = tl.dot(b_do, b_s, b_dq, input_precision=DOT)
            b_row = tl.dot(b_dv, b_s, b_row, input_precision=DOT)
            b_column = tl.dot(b_z, b_ds, b_column, input_precision=DOT)

        b_q = tl.load(q + o_row[:, None] * s_qt + o_k[None, :], mask=mask, other=0.0).to(tl.float32)
        b_k = tl.load(k + o_row[:, None] * s_kt + o_k[None, :], mask=mask, other=0.0).to(tl.float32)
        b_q *= q_norm[:, None]
        b_k *= k_norm[:, None]
        b_g = tl.load(g + o_row[:, None] * s_gt + o_k[None, :], mask=mask, other=0.0).to(tl.float32)
        bias = tl.zeros([1, BK], tl.float32)
        if dt_bias is not None:
            bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
        y = tl.where(mask, log2_decay(b_g, rate, bias, lower_bound, GATE), 0.0)
        parts = split(y, TERMS)
        e = tl.exp2(selected_sum(through(r, r), parts, TERMS))
        b_dq *= e * scale
        b_row *= -e
        b_dgamma = selected_sum(r[None, :] >= r[:, None], split(b_q * b_dq + b_k * b_row, TERMS), TERMS)
        b_column *= tl.exp2(selected_sum(after(r, r), parts, TERMS))
        reach = b_k * b_column * b_beta[:, None]
        b_dgamma += selected_sum(r[None, :] < r[:, None], split(reach, TERMS), TERMS)
        b_dgamma += tl.exp2(selected_sum(everything, parts, TERMS)) * tl.sum(products, 0)[None, :]
        for level in tl.static_range(5):
            b_dq, b_row, b_column, b_dgamma = _level(
                b_dq, b_row, b_column, b_dgamma, b_q, b_k, b_beta, b_mu, b_lu, parts, r, 16 >> level, TERMS, DOT, dtype
            )
        # The diagonal of M has no decay.
        b_dq += (diagonal * b_beta)[:, None] * b_k
        b_column += diagonal[:, None] * b_q
        b_dbeta += tl.sum(b_k * b_column, 1)
        offsets = o_out[:, None] * K + o_k[None, :]
        tl.store(dq + offsets, b_dq.to(dq.dtype.element_ty), mask=mask)
        b_dk = b_row + b_column * b_beta[:, None]
        tl.store(dk + offsets, b_dk.to(dk.dtype.element_ty), mask=mask)
        if GATE != "none":
            b_dgamma = tl.where(mask, b_dgamma, 0.0)
            b_dgamma, summand = gate_gradient(b_g + bias, rate, lower_bound, b_dgamma, GATE)
            dA += tl.sum(summand, 1)
            if ddt_bias is not None:
                tl.store(ddt_bias + i_chunk * K + o_k, tl.sum(b_dgamma, 0), mask=m_k)
        tl.store(dg + offsets, b_dgamma.to(dg.dtype.element_ty), mask=mask)
    if dA_log is not None:
        tl.store(dA_log + i_chunk, tl.sum(dA, 0))
    if SIGMOID:
        b_dbeta *= b_beta * sigmoid(-raw_beta)
    tl.store(dbeta + o_out, b_dbeta.to(dbeta.dtype.element_ty), mask=m_row)

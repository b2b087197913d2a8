"""What the recurrences of the backward need of a chunk, from the inputs.

With the decays E_rs = exp(G_r - G_s), Lk_rs = Σ_c k_rc k_sc E_rsc (s < r), M_rs = Σ_c q_rc k_sc E_rsc (s <= r):

    X = (I + Lk Diag β)⁻¹      ke = k ⊙ exp G               qg = scale · q ⊙ exp G
    P = scale · M Diag(β) X    kX = Xᵀ(β ⊙ k ⊙ exp(G_C - G))      D = exp G_C

β stays on the side of the columns, unlike in the forward (whose A is Diag(β) X; P, kX, ke and qg are the same), so that
X times the residual is what β multiplies: dβ then needs no division, and β = 0 is no special case.

Grid: slots · HV, heads fastest (close in memory). A slot is a chunk of C rows; packed sequences start on a new one.
Outputs are laid out by slot, [slots, HV, C, KP] with zeros in the rows and columns that do not exist, so that the
recurrences need no masks: KP is K padded to a power of two. Further: D and log2 D [.., KP], whether no channel of the
chunk decays beyond MILD, and the reciprocal norms of q and k [.., 2, C]. Addresses: int64 from the program's base.
"""

import triton
import triton.language as tl

from kda_core_nvidia.backward_levels import (
    L2NORM_EPS,
    interval_sum,
    level_interval,
    level_pairs,
    load_gate,
    locate,
    log2_decay,
    split3,
)


@triton.jit
def _level(b_m, b_l, b_q, b_k, hi, mid, lo, o_c, j, dt: tl.constexpr, PRECISION: tl.constexpr):
    """Add the pairs of one level to M and Lk."""
    e = tl.exp2(interval_sum(hi, mid, lo, level_interval(o_c, o_c, j), 3 if PRECISION == "ieee" else 2))
    b_qe = (b_q * e).to(dt)
    b_ke = (b_k * e).to(dt)
    pairs = level_pairs(o_c, o_c, j)
    b_m += tl.where(pairs, tl.dot(tl.trans(b_qe), b_ke, input_precision=PRECISION), 0.0)
    b_l += tl.where(pairs, tl.dot(tl.trans(b_ke), b_ke, input_precision=PRECISION), 0.0)
    return b_m, b_l


@triton.jit
def _double_inverse(b_x, b_l, o_c, j, PRECISION: tl.constexpr):
    """Inverses of the diagonal 2b-blocks from those of the b-blocks: X - X L_b X."""
    below = tl.where(level_pairs(o_c, o_c, j), b_l, 0.0)
    b_y = tl.dot(b_x, below, input_precision=PRECISION)
    return b_x - tl.dot(b_y, b_x, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "T_row", "NT", "N"])
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias,
    ke, qg, kx, P, X, decay, total_decay, mild, rstd,
    slot_sequence, first_slot, cu_seqlens,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    scale, lower_bound, T, T_row, NT, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr, BETA_SCALE: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr,
):  # fmt: skip
    i_c = tl.program_id(0) // HV
    i_h = tl.program_id(0) % HV
    i_b, eos, t0, i_n = locate(i_c, slot_sequence, first_slot, cu_seqlens, T, NT, N, C, VARLEN)
    if VARLEN:  # noqa: SIM102
        if (i_n < 0) | (i_n >= N):
            return
    dt = qg.dtype.element_ty
    TERMS: tl.constexpr = 3 if PRECISION == "ieee" else 2
    o_c = tl.arange(0, C)
    m_c = t0 + o_c < eos
    i_b = i_b.to(tl.int64)
    row0 = i_b * T_row + t0
    q += i_b * q_b + row0 * q_t + (i_h // (HV // H)) * q_h
    k += i_b * k_b + row0 * k_t + (i_h // (HV // H)) * k_h
    g += i_b * g_b + row0 * g_t + i_h * g_h
    beta += i_b * beta_b + row0 * beta_t + i_h * beta_h
    block = i_c.to(tl.int64) * HV + i_h
    ke += block * (C * KP)
    qg += block * (C * KP)
    kx += block * (C * KP)

    b_beta = tl.load(beta + o_c * beta_t, mask=m_c, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = tl.where(m_c, BETA_SCALE * tl.sigmoid(b_beta), 0.0)
    eye = o_c[:, None] == o_c[None, :]

    b_m = tl.zeros([C, C], tl.float32)
    b_l = tl.zeros([C, C], tl.float32)
    sq = tl.zeros([C], tl.float32)
    sk = tl.zeros([C], tl.float32)
    least = 0.0
    least = 0.0
    for i_k in tl.range(0, KP // BK, disable_licm=True):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_kc = m_k[:, None] & m_c[None, :]
        b_q = tl.load(q + o_c[None, :] * q_t + o_k[:, None], mask=m_kc, other=0.0).to(tl.float32)
        b_k = tl.load(k + o_c[None, :] * k_t + o_k[:, None], mask=m_kc, other=0.0).to(tl.float32)
        b_g = tl.load(g + o_c[None, :] * g_t + o_k[:, None], mask=m_kc, other=0.0).to(tl.float32)
        a, b_bias = load_gate(A_log, dt_bias, i_h, o_k, m_k, K, HAS_A, HAS_BIAS)
        b_g = tl.where(m_kc, log2_decay(b_g, a, b_bias, lower_bound, GATE), 0.0)
        hi, mid, lo = split3(b_g, dt)
        if L2NORM:
            sq += tl.sum(b_q * b_q, 0)
            sk += tl.sum(b_k * b_k, 0)
        b_m += tl.where(eye, tl.sum(b_q * b_k, 0)[:, None], 0.0)
        total = tl.sum(b_g, 1)
        least = tl.minimum(least, tl.min(total))
        if MILD > 0 and tl.min(total) >= -MILD:
            # One reference for all pairs: half the chunk's decay.
            x = interval_sum(hi, mid, lo, o_c[:, None] <= o_c[None, :], TERMS) - 0.5 * total[:, None]
            rise = tl.exp2(x)
            b_kf = (b_k * tl.exp2(-x)).to(dt)
            below = o_c[:, None] > o_c[None, :]
            b_m += tl.where(below, tl.dot(tl.trans((b_q * rise).to(dt)), b_kf), 0.0)
            b_l += tl.where(below, tl.dot(tl.trans((b_k * rise).to(dt)), b_kf), 0.0)
        else:
            for j in tl.range(0, LEVELS, disable_licm=True):
                b_m, b_l = _level(b_m, b_l, b_q, b_k, hi, mid, lo, o_c, j, dt, PRECISION)
    tl.store(mild + block, (least >= -MILD).to(tl.int8))
    tl.store(mild + block, (least >= -MILD).to(tl.int8))
    rq = tl.full([C], 1.0, tl.float32)
    rk = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        rq = tl.rsqrt(sq + L2NORM_EPS)
        rk = tl.rsqrt(sk + L2NORM_EPS)
        tl.store(rstd + block * (2 * C) + o_c, rq)
        tl.store(rstd + block * (2 * C) + C + o_c, rk)
    o_cc = block * (C * C) + o_c[:, None] * C + o_c[None, :]
    b_l = b_l * rk[:, None] * (rk * b_beta)[None, :]
    b_x = tl.where(eye, 1.0, 0.0) - tl.where(level_pairs(o_c, o_c, 0), b_l, 0.0)
    for j in range(1, LEVELS):
        b_x = _double_inverse(b_x, b_l, o_c, j, INVERSE_PRECISION)
    b_x = b_x.to(dt)
    tl.store(X + o_cc, b_x)
    b_m = (b_m * (scale * rq)[:, None] * (rk * b_beta)[None, :]).to(dt)
    tl.store(P + o_cc, tl.dot(b_m, b_x, input_precision=PRECISION).to(dt))

    for i_k in tl.range(0, KP // BK, disable_licm=True):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_kc = m_k[:, None] & m_c[None, :]
        b_g = tl.load(g + o_c[None, :] * g_t + o_k[:, None], mask=m_kc, other=0.0).to(tl.float32)
        a, b_bias = load_gate(A_log, dt_bias, i_h, o_k, m_k, K, HAS_A, HAS_BIAS)
        b_g = tl.where(m_kc, log2_decay(b_g, a, b_bias, lower_bound, GATE), 0.0)
        hi, mid, lo = split3(b_g, dt)
        e = tl.exp2(interval_sum(hi, mid, lo, o_c[:, None] <= o_c[None, :], TERMS))
        o_ck = o_c[None, :] * KP + o_k[:, None]
        b_q = tl.load(q + o_c[None, :] * q_t + o_k[:, None], mask=m_kc, other=0.0).to(tl.float32)
        tl.store(qg + o_ck, (b_q * e * (scale * rq)[None, :]).to(dt))
        b_k = tl.load(k + o_c[None, :] * k_t + o_k[:, None], mask=m_kc, other=0.0).to(tl.float32) * rk[None, :]
        tl.store(ke + o_ck, (b_k * e).to(dt))
        e = tl.exp2(interval_sum(hi, mid, lo, o_c[:, None] > o_c[None, :], TERMS))
        b_kg = (b_k * e * b_beta[None, :]).to(dt)
        tl.store(kx + o_ck, tl.dot(b_kg, b_x, input_precision=PRECISION).to(dt))
        total = tl.sum(b_g, 1)
        tl.store(total_decay + block * KP + o_k, total)
        tl.store(decay + block * KP + o_k, tl.exp2(total))

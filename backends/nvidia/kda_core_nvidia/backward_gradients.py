"""Gradients of q, k, g and β (and partial sums for the gate's parameters), one program a slot and value head.

With S the state at the start of the slot's C rows, dS the gradient of the one at their end, z and dv of the
recurrences, do scaled by the output scale, E_rs = exp(G_r - G_s), and Mu = do zᵀ, Lu = -dv zᵀ:

    dq = exp G ⊙ do Sᵀ + Σ_s (Mu_rs β_s) k_s E_rs                            (s <= r)
    row part of dk     = -exp G ⊙ dv Sᵀ + Σ_s (Lu_rs β_s) k_s E_rs           (s < r)
    column part of dk  = exp(G_C - G) ⊙ z dSᵀ + Σ_r (Mu_rs q_r [s <= r] + Lu_rs k_r [s < r]) E_rs, to be scaled by β
    dk = row + β column        dβ = Σ_c k ⊙ column

The sums over pairs run over the levels of backward_levels: in each, every row is either a second half's (row part) or a
first half's (column part), so that one product [C, C] x [C, BK] serves both for k.

Decays: dγ_t collects q ⊙ dq and k ⊙ dk of the pairs (r, s), s < t <= r. Within a level those are the rows from t to
the end of t's second half, or from the start of t's first half to the row before t: sums of what straddles the row, in
which nothing has to cancel (as it must in a reverse cumulative sum of q dq - k dk). The terms through S reach rows
r >= t, those through dS rows s < t, and exp G_C ⊙ Σ_v S ⊙ dS reaches all.

Grid: slots · HV · KP / BK, channel blocks fastest, then heads, so that what runs at one time is close in memory.
Outputs per value head, [B, T, HV, K], dense or some heads of a wider tensor; dbeta [KP / BK, B, T, HV] to be summed; dq
and dk are with respect to the normalised rows (``finish_kernel`` undoes the norm). states, state_grads and z: pointers;
with DESCRIPTORS, descriptors of them as rows of KP or VP channels, by [BV, BK] and [C, BV]. So are, with TOKENS, dv and
do, as B · T rows of all heads, by [C, BV]: where all chunks are whole, since what follows a sequence is another's.
Addresses: int64 from the program's base.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.gate import gate_gradient, gate_rate, sigmoid
from kda_core.triton_lib.packing import rows_of_slot
from kda_core.triton_lib.squares import apart, to_reference
from kda_core_nvidia.backward_levels import interval_sum, log2_decay, rounded, split3
from kda_core_nvidia.backward_states import load_state
from kda_core_nvidia.prepare import INTERPRETED


@triton.jit
def _two_parts(b_x, dt: tl.constexpr):
    """``b_x`` in ``dt``, and what that leaves of it."""
    narrow, wide = rounded(b_x, dt)
    return narrow, (b_x - wide).to(dt)


@triton.jit
def _summands(b_p, dt: tl.constexpr):
    """``b_p`` as ``_sums`` takes it: in ``dt``, but for float16 as two bfloat16 parts (of which other types use one).

    Where every channel decays by e⁻¹⁰ a token, what a pair gives to the decay gradient lies below what float16 holds.
    """
    if dt == tl.float16 and not INTERPRETED:
        p_hi, p_lo = _two_parts(b_p, tl.bfloat16)
    else:
        p_hi = b_p if dt == tl.float16 else b_p.to(dt)
        p_lo = p_hi
    return p_hi, p_lo


@triton.jit
def _sums(p_hi, p_lo, reach, b_dgamma, dt: tl.constexpr, PRECISION: tl.constexpr):
    """Add to dgamma, for each row t, the sum of the summands over rows s where ``reach[s, t]``."""
    reach = reach.to(p_hi.dtype)
    if dt == tl.float16 and not INTERPRETED:
        b_dgamma = tl.dot(p_lo, reach, b_dgamma)
    return tl.dot(p_hi, reach, b_dgamma, input_precision=PRECISION)


@triton.jit
def _cancelling_sums(b_p, b_dgamma, o_c, dt: tl.constexpr):
    """Add to dgamma, for each row t, the sum of ``b_p`` over rows s >= t, in which terms cancel: two parts of 16 bits.

    float16 gets three parts of bfloat16, for the reason that ``_summands`` has.
    """
    if dt != tl.float16:
        p_hi, p_lo = _two_parts(b_p, dt)
        reach = (o_c[:, None] >= o_c[None, :]).to(dt)
        b_dgamma = tl.dot(p_hi, reach, b_dgamma)
        b_dgamma = tl.dot(p_lo, reach, b_dgamma)
    elif INTERPRETED:
        reach = (o_c[:, None] >= o_c[None, :]).to(tl.float32)
        b_dgamma = tl.dot(b_p, reach, b_dgamma, input_precision="ieee")
    else:
        p_hi, wide = rounded(b_p, tl.bfloat16)
        p_mid, p_lo = _two_parts(b_p - wide, tl.bfloat16)
        reach = (o_c[:, None] >= o_c[None, :]).to(tl.bfloat16)
        b_dgamma = tl.dot(p_lo, reach, b_dgamma)
        b_dgamma = tl.dot(p_mid, reach, b_dgamma)
        b_dgamma = tl.dot(p_hi, reach, b_dgamma)
    return b_dgamma


@triton.jit
def _level(
    b_dq, b_dkr, b_dkc, b_dgamma, b_q, b_k, b_beta, b_mu, b_lu, hi, mid, lo, o_c, j,
    dt: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the pairs of the level with half-blocks of 2^j rows.

    Rows of second halves give row parts, those of first halves column parts. b_mu, b_lu: Mu and Lu without their
    diagonals, each with its transpose added.
    """
    second = (((o_c >> j) & 1) == 1)[None, :]
    straddling = apart(o_c[:, None], o_c[None, :], j)
    b_m = tl.where(straddling, b_mu, 0.0).to(dt)
    b_l = tl.where(straddling, b_lu, 0.0).to(dt)
    e = tl.exp2(interval_sum(hi, mid, lo, to_reference(o_c[None, :], o_c[:, None], j), 3 if PRECISION == "ieee" else 2))
    b_ke = (b_k * (e * tl.where(second, 1.0, b_beta[None, :]))).to(dt)
    b_qe = tl.where(second, b_q * e, 0.0).to(dt)
    b_dql = tl.where(second, e, 0.0) * tl.dot(b_ke, b_m, input_precision=PRECISION)
    b_dkl = tl.dot(b_ke, b_l, input_precision=PRECISION)
    b_dkl = e * tl.dot(b_qe, b_m, b_dkl, input_precision=PRECISION)
    p_hi, p_lo = _summands(b_q * b_dql + b_k * (b_dkl * tl.where(second, 1.0, b_beta[None, :])), dt)
    b_dgamma = _sums(p_hi, p_lo, to_reference(o_c[:, None], o_c[None, :], j), b_dgamma, dt, PRECISION)
    b_dkr += tl.where(second, b_dkl, 0.0)
    b_dkc += tl.where(second, 0.0, b_dkl)
    return b_dq + b_dql, b_dkr, b_dkc, b_dgamma


@triton.jit
def _any_decay(
    b_dq, b_dkr, b_dkc, b_dgamma, b_q, b_k, b_beta, b_mu, b_lu, hi, mid, lo, o_c, scale,
    LEVELS: tl.constexpr, dt: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dq, to the row and the column part of dk and to dgamma, by levels: right for every decay.

    b_dq, b_dkr and b_dkc come as the products with the states, which are scaled here.
    """
    TERMS: tl.constexpr = 3 if PRECISION == "ieee" else 2
    # Each with its transpose added, so that one product a level serves both.
    b_mu += tl.trans(b_mu)
    b_lu += tl.trans(b_lu)
    e = tl.exp2(interval_sum(hi, mid, lo, o_c[:, None] <= o_c[None, :], TERMS))
    b_dq *= e * scale
    b_dkr *= -e
    p_hi, p_lo = _summands(b_q * b_dq + b_k * b_dkr, dt)
    b_dgamma = _sums(p_hi, p_lo, o_c[:, None] >= o_c[None, :], b_dgamma, dt, PRECISION)
    b_dkc *= tl.exp2(interval_sum(hi, mid, lo, o_c[:, None] > o_c[None, :], TERMS))
    p_hi, p_lo = _summands(b_k * b_dkc * b_beta[None, :], dt)
    b_dgamma = _sums(p_hi, p_lo, o_c[:, None] < o_c[None, :], b_dgamma, dt, PRECISION)
    for j in tl.range(0, LEVELS, disable_licm=True):
        b_dq, b_dkr, b_dkc, b_dgamma = _level(
            b_dq, b_dkr, b_dkc, b_dgamma, b_q, b_k, b_beta, b_mu, b_lu, hi, mid, lo, o_c, j, dt, PRECISION
        )
    return b_dq, b_dkr, b_dkc, b_dgamma


@triton.jit
def _mild_decay(
    b_dq, b_dkr, b_dkc, b_dgamma, b_q, b_k, b_beta, b_mu, b_lu, total, hi, mid, lo, o_c, scale, dt: tl.constexpr,
):  # fmt: skip
    """The same for a block whose decays over the chunk stay within MILD: one reference, half the chunk's decay.

    Factors go into products as two parts, rounded to 16 bits together: what a pair gives to its row and takes from its
    column cancels in the decay gradient, the sum from row t on, of which a factor rounded to 8 bits leaves an error.
    """
    half = 0.5 * total
    shift = tl.exp2(half)[:, None]
    x = interval_sum(hi, mid, lo, o_c[:, None] <= o_c[None, :], 2) - half[:, None]
    rise = tl.exp2(x)
    # Not a difference from 0: a product with -1 becomes a modifier of exp2's operand.
    fall = tl.exp2(x * -1.0)
    kb = b_k * fall * b_beta[None, :]
    kr = b_k * rise
    qr = b_q * rise
    kb_hi, kb_lo = _two_parts(kb, dt)
    b_dq = tl.dot(kb_lo, b_mu, tl.dot(kb_hi, b_mu, b_dq * (shift * scale)))
    b_dkr = tl.dot(kb_lo, b_lu, tl.dot(kb_hi, b_lu, b_dkr * -shift))
    b_dkc *= shift
    ends = tl.sum(kb * b_dkc, 1)
    hi, lo = _two_parts(qr, dt)
    b_mu = tl.trans(b_mu)
    b_dkc = tl.dot(lo, b_mu, tl.dot(hi, b_mu, b_dkc))
    hi, lo = _two_parts(kr, dt)
    b_lu = tl.trans(b_lu)
    b_dkc = tl.dot(lo, b_lu, tl.dot(hi, b_lu, b_dkc))
    b_dgamma = _cancelling_sums(qr * b_dq + kr * b_dkr - kb * b_dkc, b_dgamma, o_c, dt) + ends[:, None]
    return b_dq * rise, b_dkr * rise, b_dkc * fall, b_dgamma


@triton.jit
def _sum_of_ends(
    initial_state, grad_final_state, i_nh, o_k, K: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    V_FIRST: tl.constexpr,
):  # fmt: skip
    """Σ_v of a sequence's initial state times the gradient of its final one, for channels ``o_k``."""
    b_sums = tl.zeros(o_k.shape, tl.float32)
    for i_v in tl.range(0, VP // 16, disable_licm=True):
        o_v = i_v * 16 + tl.arange(0, 16)
        b_s = load_state(initial_state, i_nh, o_v, o_k, K, V, V_FIRST)
        b_sums += tl.sum(b_s * load_state(grad_final_state, i_nh, o_v, o_k, K, V, V_FIRST), 0)
    return b_sums


_NUMBERS = ["scale", "o_scale", "lower_bound", "T", "T_row", "NT", "N", "rows"]
"""Parameters that the compiler must not look at: most of them change with the lengths of the sequences."""


@triton.jit(do_not_specialize=_NUMBERS)
def gradients_kernel(
    q, k, g, beta, A_log, dt_bias, do, dv, z, states, state_grads, D, norms,
    dq, dk, dg, dbeta, dA_partial, dbias_partial, initial_state, grad_final_state, cu_seqlens,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, s_ob, s_ot, s_oh,
    scale, o_scale, lower_bound, T, T_row, NT, N, rows,
    H: tl.constexpr, HV: tl.constexpr, HO: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, BETA_SIGMOID: tl.constexpr, BETA_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TOKENS: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = KP // BK
    i_k = tl.program_id(0) % NK
    i_h = (tl.program_id(0) // NK) % HV
    i_slot = tl.program_id(0) // (NK * HV)
    i_n, i_b, t0, eos = rows_of_slot(cu_seqlens, i_slot, T, N, NT, C)
    if t0 >= eos:
        return
    # Fewer rows may decay less: what cancels in sums over rows would be large beside what is left of them.
    count = tl.minimum(eos - t0, C)
    # One row alone has pairs with the states only: without an initial one dg is zero, which sums that cancel are not.
    mildest = tl.where(count > 1, count * (-MILD / C), 1.0)
    dt = q.dtype.element_ty
    i_b = i_b.to(tl.int64)
    o_c = tl.arange(0, C)
    o_k = i_k * BK + tl.arange(0, BK)
    m_c = t0 + o_c < eos
    m_k = o_k < K
    m_kc = m_k[:, None] & m_c[None, :]
    row = i_b * T + t0
    if not TOKENS:
        dv += (row * HV + i_h) * V
    dbeta += (i_k.to(tl.int64) * rows + row) * HV + i_h
    # Rows of dg hold HO heads, which may be more than the call's; so do those of dq and dk, but for grouped heads.
    HH: tl.constexpr = HO if H == HV else HV
    dg += (row * HO + i_h) * K
    dq += (row * HH + i_h) * K
    dk += (row * HH + i_h) * K
    o_dg = o_c[None, :] * (HO * K) + o_k[:, None]
    o_out = o_c[None, :] * (HH * K) + o_k[:, None]
    if cu_seqlens is not None:  # noqa: SIM102
        if i_n >= N:
            # Rows behind the last sequence: their gradients are zero.
            zero = tl.zeros([BK, C], tl.float32)
            tl.store(dq + o_out, zero.to(dq.dtype.element_ty), mask=m_kc)
            tl.store(dk + o_out, zero.to(dk.dtype.element_ty), mask=m_kc)
            tl.store(dg + o_dg, zero.to(dg.dtype.element_ty), mask=m_kc)
            for i_v in range(0, VP // BV):
                o_v = i_v * BV + tl.arange(0, BV)
                o_dv = o_c[None, :] * (HV * V) + o_v[:, None]
                tl.store(dv + o_dv, tl.zeros([BV, C], dt), mask=(o_v < V)[:, None] & m_c[None, :])
            tl.store(dbeta + o_c * HV, tl.zeros([C], tl.float32), mask=m_c)
            return
    row0 = i_b * T_row + t0
    q += i_b * s_qb + row0 * s_qt + (i_h // (HV // H)).to(tl.int64) * s_qh
    k += i_b * s_kb + row0 * s_kt + (i_h // (HV // H)).to(tl.int64) * s_kh
    g += i_b * s_gb + row0 * s_gt + i_h.to(tl.int64) * s_gh
    beta += i_b * s_bb + row0 * s_bt + i_h.to(tl.int64) * s_bh
    if not TOKENS:
        do += i_b * s_ob + row0 * s_ot + i_h.to(tl.int64) * s_oh
    block = i_slot.to(tl.int64) * HV + i_h
    if not DESCRIPTORS:
        states += block * (KP * VP)
        state_grads += block * (KP * VP)
        z += block * (C * VP)

    b_g = tl.load(g + o_c[None, :] * s_gt + o_k[:, None], mask=m_kc, other=0.0)
    b_q = tl.load(q + o_c[None, :] * s_qt + o_k[:, None], mask=m_kc, other=0.0)
    b_k = tl.load(k + o_c[None, :] * s_kt + o_k[:, None], mask=m_kc, other=0.0)
    # Blocks are transposed, [channels, C], here and below; so are Mu and Lu, [column, row]: then one operand from z
    # serves both, and the others are those of the products with the states. Products in full precision, on scalar
    # units, would spill for it.
    SCALAR: tl.constexpr = dt == tl.float32
    b_mu = tl.zeros([C, C], tl.float32)
    b_lu = tl.zeros([C, C], tl.float32)
    b_dq = tl.zeros([BK, C], tl.float32)
    b_dkr = tl.zeros([BK, C], tl.float32)
    b_dkc = tl.zeros([BK, C], tl.float32)
    b_sums = tl.zeros([BK, 16], tl.float32)
    for i_v in tl.range(0, VP // BV, disable_licm=True, num_stages=STAGES):
        o_v = i_v * BV + tl.arange(0, BV)
        m_vc = (o_v < V)[:, None] & m_c[None, :]
        if DESCRIPTORS:
            b_s = tl.trans(states.load([(block * VP).to(tl.int32) + i_v * BV, i_k * BK]))
            b_ds = tl.trans(state_grads.load([(block * VP).to(tl.int32) + i_v * BV, i_k * BK]))
            b_z = tl.trans(z.load([(block * C).to(tl.int32), i_v * BV]))
        else:
            o_s = o_v[None, :] * KP + o_k[:, None]
            b_s = tl.load(states + o_s)
            b_ds = tl.load(state_grads + o_s)
            b_z = tl.load(z + o_c[None, :] * VP + o_v[:, None])
        if dt == tl.bfloat16:
            # Σ_v S ⊙ dS as a product with ones; each of its columns is the sum. The terms go in as two parts: rounded
            # to bfloat16 they would be the largest error of a short sequence's dg. (The diagonal of S dSᵀ spills more.)
            b_sd = b_s.to(tl.float32) * b_ds.to(tl.float32)
            b_hi, hi_wide = rounded(b_sd, dt)
            ones = tl.full([BV, 16], 1.0, dt)
            b_sums = tl.dot((b_sd - hi_wide).to(dt), ones, tl.dot(b_hi, ones, b_sums))
        else:
            b_sums += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)[:, None]
        if TOKENS:
            b_dv = tl.trans(dv.load([row.to(tl.int32), i_h * V + i_v * BV]))
        else:
            b_dv = tl.load(dv + o_c[None, :] * (HV * V) + o_v[:, None], mask=m_vc, other=0.0)
        if SCALAR:
            b_lu = tl.dot(tl.trans(b_dv), b_z, b_lu, input_precision=PRECISION)
        else:
            b_lu = tl.dot(tl.trans(b_z), b_dv, b_lu, input_precision=PRECISION)
        b_dkr = tl.dot(b_s, b_dv, b_dkr, input_precision=PRECISION)
        b_dkc = tl.dot(b_ds, b_z, b_dkc, input_precision=PRECISION)
        if TOKENS:
            b_do = tl.trans(do.load([row.to(tl.int32), (i_h * s_oh).to(tl.int32) + i_v * BV]))
        else:
            b_do = tl.load(do + o_c[None, :] * s_ot + o_v[:, None], mask=m_vc, other=0.0).to(dt)
        if SCALAR:
            b_mu = tl.dot(tl.trans(b_do), b_z, b_mu, input_precision=PRECISION)
        else:
            b_mu = tl.dot(tl.trans(b_z), b_do, b_mu, input_precision=PRECISION)
        b_dq = tl.dot(b_s, b_do, b_dq, input_precision=PRECISION)
    if SCALAR:
        b_mu, b_lu = tl.trans(b_mu), tl.trans(b_lu)
    b_mu *= scale
    b_lu = -b_lu
    # The state gradients come without the part of the scale that is no power of two (backward_reverse).
    b_dkc *= o_scale
    diagonal = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_mu, 0.0), 1)
    above = o_c[:, None] < o_c[None, :]
    b_mu = tl.where(above, b_mu, 0.0).to(dt)
    b_lu = tl.where(above, b_lu, 0.0).to(dt)

    b_beta = tl.load(beta + o_c * s_bt, mask=m_c, other=0.0).to(tl.float32)
    beta_slope = tl.full([C], 1.0, tl.float32)
    if BETA_SIGMOID:
        # s(x)·s(−x) and not s·(1 − s), which loses every digit for large logits.
        beta_slope = sigmoid(-b_beta)
        b_beta = tl.where(m_c, BETA_SCALE * sigmoid(b_beta), 0.0)
        beta_slope *= b_beta
    a = gate_rate(A_log, i_h)
    b_bias = tl.zeros([BK], tl.float32)
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_y = tl.where(m_kc, log2_decay(b_g.to(tl.float32), a, b_bias, lower_bound, GATE), 0.0)
    hi, mid, lo = split3(b_y, dt)
    # The sum of 16 equal numbers is exact.
    decay = tl.load(D + block * KP + o_k)
    b_sums = tl.sum(b_sums, 1) * (decay * (o_scale / 16))
    if initial_state is not None:
        # Both states of a sequence of one chunk are the call's own: as they were given, not as they were stored.
        start = 0
        if cu_seqlens is not None:
            start = tl.load(cu_seqlens + i_n).to(tl.int32)
        if eos - start <= C:
            b_sums = decay * _sum_of_ends(initial_state, grad_final_state, i_n * HV + i_h, o_k, K, V, VP, V_FIRST)
    b_dgamma = tl.zeros([BK, C], tl.float32) + b_sums[:, None]
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    if norms is not None:
        b_q *= tl.load(norms + block * (2 * C) + o_c)[None, :]
        b_k *= tl.load(norms + block * (2 * C) + C + o_c)[None, :]
    # The matrix unit adds up the rows in the layout that the products have.
    ones = tl.full([C, 16], 1.0, hi.dtype)
    total = tl.sum(tl.dot(mid, ones, tl.dot(hi, ones)), 1) * (1 / 16)
    if MILD > 0 and tl.min(total) >= mildest:
        b_dq, b_dkr, b_dkc, b_dgamma = _mild_decay(
            b_dq, b_dkr, b_dkc, b_dgamma, b_q, b_k, b_beta, b_mu, b_lu, total, hi, mid, lo, o_c, scale, dt
        )
    else:
        b_dq, b_dkr, b_dkc, b_dgamma = _any_decay(
            b_dq, b_dkr, b_dkc, b_dgamma, b_q, b_k, b_beta, b_mu, b_lu, hi, mid, lo, o_c, scale, LEVELS, dt, PRECISION
        )
    # The diagonal of M has no decay.
    b_dkc += diagonal[None, :] * b_q
    b_dq += (diagonal * b_beta)[None, :] * b_k
    tl.store(dq + o_out, b_dq.to(dq.dtype.element_ty), mask=m_kc)
    tl.store(dk + o_out, (b_dkr + b_dkc * b_beta[None, :]).to(dk.dtype.element_ty), mask=m_kc)
    tl.store(dbeta + o_c * HV, tl.sum(b_k * b_dkc, 0) * beta_slope, mask=m_c)
    if GATE != "none":
        # Read again rather than kept in registers, which are all taken in between.
        b_g = tl.load(g + o_c[None, :] * s_gt + o_k[:, None], mask=m_kc, other=0.0).to(tl.float32)
        b_g = tl.where(m_kc, b_g + b_bias[:, None], 0.0)
        b_dgamma = tl.where(m_kc, b_dgamma, 0.0)
        b_dgamma, summand = gate_gradient(b_g, a, lower_bound, b_dgamma, GATE, dt == tl.float32)
        if dt_bias is not None:
            tl.store(dbias_partial + block * K + o_k, tl.sum(b_dgamma, 1), mask=m_k)
        if A_log is not None:
            tl.store(dA_partial + block * NK + i_k, tl.sum(summand))
    tl.store(dg + o_dg, b_dgamma.to(dg.dtype.element_ty), mask=m_kc)

"""Gradients of q and k (as the recurrence sees them: normalised), g and β, one program a slot and value head.

With S the state at the start of the slot's C rows, dS the gradient of the one at their end, z and dv of the
recurrences, E_rs = exp(G_r − G_s), Mu = scale · do zᵀ and Lu = −dv zᵀ:

    dq        = scale · exp G ⊙ do Sᵀ + Σ_s Mu_rs β_s k_s E_rs                           (s ≤ r)
    row       = −exp G ⊙ dv Sᵀ + Σ_s Lu_rs β_s k_s E_rs                                  (s < r)
    column_s  = exp(G_C − G_s) ⊙ z dSᵀ + Σ_r (Mu_rs q_r [s ≤ r] + Lu_rs k_r [s < r]) E_rs
    dk = row + β column        dβ = Σ_c k ⊙ column

The sums over pairs run over hierarchical reference points: for half blocks of b = 16, 8, …, 1 rows the pairs that
straddle the middle of a 2b-block, with no exponent above 0. All of a slot's rows are one tile: two of 16 would spare
half of the products' terms, and have more values alive at a time than a lane has registers for.

Decays: dγ_t collects what every pair (r, s), s < t ≤ r, gives. Within a level these are the rows from t to the end of
t's second half, or those before t in t's first half: sums of the terms that reach t, in which nothing has to cancel (as
it must in a reverse cumulative sum of q dq − k dk). Terms through S reach rows up to their own, those through dS rows
after it, and exp G_C ⊙ Σ_v S ⊙ dS reaches all.

Grid: slots · HV programs along axis 0, heads fastest. Outputs are contiguous. Every offset is int64, from the program
id up.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.decay import after, chained_sum, through
from kda_core.triton_lib.gate import NORM_EPS, gate_gradient, gate_rate, log2_decay, sigmoid, write_strength
from kda_core.triton_lib.packing import rows_of_slot
from kda_core.triton_lib.parts import split
from kda_core.triton_lib.squares import apart, to_reference
from kda_core.triton_lib.state_blocks import state_offsets

_NUMBERS = ["scale", "lower_bound", "T", "N", "chunks", "HV", "group", "s_qb", "s_kb", "s_gb", "s_bb", "s_ob"]
"""Parameters that are not specialised: most of them change with the lengths of the sequences."""


@triton.jit
def _inverse_norms(x, o_row, s_t, m_row, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr):
    """1 / sqrt(Σ x² + ε) of rows."""
    squares = tl.zeros([o_row.shape[0], BK], tl.float32)
    for i_k in range(0, KP, BK):
        b_x = _rows(x, o_row * s_t, m_row, i_k + tl.arange(0, BK), K).to(tl.float32)
        squares += b_x * b_x
    return tl.rsqrt(tl.sum(squares, 1) + NORM_EPS)


@triton.jit
def _rows(x, offsets, m_row, columns, WIDTH: tl.constexpr):
    """Rows of x at these offsets, zero outside the sequence and past WIDTH."""
    mask = m_row[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + offsets[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _gate_inputs(g, dt_bias, offsets, m_row, o_k, K: tl.constexpr):
    """Gate inputs with their bias."""
    b_g = _rows(g, offsets, m_row, o_k, K).to(tl.float32)
    if dt_bias is not None:
        b_g += tl.load(dt_bias + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    return b_g


@triton.jit
def _level(b_q, b_k, b_beta, b_mu, b_lu, parts, r, j, sums, TERMS: tl.constexpr, DOT: tl.constexpr, dtype):
    """Add the pairs of the level with half-blocks of 2^j rows to ``sums``: dq, row, column and dγ."""
    pairs = apart(r[:, None], r[None, :], j) & (r[:, None] > r[None, :])
    mu = tl.where(pairs, b_mu, 0.0).to(dtype)
    lu = tl.where(pairs, b_lu, 0.0).to(dtype)
    reference = to_reference(r[:, None], r[None, :], j)
    e = tl.exp2(chained_sum(reference, parts, TERMS))
    k_e = b_k * e
    written = (k_e * b_beta[:, None]).to(dtype)
    # Rows of second halves have entries in mu and lu, rows of first halves in their transposes; the others get zeros.
    dq = tl.dot(mu, written, input_precision=DOT) * e
    row = tl.dot(lu, written, input_precision=DOT) * e
    column = tl.dot(tl.trans(lu), k_e.to(dtype), input_precision=DOT)
    column = tl.dot(tl.trans(mu), (b_q * e).to(dtype), column, input_precision=DOT) * e
    reach = b_q * dq + b_k * (row + b_beta[:, None] * column)
    reached = chained_sum(tl.trans(reference.to(tl.float32)), split(reach, TERMS), TERMS)
    return sums[0] + dq, sums[1] + row, sums[2] + column, sums[3] + reached


@triton.jit
def _sum_of_ends(
    initial_state, grad_final_state, o_k, s_ik, s_iv, s_fk, s_fv, K: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Σ_v of an initial state times the gradient of the final one, for channels ``o_k``, as they were given."""
    products = tl.zeros([BV, BK], tl.float32)
    for i_v in range(0, VP, BV):
        o_v = (i_v + tl.arange(0, BV)).to(tl.int64)
        mask = (o_v < V)[:, None] & (o_k < K)[None, :]
        b_s = tl.load(initial_state + state_offsets(o_v, o_k, s_ik, s_iv), mask=mask, other=0.0).to(tl.float32)
        b_ds = tl.load(grad_final_state + state_offsets(o_v, o_k, s_fk, s_fv), mask=mask, other=0.0)
        products += b_s * b_ds.to(tl.float32)
    return tl.sum(products, 0)


@triton.jit(do_not_specialize=_NUMBERS)
def gradients_kernel(
    q, k,  # [B, T, H, K]
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    A_log, dt_bias,  # [HV] and [HV, K], or None
    do,  # [B, T, HV, V]
    z,  # [slots, HV, C, VP]
    states, state_grads,  # [slots, HV, VP, KP]
    dq, dk,  # [B, T, HV, K]
    dv,  # [B, T, HV, V]; read, and zeroed behind the last sequence
    dg,  # [B, T, HV, K]
    dbeta,  # [B, T, HV]
    dA_log, ddt_bias,  # [slots, HV] and [slots, HV, K], float32, or None
    initial_state, grad_final_state,  # [N, HV, K, V] (or [..., V, K]); both or none
    cu_seqlens,  # [N + 1] or None
    scale, lower_bound,
    T, N, chunks,  # chunks of a dense sequence
    HV, group,  # value heads a key head
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, s_ob, s_ot, s_oh,
    s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk, s_fv,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr,
    UNIT: tl.constexpr,  # batch strides are given in this many elements, so that alignment shows
    GATE: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr,
    LEVEL_LOOP: tl.constexpr,  # one level at a time
    TERMS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    i_slot = pid // HV
    i_h = pid % HV
    i_kh = i_h // group
    i_n, i_b, first_row, end = rows_of_slot(cu_seqlens, i_slot, T, N, chunks, C)
    count = tl.minimum(end - first_row, C)
    if count <= 0:
        return
    levels: tl.constexpr = 5  # half blocks of 1, 2, …, C / 2 rows
    r = tl.arange(0, C)
    o_row = r.to(tl.int64)
    m_row = r < count
    out = (i_b * T + first_row) * HV + i_h
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
            offsets = o_row[:, None] * HV * K + o_k[None, :]
            tl.store(dq + offsets, tl.zeros([C, BK], dq.dtype.element_ty), mask=mask)
            tl.store(dk + offsets, tl.zeros([C, BK], dk.dtype.element_ty), mask=mask)
            tl.store(dg + offsets, tl.zeros([C, BK], dg.dtype.element_ty), mask=mask)
        for i_v in range(0, VP, BV):
            o_v = i_v + tl.arange(0, BV)
            offsets = o_row[:, None] * HV * V + o_v[None, :]
            zero = tl.zeros([C, BV], dv.dtype.element_ty)
            tl.store(dv + offsets, zero, mask=m_row[:, None] & (o_v < V)[None, :])
        tl.store(dbeta + o_row * HV, tl.zeros([C], dbeta.dtype.element_ty), mask=m_row)
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
    EXACT: tl.constexpr = dtype == tl.float32
    # The states at both ends of a sequence of one chunk are the call's own: read as given, not as stored.
    one_chunk = False
    if initial_state is not None:
        initial_state += i_n * s_in + i_h * s_ih
        grad_final_state += i_n * s_fn + i_h * s_fh
        if cu_seqlens is None:
            one_chunk = T <= C
        else:
            one_chunk = tl.load(cu_seqlens + i_n + 1) - tl.load(cu_seqlens + i_n) <= C
    rate = gate_rate(A_log, i_h)
    if dt_bias is not None:
        dt_bias += i_h * K
    raw_beta = tl.load(beta + o_row * s_bt, mask=m_row, other=0.0).to(tl.float32)
    b_beta = tl.where(m_row, write_strength(raw_beta, SIGMOID, NEG_EIGVAL, EXACT), 0.0)
    if L2NORM:
        q_norm = _inverse_norms(q, o_row, s_qt, m_row, K, KP, BK)
        k_norm = _inverse_norms(k, o_row, s_kt, m_row, K, KP, BK)
    else:
        q_norm = tl.full([C], 1.0, tl.float32)
        k_norm = tl.full([C], 1.0, tl.float32)
    mu = tl.zeros([C, C], tl.float32)
    lu = tl.zeros([C, C], tl.float32)
    b_dbeta = tl.zeros([C], tl.float32)
    for i_v in range(0, VP, BV):
        o_v = i_v + tl.arange(0, BV)
        b_do = _rows(do, o_row * s_ot, m_row, o_v, V)
        b_dv = _rows(dv, o_row * HV * V, m_row, o_v, V)
        b_z = tl.trans(tl.load(z + r[:, None] * VP + o_v[None, :]))
        mu = tl.dot(b_do, b_z, mu, input_precision=DOT)
        lu = tl.dot(b_dv, b_z, lu, input_precision=DOT)

    dA = tl.zeros([C], tl.float32)
    everything = (r[:, None] + r[None, :]) >= 0
    from_row = r[None, :] >= r[:, None]
    before_row = r[None, :] < r[:, None]
    # Masks are formed again in every block of channels: kept across blocks they would fill the registers.
    for i_k in tl.range(0, KP, BK, disable_licm=True):
        o_k = i_k + tl.arange(0, BK)
        b_dq = tl.zeros([C, BK], tl.float32)
        b_row = tl.zeros([C, BK], tl.float32)
        b_column = tl.zeros([C, BK], tl.float32)
        products = tl.zeros([BV, BK], tl.float32)
        for i_v in range(0, VP, BV):
            o_v = i_v + tl.arange(0, BV)
            o_s = o_v[:, None] * KP + o_k[None, :]
            b_s = tl.load(states + o_s)
            b_ds = tl.load(state_grads + o_s)
            products += b_s.to(tl.float32) * b_ds.to(tl.float32)
            b_do = _rows(do, o_row * s_ot, m_row, o_v, V)
            b_dv = _rows(dv, o_row * HV * V, m_row, o_v, V)
            b_z = tl.load(z + r[:, None] * VP + o_v[None, :])
            b_dq = tl.dot(b_do, b_s, b_dq, input_precision=DOT)
            b_row = tl.dot(b_dv, b_s, b_row, input_precision=DOT)
            b_column = tl.dot(b_z, b_ds, b_column, input_precision=DOT)
        summed = tl.sum(products, 0)
        if initial_state is not None:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
            if one_chunk:
                summed = _sum_of_ends(initial_state, grad_final_state, o_k, s_ik, s_iv, s_fk, s_fv, K, V, VP, BV, BK)

        b_q = _rows(q, o_row * s_qt, m_row, o_k, K).to(tl.float32) * q_norm[:, None]
        b_k = _rows(k, o_row * s_kt, m_row, o_k, K).to(tl.float32) * k_norm[:, None]
        y = log2_decay(_gate_inputs(g, dt_bias, o_row * s_gt, m_row, o_k, K), rate, 0.0, lower_bound, GATE)
        parts = split(tl.where(m_row[:, None] & (o_k < K)[None, :], y, 0.0), TERMS)
        # Terms that go through the states: decays from the slot's start through a row, and behind it to the slot's end.
        into = tl.exp2(chained_sum(through(r, r), parts, TERMS))
        out_of = tl.exp2(chained_sum(after(r, r), parts, TERMS))
        # The decay of the whole slot is the same in each row of ``total``.
        total = tl.exp2(chained_sum(everything, parts, TERMS))
        b_dq *= into * scale
        b_row *= -into
        b_column *= out_of
        dgamma = total * summed[None, :]
        reach = split(b_q * b_dq + b_k * b_row, TERMS)
        dgamma += chained_sum(from_row, reach, TERMS)
        reach = split(b_k * b_column * b_beta[:, None], TERMS)
        dgamma += chained_sum(before_row, reach, TERMS)
        # Then the pairs.
        sums = (b_dq, b_row, b_column, dgamma)
        b_mu = mu * scale
        b_lu = -lu
        if LEVEL_LOOP:
            for level in tl.range(0, levels, disable_licm=True):
                sums = _level(b_q, b_k, b_beta, b_mu, b_lu, parts, r, level, sums, TERMS, DOT, dtype)
        else:
            for level in tl.static_range(levels):
                sums = _level(b_q, b_k, b_beta, b_mu, b_lu, parts, r, level, sums, TERMS, DOT, dtype)
        # The diagonal of M has no decay.
        diagonal = tl.sum(tl.where(r[:, None] == r[None, :], b_mu, 0.0), 1)
        b_dq = sums[0] + (diagonal * b_beta)[:, None] * b_k
        b_column = sums[2] + diagonal[:, None] * b_q
        dgamma = sums[3]
        b_dbeta += tl.sum(b_k * b_column, 1)
        mask = m_row[:, None] & (o_k < K)[None, :]
        offsets = o_row[:, None] * HV * K + o_k[None, :]
        tl.store(dq + offsets, b_dq.to(dq.dtype.element_ty), mask=mask)
        tl.store(dk + offsets, (sums[1] + b_column * b_beta[:, None]).to(dk.dtype.element_ty), mask=mask)
        b_bias = tl.zeros([BK], tl.float32)
        if GATE != "none":
            # Loaded once more rather than kept: registers are what this kernel is short of.
            b_g = _gate_inputs(g, dt_bias, o_row * s_gt, m_row, o_k, K)
            dgamma = tl.where(mask, dgamma, 0.0)
            dgamma, summand = gate_gradient(b_g, rate, lower_bound, dgamma, GATE, EXACT)
            dA += tl.sum(summand, 1)
            b_bias += tl.sum(dgamma, 0)
        tl.store(dg + offsets, dgamma.to(dg.dtype.element_ty), mask=mask)
        if ddt_bias is not None:
            tl.store(ddt_bias + i_chunk * K + o_k, b_bias, mask=o_k < K)
    if dA_log is not None:
        tl.store(dA_log + i_chunk, tl.sum(dA, 0))
    if SIGMOID:
        b_dbeta *= b_beta * sigmoid(-raw_beta, EXACT)
    tl.store(dbeta + o_row * HV, b_dbeta.to(dbeta.dtype.element_ty), mask=m_row)

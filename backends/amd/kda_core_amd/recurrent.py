"""``fused_recurrent_kda`` forward: token by token, the state in registers; for decoding and short sequences.

With d = exp γ and S the state before the token, q and k as the caller gave them and r_q, r_k their factors (norm and,
for q, scale):

    u = β (v − r_k Sᵀ(k⊙d))      o = r_q Sᵀ(q⊙d) + r_q r_k (q·k) u      S ← d ⊙ S + k (r_k u)ᵀ

so that both sums over the key channels wait for the old state only, and not for each other or for the norms. All
arithmetic is float32, on vector units. Only o and the stored states are rounded to another dtype. d is rounded as well:
the error in a slow channel goes into the next token's d, so that a constant decay does not drift. (A second product for
every element of the state would cost a step up to a fifth of its time.) The block of the state keeps its order in
memory, [BV, KP] when V comes first and [KP, BV] otherwise, so that lanes read whole lines.

A pool: sequence n starts from slot indices[n, accepted − 1] (the first without counts) and leaves its last state in
indices[n, 0], or, when a sequence has a slot for every token, the state after token i in indices[n, i]. A negative
index or pad_slot_id as the first slot skips the sequence (its output is zero), as a later one it drops that state.

Grid: (N + 1 if packed) · HV · ceil(V / BV) programs along axis 0, value blocks fastest, then heads; "sequence" N zeroes
the rows behind the last one. Every offset is int64, from the sequence and head up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kda_core.triton_lib.commit_kernels import ancestors_of, parent_of, row_in, value_in
from kda_core.triton_lib.factor import decay_minus_one
from kda_core.triton_lib.gate import NORM_EPS, gate_rate, log2_decay, write_strength
from kda_core.triton_lib.packing import is_padding, starts_from_state

_NUMBERS = [
    "scale", "lower_bound", "T", "N", "HV", "group", "width", "s_qb", "s_kb", "s_vb", "s_gb", "s_bb", "s_ob", "s_rb",
    "s_row", "s_column", "pad_slot_id", "slots", "s_has", "s_final", "s_final_column", "final_width",
    "final_slots",
]  # fmt: skip
"""Parameters that are not specialised: most of them change with the lengths of the sequences."""


@triton.jit
def _zero_rows(p_o, begin, end, s_ot, o_v, m_v):
    """Zero rows [begin, end) of a block of value channels."""
    o_r = tl.arange(0, 16).to(tl.int64)
    for first in range(begin, end, 16):
        rows = first + o_r
        zero = tl.zeros([16, o_v.shape[0]], p_o.dtype.element_ty)
        tl.store(p_o + rows[:, None] * s_ot + o_v[None, :], zero, mask=(rows < end)[:, None] & m_v[None, :])


@triton.jit
def _decay(y, lost):
    """2^y rounded, y <= 0, and what rounding took from it; ``lost`` was taken from the decays before it.

    1 + expm1 has the digits that 2^y lost, and the rounded sum less 1 is exact down to 1/2. A channel that decays
    faster keeps nothing for long.
    """
    exact = decay_minus_one(y) + lost
    slow = exact + 1.0
    fast = y < -1.0
    return tl.where(fast, tl.exp2(y), slow), tl.where(fast, 0.0, exact - (slow - 1.0))


@triton.jit(do_not_specialize=_NUMBERS)
def recurrent(
    q, k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    A_log, dt_bias,  # [HV] and [HV, K], or None
    o,  # [B, T, HV, V]
    initial_state,  # [N or slots of a pool, HV, K, V] (or [..., V, K]) or None
    final_state,  # likewise, the pool itself when it is advanced in place; or None
    cu_seqlens,  # [N + 1] or None
    indices,  # [N] or [N, width], or None
    accepted, has_state,  # [N] and [N] bool, or None
    final_indices,  # [N, final_width] slots of final_state, or None: indices
    records,  # [B, T, HV, 2K + V] or None
    parents,  # [N, T], tokens that the tokens continue from, or None: each from the one before it
    scale, lower_bound, T, N,
    HV, group,  # value heads a key head
    width, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, s_ob, s_ot, s_oh,
    s_rb, s_rt, s_rh, s_in, s_ih, s_fn, s_fh, s_row, s_column, s_accepted, pad_slot_id, slots, s_has, s_final,
    s_final_column, final_width, final_slots,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    UNIT: tl.constexpr,  # batch strides are given in this many elements, so that alignment shows
    I_K: tl.constexpr, I_V: tl.constexpr,  # strides within a state, by key and value channel, of initial_state
    F_K: tl.constexpr, F_V: tl.constexpr,  # and of final_state
    V_FIRST: tl.constexpr,
    EVERY_TOKEN: tl.constexpr,  # each token has a slot
    GATE: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr,
):  # fmt: skip
    # Divisions take long in 64 bits, and a program id has 32.
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v = pid % BLOCKS
    i_h = pid // BLOCKS % HV
    i_kh = (i_h // group).to(tl.int64)
    i_n = (pid // BLOCKS // HV).to(tl.int64)
    i_h = i_h.to(tl.int64)
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V

    if cu_seqlens is None:
        i_b = i_n * UNIT
        bos = tl.zeros_like(i_n)
        eos = T.to(tl.int64)
    else:
        i_b = tl.zeros_like(i_n)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        eos = T.to(tl.int64)
        if i_n < N:
            eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
    o += i_b * s_ob + i_h * s_oh
    if i_n == N:
        _zero_rows(o, bos, eos, s_ot, o_v, m_v)
        return

    i_state = i_n
    if indices is not None:
        indices += i_n * s_row
        first = tl.zeros_like(i_n)
        if accepted is not None:
            count = tl.load(accepted + i_n * s_accepted).to(tl.int64)
            # A count out of range is the caller's error; clamped, it reads no memory that is not a table's.
            first = tl.minimum(tl.maximum(count, 1), width.to(tl.int64)) - 1
        i_state = tl.load(indices + first * s_column).to(tl.int64)
        if is_padding(i_state, pad_slot_id, slots):
            _zero_rows(o, bos, eos, s_ot, o_v, m_v)
            return
        if bos >= eos:
            return
        if final_indices is not None:
            # From here on only slots that are written are looked up.
            indices = final_indices + i_n * s_final
            s_column = s_final_column
            width = final_width
            slots = final_slots

    m_state = value_in(m_v, V_FIRST) & row_in(m_k, V_FIRST)
    S = tl.zeros(m_state.shape, tl.float32)
    if initial_state is not None:
        o_state = value_in(o_v.to(tl.int64) * I_V, V_FIRST) + row_in(o_k.to(tl.int64) * I_K, V_FIRST)
        p_state = initial_state + i_state * s_in + i_h * s_ih + o_state
        m_read = m_state
        if has_state is not None:
            m_read = tl.where(starts_from_state(has_state, i_n, s_has), m_read, False)
        S = tl.load(p_state, mask=m_read, other=0.0).to(tl.float32)
    o_state = value_in(o_v.to(tl.int64) * F_V, V_FIRST) + row_in(o_k.to(tl.int64) * F_K, V_FIRST)

    rate = gate_rate(A_log, i_h)
    bound = tl.where(m_k, lower_bound, 0.0)
    bias = tl.zeros([KP], tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    q += i_b * s_qb + i_kh * s_qh
    k += i_b * s_kb + i_kh * s_kh
    v += i_b * s_vb + i_h * s_vh
    g += i_b * s_gb + i_h * s_gh
    beta += i_b * s_bb + i_h * s_bh
    if records is not None:
        records += i_n * s_rb + i_h * s_rh
    channels: tl.constexpr = 1 if V_FIRST else 0
    lost = tl.zeros([KP], tl.float32)
    for t in range(bos, eos):
        if parents is not None:
            parent = parent_of(parents + i_n * T, t)
            if parent < t - 1:
                # Another branch: the state is that of the start, advanced by the ancestors, which come in their order.
                ancestors = ancestors_of(parents + i_n * T, parent)
                # This program's own stores of u may be read by other threads of it.
                tl.debug_barrier()
                S = tl.load(p_state, mask=m_read, other=0.0).to(tl.float32)
                lost = tl.zeros([KP], tl.float32)
                for a in range(0, parent + 1):
                    if (ancestors >> a) & 1:
                        # k and the decay anew: another program records them, and the decay's rounding goes on.
                        ancestor = tl.cast(a, tl.int64)
                        b_k = tl.load(k + ancestor * s_kt + o_k, mask=m_k, other=0.0).to(tl.float32)
                        b_g = tl.load(g + ancestor * s_gt + o_k, mask=m_k, other=0.0).to(tl.float32)
                        b_u = tl.load(records + ancestor * s_rt + 2 * K + o_v, mask=m_v, other=0.0)
                        if L2NORM:
                            b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + NORM_EPS)
                        decay, lost = _decay(log2_decay(b_g, rate, bias, bound, GATE), lost)
                        S = S * row_in(decay, V_FIRST)
                        S = tl.fma(value_in(b_u, V_FIRST), row_in(b_k, V_FIRST), S)
        b_q = tl.load(q + t * s_qt + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(k + t * s_kt + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_g = tl.load(g + t * s_gt + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(v + t * s_vt + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_beta = write_strength(tl.load(beta + t * s_bt), SIGMOID, NEG_EIGVAL)
        r_q = scale
        r_k = 1.0
        if L2NORM:
            r_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + NORM_EPS)
            r_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + NORM_EPS)
        decay, lost = _decay(log2_decay(b_g, rate, bias, bound, GATE), lost)
        b_y = tl.sum(S * row_in(b_k * decay, V_FIRST), channels)
        b_p = tl.sum(S * row_in(b_q * decay, V_FIRST), channels)
        b_u = b_beta * (b_v - r_k * b_y)
        b_o = r_q * b_p + tl.sum(b_q * b_k, 0) * (r_q * r_k) * b_u
        b_k *= r_k
        # ``commit_kernel`` has these two lines as well, and the same bits: no compiler may fuse otherwise.
        S = S * row_in(decay, V_FIRST)
        S = tl.fma(value_in(b_u, V_FIRST), row_in(b_k, V_FIRST), S)
        tl.store(o + t * s_ot + o_v, b_o.to(o.dtype.element_ty), mask=m_v)
        if records is not None:
            p_record = records + t * s_rt
            m_own = o_k < tl.where(i_v == 0, K, 0)
            tl.store(p_record + o_k, b_k, mask=m_own)
            tl.store(p_record + K + o_k, decay, mask=m_own)
            tl.store(p_record + 2 * K + o_v, b_u, mask=m_v)
        if EVERY_TOKEN:
            # A sequence longer than its row of the table is the caller's error; no other row is read for it.
            i_state = tl.load(indices + (t - bos) * s_column, mask=t - bos < width, other=-1).to(tl.int64)
            if not is_padding(i_state, pad_slot_id, slots):
                p_state = final_state + i_state * s_fn + i_h * s_fh + o_state
                tl.store(p_state, S.to(final_state.dtype.element_ty), mask=m_state)
    if (final_state is not None) and (not EVERY_TOKEN):
        if final_indices is not None:
            i_state = tl.load(indices).to(tl.int64)
            m_state = tl.where(is_padding(i_state, pad_slot_id, slots), False, m_state)
        p_state = final_state + i_state * s_fn + i_h * s_fh + o_state
        tl.store(p_state, S.to(final_state.dtype.element_ty), mask=m_state)

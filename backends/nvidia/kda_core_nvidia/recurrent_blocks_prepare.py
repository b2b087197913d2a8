"""Block-parallel kernel for prompts of ``fused_recurrent_kda``: gate, norms, decays, products and the inverse.

One program, one warp, a block of 16 rows and value head; what it writes and why it is exact: ``recurrent_blocks``.
Pass 1 sums squares of q and k, which scale their rows. Pass 2 goes over the channels in blocks of 16, adds up M and L
(from one reference where decays are BOUNDED, otherwise by levels), and stores ke, qg and kg in kA's place. Pass 3 turns
kg into kA = Aᵀ kg.

Grid: blocks · HV programs, heads fastest.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kda_core.triton_lib.decay import after, selected_sum, through
from kda_core.triton_lib.factor import decay_factor
from kda_core.triton_lib.gate import LOG2_E, NORM_EPS, gate_rate, log2_decay, write_strength
from kda_core.triton_lib.packing import is_padding
from kda_core.triton_lib.parts import split, two_parts
from kda_core.triton_lib.recurrent_kernels import zero_rows
from kda_core.triton_lib.squares import inverse_16
from kda_core_nvidia import recurrent_blocks as common
from kda_core_nvidia.prepare import _widen

_NUMBERS = ["scale", "lower_bound", "T", "N", "blocks", "s_index", "pad_slot_id", "slots"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["cu_seqlens", "indices"])
def blocks_prepare(
    q, k,  # [B, T, H, K]
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    A_log, dt_bias,  # [HV] and [HV, K], or None
    planes,  # [slots, HV, 6, 16, KP] float16
    squares,  # [slots, HV, 2, 16, 16] float16
    factors,  # [slots, HV, 3 * 16 + KP] float32
    o,  # [B, T, HV, V]; only rows that no recurrence writes
    cu_seqlens, indices,  # [N + 1] and [N], or None
    scale, lower_bound, T, N,
    blocks,  # blocks of a dense sequence
    s_qn, s_qt, s_qh, s_kn, s_kt, s_kh, s_gn, s_gt, s_gh, s_bn, s_bt, s_bh, s_on, s_ot, s_oh, s_ov, s_index: tl.int64,
    pad_slot_id: tl.int64, slots,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr, EXACT_OUT: tl.constexpr,
    BOUNDED: tl.constexpr,  # decays are at least exp(−5) a row
    TERMS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,  # the recurrence may start, and wait, before this kernel ends
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    pid = tl.program_id(0).to(tl.int64)
    i_slot = pid // HV
    i_h = pid % HV
    r = tl.arange(0, common.ROWS)
    if cu_seqlens is None:
        i_n = i_slot // blocks
        row = i_n
        start = ((i_slot % blocks) * common.ROWS).to(tl.int32)
        length = T
    else:
        if OVERLAP and pid == 0:
            # Begun before ``recurrent`` ended: one program waits, so that no kernel behind this one finds that running.
            gdc_wait()
        n, before = common.locate(cu_seqlens, N, i_slot, True)
        if n == N:
            return
        i_n = n.to(tl.int64)
        row = tl.load(cu_seqlens + i_n).to(tl.int64)
        start = ((i_slot - before) * common.ROWS).to(tl.int32)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - row).to(tl.int32)
    rows = start + r
    valid = rows < length
    rows = rows.to(tl.int64)
    if indices is not None:
        i_state = tl.load(indices + i_n * s_index).to(tl.int64)
        if is_padding(i_state, pad_slot_id, slots):
            p_o = o + row * s_on + i_h * s_oh
            zero_rows(p_o, s_ot, s_ov, start, tl.minimum(length, start + common.ROWS), 0, 1, V, VP)
            return

    p_q = q + row * s_qn + i_h // GROUP * s_qh + rows[:, None] * s_qt
    p_k = k + row * s_kn + i_h // GROUP * s_kh + rows[:, None] * s_kt
    p_g = g + row * s_gn + i_h * s_gh + rows[:, None] * s_gt
    b_beta = tl.load(beta + row * s_bn + i_h * s_bh + rows * s_bt, mask=valid, other=0.0)
    b_beta = write_strength(b_beta, SIGMOID, NEG_EIGVAL)
    rate = gate_rate(A_log, i_h)

    # Rows of q and k at a norm of 2^TOP; factors hold what their results are to be multiplied with.
    q_squares = tl.zeros([common.ROWS, 16], tl.float32)
    k_squares = tl.zeros([common.ROWS, 16], tl.float32)
    for i_k in tl.range(0, KP // 16, num_stages=STAGES):
        o_k = i_k * 16 + r
        mask = valid[:, None] & (o_k < K)[None, :]
        b_q = _widen(tl.load(p_q + o_k[None, :], mask=mask, other=0.0), 16)
        b_k = _widen(tl.load(p_k + o_k[None, :], mask=mask, other=0.0), 16)
        q_squares = tl.fma(b_q, b_q, q_squares)
        k_squares = tl.fma(b_k, b_k, k_squares)
    q_square = tl.sum(q_squares, 1)
    k_square = tl.sum(k_squares, 1)
    q_e = (common.exponent(q_square) >> 1) - (common.TOP - 1)
    k_e = (common.exponent(k_square) >> 1) - (common.TOP - 1)
    q_factor = common.power(q_e) * scale
    k_factor = common.power(k_e)
    if L2NORM:
        q_factor *= tl.rsqrt(q_square + NORM_EPS)
        k_factor *= tl.rsqrt(k_square + NORM_EPS)
    q_scale = common.power(-q_e)[:, None]
    k_scale = common.power(-k_e)

    diagonal = tl.zeros([common.ROWS, common.ROWS], tl.float32)
    m8, m4, m2, m1 = diagonal, diagonal, diagonal, diagonal
    l8, l4, l2, l1 = diagonal, diagonal, diagonal, diagonal
    p_factor = factors + pid * (3 * common.ROWS + KP)
    slope = tl.full([], -LOG2_E, tl.float32) * rate
    reach = tl.where(valid, lower_bound * LOG2_E, 0.0)[:, None]
    for i_k in tl.range(0, KP // 16, num_stages=STAGES):
        o_k = i_k * 16 + r
        mask = valid[:, None] & (o_k < K)[None, :]
        # Not by way of a product, as q and k: what is done to it is done where products take their right operands.
        b_g = tl.load(p_g + o_k[None, :], mask=mask, other=0.0).to(tl.float32)
        b_q = _widen(tl.load(p_q + o_k[None, :], mask=mask, other=0.0), 16) * q_scale
        b_k = common.scaled(tl.load(p_k + o_k[None, :], mask=mask, other=0.0), k_scale)
        bias = 0.0
        if dt_bias is not None:
            bias = tl.load(dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        if GATE == "bounded":
            y = common.bounded_decay(b_g, slope, bias, reach)
        else:
            y = tl.where(mask, log2_decay(b_g, rate, bias, lower_bound, GATE), 0.0)
        parts = split(y, TERMS)
        p_plane = planes + pid * (common.PLANES * common.ROWS * KP) + r[:, None] * KP + o_k[None, :]
        total = selected_sum(through(r, r), parts, TERMS)
        tl.store(p_factor + 3 * common.ROWS + o_k[None, :] + r[:, None] * 0, total, mask=r[:, None] == common.ROWS - 1)
        decay = common.power_of(total)
        common.store_halves(p_plane, b_k * decay, 2 * common.ROWS * KP)
        common.store_halves(p_plane + common.ROWS * KP, b_q * decay, 2 * common.ROWS * KP)
        decay = common.power_of(selected_sum(after(r, r), parts, TERMS))
        common.store_halves(p_plane + 4 * common.ROWS * KP, b_k * decay, common.ROWS * KP)
        diagonal = tl.fma(b_q, b_k, diagonal)
        # M and L.
        if BOUNDED:
            m8, l8 = common.pairs(b_q, b_k, parts, m8, l8, TERMS, EXACT_OUT)
        else:
            # Hierarchical reference points: no exponent is ever positive.
            m8, l8 = common.level(b_q, b_k, parts, m8, l8, 3, TERMS, EXACT_OUT)
            m4, l4 = common.level(b_q, b_k, parts, m4, l4, 2, TERMS, EXACT_OUT)
            m2, l2 = common.level(b_q, b_k, parts, m2, l2, 1, TERMS, EXACT_OUT)
            m1, l1 = common.level(b_q, b_k, parts, m1, l1, 0, TERMS, EXACT_OUT)
    if BOUNDED:
        below = r[:, None] > r[None, :]
        M = tl.where(below, m8, 0.0)
        L = tl.where(below, l8, 0.0)
    else:
        M = common.of_level(m8, m4, m2, m1)
        L = common.of_level(l8, l4, l2, l1)
    M = tl.where(r[:, None] == r[None, :], tl.sum(diagonal, 1)[:, None], M)
    L *= k_factor[:, None] * (b_beta * k_factor)[None, :]
    A = inverse_16(L, r, r, "ieee" if TERMS == 1 else "exact") * (b_beta * k_factor)[:, None]
    # Columns of A at a sum of 2^0: kA, sums of rows of a norm of 2^TOP, is then of at most that norm.
    a_e = common.exponent(tl.sum(tl.abs(A), 0)) + 1
    A *= common.power(-a_e)[None, :]
    p_square = squares + pid * (2 * common.ROWS * common.ROWS) + r[:, None] * common.ROWS + r[None, :]
    # Norms of 2^TOP each: |M| <= 2^(2 TOP), and |P| likewise.
    P = tl.dot(M * 2.0**-common.TOP, A, input_precision="tf32x3")
    common.store_halves(p_square, P, common.ROWS * common.ROWS)
    tl.store(p_factor + r, k_factor)
    tl.store(p_factor + common.ROWS + r, common.power(a_e))
    tl.store(p_factor + 2 * common.ROWS + r, q_factor)

    # kg was written by other threads of this program, and so were the sums of decays.
    tl.debug_barrier()
    a_high, a_low = two_parts(tl.trans(A) * 2.0**common.TOP, tl.float16)
    for i_k in tl.range(0, KP // 16, num_stages=STAGES):
        o_k = i_k * 16 + r
        p_plane = (
            planes + pid * (common.PLANES * common.ROWS * KP) + 4 * common.ROWS * KP + r[:, None] * KP + o_k[None, :]
        )
        kg_high = tl.load(p_plane)
        kg_low = tl.load(p_plane + common.ROWS * KP)
        b_ka = common.product(a_high, a_low, kg_high, kg_low, None, True) * 2.0**-common.TOP
        common.store_halves(p_plane, b_ka, common.ROWS * KP)
    p_total = p_factor + 3 * common.ROWS + tl.arange(0, KP)
    tl.store(p_total, decay_factor(tl.load(p_total)))

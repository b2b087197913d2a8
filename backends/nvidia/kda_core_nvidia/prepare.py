"""Chunk-parallel kernel of the forward: gate, norms, decays, products and the inverse, for ``triton_lib.layout``.

One program a chunk slot and value head; the chunk's 32 rows are two tiles of 16 (0 and 1 below), so that every product
is a plain one of the matrix unit's own shape and nothing needs a gather or a slice:

    M = [M00  0 ]      L = [L00  0 ]      X = (I + L)⁻¹ = [X00              0 ]
        [M10 M11]          [L10 L11]                      [−X11 L10 X00   X11]

Pass 1 goes over the channels in blocks of BK, adds up M and L, and stores ke, qg and kg (in kA's place); pass 2 turns
kg into kA = Aᵀ kg. It and the norms, which need few registers, take blocks of BW. Decays inside a tile are exact for
any gate (hierarchical reference points), or take the short way when they are known to be at least exp(−5) a row
(BOUNDED).

A backward runs it once more with what a forward kept of every chunk, the inverse and the norms: then no norms, no pair
products and no inverse are computed, kA needs no pass of its own, and the results are the same bits.

Grid: slots · HV programs, heads fastest. Index arithmetic is int64 from the slot up.
"""

import triton
import triton.language as tl

from kda_core.triton_lib import decay
from kda_core.triton_lib.gate import NORM_EPS, gate_rate, log2_decay, write_strength
from kda_core.triton_lib.packing import is_padding, sequence_of_slot
from kda_core.triton_lib.parts import split, two_parts
from kda_core.triton_lib.squares import add_pairs, inverse_16, store_square, straddles, to_reference

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter knows no assembly, and multiplies bfloat16 operands wrongly."""

_NUMBERS = [
    "scale", "lower_bound", "T", "N", "chunks", "HV", "group", "s_qb", "s_kb", "s_gb", "s_bb", "s_ob", "s_index",
    "pad_slot_id", "slots",
]  # fmt: skip
"""Parameters that the compiler must not look at: most of them change with the lengths of the sequences."""


@triton.jit
def _diagonal(x):
    """Diagonal of a 16×16 matrix."""
    r = tl.arange(0, 16)
    return tl.sum(tl.where(r[:, None] == r[None, :], x, 0.0), 1)


@triton.jit
def _row_products(
    q, k, rows0, rows1, valid0, valid1, s_qt, s_kt,
    K: tl.constexpr, BK: tl.constexpr, KP: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, NORMS: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    """For both tiles' rows, from the diagonals of q qᵀ, k kᵀ and q kᵀ: reciprocal norms of q and of k (NORMS), and
    products of q with a row's own k (OWN); ones and zeros where they are not asked for."""
    zero = tl.zeros([16, 16], tl.float32)
    gram_q0 = zero
    gram_q1 = zero
    gram_k0 = zero
    gram_k1 = zero
    own0 = zero
    own1 = zero
    # One loop for all: the way to memory is waited for once.
    for i_k in tl.range(0, KP // BK, num_stages=STAGES):
        o_k = i_k * BK + tl.arange(0, BK)
        mask0 = valid0[:, None] & (o_k < K)[None, :]
        mask1 = valid1[:, None] & (o_k < K)[None, :]
        b_q0 = tl.load(q + rows0[:, None] * s_qt + o_k[None, :], mask=mask0, other=0.0)
        b_q1 = tl.load(q + rows1[:, None] * s_qt + o_k[None, :], mask=mask1, other=0.0)
        b_k0 = tl.load(k + rows0[:, None] * s_kt + o_k[None, :], mask=mask0, other=0.0)
        b_k1 = tl.load(k + rows1[:, None] * s_kt + o_k[None, :], mask=mask1, other=0.0)
        if NORMS:
            gram_q0 = tl.dot(b_q0, tl.trans(b_q0), gram_q0, input_precision=DOT)
            gram_q1 = tl.dot(b_q1, tl.trans(b_q1), gram_q1, input_precision=DOT)
            gram_k0 = tl.dot(b_k0, tl.trans(b_k0), gram_k0, input_precision=DOT)
            gram_k1 = tl.dot(b_k1, tl.trans(b_k1), gram_k1, input_precision=DOT)
        if OWN:
            own0 = tl.dot(b_q0, tl.trans(b_k0), own0, input_precision=DOT)
            own1 = tl.dot(b_q1, tl.trans(b_k1), own1, input_precision=DOT)
    if NORMS:
        q_norm0 = tl.rsqrt(_diagonal(gram_q0) + NORM_EPS)
        q_norm1 = tl.rsqrt(_diagonal(gram_q1) + NORM_EPS)
        k_norm0 = tl.rsqrt(_diagonal(gram_k0) + NORM_EPS)
        k_norm1 = tl.rsqrt(_diagonal(gram_k1) + NORM_EPS)
    else:
        q_norm0 = tl.full([16], 1.0, tl.float32)
        q_norm1 = q_norm0
        k_norm0 = q_norm0
        k_norm1 = q_norm0
    return q_norm0, q_norm1, k_norm0, k_norm1, _diagonal(own0), _diagonal(own1)


@triton.jit
def _widen(x, BK: tl.constexpr):
    """A loaded block in float32. 16-bit blocks go through an exact product with the identity: operands of a product are
    fetched to shared memory ahead of their use, and the result is laid out as the other products are."""
    dtype = x.dtype
    if dtype == tl.float32 or dtype == tl.float64 or (dtype == tl.bfloat16 and INTERPRETED):
        return x.to(tl.float32)
    r = tl.arange(0, BK)
    return tl.dot(x, (r[:, None] == r[None, :]).to(dtype))


@triton.jit
def _widen_gate(x, BK: tl.constexpr):
    """``_widen`` for g, which may be infinite: 0 · inf would be NaN in the row's other channels."""
    if x.dtype == tl.float16:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    elif x.dtype == tl.bfloat16 and not INTERPRETED:
        x = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bound;
            mov.b32 bound, 0xff7fff7f;
            max.NaN.bf16x2 $0, $1, bound;
            mov.b32 bound, 0x7f7f7f7f;
            min.NaN.bf16x2 $0, $0, bound;
            }
            """,
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return _widen(x, BK)


@triton.jit
def _level(b_q, b_k, parts, m, el, j: tl.constexpr, TERMS: tl.constexpr, DOT: tl.constexpr, dtype: tl.constexpr):
    """Add the pairs of a tile that straddle the middle of a block of 2^(j + 1) rows."""
    r = tl.arange(0, 16)
    e = tl.exp2(decay.selected_sum(to_reference(r[:, None], r[None, :], j), parts, TERMS))
    k_e = (b_k * e).to(dtype)
    right = tl.trans(k_e)
    pairs = straddles(r[:, None], r[None, :], j)
    m += tl.where(pairs, tl.dot((b_q * e).to(dtype), right, input_precision=DOT), 0.0)
    el += tl.where(pairs, tl.dot(k_e, right, input_precision=DOT), 0.0)
    return m, el


@triton.jit
def _tile_any(b_q, b_k, parts, m, el, TERMS: tl.constexpr, DOT: tl.constexpr, dtype: tl.constexpr):
    """Add a tile's own M and L, for any decay: hierarchical reference points, no exponent is ever positive."""
    r = tl.arange(0, 16)
    m += tl.where(r[:, None] == r[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
    for level in tl.static_range(4):
        m, el = _level(b_q, b_k, parts, m, el, 3 - level, TERMS, DOT, dtype)
    return m, el


@triton.jit(do_not_specialize=_NUMBERS)
def prepare(
    q, k,  # [B, T, H, K]
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    A_log, dt_bias,  # [HV] and [HV, K], or None
    keys,  # [slots, HV, 3, C, KP]
    P,  # [slots, HV, C, C] or None with an inverse
    D,  # [slots, HV, KP]
    X,  # [slots, HV, C, C], or in float32 beside 16-bit rows as inverse; or None
    norms,  # [slots, HV, 2, C] or None; read with an inverse, else written
    inverse,  # float32 or None: X as an earlier run wrote it; beside 16-bit rows X00, X10, X11 [slots, HV, 3, 16, 16]
    o,  # [B, T, HV, V]; only rows that no recurrence writes
    cu_seqlens, indices,  # [N + 1] and [N], or None
    scale, lower_bound, T, N,
    chunks,  # chunks of a dense sequence
    HV,
    group,  # value heads a key head
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, s_ob, s_ot, s_oh, s_index, pad_slot_id,
    slots,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
    LIFT: tl.constexpr, STAGES: tl.constexpr, WIDE_STAGES: tl.constexpr,
    UNIT: tl.constexpr,  # batch strides are given in this many elements, so that alignment shows
    GATE: tl.constexpr, BOUNDED: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr,
    TERMS: tl.constexpr, DOT: tl.constexpr, SMALL_DOT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    i_slot = pid // HV
    i_h = pid % HV
    i_kh = i_h // group
    dtype = keys.dtype.element_ty

    if cu_seqlens is None:
        i_n = i_slot // chunks
        i_b = i_n * UNIT
        start = (i_slot % chunks) * C
        length = T.to(tl.int64)
        first_row = start
    else:
        i_n = sequence_of_slot(cu_seqlens, N, i_slot, C)
        i_b = tl.zeros_like(i_slot)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        eos = T.to(tl.int64)
        if i_n < N:
            eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        start = (i_slot - bos // C - i_n) * C
        length = eos - bos
        first_row = bos + start
        if start >= length:
            return
    count = tl.minimum(length - start, C).to(tl.int32)

    if (cu_seqlens is not None) | (indices is not None):
        skip = i_n == N
        if indices is not None:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
            if i_n < N:
                i_state = tl.load(indices + i_n.to(tl.int64) * s_index)
                skip = is_padding(i_state, pad_slot_id, slots)
        if skip:
            # Rows that no recurrence visits: behind the last packed sequence, or of a padded slot.
            o_r = tl.arange(0, C)
            for i_v in range((V + 63) // 64):
                o_v = i_v * 64 + tl.arange(0, 64)
                p_o = o + i_b * s_ob + i_h * s_oh + (first_row + o_r)[:, None] * s_ot + o_v[None, :]
                tl.store(p_o, tl.zeros([C, 64], o.dtype.element_ty), mask=(o_r < count)[:, None] & (o_v < V)[None, :])
            return

    r = tl.arange(0, 16)
    valid0 = r < count
    valid1 = r + 16 < count
    rows0 = first_row + r
    rows1 = rows0 + 16
    p_q = i_b * s_qb + i_kh * s_qh
    p_k = i_b * s_kb + i_kh * s_kh
    p_g = i_b * s_gb + i_h * s_gh
    p_beta = beta + i_b * s_bb + i_h * s_bh
    beta0 = write_strength(tl.load(p_beta + rows0 * s_bt, mask=valid0, other=0.0), SIGMOID, NEG_EIGVAL)
    beta1 = write_strength(tl.load(p_beta + rows1 * s_bt, mask=valid1, other=0.0), SIGMOID, NEG_EIGVAL)

    a = gate_rate(A_log, i_h)
    # q and k stay as they came inside products; their norms (and scale) multiply rows and columns of the results.
    q_norm0 = tl.full([16], 1.0, tl.float32)
    q_norm1 = q_norm0
    k_norm0 = q_norm0
    k_norm1 = q_norm0
    p_square = (i_slot * HV + i_h) * (C * C) + r[:, None] * C + r[None, :]
    p_tiles = (i_slot * HV + i_h) * 768 + r[:, None] * 16 + r[None, :]
    p_norms = (i_slot * HV + i_h) * (2 * C) + r
    if inverse is not None:
        if dtype == tl.float32:
            x00 = tl.load(inverse + p_square)
            x10 = tl.load(inverse + p_square + 16 * C)
            x11 = tl.load(inverse + p_square + 16 * C + 16)
        else:
            x00 = tl.load(inverse + p_tiles)
            x10 = tl.load(inverse + p_tiles + 256)
            x11 = tl.load(inverse + p_tiles + 512)
        if L2NORM:
            q_norm0 = tl.load(norms + p_norms)
            q_norm1 = tl.load(norms + p_norms + 16)
            k_norm0 = tl.load(norms + p_norms + C)
            k_norm1 = tl.load(norms + p_norms + C + 16)
        if X is not None:
            store_square(X + p_square, x00, x10, x11, C)
        a00, a00_rest, a10, a10_rest, a11, a11_rest = _writing(
            x00 * beta0[:, None], x10 * beta1[:, None], x11 * beta1[:, None], k_norm0, k_norm1, dtype
        )
    elif L2NORM or BOUNDED:
        q_norm0, q_norm1, k_norm0, k_norm1, own0, own1 = _row_products(
            q + p_q, k + p_k, rows0, rows1, valid0, valid1, s_qt, s_kt, K, BW, KP, DOT, WIDE_STAGES, L2NORM, BOUNDED
        )
    if inverse is None and norms is not None:
        p_norms += norms
        tl.store(p_norms, q_norm0)
        tl.store(p_norms + 16, q_norm1)
        tl.store(p_norms + C, k_norm0)
        tl.store(p_norms + C + 16, k_norm1)
    q_norm0 *= scale
    q_norm1 *= scale
    bound0 = tl.where(valid0, lower_bound, 0.0)[:, None]
    bound1 = tl.where(valid1, lower_bound, 0.0)[:, None]

    m00 = tl.zeros([16, 16], tl.float32)
    m10 = tl.zeros([16, 16], tl.float32)
    m11 = tl.zeros([16, 16], tl.float32)
    l00 = tl.zeros([16, 16], tl.float32)
    l10 = tl.zeros([16, 16], tl.float32)
    l11 = tl.zeros([16, 16], tl.float32)
    zero = tl.zeros([16, BK], tl.float32)
    p_chunk = (i_slot * HV + i_h) * (3 * C * KP)
    o_tile = r[:, None] * KP
    # Two float16 parts hold all but a float32's last bit, where two of bfloat16 hold 16.
    Y_UNIT: tl.constexpr = decay.FLOAT16_UNIT if TERMS == 2 else 1.0
    for i_k in tl.range(0, KP // BK, num_stages=STAGES):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        mask0 = valid0[:, None] & m_k[None, :]
        mask1 = valid1[:, None] & m_k[None, :]
        b_g0 = tl.load(g + p_g + rows0[:, None] * s_gt + o_k[None, :], mask=mask0, other=0.0)
        b_g1 = tl.load(g + p_g + rows1[:, None] * s_gt + o_k[None, :], mask=mask1, other=0.0)
        if GATE == "none":
            # The little that is done to them is done in the layout in which products take decays.
            b_g0, b_g1 = b_g0.to(tl.float32), b_g1.to(tl.float32)
        else:
            b_g0, b_g1 = _widen_gate(b_g0, BK), _widen_gate(b_g1, BK)
        b_q0 = _widen(tl.load(q + p_q + rows0[:, None] * s_qt + o_k[None, :], mask=mask0, other=0.0), BK)
        b_q1 = _widen(tl.load(q + p_q + rows1[:, None] * s_qt + o_k[None, :], mask=mask1, other=0.0), BK)
        b_k0 = _widen(tl.load(k + p_k + rows0[:, None] * s_kt + o_k[None, :], mask=mask0, other=0.0), BK)
        b_k1 = _widen(tl.load(k + p_k + rows1[:, None] * s_kt + o_k[None, :], mask=mask1, other=0.0), BK)
        bias = tl.zeros([1, BK], tl.float32)
        if dt_bias is not None:
            bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
        y0 = log2_decay(b_g0, a, bias, bound0, GATE, Y_UNIT, not BOUNDED)
        y1 = log2_decay(b_g1, a, bias, bound1, GATE, Y_UNIT, not BOUNDED)
        if BOUNDED and GATE != "bounded":
            # A broken promise costs accuracy, never makes a NaN; one that g has stays.
            y0 = tl.maximum(y0, decay.BOUNDED_LOG2_DECAY * Y_UNIT, propagate_nan=tl.PropagateNan.ALL)
            y1 = tl.maximum(y1, decay.BOUNDED_LOG2_DECAY * Y_UNIT, propagate_nan=tl.PropagateNan.ALL)
        if GATE == "softplus" or (GATE == "bounded" and K < KP):
            y0 = tl.where(mask0, y0, 0.0)
            y1 = tl.where(mask1, y1, 0.0)
        parts0 = split(y0, TERMS, Y_UNIT)
        parts1 = split(y1, TERMS, Y_UNIT)
        # A tile's whole decay, the same in each of 16 rows: cheaper from the matrix unit than by shuffles.
        total0 = tl.exp2(decay.whole_sum(parts0, TERMS))
        total1 = tl.exp2(decay.whole_sum(parts1, TERMS))
        tl.store(D + (i_slot * HV + i_h) * KP + o_k[None, :] + r[:, None] * 0, total0 * total1, mask=r[:, None] == 0)
        p_block = keys + p_chunk + o_tile + o_k[None, :]
        if BOUNDED:
            x0 = decay.selected_sum(decay.through(r, r), parts0, TERMS, decay.BOUNDED_SHIFT)
            x1 = decay.selected_sum(decay.through(r, r), parts1, TERMS, decay.BOUNDED_SHIFT)
            e0 = tl.exp2(x0)
            e1 = tl.exp2(x1)
            q_e0 = b_q0 * e0
            k_e0 = b_k0 * e0
            q_e1 = b_q1 * e1
            k_e1 = b_k1 * e1
            k_f0 = b_k0 * tl.exp2(-x0)
            k_f1 = b_k1 * tl.exp2(-x1)
            if inverse is None:
                m00, l00 = add_pairs(q_e0.to(dtype), k_e0.to(dtype), k_f0.to(dtype), m00, l00, DOT)
                m11, l11 = add_pairs(q_e1.to(dtype), k_e1.to(dtype), k_f1.to(dtype), m11, l11, DOT)
            k_f0 *= total0
            if inverse is None:
                m10, l10 = add_pairs(q_e1.to(dtype), k_e1.to(dtype), k_f0.to(dtype), m10, l10, DOT)
            to_start = total0 * (1.0 / decay.BOUNDED_SCALE)
            to_end = total1 * decay.BOUNDED_SCALE
            q_e0 *= 1.0 / decay.BOUNDED_SCALE
            k_e0 *= 1.0 / decay.BOUNDED_SCALE
            q_e1 *= to_start
            k_e1 *= to_start
            k_g0 = k_f0 * to_end
            k_g1 = k_f1 * to_end
        else:
            if inverse is None:
                m00, l00 = _tile_any(b_q0, b_k0, parts0, m00, l00, TERMS, DOT, dtype)
                m11, l11 = _tile_any(b_q1, b_k1, parts1, m11, l11, TERMS, DOT, dtype)
            e0 = tl.exp2(decay.selected_sum(decay.through(r, r), parts0, TERMS))
            e1 = tl.exp2(decay.selected_sum(decay.through(r, r), parts1, TERMS))
            q_e0 = b_q0 * e0
            k_e0 = b_k0 * e0
            q_e1 = b_q1 * e1
            k_e1 = b_k1 * e1
            k_g0 = b_k0 * tl.exp2(decay.selected_sum(decay.after(r, r), parts0, TERMS))
            k_g1 = b_k1 * tl.exp2(decay.selected_sum(decay.after(r, r), parts1, TERMS))
            if inverse is None:
                m10, l10 = add_pairs(q_e1.to(dtype), k_e1.to(dtype), k_g0.to(dtype), m10, l10, DOT)
            q_e1 *= total0
            k_e1 *= total0
            k_g0 *= total1
        tl.store(p_block, (k_e0 * (k_norm0 * LIFT)[:, None]).to(dtype))
        tl.store(p_block + 16 * KP, (k_e1 * (k_norm1 * LIFT)[:, None]).to(dtype))
        tl.store(p_block + C * KP, (q_e0 * (q_norm0 * LIFT)[:, None]).to(dtype))
        tl.store(p_block + C * KP + 16 * KP, (q_e1 * (q_norm1 * LIFT)[:, None]).to(dtype))
        k_g0 = k_g0.to(dtype)
        k_g1 = k_g1.to(dtype)
        if inverse is not None:
            k_g0, k_g1 = _written(a00, a00_rest, a10, a10_rest, a11, a11_rest, k_g0, k_g1, zero, DOT)
        tl.store(p_block + 2 * C * KP, k_g0)
        tl.store(p_block + 2 * C * KP + 16 * KP, k_g1)

    if inverse is None:
        if BOUNDED:
            # No decay lies between a row and its own key: with strong decays that pair is most of the output, and the
            # rounded factors of the other pairs would be most of its error.
            same = r[:, None] == r[None, :]
            m00 = tl.where(same, own0[:, None], m00)
            m11 = tl.where(same, own1[:, None], m11)
        lower = r[:, None] >= r[None, :]
        m00 = tl.where(lower, m00, 0.0) * (q_norm0[:, None] * k_norm0[None, :])
        m11 = tl.where(lower, m11, 0.0) * (q_norm1[:, None] * k_norm1[None, :])
        m10 *= q_norm1[:, None] * k_norm0[None, :]
        x00 = inverse_16(l00 * (k_norm0[:, None] * (beta0 * k_norm0)[None, :]), r, r, SMALL_DOT)
        x11 = inverse_16(l11 * (k_norm1[:, None] * (beta1 * k_norm1)[None, :]), r, r, SMALL_DOT)
        l10 *= k_norm1[:, None] * (beta0 * k_norm0)[None, :]
        x10 = -tl.dot(x11, tl.dot(l10, x00, input_precision=SMALL_DOT), input_precision=SMALL_DOT)
        if X is not None:
            if X.dtype.element_ty == dtype:
                store_square(X + p_square, x00, x10, x11, C)
            else:
                tl.store(X + p_tiles, x00)
                tl.store(X + p_tiles + 256, x10)
                tl.store(X + p_tiles + 512, x11)
        a00 = x00 * beta0[:, None]
        a10 = x10 * beta1[:, None]
        a11 = x11 * beta1[:, None]
        p00 = tl.dot(m00, a00, input_precision=SMALL_DOT)
        p11 = tl.dot(m11, a11, input_precision=SMALL_DOT)
        p10 = tl.dot(m11, a10, tl.dot(m10, a00, input_precision=SMALL_DOT), input_precision=SMALL_DOT)
        store_square(P + p_square, p00, p10, p11, C)

        # kg was written by other threads of this program, without the norms of k.
        tl.debug_barrier()
        a00, a00_rest, a10, a10_rest, a11, a11_rest = _writing(a00, a10, a11, k_norm0, k_norm1, dtype)
        zero = tl.zeros([16, BW], tl.float32)
        for i_k in tl.range(0, KP // BW, num_stages=WIDE_STAGES):
            p_block = keys + p_chunk + 2 * C * KP + o_tile + i_k * BW + tl.arange(0, BW)[None, :]
            k_g0 = tl.load(p_block)
            k_g1 = tl.load(p_block + 16 * KP)
            k_a0, k_a1 = _written(a00, a00_rest, a10, a10_rest, a11, a11_rest, k_g0, k_g1, zero, DOT)
            tl.store(p_block, k_a0)
            tl.store(p_block + 16 * KP, k_a1)


@triton.jit
def _product(a, rest, b, total, DOT: tl.constexpr):
    """total + (both parts of a) · b."""
    if b.dtype != tl.float32:
        total = tl.dot(rest, b, total)
    return tl.dot(a, b, total, input_precision=DOT)


@triton.jit
def _writing(a00, a10, a11, k_norm0, k_norm1, dtype: tl.constexpr):
    """Transposes of the blocks of A, which the norms of k multiply as well, in two parts each."""
    a00, a00_rest = two_parts(tl.trans(a00 * k_norm0[:, None]), dtype)
    a10, a10_rest = two_parts(tl.trans(a10 * k_norm1[:, None]), dtype)
    a11, a11_rest = two_parts(tl.trans(a11 * k_norm1[:, None]), dtype)
    return a00, a00_rest, a10, a10_rest, a11, a11_rest


@triton.jit
def _written(a00, a00_rest, a10, a10_rest, a11, a11_rest, k_g0, k_g1, zero, DOT: tl.constexpr):
    """Both tiles of kA = Aᵀ kg."""
    k_a0 = _product(a00, a00_rest, k_g0, zero, DOT)
    k_a0 = _product(a10, a10_rest, k_g1, k_a0, DOT)
    k_a1 = _product(a11, a11_rest, k_g1, zero, DOT)
    return k_a0.to(k_g0.dtype), k_a1.to(k_g0.dtype)

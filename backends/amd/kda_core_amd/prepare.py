"""Chunk-parallel kernel of the forward: gate, norms, decays, products and the inverse, for ``triton_lib.layout``.

One program a chunk slot and value head; the chunk's 32 rows are two tiles of 16 (0 and 1 below), so that every product
has the matrix unit's own shape:

    M = [M00  0 ]      L = [L00  0 ]      X = (I + L)⁻¹ = [X00              0 ]
        [M10 M11]          [L10 L11]                      [−X11 L10 X00   X11]

L = Lk diag(β): β scales the columns of L, not its rows. Then A = diag(β) X holds exactly, and X = I − Lk A, which the
backward reads, is no sum of terms with both signs.

Two passes over the channels, BK at a time. The first adds up M, L and the squares of the rows and stores nothing. Then
the inverse is formed. The second forms ke, qg and kA = Aᵀ kg, normalised. No lane reads global memory that another lane
of the launch has written: a barrier inside a program is only sure to order a workgroup's LDS.

Grid: slots · HV programs along axis 0, heads fastest. Every offset is int64, from the program id up.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.decay import BOUNDED_LOG2_DECAY, BOUNDED_SHIFT, after, selected_sum, through, whole_sum
from kda_core.triton_lib.gate import NORM_EPS, gate_rate, log2_decay, write_strength
from kda_core.triton_lib.packing import is_padding, rows_of_slot
from kda_core.triton_lib.parts import split, two_parts
from kda_core.triton_lib.squares import add_pairs, apart, inverse_16, store_square, to_reference

_NUMBERS = [
    "scale", "lower_bound", "T", "N", "chunks", "HV", "group", "s_qb", "s_kb", "s_gb", "s_bb", "s_ob", "s_index",
    "pad_slot_id", "slots",
]  # fmt: skip
"""Parameters that are not specialised: most of them change with the lengths of the sequences."""


@triton.jit
def _rows(x, offsets, s_t, valid, o_k, K: tl.constexpr):
    """A tile [16, BK] of x in float32, zero outside the sequence and past K."""
    p_x = x + offsets[:, None] * s_t + o_k[None, :]
    return tl.load(p_x, mask=valid[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _log2_decays(
    g, dt_bias, offsets, s_t, valid, o_k, rate, lower_bound,
    K: tl.constexpr, GATE: tl.constexpr, BOUNDED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Log2 decays of a tile, split for ``selected_sum``; zero outside the sequence and past K."""
    b_g = _rows(g, offsets, s_t, valid, o_k, K)
    bias = tl.zeros([1, b_g.shape[1]], tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    y = log2_decay(b_g, rate, bias, lower_bound, GATE)
    if BOUNDED and GATE != "bounded":
        # A broken promise costs accuracy, never makes a NaN; one that g has stays.
        y = tl.where(y < BOUNDED_LOG2_DECAY, BOUNDED_LOG2_DECAY, y)
    if GATE != "none":
        y = tl.where(valid[:, None] & (o_k < K)[None, :], y, 0.0)
    return split(y, TERMS)


@triton.jit
def _level(b_q, b_k, parts, m, el, r, j, TERMS: tl.constexpr, DOT: tl.constexpr, dtype: tl.constexpr):
    """Add a tile's pairs of the level with half-blocks of 2^j rows."""
    e = tl.exp2(selected_sum(to_reference(r[:, None], r[None, :], j), parts, TERMS))
    k_e = (b_k * e).to(dtype)
    right = tl.trans(k_e)
    pairs = apart(r[:, None], r[None, :], j) & (r[:, None] > r[None, :])
    m += tl.where(pairs, tl.dot((b_q * e).to(dtype), right, input_precision=DOT), 0.0)
    el += tl.where(pairs, tl.dot(k_e, right, input_precision=DOT), 0.0)
    return m, el


@triton.jit
def _own_pairs(
    b_q, b_k, parts, m, el, r,
    BOUNDED: tl.constexpr, LEVEL_LOOP: tl.constexpr, TERMS: tl.constexpr, DOT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Add the pairs inside a tile to its M (whose part above the diagonal has no meaning) and L."""
    if BOUNDED:
        x = selected_sum(through(r, r), parts, TERMS, BOUNDED_SHIFT)
        e = tl.exp2(x)
        m, el = add_pairs((b_q * e).to(dtype), (b_k * e).to(dtype), (b_k * tl.exp2(-x)).to(dtype), m, el, DOT)
    else:
        m += tl.where(r[:, None] == r[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
        if LEVEL_LOOP:
            for j in tl.range(0, 4, disable_licm=True):
                m, el = _level(b_q, b_k, parts, m, el, r, j, TERMS, DOT, dtype)
        else:
            for j in tl.static_range(4):
                m, el = _level(b_q, b_k, parts, m, el, r, j, TERMS, DOT, dtype)
    return m, el


@triton.jit(do_not_specialize=_NUMBERS)
def prepare(
    q, k,  # [B, T, H, K]
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    A_log, dt_bias,  # [HV] and [HV, K], or None
    keys,  # [slots, HV, 3, C, KP]
    P,  # [slots, HV, C, C]
    D,  # [slots, HV, KP]
    X,  # [slots, HV, C, C] or None
    o,  # [B, T, HV, V]; only rows that no recurrence writes are stored
    cu_seqlens, indices,  # [N + 1] and [N], or None
    scale, lower_bound,
    T, N, chunks,  # chunks of a dense sequence
    HV, group,  # value heads a key head
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, s_ob, s_ot, s_oh, s_index, pad_slot_id,
    slots,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LIFT: tl.constexpr,
    UNIT: tl.constexpr,  # batch strides are given in this many elements, so that alignment shows
    GATE: tl.constexpr, BOUNDED: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr,
    FEW_REGISTERS: tl.constexpr,  # form masks anew in every block of channels
    LEVEL_LOOP: tl.constexpr,  # one level at a time
    TERMS: tl.constexpr, DOT: tl.constexpr, SMALL_DOT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    i_slot = pid // HV
    i_h = pid % HV
    i_kh = i_h // group
    dtype = keys.dtype.element_ty

    i_n, i_b, first_row, end = rows_of_slot(cu_seqlens, i_slot, T, N, chunks, C)
    count = tl.minimum(end - first_row, C)
    if count <= 0:
        return
    i_b *= UNIT
    r = tl.arange(0, 16)

    if (cu_seqlens is not None) | (indices is not None):
        skip = i_n == N
        if indices is not None:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
            if i_n < N:
                i_state = tl.load(indices + i_n * s_index)
                skip = is_padding(i_state, pad_slot_id, slots)
        if skip:
            # Rows that no recurrence visits: behind the last packed sequence, or of a padded slot.
            o_r = tl.arange(0, C).to(tl.int64)
            p_row = o + i_b * s_ob + first_row * s_ot + i_h * s_oh + o_r[:, None] * s_ot
            for i_v in tl.static_range(0, V, 64):
                o_v = i_v + tl.arange(0, 64)
                zero = tl.zeros([C, 64], o.dtype.element_ty)
                tl.store(p_row + o_v[None, :], zero, mask=(o_r < count)[:, None] & (o_v < V)[None, :])
            return

    valid0 = r < count
    valid1 = r + 16 < count
    o_0 = r.to(tl.int64)
    o_1 = o_0 + 16
    q += i_b * s_qb + first_row * s_qt + i_kh * s_qh
    k += i_b * s_kb + first_row * s_kt + i_kh * s_kh
    g += i_b * s_gb + first_row * s_gt + i_h * s_gh
    beta += i_b * s_bb + first_row * s_bt + i_h * s_bh
    beta0 = write_strength(tl.load(beta + o_0 * s_bt, mask=valid0, other=0.0), SIGMOID, NEG_EIGVAL)
    beta1 = write_strength(tl.load(beta + o_1 * s_bt, mask=valid1, other=0.0), SIGMOID, NEG_EIGVAL)
    rate = gate_rate(A_log, i_h)
    if dt_bias is not None:
        dt_bias += i_h * K

    m00 = tl.zeros([16, 16], tl.float32)
    m10 = tl.zeros([16, 16], tl.float32)
    m11 = tl.zeros([16, 16], tl.float32)
    l00 = tl.zeros([16, 16], tl.float32)
    l10 = tl.zeros([16, 16], tl.float32)
    l11 = tl.zeros([16, 16], tl.float32)
    squares_q0 = tl.zeros([16, BK], tl.float32)
    squares_q1 = tl.zeros([16, BK], tl.float32)
    squares_k0 = tl.zeros([16, BK], tl.float32)
    squares_k1 = tl.zeros([16, BK], tl.float32)
    for i_k in tl.range(0, KP, BK, disable_licm=FEW_REGISTERS):
        o_k = i_k + tl.arange(0, BK)
        b_q0 = _rows(q, o_0, s_qt, valid0, o_k, K)
        b_q1 = _rows(q, o_1, s_qt, valid1, o_k, K)
        b_k0 = _rows(k, o_0, s_kt, valid0, o_k, K)
        b_k1 = _rows(k, o_1, s_kt, valid1, o_k, K)
        parts0 = _log2_decays(g, dt_bias, o_0, s_gt, valid0, o_k, rate, lower_bound, K, GATE, BOUNDED, TERMS)
        parts1 = _log2_decays(g, dt_bias, o_1, s_gt, valid1, o_k, rate, lower_bound, K, GATE, BOUNDED, TERMS)
        if L2NORM:
            squares_q0 += b_q0 * b_q0
            squares_q1 += b_q1 * b_q1
            squares_k0 += b_k0 * b_k0
            squares_k1 += b_k1 * b_k1
        m00, l00 = _own_pairs(b_q0, b_k0, parts0, m00, l00, r, BOUNDED, LEVEL_LOOP, TERMS, DOT, dtype)
        m11, l11 = _own_pairs(b_q1, b_k1, parts1, m11, l11, r, BOUNDED, LEVEL_LOOP, TERMS, DOT, dtype)
        # Rows of tile 1 against those of tile 0: the reference is the border between the tiles.
        into = tl.exp2(selected_sum(through(r, r), parts1, TERMS))
        k_out = (b_k0 * tl.exp2(selected_sum(after(r, r), parts0, TERMS))).to(dtype)
        m10, l10 = add_pairs((b_q1 * into).to(dtype), (b_k1 * into).to(dtype), k_out, m10, l10, DOT)

    # q and k stay as they came inside these products; norms (and scale) multiply rows and columns of the results.
    q_norm0 = tl.full([16], 1.0, tl.float32) * scale
    q_norm1 = q_norm0
    k_norm0 = tl.full([16], 1.0, tl.float32)
    k_norm1 = k_norm0
    if L2NORM:
        q_norm0 *= tl.rsqrt(tl.sum(squares_q0, 1) + NORM_EPS)
        q_norm1 *= tl.rsqrt(tl.sum(squares_q1, 1) + NORM_EPS)
        k_norm0 = tl.rsqrt(tl.sum(squares_k0, 1) + NORM_EPS)
        k_norm1 = tl.rsqrt(tl.sum(squares_k1, 1) + NORM_EPS)
    lower = r[:, None] >= r[None, :]
    m00 = tl.where(lower, m00, 0.0) * (q_norm0[:, None] * k_norm0[None, :])
    m11 = tl.where(lower, m11, 0.0) * (q_norm1[:, None] * k_norm1[None, :])
    m10 *= q_norm1[:, None] * k_norm0[None, :]
    x00 = inverse_16(l00 * (k_norm0[:, None] * (beta0 * k_norm0)[None, :]), r, r, SMALL_DOT)
    x11 = inverse_16(l11 * (k_norm1[:, None] * (beta1 * k_norm1)[None, :]), r, r, SMALL_DOT)
    l10 *= k_norm1[:, None] * (beta0 * k_norm0)[None, :]
    x10 = -tl.dot(x11, tl.dot(l10, x00, input_precision=SMALL_DOT), input_precision=SMALL_DOT)
    a00 = x00 * beta0[:, None]
    a10 = x10 * beta1[:, None]
    a11 = x11 * beta1[:, None]
    p00 = tl.dot(m00, a00, input_precision=SMALL_DOT)
    p11 = tl.dot(m11, a11, input_precision=SMALL_DOT)
    p10 = tl.dot(m11, a10, tl.dot(m10, a00, input_precision=SMALL_DOT), input_precision=SMALL_DOT)
    i_chunk = i_slot * HV + i_h
    store_square(P + i_chunk * (C * C) + r[:, None] * C + r[None, :], p00, p10, p11, C)

    if X is not None:
        store_square(X + i_chunk * (C * C) + r[:, None] * C + r[None, :], x00, x10, x11, C)

    a00, a00_rest = two_parts(tl.trans(a00), dtype)
    a10, a10_rest = two_parts(tl.trans(a10), dtype)
    a11, a11_rest = two_parts(tl.trans(a11), dtype)
    for i_k in tl.range(0, KP, BK, disable_licm=FEW_REGISTERS):
        o_k = i_k + tl.arange(0, BK)
        parts0 = _log2_decays(g, dt_bias, o_0, s_gt, valid0, o_k, rate, lower_bound, K, GATE, BOUNDED, TERMS)
        parts1 = _log2_decays(g, dt_bias, o_1, s_gt, valid1, o_k, rate, lower_bound, K, GATE, BOUNDED, TERMS)
        # A tile's whole decay, the same in each of its rows.
        total0 = tl.exp2(whole_sum(parts0, TERMS))
        total1 = tl.exp2(whole_sum(parts1, TERMS))
        p_decay = D + i_chunk * KP + o_k[None, :] + r[:, None] * 0
        tl.store(p_decay, total0 * total1, mask=r[:, None] == 0)
        into0 = tl.exp2(selected_sum(through(r, r), parts0, TERMS))
        into1 = tl.exp2(selected_sum(through(r, r), parts1, TERMS)) * total0
        p_block = keys + i_chunk * (3 * C * KP) + r[:, None] * KP + o_k[None, :]
        b_k0 = _rows(k, o_0, s_kt, valid0, o_k, K) * k_norm0[:, None]
        b_k1 = _rows(k, o_1, s_kt, valid1, o_k, K) * k_norm1[:, None]
        tl.store(p_block, (b_k0 * into0 * LIFT).to(dtype))
        tl.store(p_block + 16 * KP, (b_k1 * into1 * LIFT).to(dtype))
        b_q0 = _rows(q, o_0, s_qt, valid0, o_k, K) * q_norm0[:, None]
        b_q1 = _rows(q, o_1, s_qt, valid1, o_k, K) * q_norm1[:, None]
        tl.store(p_block + C * KP, (b_q0 * into0 * LIFT).to(dtype))
        tl.store(p_block + (C + 16) * KP, (b_q1 * into1 * LIFT).to(dtype))
        k_out0 = (b_k0 * tl.exp2(selected_sum(after(r, r), parts0, TERMS)) * total1).to(dtype)
        k_out1 = (b_k1 * tl.exp2(selected_sum(after(r, r), parts1, TERMS))).to(dtype)
        k_a0 = tl.zeros([16, BK], tl.float32)
        k_a1 = tl.zeros([16, BK], tl.float32)
        if dtype.primitive_bitwidth == 16:
            k_a0 = tl.dot(a10_rest, k_out1, tl.dot(a00_rest, k_out0, input_precision=DOT), input_precision=DOT)
            k_a1 = tl.dot(a11_rest, k_out1, input_precision=DOT)
        k_a0 = tl.dot(a10, k_out1, tl.dot(a00, k_out0, k_a0, input_precision=DOT), input_precision=DOT)
        k_a1 = tl.dot(a11, k_out1, k_a1, input_precision=DOT)
        tl.store(p_block + 2 * C * KP, k_a0.to(dtype))
        tl.store(p_block + (2 * C + 16) * KP, k_a1.to(dtype))

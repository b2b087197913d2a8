"""A decoding step of a whole layer, projections aside: short convolution, gate, recurrence and gated norm.

``decode_step_kernel`` convolves and advances the states of the recurrence. Its programs share a head's value channels,
and all of them need the head's q and k: each convolves these for itself. ``finish_step_kernel`` does what needs whole
heads, or nobody who still reads: it normalises, and it advances the state of the convolution. It may start before the
first kernel ends, and then waits.

Results of the convolution are rounded to the dtype of x, as those of ``short_convolution`` are: the states get the same
values. The recurrence is that of a step, with q and k as the convolution gave them, r_q and r_k their factors:

    S ← d ⊙ S      u = β(v − r_k Sᵀk)      S ← S + k (r_k u)ᵀ      o = r_q Sᵀq

Tiles of a state: all key channels and BV value channels, [BV, KP / KS, KS] when it is stored V first and
[KP / KS, KS, BV] otherwise. Grid of ``decode_step_kernel``: one program a (sequence, value head, value block), blocks
fastest, then heads. Offsets are int64.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kda_core.triton_lib.convolution_kernels import channels_if, filter_of
from kda_core.triton_lib.factor import decay_factor, decayed
from kda_core.triton_lib.gate import NORM_EPS, gate_rate, log2_decay, sigmoid, write_strength
from kda_core.triton_lib.packing import is_padding


@triton.jit
def _first_slot(indices, accepted, i_n, s_index, s_slot, width):
    """The slot that a sequence starts from."""
    i_slot = i_n
    if indices is not None:
        i_first = 0
        if accepted is not None:
            # Out of range is clamped: the device has nobody to tell, and must not read past the table.
            i_first = tl.minimum(tl.maximum(tl.load(accepted + i_n).to(tl.int32) - 1, 0), width - 1)
        i_slot = tl.load(indices + i_n * s_index + i_first * s_slot).to(tl.int64)
    return i_slot


@triton.jit
def _is_unused(i_slot, slots, pad_slot_id):
    return is_padding(i_slot, pad_slot_id) | (i_slot >= slots)


@triton.jit
def _window(p_conv, o_d, m_d, s_ct, s_cd, W: tl.constexpr):
    """The W - 1 inputs before the first token."""
    window = ()
    for j in tl.static_range(W - 1):
        window += (tl.load(p_conv + j * s_ct + o_d * s_cd, mask=m_d, other=0.0).to(tl.float32),)
    return window


@triton.jit
def _keep(p_conv, window, o_d, m_d, s_ct, s_cd, W: tl.constexpr):
    for j in tl.static_range(W - 1):
        tl.store(p_conv + j * s_ct + o_d * s_cd, window[j].to(p_conv.dtype.element_ty), mask=m_d)


@triton.jit
def _convolution(
    p_x, p_conv, weight, bias, base, o_d, SIZE: tl.constexpr, t, s_xt, s_ct, s_cd, W: tl.constexpr
):  # fmt: skip
    """The convolution of token t in the channels ``base`` + o_d, rounded as it is stored elsewhere.

    Nothing is carried from token to token: registers hold the state of the recurrence.
    """
    taps, b_z = filter_of(weight, bias, base + o_d, o_d < SIZE, W)
    for j in tl.static_range(W):
        row = t + (j - W + 1)
        b_x = tl.load(p_x + row * s_xt + base + o_d, mask=channels_if(o_d, row >= 0, SIZE), other=0.0).to(tl.float32)
        if j < W - 1:
            p_row = p_conv + (row + (W - 1)) * s_ct + (base + o_d) * s_cd
            b_x += tl.load(p_row, mask=channels_if(o_d, row < 0, SIZE), other=0.0).to(tl.float32)
        b_z += taps[j] * b_x
    return (b_z * sigmoid(b_z, False)).to(p_x.dtype.element_ty).to(tl.float32)


@triton.jit
def _along_k(x, V_FIRST: tl.constexpr):
    """[KP / KS, KS] key channels against a tile."""
    return x[None, :, :] if V_FIRST else x[:, :, None]


@triton.jit
def _along_v(x, V_FIRST: tl.constexpr):
    """[BV] value channels against a tile."""
    return x[:, None, None] if V_FIRST else x[None, None, :]


@triton.jit
def _contract(x, V_FIRST: tl.constexpr):
    """Sum of a tile over its key channels: [BV]."""
    AXIS: tl.constexpr = 1 if V_FIRST else 0
    return tl.sum(tl.sum(x, AXIS), AXIS)


@triton.jit(
    do_not_specialize=[
        "scale", "lower_bound", "T", "slots", "s_index", "s_slot", "width", "pad_slot_id"
    ],
    do_not_specialize_on_alignment=["indices", "accepted"],
)  # fmt: skip
def decode_step_kernel(
    x,  # [N, T, D], the last stride 1
    g,  # [N, T, HV, K], the last stride 1
    beta,  # [N, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, K] or None
    weight,  # [D, W]
    bias,  # [D] or None
    conv_state,  # [slots, W - 1, D]
    state,  # [slots, HV, K, V] or [slots, HV, V, K], a head's numbers contiguous
    indices,  # [N, width] slots or None
    accepted,  # [N] or None
    rows,  # [N, T, HV, V], contiguous
    scale, lower_bound, T, slots, s_index: tl.int64, s_slot: tl.int64, width, pad_slot_id: tl.int64,
    s_xn, s_xt, s_gn, s_gt, s_gh, s_bn, s_bt, s_bh, s_cn, s_ct, s_cd, s_sn, s_sh,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, KS: tl.constexpr,
    BV: tl.constexpr, W: tl.constexpr, GATE: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr, V_FIRST: tl.constexpr,
    EVERY_TOKEN: tl.constexpr,  # a slot for every token rather than one for the last
    ONE_TOKEN: tl.constexpr,
    EVICTION: tl.constexpr,  # eviction policy of the load of the states
    OVERLAP: tl.constexpr,  # the next kernel may start before this one ends
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_h = (pid // BLOCKS % HV).to(tl.int64)
    i_n = (pid // (BLOCKS * HV)).to(tl.int64)
    o_k = tl.arange(0, KP // KS)[:, None] * KS + tl.arange(0, KS)[None, :]
    o_v = pid % BLOCKS * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    length = tl.full([], 1, tl.int32)
    if not ONE_TOKEN:
        length *= T
    p_o = rows + (i_n * T * HV + i_h) * V
    i_slot = _first_slot(indices, accepted, i_n, s_index, s_slot, width)
    if indices is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if _is_unused(i_slot, slots, pad_slot_id):
            for _ in range(0, length):
                tl.store(p_o + o_v, tl.zeros([BV], rows.dtype.element_ty), mask=m_v)
                p_o += HV * V
            return
    m_state = _along_k(m_k, V_FIRST) & _along_v(m_v, V_FIRST)
    o_state = _along_k(o_k * (1 if V_FIRST else V), V_FIRST) + _along_v(o_v * (K if V_FIRST else 1), V_FIRST)
    p_state = state + i_slot * s_sn + i_h * s_sh
    S = tl.load(p_state + o_state, mask=m_state, other=0.0, eviction_policy=EVICTION).to(tl.float32)

    GROUP: tl.constexpr = HV // H
    d_q = i_h // GROUP * K
    d_k = H * K + d_q
    d_v = 2 * H * K + i_h * V
    p_conv = conv_state + i_slot * s_cn
    rate = gate_rate(A_log, i_h)
    b_dt = 0.0
    if dt_bias is not None:
        b_dt = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    p_x = x + i_n * s_xn
    p_g = g + i_n * s_gn + i_h * s_gh
    p_beta = beta + i_n * s_bn + i_h * s_bh
    for t in range(0, length):
        b_q = _convolution(p_x, p_conv, weight, bias, d_q, o_k, K, t, s_xt, s_ct, s_cd, W)
        b_k = _convolution(p_x, p_conv, weight, bias, d_k, o_k, K, t, s_xt, s_ct, s_cd, W)
        b_v = _convolution(p_x, p_conv, weight, bias, d_v, o_v, V, t, s_xt, s_ct, s_cd, W)
        b_g = tl.load(p_g + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_beta = write_strength(tl.load(p_beta), SIGMOID, NEG_EIGVAL)
        y = log2_decay(b_g, rate, b_dt, lower_bound, GATE)
        r_q = scale
        r_k = 1.0
        if L2NORM:
            r_q *= tl.rsqrt(tl.sum(b_q * b_q) + NORM_EPS)
            r_k *= tl.rsqrt(tl.sum(b_k * b_k) + NORM_EPS)
        S = decayed(S, _along_k(decay_factor(y), V_FIRST))
        u = b_beta * (b_v - r_k * _contract(S * _along_k(b_k, V_FIRST), V_FIRST))
        S = tl.fma(_along_v(r_k * u, V_FIRST), _along_k(b_k, V_FIRST), S)
        b_o = r_q * _contract(S * _along_k(b_q, V_FIRST), V_FIRST)
        tl.store(p_o + o_v, b_o.to(rows.dtype.element_ty), mask=m_v)
        p_g += s_gt
        p_beta += s_bt
        p_o += HV * V
        if EVERY_TOKEN:
            i_last = tl.load(indices + i_n * s_index + t * s_slot).to(tl.int64)
            if not _is_unused(i_last, slots, pad_slot_id):
                p_last = state + i_last * s_sn + i_h * s_sh + o_state
                tl.store(p_last, S.to(state.dtype.element_ty), mask=m_state)
    if not EVERY_TOKEN:
        tl.store(p_state + o_state, S.to(state.dtype.element_ty), mask=m_state)


@triton.jit(
    do_not_specialize=["N", "T", "norm_eps", "slots", "s_index", "s_slot", "width", "pad_slot_id"],
    do_not_specialize_on_alignment=["indices", "accepted"],
)
def finish_step_kernel(
    x,  # [N, T, D], the last stride 1
    conv_state,  # [slots, W - 1, D]
    indices,  # [N, width] slots or None
    accepted,  # [N] or None
    rows,  # [N, T, HV, V] float32, contiguous; unused without a norm
    norm_gate,  # [N, T, HV, V], the last stride 1, or None: no norm
    norm_weight,  # [V] or None
    o,  # [N, T, HV, V], the last stride 1
    N, T, norm_eps, slots, s_index: tl.int64, s_slot: tl.int64, width, pad_slot_id: tl.int64,
    s_xn, s_xt, s_cn, s_ct, s_cd, s_an, s_at, s_ah, s_on, s_ot, s_oh,
    HV: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BD: tl.constexpr,  # channels of a program
    ROWS: tl.constexpr,  # rows of o of a program
    EVERY_TOKEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: first one program a (sequence, BD channels of x), then one for each ROWS rows of o."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    if pid < N * BLOCKS:
        i_n = (pid // BLOCKS).to(tl.int64)
        o_d = pid % BLOCKS * BD + tl.arange(0, BD)
        m_d = o_d < D
        i_slot = _first_slot(indices, accepted, i_n, s_index, s_slot, width)
        if not _is_unused(i_slot, slots, pad_slot_id):
            window = _window(conv_state + i_slot * s_cn, o_d, m_d, s_ct, s_cd, W)
            if OVERLAP:
                # Until then the kernel before this one reads what is written here.
                gdc_wait()
            p_x = x + i_n * s_xn
            for t in range(0, T):
                seen = window
                seen += (tl.load(p_x + o_d, mask=m_d, other=0.0).to(tl.float32),)
                window = seen[1:]
                p_x += s_xt
                i_last = i_slot
                if EVERY_TOKEN:
                    i_last = tl.load(indices + i_n * s_index + t * s_slot).to(tl.int64)
                if (EVERY_TOKEN or t == T - 1) and not _is_unused(i_last, slots, pad_slot_id):
                    _keep(conv_state + i_last * s_cn, window, o_d, m_d, s_ct, s_cd, W)
    elif norm_gate is not None:
        i_r = (pid - N * BLOCKS) * ROWS + tl.arange(0, ROWS)
        o_v = tl.arange(0, VP)
        mask = (i_r < N * T * HV)[:, None] & (o_v < V)[None, :]
        i_h = (i_r % HV).to(tl.int64)
        i_s = (i_r // HV % T).to(tl.int64)
        i_b = (i_r // HV // T).to(tl.int64)
        p_gate = norm_gate + (i_b * s_an + i_s * s_at + i_h * s_ah)[:, None] + o_v[None, :]
        b_gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
        b_w = tl.load(norm_weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)
        if OVERLAP:
            gdc_wait()
        b_o = tl.load(rows + i_r.to(tl.int64)[:, None] * V + o_v[None, :], mask=mask, other=0.0)
        norm = tl.rsqrt(tl.sum(b_o * b_o, 1) / V + norm_eps)
        b_o = b_o * norm[:, None] * b_w[None, :] * sigmoid(b_gate)
        p_o = o + (i_b * s_on + i_s * s_ot + i_h * s_oh)[:, None] + o_v[None, :]
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=mask)

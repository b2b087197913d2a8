"""Kernels of the short convolution: depthwise, causal, with SiLU, over dense or packed sequences.

Forward, for channel d of token t, with rows before a sequence taken from its initial state (or 0):

    z[t, d] = b[d] + Σ_j w[d, j] · x[t − (W − 1) + j, d],    y = z · sigmoid(z).

Backward, with dz = dy · sigmoid(z) · (1 + z · (1 − sigmoid(z))) and dz = 0 behind the sequence's end:

    dx[t] = Σ_j w[j] · dz[t + (W − 1) − j],    dw[j] = Σ_t dz[t] · x[t − (W − 1) + j],    db = Σ_t dz[t].

Grid: one program along axis 0 for each slot of C rows (``packing.rows_of_slot``) and block of BD channels, channels
fastest. A program walks over the rows of its slot with the last W rows in registers, so that each row is read once;
UNROLL rows are loaded before the first of them is used. The sums dw and db leave one partial result for each slot.
Offsets are int64.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.gate import sigmoid
from kda_core.triton_lib.packing import rows_of_slot


@triton.jit
def _channels(o_d, condition, D):
    """Mask of the channels below D where a scalar condition holds, else nothing."""
    # Not an "and": the interpreter makes int32 of a scalar's broadcast.
    return o_d < tl.where(condition, D, 0)


@triton.jit
def _place(cu_seqlens, T, N, chunks, BLOCKS: tl.constexpr, C: tl.constexpr):
    """(slot, sequence, batch row, begin of the sequence, first row, end, block of channels) of a program."""
    pid = tl.program_id(0).to(tl.int64)
    i_slot = pid // BLOCKS
    i_n, i_b, first, end = rows_of_slot(cu_seqlens, i_slot, T, N, chunks, C)
    begin = i_n * 0
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + i_n).to(tl.int64)
    return i_slot, i_n, i_b, begin, first, end, pid % BLOCKS


@triton.jit
def filter_of(weight, bias, o_d, m_d, W: tl.constexpr):
    """The W weights of the channels, and their bias (or 0)."""
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.load(weight + o_d * W + j, mask=m_d, other=0.0).to(tl.float32),)
    b_bias = tl.zeros_like(taps[0])
    if bias is not None:
        b_bias += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    return taps, b_bias


@triton.jit
def _window(p_x, state, i_n, begin, first, o_d, real, s_xt, D: tl.constexpr, end_d, W: tl.constexpr):
    """The W - 1 rows before row ``first``, channels below ``end_d``: of the sequence, or of its initial state."""
    window = ()
    for j in tl.static_range(W - 1):
        row = first + (j - W + 1)
        b_x = tl.load(p_x + row * s_xt + o_d, mask=_channels(o_d, real & (row >= begin), end_d), other=0.0).to(
            tl.float32
        )
        if state is not None:
            o_s = (i_n * (W - 1) + row - begin + (W - 1)) * D + o_d
            b_x += tl.load(state + o_s, mask=_channels(o_d, real & (row < begin), end_d), other=0.0).to(tl.float32)
        window += (b_x,)
    return window


@triton.jit
def convolved(window, taps, b_bias, W: tl.constexpr):
    """The sum of one row; fused here, for kernels that are compiled without fusion."""
    b_z = b_bias
    for j in tl.static_range(W):
        b_z = tl.fma(taps[j], window[j], b_z)
    return b_z


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def convolution_forward_kernel(
    x,  # [B, T, D], the last stride 1
    weight,  # [D, W]
    bias, state, cu_seqlens,  # [D], [N, W - 1, D] and [N + 1], or None
    y,  # [B, T, D]
    final,  # [N, W - 1, D] or None; may be ``state`` where no sequence has more than C rows
    s_xb, s_xt, T, N, chunks, D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    _, i_n, i_b, begin, first, end, i_d = _place(cu_seqlens, T, N, chunks, (D + BD - 1) // BD, C)
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D
    real = i_n < N
    p_x = x + i_b * s_xb
    p_y = y + i_b * T * D
    taps, b_bias = filter_of(weight, bias, o_d, m_d, W)
    window = _window(p_x, state, i_n, begin, first, o_d, real, s_xt, D, D, W)
    stop = tl.minimum(first + C, end)
    for start in range(first, stop, UNROLL):
        rows = ()
        for i in tl.static_range(UNROLL):
            m_row = _channels(o_d, real & (start + i < stop), D)
            rows += (tl.load(p_x + (start + i) * s_xt + o_d, mask=m_row, other=0.0).to(tl.float32),)
        for i in tl.static_range(UNROLL):
            # Rows behind the end of the sequence must not enter the final state.
            inside = start + i < stop
            seen = window
            seen += (rows[i],)
            b_y = convolved(seen, taps, b_bias, W)
            if SILU:
                b_y = b_y * sigmoid(b_y, False)
            b_y = tl.where(real, b_y, 0.0).to(y.dtype.element_ty)
            tl.store(p_y + (start + i) * D + o_d, b_y, mask=_channels(o_d, inside, D))
            window = ()
            for j in tl.static_range(W - 1):
                window += (tl.where(inside, seen[j + 1], seen[j]),)
    if final is not None:
        # The slot of the last row; of an empty sequence the one where it begins.
        last = tl.maximum(end - 1, begin)
        m_final = _channels(o_d, real & (first <= last) & (last < first + C), D)
        for j in tl.static_range(W - 1):
            tl.store(final + (i_n * (W - 1) + j) * D + o_d, window[j].to(final.dtype.element_ty), mask=m_final)


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def convolution_backward_kernel(
    x,  # [B, T, D], the last stride 1
    weight,  # [D, W]
    bias, state, cu_seqlens,  # [D], [N, W - 1, D] and [N + 1], or None
    dy_0, dy_1, dy_2,  # [B, T, D_0], [B, T, D_1] and [B, T, D_2]; None where a part has no channels
    dfinal,  # [N, W - 1, D] or None
    dx,  # [B, T, D]
    dweight,  # [slots, W, D] float32
    dbias,  # [slots, D] float32 or None
    dstate,  # [N, W - 1, D] or None
    s_xb, s_xt, T, N, chunks, D: tl.constexpr, D_0: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, W: tl.constexpr,
    SILU: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    # Blocks of channels begin anew with each part of dy.
    N_0: tl.constexpr = (D_0 + BD - 1) // BD
    N_1: tl.constexpr = (D_1 + BD - 1) // BD
    N_2: tl.constexpr = (D_2 + BD - 1) // BD
    i_slot, i_n, i_b, begin, first, end, i_d = _place(cu_seqlens, T, N, chunks, N_0 + N_1 + N_2, C)
    p_dy = dy_0
    s_dy = D_0
    base = 0
    if D_1 > 0:
        second = i_d >= N_0
        p_dy = tl.where(second, dy_1, p_dy)
        s_dy = tl.where(second, D_1, s_dy)
        base = tl.where(second, D_0, base)
    if D_2 > 0:
        third = i_d >= N_0 + N_1
        p_dy = tl.where(third, dy_2, p_dy)
        s_dy = tl.where(third, D_2, s_dy)
        base = tl.where(third, D_0 + D_1, base)
    if D_1 > 0:
        i_d -= tl.where(i_d >= N_0 + N_1, N_0 + N_1, tl.where(second, N_0, 0))
    o_p = i_d * BD + tl.arange(0, BD)
    o_d = base + o_p
    m_d = o_p < s_dy
    # Rows behind the last sequence may hold anything: nothing of them is read.
    real = i_n < N
    p_x = x + i_b * s_xb
    p_dy += i_b * T * s_dy
    p_dx = dx + i_b * T * D
    taps, b_bias = filter_of(weight, bias, o_d, m_d, W)
    window = _window(p_x, state, i_n, begin, first, o_d, real, s_xt, D, base + s_dy, W)
    stop = tl.minimum(first + C, end)
    b_dbias = tl.zeros_like(b_bias)
    recent = ()
    sums = (b_dbias,)
    for _ in tl.static_range(W - 1):
        recent += (b_dbias,)
        sums += (b_dbias,)
    # dx of a row needs dz of the W - 1 rows behind it, which the next slot computes as well.
    for start in range(first, stop + (W - 1), UNROLL):
        rows = ()
        grads = ()
        for i in tl.static_range(UNROLL):
            m_row = _channels(o_p, real & (start + i < end), s_dy)
            rows += (tl.load(p_x + (start + i) * s_xt + o_d, mask=m_row, other=0.0).to(tl.float32),)
            grads += (tl.load(p_dy + (start + i) * s_dy + o_p, mask=m_row, other=0.0).to(tl.float32),)
        for i in tl.static_range(UNROLL):
            row = start + i
            seen = window
            seen += (rows[i],)
            b_dz = grads[i]
            if SILU:
                b_z = convolved(seen, taps, b_bias, W)
                b_s = sigmoid(b_z, False)
                b_dz = b_dz * b_s * (1.0 + b_z * (1.0 - b_s))
            own = tl.where(row < stop, b_dz, 0.0)
            b_dbias += own
            added = ()
            for j in tl.static_range(W):
                added += (sums[j] + own * seen[j],)
            sums = added
            # The row that is complete now, W - 1 rows back.
            known = recent
            known += (b_dz,)
            b_dx = taps[0] * known[W - 1]
            for j in tl.static_range(1, W):
                b_dx += taps[j] * known[W - 1 - j]
            if dfinal is not None:
                m_final = _channels(o_p, real & (row >= end) & (row < end + (W - 1)), s_dy)
                o_f = (i_n * (W - 1) + row - end) * D + o_d
                b_dx += tl.load(dfinal + o_f, mask=m_final, other=0.0).to(tl.float32)
            done = row - (W - 1)
            m_dx = _channels(o_p, (done >= first) & (done < stop), s_dy)
            tl.store(p_dx + done * D + o_d, b_dx.to(dx.dtype.element_ty), mask=m_dx)
            if dstate is not None:
                o_s = (i_n * (W - 1) + row - begin) * D + o_d
                m_s = _channels(o_p, real & (first == begin) & (done < begin), s_dy)
                tl.store(dstate + o_s, b_dx.to(dstate.dtype.element_ty), mask=m_s)
            window = seen[1:]
            recent = known[1:]
    for j in tl.static_range(W):
        tl.store(dweight + (i_slot * W + j) * D + o_d, sums[j], mask=m_d)
    if dbias is not None:
        tl.store(dbias + i_slot * D + o_d, b_dbias, mask=m_d)

"""Kernels of the gated RMS norm: y = x · r · w · sigmoid(a), r = 1 / sqrt(mean(x²) + ε), by rows of D channels.

Backward, with n = x · r and s = sigmoid(a): dn = dy · w · s, dx = r · (dn − n · mean(dn · n)), da = dy · n · w · s ·
(1 − s), dw = Σ dy · n · s; dw leaves one partial result for each program, added up afterwards in a fixed order.

Grid: one program along axis 0 for each ROWS rows. Offsets are int64.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.gate import sigmoid


@triton.jit
def _rows(x, gate, weight, R, eps, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr):
    """Offsets, mask, 1 / norm [ROWS, 1], x / norm, sigmoid of the gate, and the weight [1, DP]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, DP)
    offsets = rows[:, None] * D + o_d[None, :]
    mask = (rows < R)[:, None] & (o_d < D)[None, :]
    b_x = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    b_s = sigmoid(tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32), False)
    b_w = tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    # Rows behind the last one, which are zeros, need a norm where eps is 0.
    b_r = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + tl.where(rows < R, eps, 1.0))[:, None]
    return offsets, mask, b_r, b_x * b_r, b_s, b_w


@triton.jit(do_not_specialize=["R", "eps"])
def norm_forward_kernel(
    x, gate,  # [R, D]
    weight,  # [D]
    y,  # [R, D]
    R, eps, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    offsets, mask, _, b_n, b_s, b_w = _rows(x, gate, weight, R, eps, D, DP, ROWS)
    tl.store(y + offsets, (b_n * b_w * b_s).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R", "eps"])
def norm_backward_kernel(
    x, gate,  # [R, D]
    weight,  # [D]
    dy, dx, dgate,  # [R, D]
    dweight,  # [programs, D] float32
    R, eps, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    offsets, mask, b_r, b_n, b_s, b_w = _rows(x, gate, weight, R, eps, D, DP, ROWS)
    b_dy = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
    b_dn = b_dy * b_w * b_s
    b_dx = b_r * (b_dn - b_n * (tl.sum(b_dn * b_n, 1)[:, None] / D))
    tl.store(dx + offsets, b_dx.to(dx.dtype.element_ty), mask=mask)
    b_da = b_dn * b_n * (1.0 - b_s)
    tl.store(dgate + offsets, b_da.to(dgate.dtype.element_ty), mask=mask)
    o_d = tl.arange(0, DP)
    p_dw = dweight + tl.program_id(0).to(tl.int64) * D + o_d
    tl.store(p_dw, tl.sum(b_dy * b_n * b_s, 0), mask=o_d < D)

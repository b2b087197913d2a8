"""Gradient of q or k from those of its value heads: their sum, and the gradient of the normalisation.

With y = x / √(Σ x² + ε) and dy the sum over the group:   dx = (dy − y (y·dy)) / √(Σ x² + ε)

Grid: ceil(R / ROWS) · H programs along axis 0, heads fastest; R = B · T rows. Every offset is int64.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.gate import norm_gradient


@triton.jit(do_not_specialize=["R", "T", "H", "group", "s_b"])
def finish_kernel(
    x,  # [B, T, H, K]
    dy,  # [R, H, group, K] float32
    dx,  # [R, H, K]
    R, T, H, group, s_b, s_t, s_h,
    K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % H
    rows = pid // H * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, KP)
    mask = (rows < R)[:, None] & (o_k < K)[None, :]
    i_head = rows * H + i_h
    total = tl.zeros([ROWS, KP], tl.float32)
    for i in range(0, group):
        p_dy = dy + (i_head * group + i)[:, None] * K + o_k[None, :]
        total += tl.load(p_dy, mask=mask, other=0.0)
    if L2NORM:
        p_x = x + (rows // T * s_b + rows % T * s_t)[:, None] + i_h * s_h + o_k[None, :]
        total = norm_gradient(tl.load(p_x, mask=mask, other=0.0).to(tl.float32), total)
    tl.store(dx + i_head[:, None] * K + o_k[None, :], total.to(dx.dtype.element_ty), mask=mask)

"""What is left once a head's channel blocks are done: sums over them and over grouped heads, and the row norms.

    dx = (dx̂ - x̂ (x̂ · dx̂)) / |x|,    x = q, k, with dx̂ summed over the value heads that share the row

Grid: (ceil(B · T / R), H), one program R rows of a query/key head. Sums are in a fixed order. Without groups dq and dk
are done in place. Addresses: int64 from the program's base.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.gate import NORM_EPS


@triton.jit
def _row_gradient(
    x, dx_hat, dx, at, o_r, o_k, m, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """Rows of dq or dk: sum of G heads' blocks of ``dx_hat`` and, with L2NORM, the gradient of the norm."""
    b_d = tl.zeros(m.shape, tl.float32)
    for i in tl.static_range(G):
        b_d += tl.load(dx_hat + (o_r[:, None] * (H * G) + i) * K + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    if L2NORM:
        b_x = tl.load(x + at[:, None] + o_k[None, :], mask=m, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) + NORM_EPS)[:, None]
        b_x *= rstd
        b_d = rstd * (b_d - b_x * tl.sum(b_x * b_d, 1)[:, None])
    tl.store(dx + o_r[:, None] * (H * K) + o_k[None, :], b_d.to(dx.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T", "T_row", "rows"])
def finish_kernel(
    q, k, dq_hat, dk_hat, dbeta_partial, dq, dk, dbeta, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, T, T_row, rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, NK: tl.constexpr, R: tl.constexpr,
    L2NORM: tl.constexpr,
):  # fmt: skip
    row0 = tl.program_id(0).to(tl.int64) * R
    i_h = tl.program_id(1)
    G: tl.constexpr = HV // H
    o_r = tl.arange(0, R)
    o_k = tl.arange(0, KP)
    m_r = row0 + o_r < rows
    if L2NORM or G > 1:
        i_b = (row0 + o_r) // T
        t = row0 + o_r - i_b * T + i_b * T_row
        m = m_r[:, None] & (o_k < K)[None, :]
        first = (row0 * HV + i_h * G) * K
        out = (row0 * H + i_h) * K
        at = i_b * s_qb + t * s_qt + i_h * s_qh
        _row_gradient(q, dq_hat + first, dq + out, at, o_r, o_k, m, G, H, K, L2NORM)
        at = i_b * s_kb + t * s_kt + i_h * s_kh
        _row_gradient(k, dk_hat + first, dk + out, at, o_r, o_k, m, G, H, K, L2NORM)
    for i in tl.static_range(G):
        at = (row0 + o_r) * HV + i_h * G + i
        b_dbeta = tl.zeros([R], tl.float32)
        for j in tl.static_range(NK):
            b_dbeta += tl.load(dbeta_partial + rows.to(tl.int64) * (j * HV) + at, mask=m_r, other=0.0)
        tl.store(dbeta + at, b_dbeta.to(dbeta.dtype.element_ty), mask=m_r)

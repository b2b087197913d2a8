"""The last kernels of a backward, once a head's channel blocks are done: sums over them and over grouped heads, and the
row norms.

    dx = (dx̂ - x̂ (x̂ · dx̂)) / |x|,    x = q, k, with dx̂ summed over the value heads that share the row

Grid: (ceil(B · T / R), H), one program R rows of a query/key head. Sums are in a fixed order. Without groups dq and dk
are done in place. Addresses: int64 from the program's base.

``sums_kernel``: the gradients of A_log and dt_bias, sums over the slots of what ``gradients`` left of each, in a fixed
order. One launch, because two sums of torch take the host as long as five launches.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.gate import norm_gradient


@triton.jit
def _sum_of_heads(dx_hat, m, G: tl.constexpr, K: tl.constexpr):
    """Rows of dq or dk with respect to the normalised ones: the sum of G heads' blocks."""
    b_d = tl.zeros(m.shape, tl.float32)
    for i in tl.static_range(G):
        b_d += tl.load(dx_hat + i * K, mask=m, other=0.0).to(tl.float32)
    return b_d


@triton.jit(do_not_specialize=["T", "T_row", "rows"])
def finish_kernel(
    q, k, dq_hat, dk_hat, dbeta_partial, dq, dk, dbeta, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, T, T_row, rows,
    H: tl.constexpr, HV: tl.constexpr, HO: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, NK: tl.constexpr,
    R: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    row0 = tl.program_id(0).to(tl.int64) * R
    i_h = tl.program_id(1).to(tl.int64)
    G: tl.constexpr = HV // H
    # dq and dk may have more heads than the call.
    HH: tl.constexpr = HO if G == 1 else HV
    HQ: tl.constexpr = HO // G
    o_r = tl.arange(0, R)
    o_k = tl.arange(0, KP)[None, :]
    m_r = row0 + o_r < rows
    if L2NORM or G > 1:
        i_b = (row0 + o_r) // T
        t = row0 + o_r - i_b * T + i_b * T_row
        m = m_r[:, None] & (o_k < K)
        hat = (row0 * HH + i_h * G) * K + o_r[:, None] * (HH * K) + o_k
        out = (row0 * HQ + i_h) * K + o_r[:, None] * (HQ * K) + o_k
        b_dq = _sum_of_heads(dq_hat + hat, m, G, K)
        if L2NORM:
            at = i_b * s_qb + t * s_qt + i_h * s_qh
            b_dq = norm_gradient(tl.load(q + at[:, None] + o_k, mask=m, other=0.0).to(tl.float32), b_dq)
        tl.store(dq + out, b_dq.to(dq.dtype.element_ty), mask=m)
        b_dk = _sum_of_heads(dk_hat + hat, m, G, K)
        if L2NORM:
            at = i_b * s_kb + t * s_kt + i_h * s_kh
            b_dk = norm_gradient(tl.load(k + at[:, None] + o_k, mask=m, other=0.0).to(tl.float32), b_dk)
        tl.store(dk + out, b_dk.to(dk.dtype.element_ty), mask=m)
    if dbeta is not None:
        for i in tl.static_range(G):
            at = (row0 + o_r) * HV + i_h * G + i
            b_dbeta = tl.zeros([R], tl.float32)
            for j in tl.static_range(NK):
                b_dbeta += tl.load(dbeta_partial + rows.to(tl.int64) * (j * HV) + at, mask=m_r, other=0.0)
            tl.store(dbeta + at, b_dbeta.to(dbeta.dtype.element_ty), mask=m_r)


@triton.jit
def _sum_of_slots(parts, count, s_slot, size, o, R: tl.constexpr):
    """Sums of ``parts`` [count, ..] over slots, for the columns ``o`` below ``size``."""
    o_r = tl.arange(0, R)
    b_sum = tl.zeros([R, o.shape[0]], tl.float32)
    for i in range(0, count, R):
        m = (i + o_r < count)[:, None] & (o < size)[None, :]
        b_sum += tl.load(parts + (i + o_r).to(tl.int64)[:, None] * s_slot + o[None, :], mask=m, other=0.0)
    return tl.sum(b_sum, 0)


@triton.jit(do_not_specialize=["count", "HV"])
def sums_kernel(
    dA_partial,  # [count, HV, NA] float32 or None
    dbias_partial,  # [count, HV, K] float32 or None
    dA_log, ddt_bias,  # [HV], [HV, K]
    count, HV, K: tl.constexpr, NA: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid: (K / BK, HV), one program BK channels of a head; the first of a head sums the parts of A_log as well."""
    i_k = tl.program_id(0)
    i_h = tl.program_id(1)
    if dbias_partial is not None:
        o_k = i_k * BK + tl.arange(0, BK)
        b_bias = _sum_of_slots(dbias_partial + i_h * K, count, HV * K, K, o_k, R)
        tl.store(ddt_bias + i_h * K + o_k, b_bias.to(ddt_bias.dtype.element_ty), mask=o_k < K)
    # Nested: the first condition is known when the kernel is compiled.
    if dA_partial is not None:  # noqa: SIM102
        if i_k == 0:
            b_A = _sum_of_slots(dA_partial + i_h * NA, count, HV * NA, NA, tl.arange(0, NA), R)
            tl.store(dA_log + i_h, tl.sum(b_A, 0).to(dA_log.dtype.element_ty))

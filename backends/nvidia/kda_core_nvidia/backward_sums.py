"""The gradients of A_log and dt_bias: sums over the slots of what ``gradients`` left of each, in a fixed order.

Grid: (K / BK, HV), one program BK channels of a value head; the first of a head sums the parts of A_log as well. One
launch, because two sums of torch take the host as long as five launches. Addresses: int64 from the program's base.
"""

import triton
import triton.language as tl


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

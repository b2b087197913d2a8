"""Device helpers of the backward: gates and decays over intervals.

Decays inside a chunk are needed as exp of a sum over an interval of rows: from the chunk's start to a row,
from a row to the chunk's end, or, for the level with half-blocks of b rows, from a row to the middle of its
block of 2 b rows (hierarchical reference points). Every one of those sums is a product of a 0/1
matrix [C, C] with the block's log2 decays. Sums of non-positive terms do not cancel, as differences of
cumulative sums do after one very negative decay, and the matrix units return them in the layout in which the
neighbouring products are.

Blocks are held transposed, [BK channels, C rows]: the products over rows, with [C, C] matrices of masks or scores, then
have the channels as their A operand, which comes straight from the registers in which it was scaled. The decays enter
as two or three half-precision terms (16 significant bits for bf16, 22 for fp16 and 33 for fp32 inputs); the products
with 0 and 1 are exact.
"""

import triton
import triton.language as tl

from kda_core.triton_lib import gate
from kda_core_nvidia.prepare import INTERPRETED

# exp2 of anything below is 0 in fp32, so that a clamp there changes no result; fp16 holds it, and 0 times it is 0.
MIN_LOG2_DECAY = tl.constexpr(-512.0)

UNIT = tl.constexpr(2.0**6)
"""A bound of the terms of a float32 decay: MIN_LOG2_DECAY times this is within what fp16 holds."""


@triton.jit
def log2_decay(b_g, a, b_bias, lower_bound, GATE: tl.constexpr):
    """Log2 decay of a block [BK, C] of g, where it makes a difference: floored at MIN_LOG2_DECAY (NaN stays NaN)."""
    y = gate.log2_decay(b_g, a, b_bias[:, None], lower_bound, GATE)
    return tl.where(y < MIN_LOG2_DECAY, MIN_LOG2_DECAY, y)


@triton.jit
def rounded(b_x, dt: tl.constexpr):
    """``b_x`` in ``dt``, and that in fp32 again.

    In bf16 by a packed conversion of two elements: a compiler that needs both forms takes one for each element, at a
    fraction of the rate.
    """
    if dt == tl.bfloat16 and not INTERPRETED:
        narrow, wide = tl.inline_asm_elementwise(
            """
            cvt.rn.bf16x2.f32 $0, $4, $3;
            shl.b32 $1, $0, 16;
            and.b32 $2, $0, 0xffff0000;
            """,
            "=&r,=&r,=&r,r,r", [b_x], dtype=(tl.bfloat16, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        narrow = b_x.to(dt)
        wide = narrow.to(tl.float32)
    return narrow, wide


@triton.jit
def split3(b_x, dt: tl.constexpr):
    """Three terms that sum to ``b_x``: bf16 when ``dt`` is (8 significant bits each), else fp16 (11 each).

    For fp32 to UNIT times ``b_x``: fp16 holds nothing below 6e-8, which for decays near 1 is where float32 goes on.
    """
    half: tl.constexpr = tl.bfloat16 if dt == tl.bfloat16 else tl.float16
    if dt == tl.float32:
        b_x *= UNIT
    hi, wide = rounded(b_x, half)
    rest = b_x - wide
    mid = rest.to(half)
    return hi, mid, (rest - mid.to(tl.float32)).to(half)


@triton.jit
def interval_sum(hi, mid, lo, b_w, TERMS: tl.constexpr):
    """Sum over rows s of x[c, s] where ``b_w[s, r]``, as [BK, C] in fp32, from TERMS of ``hi, mid, lo = split3(x)``.

    With three terms, for fp32, the small ones are added up among themselves, for the reason that
    ``decay.selected_sum`` has.
    """
    w = b_w.to(hi.dtype)
    if TERMS == 3:
        return (tl.dot(hi, w) + tl.dot(mid, w, tl.dot(lo, w))) * (1 / UNIT)
    return tl.dot(mid, w, tl.dot(hi, w))

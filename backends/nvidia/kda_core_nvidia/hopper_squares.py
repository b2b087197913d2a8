"""16×16 matrices of ``prepare_hopper``: a warp has one of a batch of four, as a result of products.

A program has two chunk slots and four warps, numbered [half of the channels, slot]. Products over channels are summed
over a slot's two warps through shared memory. After that a warp has one of its slot's tiles for its own: the first two
warps tile 0, the last two tile 1. Matrices that both tiles need are in both of a slot's warps.

WHOLE: a program has one slot, its four warps are quarters of the channels, and what is of a slot is the same in both
warps that would have different ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core_nvidia.hopper import async_copy, copy_elements, mma_v2, seen_as

_V2 = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])

MMA = gl.constexpr(_V2)
"""Results of products of 16 rows, one a warp."""

LEFT, RIGHT = gl.constexpr(gl.DotOperandLayout(0, _V2, 2)), gl.constexpr(gl.DotOperandLayout(1, _V2, 2))
"""16-bit operands."""

LEFT_32, RIGHT_32 = gl.constexpr(gl.DotOperandLayout(0, _V2, 1)), gl.constexpr(gl.DotOperandLayout(1, _V2, 1))
"""32-bit operands."""

BY_ROW = gl.constexpr(gl.SliceLayout(2, _V2))
BY_COLUMN = gl.constexpr(gl.SliceLayout(1, _V2))


PAIR = gl.constexpr(gl.DistributedLinearLayout(
    reg_bases=[[0, 0, 0, 1], [0, 0, 8, 0], [0, 0, 0, 8]],
    lane_bases=[[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
    warp_bases=[[0, 1, 0, 0], [1, 0, 0, 0]], block_bases=[], shape=[2, 2, 16, 16],
))  # fmt: skip
"""MMA of [4, 16, 16] as [half of the channels, slot, 16, 16]."""

ROWS_FIRST = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
COLUMNS_FIRST = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0]))


@gluon.jit
def by_row(x):
    return gl.expand_dims(x, 2)


@gluon.jit
def by_column(x):
    return gl.expand_dims(x, 1)


@gluon.jit
def _contracted(x):
    """Columns of a result in the order in which its registers are those of a 32-bit left operand."""
    return x.reshape([4, 16, 2, 4, 2]).permute((0, 1, 2, 4, 3)).reshape([4, 16, 16])


@gluon.jit
def times(a, b, acc):
    """acc + a · bᵀ, all laid out as results, in tf32: no element changes its register."""
    a = gl.convert_layout(_contracted(a), LEFT_32, assert_trivial=True)
    b = gl.convert_layout(_contracted(b).permute((0, 2, 1)), RIGHT_32, assert_trivial=True)
    return mma_v2(a, b, acc, input_precision="tf32")


@gluon.jit
def turned(x):
    """Rows of a left operand as columns of the right one: the same registers."""
    return gl.convert_layout(x.permute((0, 2, 1)), RIGHT, assert_trivial=True)


@gluon.jit
def _sum_of_quarters(quarters, LAYOUT: gl.constexpr):
    """The sum of what four warps have put into shared memory."""
    return (quarters.index(0).load(LAYOUT) + quarters.index(1).load(LAYOUT)) + (
        quarters.index(2).load(LAYOUT) + quarters.index(3).load(LAYOUT)
    )


@gluon.jit
def square_of_slot(block):
    """[2, 16, 16] in shared memory, a matrix a slot, in both of its warps."""
    x = gl.expand_dims(block.load(gl.SliceLayout(0, PAIR)), 0).broadcast_to([2, 2, 16, 16])
    return gl.convert_layout(x.reshape([4, 16, 16]), MMA, assert_trivial=True)


@gluon.jit
def give_square(x, buffer):
    """The sum of [4, 16, 16] over a slot's two warps, in both of them."""
    seen_as(buffer, gl.float32, [4, 16, 16], ROWS_FIRST).store(x)


@gluon.jit
def take_square(buffer, WHOLE: gl.constexpr):
    if WHOLE:
        quarters = seen_as(buffer, gl.float32, [4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        return gl.expand_dims(_sum_of_quarters(quarters, gl.SliceLayout(0, MMA)), 0).broadcast_to([4, 16, 16])
    halves = seen_as(buffer, gl.float32, [2, 2, 16, 16], ROWS_FIRST)
    return square_of_slot(halves.index(0)) + square_of_slot(halves.index(1))


@gluon.jit
def give_tiles(x, buffer, WHOLE: gl.constexpr):
    """Put sums over a warp's channels of both of a slot's tiles, [4, 16, 16, 2], where ``_own`` finds them."""
    BY_TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0] if WHOLE else [4, 3, 1, 2, 0])
    x = x.permute((0, 3, 1, 2)).reshape([2, 2, 2, 16, 16])
    seen_as(buffer, gl.float32, [2, 2, 2, 16, 16], BY_TILE).store(x)


@gluon.jit
def take_own(buffer, TRANSPOSED: gl.constexpr, WHOLE: gl.constexpr):
    """A warp's own tile's matrices, [4, 16, 16], summed over all channels."""
    LAYOUT: gl.constexpr = COLUMNS_FIRST if TRANSPOSED else ROWS_FIRST
    if WHOLE:
        quarters = seen_as(buffer, gl.float32, [4, 2, 16, 16], LAYOUT)
        x = gl.expand_dims(_sum_of_quarters(quarters, gl.SliceLayout(1, PAIR)), 1).broadcast_to([2, 2, 16, 16])
        return gl.convert_layout(x.reshape([4, 16, 16]), MMA, assert_trivial=True)
    halves = seen_as(buffer, gl.float32, [2, 4, 16, 16], LAYOUT)
    return halves.index(0).load(MMA) + halves.index(1).load(MMA)


@gluon.jit
def take_rows(buffer, WHOLE: gl.constexpr):
    """The sum of what a slot's two warps put into a buffer, [4, 16], in both of them."""
    if WHOLE:
        quarters = seen_as(buffer, gl.float32, [4, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return gl.expand_dims(_sum_of_quarters(quarters, gl.SliceLayout(0, BY_ROW)), 0).broadcast_to([4, 16])
    halves = seen_as(buffer, gl.float32, [2, 2, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, PAIR))
    return _rows_of_slot(halves.index(0).load(LAYOUT) + halves.index(1).load(LAYOUT))


@gluon.jit
def _rows_of_slot(x):
    """[2, 16], numbers a slot, in both of its warps."""
    x = gl.expand_dims(x, 0).broadcast_to([2, 2, 16]).reshape([4, 16])
    return gl.convert_layout(x, BY_ROW, assert_trivial=True)


@gluon.jit
def pairs_of(kind: gl.constexpr, b: gl.constexpr = 1):
    """Pairs [1, 16, 16] of rows and columns: "same", "lower" (with the diagonal), or those of ``straddles``."""
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, BY_ROW))
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, BY_COLUMN))
    r = gl.expand_dims(gl.expand_dims(r, 0), 2)
    c = gl.expand_dims(gl.expand_dims(c, 0), 1)
    if kind == "same":
        found = r == c
    elif kind == "lower":
        found = r >= c
    elif kind == "straddle":
        found = (r // (2 * b) == c // (2 * b)) & (r // b > c // b)
    else:
        found = (r // (2 * b) == c // (2 * b)) & (r // b < c // b)
    return found


@gluon.jit
def diagonal(x):
    """Diagonals [4, 16] of [4, 16, 16]."""
    return gl.sum(gl.where(pairs_of("same"), x, 0.0), axis=2)


@gluon.jit
def _doubled(X, XT, L, LT, b: gl.constexpr, zero):
    """One doubling of inverses and of their transposes."""
    pairs = pairs_of("straddle", b)
    L = gl.where(pairs, -L, 0.0)
    LT = gl.where(pairs_of("straddle transposed", b), -LT, 0.0)
    XL = times(X, LT, zero)
    XTLT = times(XT, L, zero)
    return times(X, XTLT, X), times(XT, XL, XT)


@gluon.jit
def inverse_transposed(L, LT, zero):
    """The transpose of (I + L)⁻¹, [4, 16, 16], from L and its transpose; the upper part of L is not read."""
    X = gl.where(pairs_of("same"), 1.0, 0.0) - gl.where(pairs_of("straddle", 1), L, 0.0)
    XT = gl.where(pairs_of("same"), 1.0, 0.0) - gl.where(pairs_of("straddle transposed", 1), LT, 0.0)
    X, XT = _doubled(X, XT, L, LT, 2, zero)
    X, XT = _doubled(X, XT, L, LT, 4, zero)
    X, XT = _doubled(X, XT, L, LT, 8, zero)
    return XT


@gluon.jit
def two_parts(a):
    """``a`` in bfloat16, as a left operand, and what that leaves of it."""
    high = (a.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    rest = gl.convert_layout((a - high).to(gl.bfloat16), LEFT, assert_trivial=True)
    return gl.convert_layout(high.to(gl.bfloat16), LEFT, assert_trivial=True), rest


@gluon.jit
def store_square(p, x, r, c, mask, C: gl.constexpr):
    gl.store(p + (by_row(r) * C + by_column(c)), x.to(p.dtype.element_ty), mask=mask)


@gluon.jit
def store_transposed(p, x, r, c, mask, C: gl.constexpr):
    gl.store(p + (by_row(r) + by_column(c) * C), x.to(p.dtype.element_ty), mask=mask)


@gluon.jit
def store_inverse(X, block, xt00, xt10, xt11, r, c, own, lower, zero, C: gl.constexpr):
    """Store an inverse of C = 32 rows from transposes of its tiles; in float32 as ``ask_for_kept`` reads it.

    Args:
        block: of each row. own, lower: warps that store, and those of them whose tile is the last one.
    """
    last = gl.where(lower, xt11, xt00)
    if X.dtype.element_ty == gl.float32:
        p = X + by_row(block * (3 * 256))
        store_transposed(p + gl.where(lower, 512, 0), last, r, c, own, 16)
        store_transposed(p + 256, xt10, r, c, own & lower, 16)
    else:
        p = X + by_row(block * (C * C))
        store_transposed(p + gl.where(lower, 16 * C + 16, 0), last, r, c, own, C)
        store_transposed(p + 16 * C, xt10, r, c, own & lower, C)
        store_square(p + 16, zero, r, c, own & (lower == 0), C)


@gluon.jit
def ask_for_kept(inverse, norms, block0, block1, squares, rows):
    """Start to copy what a forward kept of both slots, which would be waited for where it is needed.

    Args:
        block0, block1: slot · HV + head.
        squares: room for tiles X00, X10 and X11 of inverses, [3, 2, 256].
        rows: room for norms of each tile's rows, of q and then of k, [4, 2, 16]; None without norms.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [2, 2], [1, 0])
    slot = gl.arange(0, 2, layout=gl.SliceLayout(1, LAYOUT))
    at = gl.where(slot == 1, block1, block0).to(gl.int64) * (3 * 256)
    p = inverse + (at[:, None] + gl.arange(0, 256, layout=gl.SliceLayout(0, LAYOUT))[None, :])
    for i in gl.static_range(3):
        copy_elements(squares.index(i), p + i * 256)
    if rows is not None:
        NUMBERS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        tile = gl.arange(0, 4, layout=gl.SliceLayout(1, NUMBERS))[:, None]
        i = gl.arange(0, 32, layout=gl.SliceLayout(0, NUMBERS))[None, :]
        p = norms + (gl.where(i < 16, block0, block1).to(gl.int64) * 64 + (tile * 16 + i % 16))
        copy_elements(seen_as(rows, gl.float32, [4, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])), p)
    async_copy.commit_group()


@gluon.jit
def kept_square(squares, i: gl.constexpr):
    """The transpose of tile X00, X10 or X11 of a slot's inverse, in both of its warps."""
    return square_of_slot(seen_as(squares.index(i), gl.float32, [2, 16, 16], COLUMNS_FIRST))


@gluon.jit
def kept_rows(rows, tile):
    """Norms of a tile's rows, in both of a slot's warps; ``tile`` of q, and two more of k."""
    return _rows_of_slot(rows.index(tile).load(gl.SliceLayout(0, gl.SliceLayout(3, PAIR))))

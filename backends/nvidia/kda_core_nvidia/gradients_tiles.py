"""Layouts and device functions of ``gradients_hopper``: gate, rows in shared memory, products of tiles of 16 rows.

Blocks in registers are transposed, [channels, rows]. Each warp multiplies tiles of its own channels with mma.sync; the
left operands stay in registers.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.decay import BOUNDED_LOG2_DECAY
from kda_core.triton_lib.gate import LN_2, LOG2_E
from kda_core_nvidia.hopper import copy_block, mbarrier, mma_v2, seen_as
from kda_core_nvidia.hopper_tiles import FLOOR, PROPAGATE, exp2, log2, reciprocal

_WARPS = 4
WARPS = gl.constexpr(_WARPS)
"""Warps of a program."""


def product_layouts(warps: int) -> tuple[Any, ...]:
    """Layouts of products of so many warps: TILE, M32, M64, M128 and OWN."""
    wide = (gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16]) for rows in (32, 64, 128))
    own = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8]), *wide, own


def blocks_layout(rows: int) -> Any:
    """``rows`` of 128 channels as bulk copies write them, seen as [8 blocks, 16 channels, rows]."""
    swizzled = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [1, 0, 0], [2, 0, 0], [0, 8, 1], [1, 0, 2], [2, 0, 4]]
    others = [[0, 0, 1 << i] for i in range(3, rows.bit_length() - 1)]
    return gl.SharedLinearLayout([*swizzled, *others, [4, 0, 0]], [], 1024)


_TILE, _M32, _M64, _, _OWN = product_layouts(_WARPS)

TILE, M32, M64 = gl.constexpr(_TILE), gl.constexpr(_M32), gl.constexpr(_M64)
"""Products of 128 channels by the 16 rows of a tile (mma.sync); by 32 or 64 rows (wgmma)."""

PAIRS = gl.constexpr(_M32)
"""Products of 64 stacked rows by 32 (wgmma)."""

OWN = gl.constexpr(_OWN)
"""Products of 16 channels by 16, one block a warp."""

LEFT, RIGHT = gl.constexpr(gl.DotOperandLayout(0, _TILE, 2)), gl.constexpr(gl.DotOperandLayout(1, _TILE, 2))
OWN_LEFT, OWN_RIGHT = gl.constexpr(gl.DotOperandLayout(0, _OWN, 2)), gl.constexpr(gl.DotOperandLayout(1, _OWN, 2))
BY_CHANNEL, BY_ROW = gl.constexpr(gl.SliceLayout(1, _TILE)), gl.constexpr(gl.SliceLayout(0, _TILE))

BLOCKS = gl.constexpr(blocks_layout(64))

LEAST_HALF = gl.constexpr(8 * BOUNDED_LOG2_DECAY.value)
"""Least half of a tile's log2 decay for which one reference point serves the tile: 2^±58 are its factors."""

FAR_HALF = gl.constexpr(-72.0)
"""Half of a tile's log2 decay from which on a channel has another form: 2^±72 times rows of 2^40 are in range."""

LEAST_BETWEEN = gl.constexpr(-124.0)
"""Least log2 decay between the middles of two tiles: 2^-126 and less is zero for special functions."""


@gluon.jit
def _log2_of_one_and(e):
    """log2(1 + e) for e in [0, 1], with an error of 2^-14.1 of the result.

    That is enough for gradients, which are rounded to 2^-9, and for sums of products with them. The fast logarithm
    would be one more of the special functions, which limit the gate, and lose all of a small e.
    """
    x = 0.0596515425 * e - 0.227119446
    x = x * e + 0.441898823
    x = x * e - 0.716987431
    x = x * e + 1.44261324
    return x * e


@gluon.jit
def left_parts(x):
    """``x`` rounded to bfloat16, and the rest in bfloat16, as left operands: the same registers."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, x.type.layout, 2)
    high, low = gl.inline_asm_elementwise(
        """
        { .reg .b32 first, last;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        shl.b32 first, $0, 16;
        and.b32 last, $0, 0xffff0000;
        sub.f32 first, $2, first;
        sub.f32 last, $3, last;
        cvt.rn.bf16x2.f32 $1, last, first; }
        """,
        "=&r,=&r,r,r", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return gl.convert_layout(high, LAYOUT, assert_trivial=True), gl.convert_layout(low, LAYOUT, assert_trivial=True)


@gluon.jit
def halves_of(x, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The first and the last half of the columns."""
    first, last = x.reshape([128, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
    return gl.convert_layout(first, LAYOUT, assert_trivial=True), gl.convert_layout(last, LAYOUT, assert_trivial=True)


@gluon.jit
def rows_of_tile(buffer, tile: gl.constexpr, LAYOUT: gl.constexpr = TILE):
    """Rows of a tile, transposed, in float32."""
    AS_LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    x = buffer.slice(16 * tile, 16, dim=0).permute((1, 0)).load(AS_LEFT).to(gl.float32)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def numbers_of_rows(
    buffer, kind: gl.constexpr, tile: gl.constexpr, ROWS: gl.constexpr = 32, LAYOUT: gl.constexpr = TILE
):
    """A number for each row of a tile, [1, 16], of ROWS numbers of its kind."""
    return gl.expand_dims(buffer.slice(ROWS * kind + 16 * tile, 16).load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def last_row(x):
    """The last column."""
    columns = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, x.type.layout)), 0)
    # A sum of one number and zeros, as integers: the compiler removes it.
    return gl.sum(gl.where(columns == 15, x.to(gl.int32, bitcast=True), 0), axis=1).to(gl.float32, bitcast=True)


@gluon.jit
def inside(count, tile: gl.constexpr, LAYOUT: gl.constexpr = TILE):
    """Which rows of a tile belong to the sequence, [1, 16]."""
    return gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT)) + 16 * tile < count, 0)


@gluon.jit
def log2_decays(
    g_rows, bias, a, lower_bound, count, tile: gl.constexpr, GATE: gl.constexpr, BOUNDED: gl.constexpr,
    LAYOUT: gl.constexpr = TILE,
):  # fmt: skip
    """Log2 decays of a tile's rows; ``count`` None: all rows are the sequence's.

    Errors are 2^-22 and less, not of weak softplus decays but of 1: products of decays reach over 64 rows at most here.
    """
    x = rows_of_tile(g_rows, tile, LAYOUT) + bias
    if GATE == "bounded":
        y = reciprocal(1.0 + exp2(x * (a * -LOG2_E))) * (lower_bound * LOG2_E)
    elif GATE == "softplus":
        z = x * LOG2_E
        y = (gl.maximum(z, 0.0) + log2(1.0 + exp2(-gl.abs(z)))) * -a
    else:
        y = x * LOG2_E
    if not BOUNDED:
        y = gl.maximum(y, FLOOR, propagate_nan=PROPAGATE)
    elif GATE != "bounded":
        # A broken promise costs accuracy, never a NaN.
        y = gl.maximum(y, BOUNDED_LOG2_DECAY, propagate_nan=PROPAGATE)
    if count is not None:
        y = gl.where(inside(count, tile, LAYOUT), y, 0.0)
    return y


@gluon.jit
def gate_gradients(x, a, lower_bound, grad, GATE: gl.constexpr):
    """``gate.gate_gradient`` with fast special functions; summands of the softplus gate are in log2 units."""
    if GATE == "bounded":
        e = exp2(gl.minimum(x * (a * -LOG2_E), 126.0, propagate_nan=PROPAGATE))
        s = reciprocal(1.0 + e)
        dx = (s * e) * s * (grad * (lower_bound * a))
        summand = gl.where(dx == 0.0, 0.0, x * dx)
    else:
        # Infinity times a gradient that vanishes would be NaN.
        z = gl.minimum(x * LOG2_E, 1e30, propagate_nan=PROPAGATE)
        more = _log2_of_one_and(exp2(-gl.abs(z)))
        s = exp2(gl.minimum(z, 0.0) - more)
        grad = grad * -a
        dx = s * grad
        summand = (gl.maximum(z, 0.0) + more) * grad
    return dx, summand


@gluon.jit
def unit_of_summands(GATE: gl.constexpr):
    """The factor of sums of ``gate_gradients``' summands."""
    return LN_2 if GATE == "softplus" else 1.0


@gluon.jit
def least_halves(low, TILES: gl.constexpr):
    """The least half of a tile's log2 decay in each 16 channels, [8]; FAR_HALF and less: they are far.

    Factors of a channel may be beyond LEAST_HALF if a neighbour's are not: terms that cancel show in the gradients of a
    row whose decays are all strong. The decay between two tiles' reference points must not vanish.

    Args:
        low: halves of neighbouring tiles, [128] each.
    """
    least = low[0]
    between = low[0] + low[1]
    for t in gl.static_range(1, TILES):
        least = gl.minimum(least, low[t])
        between = gl.minimum(between, low[t - 1] + low[t])
    mildest = gl.max(least.reshape([8, 16]), axis=1)
    least = gl.minimum(least, between + (FAR_HALF - LEAST_BETWEEN))
    return gl.where(mildest < LEAST_HALF, FAR_HALF, gl.min(least.reshape([8, 16]), axis=1))


@gluon.jit
def selected_sums(y, select, weights, zero):
    """Products of decays, in two parts, with a matrix [summand, row]: weights[0] where ``select``, else weights[1]."""
    high, low = left_parts(y)
    right = gl.where(select, weights[0], weights[1]).to(gl.bfloat16)
    return mma_v2(high, right, mma_v2(low, right, zero))


@gluon.jit
def add_product(left, right, acc):
    """acc + left · right, the left operand in two parts."""
    return mma_v2(left[0], right, mma_v2(left[1], right, acc))


@gluon.jit
def add_each(a0, a1, b0, b1, c0, c1, x0, x1, y0, y1, z0, z1):
    return a0 + x0, a1 + x1, b0 + y0, b1 + y1, c0 + z0, c1 + z1


@gluon.jit
def own_gradients(dq, dk, dkc, q_rows, k_rows, numbers, own_products, columns, tile: gl.constexpr):
    """A tile's gradients of raw rows of q and k, except for what their norms take away.

    Returns:
        the two gradients; summands of the decay gradient as parts of a left operand; summands of a row's product with
        its gradient, of q and of k, and of the gradient of β.
    """
    k = rows_of_tile(k_rows, tile)
    q = rows_of_tile(q_rows, tile)
    k_beta = numbers_of_rows(numbers, 0, tile)
    q_scale = numbers_of_rows(numbers, 1, tile)
    own = q_scale * gl.expand_dims(own_products.slice(80 * tile, 16).load(BY_ROW), 0)
    dq = dq * q_scale
    dk = dk * -numbers_of_rows(numbers, 2, tile)
    of_column = k_beta * dkc if columns is None else k_beta * dkc * columns
    summands = left_parts(q * dq + k * (dk - of_column))
    # The diagonal of M has no decay.
    dq += k * (own * k_beta)
    dkc += q * own
    dk += k_beta * dkc
    return dq, dk, summands, q * dq, k * dk, k * dkc


@gluon.jit
def of_raw(d, x_rows, projected, numbers, norm: gl.constexpr, tile: gl.constexpr):
    """The gradient of a tile's raw rows: without the part along the row."""
    n = numbers_of_rows(numbers, norm, tile)
    return d - rows_of_tile(x_rows, tile) * (n * n * gl.expand_dims(projected, 0))


@gluon.jit
def store_tiles(buffer, first, last):
    """Two tiles as 32 rows of a block in shared memory."""
    x = gl.join(first, last).permute([0, 2, 1]).reshape([128, 32])
    buffer.permute((1, 0)).store(gl.convert_layout(x, M32, assert_trivial=True).to(buffer.dtype))


@gluon.jit
def products_of_channels(s_half, ds_half, sums):
    """Add products over the rows of two states, of each block of 16 channels."""
    left = seen_as(s_half, s_half.dtype, [8, 16, 64], BLOCKS).load(OWN_LEFT)
    right = seen_as(ds_half, s_half.dtype, [8, 16, 64], BLOCKS).permute((0, 2, 1)).load(OWN_RIGHT)
    return mma_v2(left, right, sums)


@gluon.jit
def diagonals(squares):
    """Diagonals of blocks of 16 channels, [128]."""
    OWN: gl.constexpr = squares.type.layout
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN))), 0), 2)
    c = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, OWN))), 0), 1)
    return gl.sum(gl.where(r == c, squares, 0.0), axis=2).reshape([128])


@gluon.jit
def expect_values(bars, C: gl.constexpr):
    """Make barriers wait for 128 value channels, in two blocks: z, do and dv, states, gradients of states."""
    for i in gl.static_range(4):
        mbarrier.expect(bars[i], C * 64 * (2 if i < 2 else 4))
    for i in gl.static_range(4, 8):
        mbarrier.expect(bars[i], 64 * 128 * 2)


@gluon.jit
def copy_values(
    z, do, states, state_grads, block, row, i_h, s_oh, channel, blocks, bars,
    Z_ROWS: gl.constexpr, V: gl.constexpr, first: gl.constexpr,
):  # fmt: skip
    """Begin to copy them from value channel ``first`` on, all but dv; a block of z has Z_ROWS rows."""
    z_0, z_1, o_0, o_1, s_0, s_1, ds_0, ds_1 = blocks
    z0_bar, z1_bar, o0_bar, o1_bar, s0_bar, s1_bar, ds0_bar, ds1_bar = bars
    copy_block(z, [block * Z_ROWS, first], z0_bar, z_0)
    copy_block(do, [row, i_h * s_oh + first], o0_bar, o_0.index(0))
    copy_block(z, [block * Z_ROWS, first + 64], z1_bar, z_1)
    copy_block(do, [row, i_h * s_oh + (first + 64)], o1_bar, o_1.index(0))
    copy_block(states, [block * V + first, channel], s0_bar, s_0)
    copy_block(states, [block * V + (first + 64), channel], s1_bar, s_1)
    copy_block(state_grads, [block * V + first, channel], ds0_bar, ds_0)
    copy_block(state_grads, [block * V + (first + 64), channel], ds1_bar, ds_1)


@gluon.jit
def clear_rows(buffer, count, LAYOUT: gl.constexpr):
    """Rows from ``count`` on become zero: they belong to another sequence."""
    o_r = gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    x = buffer.load(LAYOUT)
    buffer.store(gl.where((o_r < count)[:, None], x, gl.full(x.shape, 0.0, buffer.dtype, LAYOUT)))


@gluon.jit
def store_rows(p, stride, buffer, count, LAYOUT: gl.constexpr, ROWS: gl.constexpr = 32):
    """Store the first ``count`` rows of a block [ROWS, 128]; zeros for a buffer of None."""
    o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    x = gl.full([ROWS, 128], 0.0, p.dtype.element_ty, LAYOUT) if buffer is None else buffer.load(LAYOUT)
    at = p + (o_r.to(gl.int64)[:, None] * stride + o_k[None, :])
    gl.store(at, x, mask=(o_r < count)[:, None] & (o_k >= 0)[None, :])


@gluon.jit
def sum_of_ends(
    initial_state, grad_final_state, i_nh, channel, K: gl.constexpr, V: gl.constexpr, V_FIRST: gl.constexpr,
    LAYOUT: gl.constexpr = TILE,
):  # fmt: skip
    """Σ_v of a sequence's initial state times the gradient of its final one, as the caller gave them, [128].

    Args:
        channel: the first key channel.
    """
    o_k = channel + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT)), 1)
    o_v = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT)), 0)
    sums = gl.full([128, 16], 0.0, gl.float32, LAYOUT)
    base = i_nh.to(gl.int64) * (K * V)
    for first in range(0, V, 16):
        at = (first + o_v) * K + o_k if V_FIRST else o_k * V + (first + o_v)
        s = gl.load(initial_state + base + at).to(gl.float32)
        sums += s * gl.load(grad_final_state + base + at).to(gl.float32)
    return gl.sum(sums, axis=1)

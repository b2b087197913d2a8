"""Layouts and device functions of ``gradients_hopper_persistent``: those of ``gradients_tiles`` for eight warps. Each
has 16 channels of all four tiles of a pair of slots.

Blocks are transposed, [channels, rows]. Tuples hold a block or a number for each tile, first tile first.
"""

# ruff: noqa: RUF005 (no starred tuples in Triton)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core_nvidia import gradients_tiles as tiles
from kda_core_nvidia.hopper import block_barrier, mma_v2, seen_as
from kda_core_nvidia.triton_private import VERSION

_WARPS = 8
WARPS = gl.constexpr(_WARPS)
"""Warps of a program that multiply. One program has a multiprocessor's registers and shared memory."""

LOADER_REGISTERS = gl.constexpr(24)
"""Registers of a thread of the warp that loads; those that multiply share the rest."""

TILES = gl.constexpr(4)
"""Tiles of 16 rows in a pair of slots."""

_TILE, _M32, _M64, _M128, _OWN = tiles.product_layouts(_WARPS)

TILE, M32, M64, M128 = gl.constexpr(_TILE), gl.constexpr(_M32), gl.constexpr(_M64), gl.constexpr(_M128)
"""Results of 128 channels (or stacked rows) by 16 rows, of a warp; of 32, 64 or 128 rows, asynchronous."""

OWN = gl.constexpr(_OWN)
"""Results of 16 channels by 16, a block a warp."""

RIGHT = gl.constexpr(gl.DotOperandLayout(1, _TILE, 2))
OWN_LEFT, OWN_RIGHT = gl.constexpr(gl.DotOperandLayout(0, _OWN, 2)), gl.constexpr(gl.DotOperandLayout(1, _OWN, 2))
BY_CHANNEL, BY_ROW = gl.constexpr(gl.SliceLayout(1, _TILE)), gl.constexpr(gl.SliceLayout(0, _TILE))

_BY_WARP = gl.BlockedLayout([_WARPS, 1], [1, 32], [1, _WARPS], [1, 0])
BY_WARP = gl.constexpr(_BY_WARP)
"""Numbers [warps, 256]: each thread has one column."""

LANES = gl.constexpr(gl.SliceLayout(0, _BY_WARP))
"""256 numbers, four kinds for each of 64 rows: one a thread, a kind two warps."""

BLOCKS = gl.constexpr(tiles.blocks_layout(128))


WARP_ORDERS = gl.constexpr(VERSION == "3.6")
"""Whether ptxas moves no load across a barrier of a warp that is whole already; later ones leave such a barrier out."""

EARLY = WARP_ORDERS
"""Whether a thread has the registers for the next pair's numbers as early as its gradients are summed; others spill."""


@gluon.jit
def in_order():
    """Keep loads of a step behind the step before: ptxas would load the operands of all tiles first, and spill."""
    if WARP_ORDERS:
        ORDER: gl.constexpr = "bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
        gl.inline_asm_elementwise(ORDER, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)
    else:
        block_barrier()


@gluon.jit
def rows_of(buffer, tile: gl.constexpr):
    """Rows of a tile, transposed, in float32."""
    return tiles.rows_of_tile(buffer, tile, TILE)


@gluon.jit
def numbers_of(buffer, kind: gl.constexpr, tile: gl.constexpr):
    """A number for each row of a tile, [1, 16]."""
    return tiles.numbers_of_rows(buffer, kind, tile, 64, TILE)


@gluon.jit
def tiles_of(x):
    """Columns of [128, 64] by tiles."""
    first, last = tiles.halves_of(x, 64, M32)
    x0, x1 = tiles.halves_of(first, 32, TILE)
    x2, x3 = tiles.halves_of(last, 32, TILE)
    return x0, x1, x2, x3


@gluon.jit
def tiles_of_stacked(x):
    """Columns of [128, 128] by tiles: those of the first 64, and those of the last."""
    first, last = tiles.halves_of(x, 128, M64)
    return tiles_of(first), tiles_of(last)


@gluon.jit
def sums_of_threads(x):
    """Sums over a thread's columns of [128, 16], for each channel four that ``gl.sum`` adds up."""
    return gl.sum(gl.sum(x.reshape([128, 2, 4, 2]), axis=3), axis=1)


@gluon.jit
def products_of_channels(s, ds):
    """Sums over v of S ⊙ dS, [128]: diagonals of products of each block of 16 channels."""
    left = seen_as(s, s.dtype, [8, 16, 128], BLOCKS).load(OWN_LEFT)
    right = seen_as(ds, s.dtype, [8, 16, 128], BLOCKS).permute((0, 2, 1)).load(OWN_RIGHT)
    squares = mma_v2(left, right, gl.full([8, 16, 16], 0.0, gl.float32, OWN))
    return gl.convert_layout(tiles.diagonals(squares), BY_CHANNEL, assert_trivial=True)


@gluon.jit
def add_columns(q_grads, k_grads, k_beta, pairs, factor, tile: gl.constexpr):
    """Add what the rows of ``tile`` give to those from it on, whose sums are first multiplied by ``factor``.

    Args:
        q_grads, k_grads: sums before the rows' own decays, for each tile.
        k_beta: the columns of pairs as a left operand.
        pairs: [32, 16, 16], for each tile of columns those of do, then those of dv.
        factor: the decay that lies between the sums' reference point and the tile's.
    """
    new_q = q_grads[:tile]
    new_k = k_grads[:tile]
    for t in gl.static_range(tile, TILES):
        of_do = pairs.index(8 * tile + t).permute((1, 0)).load(RIGHT)
        new_q = new_q + (tiles.add_product(k_beta, of_do, q_grads[t] * factor),)
        of_dv = pairs.index(8 * tile + 4 + t).permute((1, 0)).load(RIGHT)
        new_k = new_k + (tiles.add_product(k_beta, of_dv, k_grads[t] * factor),)
    return new_q, new_k


@gluon.jit
def add_rows(column_grads, q_rise, k_rise, pairs, factor, tile: gl.constexpr):
    """Add what the rows of ``tile`` give as rows of pairs to the columns up to it, as ``add_columns``."""
    found = ()
    for t in gl.static_range(tile + 1):
        x = tiles.add_product(q_rise, pairs.index(8 * t + tile).load(RIGHT), column_grads[t] * factor)
        found = found + (tiles.add_product(k_rise, pairs.index(8 * t + 4 + tile).load(RIGHT), x),)
    return found


@gluon.jit
def own_gradients(dq, dk, dkc, q, k, numbers, own_products, tile: gl.constexpr):
    """A tile's gradients of rows of q and k, but for what their norms take away, of sums over other rows' pairs.

    Returns:
        the two gradients; summands of the decay gradient as parts of a left operand; sums over a warp's channels of a
        row's product with its gradient, of q and of k, and of the gradient of β.
    """
    k_beta = numbers_of(numbers, 0, tile)
    q_scale = numbers_of(numbers, 1, tile)
    own = q_scale * gl.expand_dims(own_products.slice(16 * tile, 16).load(BY_ROW), 0)
    p = tiles.left_parts(q * dq + k * (dk - k_beta * dkc))
    dq += k * (own * k_beta)
    dkc += q * own
    dk += k_beta * dkc
    return dq, dk, p, _by_warp(q * dq), _by_warp(k * dk), _by_warp(k * dkc)


@gluon.jit
def _by_warp(x):
    """Sums over two of a warp's channels, [warps, 8, 16]; those of eight such become one of [warps, 8 sums, 16]."""
    return gl.sum(x.reshape([WARPS, 2, 8, 16]), axis=1)


@gluon.jit
def _exchanged(x, BIT: gl.constexpr):
    """[warps, 8, 16] with those of the eight exchanged that differ by BIT: they are neighbours' registers."""
    if BIT == 1:
        NETWORK: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 4, 0x1f, 0xffffffff;"
    elif BIT == 2:
        NETWORK: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 8, 0x1f, 0xffffffff;"
    else:
        NETWORK: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 16, 0x1f, 0xffffffff;"
    return gl.inline_asm_elementwise(NETWORK, "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def merged_sums(first, second, BIT: gl.constexpr):
    """Add up neighbours' parts of two blocks of sums: those without BIT then hold the first's, others the second's."""
    LAYOUT: gl.constexpr = first.type.layout
    j = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    others = gl.expand_dims(gl.expand_dims(j & BIT, 0), 2) != 0
    return gl.where(others, second, first) + _exchanged(gl.where(others, first, second), BIT)


@gluon.jit
def with_sums(found, new, tile: gl.constexpr):
    """A tile's sums among those found, last tile first; two tiles' become one block."""
    return (new,) + found if tile % 2 == 1 else (merged_sums(new, found[0], 1),) + found[1:]


@gluon.jit
def of_raw(d, x_rows, numbers, kind: gl.constexpr, tile: gl.constexpr):
    """The gradient of a tile's rows: less its part along the row."""
    return d - rows_of(x_rows, tile) * numbers_of(numbers, kind, tile)


@gluon.jit
def log2_decays_of(
    g_rows, bias, rate, lower_bound, count, tile: gl.constexpr, GATE: gl.constexpr, BOUNDED: gl.constexpr
):
    """Log2 decays of a tile's rows. Rows behind ``count``, if it is not None, are zeros in the last two tiles."""
    if tile < TILES // 2 or GATE == "none":
        count = None
    return tiles.log2_decays(g_rows, bias, rate, lower_bound, count, tile, GATE, BOUNDED, TILE)


@gluon.jit
def write_down_far(least, once, far_pairs, far_count, pair):
    """Another launch writes all results of a pair once more whose least half is too low.

    Args:
        least: a number a thread.
        once: the thread that writes.
    """
    far = once & (least <= tiles.FAR_HALF)
    none = gl.zeros_like(once).to(gl.int32)
    at = gl.atomic_add(far_count + none, none + 1, mask=far)
    gl.store(far_pairs + at, none + pair, mask=far)


@gluon.jit
def gradients_of_gate(g_rows, bias, rate, lower_bound, grads, count, GATE: gl.constexpr):
    """Gradients of the gate's input, and the sum of the summands of A_log's and of dt_bias's by channel.

    Args:
        grads: of tiles of log decays; of no meaning behind the pair's rows.
        count: rows of the pair, more than those of two tiles; None: all.
    """
    found = ()
    summands = gl.full([128, 16], 0.0, gl.float32, TILE)
    totals = summands
    for t in gl.static_range(TILES):
        grad = grads[t]
        if count is not None and t >= TILES // 2:
            grad = gl.where(tiles.inside(count, t, TILE), grad, 0.0)
        dx, summand = tiles.gate_gradients(rows_of(g_rows, t) + bias, rate, lower_bound, grad, GATE)
        found = found + (dx,)
        summands += summand
        totals += dx
    return found, summands * tiles.unit_of_summands(GATE), totals


@gluon.jit
def _joined(first, second, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Two blocks [ROWS, COLUMNS] side by side."""
    return gl.join(first, second).permute([0, 2, 1]).reshape([ROWS, 2 * COLUMNS])


@gluon.jit
def store_tiles(buffer, x):
    """One store for all tiles: the compiler would put barriers between stores to parts of a buffer."""
    whole = _joined(_joined(x[0], x[1], 128, 16), _joined(x[2], x[3], 128, 16), 128, 32)
    buffer.permute((1, 0)).store(gl.convert_layout(whole, M64, assert_trivial=True).to(buffer.dtype))


@gluon.jit
def store_sums(buffer, q_sums, k_sums, beta_sums):
    """Put sums over a warp's channels, of four tiles each, into [warps, 256], 64 rows for each kind; the last is twice
    there.
    """
    buffer.slice(0, 128, dim=1).store(merged_sums(q_sums, k_sums, 4).reshape([WARPS, 128]))
    buffer.slice(128, 128, dim=1).store((beta_sums + _exchanged(beta_sums, 4)).reshape([WARPS, 128]))

"""Pairs of rows in ``gradients_hopper``: what the rows of a chunk's two tiles give to each other's gradients.

Sums over pairs of rows r > s have the factor 2^(decay from s to r). Two forms of it:

- ``near_gradients``: each tile has a reference point at half of its decay, and factors from there to its rows and back
  (rise and fall, 2^±x). They lie in 2^±58 where rows decay by at most e⁻⁵ on average.
- ``far_gradients``, for any decay: hierarchical reference points inside a tile, whose exponents are never positive.

A row of tile 1 reaches those of tile 0 through the boundary between them in both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core_nvidia import gradients_tiles as tiles
from kda_core_nvidia.hopper import block_barrier
from kda_core_nvidia.hopper_tiles import exp2, reciprocal


@gluon.jit
def rows_by_columns(pairs, block: gl.constexpr, LAYOUT: gl.constexpr = tiles.RIGHT):
    """A 16×16 block of pairs as a right operand [s, r], to sum over s."""
    return pairs.index(block).permute((1, 0)).load(LAYOUT)


@gluon.jit
def columns_by_rows(pairs, block: gl.constexpr, LAYOUT: gl.constexpr = tiles.RIGHT):
    """The same as [r, s], to sum over r."""
    return pairs.index(block).load(LAYOUT)


@gluon.jit
def near_gradients(dq, dk, dkc, rise0, rise1, half0, half1, o_scale, q_rows, k_rows, numbers, pairs):
    """Gradients of the rows with respect to q̂·scale, −k̂ as a row and k̂β as a column of its pairs.

    Args:
        dq, dk, dkc: products of the rows of do, dv and z with the states, [128, 32], without any decay.
        rise0, rise1: 2^x of each tile.
        half0, half1: half of each tile's log2 decay, [128].
        o_scale: what the state gradients still have to be multiplied by.
        pairs: blocks [tile of z, do or dv, their tile].

    Returns:
        dq, dk and dkc of tile 0 and of tile 1, and the sum over all rows of what dS gives to the decay.
    """
    from_start = gl.expand_dims(exp2(half0), 1)
    to_end = gl.expand_dims(exp2(half1) * o_scale, 1)
    between = gl.expand_dims(exp2(half0 + half1), 1)
    dq0, dq1 = tiles.halves_of(dq, 32, tiles.TILE)
    dk0, dk1 = tiles.halves_of(dk, 32, tiles.TILE)
    dkc0, dkc1 = tiles.halves_of(dkc, 32, tiles.TILE)
    dkc0 = dkc0 * to_end
    dkc1 = dkc1 * to_end
    kb0 = tiles.rows_of_tile(k_rows, 0) * reciprocal(rise0) * tiles.numbers_of_rows(numbers, 0, 0)
    kb1 = tiles.rows_of_tile(k_rows, 1) * reciprocal(rise1) * tiles.numbers_of_rows(numbers, 0, 1)
    ends = gl.sum(kb0 * (dkc0 * between) + kb1 * dkc1, axis=1)
    kb0 = tiles.left_parts(kb0)
    dq0 = tiles.add_product(kb0, rows_by_columns(pairs, 0), dq0 * from_start)
    dq1 = tiles.add_product(kb0, rows_by_columns(pairs, 1), dq1 * from_start)
    dk0 = tiles.add_product(kb0, rows_by_columns(pairs, 2), dk0 * from_start)
    dk1 = tiles.add_product(kb0, rows_by_columns(pairs, 3), dk1 * from_start)
    kb1 = tiles.left_parts(kb1)
    dq1 = tiles.add_product(kb1, rows_by_columns(pairs, 5), dq1 * between)
    dk1 = tiles.add_product(kb1, rows_by_columns(pairs, 7), dk1 * between)
    # Without a barrier the compiler loads the operands of all products first, and spills.
    block_barrier()
    qr = tiles.left_parts(tiles.rows_of_tile(q_rows, 1) * rise1 * tiles.numbers_of_rows(numbers, 1, 1))
    kr = tiles.left_parts(tiles.rows_of_tile(k_rows, 1) * rise1 * -tiles.numbers_of_rows(numbers, 2, 1))
    dkc0 = tiles.add_product(kr, columns_by_rows(pairs, 3), tiles.add_product(qr, columns_by_rows(pairs, 1), dkc0))
    dkc1 = tiles.add_product(kr, columns_by_rows(pairs, 7), tiles.add_product(qr, columns_by_rows(pairs, 5), dkc1))
    qr = tiles.left_parts(tiles.rows_of_tile(q_rows, 0) * rise0 * tiles.numbers_of_rows(numbers, 1, 0))
    kr = tiles.left_parts(tiles.rows_of_tile(k_rows, 0) * rise0 * -tiles.numbers_of_rows(numbers, 2, 0))
    dkc0 = dkc0 * between
    dkc0 = tiles.add_product(kr, columns_by_rows(pairs, 2), tiles.add_product(qr, columns_by_rows(pairs, 0), dkc0))
    fall0 = reciprocal(rise0)
    fall1 = reciprocal(rise1)
    return dq0 * rise0, dk0 * rise0, dkc0 * fall0, dq1 * rise1, dk1 * rise1, dkc1 * fall1, ends


@gluon.jit
def add_sums(summands, select, acc):
    """Add to each row t the sum of the summands of rows s where ``select``."""
    return tiles.add_product(tiles.left_parts(summands), gl.where(select, 1.0, 0.0).to(gl.bfloat16), acc)


@gluon.jit
def _kept(x, mask):
    """Elements of 16 bits, or zeros where the mask has no bits: two in one instruction."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def add_level(dq, dk, dkc, dg, y, b, q, k, kb, pairs, MU: gl.constexpr, LU: gl.constexpr):
    """Add the pairs that straddle the middles of a tile's blocks of 2b rows.

    Args:
        q, k, kb: q̂·scale, −k̂ and k̂β of the tile's rows.
    """
    LAYOUT: gl.constexpr = y.type.layout
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    zero = gl.full([128, 16], 0.0, gl.float32, LAYOUT)
    s = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT)), 1)
    t = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, RIGHT)), 0)
    # b is a power of two.
    same = (s ^ t) < b
    second = (t & b) != 0
    # From a row of a block's first half to the middle, and from there to one of its second half.
    e = exp2(tiles.selected_sums(y, same & (second == (s <= t)), (1.0, 0.0), zero))
    # Pairs of rows with later ones are zero already.
    straddling = gl.where(((s ^ t) >= b) & ((s ^ t) < 2 * b), -1, 0).to(gl.int16)
    left = tiles.left_parts(kb * e)
    of_q = tiles.add_product(left, _kept(rows_by_columns(pairs, MU, RIGHT), straddling), zero) * e
    of_k = tiles.add_product(left, _kept(rows_by_columns(pairs, LU, RIGHT), straddling), zero) * e
    of_column = tiles.add_product(tiles.left_parts(q * e), _kept(columns_by_rows(pairs, MU, RIGHT), straddling), zero)
    of_column = (
        tiles.add_product(tiles.left_parts(k * e), _kept(columns_by_rows(pairs, LU, RIGHT), straddling), of_column) * e
    )
    # A pair's product decays in all rows behind its column, up to its row. A row of a second half has no column part
    # here, one of a first half no row part.
    dg = add_sums(q * of_q + k * of_k + kb * of_column, same & (second == (s >= t)), dg)
    return dq + of_q, dk + of_k, dkc + of_column, dg


@gluon.jit
def _put(buffer, x, tile: gl.constexpr):
    buffer.slice(16 * tile, 16, dim=0).permute((1, 0)).store(x)


@gluon.jit
def take(buffer, tile: gl.constexpr):
    """A tile of a float32 block [32, 128]."""
    return buffer.slice(16 * tile, 16, dim=0).permute((1, 0)).load(tiles.TILE)


@gluon.jit
def _add_levels(
    dkc, bias, a, lower_bound, count, g_rows, q_rows, k_rows, numbers, pairs, dq_rows, dk_rows, dg_rows,
    tile: gl.constexpr, MU: gl.constexpr, LU: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Add a tile's own pairs to dkc and, in shared memory, to dq, dk and dg."""
    y = tiles.log2_decays(g_rows, bias, a, lower_bound, count, tile, GATE, False)
    dq, dk, dg = take(dq_rows, tile), take(dk_rows, tile), take(dg_rows, tile)
    q = tiles.rows_of_tile(q_rows, tile) * tiles.numbers_of_rows(numbers, 1, tile)
    k = tiles.rows_of_tile(k_rows, tile) * -tiles.numbers_of_rows(numbers, 2, tile)
    kb = tiles.rows_of_tile(k_rows, tile) * tiles.numbers_of_rows(numbers, 0, tile)
    b = 1
    while b < 16:
        dq, dk, dkc, dg = add_level(dq, dk, dkc, dg, y, b, q, k, kb, pairs, MU, LU)
        b = b * 2
    _put(dq_rows, dq, tile)
    _put(dk_rows, dk, tile)
    _put(dg_rows, dg, tile)
    return dkc


@gluon.jit
def far_gradients(
    dq, dk, dkc, sums, bias, a, lower_bound, count, o_scale, g_rows, q_rows, k_rows, numbers, pairs,
    dq_rows, dk_rows, dg_rows, GATE: gl.constexpr,
):  # fmt: skip
    """``near_gradients`` for any decay; leaves the gradient of the decays, too, in ``dg_rows``.

    Its sums have no terms that cancel: where decays are strong, their gradient is far smaller than such terms. Decays
    are formed more than once, and results wait in shared memory: few chunks come here, and all others would hold
    registers for them.

    Args:
        sums: Σ_v of S ⊙ dS, decayed over the chunk, [128].
        dq_rows, dk_rows, dg_rows: float32 blocks [32, 128] that nothing else uses.
    """
    zero = gl.full([128, 16], 0.0, gl.float32, tiles.TILE)
    s = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, tiles.RIGHT)), 1)
    t = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, tiles.RIGHT)), 0)
    dq0, dq1 = tiles.halves_of(dq, 32, tiles.TILE)
    dk0, dk1 = tiles.halves_of(dk, 32, tiles.TILE)
    dkc0, dkc1 = tiles.halves_of(dkc, 32, tiles.TILE)
    # Tile 0 from the chunk's start and to the boundary, tile 1 from there and to the chunk's end.
    y = tiles.log2_decays(g_rows, bias, a, lower_bound, count, 0, GATE, False)
    x = tiles.selected_sums(y, s <= t, (1.0, 0.0), zero)
    whole = gl.expand_dims(exp2(tiles.last_row(x)), 1)
    since = exp2(x)
    until0 = exp2(tiles.selected_sums(y, s > t, (1.0, 0.0), zero))
    dq0 = dq0 * since
    dk0 = dk0 * since
    q = tiles.rows_of_tile(q_rows, 0) * tiles.numbers_of_rows(numbers, 1, 0)
    k = tiles.rows_of_tile(k_rows, 0) * -tiles.numbers_of_rows(numbers, 2, 0)
    dg0 = add_sums(q * dq0 + k * dk0, s >= t, gl.expand_dims(sums, 1) + zero)
    _put(dq_rows, dq0, 0)
    _put(dk_rows, dk0, 0)
    dq1 = dq1 * whole
    dk1 = dk1 * whole
    y = tiles.log2_decays(g_rows, bias, a, lower_bound, count, 1, GATE, False)
    x = tiles.selected_sums(y, s <= t, (1.0, 0.0), zero)
    whole = gl.expand_dims(exp2(tiles.last_row(x)), 1)
    since = exp2(x)
    dkc1 = dkc1 * (exp2(tiles.selected_sums(y, s > t, (1.0, 0.0), zero)) * o_scale)
    q = tiles.rows_of_tile(q_rows, 1) * since * tiles.numbers_of_rows(numbers, 1, 1)
    k = tiles.rows_of_tile(k_rows, 1) * since * -tiles.numbers_of_rows(numbers, 2, 1)
    # The state reaches the rows of tile 1 through all of tile 0.
    dg0 += gl.expand_dims(gl.sum(q * dq1 + k * dk1, axis=1), 1)
    kb = tiles.rows_of_tile(k_rows, 0) * until0 * tiles.numbers_of_rows(numbers, 0, 0)
    left = tiles.left_parts(kb)
    dq1 = tiles.add_product(left, rows_by_columns(pairs, 1), dq1)
    dk1 = tiles.add_product(left, rows_by_columns(pairs, 3), dk1)
    # The columns of tile 0 reach the chunk's end through all of tile 1.
    dkc0 = dkc0 * (whole * o_scale)
    dg1 = gl.expand_dims(gl.sum(kb * dkc0, axis=1) + sums, 1) + zero
    dg1 = add_sums(q * dq1 + k * dk1, s >= t, dg1)
    dg1 = add_sums(tiles.rows_of_tile(k_rows, 1) * dkc1 * tiles.numbers_of_rows(numbers, 0, 1), s < t, dg1)
    _put(dq_rows, dq1 * since, 1)
    _put(dk_rows, dk1 * since, 1)
    _put(dg_rows, dg1, 1)
    dkc0 = tiles.add_product(tiles.left_parts(q), columns_by_rows(pairs, 1), dkc0)
    dkc0 = tiles.add_product(tiles.left_parts(k), columns_by_rows(pairs, 3), dkc0)
    _put(dg_rows, add_sums(kb * dkc0, s < t, dg0), 0)
    dkc0 = _add_levels(
        dkc0 * until0, bias, a, lower_bound, count, g_rows, q_rows, k_rows, numbers, pairs, dq_rows, dk_rows, dg_rows,
        0, 0, 2, GATE,
    )  # fmt: skip
    dkc1 = _add_levels(
        dkc1, bias, a, lower_bound, count, g_rows, q_rows, k_rows, numbers, pairs, dq_rows, dk_rows, dg_rows,
        1, 5, 7, GATE,
    )  # fmt: skip
    return take(dq_rows, 0), take(dk_rows, 0), dkc0, take(dq_rows, 1), take(dk_rows, 1), dkc1, sums

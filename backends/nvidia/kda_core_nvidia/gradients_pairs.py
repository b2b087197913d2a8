"""Pairs of rows in ``gradients_hopper``: what the rows of a chunk's two tiles give to each other's gradients.

Sums over pairs of rows r > s have the factor 2^(decay from s to r). Two forms of it:

- ``near_gradients``: each tile has a reference point at half of its decay, and factors from there to its rows and back
  (rise and fall, 2^±x). They lie in 2^±58 where rows decay by at most e⁻⁵ on average.
- ``far_gradients``, for any decay: hierarchical reference points inside a tile, whose exponents are never positive.

A row of tile 1 reaches those of tile 0 through the boundary between them in both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core_nvidia.gradients_tiles import (
    RIGHT,
    TILE,
    add_product,
    exp2,
    halves_of,
    last_row,
    left_parts,
    log2_decays,
    numbers_of_rows,
    reciprocal,
    rows_of_tile,
    selected_sums,
)
from kda_core_nvidia.recurrence_hopper import block_barrier


@gluon.jit
def _rows_by_columns(pairs, block: gl.constexpr):
    """A 16×16 block of pairs as a right operand [s, r], to sum over s."""
    return pairs.index(block).permute((1, 0)).load(RIGHT)


@gluon.jit
def _columns_by_rows(pairs, block: gl.constexpr):
    """The same as [r, s], to sum over r."""
    return pairs.index(block).load(RIGHT)


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
    dq0, dq1 = halves_of(dq, 32, TILE)
    dk0, dk1 = halves_of(dk, 32, TILE)
    dkc0, dkc1 = halves_of(dkc, 32, TILE)
    dkc0 = dkc0 * to_end
    dkc1 = dkc1 * to_end
    kb0 = rows_of_tile(k_rows, 0) * reciprocal(rise0) * numbers_of_rows(numbers, 0, 0)
    kb1 = rows_of_tile(k_rows, 1) * reciprocal(rise1) * numbers_of_rows(numbers, 0, 1)
    ends = gl.sum(kb0 * (dkc0 * between) + kb1 * dkc1, axis=1)
    kb0 = left_parts(kb0)
    dq0 = add_product(kb0, _rows_by_columns(pairs, 0), dq0 * from_start)
    dq1 = add_product(kb0, _rows_by_columns(pairs, 1), dq1 * from_start)
    dk0 = add_product(kb0, _rows_by_columns(pairs, 2), dk0 * from_start)
    dk1 = add_product(kb0, _rows_by_columns(pairs, 3), dk1 * from_start)
    kb1 = left_parts(kb1)
    dq1 = add_product(kb1, _rows_by_columns(pairs, 5), dq1 * between)
    dk1 = add_product(kb1, _rows_by_columns(pairs, 7), dk1 * between)
    # Without a barrier the compiler loads the operands of all products first, and spills.
    block_barrier()
    qr = left_parts(rows_of_tile(q_rows, 1) * rise1 * numbers_of_rows(numbers, 1, 1))
    kr = left_parts(rows_of_tile(k_rows, 1) * rise1 * -numbers_of_rows(numbers, 2, 1))
    dkc0 = add_product(kr, _columns_by_rows(pairs, 3), add_product(qr, _columns_by_rows(pairs, 1), dkc0))
    dkc1 = add_product(kr, _columns_by_rows(pairs, 7), add_product(qr, _columns_by_rows(pairs, 5), dkc1))
    qr = left_parts(rows_of_tile(q_rows, 0) * rise0 * numbers_of_rows(numbers, 1, 0))
    kr = left_parts(rows_of_tile(k_rows, 0) * rise0 * -numbers_of_rows(numbers, 2, 0))
    dkc0 = dkc0 * between
    dkc0 = add_product(kr, _columns_by_rows(pairs, 2), add_product(qr, _columns_by_rows(pairs, 0), dkc0))
    fall0 = reciprocal(rise0)
    fall1 = reciprocal(rise1)
    return dq0 * rise0, dk0 * rise0, dkc0 * fall0, dq1 * rise1, dk1 * rise1, dkc1 * fall1, ends


@gluon.jit
def _level_of_tile(
    dq, dk, dkc, y, b, q_rows, k_rows, numbers, pairs, zero, tile: gl.constexpr, MU: gl.constexpr, LU: gl.constexpr
):
    """Add the pairs that straddle the middles of blocks of 2b rows."""
    s = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT)), 1)
    t = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, RIGHT)), 0)
    # From a row of a block's first half to the middle, and from there to one of its second half.
    select = (s // b == t // b) & (((t // b) % 2 == 1) == (s <= t))
    e = exp2(selected_sums(y, select, (1.0, 0.0), zero))
    below = (s // (2 * b) == t // (2 * b)) & (s // b < t // b)
    above = (s // (2 * b) == t // (2 * b)) & (s // b > t // b)
    none = gl.full([16, 16], 0.0, gl.bfloat16, RIGHT)
    kb = left_parts(rows_of_tile(k_rows, tile) * e * numbers_of_rows(numbers, 0, tile))
    dq += add_product(kb, gl.where(below, _rows_by_columns(pairs, MU), none), zero) * e
    dk += add_product(kb, gl.where(below, _rows_by_columns(pairs, LU), none), zero) * e
    qr = left_parts(rows_of_tile(q_rows, tile) * e * numbers_of_rows(numbers, 1, tile))
    of_column = add_product(qr, gl.where(above, _columns_by_rows(pairs, MU), none), zero)
    kr = left_parts(rows_of_tile(k_rows, tile) * e * -numbers_of_rows(numbers, 2, tile))
    of_column = add_product(kr, gl.where(above, _columns_by_rows(pairs, LU), none), of_column)
    return dq, dk, dkc + of_column * e


@gluon.jit
def far_gradients(
    dq, dk, dkc, bias, a, lower_bound, count, o_scale, g_rows, q_rows, k_rows, numbers, pairs, GATE: gl.constexpr
):
    """``near_gradients`` for any decay. Decays are formed once more: calls that come here are few, and all others would
    hold registers for them."""
    zero = gl.full([128, 16], 0.0, gl.float32, TILE)
    s = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT)), 1)
    t = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, RIGHT)), 0)
    dq0, dq1 = halves_of(dq, 32, TILE)
    dk0, dk1 = halves_of(dk, 32, TILE)
    dkc0, dkc1 = halves_of(dkc, 32, TILE)
    y0 = log2_decays(g_rows, bias, a, lower_bound, count, 0, GATE, False)
    y1 = log2_decays(g_rows, bias, a, lower_bound, count, 1, GATE, False)
    # Tile 0 from the chunk's start and to the boundary, tile 1 from there and to the chunk's end.
    x = selected_sums(y0, s <= t, (1.0, 0.0), zero)
    whole0 = gl.expand_dims(exp2(last_row(x)), 1)
    since0 = exp2(x)
    until0 = exp2(selected_sums(y0, s > t, (1.0, 0.0), zero))
    x = selected_sums(y1, s <= t, (1.0, 0.0), zero)
    whole1 = gl.expand_dims(exp2(last_row(x)), 1)
    since1 = exp2(x)
    until1 = exp2(selected_sums(y1, s > t, (1.0, 0.0), zero))
    kb0 = rows_of_tile(k_rows, 0) * until0 * numbers_of_rows(numbers, 0, 0)
    kb1 = rows_of_tile(k_rows, 1) * until1 * numbers_of_rows(numbers, 0, 1)
    dkc0 = dkc0 * (whole1 * o_scale)
    dkc1 = dkc1 * o_scale
    ends = gl.sum(kb0 * dkc0 + kb1 * dkc1, axis=1)
    kb = left_parts(kb0)
    dq0 = dq0 * since0
    dk0 = dk0 * since0
    dq1 = add_product(kb, _rows_by_columns(pairs, 1), dq1 * whole0) * since1
    dk1 = add_product(kb, _rows_by_columns(pairs, 3), dk1 * whole0) * since1
    block_barrier()
    qr = left_parts(rows_of_tile(q_rows, 1) * since1 * numbers_of_rows(numbers, 1, 1))
    kr = left_parts(rows_of_tile(k_rows, 1) * since1 * -numbers_of_rows(numbers, 2, 1))
    dkc0 = add_product(kr, _columns_by_rows(pairs, 3), add_product(qr, _columns_by_rows(pairs, 1), dkc0)) * until0
    dkc1 = dkc1 * until1
    block_barrier()
    b = 1
    while b < 16:
        dq0, dk0, dkc0 = _level_of_tile(dq0, dk0, dkc0, y0, b, q_rows, k_rows, numbers, pairs, zero, 0, 0, 2)
        dq1, dk1, dkc1 = _level_of_tile(dq1, dk1, dkc1, y1, b, q_rows, k_rows, numbers, pairs, zero, 1, 5, 7)
        b = b * 2
    return dq0, dk0, dkc0, dq1, dk1, dkc1, ends

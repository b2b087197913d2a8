"""Pairs of rows in ``gradients_hopper_persistent``: four tiles with one reference point each, and, as ``far_gradients``
of ``gradients_decays``, four tiles of any decay.
"""

# ruff: noqa: RUF005 (no starred tuples in Triton)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core_nvidia import gradients_persistent_tiles as tiles
from kda_core_nvidia.gradients_decays import add_level, add_sums, columns_by_rows, rows_by_columns
from kda_core_nvidia.gradients_tiles import add_product, inside, left_parts, selected_sums
from kda_core_nvidia.hopper import mma_v2
from kda_core_nvidia.hopper_tiles import exp2, reciprocal, reciprocal_anew


@gluon.jit
def near_gradients_of_pair(
    rows, columns, sums, rise, halves, o_scale, q_rows, k_rows, numbers, own_products, pairs, zero,
):  # fmt: skip
    """Gradients of a pair's rows by tile, but for what their norms take away, and of its decays; sums over a warp's
    channels of a row's product with its gradient, of q and of k, and of the gradient of β, for two tiles each.

    Args:
        rows, columns: products of the rows of do and dv, and of z, with the states, without any decay.
        sums: over v of S ⊙ dS, decayed over the pair, [128].
        rise, halves: 2^x of each tile, and half of its log2 decay.
        zero: None where there are registers for 2^-x from its first use to its second; else as ``reciprocal_anew``.
    """
    e_r = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, tiles.RIGHT)), 1)
    e_c = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, tiles.RIGHT)), 0)
    between = ()
    for t in gl.static_range(tiles.TILES - 1):
        between = between + (gl.expand_dims(exp2(halves[t] + halves[t + 1]), 1),)
    dq, dk = tiles.tiles_of_stacked(rows)
    dkc = ()
    to_end = gl.expand_dims(exp2(halves[tiles.TILES - 1]) * o_scale, 1)
    raw = tiles.tiles_of(columns)
    for t in gl.static_range(tiles.TILES):
        dkc = dkc + (raw[t] * to_end,)
    ends = tiles.sums_of_threads(gl.full([128, 16], 0.0, gl.float32, tiles.TILE))
    FOURS: gl.constexpr = gl.SliceLayout(1, ends.type.layout)
    passed = gl.expand_dims(exp2(halves[0]), 1)
    for t in gl.static_range(tiles.TILES):
        kb = tiles.rows_of(k_rows, t) * reciprocal(rise[t]) * tiles.numbers_of(numbers, 0, t)
        here = tiles.sums_of_threads(kb * dkc[t])
        if t > 0:
            passed = between[t - 1]
            x = gl.convert_layout(exp2(halves[t - 1] + halves[t]), FOURS, assert_trivial=True)
            ends = ends * gl.expand_dims(x, 1)
        ends += here
        dq, dk = tiles.add_columns(dq, dk, left_parts(kb), pairs, passed, t)
        tiles.in_order()

    from_row = gl.where(e_r >= e_c, 1.0, 0.0).to(gl.bfloat16)
    everywhere = gl.full([16, 16], 1.0, gl.bfloat16, tiles.RIGHT)
    ends = gl.convert_layout(gl.sum(ends, axis=1), tiles.BY_CHANNEL, assert_trivial=True)
    later = gl.expand_dims(ends + sums, 1) + gl.full([128, 16], 0.0, gl.float32, tiles.TILE)
    new_q = ()
    new_k = ()
    dg = ()
    sums_q = ()
    sums_k = ()
    sums_b = ()
    for t in gl.static_range(tiles.TILES - 1, -1, -1):
        q_tile = tiles.rows_of(q_rows, t)
        k_tile = tiles.rows_of(k_rows, t)
        q_rise = rise[t] * tiles.numbers_of(numbers, 1, t)
        k_rise = rise[t] * -tiles.numbers_of(numbers, 2, t)
        qr = left_parts(q_tile * q_rise)
        kr = left_parts(k_tile * k_rise)
        dkc = tiles.add_rows(dkc, qr, kr, pairs, 1.0 if t == tiles.TILES - 1 else between[t], t)
        fall = reciprocal(rise[t]) if zero is None else reciprocal_anew(rise[t], zero)
        dq_t, dk_t, p, sum_q, sum_k, sum_b = tiles.own_gradients(
            dq[t] * q_rise, dk[t] * k_rise, dkc[t] * fall, q_tile, k_tile, numbers, own_products, t
        )
        dg = (mma_v2(p[0], from_row, mma_v2(p[1], from_row, later)),) + dg
        later = mma_v2(p[0], everywhere, mma_v2(p[1], everywhere, later))
        new_q = (dq_t,) + new_q
        new_k = (dk_t,) + new_k
        sums_q = tiles.with_sums(sums_q, sum_q, t)
        sums_k = tiles.with_sums(sums_k, sum_k, t)
        sums_b = tiles.with_sums(sums_b, sum_b, t)
        tiles.in_order()
    return new_q, new_k, dg, sums_q, sums_k, sums_b


@gluon.jit
def _tile(buffers, tile: gl.constexpr):
    """A tile of a float32 block of 64 rows, which is in two buffers, transposed."""
    return buffers[tile // 2].slice(16 * (tile % 2), 16, dim=0).permute((1, 0))


@gluon.jit
def _product(wholes, first: gl.constexpr, end: gl.constexpr):
    """Decay over the tiles from ``first`` to before ``end``."""
    x = gl.full([128], 1.0, gl.float32, tiles.BY_CHANNEL)
    for t in gl.static_range(first, end):
        x = x * wholes[t]
    return x


@gluon.jit
def far_gradients_of_pair(
    rows, columns, sums, halves, bias, rate, lower_bound, o_scale, g_rows, q_rows, k_rows, numbers, own_products, pairs,
    dq_rows, dk_rows, dg_rows, dkc_rows, count, GATE: gl.constexpr,
):  # fmt: skip
    """Gradients of a pair's rows, of its decays, and sums over channels, as the other form returns them.

    No exponent is positive, and no terms cancel. A tile's decays lead from its start to a row, or from a row to its
    end; its own pairs have hierarchical reference points.

    Args:
        halves: half of each tile's log2 decay.
        dq_rows, dk_rows, dg_rows: two float32 blocks [32, 128] each that nothing else uses, where results wait.
        dkc_rows: two of [16, 128].
        count: rows of the pair; None: all.
    """
    zero = gl.full([128, 16], 0.0, gl.float32, tiles.TILE)
    s = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, tiles.RIGHT)), 1)
    t = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, tiles.RIGHT)), 0)
    dq, dk = tiles.tiles_of_stacked(rows)
    for r in gl.static_range(tiles.TILES):
        _tile(dq_rows, r).store(dq[r])
        _tile(dk_rows, r).store(dk[r])
    wholes = ()
    for r in gl.static_range(tiles.TILES):
        wholes = wholes + (exp2(2 * halves[r]),)
    raw = tiles.tiles_of(columns)
    # Sums of columns, with respect to their tile's end.
    dkc = ()
    # Sums that pass over a whole tile: from before it to behind it.
    passing = ()
    for c in gl.static_range(tiles.TILES):
        x = raw[c] * gl.expand_dims(_product(wholes, c + 1, tiles.TILES) * o_scale, 1)
        if c < 2:
            dkc_rows[c].permute((1, 0)).store(x)
        else:
            dkc = dkc + (x,)
        passing = passing + (sums,)
    left_kb = ()
    for r in gl.static_range(tiles.TILES):
        y = tiles.log2_decays_of(g_rows, bias, rate, lower_bound, count, r, GATE, False)
        kb = (
            tiles.rows_of(k_rows, r) * exp2(selected_sums(y, s > t, (1.0, 0.0), zero)) * tiles.numbers_of(numbers, 0, r)
        )
        left_kb = left_kb + (left_parts(kb),)
        x = dkc_rows[r].permute((1, 0)).load(tiles.TILE) if r < 2 else dkc[r - 2]
        ends = gl.sum(kb * x, axis=1)
        for c in gl.static_range(r + 1, tiles.TILES):
            passing = passing[:c] + (passing[c] + ends,) + passing[c + 1 :]
        since = exp2(selected_sums(y, s <= t, (1.0, 0.0), zero))
        q = tiles.rows_of(q_rows, r) * since * tiles.numbers_of(numbers, 1, r)
        k = tiles.rows_of(k_rows, r) * since * -tiles.numbers_of(numbers, 2, r)
        of_q = _tile(dq_rows, r).load(tiles.TILE)
        of_k = _tile(dk_rows, r).load(tiles.TILE)
        left_q = left_parts(q)
        left_k = left_parts(k)
        for c in gl.static_range(r):
            over = gl.sum(q * of_q + k * of_k, axis=1) * _product(wholes, c, r)
            passing = passing[:c] + (passing[c] + over,) + passing[c + 1 :]
            whole = gl.expand_dims(wholes[c], 1)
            of_q = add_product(left_kb[c], rows_by_columns(pairs, 8 * c + r, tiles.RIGHT), of_q * whole)
            of_k = add_product(left_kb[c], rows_by_columns(pairs, 8 * c + 4 + r, tiles.RIGHT), of_k * whole)
            given = add_product(left_q, columns_by_rows(pairs, 8 * c + r, tiles.RIGHT), zero)
            given = add_product(left_k, columns_by_rows(pairs, 8 * c + 4 + r, tiles.RIGHT), given)
            given = given * gl.expand_dims(_product(wholes, c + 1, r), 1)
            if c < 2:
                dkc_rows[c].permute((1, 0)).store(dkc_rows[c].permute((1, 0)).load(tiles.TILE) + given)
            else:
                dkc = (dkc[0] + given, dkc[1])
            tiles.in_order()
        _tile(dq_rows, r).store(of_q * since)
        _tile(dk_rows, r).store(of_k * since)
        _tile(dg_rows, r).store(add_sums(q * of_q + k * of_k, s >= t, zero))
        tiles.in_order()
    sums_q = ()
    sums_k = ()
    sums_b = ()
    for c in gl.static_range(tiles.TILES - 1, -1, -1):
        y = tiles.log2_decays_of(g_rows, bias, rate, lower_bound, count, c, GATE, False)
        z = dkc_rows[c].permute((1, 0)).load(tiles.TILE) if c < 2 else dkc[c - 2]
        z *= exp2(selected_sums(y, s > t, (1.0, 0.0), zero))
        q_tile = tiles.rows_of(q_rows, c)
        k_tile = tiles.rows_of(k_rows, c)
        dg = _tile(dg_rows, c).load(tiles.TILE) + gl.expand_dims(passing[c], 1)
        q_scale = tiles.numbers_of(numbers, 1, c)
        minus_k = -tiles.numbers_of(numbers, 2, c)
        q = q_tile * q_scale
        k = k_tile * minus_k
        kb = k_tile * tiles.numbers_of(numbers, 0, c)
        dg = add_sums(kb * z, s < t, dg)
        of_q = _tile(dq_rows, c).load(tiles.TILE)
        of_k = _tile(dk_rows, c).load(tiles.TILE)
        b = 1
        while b < 16:
            of_q, of_k, z, dg = add_level(of_q, of_k, z, dg, y, b, q, k, kb, pairs, 9 * c, 9 * c + 4)
            b = b * 2
        of_q = of_q * q_scale
        of_k = of_k * minus_k
        of_q, of_k, _, sum_q, sum_k, sum_b = tiles.own_gradients(
            of_q, of_k, z, q_tile, k_tile, numbers, own_products, c
        )
        sums_q = tiles.with_sums(sums_q, sum_q, c)
        sums_k = tiles.with_sums(sums_k, sum_k, c)
        sums_b = tiles.with_sums(sums_b, sum_b, c)
        _tile(dq_rows, c).store(of_q)
        _tile(dk_rows, c).store(of_k)
        if count is not None and c >= tiles.TILES // 2:
            # The other form has no registers for it here: its gate does the same.
            dg = gl.where(inside(count, c, tiles.TILE), dg, 0.0)
        _tile(dg_rows, c).store(dg)
        tiles.in_order()
    new_q = ()
    new_k = ()
    dg = ()
    for c in gl.static_range(tiles.TILES):
        new_q = new_q + (_tile(dq_rows, c).load(tiles.TILE),)
        new_k = new_k + (_tile(dk_rows, c).load(tiles.TILE),)
        dg = dg + (_tile(dg_rows, c).load(tiles.TILE),)
    return new_q, new_k, dg, sums_q, sums_k, sums_b

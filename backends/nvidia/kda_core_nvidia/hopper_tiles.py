"""Device functions of ``prepare_hopper`` for tiles of 16 rows: gate, sums of decays, norms, scaled rows, pairs,
zeros for rows of the output that no recurrence visits, and whose a pair of chunks is."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.decay import BOUNDED_LOG2_DECAY
from kda_core.triton_lib.gate import LOG2_E, NORM_EPS, gate_rate, log2_decay
from kda_core.triton_lib.packing import sequence_of_slot
from kda_core_nvidia import hopper_squares as square
from kda_core_nvidia.hopper import block_barrier, copy_block, mma_v2

FLOOR = gl.constexpr(-160.0)
"""Least log2 decay of a row: 2 to it is 0 in float32, and differences of sums of 16 keep 12 bits behind the point."""

SHIFT = gl.constexpr(40.0)
"""Factors from a tile's start are stored times 2^SHIFT, and their reciprocals times 2^-SHIFT: with decays of at most
2^-126 a tile both lie in 2^±86. Products with rows of q and k up to 2^40, raw, stay in the range of bfloat16, and so do
sums of products of the former with rows that have no shift."""

WIDTH = gl.constexpr(16)
"""Channels of rows that are worked on at once: of more at once some would wait in slow memory."""

PARTS = gl.constexpr(4)
"""How often WIDTH is in a tile's 64 channels."""

LEAST_TOTAL = gl.constexpr(-126.0)
"""Least log2 decay of a tile whose pairs are products of such factors."""

PROPAGATE = gl.constexpr(tl.PropagateNan.ALL)
"""minimum and maximum return NaN where an operand is NaN."""

COLUMNS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
"""16 rows of two channels a thread."""


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def copy_rows(x, blocks, ready, row0, row1, column0, column1, SECOND: gl.constexpr):
    """Start copies of both slots' rows, 128 channels from a column of each, at once where ``blocks`` are of both.

    SECOND: how many channels further the second slot's are.
    """
    COPIES: gl.constexpr = blocks.shape[0] // 2
    for i in gl.static_range(2 * COPIES):
        row, column = row0, column0
        if i % COPIES == 1:
            row, column = row1, column1 + SECOND
        copy_block(x, [row, column + i // COPIES * 64], ready, blocks.index(i))


@gluon.jit
def fill_behind(buffer, count0, count1, value: gl.constexpr):
    """Give a value to rows behind the ends of the sequences of both slots: there they belong to another one."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [4, 1, 1], [2, 1, 0])
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))
    r = gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, LOAD)))
    inside = square.by_row(gl.expand_dims(r, 0) < gl.expand_dims(gl.where(w % 2 == 1, count1, count0), 1))
    x = buffer.load(LOAD)
    buffer.store(gl.where(inside, x, gl.full(buffer.shape, value, buffer.dtype, LOAD)))


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal_anew(x, zero):
    """``reciprocal``, computed even where it is known already: keeping it takes a register.

    Args:
        zero: 0, which the compiler must not know.
    """
    return reciprocal((x.to(gl.int32, bitcast=True) | zero).to(gl.float32, bitcast=True))


@gluon.jit
def softplus(z):
    """log2(1 + 2^z) with a relative error of 2^-16.8, by a polynomial of 2^-|z|."""
    e = exp2(-gl.abs(z))
    x = 0.146032915 - 0.0344359130 * e
    x = x * e - 0.303036243
    x = x * e + 0.469174087
    x = x * e - 0.720426142
    x = x * e + 1.44268286
    return x * e + gl.maximum(z, 0.0, propagate_nan=PROPAGATE)


@gluon.jit
def tile_decays(block, a, bias, lower_bound, GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """Log2 decays of a tile from its block of g, [4, 16, 64], in units of ``decay_unit``."""
    x = block.load(COLUMNS).to(gl.float32)
    if GATE == "bounded" and BOUNDED:
        y = reciprocal(1.0 + gl.exp2((x + bias) * (a * -LOG2_E)))
    else:
        # A broken promise of bounded decays costs accuracy, never a NaN.
        LEAST: gl.constexpr = BOUNDED_LOG2_DECAY if BOUNDED else FLOOR
        if GATE == "softplus":
            y = gl.minimum(softplus(x * LOG2_E + bias * LOG2_E), LEAST * reciprocal(-a), propagate_nan=PROPAGATE)
        else:
            y = gl.maximum(log2_decay(x, a, bias, lower_bound, GATE, 1.0, True), LEAST, propagate_nan=PROPAGATE)
    return y


@gluon.jit
def rate_of_head(A_log, head):
    """``gate_rate``, but not 0: where g is infinite, as behind a sequence's end, 0 times it would be NaN."""
    return gl.maximum(gate_rate(A_log, head), 1e-30, propagate_nan=PROPAGATE)


@gluon.jit
def decay_unit(a, lower_bound, GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """The factor that turns what ``tile_decays`` gives into log2 decays."""
    unit = 1.0
    if GATE == "bounded" and BOUNDED:
        unit = lower_bound * LOG2_E
    if GATE == "softplus":
        unit = -a
    return unit


@gluon.jit
def sums_of_rows(y, unit):
    """The sum of each row and those before it, and the log2 decay of all, [4, 64]."""
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMNS))), 0), 2)
    x = gl.associative_scan(y, 1, add)
    # The last row by adding zeros, as integers: compilers leave that out.
    last = gl.sum(gl.where(row == 15, x.to(gl.int32, bitcast=True), 0), axis=1).to(gl.float32, bitcast=True)
    return x, last * unit


@gluon.jit
def put_products(q_block, k_block, own_sum, q_sum, k_sum, zero, L2NORM: gl.constexpr):
    """Products of each row of q with the same row of k, and squares of rows (L2NORM), summed over a warp's channels."""
    b_q = q_block.load(square.LEFT)
    b_k = k_block.load(square.LEFT)
    right = k_block.permute((0, 2, 1)).load(square.RIGHT)
    own_sum.store(square.diagonal(mma_v2(b_q, right, zero)))
    if L2NORM:
        k_sum.store(square.diagonal(mma_v2(b_k, right, zero)))
        q_sum.store(square.diagonal(mma_v2(b_q, q_block.permute((0, 2, 1)).load(square.RIGHT), zero)))


@gluon.jit
def norm_of_rows(sums, kept, tile, L2NORM: gl.constexpr, WHOLE: gl.constexpr):
    """Reciprocal norms of a tile's rows: those ``kept``, or from squares; ones without L2NORM.

    Args:
        tile: of q, and two more of k.
    """
    if kept is not None:
        norm = square.kept_rows(kept, tile)
    elif L2NORM:
        norm = _rsqrt(square.take_rows(sums, WHOLE) + NORM_EPS)
    else:
        norm = gl.full([4, 16], 1.0, gl.float32, square.BY_ROW)
    return norm


@gluon.jit
def _rsqrt(x):
    return gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def left_rows(x):
    """A number a row, for left operands."""
    return square.by_row(gl.convert_layout(x, gl.SliceLayout(2, square.LEFT)))


@gluon.jit
def _middles(x, b: gl.constexpr):
    """For each row the sum at the middle of its block of 2b rows."""
    blocks = x.to(gl.int32, bitcast=True).reshape([4, 8 // b, 2 * b, 64])
    row = gl.arange(0, 2 * b, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, blocks.type.layout))))
    row = gl.expand_dims(gl.expand_dims(gl.expand_dims(row, 0), 1), 3)
    # One row by adding zeros, as in ``sums_of_rows``.
    middle = gl.expand_dims(gl.sum(gl.where(row == b - 1, blocks, 0), axis=2), 2)
    middle = middle.broadcast_to([4, 8 // b, 2 * b, 64]).reshape([4, 16, 64])
    return gl.convert_layout(middle, COLUMNS, assert_trivial=True).to(gl.float32, bitcast=True)


@gluon.jit
def levels(x, q_tile, k_tile, buffer, unit, near, zero, GATE: gl.constexpr):
    """A tile's own pairs for any decay, zero in warps that are ``near``: the reference point of two rows is the middle
    of the smallest block of 2, 4, 8 or 16 rows that has both, so that no exponent is ever positive.

    Few tiles come here. A loop keeps the code short, which all others jump over: behind much code instructions come
    late.

    Args:
        x: sums of decays, which lie in ``buffer`` before and after.
        unit: the factor that turns them into log2 decays, as ``decay_unit`` gives it.
    """
    m, el = zero, zero
    down = unit if GATE == "softplus" else -unit
    apart = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, square.BY_ROW)), 0)
    apart = square.by_row(apart) ^ square.by_column(
        gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, square.BY_COLUMN)), 0)
    )
    b = 1
    while b < 16:
        middle = gl.where(b == 1, _middles(x, 1), gl.where(b == 2, _middles(x, 2), _middles(x, 4)))
        buffer.store(gl.abs(x - gl.where(b == 8, _middles(x, 8), middle)))
        m_b = zero
        l_b = zero
        for part in gl.static_range(PARTS):
            e = gl.exp2(buffer.slice(part * WIDTH, WIDTH, dim=2).load(square.LEFT) * down)
            q_e = part_of(q_tile, part).load(square.LEFT).to(gl.float32) * e
            k_e = part_of(k_tile, part).load(square.LEFT).to(gl.float32) * e
            m_b, l_b = add_pairs(q_e, k_e, k_e, m_b, l_b)
        pairs = (apart >= b) & (apart < 2 * b) & square.pairs_of("lower")
        m = gl.where(pairs, m_b, m)
        el = gl.where(pairs, l_b, el)
        b = b * 2
    buffer.store(x)
    # Here, or all programs would have another one behind the branch.
    block_barrier()
    near = of_warps(near, square.MMA)
    return gl.where(near, 0.0, m), gl.where(near, 0.0, el)


@gluon.jit
def warps_near(total):
    return gl.min(total, axis=1) > LEAST_TOTAL


@gluon.jit
def allows_factors(total, flags):
    """Whether the pairs of each warp's tile are products of factors (``LEAST_TOTAL``), [4]; how many warps' are not."""
    near = warps_near(total)
    # A barrier for these serves what was stored before, too.
    flags.store(gl.where(near, 0, 1))
    return near, gl.sum(flags.load(gl.BlockedLayout([4], [32], [4], [0])), axis=0)


@gluon.jit
def of_warps(near, LAYOUT: gl.constexpr):
    """A condition of each warp, [4, 1, 1]."""
    near = gl.convert_layout(near, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    return square.by_row(gl.expand_dims(near, 1))


@gluon.jit
def column_factors(total_buffer, tile, part: gl.constexpr):
    """2^40 times a tile's whole decay, for WIDTH channels of a left operand."""
    return square.by_column(
        total_buffer.index(tile).slice(part * WIDTH, WIDTH, dim=1).load(gl.SliceLayout(1, square.LEFT))
    )


@gluon.jit
def tile_of(buffer, tile: gl.constexpr):
    return buffer.slice(tile * 16, 16, dim=1)


@gluon.jit
def part_of(tile, part: gl.constexpr):
    return tile.slice(part * WIDTH, WIDTH, dim=2)


@gluon.jit
def store_part(x, tile, part: gl.constexpr):
    part_of(tile, part).store(x.to(tile.dtype))


@gluon.jit
def store_last_factors(total, buffer):
    """For ``scaled_rows``: what a channel's exponents begin with, and a factor for what they give."""
    if buffer is not None:
        near = gl.expand_dims(warps_near(total), 1)
        buffer.index(0).store(gl.where(near, 0.0, total + SHIFT))
        buffer.index(1).store(gl.where(near, gl.exp2(total + SHIFT), 1.0))


@gluon.jit
def scaled_rows(q_tile, k_tile, x_buffer, total_buffer, last_buffer, unit, near, far, tile, part: gl.constexpr):
    """Factors of pairs in a tile's rows.

    Returns 2^40 times q and k times the decay since the tile's start; 2^-40 times k divided by that decay, zeros in
    warps that are not ``near``; and k times the decay to the tile's end, in 16 bits.

    Args:
        last_buffer: of ``store_last_factors``, where no pairs are wanted and decays have no bound; or None.
        near, far: else as ``allows_factors`` gives them; None with decays that are bounded.
    """
    b_q = part_of(q_tile, part).load(square.LEFT).to(gl.float32)
    b_k = part_of(k_tile, part).load(square.LEFT).to(gl.float32)
    x = x_buffer.slice(part * WIDTH, WIDTH, dim=2).load(square.LEFT) * unit + SHIFT
    e = gl.exp2(x)
    if last_buffer is not None:
        # The other form's bits, without a branch.
        k_f = b_k * gl.exp2(column_factors(last_buffer, 0, part) - x)
        k_g = k_f * column_factors(last_buffer, 1, part)
    else:
        k_f = b_k * gl.exp2(-x)
        k_g = k_f * column_factors(total_buffer, tile, part)
        if near is not None and far > 0:
            # There k_f may be infinite or NaN. A tile's last row has the sum of all.
            allowed = of_warps(near, square.LEFT)
            k_g = gl.where(allowed, k_g, b_k * gl.exp2(square.by_column(gl.min(x, axis=1)) - x))
            k_f = gl.where(allowed, k_f, 0.0)
    return b_q * e, b_k * e, k_f, k_g.to(q_tile.dtype)


@gluon.jit
def add_products(q_e, k_e, right, m, el):
    """m + q_e · right and el + k_e · right."""
    return mma_v2(q_e.to(gl.bfloat16), right, m), mma_v2(k_e.to(gl.bfloat16), right, el)


@gluon.jit
def add_pairs(q_e, k_e, right, m, el):
    """m + q_e · rightᵀ and el + k_e · rightᵀ."""
    return add_products(q_e, k_e, square.turned(right.to(gl.bfloat16)), m, el)


@gluon.jit
def store_zeros(
    o, i_n, i_h, row, start, count, s_ob, s_ot, s_oh, V: gl.constexpr, ROWS: gl.constexpr, DENSE: gl.constexpr
):
    """Zeros for ``count`` rows of the output that no recurrence visits: ``row`` of all, ``start`` of a sequence."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    p_o = o + i_h.to(gl.int64) * s_oh
    if DENSE:
        p_o += i_n.to(gl.int64) * s_ob + (start + o_r).to(gl.int64)[:, None] * s_ot
    else:
        p_o += (row + o_r).to(gl.int64)[:, None] * s_ot
    zeros = gl.full([ROWS, 64], 0.0, o.dtype.element_ty, LAYOUT)
    for first in range(0, V, 64):
        o_v = first + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        gl.store(p_o + o_v[None, :], zeros, mask=(o_r < count)[:, None] & (o_v < V)[None, :])


@gluon.jit
def sequence_of_pair(cu_seqlens, N, i_pair, ROWS: gl.constexpr, TOGETHER: gl.constexpr):
    """``sequence_of_slot``. TOGETHER: all threads look at once: in one read for 256 sequences, in two for 65,536.

    Long sequences whose decays have no bound take 2% longer with it, short ones that are finished 2 to 3% less (H200).
    """
    if TOGETHER:
        COUNT: gl.constexpr = 64 * gl.num_warps()
        probe = gl.arange(0, COUNT, layout=gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
        low = N * 0
        high = N
        while low < high:
            step = (high - low + COUNT - 1) // COUNT
            at = low + (probe + 1) * step
            there = at <= high
            first = gl.load(cu_seqlens + at, mask=there, other=0).to(gl.int64) // ROWS + at
            low += gl.sum((there & (first <= i_pair)).to(gl.int32), axis=0) * step
            high = gl.minimum(high, low + step - 1)
    else:
        low = sequence_of_slot(cu_seqlens, N, i_pair, ROWS)
    return low

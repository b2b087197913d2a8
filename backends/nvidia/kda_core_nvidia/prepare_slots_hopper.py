"""The part of ``prepare_hopper`` that computes: two slots."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.gate import write_strength
from kda_core.triton_lib.packing import starts_from_state
from kda_core_nvidia import hopper
from kda_core_nvidia import hopper_squares as square
from kda_core_nvidia import hopper_tiles as tiles
from kda_core_nvidia.one_pair_hopper import BLOCK, STATE, ask_for_state, finish_pair
from kda_core_nvidia.recurrence_stores_hopper import unknown


@gluon.jit
def prepare_slots(
    q, k, g, keys, beta, A_log, dt_bias, P, D, X, norms, inverse, o, values, initial_state, final_state, has_state,
    final_indices, i_n, i_state, i_h, i_kh, head1, slot0, slot1, row0, row1, count0, count1, length,
    scale, lower_bound, HV, group, s_qh, s_kh, s_gh, s_bt, s_bh, s_ob, s_ot, s_oh, pad_slot_id,
    s_vh, s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk, s_fv, s_has, s_final, final_slots, o_scale,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, V_FIRST: gl.constexpr, LAST_CONTIGUOUS: gl.constexpr,
    PAIRED: gl.constexpr, FINISHED: gl.constexpr, AHEAD: gl.constexpr, PACKED: gl.constexpr,
    REPEATED: gl.constexpr,  # in a loop
    G_BITS: gl.constexpr,
    GATE: gl.constexpr, BOUNDED: gl.constexpr, L2NORM: gl.constexpr, SIGMOID: gl.constexpr, NEG_EIGVAL: gl.constexpr,
):  # fmt: skip
    """The two slots of a program; parameters as of the kernel."""
    WHOLE: gl.constexpr = K == 256
    SECOND: gl.constexpr = 128 if WHOLE else 0
    if WHOLE:
        slot1, row1, count1 = slot0, row0, count0
    second = count1 > 0
    tail = (count0 < C) | (count1 < C)
    alone = length <= 2 * C
    starts = alone & starts_from_state(has_state, i_n, s_has) if FINISHED and has_state is not None else alone
    # Blocks as bulk copies take them, and the same as tensors of three dimensions.
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], q.dtype)
    TILES: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    G_TILE: gl.constexpr = gl.NVMMASharedLayout(0, G_BITS, 2)
    G_TILES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    G_PARTS: gl.constexpr = G_BITS // 16
    q_blocks = gl.allocate_shared_memory(q.dtype, [4, C, 64], TILE)
    k_blocks = gl.allocate_shared_memory(q.dtype, [4, C, 64], TILE)
    w_blocks = gl.allocate_shared_memory(q.dtype, [4 * G_PARTS, C, 64], TILE)
    q_buffer = hopper.seen_as(q_blocks, q.dtype, [4, C, 64], TILES)
    k_buffer = hopper.seen_as(k_blocks, q.dtype, [4, C, 64], TILES)
    # The place of g holds kg and kA later.
    ROWS: gl.constexpr = C if PAIRED or WHOLE else 2 * C
    q_rows = hopper.seen_as(q_blocks, q.dtype, [4 * C // ROWS, ROWS, 64], TILE)
    k_rows = hopper.seen_as(k_blocks, q.dtype, [4 * C // ROWS, ROWS, 64], TILE)
    g_rows = hopper.seen_as(w_blocks, g.dtype, [4 * C // ROWS, ROWS, 64], G_TILE)
    g_buffer = hopper.seen_as(w_blocks, g.dtype, [4, C, 64], G_TILES)
    w_buffer = hopper.seen_as(w_blocks, q.dtype, [4, C, 64], TILES)
    if REPEATED:
        # Blocks by an index that is 0 and that the compiler cannot know: it would keep their addresses in slow memory.
        here = unknown(gl.to_tensor(0))
        q_buffer = hopper.seen_as(q_blocks, q.dtype, [1, 4, C, 64], TILES).index(here)
        k_buffer = hopper.seen_as(k_blocks, q.dtype, [1, 4, C, 64], TILES).index(here)
        w_buffer = hopper.seen_as(w_blocks, q.dtype, [1, 4, C, 64], TILES).index(here)
        g_buffer = hopper.seen_as(w_blocks, g.dtype, [1, 4, C, 64], G_TILES).index(here)
    # Sums of decays, and sums over channels after them.
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    WORK: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if FINISHED:
        v_blocks = gl.allocate_shared_memory(q.dtype, [4, C, 64], TILE)
        work = hopper.seen_as(v_blocks, gl.float32, [2, 32, 64], WORK)
    else:
        work = gl.allocate_shared_memory(gl.float32, [2, 32, 64], WORK)
    x_buffer = hopper.seen_as(work, gl.float32, [4, 16, 64], SUMS)
    if REPEATED:
        x_buffer = hopper.seen_as(work, gl.float32, [1, 4, 16, 64], SUMS).index(here)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    total_buffer = gl.allocate_shared_memory(gl.float32, [2, 4, 64], PLAIN)
    rows_ready = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    decays_ready = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(rows_ready, count=1)
    hopper.mbarrier.init(decays_ready, count=1)
    hopper.fence_async_shared()
    hopper.block_barrier()
    hopper.mbarrier.expect(rows_ready, 8 * C * 64 * 2)
    hopper.mbarrier.expect(decays_ready, 4 * C * 64 * (G_BITS // 8))
    tiles.copy_rows(k, k_rows, rows_ready, row0, row1, i_kh * s_kh, head1 // group * s_kh, SECOND)
    tiles.copy_rows(q, q_rows, rows_ready, row0, row1, i_kh * s_qh, head1 // group * s_qh, SECOND)
    tiles.copy_rows(g, g_rows, decays_ready, row0, row1, i_h * s_gh, head1 * s_gh, SECOND)
    # Where a forward kept norms they are read again; else they are sums over a slot's warps.
    AGAIN: gl.constexpr = inverse is not None
    kept = None
    if AGAIN:
        inverses = gl.allocate_shared_memory(gl.float32, [3, 2, 256], PLAIN)
        if L2NORM:
            kept = gl.allocate_shared_memory(gl.float32, [4, 2, 16], PLAIN)
        block0 = slot0 * HV + i_h
        square.ask_for_kept(inverse, norms, block0, gl.where(count1 > 0, slot1 * HV + head1, block0), inverses, kept)
    state_buffer = None
    if AHEAD:
        state_buffer = gl.allocate_shared_memory(gl.float32, [2, BLOCK, BLOCK], STATE)
        if starts:
            ask_for_state(state_buffer, initial_state, i_state, i_h, 0, s_in, s_ih, s_ik, s_iv, V_FIRST)

    # A warp's slot, its rows, and which of the slot's tiles is its own where it works on one.
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, square.BY_ROW))
    r = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, square.BY_ROW)), 0)
    c = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, square.BY_COLUMN)), 0)
    of_second = gl.expand_dims(warp % 2 == 1, 1)
    odd = gl.expand_dims(warp >= 2, 1)
    count = gl.where(of_second, count1, count0)
    row = gl.where(of_second, row1, row0).to(gl.int64) + r
    slot = gl.where(of_second, slot1, slot0).to(gl.int64)
    there = ((of_second == 0) | second) & (r >= 0)
    cw = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(1, tiles.COLUMNS))), 1)
    cc = (
        gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, tiles.COLUMNS))), 0) + (cw // 2) * 64
    )
    if WHOLE:
        cc += cw % 2 * SECOND
    # Heads of rows and of channels: one number, unless heads are paired.
    r_head, c_head = i_h, i_h
    if PAIRED:
        r_head, c_head = gl.where(of_second, head1, i_h), gl.where(cw % 2 == 1, head1, i_h)
    p_beta = beta + r_head * s_bh + row * s_bt
    beta0 = write_strength(gl.load(p_beta, mask=r < count, other=0.0), SIGMOID, NEG_EIGVAL)
    p_beta += gl.to_tensor(16).to(gl.int64) * s_bt
    beta1 = write_strength(gl.load(p_beta, mask=r + 16 < count, other=0.0), SIGMOID, NEG_EIGVAL)
    a = tiles.rate_of_head(A_log, c_head)
    if GATE == "bounded":
        # Nor may 0 times the bound be NaN.
        lower_bound = gl.maximum(lower_bound, -2e38)
    unit = tiles.decay_unit(a, lower_bound, GATE, BOUNDED)
    left_unit = unit
    if PAIRED and A_log is not None:
        a = square.by_column(a)
        if GATE == "softplus":
            left_unit = tiles.left_rows(tiles.decay_unit(tiles.rate_of_head(A_log, r_head), lower_bound, GATE, BOUNDED))
    bias = 0.0
    if dt_bias is not None:
        bias = square.by_column(gl.load(dt_bias + c_head * K + cc).to(gl.float32))
        bias = gl.minimum(bias, 1e30, propagate_nan=tiles.PROPAGATE)
    zero = gl.full([4, 16, 16], 0.0, gl.float32, square.MMA)
    hopper.mbarrier.wait(rows_ready, 0)
    if tail:
        tiles.fill_behind(q_buffer, count0, count1, 0.0)
        tiles.fill_behind(k_buffer, count0, count1, 0.0)

    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if FINISHED:
        SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], q.dtype)
        squares = gl.allocate_shared_memory(q.dtype, [4, C, C], SQUARE)
        sums = hopper.seen_as(squares, gl.float32, [2, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        m10_sum = hopper.seen_as(sums.index(0), gl.float32, [4, 4, 64], VECTOR)
        l10_sum = hopper.seen_as(sums.index(1), gl.float32, [4, 4, 64], VECTOR)
    else:
        m10_sum = gl.allocate_shared_memory(gl.float32, [4, 4, 64], VECTOR)
        l10_sum = gl.allocate_shared_memory(gl.float32, [4, 4, 64], VECTOR)
    own_sum0 = hopper.seen_as(m10_sum.index(0), gl.float32, [4, 16], VECTOR)
    own_sum1 = hopper.seen_as(m10_sum.index(1), gl.float32, [4, 16], VECTOR)
    q_sum0 = hopper.seen_as(m10_sum.index(2), gl.float32, [4, 16], VECTOR)
    q_sum1 = hopper.seen_as(m10_sum.index(3), gl.float32, [4, 16], VECTOR)
    k_sums = gl.allocate_shared_memory(gl.float32, [2, 4, 16], VECTOR)
    k_sum0, k_sum1 = k_sums.index(0), k_sums.index(1)
    last_buffer = None
    if not (BOUNDED or AGAIN):
        flags = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if AGAIN and not BOUNDED:
        last_buffer = gl.allocate_shared_memory(gl.float32, [2, 4, 64], PLAIN)
    if not AGAIN:
        q0, k0 = q_buffer.slice(0, 16, dim=1), k_buffer.slice(0, 16, dim=1)
        q1, k1 = q_buffer.slice(16, 16, dim=1), k_buffer.slice(16, 16, dim=1)
        tiles.put_products(q0, k0, own_sum0, q_sum0, k_sum0, zero, L2NORM)
        tiles.put_products(q1, k1, own_sum1, q_sum1, k_sum1, zero, L2NORM)
        if norms is not None:
            p_norms = norms + (slot * HV + r_head) * (2 * C) + r
            once = there & (odd == 0)
            gl.store(p_norms, tiles.norm_of_rows(q_sum0, kept, 0, L2NORM, WHOLE), mask=once)
            gl.store(p_norms + 16, tiles.norm_of_rows(q_sum1, kept, 1, L2NORM, WHOLE), mask=once)
            gl.store(p_norms + C, tiles.norm_of_rows(k_sum0, kept, 2, L2NORM, WHOLE), mask=once)
            gl.store(p_norms + C + 16, tiles.norm_of_rows(k_sum1, kept, 3, L2NORM, WHOLE), mask=once)

    hopper.mbarrier.wait(decays_ready, 0)
    if AGAIN:
        hopper.async_copy.wait_group(0)
        hopper.block_barrier()
    if tail:
        # The gate makes 0 of it.
        NO_DECAY: gl.constexpr = 0.0 if GATE == "none" else float("-inf")
        tiles.fill_behind(g_buffer, count0, count1, NO_DECAY)
    # Factors from a tile's start are 2^SHIFT times themselves, and so are whole decays.
    DOWN: gl.constexpr = 2.0**-tiles.SHIFT
    WIDE: gl.constexpr = G_PARTS > 1
    m11, l11, m10, l10 = zero, zero, zero, zero
    total1 = gl.full([4, 64], 0.0, gl.float32, gl.SliceLayout(1, tiles.COLUMNS))
    # Values of their own: if both were one, the compiler would take ``m00 = m11`` in the loop for no change.
    m00 = gl.full([4, 16, 16], 0.0, gl.float32, square.MMA)
    l00 = m00
    total0 = gl.full([4, 64], 0.0, gl.float32, gl.SliceLayout(1, tiles.COLUMNS))
    if WIDE:
        kg0 = (gl.full([4, 16, tiles.WIDTH], 0.0, q.dtype, square.LEFT),) * tiles.PARTS
        kg1 = (gl.full([4, 16, tiles.WIDTH], 0.0, q.dtype, square.LEFT),) * tiles.PARTS
    q_tile, k_tile, g_tile = tiles.tile_of(q_buffer, 0), tiles.tile_of(k_buffer, 0), tiles.tile_of(g_buffer, 0)
    w_tile = tiles.tile_of(w_buffer, 0)
    for tile in range(2):
        m00, l00, total0 = m11, l11, total1
        if WIDE:
            kg0 = kg1
            kg1 = ()
        x, total1 = tiles.sums_of_rows(tiles.tile_decays(g_tile, a, bias, lower_bound, GATE, BOUNDED), unit)
        x_buffer.store(x)
        total_buffer.index(tile).store(gl.exp2(total1 + tiles.SHIFT))
        tiles.store_last_factors(total1, last_buffer)
        near, far = None, None
        m11, l11, m10, l10 = zero, zero, zero, zero
        if not (BOUNDED or AGAIN):
            near, far = tiles.allows_factors(total1, flags)
            if far > 0:
                m11, l11 = tiles.levels(x, q_tile, k_tile, x_buffer, left_unit, near, zero, GATE)
        q_sum = hopper.seen_as(m10_sum.index(2 + tile), gl.float32, [4, 16], VECTOR)
        q_factor = tiles.left_rows(tiles.norm_of_rows(q_sum, kept, tile, L2NORM, WHOLE) * (scale * DOWN))
        k_factor = tiles.left_rows(tiles.norm_of_rows(k_sums.index(tile), kept, 2 + tile, L2NORM, WHOLE) * DOWN)
        for part in gl.static_range(tiles.PARTS):
            q_e, k_e, k_f, k_g = tiles.scaled_rows(
                q_tile, k_tile, x_buffer, total_buffer, last_buffer, left_unit, near, far, tile, part
            )
            if not AGAIN:
                m11, l11 = tiles.add_pairs(q_e, k_e, k_f, m11, l11)
            if tile == 1:
                if not AGAIN:
                    if WIDE:
                        right = square.turned(kg0[part])
                    else:
                        right = tiles.part_of(tiles.tile_of(w_buffer, 0), part).permute((0, 2, 1)).load(square.RIGHT)
                    m10, l10 = tiles.add_products(q_e, k_e, right, m10, l10)
                to_start = tiles.column_factors(total_buffer, 0, part) * DOWN
                q_e, k_e = q_e * to_start, k_e * to_start
            tiles.store_part(k_e * k_factor, k_tile, part)
            tiles.store_part(q_e * q_factor, q_tile, part)
            if WIDE:
                kg1 += (k_g,)
            else:
                # A tile's rows of g have been read, and their place is as large.
                tiles.store_part(k_g, w_tile, part)
        q_tile, k_tile, g_tile = tiles.tile_of(q_buffer, 1), tiles.tile_of(k_buffer, 1), tiles.tile_of(g_buffer, 1)
        w_tile = tiles.tile_of(w_buffer, 1)
    c_slot = gl.where(cw % 2 == 1, slot1, slot0).to(gl.int64)
    gl.store(D + (c_slot * HV + c_head) * K + cc, gl.exp2(total0 + total1), mask=((cw % 2 == 0) | second) & (cc >= 0))
    if WIDE:
        # Float32 rows of g leave no place for these before all have been read.
        for part in gl.static_range(tiles.PARTS):
            tiles.store_part(kg0[part], tiles.tile_of(w_buffer, 0), part)
            tiles.store_part(kg1[part], tiles.tile_of(w_buffer, 1), part)
    hopper.fence_async_shared()
    hopper.block_barrier()
    if FINISHED:
        total_buffer.index(0).store(gl.exp2(total0 + total1))  # nobody reads tile 0's any more
    out0 = (slot0 * HV + i_h) * (3 * C)
    out1 = (slot1 * HV + head1) * (3 * C)
    if not (FINISHED and alone):
        for half in gl.static_range(2):
            hopper.store_block(keys, [out0, half * 64], k_blocks.index(2 * half))
            hopper.store_block(keys, [out0 + C, half * 64], q_blocks.index(2 * half))
        if second:
            for half in gl.static_range(2):
                hopper.store_block(keys, [out1, half * 64 + SECOND], k_blocks.index(2 * half + 1))
                hopper.store_block(keys, [out1 + C, half * 64 + SECOND], q_blocks.index(2 * half + 1))

    # From here on a warp has one tile of a slot for its own.
    p_square = square.by_row((slot * HV + r_head) * (C * C))
    everywhere = square.by_column(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, square.BY_COLUMN)), 0) >= 0)
    own = square.by_row(there) & everywhere
    odd2 = square.by_row(odd)
    lower = own & odd2
    upper = own & (odd2 == 0)
    corner = gl.where(odd2, 16 * C + 16, 0)
    # Reading these here makes room for other sums.
    k_norm0 = tiles.norm_of_rows(k_sum0, kept, 2, L2NORM, WHOLE)
    k_norm1 = tiles.norm_of_rows(k_sum1, kept, 3, L2NORM, WHOLE)
    if AGAIN:
        xt00, xt10 = square.kept_square(inverses, 0), square.kept_square(inverses, 1)
        xt11 = square.kept_square(inverses, 2)
    else:
        q_norm1 = tiles.norm_of_rows(q_sum1, kept, 1, L2NORM, WHOLE) * scale
        q_norm = gl.where(odd, q_norm1, tiles.norm_of_rows(q_sum0, kept, 0, L2NORM, WHOLE) * scale)
        own_product = gl.where(odd, square.take_rows(own_sum1, WHOLE), square.take_rows(own_sum0, WHOLE))
        m_sums = hopper.seen_as(work.index(0), gl.float32, [8, 16, 16], square.ROWS_FIRST)
        l_sums = hopper.seen_as(work.index(1), gl.float32, [8, 16, 16], square.ROWS_FIRST)
        x_sums = hopper.seen_as(work.index(1), gl.float32, [4, 16, 16], square.ROWS_FIRST)
        square.give_tiles(gl.join(m00, m11), m_sums, WHOLE)
        square.give_tiles(gl.join(l00, l11), l_sums, WHOLE)
        square.give_square(m10, m10_sum)
        square.give_square(l10, l10_sum)
        k_norm = gl.where(odd, k_norm1, k_norm0)
        b_beta = gl.where(odd, beta1, beta0)
        l_own = square.take_own(l_sums, False, WHOLE)
        lt_own = square.take_own(l_sums, True, WHOLE)
        m_own = square.take_own(m_sums, False, WHOLE)
        m10 = square.take_square(m10_sum, WHOLE)
        l10 = square.take_square(l10_sum, WHOLE)
        k_column = gl.convert_layout(k_norm, square.BY_COLUMN)
        k_beta_column = gl.convert_layout(k_norm * b_beta, square.BY_COLUMN)
        k_column0 = gl.convert_layout(k_norm0, square.BY_COLUMN)
        k_beta_column0 = gl.convert_layout(k_norm0 * beta0, square.BY_COLUMN)
        m_own = gl.where(square.pairs_of("same"), square.by_row(own_product), m_own)
        m_own = gl.where(square.pairs_of("lower"), m_own, 0.0) * (square.by_row(q_norm) * square.by_column(k_column))
        l_own = l_own * (square.by_row(k_norm) * square.by_column(k_beta_column))
        lt_own = lt_own * (square.by_row(k_norm * b_beta) * square.by_column(k_column))
        m10 = m10 * (square.by_row(q_norm1 * DOWN) * square.by_column(k_column0))
        l10 = l10 * (square.by_row(k_norm1 * DOWN) * square.by_column(k_beta_column0))
        x_sums.store(square.inverse_transposed(l_own, lt_own, zero))
        of_tile = hopper.seen_as(x_sums, gl.float32, [2, 2, 16, 16], square.ROWS_FIRST)
        xt00 = square.square_of_slot(of_tile.index(0))
        xt11 = square.square_of_slot(of_tile.index(1))
        x11 = square.square_of_slot(hopper.seen_as(x_sums, gl.float32, [2, 2, 16, 16], square.COLUMNS_FIRST).index(1))
        # X10 = −X11 (L10 X00)
        xt10 = -square.times(square.times(xt00, l10, zero), x11, zero)
    if X is not None:
        # A forward may keep X for its second run: what is stored must be what is used here.
        square.store_inverse(X, slot * HV + r_head, xt00, xt10, xt11, r, c, own, odd2, zero, C)
    at00 = xt00 * square.by_column(gl.convert_layout(beta0, square.BY_COLUMN))
    beta1_column = square.by_column(gl.convert_layout(beta1, square.BY_COLUMN))
    at10 = xt10 * beta1_column
    at11 = xt11 * beta1_column
    if not AGAIN:
        p_own = square.times(m_own, gl.where(odd2, at11, at00), zero)
        p10 = square.times(m_own, at10, square.times(m10, at00, zero))
        square.store_square(P + p_square + corner, p_own, r, c, own, C)
        square.store_square(P + p_square + 16 * C, p10, r, c, lower, C)
        square.store_square(P + p_square + 16, zero, r, c, upper, C)

    # kA = Aᵀ kg
    k_column1 = square.by_column(gl.convert_layout(k_norm1, square.BY_COLUMN))
    k_column0 = square.by_column(gl.convert_layout(k_norm0, square.BY_COLUMN))
    a00, a00_rest = square.two_parts(at00 * (k_column0 * DOWN))
    a10, a10_rest = square.two_parts(at10 * k_column1)
    a11, a11_rest = square.two_parts(at11 * k_column1)
    k_g0 = w_buffer.slice(0, 16, dim=1).load(square.RIGHT)
    k_g1 = w_buffer.slice(16, 16, dim=1).load(square.RIGHT)
    wide = gl.full([4, 16, 64], 0.0, gl.float32, square.MMA)
    to_end = square.by_column(total_buffer.index(1).load(gl.SliceLayout(1, square.MMA)))
    k_a0 = hopper.mma_v2(a00, k_g0, hopper.mma_v2(a00_rest, k_g0, wide)) * to_end
    k_a0 = hopper.mma_v2(a10, k_g1, hopper.mma_v2(a10_rest, k_g1, k_a0))
    k_a1 = hopper.mma_v2(a11, k_g1, hopper.mma_v2(a11_rest, k_g1, wide))
    w_buffer.slice(0, 16, dim=1).store(k_a0.to(q.dtype))
    w_buffer.slice(16, 16, dim=1).store(k_a1.to(q.dtype))
    hopper.fence_async_shared()
    hopper.block_barrier()
    if FINISHED and alone:
        first = o + (i_n.to(gl.int64) * s_ob if not PACKED else row0.to(gl.int64) * s_ot)
        finish_pair(
            k_blocks, q_blocks, w_blocks, v_blocks, squares, total_buffer, state_buffer, rows_ready, values, P,
            first, initial_state, final_state, final_indices, starts, i_n, i_state, i_h, head1, slot0 * HV + i_h,
            slot1 * HV + head1, row0, row1, count0, count1, s_vh, s_ot, s_oh, s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk,
            s_fv, pad_slot_id, s_final, final_slots, o_scale, V, C, V_FIRST, LAST_CONTIGUOUS, AHEAD,
        )  # fmt: skip
    else:
        for half in gl.static_range(2):
            hopper.store_block(keys, [out0 + 2 * C, half * 64], w_blocks.index(2 * half))
        if second:
            for half in gl.static_range(2):
                hopper.store_block(keys, [out1 + 2 * C, half * 64 + SECOND], w_blocks.index(2 * half + 1))
        hopper.tma.store_wait(0)
    # The compiler gives away memory after its last use, but bulk copies still read blocks, and warps still wait at
    # barriers that others have passed.
    q_blocks._keep_alive()
    k_blocks._keep_alive()
    w_blocks._keep_alive()
    hopper.mbarrier.invalidate(rows_ready)
    hopper.mbarrier.invalidate(decays_ready)

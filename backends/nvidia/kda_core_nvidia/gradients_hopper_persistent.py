"""``gradients_hopper`` for pairs of slots: 64 rows a program, of states at a pair's start and of their gradients at its
end alone.

The equations hold for chunks of any size, since z, do and dv belong to tokens. A pair's rows are four tiles of 16, each
with its own reference point as in ``gradients_hopper``. Sums over an earlier tile (or over a later one, for columns of
pairs) are multiplied by the decay between two neighbouring reference points, ``between`` ≤ 1, before the next tile's
products are added: no factor spans more than a tile, and every sum ends multiplied by a decay of its own row's tile.

A program takes every so many pairs. One warp loads and stores for the eight that multiply. The operands of asynchronous
products (z, do, dv and the states) are used up early, and those of the next pair are loaded behind the products of
tiles. Rows of q, k and g have two places, from where their gradients leave the chip while the next pair is at work.

The gate runs beside the asynchronous products, which ptxas then still leaves in flight (the machine code has three
WARPGROUP.DEPBAR); it waits for nothing there, or ptxas would run them one after another. Products of a warp come last:
the matrix unit is busy.

With 256 channels a program takes 128 key channels of a pair and the halves of the value channels in turn. Its
neighbour has the other key channels. They tell each other their sums over a row's channels (``send``), and the gates
run while these are on their way. A program so waits for another one, which must be running. Programs start in order:
where only some find a multiprocessor, they are whole couples but for one program, and those that end make room for it.

Where decays are not bounded, pairs whose decays are beyond one reference point a tile are written down, and a second
launch takes them (FAR) and writes their results once more. In one kernel with the others they have 304 bytes of stack
and more.

Where sequences end within pairs, ``table`` says which rows a pair has (``gradients_pairs``). Pairs that are not whole
have a launch of their own, for it takes 9 to 16% longer. There rows that are another sequence's, or nothing's, become
zero as soon as they are there, decays are masked, and the warps that multiply store their results. Pairs of one chunk
would take as long as whole ones: ``gradients_hopper`` has them, with all that is special of short sequences.

Grid: a program a multiprocessor; the pairs of all heads, heads fastest, in turn. It takes bfloat16 gates and heads that
are not grouped (``choose.backward.gradients_persistent``).
"""

# ruff: noqa: RUF005 (no starred tuples in Triton)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.gate import rate_of, sigmoid
from kda_core_nvidia import gradients_persistent_loads as loads
from kda_core_nvidia import gradients_persistent_tiles as tiles
from kda_core_nvidia.gradients_persistent_pairs import far_gradients_of_pair, near_gradients_of_pair
from kda_core_nvidia.gradients_tiles import LEAST_HALF, clear_rows, last_row, least_halves, selected_sums, store_rows
from kda_core_nvidia.hopper import block_barrier, fence_async_shared, mbarrier, seen_as, wgmma, wgmma_wait
from kda_core_nvidia.hopper_tiles import exp2
from kda_core_nvidia.recurrence_stores_hopper import unknown

_NUMBERS = ["scale", "o_scale", "lower_bound", "first_block", "HV", "blocks"]


@gluon.jit
def _products_of_values(m, rows, columns, operands, ADD: gl.constexpr):
    """Begin the products over 128 value channels; ADD: to the sums over those before."""
    stacked_0, stacked_1, z_0, z_1, s, ds = operands
    m = wgmma(stacked_0, z_0.permute((1, 0)), m, use_acc=ADD, is_async=True)
    m = wgmma(stacked_1, z_1.permute((1, 0)), m, is_async=True)
    s_0 = s.slice(0, 64).permute((1, 0))
    s_1 = s.slice(64, 64).permute((1, 0))
    rows = wgmma(s_0, stacked_0.permute((1, 0)), rows, use_acc=ADD, is_async=True)
    rows = wgmma(s_1, stacked_1.permute((1, 0)), rows, is_async=True)
    ds_0 = ds.slice(0, 64).permute((1, 0))
    ds_1 = ds.slice(64, 64).permute((1, 0))
    columns = wgmma(ds_0, z_0.permute((1, 0)), columns, use_acc=ADD, is_async=True)
    columns = wgmma(ds_1, z_1.permute((1, 0)), columns, is_async=True)
    return m, rows, columns


@gluon.jit
def _decays_of_tiles(g_rows, bias, rate, lower_bound, count, GATE: gl.constexpr, BOUNDED: gl.constexpr):
    ys = ()
    for t in gl.static_range(tiles.TILES):
        ys = ys + (tiles.log2_decays_of(g_rows, bias, rate, lower_bound, count, t, GATE, BOUNDED),)
    return ys


@gluon.jit
def _factors_of_tiles(ys):
    """2^x of each tile, and half of its log2 decay."""
    e_r = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, tiles.RIGHT)), 1)
    e_c = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, tiles.RIGHT)), 0)
    zero = gl.full([128, 16], 0.0, gl.float32, tiles.TILE)
    halves = ()
    rise = ()
    for t in gl.static_range(tiles.TILES):
        x = selected_sums(ys[t], e_r <= e_c, (0.5, -0.5), zero)
        halves = halves + (last_row(x),)
        rise = rise + (exp2(x),)
    return rise, halves


@gluon.jit
def _gradients(
    given, dbeta, dA_partial, dbias_partial, table, dq_rows, dk_rows, dg_rows, far_pairs, far_count, first_block,
    exchange, scale, o_scale, lower_bound, HV, blocks, bars, places, values, pairs, numbers, own_products,
    least_of_warps, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr, BOUNDED: gl.constexpr,
    FAR: gl.constexpr, BETA_SIGMOID: gl.constexpr, BETA_SCALE: gl.constexpr,
):  # fmt: skip
    """The warps that multiply; ``given``: of ``load_numbers``."""
    values_ready, values_free, rows_ready, rows_done = bars
    q_places, k_places, g_places = places
    z_0, z_1, o_0, o_1, s, ds = values
    _, A_log, _, _, norms, _, _ = given
    dtype: gl.constexpr = q_places.dtype
    HALVES: gl.constexpr = z_0.layout
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 16], dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Float32 blocks where decays are strong.
    WIDE_ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 128], gl.float32)
    of_s = seen_as(s, gl.float32, [2, 32, 128], WIDE_ROWS)
    of_ds = seen_as(ds, gl.float32, [2, 32, 128], WIDE_ROWS)
    dq_far = (of_s.index(0), of_s.index(1))
    dk_far = (of_ds.index(0), of_ds.index(1))
    dg_far = (
        seen_as(o_0, gl.float32, [1, 32, 128], WIDE_ROWS).index(0),
        seen_as(o_1, gl.float32, [1, 32, 128], WIDE_ROWS).index(0),
    )
    HIGH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 128], gl.float32)
    dkc_far = (
        seen_as(z_0, gl.float32, [1, 16, 128], HIGH).index(0),
        seen_as(z_1, gl.float32, [1, 16, 128], HIGH).index(0),
    )
    TAILS: gl.constexpr = dq_rows is not None
    # A warp has whole rows.
    BY_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [tiles.WARPS, 1], [1, 0])
    BY_HALF_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [tiles.WARPS, 1], [1, 0])
    BLOCKS: gl.constexpr = K // 128
    # Gradients of gates before the barriers for sums over warps, which then are close together: warps wait for the last
    # one once. With softplus too few registers are left for it.
    GATE_FIRST: gl.constexpr = GATE != "none" and BLOCKS == 1 and (BOUNDED or FAR)
    # A pair's numbers would push registers in slow memory out of the first cache. With bounded gates, which have few
    # there, that gains nothing; where decays are strong it was not measured.
    EVICTION: gl.constexpr = "" if FAR or (BOUNDED and GATE != "none") else "evict_first"
    # A thread has the numbers of all warps.
    EACH: gl.constexpr = gl.BlockedLayout([tiles.WARPS], [32], [tiles.WARPS], [0])
    first = gl.program_id(0)
    step = gl.num_programs(0)
    # A program without pairs loads, too.
    block = gl.where(first < blocks, loads.block_of(far_pairs, first_block, first, blocks, K, FAR), 0)
    pair, i_h, _ = loads.parts_of(block, HV, K)
    raw = loads.load_numbers(given, table, pair, i_h, loads.first_channel(block, K), HV, K, C, EVICTION)
    for n in range((blocks - first + step - 1) // step):
        a, raw_bias, decay, second_decay, raw_beta, raw_nq, raw_nk = raw
        row, _, _, count = loads.place_of(table, pair, C)
        there = count if TAILS else None
        place = n & 1
        phase = n * (V // 128) & 1
        rows_phase = (n >> 1) & 1
        q_rows = q_places.index(place)
        k_rows = k_places.index(place)
        g_rows = g_places.index(place)

        rate = 1.0 if A_log is None else rate_of(a)
        bias = gl.expand_dims(raw_bias.to(gl.float32), 1)
        b_beta = raw_beta.to(gl.float32)
        # A number a thread, a kind of number two warps.
        kind = gl.arange(0, 256, layout=tiles.LANES) // 64
        nq = gl.full([256], 1.0, gl.float32, tiles.LANES)
        nk = nq
        if norms is not None:
            nq = raw_nq
            nk = raw_nk

        mbarrier.wait(values_ready, phase)
        mbarrier.wait(rows_ready.index(place), rows_phase)
        # Blocks by an index that is 0 and that the compiler cannot know. It would keep their addresses for the next
        # turn in slow memory, and wait for them where the products begin. So it would with those of sums, below.
        here = unknown(gl.to_tensor(0))
        operands = (
            seen_as(o_0, dtype, [1, 128, 64], HALVES).index(here),
            seen_as(o_1, dtype, [1, 128, 64], HALVES).index(here),
            seen_as(z_0, dtype, [1, 64, 64], HALVES).index(here),
            seen_as(z_1, dtype, [1, 64, 64], HALVES).index(here),
            seen_as(s, dtype, [1, 128, 128], s.layout).index(here),
            seen_as(ds, dtype, [1, 128, 128], s.layout).index(here),
        )
        all_pairs = seen_as(pairs, dtype, [1, 512, 16], NARROW).index(here)
        # Later, in the place of the pairs.
        sums_by_warp = seen_as(pairs, gl.float32, [2, tiles.WARPS, 256], PLAIN).index(here)
        if TAILS and count < C:
            behind = count - C // 2
            clear_rows(q_rows.slice(C // 2, C // 2), behind, BY_ROWS)
            clear_rows(k_rows.slice(C // 2, C // 2), behind, BY_ROWS)
            clear_rows(g_rows.slice(C // 2, C // 2), behind, BY_ROWS)
            clear_rows(z_0.slice(C // 2, C // 2), behind, BY_HALF_ROWS)
            clear_rows(z_1.slice(C // 2, C // 2), behind, BY_HALF_ROWS)
            for i in gl.static_range(2):
                clear_rows(o_0.index(i).slice(C // 2, C // 2), behind, BY_HALF_ROWS)
                clear_rows(o_1.index(i).slice(C // 2, C // 2), behind, BY_HALF_ROWS)
            fence_async_shared()
            block_barrier()
        if table is not None and not (TAILS or tiles.EARLY) and BOUNDED and count < C:
            # Never taken. Without a branch here later versions of triton spill 600 bytes.
            block_barrier()
        m = gl.full([128, 64], 0.0, gl.float32, tiles.M64)
        rows = gl.full([128, 128], 0.0, gl.float32, tiles.M128)
        columns = gl.full([128, 64], 0.0, gl.float32, tiles.M64)
        m, rows, columns = wgmma_wait(0, deps=(m, rows, columns))
        LATER: gl.constexpr = V > 128
        if LATER:
            # The first half of the value channels: all is read before the others take its place.
            m, rows, columns = _products_of_values(m, rows, columns, operands, False)
            first_sums = tiles.products_of_channels(s, ds)
            m, rows, columns = wgmma_wait(0, deps=(m, rows, columns))
            block_barrier()
            mbarrier.arrive(values_free, count=1)
            # The gate runs while the others are on their way.
            ys = _decays_of_tiles(g_rows, bias, rate, lower_bound, there, GATE, BOUNDED)
            rise, halves = _factors_of_tiles(ys)
            mbarrier.wait(values_ready, 1)
        m, rows, columns = _products_of_values(m, rows, columns, operands, LATER)
        # Meanwhile the decays, and the sums over v of S ⊙ dS.
        if not LATER:
            ys = _decays_of_tiles(g_rows, bias, rate, lower_bound, there, GATE, BOUNDED)
        slope = gl.full([256], 1.0, gl.float32, tiles.LANES)
        if BETA_SIGMOID:
            slope = sigmoid(-b_beta)
            b_beta = BETA_SCALE * sigmoid(b_beta)
            slope = slope * b_beta
        number = gl.where(kind == 0, nk * b_beta, gl.where(kind == 1, nq * scale, nk))
        # A sum over a row's channels is multiplied by it.
        factor = gl.where(kind == 0, nq * nq, gl.where(kind == 1, nk * nk, slope * nk))
        m = wgmma_wait(4, deps=(m,))
        # The pairs: [128, 64] as [tile of z, do or dv, their tile], blocks of 16 rows.
        pr = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, tiles.M64)), 1)
        pc = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, tiles.M64)), 0)
        own = gl.sum(gl.where(pc == pr % 64, m, 0.0), axis=1)
        m = gl.where(pc < pr % 64, m, 0.0).to(dtype)
        own_products.store(own)
        all_pairs.store(m.reshape([128, 4, 16]).permute((1, 0, 2)).reshape([512, 16]))
        numbers.store(number)
        if not LATER:
            rise, halves = _factors_of_tiles(ys)
        sums = tiles.products_of_channels(s, ds)
        if LATER:
            sums += first_sums
        sums = sums * (decay * second_decay * o_scale)
        if not (BOUNDED or FAR):
            low = halves
            if TAILS:
                # Allow less decay over fewer rows; otherwise terms that cancel exceed the result.
                low = halves[:2]
                for t in gl.static_range(2, tiles.TILES):
                    missing = gl.minimum(gl.maximum(16 * t + 16 - count, 0), 16) / 16
                    low = low + (halves[t] + LEAST_HALF * missing,)
            if TAILS:
                least = gl.min(least_halves(low, tiles.TILES), axis=0)
                tiles.write_down_far(least, gl.arange(0, 256, layout=tiles.LANES) == 0, far_pairs, far_count, block)
            else:
                least_of_warps.store(least_halves(low, tiles.TILES))
        rows, columns = wgmma_wait(0, deps=(rows, columns))
        block_barrier()
        if not (BOUNDED or FAR or TAILS or BLOCKS > 1):
            # Behind a barrier that is there anyway; with tails there are no registers for it.
            least = gl.min(least_of_warps.load(EACH), axis=0)
            tiles.write_down_far(least, gl.arange(0, 256, layout=tiles.LANES) == 0, far_pairs, far_count, block)
        if not FAR:
            mbarrier.arrive(values_free, count=1)

        if FAR:
            new_q, new_k, dg, sums_q, sums_k, sums_b = far_gradients_of_pair(
                rows, columns, sums, halves, bias, rate, lower_bound, o_scale, g_rows, q_rows, k_rows, numbers,
                own_products, pairs, dq_far, dk_far, dg_far, dkc_far, there, GATE,
            )  # fmt: skip
            fence_async_shared()
            block_barrier()
            mbarrier.arrive(values_free, count=1)
        else:
            new_q, new_k, dg, sums_q, sums_k, sums_b = near_gradients_of_pair(
                rows, columns, sums, rise, halves, o_scale, q_rows, k_rows, numbers, own_products, pairs,
                HV >> 31 if BOUNDED or BLOCKS > 1 else None,
            )  # fmt: skip
        if GATE_FIRST:
            dg = loads.gate_gradients_of_pair(
                dg, g_rows, bias, rate, lower_bound, A_log, table, dA_partial, dbias_partial, block, pair, i_h, HV,
                there, K, C, GATE, FAR,
            )  # fmt: skip
        sum_q = tiles.merged_sums(sums_q[0], sums_q[1], 2)
        sum_k = tiles.merged_sums(sums_k[0], sums_k[1], 2)
        sum_b = tiles.merged_sums(sums_b[0], sums_b[1], 2)
        block_barrier()
        tiles.store_sums(sums_by_warp, sum_q, sum_k, sum_b)
        # The next pair's numbers, which arrive behind what is left of this one; the last one loads its own again.
        i = first + (n + 1) * step
        following = gl.where(i < blocks, loads.block_of(far_pairs, first_block, i, blocks, K, FAR), block)
        next_pair, next_h, next_channel = loads.parts_of(following, HV, K)
        if tiles.EARLY:
            raw = loads.load_numbers(given, table, next_pair, next_h, next_channel, HV, K, C, EVICTION)
        if BLOCKS > 1:
            # The other program needs them behind its gate.
            block_barrier()
            total = gl.sum(sums_by_warp.load(tiles.BY_WARP), axis=0) * factor
            if not (BOUNDED or FAR):
                total = gl.where(kind == 3, gl.min(least_of_warps.load(EACH), axis=0), total)
            p_words = exchange + gl.arange(0, 256, layout=tiles.LANES) + (n & 1) * 256
            tag = gl.full([256], n + (1 << 30 if FAR else 1), gl.int32, tiles.LANES)
            loads.send(p_words + first * 512, total, tag)
        if GATE != "none" and not GATE_FIRST:
            if TAILS and tiles.EARLY:
                # Once more: registers are few.
                _, _, _, there = loads.place_of(table, pair, C)
            dg = loads.gate_gradients_of_pair(
                dg, g_rows, bias, rate, lower_bound, A_log, table, dA_partial, dbias_partial, block, pair, i_h, HV,
                there, K, C, GATE, FAR,
            )  # fmt: skip
        block_barrier()
        if BLOCKS > 1:
            other = loads.receive(p_words + (first ^ 1) * 512, tag)
            if not (BOUNDED or FAR):
                once = gl.arange(0, 256, layout=tiles.LANES) == 192 + block % BLOCKS * 256
                tiles.write_down_far(gl.minimum(total, other), once, far_pairs, far_count, block // BLOCKS)
            total += other
        else:
            total = gl.sum(sums_by_warp.load(tiles.BY_WARP), axis=0) * factor
        r_lane = (gl.arange(0, 256, layout=tiles.LANES) + unknown(gl.to_tensor(0))) % 64
        if table is not None:
            row, _, _, count = loads.place_of(table, pair, C)
        p_dbeta = dbeta + loads.wide(row + r_lane, HV) + i_h
        own_row = kind == 2
        if BLOCKS > 1:
            own_row = own_row & (block % BLOCKS == 0)
        if TAILS:
            own_row = own_row & (r_lane < count)
        gl.store(p_dbeta, total.to(dbeta.dtype.element_ty), mask=own_row)
        if norms is not None:
            numbers.store(total)
            block_barrier()
            dq = ()
            dk = ()
            for t in gl.static_range(tiles.TILES):
                dq = dq + (tiles.of_raw(new_q[t], q_rows, numbers, 0, t),)
                dk = dk + (tiles.of_raw(new_k[t], k_rows, numbers, 1, t),)
            tiles.in_order()
        else:
            dq = new_q
            dk = new_k
        if not tiles.EARLY:
            raw = loads.load_numbers(given, table, next_pair, next_h, next_channel, HV, K, C, EVICTION)
        block_barrier()
        tiles.store_tiles(q_rows, dq)
        tiles.store_tiles(k_rows, dk)
        tiles.store_tiles(g_rows, dg)
        fence_async_shared()
        block_barrier()
        if TAILS and count < C:
            out = (row.to(gl.int64) * HV + i_h) * K + loads.first_channel(block, K)
            store_rows(dq_rows + out, HV * K, q_rows, count, BY_ROWS, 64)
            store_rows(dk_rows + out, HV * K, k_rows, count, BY_ROWS, 64)
            store_rows(dg_rows + out, HV * K, g_rows, count, BY_ROWS, 64)
            block_barrier()
        mbarrier.arrive(rows_done.index(place), count=1)
        block, pair, i_h = following, next_pair, next_h


@gluon.jit(do_not_specialize=_NUMBERS)
def gradients_hopper_persistent(
    q, k, g,  # descriptors of [B · T, ..] by [C, 128]
    do, dv,  # descriptors of [B · T, ..] by [C, 64]
    z,  # descriptor of [places · HV · C, V] by [C, 64]
    states, state_grads,  # descriptors of [places · HV · V, K] by [128, 128]
    dq, dk, dg,  # descriptors of results [B · T, HV · K] by [C, 128]
    beta,  # [B, T, HV], rows at s_bt
    A_log, dt_bias,  # [HV] and [HV, K], or None
    D,  # [slots, HV, K]
    norms,  # [slots, HV, 2, C / 2] or None
    dbeta,  # [B · T, HV]
    dA_partial, dbias_partial,  # [places, HV, K / 128 · warps] and [places, HV, K], or None
    table, pair_count,  # as ``gradients_pairs`` writes them; or None where every pair of the call is whole
    dq_rows, dk_rows, dg_rows,  # tensors of dq, dk, dg, or None where every pair of the launch is whole
    far_pairs,  # [pairs · HV]: pairs and heads with decays beyond one reference point a tile, in any order; or None
    far_count,  # [1]: how many they are
    first_block,  # HV times the first pair of the table that is not whole, if the launch takes those; or None
    exchange,  # [programs, 2, 256] words of 64 bits, zeros before the first launch; None where K is 128
    s_qh, s_kh, s_gh, s_oh, s_bt, s_bh, scale, o_scale, lower_bound,
    HV, blocks,  # value heads; pairs · HV · K / 128, with a table at most
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr, BOUNDED: gl.constexpr,
    FAR: gl.constexpr,  # the launch takes those pairs; else it takes all, and writes down which they are
    BETA_SIGMOID: gl.constexpr, BETA_SCALE: gl.constexpr,
):  # fmt: skip
    if FAR:
        blocks = gl.load(far_count) * (K // 128)
        if gl.program_id(0) >= blocks:
            return
    elif table is not None:
        blocks = gl.load(pair_count + (0 if first_block is None else 1)) * HV
    dtype: gl.constexpr = q.dtype

    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], dtype)
    HALVES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 16], dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_places = gl.allocate_shared_memory(dtype, [2, 64, 128], ROWS)
    k_places = gl.allocate_shared_memory(dtype, [2, 64, 128], ROWS)
    g_places = gl.allocate_shared_memory(g.dtype, [2, 64, 128], ROWS)
    # do and dv, and z, by halves of the value channels.
    o_0 = gl.allocate_shared_memory(dtype, [2, 64, 64], HALVES)
    o_1 = gl.allocate_shared_memory(dtype, [2, 64, 64], HALVES)
    z_0 = gl.allocate_shared_memory(dtype, [64, 64], HALVES)
    z_1 = gl.allocate_shared_memory(dtype, [64, 64], HALVES)
    s = gl.allocate_shared_memory(dtype, [128, 128], ROWS)
    ds = gl.allocate_shared_memory(dtype, [128, 128], ROWS)
    pairs = gl.allocate_shared_memory(dtype, [32, 16, 16], NARROW)
    numbers = gl.allocate_shared_memory(gl.float32, [256], PLAIN)
    own_products = gl.allocate_shared_memory(gl.float32, [128], PLAIN)
    least_of_warps = gl.allocate_shared_memory(gl.float32, [tiles.WARPS], PLAIN)
    values_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    rows_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    rows_done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(values_ready, count=1)
    mbarrier.init(values_free, count=1)
    for i in gl.static_range(2):
        mbarrier.init(rows_ready.index(i), count=1)
        mbarrier.init(rows_done.index(i), count=1)
    fence_async_shared()
    block_barrier()
    bars = (values_ready, values_free, rows_ready, rows_done)
    places = (q_places, k_places, g_places)
    values = (z_0, z_1, o_0, o_1, s, ds)
    gl.warp_specialize([
        (_gradients, (
            (beta, A_log, dt_bias, D, norms, s_bt, s_bh), dbeta, dA_partial, dbias_partial, table, dq_rows, dk_rows,
            dg_rows, far_pairs, far_count, first_block, exchange, scale, o_scale, lower_bound, HV, blocks, bars, places,
            values, pairs, numbers, own_products, least_of_warps, K, V, C, GATE, BOUNDED, FAR, BETA_SIGMOID, BETA_SCALE,
        )),
        (loads.load_and_store, (
            (q, k, g), do, dv, z, states, state_grads, (dq, dk, dg), table, far_pairs, first_block, HV, blocks,
            (s_qh, s_kh, s_gh, s_oh), bars, places, values, K, V, C, FAR, dq_rows is not None,
        )),
    ], [1], [tiles.LOADER_REGISTERS])  # fmt: skip

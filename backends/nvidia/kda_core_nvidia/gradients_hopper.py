"""``gradients`` for Hopper, written in Gluon: the equations of ``backward_gradients`` for a chunk's 32 rows and 128 key
channels in one program. With 128 in all it also does what ``finish_kernel`` does: the gradients of the row norms and
of β. With 256 it leaves sums over both blocks of them to that kernel, and dq and dk are with respect to the normalised
rows.

Blocks in registers are transposed, [channels, rows]. A chunk's rows are two tiles of 16; ``gradients_decays`` says how
decays between rows are formed.

Factors go into products as two parts, rounded to 16 bits together (``backward_gradients``). Gradients of rows of q and
k are with respect to the raw ones from the start, except for the part along the row that their norms take away.

Rows of do and dv are stacked: one product with the state, and one with z, serve both. Products of blocks in shared
memory are asynchronous, in one group. ptxas makes each of them wait for the one before as soon as an operand is put
into registers while another runs. Products of tiles are therefore those of a warp (mma.sync).

Two programs share a multiprocessor: 113 KiB of shared memory each at most. Results, and what phases after the first
need, therefore lie in the place of blocks that are no longer read. Sums over 256 value channels take the halves of
these in turn, in the same place.

Where chunks are in pairs that ``gradients_hopper_persistent`` takes, this kernel takes the last chunk of every sequence
with an odd number of them: a program a sequence and head.

Grid: slots · HV · K / 128 programs, channel blocks fastest, which share do, dv and z, then heads. Addresses: rows of
descriptors in 32 bits, pointers in int64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.gate import gate_rate, sigmoid
from kda_core.triton_lib.packing import rows_of_slot
from kda_core_nvidia import gradients_tiles as tiles
from kda_core_nvidia import hopper
from kda_core_nvidia.backward_hopper import rows_of
from kda_core_nvidia.gradients_decays import far_gradients, near_gradients, take
from kda_core_nvidia.gradients_persistent_tiles import WARPS as PAIR_WARPS
from kda_core_nvidia.hopper_tiles import exp2
from kda_core_nvidia.recurrence_stores_hopper import place_of

_NUMBERS = ["scale", "o_scale", "lower_bound", "tokens", "T", "N", "chunks", "HV", "HO", "group"]


@gluon.jit
def _store_gradients(
    found, sums, blocks, sums_out, outputs, call, FAR: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr,
    TAILS: gl.constexpr, WIDE_G: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """From what ``near_gradients`` or ``far_gradients`` (FAR) ``found`` to the results in memory."""
    dq0, dk0, dkc0, dq1, dk1, dkc1, ends = found
    q_rows, k_rows, numbers, own_products, dg_far, g_again, g_bar = blocks
    dbeta, dA_partial, dbias_partial = sums_out
    results, result_blocks, result_rows = outputs
    dq_block, dk_block, dg_block = result_blocks
    count, tail, row, i_h, i_k, of_state, HV, heads, norms, bias, a, lower_bound = call
    BLOCKS: gl.constexpr = K // 128
    BY_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [tiles.WARPS, 1], [1, 0])
    channel = i_k * 128
    c = gl.arange(0, 128, layout=tiles.BY_CHANNEL)
    s = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, tiles.RIGHT)), 1)
    t = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, tiles.RIGHT)), 0)
    zero = gl.full([128, 16], 0.0, gl.float32, tiles.TILE)
    columns = None
    if TAILS:
        # One row alone has no pairs. In its decay gradient the column part cancels against ``ends``: here exactly.
        columns = gl.where(count > 1, 1.0, 0.0)
        ends = ends * columns

    hopper.block_barrier()
    dq0, dk0, p0, tq0, tk0, tb0 = tiles.own_gradients(dq0, dk0, dkc0, q_rows, k_rows, numbers, own_products, columns, 0)
    hopper.block_barrier()
    dq1, dk1, p1, tq1, tk1, tb1 = tiles.own_gradients(dq1, dk1, dkc1, q_rows, k_rows, numbers, own_products, columns, 1)
    if BLOCKS > 1:
        tb0 = gl.sum(tb0, axis=0)
        tb1 = gl.sum(tb1, axis=0)
    else:
        tq0, tq1, tk0, tk1, tb0, tb1 = gl.reduce((tq0, tq1, tk0, tk1, tb0, tb1), 0, tiles.add_each)
    from_row = gl.where(s >= t, 1.0, 0.0).to(q_rows.dtype)
    everywhere = gl.full([16, 16], 1.0, q_rows.dtype, tiles.RIGHT)
    if FAR:
        dg0 = take(dg_far, 0)
        dg1 = take(dg_far, 1)
    else:
        start_sums = gl.expand_dims(ends + sums, 1) + zero
        dg0 = tiles.add_product(p1, everywhere, start_sums)
        dg0 = tiles.add_product(p0, from_row, dg0)
        dg1 = tiles.add_product(p1, from_row, start_sums)
    r = gl.arange(0, 16, layout=tiles.BY_ROW)
    p_dbeta = dbeta + (row.to(gl.int64) * HV + i_h)
    tb0 = (tb0 * numbers.slice(128, 16).load(tiles.BY_ROW)).to(dbeta.dtype.element_ty)
    tb1 = (tb1 * numbers.slice(144, 16).load(tiles.BY_ROW)).to(dbeta.dtype.element_ty)
    if TAILS:
        gl.store(p_dbeta + r * HV, tb0, mask=r < count)
        gl.store(p_dbeta + (r + 16) * HV, tb1, mask=r + 16 < count)
    else:
        gl.store(p_dbeta + r * HV, tb0)
        gl.store(p_dbeta + (r + 16) * HV, tb1)
    if norms is not None and BLOCKS > 1:
        dq0 = dq0 * tiles.numbers_of_rows(numbers, 6, 0)
        dq1 = dq1 * tiles.numbers_of_rows(numbers, 6, 1)
        dk0 = dk0 * tiles.numbers_of_rows(numbers, 5, 0)
        dk1 = dk1 * tiles.numbers_of_rows(numbers, 5, 1)
    elif norms is not None:
        dq0 = tiles.of_raw(dq0, q_rows, tq0, numbers, 3, 0)
        dq1 = tiles.of_raw(dq1, q_rows, tq1, numbers, 3, 1)
        dk0 = tiles.of_raw(dk0, k_rows, tk0, numbers, 2, 0)
        dk1 = tiles.of_raw(dk1, k_rows, tk1, numbers, 2, 1)
    tiles.store_tiles(dq_block, dq0, dq1)
    tiles.store_tiles(dk_block, dk0, dk1)
    if GATE != "none":
        if WIDE_G:
            hopper.mbarrier.wait(g_bar, 1)
        x0 = tiles.rows_of_tile(g_again, 0) + bias
        x1 = tiles.rows_of_tile(g_again, 1) + bias
        if TAILS:
            dg0, x0 = gl.where(tiles.inside(count, 0), dg0, 0.0), gl.where(tiles.inside(count, 0), x0, 0.0)
            dg1, x1 = gl.where(tiles.inside(count, 1), dg1, 0.0), gl.where(tiles.inside(count, 1), x1, 0.0)
        dg0, summand0 = tiles.gate_gradients(x0, a, lower_bound, dg0, GATE)
        dg1, summand1 = tiles.gate_gradients(x1, a, lower_bound, dg1, GATE)
        if dbias_partial is not None:
            gl.store(dbias_partial + (of_state.to(gl.int64) * K + channel + c), gl.sum(dg0 + dg1, axis=1))
        if dA_partial is not None:
            summand = gl.sum(gl.sum(summand0 + summand1, axis=1), axis=0) * tiles.unit_of_summands(GATE)
            PARTS: gl.constexpr = PAIR_WARPS if LAST else BLOCKS
            gl.store(dA_partial + (of_state * PARTS + i_k), summand)
            if LAST:
                for i in gl.static_range(1, PARTS):
                    gl.store(dA_partial + (of_state * PARTS + i), 0.0)
    tiles.store_tiles(dg_block, dg0, dg1)
    hopper.fence_async_shared()
    hopper.block_barrier()
    if tail:
        if TAILS:
            for i in gl.static_range(3):
                tiles.store_rows(result_rows[i], heads[i] * K, result_blocks[i], count, BY_ROWS)
    else:
        for i in gl.static_range(3):
            hopper.store_block(results[i], [row, i_h * K + channel], result_blocks[i])
        hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=_NUMBERS)
def gradients_hopper(
    q, k, g,  # descriptors of [B · T, ..] by [C, 128]
    do, dv,  # descriptors of [B · T, ..] by [C, 64]
    z,  # descriptor of [slots · HV · C, V] by [C, 64]
    states, state_grads,  # descriptors of [slots · HV · V, K] by [64, 128]
    dq, dk, dg,  # descriptors of results [B · T, HV · K] by [C, 128]; of dq and dk in float32 for grouped heads
    dq_rows, dk_rows, dg_rows, dv_rows,  # those tensors and dv, or None where every chunk is whole
    beta,  # [B, T, HV], rows at s_bt
    A_log, dt_bias,  # [HV] and [HV, K], or None
    D,  # [slots, HV, K]
    norms,  # [slots, HV, 2, C] or None
    dbeta,  # [K / 128, tokens, HV]
    dA_partial, dbias_partial,  # [slots, HV, K / 128] and [slots, HV, K], or None
    initial_state, grad_final_state,  # [N, HV, K, V], or None where no sequence is of one chunk
    cu_seqlens,  # [N + 1] or None
    s_qh, s_kh, s_gh, s_oh, s_bt, s_bh, scale, o_scale, lower_bound,
    tokens,  # rows of dbeta; None where K is 128
    T, N, chunks,  # rows of a batch row, sequences, chunks of a dense sequence
    HV,  # value heads
    HO,  # heads of rows of dg (and of dq and dk, but for grouped heads), of which HV are the call's; or None: HV
    group,  # value heads of a key head
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr, BOUNDED: gl.constexpr,
    BETA_SIGMOID: gl.constexpr, BETA_SCALE: gl.constexpr, V_FIRST: gl.constexpr,
    LAST: gl.constexpr,  # take what ``gradients_hopper_persistent`` leaves; z, states and partial sums are by pairs
):  # fmt: skip
    BLOCKS: gl.constexpr = K // 128
    i_k = gl.program_id(0) % BLOCKS
    channel = i_k * 128
    i_h = gl.program_id(0) // BLOCKS % HV
    i_slot = gl.program_id(0) // (BLOCKS * HV)
    i_kh = i_h // group
    block = i_slot * HV + i_h
    if BLOCKS > 1:
        dbeta += i_k.to(gl.int64) * tokens * HV
    dtype: gl.constexpr = q.dtype
    TAILS: gl.constexpr = dq_rows is not None
    WIDE_G: gl.constexpr = g.dtype == gl.float32
    GROUPED: gl.constexpr = dq.dtype == gl.float32
    # A warp has whole rows.
    BY_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [tiles.WARPS, 1], [1, 0])
    BY_HALF_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [tiles.WARPS, 1], [1, 0])
    row = i_slot * C
    count = C
    length = T
    i_n = i_slot
    of_state = block
    Z_ROWS: gl.constexpr = 2 * C if LAST else C
    if LAST:
        # A sequence's last chunk, if it is in no pair.
        slot0, length, _, row0 = rows_of(i_n, cu_seqlens, T, 0, chunks, 0, 0, C)
        before = (length + C - 1) // C - 1
        if before % 2 != 0:
            return
        count = length - before * C
        row = row0.to(gl.int32) + before * C
        block = ((slot0 + before) * HV + i_h).to(gl.int32)
        of_state = ((place_of(slot0, i_n, cu_seqlens, row0, chunks, C, True) + before) // 2 * HV + i_h).to(gl.int32)
    elif TAILS:
        i_n, i_b, start, eos = rows_of_slot(cu_seqlens, i_slot, T, N, chunks, C)
        if start >= eos:
            return
        count = gl.minimum(eos - start, C)
        row = i_b * T + start
        if cu_seqlens is not None:
            length = eos - gl.load(cu_seqlens + i_n).to(gl.int32)
    heads_qk, heads_g = None, None
    if TAILS:
        out = row.to(gl.int64) * HV + i_h
        heads_g = HV if HO is None else HO
        out_g = out if HO is None else row.to(gl.int64) * HO + i_h
        heads_qk = HV if GROUPED else heads_g
        out_qk = out if GROUPED else out_g
        dq_rows += out_qk * K + channel
        dk_rows += out_qk * K + channel
        dg_rows += out_g * K + channel
        if not LAST and i_n >= N:
            # Rows behind the last sequence: their gradients are zero.
            tiles.store_rows(dq_rows, heads_qk * K, None, count, BY_ROWS)
            tiles.store_rows(dk_rows, heads_qk * K, None, count, BY_ROWS)
            tiles.store_rows(dg_rows, heads_g * K, None, count, BY_ROWS)
            # There are as many value channels.
            tiles.store_rows(dv_rows + (out * V + channel), HV * V, None, count, BY_ROWS)
            r = gl.arange(0, 32, layout=gl.SliceLayout(1, BY_ROWS))
            none = gl.full([32], 0.0, dbeta.dtype.element_ty, gl.SliceLayout(1, BY_ROWS))
            gl.store(dbeta + out + r * HV, none, mask=r < count)
            return
    tail = count < C

    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 128], dtype)
    WIDE_ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 128], gl.float32)
    HALVES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 64], dtype)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 16], dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qk_rows = gl.allocate_shared_memory(dtype, [2, 32, 128], ROWS)
    q_rows = qk_rows.index(0)
    k_rows = qk_rows.index(1)
    # By halves of the value channels.
    o_0 = gl.allocate_shared_memory(dtype, [2, 32, 64], HALVES)
    o_1 = gl.allocate_shared_memory(dtype, [2, 32, 64], HALVES)
    z_0 = gl.allocate_shared_memory(dtype, [32, 64], HALVES)
    z_1 = gl.allocate_shared_memory(dtype, [32, 64], HALVES)
    s_0 = gl.allocate_shared_memory(dtype, [64, 128], ROWS)
    s_1 = gl.allocate_shared_memory(dtype, [64, 128], ROWS)
    ds_0 = gl.allocate_shared_memory(dtype, [64, 128], ROWS)
    ds_1 = gl.allocate_shared_memory(dtype, [64, 128], ROWS)
    if WIDE_G:
        # q and k come once g has been read; a gate reads it again, where a state was.
        g_rows = hopper.seen_as(qk_rows, gl.float32, [1, 32, 128], WIDE_ROWS).index(0)
        g_again = hopper.seen_as(ds_1, gl.float32, [1, 32, 128], WIDE_ROWS).index(0)
        dg_block = hopper.seen_as(ds_0, gl.float32, [1, 32, 128], WIDE_ROWS).index(0)
    else:
        g_rows = gl.allocate_shared_memory(dtype, [32, 128], ROWS)
        g_again = g_rows
        dg_block = g_rows
    if GROUPED:
        dq_block = hopper.seen_as(s_0, gl.float32, [1, 32, 128], WIDE_ROWS).index(0)
        dk_block = hopper.seen_as(s_1, gl.float32, [1, 32, 128], WIDE_ROWS).index(0)
    else:
        dq_block = q_rows
        dk_block = k_rows
    # Gradients of strong decays, where the states were.
    dg_far = hopper.seen_as(s_0, gl.float32, [1, 32, 128], WIDE_ROWS).index(0)
    dq_far = hopper.seen_as(s_1, gl.float32, [1, 32, 128], WIDE_ROWS).index(0)
    dk_far = hopper.seen_as(ds_0, gl.float32, [1, 32, 128], WIDE_ROWS).index(0)
    stacked_0 = hopper.seen_as(o_0, dtype, [1, 64, 64], HALVES).index(0)
    stacked_1 = hopper.seen_as(o_1, dtype, [1, 64, 64], HALVES).index(0)
    # Later, in the place of do, dv and z.
    all_pairs = hopper.seen_as(o_0, dtype, [2, 128, 16], NARROW).index(0)
    pairs = hopper.seen_as(o_0, dtype, [16, 16, 16], NARROW)
    numbers = hopper.seen_as(z_0, gl.float32, [4, 256], PLAIN).index(0)
    own_products = hopper.seen_as(z_1, gl.float32, [8, 128], PLAIN).index(0)
    # One allocation for each block: parts of one would get a barrier of all warps before every copy.
    bars = ()
    for i in gl.static_range(11):
        bars = bars + (gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout()),)  # noqa: RUF005 (no starred tuples in Triton)
        hopper.mbarrier.init(bars[i], count=1)
    g_bar, k_bar, q_bar = bars[:3]
    value_bars = bars[3:]
    value_blocks = (z_0, z_1, o_0, o_1, s_0, s_1, ds_0, ds_1)
    hopper.fence_async_shared()
    hopper.block_barrier()
    hopper.mbarrier.expect(g_bar, C * 128 * (4 if WIDE_G else 2))
    hopper.mbarrier.expect(k_bar, C * 128 * 2)
    hopper.mbarrier.expect(q_bar, C * 128 * 2)
    tiles.expect_values(value_bars, C)
    hopper.copy_block(g, [row, i_h * s_gh + channel], g_bar, g_rows)
    tiles.copy_values(
        z, do, states, state_grads, of_state, row, i_h, s_oh, channel, value_blocks, value_bars, Z_ROWS, V, 0
    )
    if not WIDE_G:
        hopper.copy_block(k, [row, i_kh * s_kh + channel], k_bar, k_rows)
        hopper.copy_block(q, [row, i_kh * s_qh + channel], q_bar, q_rows)
    hopper.copy_block(dv, [row, i_h * V], value_bars[2], o_0.index(1))
    hopper.copy_block(dv, [row, i_h * V + 64], value_bars[3], o_1.index(1))

    a = gate_rate(A_log, i_h)
    c = gl.arange(0, 128, layout=tiles.BY_CHANNEL)
    bias = gl.full([128, 1], 0.0, gl.float32, tiles.TILE)
    if dt_bias is not None:
        bias = gl.expand_dims(gl.load(dt_bias + i_h * K + channel + c).to(gl.float32), 1)
    decay = gl.load(D + (block.to(gl.int64) * K + channel) + c)
    if LAST and initial_state is not None:
        # Early: later there are no registers for it.
        own_sums = decay
        if length <= C:
            own_sums = decay * tiles.sum_of_ends(
                initial_state, grad_final_state, i_n * HV + i_h, channel, K, V, V_FIRST
            )
    # A row a lane, a kind of number a warp.
    LANES: gl.constexpr = gl.BlockedLayout([256 // (32 * tiles.WARPS)], [32], [tiles.WARPS], [0])
    kind = gl.arange(0, 256, layout=LANES) // 32
    r_lane = gl.arange(0, 256, layout=LANES) % 32
    p_beta = beta + (row.to(gl.int64) * s_bt + i_h.to(gl.int64) * s_bh + r_lane * s_bt)
    b_beta = (gl.load(p_beta, mask=r_lane < count, other=0.0) if TAILS else gl.load(p_beta)).to(gl.float32)
    slope = gl.full([256], 1.0, gl.float32, LANES)
    if BETA_SIGMOID:
        # s(x)·s(−x) and not s·(1 − s), which loses every digit for large logits.
        slope = sigmoid(-b_beta)
        b_beta = BETA_SCALE * sigmoid(b_beta)
        slope = slope * b_beta
    nq = gl.full([256], 1.0, gl.float32, LANES)
    nk = nq
    if norms is not None:
        p_norms = norms + (block.to(gl.int64) * (2 * C) + r_lane)
        nq = gl.load(p_norms)
        nk = gl.load(p_norms + C)
    # 0: |k|⁻¹ β, 1: |q|⁻¹ scale, 2: |k|⁻¹, 3: |q|⁻¹, 4: |k|⁻¹ times the slope of β
    number = gl.where(kind == 0, nk * b_beta, gl.where(kind == 1, nq * scale, gl.where(kind == 2, nk, nq)))
    number = gl.where(kind == 4, slope * nk, number)
    if BLOCKS > 1:
        # 5: |k|, 6: |q|
        number = gl.where(kind > 4, 1.0 / gl.where(kind == 5, nk, nq), number)

    rows_there = count if TAILS else None
    for half in gl.static_range(V // 128):
        if half > 0:
            # All warps have read the first value channels. Others take their place.
            hopper.block_barrier()
            tiles.expect_values(value_bars, C)
            tiles.copy_values(
                z, do, states, state_grads, of_state, row, i_h, s_oh, channel, value_blocks, value_bars, Z_ROWS, V,
                128 * half,
            )  # fmt: skip
            hopper.copy_block(dv, [row, i_h * V + 128 * half], value_bars[2], o_0.index(1))
            hopper.copy_block(dv, [row, i_h * V + 128 * half + 64], value_bars[3], o_1.index(1))
        if half == V // 128 - 1:
            hopper.mbarrier.wait(g_bar, 0)
            s = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, tiles.RIGHT)), 1)
            t = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, tiles.RIGHT)), 0)
            zero = gl.full([128, 16], 0.0, gl.float32, tiles.TILE)
            y0 = tiles.log2_decays(g_rows, bias, a, lower_bound, rows_there, 0, GATE, BOUNDED)
            y1 = tiles.log2_decays(g_rows, bias, a, lower_bound, rows_there, 1, GATE, BOUNDED)
            x0 = tiles.selected_sums(y0, s <= t, (0.5, -0.5), zero)
            x1 = tiles.selected_sums(y1, s <= t, (0.5, -0.5), zero)
            half0 = tiles.last_row(x0)
            half1 = tiles.last_row(x1)
            rise0 = exp2(x0)
            rise1 = exp2(x1)
            if WIDE_G:
                hopper.block_barrier()
                hopper.copy_block(k, [row, i_kh * s_kh + channel], k_bar, k_rows)
                hopper.copy_block(q, [row, i_kh * s_qh + channel], q_bar, q_rows)
            if not BOUNDED:
                # Allow less decay over fewer rows; otherwise terms that cancel exceed the result.
                low = half0 + tiles.LEAST_HALF * (gl.maximum(16 - count, 0) / 16)
                low = (low, half1 + tiles.LEAST_HALF * (gl.minimum(C - count, 16) / 16))
                near = (gl.min(tiles.least_halves(low, 2), axis=0) <= tiles.FAR_HALF) == 0
        for i in gl.static_range(8):
            hopper.mbarrier.wait(value_bars[i], half)
        if TAILS and tail:
            for i in gl.static_range(2):
                tiles.clear_rows(o_0.index(i), count, BY_HALF_ROWS)
                tiles.clear_rows(o_1.index(i), count, BY_HALF_ROWS)
            hopper.fence_async_shared()
            hopper.block_barrier()
        if half == 0:
            m = gl.full([64, 32], 0.0, gl.float32, tiles.PAIRS)
            rows = gl.full([128, 64], 0.0, gl.float32, tiles.M64)
            dkc = gl.full([128, 32], 0.0, gl.float32, tiles.M32)
            m, rows, dkc = hopper.wgmma_wait(0, deps=(m, rows, dkc))
        if half > 0:
            # They do not move. A compiler that knew would keep the first addresses of all operands in local memory.
            never = (HV < 0).to(gl.int32)
            z_0 = hopper.seen_as(z_0, dtype, [1, 32, 64], HALVES).index(never)
            z_1 = hopper.seen_as(z_1, dtype, [1, 32, 64], HALVES).index(never)
            s_0 = hopper.seen_as(s_0, dtype, [1, 64, 128], ROWS).index(never)
            s_1 = hopper.seen_as(s_1, dtype, [1, 64, 128], ROWS).index(never)
            ds_0 = hopper.seen_as(ds_0, dtype, [1, 64, 128], ROWS).index(never)
            ds_1 = hopper.seen_as(ds_1, dtype, [1, 64, 128], ROWS).index(never)
            stacked_0 = hopper.seen_as(o_0, dtype, [1, 64, 64], HALVES).index(never)
            stacked_1 = hopper.seen_as(o_1, dtype, [1, 64, 64], HALVES).index(never)
        m = hopper.wgmma(stacked_0, z_0.permute((1, 0)), m, use_acc=half > 0, is_async=True)
        m = hopper.wgmma(stacked_1, z_1.permute((1, 0)), m, is_async=True)
        rows = hopper.wgmma(s_0.permute((1, 0)), stacked_0.permute((1, 0)), rows, use_acc=half > 0, is_async=True)
        rows = hopper.wgmma(s_1.permute((1, 0)), stacked_1.permute((1, 0)), rows, is_async=True)
        dkc = hopper.wgmma(ds_0.permute((1, 0)), z_0.permute((1, 0)), dkc, use_acc=half > 0, is_async=True)
        dkc = hopper.wgmma(ds_1.permute((1, 0)), z_1.permute((1, 0)), dkc, is_async=True)
        # Meanwhile the sums over v of S ⊙ dS: diagonals of products of blocks of 16 channels.
        squares = gl.full([8, 16, 16], 0.0, gl.float32, tiles.OWN)
        squares = tiles.products_of_channels(s_0, ds_0, squares)
        squares = tiles.products_of_channels(s_1, ds_1, squares)
        if half == 0:
            sums = gl.convert_layout(tiles.diagonals(squares), tiles.BY_CHANNEL) * (decay * o_scale)
        else:
            sums += gl.convert_layout(tiles.diagonals(squares), tiles.BY_CHANNEL) * (decay * o_scale)
        if LAST and initial_state is not None:
            sums = gl.where(length <= C, own_sums, sums)
        m, rows, dkc = hopper.wgmma_wait(0, deps=(m, rows, dkc))
    read = (s_0, s_1, ds_0, ds_1)
    for i in gl.static_range(4):
        read[i]._keep_alive()
    hopper.block_barrier()
    if WIDE_G and GATE != "none":
        hopper.mbarrier.expect(g_bar, C * 128 * 4)
        hopper.copy_block(g, [row, i_h * s_gh + channel], g_bar, g_again)
    if initial_state is not None and not LAST and length <= C:
        # A sequence of one chunk reads the caller's states, not their 16-bit copies.
        sums = decay * tiles.sum_of_ends(initial_state, grad_final_state, i_n * HV + i_h, channel, K, V, V_FIRST)

    # The place of do, dv and z is free.
    pr = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, tiles.PAIRS)), 1)
    pc = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, tiles.PAIRS)), 0)
    own = gl.sum(gl.where(pc == pr, m, 0.0).reshape([64, 2, 16]), axis=2)
    own_products.store(own.permute((1, 0)).reshape([128]))
    m = gl.where(pc < pr % 32, m, 0.0).to(dtype)
    # Blocks of 16 rows [tile of z, do or dv, their tile].
    all_pairs.store(m.reshape([64, 2, 16]).permute((1, 0, 2)).reshape([128, 16]))
    numbers.store(number)
    hopper.mbarrier.wait(k_bar, 0)
    hopper.mbarrier.wait(q_bar, 0)
    if TAILS and tail:
        tiles.clear_rows(q_rows, count, BY_ROWS)
        tiles.clear_rows(k_rows, count, BY_ROWS)
    hopper.block_barrier()

    dq_part, dk_part = tiles.halves_of(rows, 64, tiles.M32)
    blocks = (q_rows, k_rows, numbers, own_products, dg_far, g_again, g_bar)
    sums_out = (dbeta, dA_partial, dbias_partial)
    outputs = ((dq, dk, dg), (dq_block, dk_block, dg_block), (dq_rows, dk_rows, dg_rows))
    call = (count, tail, row, i_h, i_k, of_state, HV, (heads_qk, heads_qk, heads_g), norms, bias, a, lower_bound)
    # Each form stores its results itself: code behind a jump over much other code arrives late.
    if BOUNDED or near:
        nearby = near_gradients(
            dq_part, dk_part, dkc, rise0, rise1, half0, half1, o_scale, q_rows, k_rows, numbers, pairs
        )
        _store_gradients(nearby, sums, blocks, sums_out, outputs, call, False, K, GATE, TAILS, WIDE_G, LAST)
    else:
        if WIDE_G and GATE != "none":
            hopper.mbarrier.wait(g_bar, 1)
        if WIDE_G and GATE == "none":
            hopper.mbarrier.expect(g_bar, C * 128 * 4)
            hopper.copy_block(g, [row, i_h * s_gh + channel], g_bar, g_again)
            hopper.mbarrier.wait(g_bar, 1)
        levelled = far_gradients(
            dq_part, dk_part, dkc, sums, bias, a, lower_bound, rows_there, o_scale, g_again, q_rows, k_rows, numbers,
            pairs, dq_far, dk_far, dg_far, GATE,
        )  # fmt: skip
        _store_gradients(levelled, sums, blocks, sums_out, outputs, call, True, K, GATE, TAILS, WIDE_G, LAST)
    # The compiler gives away memory after its last use, but bulk copies still read blocks, and warps still wait at
    # barriers that others have passed.
    kept = (qk_rows, g_rows, o_0, o_1, z_0, z_1)
    for i in gl.static_range(6):
        kept[i]._keep_alive()
    if GROUPED or not BOUNDED:
        s_0._keep_alive()
        s_1._keep_alive()
    if WIDE_G or not BOUNDED:
        ds_0._keep_alive()
    if WIDE_G:
        ds_1._keep_alive()
    for i in gl.static_range(11):
        hopper.mbarrier.invalidate(bars[i])

"""The rows of a pair of ``gradients_hopper_persistent``, its numbers, the warp that loads and stores them, and what
programs tell each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from kda_core_nvidia.gradients_persistent_tiles import BY_CHANNEL, LANES, WARPS, gradients_of_gate
from kda_core_nvidia.hopper import copy_block, mbarrier, store_block, tma
from kda_core_nvidia.recurrence_stores_hopper import unknown


@gluon.jit
def block_of(far_pairs, first_block, i, count, K: gl.constexpr, FAR: gl.constexpr):
    """The i-th of the blocks that a launch takes: of pairs written down, or from ``first_block`` on."""
    BLOCKS: gl.constexpr = K // 128
    if FAR:
        block = gl.load(far_pairs + i // BLOCKS, mask=i < count, other=0) * BLOCKS + i % BLOCKS
    elif first_block is not None:
        block = first_block + i
    else:
        block = i
    return block


@gluon.jit
def place_of(table, pair, C: gl.constexpr):
    """First row of a pair, its first slot, where its states are, and its rows, which are more than a chunk's."""
    if table is None:
        row, slot, place, count = pair * C, pair * 2, pair, C
    else:
        at = table + pair.to(gl.int64) * 4
        row, slot, place, count = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    return row, slot, place, count


@gluon.jit
def first_channel(block, K: gl.constexpr):
    return block % (K // 128) * 128


@gluon.jit
def parts_of(block, HV, K: gl.constexpr):
    """The pair, the head and the first channel of a program's block: channel blocks fastest, then heads."""
    of_head = block // (K // 128)
    return of_head // HV, of_head % HV, first_channel(block, K)


@gluon.jit
def _at(places, i):
    """One of the two places of rows of q, k and g."""
    return places[0].index(i), places[1].index(i), places[2].index(i)


@gluon.jit
def _load_rows(rows, strides, table, block, HV, bar, place, K: gl.constexpr, C: gl.constexpr, pred):
    """Begin to load a pair's rows of g, k and q."""
    if table is not None:
        # It has no entry for a pair that is not there.
        block = gl.where(pred, block, 0)
    pair, i_h, channel = parts_of(block, HV, K)
    row, _, _, _ = place_of(table, pair, C)
    mbarrier.expect(bar, 3 * C * 128 * 2, pred=pred)
    for i in gl.static_range(2, -1, -1):
        copy_block(rows[i], [row, i_h * strides[i] + channel], bar, place[i], pred=pred)


@gluon.jit
def _store_rows(grads, table, block, HV, place, K: gl.constexpr, C: gl.constexpr, TAILS: gl.constexpr):
    """Store a whole pair's gradients, and wait until their place is free."""
    pair, i_h, channel = parts_of(block, HV, K)
    row, _, _, count = place_of(table, pair, C)
    column = i_h * K + channel
    if not TAILS or count == C:
        for i in gl.static_range(3):
            store_block(grads[i], [row, column], place[i])
        tma.store_wait(0)


@gluon.jit
def load_and_store(
    rows, do, dv, z, states, state_grads, grads, table, far_pairs, first_block, HV, blocks, strides, bars, places,
    values, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, FAR: gl.constexpr, TAILS: gl.constexpr,
):  # fmt: skip
    """The warp that loads, and that stores the gradients of rows.

    Args:
        rows, grads: descriptors of q, k and g, and of their gradients.
        strides: from head to head, of q, k, g and do.
    """
    values_ready, values_free, rows_ready, rows_done = bars
    z_0, z_1, o_0, o_1, s, ds = values
    first = gl.program_id(0)
    step = gl.num_programs(0)
    count = (blocks - first + step - 1) // step
    for i in gl.static_range(2):
        there = first + i * step < blocks
        block = block_of(far_pairs, first_block, first + i * step, blocks, K, FAR)
        _load_rows(rows, strides, table, block, HV, rows_ready.index(i), _at(places, i), K, C, there)
    # Values are of the recurrences, the kernel ahead.
    gdc_wait()
    before = 0
    for n in range(count):
        block = block_of(far_pairs, first_block, first + n * step, blocks, K, FAR)
        pair, i_h, channel = parts_of(block, HV, K)
        row, _, place, _ = place_of(table, pair, C)
        of_states = block // (K // 128) if table is None else place * HV + i_h
        for half in gl.static_range(V // 128):
            mbarrier.wait(values_free, ((n * (V // 128) + half) & 1) ^ 1)
            mbarrier.expect(values_ready, (3 * C * 128 + 2 * 128 * 128) * 2)
            copy_block(z, [of_states * C, 128 * half], values_ready, z_0)
            copy_block(z, [of_states * C, 128 * half + 64], values_ready, z_1)
            copy_block(do, [row, i_h * strides[3] + 128 * half], values_ready, o_0.index(0))
            copy_block(do, [row, i_h * strides[3] + 128 * half + 64], values_ready, o_1.index(0))
            copy_block(states, [of_states * V + 128 * half, channel], values_ready, s)
            copy_block(dv, [row, i_h * V + 128 * half], values_ready, o_0.index(1))
            copy_block(dv, [row, i_h * V + 128 * half + 64], values_ready, o_1.index(1))
            copy_block(state_grads, [of_states * V + 128 * half, channel], values_ready, ds)
        if n > 0:
            place = (n - 1) & 1
            at = _at(places, place)
            mbarrier.wait(rows_done.index(place), ((n - 1) >> 1) & 1)
            _store_rows(grads, table, before, HV, at, K, C, TAILS)
            following = first + (n + 1) * step
            new = block_of(far_pairs, first_block, following, blocks, K, FAR)
            _load_rows(rows, strides, table, new, HV, rows_ready.index(place), at, K, C, following < blocks)
        before = block
    if count > 0:
        place = (count - 1) & 1
        mbarrier.wait(rows_done.index(place), ((count - 1) >> 1) & 1)
        _store_rows(grads, table, before, HV, _at(places, place), K, C, TAILS)


@gluon.jit
def wide(a, b):
    """The product of two int32 in int64. The compiler would widen a factor before the loop and spill its upper half."""
    b = gl.to_tensor(b)
    if b.dtype == gl.int64:  # a stride past 2³¹
        product = a.to(gl.int64) * b
    else:
        product = gl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;", "=l,r,r", [a, b], dtype=gl.int64, is_pure=True, pack=1
        )
    return product


@gluon.jit
def load_numbers(given, table, pair, i_h, channel, HV, K: gl.constexpr, C: gl.constexpr, EVICTION: gl.constexpr):
    """Begin to load a pair's numbers for channels and rows: A_log, dt_bias, decays of its slots, beta, norms.

    As they are in memory; zeros stand for those that do not exist. A thread has one row.

    Args:
        given: beta, A_log, dt_bias, D, norms, and beta's strides by token and head.
        EVICTION: policy of the loads of those that one program reads, once.
    """
    beta, A_log, dt_bias, D, norms, s_bt, s_bh = given
    c = channel + gl.arange(0, 128, layout=BY_CHANNEL)
    r = gl.arange(0, 256, layout=LANES) % 64
    a = 0.0 if A_log is None else gl.load(A_log + i_h)
    bias = gl.full([128], 0.0, gl.float32, BY_CHANNEL)
    if dt_bias is not None:
        bias = gl.load(dt_bias + i_h * K + c)
    nq = gl.full([256], 0.0, gl.float32, LANES)
    nk = nq
    row, slot, _, count = place_of(table, pair, C)
    inside, other = (None, None) if table is None else (r < count, 0.0)
    decay = gl.load(D + wide(slot * HV + i_h, K) + c, eviction_policy=EVICTION)
    second_decay = gl.load(D + wide(slot * HV + i_h + HV, K) + c, eviction_policy=EVICTION)
    p_beta = beta + wide(row + r, s_bt) + wide(i_h, s_bh)
    b_beta = gl.load(p_beta, mask=inside, other=other, eviction_policy=EVICTION)
    if norms is not None:
        p_norms = norms + (wide(slot + r // 32, HV) + i_h) * C + r % 32
        nq = gl.load(p_norms, mask=inside, other=other, eviction_policy=EVICTION)
        nk = gl.load(p_norms + C // 2, mask=inside, other=other, eviction_policy=EVICTION)
    return a, bias, decay, second_decay, b_beta, nq, nk


@gluon.jit
def gate_gradients_of_pair(
    dg, g_rows, bias, rate, lower_bound, A_log, table, dA_partial, dbias_partial, block, pair, i_h, HV, there,
    K: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """Gradients of a pair's gate inputs from those of its log decays; stores its part of A_log's and dt_bias's."""
    BLOCKS: gl.constexpr = K // 128
    dg, summands, totals = gradients_of_gate(g_rows, bias, rate, lower_bound, dg, None if FAR else there, GATE)
    of_sums = block // BLOCKS
    if table is not None:
        _, _, state, _ = place_of(table, pair, C)
        of_sums = state * HV + i_h
    if dbias_partial is not None:
        c = first_channel(block, K) + gl.arange(0, 128, layout=BY_CHANNEL)
        gl.store(dbias_partial + of_sums.to(gl.int64) * K + c, gl.sum(totals, axis=1))
    if A_log is not None:
        # A number a warp.
        summand = gl.sum(gl.sum(summands.reshape([WARPS, 16, 16]), axis=2), axis=1)
        warp = gl.arange(0, WARPS, layout=summand.type.layout) + unknown(gl.to_tensor(0))
        gl.store(dA_partial + of_sums.to(gl.int64) * (BLOCKS * WARPS) + (block % BLOCKS * WARPS + warp), summand)
    return dg


@gluon.jit
def send(p, x, tag):
    """Store words of a float32 number and a tag, which are read as a whole (``receive``)."""
    gl.inline_asm_elementwise(
        "{ .reg .b64 word; mov.b64 word, {$2, $3}; st.relaxed.gpu.global.b64 [$1], word; mov.b32 $0, 0; }",
        "=r,l,r,r", [p.to(gl.int64), x, tag], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def receive(p, tag):
    """Wait for words with this tag; their numbers."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred late;
        .reg .b64 word;
        .reg .b32 found;
        again:
        ld.relaxed.gpu.global.b64 word, [$1];
        mov.b64 {$0, found}, word;
        setp.ne.b32 late, found, $2;
        @late bra again;
        }
        """,
        "=r,l,r", [p.to(gl.int64), tag], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip

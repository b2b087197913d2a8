"""``prepare`` for Hopper, written in Gluon: the same equations and outputs for bfloat16 rows of 128 or 256 channels.

A program takes two chunk slots of one value head or, where a sequence ends with the first of a pair, that slot of two
heads. Each of its four warps takes 64 channels of one slot and head (called a slot below), and products of pairs are
summed over a slot's two warps afterwards. Rows, decays and results pass through shared memory by bulk
copies. Log decays are summed where a thread holds 16 rows of two channels, so that a sum is one addition an element.
The factors 2^G are formed where the matrix unit takes its operands, which therefore never leave the registers.

With 256 channels (WHOLE) a program takes one slot. The second slot is then its channels from 128 on: sums are over all
four warps, and two warps each compute and store the same tile.

A tile's own pairs are products of factors from and to its start, in the range of bfloat16, as in ``prepare`` for
bounded decays. Without a bound each warp decides from the decays of its own tile and channels whether they allow that
(``LEAST_TOTAL``); where they do not, its pairs have hierarchical reference points. A chunk's bits therefore depend on
that chunk alone.

A backward runs it once more with the inverse and the norms that a forward kept, as it does ``prepare``.

In forwards of some heads the recurrence follows it pair by pair (``progress_hopper``). Its programs then take pairs in
a loop, those with which sequences begin first.

Tiles, blocks and products are named as in ``prepare``. Grid: pairs of slots · HV programs, heads fastest. A pair
begins with its sequence.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from kda_core.triton_lib.packing import is_padding
from kda_core_nvidia.hopper_tiles import sequence_of_pair, store_zeros
from kda_core_nvidia.prepare_slots_hopper import prepare_slots
from kda_core_nvidia.progress_hopper import leaves_room, next_pair, tell

_NUMBERS = [
    "scale", "lower_bound", "T", "N", "chunks", "HV", "group", "s_ob", "s_index", "pad_slot_id", "slots",
    "s_has", "s_final", "final_slots", "o_scale", "followers", "stay",
]  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def prepare_hopper(
    q, k, g,  # descriptors of [B · T rows, ..] by [2 C, 64], or PAIRED by [C, 64]
    keys,  # descriptor of [slots · HV · 3 · C, KP] by [C, 64]
    beta,  # [B, T, HV], rows at s_bt
    A_log, dt_bias,  # [HV] and [HV, K], or None
    P,  # [slots, HV, C, C] or None with an inverse
    D,  # [slots, HV, KP]
    X,  # [slots, HV, C, C], or in float32 as inverse; or None
    norms,  # [slots, HV, 2, C] or None; read with an inverse, else written
    inverse,  # [slots, HV, 3, 16, 16] float32 or None: X00, X10 and X11 as an earlier run wrote them
    o,  # [B, T, HV, V]; only rows that no recurrence writes
    values,  # descriptor of v like that of k, or None
    initial_state, final_state, has_state, final_indices,  # as in recurrence_hopper, or None
    cu_seqlens, indices,  # [N + 1] and [N], or None
    progress,  # as in ``progress_hopper``, of dense calls whose recurrence follows; or None
    scale, lower_bound, T, N,
    chunks,  # chunks of a dense sequence
    HV,
    group,  # value heads a key head
    s_qh, s_kh, s_gh, s_bt, s_bh, s_ob, s_ot, s_oh, s_index, pad_slot_id, slots, s_vh, s_in, s_ih, s_ik, s_iv, s_fn,
    s_fh, s_fk, s_fv, s_has, s_final, final_slots, o_scale,
    followers,  # with progress: programs of the recurrence
    stay,  # with progress: programs that stay beside one of the recurrence
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    V_FIRST: gl.constexpr, LAST_CONTIGUOUS: gl.constexpr,  # as in recurrence_hopper
    PAIRED: gl.constexpr,  # a slot without its second goes with the same slot of the next head
    FINISHED: gl.constexpr,  # sequences of up to 2 C rows are finished here, and their keys are not stored
    AHEAD: gl.constexpr,  # states of those, in float32, are fetched ahead
    G_BITS: gl.constexpr,  # of an element of g
    GATE: gl.constexpr, BOUNDED: gl.constexpr, L2NORM: gl.constexpr, SIGMOID: gl.constexpr, NEG_EIGVAL: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    if progress is not None:
        if leaves_room(progress, followers, stay):
            return
        # The pairs with which sequences begin first.
        items = (chunks + 1) // 2 * N * HV
        item = next_pair(progress)
        while item < items:
            following = next_pair(progress)
            i_h = item % HV
            i_n = item // HV % N
            i_chunk = item // HV // N * 2
            slot0 = i_n * chunks + i_chunk
            row0 = i_n * T + i_chunk * C
            count0 = gl.minimum(T - i_chunk * C, C)
            count1 = gl.maximum(gl.minimum(T - i_chunk * C - C, C), 0)
            prepare_slots(
                q, k, g, keys, beta, A_log, dt_bias, P, D, X, norms, inverse, o, values, initial_state, final_state,
                has_state, final_indices, i_n, i_n, i_h, i_h // group, i_h, slot0, slot0 + 1, row0, row0 + C, count0,
                count1, T, scale, lower_bound, HV, group, s_qh, s_kh, s_gh, s_bt, s_bh, s_ob, s_ot, s_oh, pad_slot_id,
                s_vh, s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk, s_fv, s_has, s_final, final_slots, o_scale, K, V, C,
                V_FIRST, LAST_CONTIGUOUS, False, False, False, False, True, G_BITS, GATE, BOUNDED, L2NORM, SIGMOID,
                NEG_EIGVAL,
            )  # fmt: skip
            tell(progress, item)
            item = following
        return
    i_h = gl.program_id(0) % HV
    i_pair = gl.program_id(0) // HV
    i_kh = i_h // group
    WHOLE: gl.constexpr = K == 256
    CHUNKS: gl.constexpr = 1 if WHOLE else 2
    if cu_seqlens is None:
        pairs = (chunks + (CHUNKS - 1)) // CHUNKS
        i_n = i_pair // pairs
        i_chunk = (i_pair % pairs) * CHUNKS
        slot0 = i_n * chunks + i_chunk
        bos = i_n * T
        length = T
    else:
        i_n = sequence_of_pair(cu_seqlens, N, i_pair, CHUNKS * C, BOUNDED or FINISHED)
        bos = gl.load(cu_seqlens + i_n).to(gl.int32)
        eos = T
        if i_n < N:
            eos = gl.load(cu_seqlens + i_n + 1).to(gl.int32)
        i_chunk = (i_pair - bos // (CHUNKS * C) - i_n) * CHUNKS
        slot0 = bos // C + i_n + i_chunk
        length = eos - bos
        if i_chunk * C >= length:
            return
    slot1 = slot0 + 1
    start = i_chunk * C
    row0 = bos + start
    row1 = row0 + C
    count0 = gl.minimum(length - start, C)
    count1 = gl.maximum(gl.minimum(length - start - C, C), 0)
    i_state = i_n.to(gl.int64)
    if (cu_seqlens is not None) | (indices is not None):
        skip = i_n == N
        if indices is not None and i_n < N:
            i_state = gl.load(indices + i_n.to(gl.int64) * s_index).to(gl.int64)
            skip = is_padding(i_state, pad_slot_id, slots)
        if skip:
            store_zeros(o, i_n, i_h, row0, start, count0 + count1, s_ob, s_ot, s_oh, V, 2 * C, cu_seqlens is None)
            return
    head1 = i_h
    if PAIRED and count1 == 0:
        if i_h % 2 == 1:
            return
        slot1, row1 = slot0, row0
        if i_h + 1 < HV:
            head1, count1 = i_h + 1, count0
    prepare_slots(
        q, k, g, keys, beta, A_log, dt_bias, P, D, X, norms, inverse, o, values, initial_state, final_state, has_state,
        final_indices, i_n, i_state, i_h, i_kh, head1, slot0, slot1, row0, row1, count0, count1, length,
        scale, lower_bound, HV, group, s_qh, s_kh, s_gh, s_bt, s_bh, s_ob, s_ot, s_oh, pad_slot_id,
        s_vh, s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk, s_fv, s_has, s_final, final_slots, o_scale,
        K, V, C, V_FIRST, LAST_CONTIGUOUS, PAIRED, FINISHED, AHEAD, cu_seqlens is not None, False, G_BITS, GATE,
        BOUNDED, L2NORM, SIGMOID, NEG_EIGVAL,
    )  # fmt: skip

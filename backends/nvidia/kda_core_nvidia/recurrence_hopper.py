"""``recurrence`` for Hopper, written in Gluon: the same equations, with loads in a warp of their own and the matrix
unit kept busy.

    r = v − ke S        o = qg S + P r        S ← D ⊙ S + kAᵀ r

Triton waits for every product before it starts the next one, and the warps that multiply also start the loads, with a
barrier for each. Here one more warp loads, a few chunks ahead. The products of a chunk are ke S and qg S at once (of 64
columns, which takes the unit as long as 32), then the new state and P r; while they run, the previous chunk's output is
stored. Where 256 key channels leave the multiplying warps no registers for that, others store it (STORERS), and also
where a backward is to have more: z = X r and the states at the starts of pairs of chunks, of the same sums as
``backward_hopper`` has.

Where checkpoints lie within chunks (LACKS), the last chunk of every piece between two of them has so many rows fewer.
Pieces have slots as packed sequences have. The kernel counts rows as if all these chunks were whole, so that chunk i
begins at row i C, and takes off what the pieces before it lack where it reads and writes rows.

The state is held transposed, Sᵀ [BV, KP], as there. Every block of value channels is whole (V is a multiple of BV) and
rows of v are 16-byte aligned; other calls take ``recurrence``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from kda_core.triton_lib.packing import first_piece_of, is_padding, starts_from_state
from kda_core_nvidia.hopper import block_barrier, copy_block, fence_async_shared, mbarrier, wgmma, wgmma_wait
from kda_core_nvidia.hopper_tiles import add
from kda_core_nvidia.progress_hopper import prepared
from kda_core_nvidia.recurrence_stores_hopper import (
    chunk_buffers,
    halves,
    pair_of_barriers,
    piece_end,
    place_of,
    store_chunks,
    store_output,
    unknown,
)

_NUMBERS = [
    "T", "N", "chunks", "HV", "s_vb", "s_ob", "s_index", "pad_slot_id", "slots", "s_has", "s_final", "final_slots",
    "s_row", "s_column", "columns", "checkpoint_slots", "every", "o_scale",
]  # fmt: skip


@gluon.jit
def _store_columns(p_state, x, first, s_v, s_k, K: gl.constexpr, BV: gl.constexpr, COLUMNS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, LAYOUT))
    o_k = unknown(first) + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    at = p_state + o_v[:, None].to(gl.int64) * s_v + o_k[None, :].to(gl.int64) * s_k
    gl.store(at, x.to(p_state.dtype.element_ty), mask=(o_v >= 0)[:, None] & (o_k < K)[None, :])


@gluon.jit
def store_state(p_state, S, s_v, s_k, K: gl.constexpr, BV: gl.constexpr, KP: gl.constexpr):
    """Store a block [BV, KP] of a state, a quarter of the columns after the other."""
    first, last = halves(S, BV, KP)
    quarters = halves(first, BV, KP // 2) + halves(last, BV, KP // 2)
    for i in gl.static_range(4):
        _store_columns(p_state, quarters[i], gl.to_tensor(i * (KP // 4)), s_v, s_k, K, BV, KP // 4)


@gluon.jit
def _load(
    pairs, single, P, X, decays, values, progress, heads, value_row, value_column, first_slot, HV, i_h, length, every,
    bars, buffers, C: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, LACKS: gl.constexpr,
):  # fmt: skip
    """The warp that loads: chunk by chunk into free stages; values only where all rows of a chunk exist."""
    ready, free, _, _ = bars
    pair_buffer, a_buffer, p_buffer, x_buffer, d_buffer, v_buffer = buffers
    SQUARES: gl.constexpr = C * C if X is None else 2 * C * C
    if progress is None:
        gdc_wait()
    pairs_there = 0
    for i in range((length + C - 1) // C):
        if progress is not None and i // 2 >= pairs_there:
            pairs_there = prepared(progress, i // 2, (length + 2 * C - 1) // (2 * C), heads)
        stage = i % STAGES
        row, end, slot = value_row, length, first_slot + i
        if LACKS > 0:
            piece = i // every
            row -= (piece * LACKS).to(gl.int32)
            end = piece_end(piece, length, every, C, LACKS)
            slot = (row + i * C) // C + first_slot + piece
        slot = (slot * HV + i_h).to(gl.int32)
        whole = end >= (i + 1) * C
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, (3 * C * KP + SQUARES + C * BV) * 2 + KP * 4, pred=whole)
        mbarrier.expect(bar, (3 * C * KP + SQUARES) * 2 + KP * 4, pred=whole == 0)
        copy_block(pairs, [slot * (3 * C), 0], bar, pair_buffer.index(stage))
        copy_block(decays, [slot, 0], bar, d_buffer.index(stage))
        copy_block(values, [row + i * C, value_column], bar, v_buffer.index(stage), pred=whole)
        copy_block(single, [slot * (3 * C) + 2 * C, 0], bar, a_buffer.index(stage))
        copy_block(P, [slot * C, 0], bar, p_buffer.index(stage))
        if X is not None:
            copy_block(X, [slot * C, 0], bar, x_buffer.index(stage))
    if progress is not None:
        # Kernels behind the recurrence must see all that ``prepare`` wrote.
        gdc_wait()


@gluon.jit
def _values(
    i, n, p_v, s_vt, end, lacking, ready, v_buffer, L_ROWS: gl.constexpr, BV: gl.constexpr, C: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Wait for chunk i, if there is one, of a piece that ends there; its values, transposed."""
    stage = i % STAGES
    mbarrier.wait(ready.index(stage), (i // STAGES) & 1, pred=i < n)
    if (i < n) & (end < (i + 1) * C):
        # The last rows of a sequence or piece: what follows them is another's, and not to be read.
        o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
        every_v = (gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS)) >= 0)[None, :]
        m_v = (o_r < end - i * C)[:, None] & every_v
        first = gl.to_tensor(C).to(gl.int64) * i - lacking
        v_buffer.index(stage).store(gl.load(p_v + first * s_vt, mask=m_v, other=0.0))
        fence_async_shared()
        block_barrier()
    return v_buffer.index(stage).permute((1, 0))


@gluon.jit
def _keep(S, column, checkpoints, K: gl.constexpr, BV: gl.constexpr, KP: gl.constexpr):
    """Store a checkpoint in the slot that the table names, if it names one."""
    p_table, p_kept, s_column, columns, kept_slots, pad_slot_id, s_cn, s_cv, s_ck = checkpoints
    slot = gl.load(p_table + column.to(gl.int64) * s_column, mask=column < columns, other=-1).to(gl.int64)
    if is_padding(slot, pad_slot_id, kept_slots) == 0:
        store_state(p_kept + slot * s_cn, S, s_cv, s_ck, K, BV, KP)


@gluon.jit
def _multiply(
    p_state, given, s_iv, s_ik, checkpoints, every, p_v, p_o, s_vt, s_ot, length, bars, buffers, out_buffers, minus_eye,
    o_scale, L_ROWS: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr,
    LIFT: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr, STORERS: gl.constexpr, LACKS: gl.constexpr,
):  # fmt: skip
    """The warps that multiply; answers the final state.

    Args:
        p_state: the initial state, or None. It is loaded here, and not before the warps part: those that load would
            wait for it.
        given: whether to start from it, not from zero.
        checkpoints: of ``_keep``, for the states after every ``every`` chunks; None: none are kept.
        buffers: without X neither z nor states are wanted.
    """
    ready, free, full, empty = bars
    pair_buffer, a_buffer, p_buffer, x_buffer, d_buffer, v_buffer = buffers
    o_buffer, z_buffer, s_buffer = out_buffers
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = p_v.dtype.element_ty
    L_SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C, 16])
    L_PAIR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 2 * C, 16])
    L_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    WIDE: gl.constexpr = KP > 128
    PART: gl.constexpr = KP // 2 if WIDE else KP
    L_LEFT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, PART, 16]), 2)
    S = gl.full([BV, KP], 0.0, gl.float32, L_STATE)
    if p_state is not None:
        o_sv = gl.arange(0, BV, layout=gl.SliceLayout(1, L_STATE))
        o_sk = unknown(gl.to_tensor(0)) + gl.arange(0, KP, layout=gl.SliceLayout(0, L_STATE))
        at = p_state + o_sv[:, None].to(gl.int64) * s_iv + o_sk[None, :].to(gl.int64) * s_ik
        S = gl.load(at, mask=((o_sk < K)[None, :]) & ((o_sv >= 0)[:, None]) & given, other=0.0).to(gl.float32)
    n = (length + C - 1) // C
    out = gl.full([BV, C], 0.0, gl.float32, L_SMALL)
    # Accumulators of products that start from nothing are given those of the previous chunk, which are not read:
    # registers set to zero here would make the compiler wait for every product in flight.
    both = gl.full([BV, 2 * C], 0.0, gl.float32, L_PAIR)
    scaled = gl.full([BV, C], 0.0, gl.float32, L_SMALL)
    # Products behind the new state's.
    MORE: gl.constexpr = 1 if x_buffer is None else 2
    # Where a stage more is loaded, the next chunk's product with v begins before its state is known.
    AHEAD: gl.constexpr = STAGES > 3 and checkpoints is None
    BEHIND: gl.constexpr = 1 if AHEAD else 0
    column = n * 0
    if AHEAD:
        v_block = _values(0, n, p_v, s_vt, length, 0, ready, v_buffer, L_ROWS, BV, C, STAGES)
        both = wgmma(v_block, minus_eye, both, use_acc=False, is_async=True)
    for i in range(n):
        stage = i % STAGES
        before = column
        if checkpoints is not None and i == (column + 1) * every:
            _keep(S, column, checkpoints, K, BV, KP)
            column += 1
        part, rest = halves(S, BV, KP) if WIDE else (S, None)
        rounded = part.to(dtype)
        left = gl.convert_layout(rounded, L_LEFT)
        rows = (out * o_scale).to(dtype)
        z_rows = scaled.to(dtype)
        if not AHEAD:
            end = piece_end(column, length, every, C, LACKS)
            v_block = _values(i, n, p_v, s_vt, end, column * LACKS, ready, v_buffer, L_ROWS, BV, C, STAGES)
        if not WIDE:
            S = S * d_buffer.index(stage).load(L_STATE)
        # [ke S − v | qg S], times LIFT
        if not AHEAD:
            both = wgmma(v_block, minus_eye, both, use_acc=False, is_async=True)
        pair = pair_buffer.index(stage)
        both = wgmma(left, pair.slice(0, PART, dim=1).permute((1, 0)), both, is_async=True)
        # Meanwhile the previous chunk's output is stored, or handed to the warps that store.
        if STORERS == 0:
            # Every warp has done with the previous stage.
            block_barrier()
            mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
            store_output(i - 1, rows, p_o, s_ot, length, before, every, L_ROWS, BV, C, LACKS)
        else:
            mbarrier.wait(empty.index(i % OUT), ((i // OUT) & 1) ^ 1)
            o_buffer.index(i % OUT).permute((1, 0)).store(rows)
            if x_buffer is not None:
                z_buffer.index(i % OUT).permute((1, 0)).store(z_rows)
                if i % 2 == 0:
                    s_buffer.index(0).store(rounded)
            block_barrier()
            mbarrier.arrive(full.index(i % OUT), count=1)
        if WIDE:
            # All of the state as an operand, beside the state itself, would be more than the registers hold.
            both, left = wgmma_wait(0, deps=(both, left))
            left = gl.convert_layout(rest.to(dtype), L_LEFT)
            S = S * d_buffer.index(stage).load(L_STATE)
            both = wgmma(left, pair.slice(PART, PART, dim=1).permute((1, 0)), both, is_async=True)
        both, left = wgmma_wait(0, deps=(both, left))
        r, out = both.reshape([BV, 2, C]).permute([0, 2, 1]).split()
        residual = gl.convert_layout((-r * (1 / LIFT)).to(dtype), L_LEFT)
        out = gl.convert_layout(out, L_SMALL) * (1 / LIFT)
        S = wgmma(residual, a_buffer.index(stage), S, is_async=True)
        out = wgmma(residual, p_buffer.index(stage).permute((1, 0)), out, is_async=True)
        if x_buffer is not None:
            x_block = x_buffer.index(stage).permute((1, 0))
            scaled = wgmma(residual, x_block, scaled, use_acc=False, is_async=True)
        if AHEAD:
            v_block = _values(i + 1, n, p_v, s_vt, length, 0, ready, v_buffer, L_ROWS, BV, C, STAGES)
            both = wgmma(v_block, minus_eye, both, use_acc=False, is_async=True)
        S, residual = wgmma_wait(BEHIND + MORE, deps=(S, residual))
        out, residual = wgmma_wait(BEHIND + MORE - 1, deps=(out, residual))
        if x_buffer is not None:
            scaled, residual = wgmma_wait(BEHIND, deps=(scaled, residual))
    if AHEAD:
        both = wgmma_wait(0, deps=(both,))
    rows = (out * o_scale).to(dtype)
    if STORERS == 0:
        store_output(n - 1, rows, p_o, s_ot, length, column, every, L_ROWS, BV, C, LACKS)
    elif n > 0:
        mbarrier.wait(empty.index(n % OUT), ((n // OUT) & 1) ^ 1)
        o_buffer.index(n % OUT).permute((1, 0)).store(rows)
        if x_buffer is not None:
            z_buffer.index(n % OUT).permute((1, 0)).store(scaled.to(dtype))
        block_barrier()
        mbarrier.arrive(full.index(n % OUT), count=1)
    if checkpoints is not None and (n == (column + 1) * every) & (length == n * C):
        _keep(S, column, checkpoints, K, BV, KP)
    return S, n


@gluon.jit
def _specialized(multiplies, loads, stores, STORERS: gl.constexpr):
    """The final state, from the arguments of each kind of warps."""
    if STORERS == 0:
        S, _ = gl.warp_specialize([(_multiply, multiplies), (_load, loads)], [1], [40])
    else:
        S, _ = gl.warp_specialize(
            [(_multiply, multiplies), (_load, loads), (store_chunks, stores)], [1, STORERS], [40, 40]
        )
    return S


@gluon.jit
def _sequence(
    i_n, i_h, i_v, pairs, single, P, X, decays, values, v, o, z, states, initial_state, final_state, cu_seqlens,
    indices, has_state, progress, final_indices, checkpoints, checkpoint_pool, T, chunks, HV, s_vb, s_vt, s_vh, s_ob,
    s_ot, s_oh, s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk, s_fv, s_index, pad_slot_id, slots, s_has, s_final,
    final_slots, s_cn, s_ch, s_ck, s_cv, s_row, s_column, columns, checkpoint_slots, every, o_scale,
    K: gl.constexpr, V: gl.constexpr, KP: gl.constexpr, C: gl.constexpr, LIFT: gl.constexpr, UNIT: gl.constexpr,
    V_FIRST: gl.constexpr, LAST_CONTIGUOUS: gl.constexpr, LAST_STATE: gl.constexpr, BV: gl.constexpr,
    STAGES: gl.constexpr, OUT: gl.constexpr, STORERS: gl.constexpr, FINISHED: gl.constexpr, ODD: gl.constexpr,
    LACKS: gl.constexpr,
):  # fmt: skip
    """A block of value channels of a head of a sequence."""
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = v.dtype.element_ty
    L_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [num_warps, 1], [1, 0])

    if cu_seqlens is None:
        i_b = i_n * UNIT
        bos = gl.to_tensor(0).to(gl.int64)
        length = T
        first_slot = i_n * chunks
        value_row = (i_n * T).to(gl.int32)
    else:
        i_b = gl.to_tensor(0).to(gl.int64)
        bos = gl.load(cu_seqlens + i_n).to(gl.int64)
        length = (gl.load(cu_seqlens + i_n + 1).to(gl.int64) - bos).to(gl.int32)
        first_slot = bos // C + i_n
        value_row = bos.to(gl.int32)
    if LACKS > 0:
        piece = every.to(gl.int64) * C - LACKS
        _, first_slot = first_piece_of(cu_seqlens, i_n, bos, T, piece)  # this and the chunk's row give its slot
        length += (length // piece).to(gl.int32) * LACKS
    i_state = i_n
    takes = i_n == i_n
    if indices is not None:
        i_state = gl.load(indices + i_n * s_index).to(gl.int64)
        takes = is_padding(i_state, pad_slot_id, slots) == 0
    if LAST_CONTIGUOUS:
        if V_FIRST:
            s_ik = 1
            s_fk = 1
            s_ck = 1
        else:
            s_iv = 1
            s_fv = 1
            s_cv = 1
    if takes:
        p_state, given = None, True
        if initial_state is not None:
            p_state = initial_state + i_state * s_in + i_h * s_ih + i_v.to(gl.int64) * BV * s_iv
            if has_state is not None:
                given = starts_from_state(has_state, i_n, s_has)
        o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
        o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS))
        p_v = v + i_b * s_vb + bos * s_vt + i_h * s_vh + (o_r[:, None].to(gl.int64) * s_vt + o_v[None, :])
        p_o = o + i_b * s_ob + bos * s_ot + i_h * s_oh
        rows_o = p_o + (o_r[:, None].to(gl.int64) * s_ot + o_v[None, :])
        value_column = (i_h * s_vh).to(gl.int32) + i_v * BV

        VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
        pair_buffer, a_buffer, p_buffer, v_buffer, d_buffer = chunk_buffers(dtype, 2 * C, C, KP, BV, STAGES)
        ready, free = pair_of_barriers(STAGES)
        o_buffer, full, empty = v_buffer, free, free
        x_buffer, z_buffer, s_buffer = None, None, None
        p_states, p_z, place0, heads, all_heads, kept = None, None, None, None, None, None
        if STORERS > 0:
            o_buffer = gl.allocate_shared_memory(dtype, [OUT, C, BV], VALUES)
            full, empty = pair_of_barriers(OUT)
        if states is not None:
            SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
            x_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
            z_buffer = gl.allocate_shared_memory(dtype, [OUT, C, BV], VALUES)
            # Two chunks wait to be stored, of which one begins a pair.
            gl.static_assert(OUT == 2)
            STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, KP], dtype)
            s_buffer = gl.allocate_shared_memory(dtype, [1, BV, KP], STATE)
            p_states = states + (i_h * V + i_v * BV) * KP
            p_z = z + i_h * (2 * C * V) + i_v * BV
            place0 = place_of(first_slot, i_n, cu_seqlens, bos, chunks, C, ODD)
            heads = HV
        if progress is not None:
            progress += (i_n * HV + i_h).to(gl.int32)
            all_heads = gl.num_programs(0) // (V // BV)
        # −I, times LIFT: as an operand of a product, v needs no change of layout.
        L_EYE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [num_warps, 1], [1, 0])
        e_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_EYE))
        e_c = gl.arange(0, 2 * C, layout=gl.SliceLayout(0, L_EYE))
        eye = gl.where(e_r[:, None] == e_c[None, :], -LIFT, 0.0).to(dtype)
        EYE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 2 * C], dtype)
        minus_eye = gl.allocate_shared_memory(dtype, [C, 2 * C], EYE, eye)
        fence_async_shared()
        block_barrier()

        if checkpoints is not None:
            kept = (
                checkpoints + i_n * s_row, checkpoint_pool + i_h * s_ch + i_v.to(gl.int64) * BV * s_cv, s_column,
                columns, checkpoint_slots, pad_slot_id, s_cn, s_cv, s_ck,
            )  # fmt: skip
        bars = (ready, free, full, empty)
        buffers = (pair_buffer, a_buffer, p_buffer, x_buffer, d_buffer, v_buffer)
        out_buffers = (o_buffer, z_buffer, s_buffer)
        S = _specialized((
            p_state, given, s_iv, s_ik, kept, every, p_v, rows_o, s_vt, s_ot, length, bars, buffers, out_buffers,
            minus_eye, o_scale, L_ROWS, K, BV, C, KP, LIFT, STAGES, OUT, STORERS, LACKS,
        ), (
            pairs, single, P, X, decays, values, progress, all_heads, value_row, value_column, first_slot, HV, i_h,
            length, every, bars, buffers, C, KP, BV, STAGES, LACKS,
        ), (
            p_o + i_v * BV, p_states, p_z, place0, heads, s_ot, length, every, bars, out_buffers, V, C, KP, BV, STAGES,
            OUT, STORERS, LACKS,
        ), STORERS)  # fmt: skip

        writes = i_n >= 0
        if LAST_STATE:
            writes = i_n == gl.num_programs(0) // (V // BV) // HV - 1
            i_state -= i_n
        if final_indices is not None:
            i_state = gl.load(final_indices + i_n * s_final).to(gl.int64)
            writes = is_padding(i_state, pad_slot_id, final_slots) == 0
        if ((has_state is not None) | (final_indices is not None)) and not LAST_STATE:
            # A sequence without tokens leaves its slot alone.
            writes = writes & (length > 0)
        if final_state is not None and writes:
            p_final = final_state + i_state * s_fn + i_h * s_fh + i_v.to(gl.int64) * BV * s_fv
            store_state(p_final, S, s_fv, s_fk, K, BV, KP)
        if FINISHED:
            # The next sequence's barriers lie in the same place.
            block_barrier()
            for s in gl.static_range(STAGES):
                mbarrier.invalidate(ready.index(s))
                mbarrier.invalidate(free.index(s))


@gluon.jit(do_not_specialize=_NUMBERS)
def recurrence_hopper(
    pairs,  # descriptor of keys as [slots · HV · 3 · C, KP] by [2 C, KP]: ke and qg of a chunk
    single,  # the same by [C, KP]: kA
    P,  # descriptor of [slots · HV · C, C] by [C, C]
    decays,  # descriptor of D as [slots · HV, KP] by [1, KP]
    values,  # descriptor of v as a matrix with a row for each of B · T, by [C, BV]
    X,  # as P, or None: of what follows only o is wanted
    v, o,  # [B, T, HV, V]
    z, states,  # for a backward by pairs of chunks, as in ``backward_hopper``, or None
    initial_state,  # [N or slots of a pool, HV, K, V] (or [..., V, K]) or None
    final_state,  # likewise; the pool itself when indices is given
    cu_seqlens, indices, has_state,  # [N + 1], [N] and [N] bool, or None
    progress,  # as in ``progress_hopper``, where it follows ``prepare_hopper`` pair by pair; or None
    final_indices,  # [N] slots of final_state, or None: indices
    checkpoints,  # [N, columns] slots of checkpoint_pool, or None
    checkpoint_pool,  # [checkpoint_slots, HV, K, V] (or [..., V, K]) or None
    T, N,
    chunks,  # chunks of a dense sequence
    HV, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk, s_fv, s_index, pad_slot_id, slots,
    s_has, s_final, final_slots, s_cn, s_ch, s_ck, s_cv, s_row, s_column, columns, checkpoint_slots,
    every,  # chunks from checkpoint to checkpoint
    o_scale,  # what qg and P leave of the scale
    K: gl.constexpr, V: gl.constexpr, KP: gl.constexpr, C: gl.constexpr, LIFT: gl.constexpr, UNIT: gl.constexpr,
    V_FIRST: gl.constexpr,
    LAST_CONTIGUOUS: gl.constexpr,  # the states' last stride is 1
    LAST_STATE: gl.constexpr,  # sequences are segments: only the last one's state is wanted, or as final_indices say
    BV: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr, STORERS: gl.constexpr,
    FINISHED: gl.constexpr,  # prepare_hopper has finished sequences of up to 2 C rows, packed
    ODD: gl.constexpr,  # a sequence may have an odd number of chunks
    LACKS: gl.constexpr,  # rows that ``every`` chunks have more than there are from checkpoint to checkpoint
):  # fmt: skip
    BLOCKS: gl.constexpr = V // BV
    call = (
        pairs, single, P, X, decays, values, v, o, z, states, initial_state, final_state, cu_seqlens, indices,
        has_state, progress, final_indices, checkpoints, checkpoint_pool, T, chunks, HV, s_vb, s_vt, s_vh, s_ob, s_ot,
        s_oh, s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk, s_fv, s_index, pad_slot_id, slots, s_has, s_final, final_slots,
        s_cn, s_ch, s_ck, s_cv, s_row, s_column, columns, checkpoint_slots, every, o_scale,
    )  # fmt: skip
    if FINISHED or indices is not None:
        # Programs without work must not end before the kernel ahead does, either.
        gdc_wait()
    if FINISHED:
        # Each program finds the sequences that are left and takes its share of their heads' blocks: to start programs
        # for all sequences takes longer.
        LINE: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        COUNT: gl.constexpr = 128 * gl.num_warps()
        item = gl.program_id(0)
        for first in range(0, N, COUNT):
            n = first + gl.arange(0, COUNT, layout=LINE)
            bos = gl.load(cu_seqlens + n, mask=n < N, other=0)
            length = gl.load(cu_seqlens + n + 1, mask=n < N, other=0) - bos
            left = (n < N) & ((length <= 0) | (length > 2 * C))
            numbers = gl.associative_scan(left.to(gl.int32), 0, add)
            items = gl.max(numbers, 0) * (HV * BLOCKS)
            for i in range(item, items, gl.num_programs(0)):
                i_n = first + gl.sum((numbers <= i // BLOCKS // HV).to(gl.int32), 0)
                _sequence(
                    i_n.to(gl.int64), (i // BLOCKS % HV).to(gl.int64), i % BLOCKS, *call, K, V, KP, C, LIFT, UNIT,
                    V_FIRST, LAST_CONTIGUOUS, LAST_STATE, BV, STAGES, OUT, STORERS, FINISHED, ODD, LACKS,
                )  # fmt: skip
            # Its next block, counted from the end of these.
            programs = gl.num_programs(0)
            item += gl.maximum(items - item + programs - 1, 0) // programs * programs - items
    else:
        # Blocks of a head's channels side by side: what they share is read from memory once. A single one is number 0,
        # but where the compiler knows that, 64 sequences of 128 rows take 4% longer.
        i_v = gl.program_id(0) % BLOCKS if BLOCKS > 1 else gl.program_id(1)
        i_h = (gl.program_id(0) // BLOCKS % HV).to(gl.int64)
        i_n = (gl.program_id(0) // BLOCKS // HV).to(gl.int64)
        _sequence(
            i_n, i_h, i_v, *call, K, V, KP, C, LIFT, UNIT, V_FIRST, LAST_CONTIGUOUS, LAST_STATE, BV, STAGES, OUT,
            STORERS, FINISHED, ODD, LACKS,
        )  # fmt: skip

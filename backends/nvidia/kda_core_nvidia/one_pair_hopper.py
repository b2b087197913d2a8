"""The recurrence of sequences of one chunk or two, with which ``prepare_hopper`` ends: what it prepared stays on the
chip.

    r = v − ke S        o = qg S + P r        S ← D ⊙ S + kAᵀ r

Sums are those of ``recurrence_hopper``, in the same order: no bit shows which of the two kernels had a sequence.

States in float32 are fetched a block ahead, the first one while chunks are prepared: a multiprocessor then has room for
two programs instead of three, and they wait less.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.packing import is_padding
from kda_core_nvidia import hopper
from kda_core_nvidia.recurrence_stores_hopper import unknown

BLOCK = gl.constexpr(64)
"""Value channels at a time, and key channels of a block in shared memory."""

STATE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 16, [1, 0]))
"""Half of a block of a state as it lies in memory: 16 bytes change places with the row, so that threads which read
different rows meet in few banks."""


@gluon.jit
def ask_for_state(buffer, initial_state, i_state, head, block, s_n, s_h, s_k, s_v, V_FIRST: gl.constexpr):
    """Start to copy a block of 64 value channels of a state to shared memory, whose last stride is 1."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))[:, None].to(gl.int64)
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))[None, :].to(gl.int64)
    at = initial_state + i_state * s_n + head.to(gl.int64) * s_h
    for half in gl.static_range(2):
        if V_FIRST:
            hopper.copy_elements(buffer.index(half), at + (block * BLOCK + row) * s_v + (half * BLOCK + column))
        else:
            hopper.copy_elements(buffer.index(half), at + (half * BLOCK + row) * s_k + (block * BLOCK + column))
    hopper.async_copy.commit_group()


@gluon.jit
def _taken(buffer, starts, HALF: gl.constexpr, V_FIRST: gl.constexpr):
    x = (buffer if V_FIRST else buffer.permute((1, 0))).load(HALF)
    return gl.where(starts, x, 0.0)


@gluon.jit
def _columns(first, LAYOUT: gl.constexpr):
    """Key channels of a half, int64."""
    return (unknown(first) + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT)))[None, :].to(gl.int64)


@gluon.jit
def finish_pair(
    k_blocks, q_blocks, w_blocks, v_blocks, squares, totals, state_buffer, bar, values, P, o, initial_state,
    final_state, final_indices, starts, i_n, i_state, i_h, head1, index0, index1, row0, row1, count0, count1, s_vh,
    s_ot, s_oh, s_in, s_ih, s_ik, s_iv, s_fn, s_fh, s_fk, s_fv, pad_slot_id, s_final, final_slots, o_scale,
    V: gl.constexpr, C: gl.constexpr, V_FIRST: gl.constexpr, LAST_CONTIGUOUS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Output and final state of two chunks of a head, or of one chunk of two heads.

    Args:
        k_blocks, q_blocks, w_blocks: ke, qg and kA of both slots as [half of the channels, slot] blocks [C, 64].
        v_blocks: room for four such blocks, which nobody reads any more.
        squares: room for [4, C, C], likewise.
        totals: D as [half of the channels, slot], 64 each, and room for as many.
        bar: a barrier that has been waited for once.
        values: descriptor of v, whose rows begin with ``row0`` and ``row1``.
        o: output of the first row.
        starts: the sequence starts from its state, rather than from zero.
        head1: the second slot's head; ``i_h`` where the second slot is the next chunk, or nobody's (``count1`` is 0).
        index0, index1: rows of P, [.., C, C], which this program has stored.
        AHEAD: states have a buffer, for which the first block has been asked where the sequence starts from it.
    """
    dtype: gl.constexpr = k_blocks.dtype
    decays = hopper.seen_as(totals, gl.float32, [8, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BLOCKS: gl.constexpr = V // BLOCK
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, HALF, 2)
    LEFT_SMALL: gl.constexpr = gl.DotOperandLayout(0, SMALL, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    if LAST_CONTIGUOUS:
        if V_FIRST:
            s_ik = 1
            s_fk = 1
        else:
            s_iv = 1
            s_fv = 1
    hopper.mbarrier.expect(bar, 2 * BLOCKS * C * BLOCK * 2)
    for b in gl.static_range(BLOCKS):
        hopper.copy_block(values, [row0, i_h * s_vh + b * BLOCK], bar, v_blocks.index(b))
        hopper.copy_block(values, [row1, head1 * s_vh + b * BLOCK], bar, v_blocks.index(BLOCKS + b))
    r = gl.arange(0, C, layout=gl.SliceLayout(1, SQUARE))[:, None]
    c = gl.arange(0, C, layout=gl.SliceLayout(0, SQUARE))[None, :]
    squares.index(0).store(gl.load(P + index0.to(gl.int64) * (C * C) + (r * C + c)))
    # Nobody's slot may lie behind the last one.
    there = (r * C + c >= 0) & (count1 > 0)
    squares.index(1).store(gl.load(P + index1.to(gl.int64) * (C * C) + (r * C + c), mask=there, other=0.0))
    squares.index(2).store(gl.where(r == c, -1.0, 0.0).to(dtype))
    hopper.mbarrier.wait(bar, 1)
    row = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))[:, None]
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, ROWS))[None, :]
    if (count0 < C) | (count1 < C):
        # The rows that follow a sequence are another's.
        for b in gl.static_range(2 * BLOCKS):
            v_block = v_blocks.index(b)
            inside = (row < (count0 if b < BLOCKS else count1)) & (column >= 0)
            v_block.store(gl.where(inside, v_block.load(ROWS), gl.full([C, BLOCK], 0.0, dtype, ROWS)))
    hopper.fence_async_shared()
    hopper.block_barrier()

    i_final = i_state if final_indices is None else gl.load(final_indices + i_n * s_final).to(gl.int64)
    heads = 1 + (head1 > i_h).to(gl.int32)
    chunks = 1 + ((head1 == i_h) & (count1 > 0)).to(gl.int32)
    for i in range(heads * BLOCKS):
        head = (i_h + i // BLOCKS).to(gl.int64)
        v = i % BLOCKS * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, HALF))
        S0 = gl.full([BLOCK, BLOCK], 0.0, gl.float32, HALF)
        S1 = gl.full([BLOCK, BLOCK], 0.0, gl.float32, HALF)
        if AHEAD:
            hopper.async_copy.wait_group(0)
            hopper.block_barrier()
            S0 = _taken(state_buffer.index(0), starts, HALF, V_FIRST)
            S1 = _taken(state_buffer.index(1), starts, HALF, V_FIRST)
            hopper.block_barrier()
            if starts & (i + 1 < heads * BLOCKS):
                ask_for_state(
                    state_buffer, initial_state, i_state, i_h + (i + 1) // BLOCKS, (i + 1) % BLOCKS, s_in, s_ih, s_ik,
                    s_iv, V_FIRST,
                )  # fmt: skip
        elif initial_state is not None:
            p_start = initial_state + i_state * s_in + head * s_ih + v[:, None].to(gl.int64) * s_iv
            mask = ((v >= 0) & starts)[:, None]
            S0 = gl.load(p_start + _columns(gl.to_tensor(0), HALF) * s_ik, mask=mask, other=0.0).to(gl.float32)
            S1 = gl.load(p_start + _columns(gl.to_tensor(BLOCK), HALF) * s_ik, mask=mask, other=0.0).to(gl.float32)
        for j in range(chunks):
            i_slot = i // BLOCKS + j
            v_block = v_blocks.index(i_slot * BLOCKS + i % BLOCKS)
            r_s = gl.full([BLOCK, C], 0.0, gl.float32, SMALL)
            out = gl.full([BLOCK, C], 0.0, gl.float32, SMALL)
            # ke S − v, and qg S
            r_s = hopper.wgmma(v_block.permute((1, 0)), squares.index(2), r_s, use_acc=False, is_async=True)
            left = gl.convert_layout(S0.to(dtype), LEFT)
            r_s = hopper.wgmma(left, k_blocks.index(i_slot).permute((1, 0)), r_s, is_async=True)
            out = hopper.wgmma(left, q_blocks.index(i_slot).permute((1, 0)), out, use_acc=False, is_async=True)
            r_s, out, left = hopper.wgmma_wait(0, deps=(r_s, out, left))
            left = gl.convert_layout(S1.to(dtype), LEFT)
            r_s = hopper.wgmma(left, k_blocks.index(2 + i_slot).permute((1, 0)), r_s, is_async=True)
            out = hopper.wgmma(left, q_blocks.index(2 + i_slot).permute((1, 0)), out, is_async=True)
            S0 = S0 * decays.index(i_slot).load(gl.SliceLayout(0, HALF))[None, :]
            S1 = S1 * decays.index(2 + i_slot).load(gl.SliceLayout(0, HALF))[None, :]
            r_s, out, left = hopper.wgmma_wait(0, deps=(r_s, out, left))
            residual = gl.convert_layout((-r_s).to(dtype), LEFT_SMALL)
            out = hopper.wgmma(residual, squares.index(i_slot).permute((1, 0)), out, is_async=True)
            S0 = hopper.wgmma(residual, w_blocks.index(i_slot), S0, is_async=True)
            S1 = hopper.wgmma(residual, w_blocks.index(2 + i_slot), S1, is_async=True)
            out, S0, S1, residual = hopper.wgmma_wait(0, deps=(out, S0, S1, residual))
            # Every warp has done with these values.
            hopper.block_barrier()
            v_block.permute((1, 0)).store((out * o_scale).to(dtype))
            hopper.block_barrier()
            p_o = o + (row + j * C).to(gl.int64) * s_ot + head * s_oh + (i % BLOCKS * BLOCK + column)
            inside = (row < gl.where(i_slot > 0, count1, count0)) & (column >= 0)
            gl.store(p_o, v_block.load(ROWS), mask=inside)
        if final_state is not None:
            writes = i_n >= 0
            if final_indices is not None:
                writes = is_padding(i_final, pad_slot_id, final_slots) == 0
            if writes:
                p_state = final_state + i_final * s_fn + head * s_fh + v[:, None].to(gl.int64) * s_fv
                final: gl.constexpr = final_state.dtype.element_ty
                gl.store(p_state + _columns(gl.to_tensor(0), HALF) * s_fk, S0.to(final))
                gl.store(p_state + _columns(gl.to_tensor(BLOCK), HALF) * s_fk, S1.to(final))

"""Shared parts of the recurrences for Hopper, and the warps that store what the forward's hands over."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core_nvidia.hopper import block_barrier, mbarrier


@gluon.jit
def unknown(first):
    """A multiple of 8 that the compiler cannot know before.

    It would keep registers for the addresses of all parts of a state, or for those of the state at the other end of the
    recurrence.
    """
    first = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [first], dtype=gl.int32, is_pure=False, pack=1)
    return gl.multiple_of(first, 8)


@gluon.jit
def halves(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The first and the last half of the columns."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS // 2, 16])
    first, last = x.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
    return gl.convert_layout(first, LAYOUT), gl.convert_layout(last, LAYOUT)


@gluon.jit
def pair_of_barriers(COUNT: gl.constexpr):
    """Barriers [COUNT, 1] of stages that are filled, and of those that are free."""
    filled = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return filled, free


@gluon.jit
def chunk_buffers(
    dtype: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Room for STAGES chunks: ROWS rows of keys, kA, a square, C rows of WIDTH channels, and D."""
    keys = gl.allocate_shared_memory(dtype, [STAGES, ROWS, KP], gl.NVMMASharedLayout.get_default_for([ROWS, KP], dtype))
    ka = gl.allocate_shared_memory(dtype, [STAGES, C, KP], gl.NVMMASharedLayout.get_default_for([C, KP], dtype))
    squares = gl.allocate_shared_memory(dtype, [STAGES, C, C], gl.NVMMASharedLayout.get_default_for([C, C], dtype))
    rows = gl.allocate_shared_memory(dtype, [STAGES, C, WIDTH], gl.NVMMASharedLayout.get_default_for([C, WIDTH], dtype))
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1, KP], gl.NVMMASharedLayout(0, 32, 2))
    return keys, ka, squares, rows, decays


@gluon.jit
def place_of(slot0, i_n, cu_seqlens, row0, NT, C: gl.constexpr, ODD: gl.constexpr):
    """Twice the first pair of sequence ``i_n``, whose first slot is ``slot0``: the same unless slots may be ODD."""
    if not ODD:
        return slot0
    return i_n.to(gl.int64) * (NT + NT % 2) if cu_seqlens is None else (row0 // (2 * C) + i_n) * 2


@gluon.jit
def piece_end(piece, length, every, C: gl.constexpr, LACKS: gl.constexpr):
    """Where a piece of ``every`` chunks ends, whose last one lacks some rows; LACKS = 0: where the sequence ends."""
    return gl.minimum(length, (piece + 1).to(gl.int64) * every * C - LACKS).to(gl.int32) if LACKS > 0 else length


@gluon.jit
def store_output(
    i, rows, p_o, s_ot, length, piece, every, L_ROWS: gl.constexpr, BV: gl.constexpr, C: gl.constexpr,
    LACKS: gl.constexpr,
):  # fmt: skip
    """Store the output of chunk i, given transposed, up to the end of its piece. Chunk −1 has none."""
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
    every_v = (gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS)) >= 0)[None, :]
    end = piece_end(piece, length, every, C, LACKS)
    m_o = (o_r < end - i * C)[:, None] & (i + every_v.to(gl.int32) > 0)
    first = gl.to_tensor(C).to(gl.int64) * i - piece * LACKS
    gl.store(p_o + first * s_ot, gl.convert_layout(rows.trans(), L_ROWS), mask=m_o)


@gluon.jit
def store_state_block(at, block, BV: gl.constexpr, KP: gl.constexpr, STORERS: gl.constexpr):
    """Copy a block [BV, KP] from shared memory to ``at``, sixteen rows at a time: these warps have few registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // KP, KP // 8], [STORERS, 1], [1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, KP, layout=gl.SliceLayout(0, LAYOUT))
    for first in gl.static_range(0, BV, 16):
        gl.store(at + first * KP + (row[:, None] * KP + column[None, :]), block.slice(first, 16).load(LAYOUT))


@gluon.jit
def store_chunks(
    p_o, p_states, p_z, place0, HV, s_ot, length, every, bars, out_buffers,
    V: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr,
    STORERS: gl.constexpr, LACKS: gl.constexpr,
):  # fmt: skip
    """Warps that store: the output of chunk i - 1 when chunk i's first products have begun.

    For a backward also z of chunk i - 1, and the state at the start of chunk i where that begins a pair.
    """
    _, free, full, empty = bars
    o_buffer, z_buffer, s_buffer = out_buffers
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [STORERS, 1], [1, 0])
    row = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, LAYOUT))
    rows_of_chunk = gl.to_tensor(C).to(gl.int64)
    n = (length + C - 1) // C
    for i in range(n + (n > 0).to(gl.int32)):
        out = i % OUT
        mbarrier.wait(full.index(out), (i // OUT) & 1)
        # The warps that hand over have done with what was loaded for the chunk before.
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        if p_states is not None and (i < n) & (i % 2 == 0):
            place = (place0 + i) // 2 * HV
            store_state_block(p_states + place * (V * KP), s_buffer.index(0), BV, KP, STORERS)
        if i > 0:
            first, end = rows_of_chunk * (i - 1), length
            if LACKS > 0:
                piece = (i - 1) // every
                first -= piece * LACKS
                end = piece_end(piece, length, every, C, LACKS)
            at = p_o + first * s_ot + (row[:, None] * s_ot + column[None, :])
            mask = (row < end - (i - 1) * C)[:, None] & (column >= 0)[None, :]
            gl.store(at, o_buffer.index(out).load(LAYOUT), mask=mask)
            if p_states is not None:
                before = (place0 + i - 1) // 2 * HV * (2 * C) + (i - 1) % 2 * C
                at = p_z + before * V + (row[:, None] * V + column[None, :])
                gl.store(at, z_buffer.index(out).load(LAYOUT))
        block_barrier()
        mbarrier.arrive(empty.index(out), count=1)

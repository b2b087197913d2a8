"""``transitions`` and ``reverse_transitions`` for Hopper, written in Gluon: M [K, K] of a segment, and what the segment
adds to the state at its end (b), or to the gradient of the state at its start (a).

A chunk changes the state by S' = D ⊙ S + kAᵀ (v − ke S). With X the product of the matrices of the chunks behind it,

    y = X kAᵀ          b ← b + y v          X ← X ⊙ D − y ke          (X starts as I, b as 0)

gives b, and at the segment's first chunk X = M. From the first chunk on, as recurrences go, the rows of M and b would
be 256 that each need r = v − ke S. This way they are 128, the key channels of the state at the segment's end, which do
not see each other: a program has 64 of them, of M and b together. The product for b is not on the chain of dependent
ones: it runs while X is rounded for the next chunk.

Reverse runs from the first chunk to the last, without values: X = W, M of the chunks so far. A chunk's outputs see the
state at the segment's start through õ = qg W − P ke W, and a ← a + õᵀ do runs beside the chain. A program has 64
columns of W, as rows, and the same rows of a.

A program stops when its rows of X are below TINY: these rows have forgotten what was before. Decays decide that, and
what the delta rule erases, as they come; no bound is assumed. ``forgotten`` tells ``join_hopper``, for which the M of
such rows is zero.

Only bfloat16 (LIFT = 1), K = V = 128 and whole chunks: every segment but the last is a multiple of C rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core_nvidia.hopper import block_barrier, copy_block, fence_async_shared, mbarrier, wgmma, wgmma_wait
from kda_core_nvidia.recurrence_stores_hopper import chunk_buffers, pair_of_barriers

TINY = gl.constexpr(2.0**-120)
"""Rows that have no larger element are forgotten. They would add close to the least that float32 holds, unless a state
is enormous: at most 2^-113 of the norm of the state where they stop."""


@gluon.jit
def _drain(ready, j, STAGES: gl.constexpr):
    """Wait for the last of ``j`` loads: a program must not end while copies are under way."""
    for back in gl.static_range(STAGES):
        last = j - 1 - back
        mbarrier.wait(ready.index((last + STAGES) % STAGES), ((last + STAGES) // STAGES + 1) & 1, pred=last >= 0)


@gluon.jit
def _load(
    pairs, single, P, decays, rows, row0, column, slot0, i_h, n, ready, free, stop, buffers,
    HV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads, until all is loaded or the others ``stop``; parameters as of ``_segment``."""
    REVERSE: gl.constexpr = P is not None
    BYTES: gl.constexpr = ((3 * KP + C if REVERSE else 2 * KP) + V) * C * 2 + KP * 4
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    keys, others, squares, row_buffer, d_buffer = buffers
    j = gl.to_tensor(0)
    limit = n
    while j < limit:
        stage = j % STAGES
        i = j if REVERSE else n - 1 - j
        mbarrier.wait(free.index(stage), ((j // STAGES) & 1) ^ 1)
        halt = gl.max(stop.load(ONE), 0)
        if halt != 0:
            limit = gl.to_tensor(0)
        else:
            bar = ready.index(stage)
            slot = (slot0 + i) * HV + i_h
            mbarrier.expect(bar, BYTES)
            if REVERSE:
                copy_block(pairs, [slot * (3 * C), 0], bar, keys.index(stage))
                copy_block(decays, [slot, 0], bar, d_buffer.index(stage))
                copy_block(single, [slot * (3 * C) + 2 * C, 0], bar, others.index(stage))
                copy_block(P, [slot * C, 0], bar, squares.index(stage))
            else:
                copy_block(single, [slot * (3 * C) + 2 * C, 0], bar, keys.index(stage))
                copy_block(decays, [slot, 0], bar, d_buffer.index(stage))
                copy_block(single, [slot * (3 * C), 0], bar, others.index(stage))
            # Rows past the end of the tensor arrive as zeros.
            copy_block(rows, [row0 + i * C, column], bar, row_buffer.index(stage))
            j += 1
    _drain(ready, j, STAGES)


@gluon.jit
def rounded(x):
    """x in bfloat16, packed two by two: left to itself LLVM converts each alone and packs them afterwards."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _minus_rounded(x):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $2, $1; xor.b32 $0, t, 0x80008000; }",
        "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _vanished(X):
    """Whether all elements of a block are below TINY."""
    return gl.max(gl.max(gl.abs(X), 1), 0) < TINY


@gluon.jit
def _step(
    X, sums, y, left_rows, j, CHECK: gl.constexpr, ready, free, buffers, L_LEFT: gl.constexpr, STAGES: gl.constexpr
):
    """One chunk; ``left_rows`` are −y (reverse: õ) of the one before it, which the sums still lack. No product is under
    way afterwards: ptxas waits at once for one that crosses a loop's end."""
    keys, others, squares, row_buffer, d_buffer = buffers
    stage = j % STAGES
    before = (j + STAGES - 1) % STAGES
    left = gl.convert_layout(rounded(X), L_LEFT)
    mbarrier.wait(ready.index(stage), (j // STAGES) & 1)
    # X kAᵀ; reverse: [ke W | qg W]
    y = wgmma(left, keys.index(stage).permute((1, 0)), y, use_acc=False, is_async=True)
    # The chunk before, while y is rounded. At first its rows are zero, and the block is any finite one.
    behind = gl.where(j > 0, before, stage)
    sums = wgmma(left_rows, row_buffer.index(behind), sums, is_async=True)
    gone = _vanished(X) if CHECK else gl.to_tensor(False)
    X = X * d_buffer.index(stage).load(X.type.layout)
    y, left = wgmma_wait(1, deps=(y, left))
    if squares is None:
        new = gl.convert_layout(_minus_rounded(y), L_LEFT)
        X = wgmma(new, others.index(stage), X, is_async=True)
        sums, left_rows = wgmma_wait(1, deps=(sums, left_rows))
    else:
        BR: gl.constexpr = y.shape[0]
        C: gl.constexpr = y.shape[1] // 2
        L_SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, C, 16])
        r, out = y.reshape([BR, 2, C]).permute([0, 2, 1]).split()
        r = gl.convert_layout(_minus_rounded(gl.convert_layout(r, L_SMALL, assert_trivial=True)), L_LEFT)
        out = gl.convert_layout(out, L_SMALL, assert_trivial=True)
        out = wgmma(r, squares.index(stage).permute((1, 0)), out, is_async=True)
        X = wgmma(r, others.index(stage), X, is_async=True)
        sums, left_rows = wgmma_wait(2, deps=(sums, left_rows))
    # Every warp has done with the chunk before.
    block_barrier()
    mbarrier.arrive(free.index(before), count=1, pred=j > 0)
    if squares is None:
        X, new = wgmma_wait(0, deps=(X, new))
    else:
        out, r = wgmma_wait(1, deps=(out, r))
        new = gl.convert_layout(rounded(out), L_LEFT)
        X, r = wgmma_wait(0, deps=(X, r))
    return X, sums, y, new, gone


@gluon.jit
def _rows_of_segment(i_n, cu_seqlens, T, chunks, C: gl.constexpr):
    """(first row, rows, first slot) of segment ``i_n``, which need not be of whole chunks: packed, or of a batch."""
    if cu_seqlens is None:
        row0 = i_n * T
        length = T
        slot0 = i_n * chunks
    else:
        row0 = gl.load(cu_seqlens + i_n).to(gl.int32)
        length = gl.load(cu_seqlens + i_n + 1).to(gl.int32) - row0
        slot0 = row0 // C + i_n
    return row0, length, slot0


@gluon.jit
def _keep_rows(buffer, count, C: gl.constexpr, V: gl.constexpr):
    """Zero the rows of a block behind the first ``count``: they are another sequence's, and may be of any value."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    block = buffer.load(LAYOUT)
    zeros = gl.full([C, V], 0.0, buffer.dtype, LAYOUT)
    buffer.store(gl.where((o_r < count)[:, None], block, zeros))
    fence_async_shared()
    block_barrier()


@gluon.jit
def _without_forgotten(X, gone):
    """Zeros for rows that are forgotten. ``gone`` passes through assembly: the compiler would move the zeros into the
    loop, and ptxas would then wait for every product before the next one."""
    gone = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gone], dtype=gl.int32, is_pure=False, pack=1)
    return gl.where(gone == 0, X, 0.0)


@gluon.jit
def _multiply(
    X, sums, n, length, ready, free, stop, buffers, C: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
    UNROLL: gl.constexpr, TAILS: gl.constexpr,
):  # fmt: skip
    """The warps that multiply; answers X, −b (reverse: a) and whether the rows were forgotten.

    Args:
        TAILS: rows behind the segment's may be another's.
    """
    keys, squares, row_buffer = buffers[0], buffers[2], buffers[3]
    BR: gl.constexpr = X.shape[0]
    num_warps: gl.constexpr = gl.num_warps()
    L_SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C, 16])
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, keys.shape[1], 16])
    L_LEFT: gl.constexpr = gl.DotOperandLayout(0, X.type.layout, 2)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    # Products that start from nothing are given the previous chunk's accumulator, which is not read.
    y = gl.full([BR, keys.shape[1]], 0.0, gl.float32, L_Y)
    left_rows = gl.convert_layout(gl.full([BR, C], 0.0, keys.dtype, L_SMALL), L_LEFT)
    forgotten = gl.to_tensor(0)
    limit = n
    j = gl.to_tensor(0)
    if TAILS and squares is None and length < n * C:
        mbarrier.wait(ready.index(0), 0)
        _keep_rows(row_buffer.index(0), length - (n - 1) * C, C, V)
    while j + UNROLL <= limit:
        for more in gl.static_range(UNROLL):
            X, sums, y, left_rows, gone = _step(
                X, sums, y, left_rows, j + more, more == UNROLL - 1, ready, free, buffers, L_LEFT, STAGES
            )
        j += UNROLL
        if gone:
            forgotten = gl.to_tensor(1)
            limit = j
            stop.store(gl.full([1], 1, gl.int32, ONE))
    while j < limit:
        X, sums, y, left_rows, _ = _step(X, sums, y, left_rows, j, False, ready, free, buffers, L_LEFT, STAGES)
        j += 1
    last = (j + STAGES - 1) % STAGES
    if TAILS and squares is not None and length < j * C:
        _keep_rows(row_buffer.index(last), length - (n - 1) * C, C, V)
    sums = wgmma(left_rows, row_buffer.index(last), sums, is_async=True)
    sums, left_rows = wgmma_wait(0, deps=(sums, left_rows))
    block_barrier()
    mbarrier.arrive(free.index(last), count=1)
    return X, sums, forgotten


@gluon.jit
def _store_parts(at, x, PART: gl.constexpr):
    """Store [ROWS, COLUMNS] in float32 as two parts in bfloat16, the second behind the first by PART elements: together
    they hold 16 bits of a number, and products take them as they lie."""
    first = x.to(gl.bfloat16)
    gl.store(at, first)
    gl.store(at + PART, (x - first.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _segment(
    pairs, single, P, decays, rows, matrices, additions, forgotten, i_part, i_nh, i_h, row0, length, slot0, n, s_rows,
    o_scale, HV: gl.constexpr, V: gl.constexpr, KP: gl.constexpr, C: gl.constexpr, BR: gl.constexpr,
    STAGES: gl.constexpr, UNROLL: gl.constexpr, EVERY: gl.constexpr, TAILS: gl.constexpr,
):  # fmt: skip
    """A block of key channels of a head of a segment.

    Args:
        pairs, P: for reverse, else None.
        rows: descriptor of v, or of do; ``s_rows``: from head to head.
    """
    num_warps: gl.constexpr = gl.num_warps()
    L_X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, V, 16])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])

    # kA, and others ke; for reverse ke with qg, others kA, and P.
    keys, others, squares, row_buffer, d_buffer = chunk_buffers(
        single.dtype, C if P is None else 2 * C, C, KP, V, STAGES
    )
    buffers = (keys, others, None if P is None else squares, row_buffer, d_buffer)
    stop = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready, free = pair_of_barriers(STAGES)
    stop.store(gl.full([1], 0, gl.int32, ONE))
    fence_async_shared()
    block_barrier()

    o_r = i_part * BR + gl.arange(0, BR, layout=gl.SliceLayout(1, L_X))
    o_k = gl.arange(0, KP, layout=gl.SliceLayout(0, L_X))
    X = gl.where(o_r[:, None] == o_k[None, :], 1.0, 0.0)
    sums = gl.full([BR, V], 0.0, gl.float32, L_SUMS)
    X, sums, gone = gl.warp_specialize([
        (_multiply, (X, sums, n, length, ready, free, stop, buffers, C, V, STAGES, UNROLL, TAILS)),
        (_load, (
            pairs, single, P, decays, rows, row0, i_h * s_rows, slot0, i_h, n, ready, free, stop, buffers, HV, C, KP, V,
            STAGES,
        )),
    ], [1], [40])  # fmt: skip
    at = i_nh.to(gl.int64)
    at_x = o_r[:, None] * KP + o_k[None, :]
    if EVERY:
        X = _without_forgotten(X, gone)
        # Without a chunk the last product was one of zeros and of what lay in shared memory.
        sums = gl.where(n > 0, sums, 0.0)
    # A row of Mᵀ is a column of W.
    _store_parts(matrices + at * (2 * KP * KP) + at_x, X, KP * KP)
    o_s = i_part * BR + gl.arange(0, BR, layout=gl.SliceLayout(1, L_SUMS))
    o_v = gl.arange(0, V, layout=gl.SliceLayout(0, L_SUMS))
    at_sums = additions + at * (KP * V) + (o_s[:, None] * V + o_v[None, :])
    gl.store(at_sums, -sums if P is None else sums * o_scale)
    if not EVERY:
        gl.store(forgotten + i_nh * (KP // BR) + i_part, gone)


@gluon.jit(do_not_specialize=["T", "chunks", "spare", "s_vh"])
def transitions_hopper(
    single,  # descriptor of keys as [slots · HV · 3 · C, KP] by [C, KP]
    decays,  # descriptor of D as [slots · HV, KP] by [1, KP]
    values,  # descriptor of v as a matrix with a row for each token, by [C, V]
    matrices,  # M as two parts in bfloat16, [count - 1, HV, 2, KP, KP]
    additions,  # b in float32, [count - 1, HV, KP, V]; no initial state enters
    forgotten,  # int32 [count - 1, HV, KP / BR]: 1 where these rows of M are below TINY; None with EVERY
    cu_seqlens,  # boundaries of the segments; or None: of one length, with EVERY T rows each, else ``chunks``
    sequences,  # [count] int64: whose a segment is, of which the last has no transitions; or None
    T,
    chunks,  # of a segment
    spare,  # slots between two segments that hold nothing
    s_vh,
    HV: gl.constexpr, V: gl.constexpr, KP: gl.constexpr, C: gl.constexpr, BR: gl.constexpr, STAGES: gl.constexpr,
    UNROLL: gl.constexpr,
    EVERY: gl.constexpr,  # the last segment as well, and segments of any number of rows
):  # fmt: skip
    """Grid: (KP / BR, (count - 1) · HV); with EVERY count · HV, where a forgotten row of M is zero.

    ``count`` - 1 are all segments where ``sequences`` are given.
    """
    i_part = gl.program_id(0)
    i_nh = gl.program_id(1)
    i_n = i_nh // HV
    i_h = i_nh % HV
    if EVERY or cu_seqlens is not None:
        row0, length, slot0 = _rows_of_segment(i_n, cu_seqlens, T, chunks, C)
        n = (length + C - 1) // C
    else:
        slot0 = i_n * (chunks + spare)
        row0 = i_n * chunks * C
        n = chunks
        length = n
    whose, following = 0, 0
    if sequences is not None:
        whose, following = gl.load(sequences + i_n), gl.load(sequences + i_n + 1)
    if sequences is None or (whose >= 0) & (whose == following):
        _segment(
            None, single, None, decays, values, matrices, additions, forgotten, i_part, i_nh, i_h, row0, length, slot0,
            n, s_vh, None, HV, V, KP, C, BR, STAGES, UNROLL, EVERY, EVERY,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "chunks", "spare", "s_oh", "o_scale"])
def reverse_transitions_hopper(
    pairs,  # descriptor of keys as [slots · HV · 3 · C, KP] by [2 C, KP]
    single,  # the same by [C, KP]
    P,  # descriptor of [slots · HV · C, C] by [C, C]
    decays,  # descriptor of D as [slots · HV, KP] by [1, KP]
    gradients,  # descriptor of do as a matrix with a row for each token, by [C, V]
    matrices,  # Mᵀ of segments 1 to count - 1, as two parts in bfloat16, [count - 1, HV, 2, KP, KP]
    additions,  # a of the same, in float32, [count - 1, HV, KP, V]; no final state's gradient enters
    forgotten,  # int32 [count - 1, HV, KP / BR]; None with EVERY
    cu_seqlens,  # as for transitions_hopper
    sequences,  # [count] int64: whose a segment is, of which the first has no transitions; or None
    T,  # all rows; with EVERY those of a segment of a batch
    chunks,  # of a segment; the last one may have fewer
    spare,  # slots between two segments that hold nothing
    s_oh, o_scale,
    HV: gl.constexpr, V: gl.constexpr, KP: gl.constexpr, C: gl.constexpr, BR: gl.constexpr, STAGES: gl.constexpr,
    UNROLL: gl.constexpr, EVERY: gl.constexpr,
):  # fmt: skip
    """Grid: (KP / BR, (count - 1) · HV); with EVERY count · HV, from segment 0 on."""
    i_part = gl.program_id(0)
    i_nh = gl.program_id(1)
    i_h = i_nh % HV
    if EVERY:
        row0, length, slot0 = _rows_of_segment(i_nh // HV, cu_seqlens, T, chunks, C)
        n = (length + C - 1) // C
    else:
        i_n = i_nh // HV + 1
        if sequences is None:
            slot0 = i_n * (chunks + spare)
            row0 = i_n * chunks * C
            n = gl.minimum(chunks, (T - row0 + C - 1) // C)
            length = n
        else:
            row0, length, slot0 = _rows_of_segment(i_n, cu_seqlens, T, chunks, C)
            same = gl.load(sequences + i_n - 1) == gl.load(sequences + i_n)
            n = gl.where(same, (length + C - 1) // C, 0)
    _segment(
        pairs, single, P, decays, gradients, matrices, additions, forgotten, i_part, i_nh, i_h, row0, length, slot0, n,
        s_oh, o_scale, HV, V, KP, C, BR, STAGES, UNROLL, EVERY, EVERY or sequences is not None,
    )  # fmt: skip

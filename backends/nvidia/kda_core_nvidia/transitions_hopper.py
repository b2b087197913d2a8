"""``transitions`` for Hopper, written in Gluon: M [K, K] and b [K, V] of a segment, from its last chunk to its first.

A chunk changes the state by S' = D ⊙ S + kAᵀ (v − ke S). With X the product of the matrices of the chunks behind it,

    y = X kAᵀ          b ← b + y v          X ← X ⊙ D − y ke          (X starts as I, b as 0)

gives b, and at the segment's first chunk X = M. From the first chunk on, as recurrences go, the rows of M and b would
be 256 that each need r = v − ke S. This way they are 128, the key channels of the state at the segment's end, which do
not see each other: a program has 64 of them, of M and b together. The product for b is not on the chain of dependent
ones: it runs while X is rounded for the next chunk.

A program stops when its rows of X are below TINY: these rows have forgotten what was before. Decays decide that, and
what the delta rule erases, as they come; no bound is assumed. ``forgotten`` tells ``join_hopper``, for which the M of
such rows is zero.

Only bfloat16 (LIFT = 1), K = V = 128 and whole chunks: every segment but the last is a multiple of C rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core_nvidia.hopper import block_barrier, copy_block, fence_async_shared, mbarrier, wgmma, wgmma_wait

TINY = gl.constexpr(2.0**-120)
"""Rows that have no larger element are forgotten. They would add close to the least that float32 holds, unless a state
is enormous: at most 2^-113 of the norm of the state where they stop."""


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
def drain(ready, j, STAGES: gl.constexpr):
    """Wait for the last of ``j`` loads: a program must not end while copies are under way."""
    for back in gl.static_range(STAGES):
        last = j - 1 - back
        mbarrier.wait(ready.index((last + STAGES) % STAGES), ((last + STAGES) // STAGES + 1) & 1, pred=last >= 0)


@gluon.jit
def _load(
    single, decays, values, row0, column, slot0, i_h, n, ready, free, stop, ka_buffer, ke_buffer, v_buffer, d_buffer,
    HV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads, last chunk first, until all is loaded or the others ``stop``."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    j = gl.to_tensor(0)
    limit = n
    while j < limit:
        stage = j % STAGES
        i = n - 1 - j
        mbarrier.wait(free.index(stage), ((j // STAGES) & 1) ^ 1)
        halt = gl.max(stop.load(ONE), 0)
        if halt != 0:
            limit = gl.to_tensor(0)
        else:
            bar = ready.index(stage)
            slot = (slot0 + i) * HV + i_h
            mbarrier.expect(bar, (2 * C * KP + C * V) * 2 + KP * 4)
            copy_block(single, [slot * (3 * C) + 2 * C, 0], bar, ka_buffer.index(stage))
            copy_block(decays, [slot, 0], bar, d_buffer.index(stage))
            copy_block(single, [slot * (3 * C), 0], bar, ke_buffer.index(stage))
            copy_block(values, [row0 + i * C, column], bar, v_buffer.index(stage))
            j += 1
    drain(ready, j, STAGES)


@gluon.jit
def rounded(x):
    """x in bfloat16, packed two by two: left to itself LLVM converts each alone and packs them afterwards."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def minus_rounded(x):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $2, $1; xor.b32 $0, t, 0x80008000; }",
        "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def vanished(X):
    """Whether all elements of a block are below TINY."""
    return gl.max(gl.max(gl.abs(X), 1), 0) < TINY


@gluon.jit
def _step(
    X, b, y, rows, j, CHECK: gl.constexpr, ready, free, ka_buffer, ke_buffer, v_buffer, d_buffer,
    L_X: gl.constexpr, L_LEFT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One chunk; ``rows`` are −y of the one before it, which b still lacks. No product is under way afterwards: ptxas
    waits at once for one that crosses a loop's end."""
    stage = j % STAGES
    before = (j + STAGES - 1) % STAGES
    left = gl.convert_layout(rounded(X), L_LEFT)
    mbarrier.wait(ready.index(stage), (j // STAGES) & 1)
    y = wgmma(left, ka_buffer.index(stage).permute((1, 0)), y, use_acc=False, is_async=True)
    # The chunk before, while y is rounded. At first rows are zero, and the block is any finite one.
    behind = gl.where(j > 0, before, stage)
    b = wgmma(rows, v_buffer.index(behind), b, is_async=True)
    gone = gl.to_tensor(False)
    if CHECK:
        gone = vanished(X)
    X = X * d_buffer.index(stage).load(L_X)
    y, left = wgmma_wait(1, deps=(y, left))
    new = gl.convert_layout(minus_rounded(y), L_LEFT)
    X = wgmma(new, ke_buffer.index(stage), X, is_async=True)
    b, rows = wgmma_wait(1, deps=(b, rows))
    # Every warp has done with the chunk before.
    block_barrier()
    mbarrier.arrive(free.index(before), count=1, pred=j > 0)
    X, new = wgmma_wait(0, deps=(X, new))
    return X, b, y, new, gone


@gluon.jit
def rows_of_segment(i_n, cu_seqlens, T, chunks, C: gl.constexpr):
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
def keep_rows(buffer, count, C: gl.constexpr, V: gl.constexpr):
    """Zero the rows of a block behind the first ``count``: they are another sequence's, and may be of any value."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    block = buffer.load(LAYOUT)
    zeros = gl.full([C, V], 0.0, buffer.dtype, LAYOUT)
    buffer.store(gl.where((o_r < count)[:, None], block, zeros))
    fence_async_shared()
    block_barrier()


@gluon.jit
def without_forgotten(X, gone):
    """Zeros for rows that are forgotten. ``gone`` passes through assembly: the compiler would move the zeros into the
    loop, and ptxas would then wait for every product before the next one."""
    gone = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gone], dtype=gl.int32, is_pure=False, pack=1)
    return gl.where(gone == 0, X, 0.0)


@gluon.jit
def _multiply(
    X, b, n, length, ready, free, stop, ka_buffer, ke_buffer, v_buffer, d_buffer,
    BR: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr,
    EVERY: gl.constexpr,
):  # fmt: skip
    """The warps that multiply; answers X, −b and whether the rows were forgotten."""
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = ka_buffer.dtype
    L_SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C, 16])
    L_X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_LEFT: gl.constexpr = gl.DotOperandLayout(0, L_X, 2)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    # Products that start from nothing are given the previous chunk's accumulator, which is not read.
    y = gl.full([BR, C], 0.0, gl.float32, L_SMALL)
    rows = gl.convert_layout(y.to(dtype), L_LEFT)
    forgotten = gl.to_tensor(0)
    limit = n
    j = gl.to_tensor(0)
    if EVERY and length < n * C:
        mbarrier.wait(ready.index(0), 0)
        keep_rows(v_buffer.index(0), length - (n - 1) * C, C, V)
    while j + UNROLL <= limit:
        for more in gl.static_range(UNROLL):
            X, b, y, rows, gone = _step(
                X, b, y, rows, j + more, more == UNROLL - 1, ready, free, ka_buffer, ke_buffer, v_buffer,
                d_buffer, L_X, L_LEFT, STAGES,
            )  # fmt: skip
        j += UNROLL
        if gone:
            forgotten = gl.to_tensor(1)
            limit = j
            stop.store(gl.full([1], 1, gl.int32, ONE))
    while j < limit:
        X, b, y, rows, _ = _step(
            X, b, y, rows, j, False, ready, free, ka_buffer, ke_buffer, v_buffer, d_buffer, L_X, L_LEFT, STAGES
        )
        j += 1
    last = (j + STAGES - 1) % STAGES
    b = wgmma(rows, v_buffer.index(last), b, is_async=True)
    b, rows = wgmma_wait(0, deps=(b, rows))
    block_barrier()
    mbarrier.arrive(free.index(last), count=1)
    return X, b, forgotten


@gluon.jit
def store_parts(at, x, PART: gl.constexpr):
    """Store [ROWS, COLUMNS] in float32 as two parts in bfloat16, the second behind the first by PART elements: together
    they hold 16 bits of a number, and products take them as they lie."""
    first = x.to(gl.bfloat16)
    gl.store(at, first)
    gl.store(at + PART, (x - first.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _segment(
    single, decays, values, matrices, additions, forgotten, i_part, i_nh, i_h, row0, length, slot0, n, s_vh,
    HV: gl.constexpr, V: gl.constexpr, KP: gl.constexpr, C: gl.constexpr, BR: gl.constexpr, STAGES: gl.constexpr,
    UNROLL: gl.constexpr, EVERY: gl.constexpr,
):  # fmt: skip
    """A block of key channels of a head of a segment."""
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = single.dtype
    L_X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_B: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, V, 16])
    SINGLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, KP], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], dtype)
    ROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])

    ka_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, KP], SINGLE)
    ke_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, KP], SINGLE)
    v_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, V], VALUES)
    d_buffer = gl.allocate_shared_memory(gl.float32, [STAGES, 1, KP], ROW)
    stop = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready, free = pair_of_barriers(STAGES)
    stop.store(gl.full([1], 0, gl.int32, ONE))
    fence_async_shared()
    block_barrier()

    o_r = i_part * BR + gl.arange(0, BR, layout=gl.SliceLayout(1, L_X))
    o_k = gl.arange(0, KP, layout=gl.SliceLayout(0, L_X))
    X = gl.where(o_r[:, None] == o_k[None, :], 1.0, 0.0)
    b = gl.full([BR, V], 0.0, gl.float32, L_B)
    X, b, gone = gl.warp_specialize([
        (_multiply, (
            X, b, n, length, ready, free, stop, ka_buffer, ke_buffer, v_buffer, d_buffer, BR, C, KP, V, STAGES, UNROLL,
            EVERY,
        )),
        (_load, (
            single, decays, values, row0, i_h * s_vh, slot0, i_h, n, ready, free, stop, ka_buffer, ke_buffer, v_buffer,
            d_buffer, HV, C, KP, V, STAGES,
        )),
    ], [1], [40])  # fmt: skip
    at = i_nh.to(gl.int64)
    at_x = o_r[:, None] * KP + o_k[None, :]
    if EVERY:
        X = without_forgotten(X, gone)
        # Without a chunk the last product was one of zeros and of what lay in shared memory.
        b = gl.where(n > 0, b, 0.0)
    store_parts(matrices + at * (2 * KP * KP) + at_x, X, KP * KP)
    o_b = i_part * BR + gl.arange(0, BR, layout=gl.SliceLayout(1, L_B))
    o_v = gl.arange(0, V, layout=gl.SliceLayout(0, L_B))
    gl.store(additions + at * (KP * V) + (o_b[:, None] * V + o_v[None, :]), -b)
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
        row0, length, slot0 = rows_of_segment(i_n, cu_seqlens, T, chunks, C)
        n = (length + C - 1) // C
    else:
        slot0 = i_n * (chunks + spare)
        row0 = i_n * chunks * C
        n = chunks
        length = n
    given = (single, decays, values, matrices, additions, forgotten, i_part, i_nh, i_h, row0, length, slot0, n, s_vh)
    if sequences is None:
        _segment(*given, HV, V, KP, C, BR, STAGES, UNROLL, EVERY)
    else:
        whose = gl.load(sequences + i_n)
        if (whose >= 0) & (whose == gl.load(sequences + i_n + 1)):
            _segment(*given, HV, V, KP, C, BR, STAGES, UNROLL, EVERY)

"""``reverse_transitions`` for Hopper, written in Gluon: what a segment's outputs add to the gradient of the state at
its start, and its M, from the first chunk to the last.

The recurrence runs from the identity without values: W = M of the chunks so far. A chunk's outputs see the state at the
segment's start through õ = qg W − P ke W, and a ← a + õᵀ do runs beside the chain of dependent products. A program has
64 columns of W, as rows, and the same rows of a. ``transitions_hopper`` says what else holds, of both kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core_nvidia import transitions_hopper as transitions
from kda_core_nvidia.hopper import block_barrier, copy_block, fence_async_shared, mbarrier, wgmma, wgmma_wait
from kda_core_nvidia.recurrence_stores_hopper import chunk_buffers


@gluon.jit
def _load_forwards(
    pairs, single, P, decays, gradients, row0, column, slot0, i_h, n, ready, free, stop,
    pair_buffer, ka_buffer, p_buffer, o_buffer, d_buffer,
    HV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads for ``reverse_transitions_hopper``, first chunk first."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    j = gl.to_tensor(0)
    limit = n
    while j < limit:
        stage = j % STAGES
        mbarrier.wait(free.index(stage), ((j // STAGES) & 1) ^ 1)
        halt = gl.max(stop.load(ONE), 0)
        if halt != 0:
            limit = gl.to_tensor(0)
        else:
            bar = ready.index(stage)
            slot = (slot0 + j) * HV + i_h
            mbarrier.expect(bar, (3 * C * KP + C * C + C * V) * 2 + KP * 4)
            copy_block(pairs, [slot * (3 * C), 0], bar, pair_buffer.index(stage))
            copy_block(decays, [slot, 0], bar, d_buffer.index(stage))
            copy_block(single, [slot * (3 * C) + 2 * C, 0], bar, ka_buffer.index(stage))
            copy_block(P, [slot * C, 0], bar, p_buffer.index(stage))
            # Rows past the end of the tensor arrive as zeros.
            copy_block(gradients, [row0 + j * C, column], bar, o_buffer.index(stage))
            j += 1
    transitions.drain(ready, j, STAGES)


@gluon.jit
def _step_forwards(
    W, a, both, rows, j, CHECK: gl.constexpr, ready, free, pair_buffer, ka_buffer, p_buffer, o_buffer, d_buffer,
    L_W: gl.constexpr, L_LEFT: gl.constexpr, L_SMALL: gl.constexpr, BR: gl.constexpr, C: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One chunk; ``rows`` are what the outputs of the one before it see of the start, which a still lacks."""
    stage = j % STAGES
    before = (j + STAGES - 1) % STAGES
    left = gl.convert_layout(transitions.rounded(W), L_LEFT)
    mbarrier.wait(ready.index(stage), (j // STAGES) & 1)
    # [ke W | qg W]
    both = wgmma(left, pair_buffer.index(stage).permute((1, 0)), both, use_acc=False, is_async=True)
    behind = gl.where(j > 0, before, stage)
    a = wgmma(rows, o_buffer.index(behind), a, is_async=True)
    gone = gl.to_tensor(False)
    if CHECK:
        gone = transitions.vanished(W)
    W = W * d_buffer.index(stage).load(L_W)
    both, left = wgmma_wait(1, deps=(both, left))
    r, out = both.reshape([BR, 2, C]).permute([0, 2, 1]).split()
    r = gl.convert_layout(transitions.minus_rounded(gl.convert_layout(r, L_SMALL, assert_trivial=True)), L_LEFT)
    out = gl.convert_layout(out, L_SMALL, assert_trivial=True)
    out = wgmma(r, p_buffer.index(stage).permute((1, 0)), out, is_async=True)
    W = wgmma(r, ka_buffer.index(stage), W, is_async=True)
    a, rows = wgmma_wait(2, deps=(a, rows))
    # Every warp has done with the chunk before.
    block_barrier()
    mbarrier.arrive(free.index(before), count=1, pred=j > 0)
    out, r = wgmma_wait(1, deps=(out, r))
    new = gl.convert_layout(transitions.rounded(out), L_LEFT)
    W, r = wgmma_wait(0, deps=(W, r))
    return W, a, both, new, gone


@gluon.jit
def _multiply_forwards(
    W, a, n, length, ready, free, stop, pair_buffer, ka_buffer, p_buffer, o_buffer, d_buffer,
    BR: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr,
    TAILS: gl.constexpr,
):  # fmt: skip
    """The warps that multiply for ``reverse_transitions_hopper``; TAILS: rows behind a segment's may be another's."""
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = ka_buffer.dtype
    L_SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C, 16])
    L_PAIR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 2 * C, 16])
    L_W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_LEFT: gl.constexpr = gl.DotOperandLayout(0, L_W, 2)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    both = gl.full([BR, 2 * C], 0.0, gl.float32, L_PAIR)
    rows = gl.convert_layout(gl.full([BR, C], 0.0, dtype, L_SMALL), L_LEFT)
    forgotten = gl.to_tensor(0)
    limit = n
    j = gl.to_tensor(0)
    while j + UNROLL <= limit:
        for more in gl.static_range(UNROLL):
            W, a, both, rows, gone = _step_forwards(
                W, a, both, rows, j + more, more == UNROLL - 1, ready, free, pair_buffer, ka_buffer,
                p_buffer, o_buffer, d_buffer, L_W, L_LEFT, L_SMALL, BR, C, STAGES,
            )  # fmt: skip
        j += UNROLL
        if gone:
            forgotten = gl.to_tensor(1)
            limit = j
            stop.store(gl.full([1], 1, gl.int32, ONE))
    while j < limit:
        W, a, both, rows, _ = _step_forwards(
            W, a, both, rows, j, False, ready, free, pair_buffer, ka_buffer, p_buffer, o_buffer, d_buffer, L_W,
            L_LEFT, L_SMALL, BR, C, STAGES,
        )  # fmt: skip
        j += 1
    last = (j + STAGES - 1) % STAGES
    if TAILS and length < j * C:
        transitions.keep_rows(o_buffer.index(last), length - (n - 1) * C, C, V)
    a = wgmma(rows, o_buffer.index(last), a, is_async=True)
    a, rows = wgmma_wait(0, deps=(a, rows))
    block_barrier()
    mbarrier.arrive(free.index(last), count=1)
    return W, a, forgotten


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
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = single.dtype
    L_W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, V, 16])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])

    i_part = gl.program_id(0)
    i_nh = gl.program_id(1)
    i_h = i_nh % HV
    if EVERY:
        row0, length, slot0 = transitions.rows_of_segment(i_nh // HV, cu_seqlens, T, chunks, C)
        n = (length + C - 1) // C
    else:
        i_n = i_nh // HV + 1
        if sequences is None:
            slot0 = i_n * (chunks + spare)
            row0 = i_n * chunks * C
            left_over = T - row0
            n = gl.minimum(chunks, (left_over + C - 1) // C)
            length = n
        else:
            row0, length, slot0 = transitions.rows_of_segment(i_n, cu_seqlens, T, chunks, C)
            same = gl.load(sequences + i_n - 1) == gl.load(sequences + i_n)
            n = gl.where(same, (length + C - 1) // C, 0)

    pair_buffer, ka_buffer, p_buffer, o_buffer, d_buffer = chunk_buffers(dtype, 2 * C, C, KP, V, STAGES)
    stop = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready, free = transitions.pair_of_barriers(STAGES)
    stop.store(gl.full([1], 0, gl.int32, ONE))
    fence_async_shared()
    block_barrier()

    o_r = i_part * BR + gl.arange(0, BR, layout=gl.SliceLayout(1, L_W))
    o_k = gl.arange(0, KP, layout=gl.SliceLayout(0, L_W))
    W = gl.where(o_r[:, None] == o_k[None, :], 1.0, 0.0)
    a = gl.full([BR, V], 0.0, gl.float32, L_A)
    W, a, gone = gl.warp_specialize([
        (_multiply_forwards, (
            W, a, n, length, ready, free, stop, pair_buffer, ka_buffer, p_buffer, o_buffer, d_buffer, BR, C, KP, V,
            STAGES, UNROLL, EVERY or sequences is not None,
        )),
        (_load_forwards, (
            pairs, single, P, decays, gradients, row0, i_h * s_oh, slot0, i_h, n, ready, free, stop, pair_buffer,
            ka_buffer, p_buffer, o_buffer, d_buffer, HV, C, KP, V, STAGES,
        )),
    ], [1], [40])  # fmt: skip
    at = i_nh.to(gl.int64)
    if EVERY:
        W = transitions.without_forgotten(W, gone)
        a = gl.where(n > 0, a, 0.0)
    # A row of Mᵀ is a column of W.
    transitions.store_parts(matrices + at * (2 * KP * KP) + (o_r[:, None] * KP + o_k[None, :]), W, KP * KP)
    o_a = i_part * BR + gl.arange(0, BR, layout=gl.SliceLayout(1, L_A))
    o_v = gl.arange(0, V, layout=gl.SliceLayout(0, L_A))
    gl.store(additions + at * (KP * V) + (o_a[:, None] * V + o_v[None, :]), a * o_scale)
    if not EVERY:
        gl.store(forgotten + i_nh * (KP // BR) + i_part, gone)

"""``join`` for Hopper, written in Gluon: states at the starts of segments, x ← M x + b from one segment to the next.

Grid: (V / BV, HV, count). The program of segment s has work where s is first, or where all rows of the segment before
it have forgotten (``transitions_hopper``): then the state at its start is b of that segment alone. It goes on up to the
next start of this kind. Where nothing is forgotten, the program of s = 0 takes all segments, one after another; where
everything is, all programs start at once and multiply nothing. The data decide, on the device.

The chain of dependent steps limits it. So the matrices, 64 KiB for a segment and head, are loaded ahead, and products
take their two bfloat16 parts as they lie; the state is split in the same way, and the product of both second parts is
left out (2^-16 of a result).

Reverse: segments from the last to the first, with the transposed matrices and the sums of
``reverse_transitions_hopper``; states are gradients at the ends of segments then.

Segments may be of several sequences, one after another. The first of each starts from its sequence's state.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.packing import starts_from_state
from kda_core_nvidia.hopper import block_barrier, copy_block, fence_async_shared, mbarrier, wgmma, wgmma_wait


@gluon.jit
def _begin(matrices, t, end, step, row, stage, ready, buffer, K: gl.constexpr):
    """Start to load both parts of the matrix of step t."""
    bar = ready.index(stage)
    mbarrier.expect(bar, 2 * K * K * 2, pred=t < end)
    copy_block(matrices, [row + t * step, 0], bar, buffer.index(2 * stage), pred=t < end)
    copy_block(matrices, [row + t * step + K, 0], bar, buffer.index(2 * stage + 1), pred=t < end)


@gluon.jit(do_not_specialize=["count", "s_index", "s_has"])
def join_hopper(
    matrices,  # descriptor of M (reverse: Mᵀ) as two parts, [(count - 1) · HV · 2 · K, K] by [K, K]
    additions,  # b, float32 [count - 1, HV, K, V]
    forgotten,  # int32 [count - 1, HV, PARTS]
    given,  # [N or slots of a pool, HV, K, V], any strides, or None: first states (reverse: the last one's gradient)
    sequences,  # [count] int64: whose a segment is, or -1; None: all are one sequence's
    indices,  # [N] slots of given, or None
    has_state,  # [N] bool, or None
    states,  # float32 [count, HV, V, K]
    count, s_gn, s_gh, s_gk, s_gv, s_index, s_has,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, PARTS: gl.constexpr,
    MOST: gl.constexpr,  # a power of two, at least count - 1
    REVERSE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    num_warps: gl.constexpr = gl.num_warps()
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BV, 16])
    WHOLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, K], gl.bfloat16)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, BV], gl.bfloat16)
    FLAGS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    i_v = gl.program_id(0)
    i_h = gl.program_id(1)
    i_s = gl.program_id(2)
    last = count - 1
    # Step t leads from the t-th state that is known to the next one. Its matrix lies at t, in reverse from the end.
    o_t = gl.arange(0, MOST, layout=FLAGS)
    at_t = last - 1 - o_t if REVERSE else o_t
    gone = gl.full([MOST], 1, gl.int32, FLAGS)
    for part in gl.static_range(PARTS):
        gone = gone & gl.load(forgotten + (at_t * HV + i_h) * PARTS + part, mask=o_t < last, other=1)
    i_n = gl.to_tensor(0).to(gl.int64)
    begins = i_s == 0
    if sequences is not None:
        here = gl.load(sequences + at_t, mask=o_t < last, other=-1)
        gone = gone | (here != gl.load(sequences + at_t + 1, mask=o_t < last, other=-1)).to(gl.int32)
        segment, before = (last - i_s, last - i_s + 1) if REVERSE else (i_s, i_s - 1)
        i_n = gl.load(sequences + segment)
        if i_n < 0:
            return
        begins = i_n != gl.load(sequences + before, mask=i_s > 0, other=-1)
    if (i_s > 0) & (gl.sum(gl.where(o_t == i_s - 1, gone, 0), 0) == 0):
        return
    end = gl.minimum(gl.min(gl.where((o_t >= i_s) & (gone != 0), o_t, MOST), 0), last)

    buffer = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, K, K], WHOLE)
    first_part = gl.allocate_shared_memory(gl.bfloat16, [K, BV], HALF)
    second_part = gl.allocate_shared_memory(gl.bfloat16, [K, BV], HALF)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    block_barrier()

    # Where what step t reads and writes lies: + t · step.
    if REVERSE:
        step = -HV
        first = (last - 1) * HV + i_h
        first_state = last * HV + i_h
    else:
        step = gl.to_tensor(HV)
        first = gl.to_tensor(0) + i_h
        first_state = first
    row, row_step = first * (2 * K), step * (2 * K)
    for s in gl.static_range(STAGES):
        _begin(matrices, i_s + s, end, row_step, row, s, ready, buffer, K)
    o_k = gl.arange(0, K, layout=gl.SliceLayout(1, L))
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, L))
    at_b = o_k[:, None] * V + o_v[None, :]
    at_x = o_v[None, :] * K + o_k[:, None]
    if begins == 0:
        x = gl.load(additions + (first + (i_s - 1) * step).to(gl.int64) * (K * V) + at_b)
    elif given is None:
        x = gl.full([K, BV], 0.0, gl.float32, L)
    else:
        starts = o_k[:, None] >= 0
        if has_state is not None:
            starts = starts & starts_from_state(has_state, i_n, s_has)
        if indices is not None:
            i_n = gl.load(indices + i_n * s_index).to(gl.int64)
        at = o_k[:, None].to(gl.int64) * s_gk + o_v[None, :].to(gl.int64) * s_gv
        x = gl.load(given + i_n * s_gn + i_h.to(gl.int64) * s_gh + at, mask=starts, other=0.0).to(gl.float32)
    gl.store(states + (first_state + i_s * step).to(gl.int64) * (V * K) + at_x, x)
    # The addition of a step is loaded one step ahead; without a step it is not used.
    b = x
    if i_s < end:
        b = gl.load(additions + (first + i_s * step).to(gl.int64) * (K * V) + at_b)
    for t in range(i_s, end):
        j = t - i_s
        stage = j % STAGES
        x_first = x.to(gl.bfloat16)
        first_part.store(x_first)
        second_part.store((x - x_first.to(gl.float32)).to(gl.bfloat16))
        fence_async_shared()
        block_barrier()
        mbarrier.wait(ready.index(stage), (j // STAGES) & 1)
        x = wgmma(buffer.index(2 * stage), first_part, b, is_async=True)
        x = wgmma(buffer.index(2 * stage), second_part, x, is_async=True)
        x = wgmma(buffer.index(2 * stage + 1), first_part, x, is_async=True)
        after = gl.minimum(t + 1, end - 1)
        b = gl.load(additions + (first + after * step).to(gl.int64) * (K * V) + at_b)
        x = wgmma_wait(0, deps=(x,))
        # Every warp has done with what was loaded, and with both parts of the state.
        block_barrier()
        _begin(matrices, t + STAGES, end, row_step, row, stage, ready, buffer, K)
        gl.store(states + (first_state + (t + 1) * step).to(gl.int64) * (V * K) + at_x, x)
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(s))

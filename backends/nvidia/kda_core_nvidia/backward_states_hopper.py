"""The states of the backward for Hopper, written in Gluon: the equations of ``backward_states``, with warps that load
and that store beside those that multiply. ``backward_hopper`` has the kernel.

As in ``recurrence_hopper`` the loading warp runs a few chunks ahead. Every chunk's state leaves the chip, which is more
than what is loaded. The warps that multiply only put it into shared memory, while the chunk's first products run, with
the rows of the chunk before it; from there others copy it, whole rows at a time. (Copies through descriptors would need
a fence of the warps that multiply, which waits for all that they have under way.)

With EVERY_SECOND only every second state is stored: the one at the start of a pair of chunks. States and z are numbered
by pairs then, as slots of 2 C rows, [pairs, HV, ..]. Where numbers of chunks may be ODD, a sequence's last pair may
have one chunk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kda_core_nvidia.hopper import block_barrier, copy_block, fence_async_shared, mbarrier, wgmma, wgmma_wait
from kda_core_nvidia.recurrence_stores_hopper import (
    chunk_buffers,
    halves,
    pair_of_barriers,
    place_of,
    store_state_block,
)


@gluon.jit
def rows_of(i_n, cu_seqlens, T, T_row, NT, s_b, s_t, C: gl.constexpr):
    """(first slot, length, offset of the first row, first row of a contiguous [B · T] axis) of sequence ``i_n``."""
    i_n = i_n.to(gl.int64)
    if cu_seqlens is None:
        slot0 = i_n * NT
        length = T
        first = i_n * s_b + i_n * T_row * s_t
        bos = i_n * T
    else:
        bos = gl.load(cu_seqlens + i_n).to(gl.int64)
        slot0 = bos // C + i_n
        length = (gl.load(cu_seqlens + i_n + 1).to(gl.int64) - bos).to(gl.int32)
        first = bos * s_t
    return slot0, length, first, bos


@gluon.jit
def load_state(
    state, i_nh, i_v, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, KP: gl.constexpr, V_FIRST: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Transposed block [BV, KP] of a dense state [N, HV, K, V] (or [N, HV, V, K]), in float32."""
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, KP, layout=gl.SliceLayout(0, LAYOUT))
    at = state + i_nh.to(gl.int64) * (K * V)
    if V_FIRST:
        at = at + (o_v[:, None] * K + o_k[None, :])
    else:
        at = at + (o_k[None, :] * V + o_v[:, None])
    return gl.load(at, mask=(o_v >= 0)[:, None] & (o_k < K)[None, :], other=0.0).to(gl.float32)


@gluon.jit
def begin_loads():
    """Wait for the kernel ahead. Only then may the one behind begin, which reads what was written before that, too."""
    gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def _load_for_states(
    values, pairs, X, decays, value_row, value_column, slot0, i_h, length, ready, free,
    ke_buffer, ka_buffer, x_buffer, v_buffer, d_buffer,
    HV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads for states."""
    begin_loads()
    for i in range((length + C - 1) // C):
        stage = i % STAGES
        slot = ((slot0 + i) * HV + i_h).to(gl.int32)
        whole = length >= (i + 1) * C
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, (2 * C * KP + C * C + C * BV) * 2 + KP * 4, pred=whole)
        mbarrier.expect(bar, (2 * C * KP + C * C) * 2 + KP * 4, pred=whole == 0)
        copy_block(pairs, [slot * (3 * C), 0], bar, ke_buffer.index(stage))
        copy_block(decays, [slot, 0], bar, d_buffer.index(stage))
        copy_block(values, [value_row + i * C, value_column], bar, v_buffer.index(stage), pred=whole)
        copy_block(pairs, [slot * (3 * C) + 2 * C, 0], bar, ka_buffer.index(stage))
        copy_block(X, [slot * C, 0], bar, x_buffer.index(stage))


@gluon.jit
def _store_for_states(
    states, z, place0, i_h, i_v, length, free, full, empty, s_buffer, z_buffer,
    HV: gl.constexpr, V: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    OUT: gl.constexpr, STORERS: gl.constexpr, EVERY_SECOND: gl.constexpr,
):  # fmt: skip
    """The warps that store for states: the state at the start of chunk i, and z of chunk i - 1.

    Args:
        place0: the first slot, or twice the first pair.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [STORERS, 1], [1, 0])
    row = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, LAYOUT))
    n = (length + C - 1) // C
    for i in range(n + (n > 0).to(gl.int32)):
        out = i % OUT
        place = (place0 + i) * HV + i_h
        mbarrier.wait(full.index(out), (i // OUT) & 1)
        # The warps that hand over chunk i have done with what was loaded for the one before.
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        before = (place - HV) * C
        if EVERY_SECOND:
            place = (place0 + i) // 2 * HV + i_h
            before = ((place0 + i - 1) // 2 * HV + i_h) * (2 * C) + (i - 1) % 2 * C
        if (i < n) & ((i % 2 == 0) | (not EVERY_SECOND)):
            store_state_block(states + (place * V + i_v * BV) * KP, s_buffer.index(out), BV, KP, STORERS)
        if i > 0:
            at = z + before * V + i_v * BV + (row[:, None] * V + column[None, :])
            gl.store(at, z_buffer.index(out).load(LAYOUT))
        block_barrier()
        mbarrier.arrive(empty.index(out), count=1)


@gluon.jit
def _states(
    S, p_v, s_vt, length, ready, full, empty, ke_buffer, ka_buffer, x_buffer, v_buffer, d_buffer,
    s_buffer, z_buffer, minus_eye,
    L_ROWS: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, LIFT: gl.constexpr, STAGES: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """The warps that multiply for states."""
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = p_v.dtype.element_ty
    L_SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C, 16])
    L_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    WIDE: gl.constexpr = KP > 128
    PART: gl.constexpr = KP // 2 if WIDE else KP
    L_LEFT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, PART, 16]), 2)
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
    every_v = (gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS)) >= 0)[None, :]
    rows_of_chunk = gl.to_tensor(C).to(gl.int64)
    n = (length + C - 1) // C
    # Accumulators of products that start from nothing are given those of the previous chunk, which are not read:
    # registers set to zero here would make the compiler wait for every product in flight.
    r = gl.full([BV, C], 0.0, gl.float32, L_SMALL)
    scaled = gl.full([BV, C], 0.0, gl.float32, L_SMALL)
    for i in range(n):
        stage = i % STAGES
        out = i % OUT
        if WIDE:
            part, rest = halves(S, BV, KP)
        else:
            part = S
        rounded = part.to(dtype)
        left = gl.convert_layout(rounded, L_LEFT)
        rows = scaled.to(dtype)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        if length < (i + 1) * C:
            # The last rows of a sequence: what follows them is another's, and not to be read.
            m_v = (o_r < length - i * C)[:, None] & every_v
            v_buffer.index(stage).store(gl.load(p_v + (rows_of_chunk * i) * s_vt, mask=m_v, other=0.0))
            fence_async_shared()
            block_barrier()
        if not WIDE:
            S = S * d_buffer.index(stage).load(L_STATE)
        v_block = v_buffer.index(stage).permute((1, 0))
        ke = ke_buffer.index(stage)
        r = wgmma(v_block, minus_eye, r, use_acc=False, is_async=True)
        r = wgmma(left, ke.slice(0, PART, dim=1).permute((1, 0)), r, is_async=True)
        # Meanwhile this chunk's state and the previous chunk's z are handed to the warps that store.
        mbarrier.wait(empty.index(out), ((i // OUT) & 1) ^ 1)
        s_buffer.index(out).slice(0, PART, dim=1).store(rounded)
        z_buffer.index(out).permute((1, 0)).store(rows)
        if WIDE:
            # All of the state as an operand, beside the state itself, would be more than the registers hold.
            r, left = wgmma_wait(0, deps=(r, left))
            rounded = rest.to(dtype)
            left = gl.convert_layout(rounded, L_LEFT)
            S = S * d_buffer.index(stage).load(L_STATE)
            r = wgmma(left, ke.slice(PART, PART, dim=1).permute((1, 0)), r, is_async=True)
            s_buffer.index(out).slice(PART, PART, dim=1).store(rounded)
        block_barrier()
        mbarrier.arrive(full.index(out), count=1)
        r, left = wgmma_wait(0, deps=(r, left))
        residual = gl.convert_layout((-r * (1 / LIFT)).to(dtype), L_LEFT)
        S = wgmma(residual, ka_buffer.index(stage), S, is_async=True)
        x_block = x_buffer.index(stage).permute((1, 0))
        scaled = wgmma(residual, x_block, scaled, use_acc=False, is_async=True)
        S, residual = wgmma_wait(1, deps=(S, residual))
        scaled, residual = wgmma_wait(0, deps=(scaled, residual))
    if n > 0:
        out = n % OUT
        mbarrier.wait(empty.index(out), ((n // OUT) & 1) ^ 1)
        z_buffer.index(out).permute((1, 0)).store(scaled.to(dtype))
        block_barrier()
        mbarrier.arrive(full.index(out), count=1)
    return S, n


@gluon.jit
def states_of_sequence(
    program, values, v, single, X, decays, initial_state, z, states, cu_seqlens, s_vb, s_vt, s_vh, T, T_row, NT,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, LIFT: gl.constexpr, KP: gl.constexpr,
    BV: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr, STORERS: gl.constexpr,
    EVERY_SECOND: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = v.dtype.element_ty
    L_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [num_warps, 1], [1, 0])
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, KP], dtype)

    NV: gl.constexpr = V // BV
    i_v = program % NV
    i_nh = program // NV
    i_h = i_nh % HV
    slot0, length, first, row0 = rows_of(i_nh // HV, cu_seqlens, T, T_row, NT, s_vb, s_vt, C)
    place0 = place_of(slot0, i_nh // HV, cu_seqlens, row0, NT, C, ODD)
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS))
    p_v = v + first + i_h.to(gl.int64) * s_vh + (o_r[:, None].to(gl.int64) * s_vt + o_v[None, :])
    S = gl.full([BV, KP], 0.0, gl.float32, L_STATE)
    if initial_state is not None:
        S = load_state(initial_state, i_nh, i_v, K, V, BV, KP, V_FIRST, L_STATE)

    ke_buffer, ka_buffer, x_buffer, v_buffer, d_buffer = chunk_buffers(dtype, C, C, KP, BV, STAGES)
    s_buffer = gl.allocate_shared_memory(dtype, [OUT, BV, KP], STATE)
    z_buffer = gl.allocate_shared_memory(dtype, [OUT, C, BV], VALUES)
    ready, free = pair_of_barriers(STAGES)
    full, empty = pair_of_barriers(OUT)
    # −I, times LIFT: as an operand of a product, v needs no change of layout.
    L_EYE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [num_warps, 1], [1, 0])
    e_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_EYE))
    e_c = gl.arange(0, C, layout=gl.SliceLayout(0, L_EYE))
    eye = gl.where(e_r[:, None] == e_c[None, :], -LIFT, 0.0).to(dtype)
    minus_eye = gl.allocate_shared_memory(dtype, [C, C], SQUARE, eye)
    fence_async_shared()
    block_barrier()

    gl.warp_specialize([
        (_states, (
            S, p_v, s_vt, length, ready, full, empty, ke_buffer, ka_buffer, x_buffer, v_buffer, d_buffer, s_buffer,
            z_buffer, minus_eye, L_ROWS, BV, C, KP, LIFT, STAGES, OUT,
        )),
        (_load_for_states, (
            values, single, X, decays, row0.to(gl.int32), i_h * s_vh + i_v * BV, slot0, i_h, length, ready, free,
            ke_buffer, ka_buffer, x_buffer, v_buffer, d_buffer, HV, C, KP, BV, STAGES,
        )),
        (_store_for_states, (
            states, z, place0, i_h, i_v, length, free, full, empty, s_buffer, z_buffer, HV, V, C, KP, BV, STAGES, OUT,
            STORERS, EVERY_SECOND,
        )),
    ], [1, STORERS], [40, 40])  # fmt: skip

"""The recurrences of the backward for Hopper, written in Gluon: the kernel, and its second half, which computes the
equations of ``backward_reverse``. ``backward_states_hopper`` has the first half. The second is its mirror image: it
stores the gradient of the state at the end of every chunk, or with EVERY_SECOND of every pair of chunks.

They take calls whose value channels fill whole blocks of BV (V = VP) and whose rows of v, or of the output's gradient,
are 16-byte aligned; other calls take the plain kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from kda_core_nvidia.backward_states_hopper import begin_loads, load_state, rows_of, states_of_sequence
from kda_core_nvidia.hopper import block_barrier, copy_block, fence_async_shared, mbarrier, wgmma, wgmma_wait
from kda_core_nvidia.recurrence_hopper import store_state
from kda_core_nvidia.recurrence_stores_hopper import (
    chunk_buffers,
    halves,
    pair_of_barriers,
    place_of,
    store_state_block,
)


@gluon.jit
def _load_for_reverse(
    gradients, pairs, single, P, decays, row0, column, slot0, i_h, length, ready, free,
    pair_buffer, a_buffer, p_buffer, o_buffer, d_buffer,
    HV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads for reverse, last chunk first."""
    begin_loads()
    n = (length + C - 1) // C
    for j in range(n):
        i = n - 1 - j
        stage = j % STAGES
        slot = ((slot0 + i) * HV + i_h).to(gl.int32)
        whole = length >= (i + 1) * C
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((j // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, (3 * C * KP + C * C + C * BV) * 2 + KP * 4, pred=whole)
        mbarrier.expect(bar, (3 * C * KP + C * C) * 2 + KP * 4, pred=whole == 0)
        copy_block(single, [slot * (3 * C) + 2 * C, 0], bar, a_buffer.index(stage))
        copy_block(decays, [slot, 0], bar, d_buffer.index(stage))
        copy_block(gradients, [row0 + i * C, column], bar, o_buffer.index(stage), pred=whole)
        copy_block(P, [slot * C, 0], bar, p_buffer.index(stage))
        copy_block(pairs, [slot * (3 * C), 0], bar, pair_buffer.index(stage))


@gluon.jit
def _store_for_reverse(
    state_grads, p_dv, place0, i_h, i_v, length, free, full, empty, s_buffer, v_buffer,
    HV: gl.constexpr, V: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    OUT: gl.constexpr, STORERS: gl.constexpr, EVERY_SECOND: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    """The warps that store for reverse: the gradient of the state at the end of chunk i, dv of i + 1."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [STORERS, 1], [1, 0])
    row = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, LAYOUT))
    rows_of_chunk = gl.to_tensor(C).to(gl.int64)
    n = (length + C - 1) // C
    for j in range(n + (n > 0).to(gl.int32)):
        i = n - 1 - j
        out = j % OUT
        place = (place0 + i) * HV + i_h
        mbarrier.wait(full.index(out), (j // OUT) & 1)
        mbarrier.arrive(free.index((j + STAGES - 1) % STAGES), count=1, pred=j > 0)
        if EVERY_SECOND:
            place = (place0 + i) // 2 * HV + i_h
        # The end of a pair, or with ODD the sequence's.
        ends = i % 2 == 1
        if ODD:
            ends = gl.minimum(i | 1, n - 1) == i
        if (j < n) & (ends | (not EVERY_SECOND)):
            store_state_block(state_grads + (place * V + i_v * BV) * KP, s_buffer.index(out), BV, KP, STORERS)
        if j > 0:
            at = p_dv + rows_of_chunk * (i + 1) * (HV * V) + (row[:, None] * (HV * V) + column[None, :])
            mask = (row < length - (i + 1) * C)[:, None] & (column >= 0)[None, :]
            gl.store(at, v_buffer.index(out).load(LAYOUT), mask=mask)
        block_barrier()
        mbarrier.arrive(empty.index(out), count=1)


@gluon.jit
def _reverse(
    S, p_do, s_ot, length, o_scale, ready, full, empty, pair_buffer, a_buffer, p_buffer, o_buffer, d_buffer,
    s_buffer, v_buffer,
    L_ROWS: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, LIFT: gl.constexpr, STAGES: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """The warps that multiply for reverse; answers the gradient of the initial state, times LIFT as S is."""
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = p_do.dtype.element_ty
    L_SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C, 16])
    L_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    WIDE: gl.constexpr = KP > 128
    PART: gl.constexpr = KP // 2 if WIDE else KP
    L_LEFT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, PART, 16]), 2)
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
    every_v = (gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS)) >= 0)[None, :]
    rows_of_chunk = gl.to_tensor(C).to(gl.int64)
    n = (length + C - 1) // C
    b_dv = gl.full([BV, C], 0.0, gl.float32, L_SMALL)
    for j in range(n):
        i = n - 1 - j
        stage = j % STAGES
        out = j % OUT
        if WIDE:
            part, rest = halves(S, BV, KP)
        else:
            part = S
        rounded = (part * (1 / LIFT)).to(dtype)
        left = gl.convert_layout(rounded, L_LEFT)
        rows = (b_dv * o_scale).to(dtype)
        mbarrier.wait(ready.index(stage), (j // STAGES) & 1)
        if length < (i + 1) * C:
            m_o = (o_r < length - i * C)[:, None] & every_v
            o_buffer.index(stage).store(gl.load(p_do + (rows_of_chunk * i) * s_ot, mask=m_o, other=0.0))
            fence_async_shared()
            block_barrier()
        if not WIDE:
            S = S * d_buffer.index(stage).load(L_STATE)
        do_block = o_buffer.index(stage).permute((1, 0))
        pair, ka = pair_buffer.index(stage), a_buffer.index(stage)
        b_dv = wgmma(left, ka.slice(0, PART, dim=1).permute((1, 0)), b_dv, use_acc=False, is_async=True)
        if WIDE:
            mbarrier.wait(empty.index(out), ((j // OUT) & 1) ^ 1)
            s_buffer.index(out).slice(0, PART, dim=1).store(rounded)
            b_dv, left = wgmma_wait(0, deps=(b_dv, left))
            rounded = (rest * (1 / LIFT)).to(dtype)
            left = gl.convert_layout(rounded, L_LEFT)
            S = S * d_buffer.index(stage).load(L_STATE)
            b_dv = wgmma(left, ka.slice(PART, PART, dim=1).permute((1, 0)), b_dv, is_async=True)
        b_dv = wgmma(do_block, p_buffer.index(stage), b_dv, is_async=True)
        S = wgmma(do_block, pair.slice(C, C), S, is_async=True)
        # Meanwhile this chunk's gradient of the state and the previous dv are handed to the warps that store.
        if not WIDE:
            mbarrier.wait(empty.index(out), ((j // OUT) & 1) ^ 1)
        s_buffer.index(out).slice(KP - PART, PART, dim=1).store(rounded)
        v_buffer.index(out).permute((1, 0)).store(rows)
        block_barrier()
        mbarrier.arrive(full.index(out), count=1)
        b_dv, left = wgmma_wait(1, deps=(b_dv, left))
        minus_dv = gl.convert_layout((-b_dv).to(dtype), L_LEFT)
        S = wgmma(minus_dv, pair.slice(0, C), S, is_async=True)
        S, minus_dv = wgmma_wait(0, deps=(S, minus_dv))
    if n > 0:
        out = n % OUT
        mbarrier.wait(empty.index(out), ((n // OUT) & 1) ^ 1)
        v_buffer.index(out).permute((1, 0)).store((b_dv * o_scale).to(dtype))
        block_barrier()
        mbarrier.arrive(full.index(out), count=1)
    return S, n


@gluon.jit
def _reverse_of_sequence(
    program, gradients, pairs, single, P, decays, do, grad_final_state, dv, state_grads, grad_initial_state, cu_seqlens,
    s_ob, s_ot, s_oh, T, T_row, NT, o_scale,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, LIFT: gl.constexpr, KP: gl.constexpr,
    BV: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr, STORERS: gl.constexpr,
    EVERY_SECOND: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = dv.dtype.element_ty
    L_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [num_warps, 1], [1, 0])
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, KP], dtype)

    NV: gl.constexpr = V // BV
    i_v = program % NV
    i_nh = program // NV
    i_h = i_nh % HV
    slot0, length, first, row0 = rows_of(i_nh // HV, cu_seqlens, T, T_row, NT, s_ob, s_ot, C)
    place0 = place_of(slot0, i_nh // HV, cu_seqlens, row0, NT, C, ODD)
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS))
    p_do = do + first + i_h.to(gl.int64) * s_oh + (o_r[:, None].to(gl.int64) * s_ot + o_v[None, :])
    p_dv = dv + (row0 * HV + i_h) * V + i_v * BV
    S = gl.full([BV, KP], 0.0, gl.float32, L_STATE)
    if grad_final_state is not None:
        # A gradient that passes through an empty sequence is not rounded by two factors.
        into = gl.where(length == 0, 1.0, LIFT / o_scale)
        S = load_state(grad_final_state, i_nh, i_v, K, V, BV, KP, V_FIRST, L_STATE) * into

    pair_buffer, a_buffer, p_buffer, o_buffer, d_buffer = chunk_buffers(dtype, 2 * C, C, KP, BV, STAGES)
    s_buffer = gl.allocate_shared_memory(dtype, [OUT, BV, KP], STATE)
    v_buffer = gl.allocate_shared_memory(dtype, [OUT, C, BV], VALUES)
    ready, free = pair_of_barriers(STAGES)
    full, empty = pair_of_barriers(OUT)
    fence_async_shared()
    block_barrier()

    S, _ = gl.warp_specialize([
        (_reverse, (
            S, p_do, s_ot, length, o_scale, ready, full, empty, pair_buffer, a_buffer, p_buffer, o_buffer, d_buffer,
            s_buffer, v_buffer, L_ROWS, BV, C, KP, LIFT, STAGES, OUT,
        )),
        (_load_for_reverse, (
            gradients, pairs, single, P, decays, row0.to(gl.int32), i_h * s_oh + i_v * BV, slot0, i_h, length, ready,
            free, pair_buffer, a_buffer, p_buffer, o_buffer, d_buffer, HV, C, KP, BV, STAGES,
        )),
        (_store_for_reverse, (
            state_grads, p_dv, place0, i_h, i_v, length, free, full, empty, s_buffer, v_buffer, HV, V, C, KP, BV,
            STAGES, OUT, STORERS, EVERY_SECOND, ODD,
        )),
    ], [1, STORERS], [40, 40])  # fmt: skip
    if grad_initial_state is not None:
        p_state = grad_initial_state + i_nh.to(gl.int64) * (K * V)
        S = S * gl.where(length == 0, 1.0, o_scale * (1 / LIFT))
        if V_FIRST:
            store_state(p_state + i_v * BV * K, S, K, 1, K, BV, KP)
        else:
            store_state(p_state + i_v * BV, S, 1, V, K, BV, KP)


@gluon.jit(do_not_specialize=["T", "T_row", "NT", "o_scale", "programs"])
def recurrences_hopper(
    values, gradients,  # descriptors of v and do as matrices with a row for each of B · T, by [C, BV]
    pairs,  # descriptor of keys as [slots · HV · 3 · C, KP] by [2 C, KP]: ke and qg of a chunk
    single,  # the same by [C, KP]: ke or kA
    X, P,  # descriptors of [slots · HV · C, C] by [C, C]
    decays,  # descriptor of D as [slots · HV, KP] by [1, KP]
    v, do, initial_state, grad_final_state,
    z,  # [slots, HV, C, VP], or by pairs
    states, state_grads,  # [slots, HV, VP, KP], or by pairs
    dv, grad_initial_state, cu_seqlens, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, T, T_row, NT,
    o_scale,  # as for backward_reverse
    programs,  # of states; as many of reverse follow. Or None: the forward has stored states and z
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, LIFT: gl.constexpr, KP: gl.constexpr,
    BV: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr, STAGES_REVERSE: gl.constexpr,
    OUT_REVERSE: gl.constexpr, STORERS: gl.constexpr, EVERY_SECOND: gl.constexpr,
    ODD: gl.constexpr,  # with EVERY_SECOND: a sequence may have an odd number of chunks
):  # fmt: skip
    if initial_state is not None or grad_final_state is not None:
        # The kernel ahead may have copied them.
        gdc_wait()
    reverse = (
        gradients, pairs, single, P, decays, do, grad_final_state, dv, state_grads, grad_initial_state, cu_seqlens,
        s_ob, s_ot, s_oh, T, T_row, NT, o_scale,
    )  # fmt: skip
    if programs is None:
        _reverse_of_sequence(
            gl.program_id(0), *reverse, HV, K, V, C, LIFT, KP, BV, V_FIRST, STAGES_REVERSE, OUT_REVERSE, STORERS,
            EVERY_SECOND, ODD,
        )  # fmt: skip
    elif gl.program_id(0) < programs:
        states_of_sequence(
            gl.program_id(0), values, v, single, X, decays, initial_state, z, states, cu_seqlens, s_vb, s_vt, s_vh,
            T, T_row, NT, HV, K, V, C, LIFT, KP, BV, V_FIRST, STAGES, OUT, STORERS, EVERY_SECOND, ODD,
        )  # fmt: skip
    else:
        _reverse_of_sequence(
            gl.program_id(0) - programs, *reverse, HV, K, V, C, LIFT, KP, BV, V_FIRST, STAGES_REVERSE, OUT_REVERSE,
            STORERS, EVERY_SECOND, ODD,
        )  # fmt: skip

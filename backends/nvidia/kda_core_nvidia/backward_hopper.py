"""The recurrences of the backward for Hopper, written in Gluon: the equations of ``backward_states`` and
``backward_reverse``, with loads in a warp of their own and the matrix unit kept busy, as in ``recurrence_hopper``.

They take calls whose value channels fill whole blocks of BV (V = VP) and whose rows of v, or of the output's gradient,
are 16-byte aligned; other calls take the plain kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kda_core_nvidia.recurrence_hopper import block_barrier, copy_block

store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _rows_of(i_n, cu_seqlens, T, T_row, NT, s_b, s_t, C: gl.constexpr):
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
def _state_pointers(
    state, i_nh, i_v, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, KP: gl.constexpr, V_FIRST: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Addresses [BV, KP] of a block of a dense state [N, HV, K, V] (or [N, HV, V, K]), and which of them exist."""
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, KP, layout=gl.SliceLayout(0, LAYOUT))
    at = state + i_nh.to(gl.int64) * (K * V)
    mask = (o_v < V)[:, None] & (o_k < K)[None, :]
    if V_FIRST:
        at = at + (o_v[:, None] * K + o_k[None, :])
    else:
        at = at + (o_k[None, :] * V + o_v[:, None])
    return at, mask


@gluon.jit
def _load_for_states(
    values, pairs, X, decays, value_row, value_column, slot0, i_h, length, ready, free,
    ke_buffer, ka_buffer, x_buffer, v_buffer, d_buffer,
    HV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads for ``states_hopper``."""
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
def _states(
    S, p_v, p_z, states, state_row, s_vt, length, ready, free, ke_buffer, ka_buffer, x_buffer, v_buffer, d_buffer,
    s_buffer, minus_eye,
    L_ROWS: gl.constexpr, HV: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that multiply in ``states_hopper``."""
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = p_v.dtype.element_ty
    L_SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C, 16])
    L_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_LEFT: gl.constexpr = gl.DotOperandLayout(0, L_STATE, 2)
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
    every_v = (gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS)) >= 0)[None, :]
    rows_of_chunk = gl.to_tensor(C).to(gl.int64)
    n = (length + C - 1) // C
    r = gl.full([BV, C], 0.0, gl.float32, L_SMALL)
    scaled = gl.full([BV, C], 0.0, gl.float32, L_SMALL)
    for i in range(n):
        stage = i % STAGES
        rounded = S.to(dtype)
        left = gl.convert_layout(rounded, L_LEFT)
        rows = scaled.to(dtype)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        if length < (i + 1) * C:
            # The last rows of a sequence: what follows them is another's, and not to be read.
            m_v = (o_r < length - i * C)[:, None] & every_v
            v_buffer.index(stage).store(gl.load(p_v + (rows_of_chunk * i) * s_vt, mask=m_v, other=0.0))
            fence_async_shared()
            block_barrier()
        S = S * d_buffer.index(stage).load(L_STATE)
        v_block = v_buffer.index(stage).permute((1, 0))
        r = warpgroup_mma(v_block, minus_eye, r, use_acc=False, is_async=True)
        r = warpgroup_mma(left, ke_buffer.index(stage).permute((1, 0)), r, is_async=True)
        # Meanwhile this chunk's state and the previous chunk's z are stored. The state first: the fence waits for every
        # store that the thread has begun.
        tma.store_wait(0)
        block_barrier()
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        s_buffer.store(rounded)
        fence_async_shared()
        block_barrier()
        store_block(states, [state_row + i * (HV * V), 0], s_buffer)
        m_z = (o_r >= 0)[:, None] & (i - 1 + every_v.to(gl.int32) > 0)
        gl.store(p_z + (rows_of_chunk * (i - 1)) * (HV * V), gl.convert_layout(rows.trans(), L_ROWS), mask=m_z)
        r, left = warpgroup_mma_wait(0, deps=(r, left))
        residual = gl.convert_layout((-r).to(dtype), L_LEFT)
        S = warpgroup_mma(residual, ka_buffer.index(stage), S, is_async=True)
        x_block = x_buffer.index(stage).permute((1, 0))
        scaled = warpgroup_mma(residual, x_block, scaled, use_acc=False, is_async=True)
        S, residual = warpgroup_mma_wait(1, deps=(S, residual))
        scaled, residual = warpgroup_mma_wait(0, deps=(scaled, residual))
    m_z = (o_r >= 0)[:, None] & (n - 1 + every_v.to(gl.int32) > 0)
    gl.store(p_z + (rows_of_chunk * (n - 1)) * (HV * V), gl.convert_layout(scaled.to(dtype).trans(), L_ROWS), mask=m_z)
    tma.store_wait(0)
    return S, n


@gluon.jit(do_not_specialize=["T", "T_row", "NT"])
def states_hopper(
    values,  # descriptor of v as a matrix with a row for each of B · T, by [C, BV]
    v,
    single,  # descriptor of keys as [slots · HV · 3 · C, KP] by [C, KP]
    X,  # descriptor of [slots · HV · C, C] by [C, C]
    decays,  # descriptor of D as [slots · HV, KP] by [1, KP]
    initial_state,
    z,  # [slots, HV, C, VP]
    states,  # descriptor of [slots · HV · VP, KP] by [BV, KP]
    cu_seqlens,
    s_vb,
    s_vt,
    s_vh,
    T,
    T_row,
    NT,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    KP: gl.constexpr,
    BV: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = v.dtype.element_ty
    L_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [num_warps, 1], [1, 0])
    SINGLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, KP], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, KP], dtype)
    ROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)

    i_v = gl.program_id(0)
    i_nh = gl.program_id(1)
    i_h = i_nh % HV
    slot0, length, first, row0 = _rows_of(i_nh // HV, cu_seqlens, T, T_row, NT, s_vb, s_vt, C)
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS))
    p_v = v + first + i_h * s_vh + (o_r[:, None].to(gl.int64) * s_vt + o_v[None, :])
    p_z = z + (slot0 * HV + i_h) * (C * V) + (o_r[:, None] * V + o_v[None, :])
    state_row = ((slot0 * HV + i_h) * V).to(gl.int32) + i_v * BV
    S = gl.full([BV, KP], 0.0, gl.float32, L_STATE)
    if initial_state is not None:
        p_state, m_state = _state_pointers(initial_state, i_nh, i_v, K, V, BV, KP, V_FIRST, L_STATE)
        S = gl.load(p_state, mask=m_state, other=0.0).to(gl.float32)

    ke_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, KP], SINGLE)
    ka_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, KP], SINGLE)
    x_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    v_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    d_buffer = gl.allocate_shared_memory(gl.float32, [STAGES, 1, KP], ROW)
    s_buffer = gl.allocate_shared_memory(dtype, [BV, KP], STATE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    L_EYE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [num_warps, 1], [1, 0])
    e_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_EYE))
    e_c = gl.arange(0, C, layout=gl.SliceLayout(0, L_EYE))
    eye = gl.where(e_r[:, None] == e_c[None, :], -1.0, 0.0).to(dtype)
    minus_eye = gl.allocate_shared_memory(dtype, [C, C], SQUARE, eye)
    fence_async_shared()
    block_barrier()

    gl.warp_specialize(
        [
            (
                _states,
                (
                    S, p_v, p_z, states, state_row, s_vt, length, ready, free, ke_buffer, ka_buffer, x_buffer, v_buffer,
                    d_buffer, s_buffer, minus_eye, L_ROWS, HV, V, BV, C, KP, STAGES,
                ),
            ),
            (
                _load_for_states,
                (
                    values, single, X, decays, row0.to(gl.int32), i_h * s_vh + i_v * BV, slot0, i_h, length, ready,
                    free, ke_buffer, ka_buffer, x_buffer, v_buffer, d_buffer, HV, C, KP, BV, STAGES,
                ),
            ),
        ],
        [1],
        [32],
    )  # fmt: skip


@gluon.jit
def _load_for_reverse(
    gradients, pairs, single, P, decays, row0, column, slot0, i_h, length, ready, free,
    pair_buffer, a_buffer, p_buffer, o_buffer, d_buffer,
    HV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads for ``reverse_hopper``, last chunk first."""
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
def _reverse(
    S, p_do, p_dv, state_grads, state_row, s_ot, length, ready, free, pair_buffer, a_buffer, p_buffer, o_buffer,
    d_buffer, s_buffer,
    L_ROWS: gl.constexpr, HV: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that multiply in ``reverse_hopper``; answers the gradient of the initial state."""
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = p_dv.dtype.element_ty
    L_SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C, 16])
    L_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_LEFT: gl.constexpr = gl.DotOperandLayout(0, L_STATE, 2)
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
    every_v = (gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS)) >= 0)[None, :]
    rows_of_chunk = gl.to_tensor(C).to(gl.int64)
    n = (length + C - 1) // C
    b_dv = gl.full([BV, C], 0.0, gl.float32, L_SMALL)
    rows = b_dv.to(dtype)
    for j in range(n):
        i = n - 1 - j
        stage = j % STAGES
        rounded = S.to(dtype)
        left = gl.convert_layout(rounded, L_LEFT)
        mbarrier.wait(ready.index(stage), (j // STAGES) & 1)
        if length < (i + 1) * C:
            m_o = (o_r < length - i * C)[:, None] & every_v
            o_buffer.index(stage).store(gl.load(p_do + (rows_of_chunk * i) * s_ot, mask=m_o, other=0.0))
            fence_async_shared()
            block_barrier()
        S = S * d_buffer.index(stage).load(L_STATE)
        do_block = o_buffer.index(stage).permute((1, 0))
        pair = pair_buffer.index(stage)
        b_dv = warpgroup_mma(do_block, p_buffer.index(stage), b_dv, use_acc=False, is_async=True)
        b_dv = warpgroup_mma(left, a_buffer.index(stage).permute((1, 0)), b_dv, is_async=True)
        S = warpgroup_mma(do_block, pair.slice(C, C), S, is_async=True)
        # Meanwhile this chunk's gradient of the state and the previous dv are stored; the state first, as above.
        tma.store_wait(0)
        block_barrier()
        mbarrier.arrive(free.index((j + STAGES - 1) % STAGES), count=1, pred=j > 0)
        s_buffer.store(rounded)
        fence_async_shared()
        block_barrier()
        store_block(state_grads, [state_row + i * (HV * V), 0], s_buffer)
        m_dv = (o_r < length - (i + 1) * C)[:, None] & every_v
        gl.store(p_dv + (rows_of_chunk * (i + 1)) * (HV * V), gl.convert_layout(rows.trans(), L_ROWS), mask=m_dv)
        b_dv, left = warpgroup_mma_wait(1, deps=(b_dv, left))
        rows = b_dv.to(dtype)
        minus_dv = gl.convert_layout((-b_dv).to(dtype), L_LEFT)
        S = warpgroup_mma(minus_dv, pair.slice(0, C), S, is_async=True)
        S, minus_dv = warpgroup_mma_wait(0, deps=(S, minus_dv))
    m_dv = (o_r < length)[:, None] & every_v
    gl.store(p_dv, gl.convert_layout(rows.trans(), L_ROWS), mask=m_dv)
    tma.store_wait(0)
    return S, n


@gluon.jit(do_not_specialize=["T", "T_row", "NT"])
def reverse_hopper(
    gradients,  # descriptor of do as a matrix with a row for each of B · T, by [C, BV]
    pairs,  # descriptor of keys as [slots · HV · 3 · C, KP] by [2 C, KP]: ke and qg of a chunk
    single,  # the same by [C, KP]: kA
    P,  # descriptor of [slots · HV · C, C] by [C, C]
    decays,  # descriptor of D as [slots · HV, KP] by [1, KP]
    do,
    grad_final_state,
    dv,
    state_grads,  # descriptor of [slots · HV · VP, KP] by [BV, KP]
    grad_initial_state,
    cu_seqlens,
    s_ob,
    s_ot,
    s_oh,
    T,
    T_row,
    NT,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    KP: gl.constexpr,
    BV: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = dv.dtype.element_ty
    L_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [num_warps, 1], [1, 0])
    PAIR: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * C, KP], dtype)
    SINGLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, KP], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, KP], dtype)
    ROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)

    i_v = gl.program_id(0)
    i_nh = gl.program_id(1)
    i_h = i_nh % HV
    slot0, length, first, row0 = _rows_of(i_nh // HV, cu_seqlens, T, T_row, NT, s_ob, s_ot, C)
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS))
    p_do = do + first + i_h * s_oh + (o_r[:, None].to(gl.int64) * s_ot + o_v[None, :])
    p_dv = dv + (row0 * HV + i_h) * V + (o_r[:, None].to(gl.int64) * (HV * V) + o_v[None, :])
    state_row = ((slot0 * HV + i_h) * V).to(gl.int32) + i_v * BV
    S = gl.full([BV, KP], 0.0, gl.float32, L_STATE)
    if grad_final_state is not None:
        p_state, m_state = _state_pointers(grad_final_state, i_nh, i_v, K, V, BV, KP, V_FIRST, L_STATE)
        S = gl.load(p_state, mask=m_state, other=0.0).to(gl.float32)

    pair_buffer = gl.allocate_shared_memory(dtype, [STAGES, 2 * C, KP], PAIR)
    a_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, KP], SINGLE)
    p_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    o_buffer = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    d_buffer = gl.allocate_shared_memory(gl.float32, [STAGES, 1, KP], ROW)
    s_buffer = gl.allocate_shared_memory(dtype, [BV, KP], STATE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    block_barrier()

    S, _ = gl.warp_specialize(
        [
            (
                _reverse,
                (
                    S, p_do, p_dv, state_grads, state_row, s_ot, length, ready, free, pair_buffer, a_buffer, p_buffer,
                    o_buffer, d_buffer, s_buffer, L_ROWS, HV, V, BV, C, KP, STAGES,
                ),
            ),
            (
                _load_for_reverse,
                (
                    gradients, pairs, single, P, decays, row0.to(gl.int32), i_h * s_oh + i_v * BV, slot0, i_h, length,
                    ready, free, pair_buffer, a_buffer, p_buffer, o_buffer, d_buffer, HV, C, KP, BV, STAGES,
                ),
            ),
        ],
        [1],
        [32],
    )  # fmt: skip
    if grad_initial_state is not None:
        p_state, m_state = _state_pointers(grad_initial_state, i_nh, i_v, K, V, BV, KP, V_FIRST, L_STATE)
        gl.store(p_state, S.to(grad_initial_state.dtype.element_ty), mask=m_state)

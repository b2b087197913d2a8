"""The recurrences of the backward for Hopper, written in Gluon: the equations of ``backward_states`` and of
``backward_reverse``, with warps that load and that store beside those that multiply.

As in ``recurrence_hopper`` the loading warp runs a few chunks ahead. Every chunk's state leaves the chip, which is more
than what is loaded. The warps that multiply only put it into shared memory, while the chunk's first products run, with
the rows of the chunk before it; from there others copy it, whole rows at a time. (Copies through descriptors would need
a fence of the warps that multiply, which waits for all that they have under way.)

Reverse is the mirror image of the states' recurrence: it goes from the last chunk to the first, and stores the gradient
of the state at the end of every chunk.

With EVERY_SECOND only every second state is stored: the one at the start of a pair of chunks, and the gradient at its
end. States and z are numbered by pairs then, as slots of 2 C rows, [pairs, HV, ..]. Where numbers of chunks may be ODD,
a sequence's last pair may have one chunk.

They take calls whose value channels fill whole blocks of BV (V = VP) and whose rows of v, or of the output's gradient,
are 16-byte aligned; other calls take the plain kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
def _load_state(
    state, i_nh, i_v, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, KP: gl.constexpr, V_FIRST: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Transposed block [BV, KP] of a dense state [N, HV, K, V] (or [N, HV, V, K]), in float32."""
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, KP, layout=gl.SliceLayout(0, LAYOUT))
    at = state + i_nh.to(gl.int64) * (K * V)
    at = at + (o_v[:, None] * K + o_k[None, :] if V_FIRST else o_k[None, :] * V + o_v[:, None])
    return gl.load(at, mask=(o_v >= 0)[:, None] & (o_k < K)[None, :], other=0.0).to(gl.float32)


@gluon.jit
def _load(given, buffers, HV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr):
    """The warp that loads: for states, or where ``pairs`` are given for reverse, last chunk first."""
    rows, pairs, single, square, decays, row0, column, slot0, i_h, length, ready, free = given
    keys, ka_buffer, square_buffer, row_buffer, d_buffer = buffers
    KEYS: gl.constexpr = (keys.shape[1] + C) * KP
    # Only when the kernel ahead has ended may the one behind begin, which reads what was written before that, too.
    gdc_wait()
    gdc_launch_dependents()
    n = (length + C - 1) // C
    for j in range(n):
        i = j if pairs is None else n - 1 - j
        stage = j % STAGES
        slot = ((slot0 + i) * HV + i_h).to(gl.int32)
        whole = length >= (i + 1) * C
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), ((j // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, (KEYS + C * C + C * BV) * 2 + KP * 4, pred=whole)
        mbarrier.expect(bar, (KEYS + C * C) * 2 + KP * 4, pred=whole == 0)
        # Operands of the first products come first.
        if pairs is None:
            copy_block(single, [slot * (3 * C), 0], bar, keys.index(stage))
        else:
            copy_block(single, [slot * (3 * C) + 2 * C, 0], bar, ka_buffer.index(stage))
        copy_block(decays, [slot, 0], bar, d_buffer.index(stage))
        copy_block(rows, [row0 + i * C, column], bar, row_buffer.index(stage), pred=whole)
        if pairs is None:
            copy_block(single, [slot * (3 * C) + 2 * C, 0], bar, ka_buffer.index(stage))
        copy_block(square, [slot * C, 0], bar, square_buffer.index(stage))
        if pairs is not None:
            copy_block(pairs, [slot * (3 * C), 0], bar, keys.index(stage))


@gluon.jit
def _store(
    states, z, p_dv, place0, i_h, i_v, length, free, full, empty, s_buffer, out_buffer,
    HV: gl.constexpr, V: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    OUT: gl.constexpr, STORERS: gl.constexpr, EVERY_SECOND: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    """The warps that store: the state at the start of chunk i, and z of chunk i - 1. Reverse, where ``z`` is None: the
    gradient of the state at the end of chunk i, and dv of chunk i + 1.

    Args:
        place0: the first slot, or twice the first pair.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [STORERS, 1], [1, 0])
    row = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, LAYOUT))
    rows_of_chunk = gl.to_tensor(C).to(gl.int64)
    n = (length + C - 1) // C
    for j in range(n + (n > 0).to(gl.int32)):
        i = j if z is not None else n - 1 - j
        out = j % OUT
        place = (place0 + i) * HV + i_h
        mbarrier.wait(full.index(out), (j // OUT) & 1)
        # The warps that hand over a chunk have done with what was loaded for the one before.
        mbarrier.arrive(free.index((j + STAGES - 1) % STAGES), count=1, pred=j > 0)
        before = (place - HV) * C
        if EVERY_SECOND:
            place = (place0 + i) // 2 * HV + i_h
            before = ((place0 + i - 1) // 2 * HV + i_h) * (2 * C) + (i - 1) % 2 * C
        # At the start of a pair; in reverse at its end, or with ODD at the sequence's.
        stores = i % 2 == (1 if z is None else 0)
        if ODD and z is None:
            stores = gl.minimum(i | 1, n - 1) == i
        if (j < n) & (stores | (not EVERY_SECOND)):
            store_state_block(states + (place * V + i_v * BV) * KP, s_buffer.index(out), BV, KP, STORERS)
        if j > 0:
            if z is not None:
                at = z + before * V + i_v * BV + (row[:, None] * V + column[None, :])
                gl.store(at, out_buffer.index(out).load(LAYOUT))
            else:
                at = p_dv + rows_of_chunk * (i + 1) * (HV * V) + (row[:, None] * (HV * V) + column[None, :])
                mask = (row < length - (i + 1) * C)[:, None] & (column >= 0)[None, :]
                gl.store(at, out_buffer.index(out).load(LAYOUT), mask=mask)
        block_barrier()
        mbarrier.arrive(empty.index(out), count=1)


@gluon.jit
def _states(
    S, p_v, s_vt, length, ready, full, empty, buffers, s_buffer, z_buffer, minus_eye, L_ROWS: gl.constexpr,
    BV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, LIFT: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The warps that multiply for states."""
    ke_buffer, ka_buffer, x_buffer, v_buffer, d_buffer = buffers
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
        part, rest = halves(S, BV, KP) if WIDE else (S, None)
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
def _reverse(
    S, p_do, s_ot, length, o_scale, ready, full, empty, buffers, s_buffer, v_buffer, L_ROWS: gl.constexpr,
    BV: gl.constexpr, C: gl.constexpr, KP: gl.constexpr, LIFT: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The warps that multiply for reverse; answers the gradient of the initial state, times LIFT as S is."""
    pair_buffer, a_buffer, p_buffer, o_buffer, d_buffer = buffers
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
        part, rest = halves(S, BV, KP) if WIDE else (S, None)
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
def _sequence(
    program, rows, pairs, single, square, decays, x, state, z, states, dv, grad_initial_state, cu_seqlens, s_xb, s_xt,
    s_xh, T, T_row, NT, o_scale, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    LIFT: gl.constexpr, KP: gl.constexpr, BV: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr,
    OUT: gl.constexpr, STORERS: gl.constexpr, EVERY_SECOND: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    """A block of value channels of a head of a sequence, of states or of reverse.

    Args:
        rows, x: v, of which z and the states follow; or do, of which dv and the states' gradients follow.
        pairs: None for states.
        square: X, or P.
        state: the initial state, or the gradient of the final one; or None.
    """
    num_warps: gl.constexpr = gl.num_warps()
    REVERSE: gl.constexpr = pairs is not None
    dtype: gl.constexpr = x.dtype.element_ty
    L_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KP, 16])
    L_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [num_warps, 1], [1, 0])
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, KP], dtype)

    NV: gl.constexpr = V // BV
    i_v = program % NV
    i_nh = program // NV
    i_h = i_nh % HV
    slot0, length, first, row0 = rows_of(i_nh // HV, cu_seqlens, T, T_row, NT, s_xb, s_xt, C)
    place0 = place_of(slot0, i_nh // HV, cu_seqlens, row0, NT, C, ODD)
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_ROWS))
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, L_ROWS))
    p_x = x + first + i_h.to(gl.int64) * s_xh + (o_r[:, None].to(gl.int64) * s_xt + o_v[None, :])
    if REVERSE:
        p_dv = dv + (row0 * HV + i_h) * V + i_v * BV
    S = gl.full([BV, KP], 0.0, gl.float32, L_STATE)
    if state is not None:
        if REVERSE:
            # A gradient that passes through an empty sequence is not rounded by two factors.
            into = gl.where(length == 0, 1.0, LIFT / o_scale)
        S = _load_state(state, i_nh, i_v, K, V, BV, KP, V_FIRST, L_STATE)
        if REVERSE:
            S = S * into

    buffers = chunk_buffers(dtype, 2 * C if REVERSE else C, C, KP, BV, STAGES)
    s_buffer = gl.allocate_shared_memory(dtype, [OUT, BV, KP], STATE)
    out_buffer = gl.allocate_shared_memory(dtype, [OUT, C, BV], VALUES)
    ready, free = pair_of_barriers(STAGES)
    full, empty = pair_of_barriers(OUT)
    if not REVERSE:
        # −I, times LIFT: as an operand of a product, v needs no change of layout.
        SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
        L_EYE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [num_warps, 1], [1, 0])
        e_r = gl.arange(0, C, layout=gl.SliceLayout(1, L_EYE))
        e_c = gl.arange(0, C, layout=gl.SliceLayout(0, L_EYE))
        eye = gl.where(e_r[:, None] == e_c[None, :], -LIFT, 0.0).to(dtype)
        minus_eye = gl.allocate_shared_memory(dtype, [C, C], SQUARE, eye)
    fence_async_shared()
    block_barrier()
    loads = (
        rows, pairs, single, square, decays, row0.to(gl.int32), i_h * s_xh + i_v * BV, slot0, i_h, length, ready, free
    )  # fmt: skip
    if REVERSE:
        S, _ = gl.warp_specialize([
            (_reverse, (
                S, p_x, s_xt, length, o_scale, ready, full, empty, buffers, s_buffer, out_buffer, L_ROWS, BV, C, KP,
                LIFT, STAGES, OUT,
            )),
            (_load, (loads, buffers, HV, C, KP, BV, STAGES)),
            (_store, (
                states, None, p_dv, place0, i_h, i_v, length, free, full, empty, s_buffer, out_buffer, HV, V, C, KP, BV,
                STAGES, OUT, STORERS, EVERY_SECOND, ODD,
            )),
        ], [1, STORERS], [40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_states, (
                S, p_x, s_xt, length, ready, full, empty, buffers, s_buffer, out_buffer, minus_eye, L_ROWS, BV, C, KP,
                LIFT, STAGES, OUT,
            )),
            (_load, (loads, buffers, HV, C, KP, BV, STAGES)),
            (_store, (
                states, z, None, place0, i_h, i_v, length, free, full, empty, s_buffer, out_buffer, HV, V, C, KP, BV,
                STAGES, OUT, STORERS, EVERY_SECOND, ODD,
            )),
        ], [1, STORERS], [40, 40])  # fmt: skip
    if REVERSE and grad_initial_state is not None:
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
        gradients, pairs, single, P, decays, do, grad_final_state, None, state_grads, dv, grad_initial_state,
        cu_seqlens, s_ob, s_ot, s_oh, T, T_row, NT, o_scale,
    )  # fmt: skip
    if programs is None:
        _sequence(
            gl.program_id(0), *reverse, HV, K, V, C, LIFT, KP, BV, V_FIRST, STAGES_REVERSE, OUT_REVERSE, STORERS,
            EVERY_SECOND, ODD,
        )  # fmt: skip
    elif gl.program_id(0) < programs:
        _sequence(
            gl.program_id(0), values, None, single, X, decays, v, initial_state, z, states, None, None, cu_seqlens,
            s_vb, s_vt, s_vh, T, T_row, NT, o_scale, HV, K, V, C, LIFT, KP, BV, V_FIRST, STAGES, OUT, STORERS,
            EVERY_SECOND, ODD,
        )  # fmt: skip
    else:
        _sequence(
            gl.program_id(0) - programs, *reverse, HV, K, V, C, LIFT, KP, BV, V_FIRST, STAGES_REVERSE, OUT_REVERSE,
            STORERS, EVERY_SECOND, ODD,
        )  # fmt: skip

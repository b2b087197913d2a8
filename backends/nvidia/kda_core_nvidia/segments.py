"""Kernels and launches for a sequence that is cut into segments (``kda_core.triton_lib.segments`` has the algorithm).

Matrices are held as the recurrences hold states, transposed: starts, ends and b [.., V, K], Mᵀ [.., K, K].
"""

import triton
import triton.language as tl

from kda_core_nvidia.backward_states import load_state, rows_of, store_state


@triton.jit(do_not_specialize=["T", "count"])
def transitions_kernel(
    v, keys, D, initial_state, transitions, cu_seqlens, s_vt, s_vh, T, count,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LIFT: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Rows of [b | Mᵀ] of one segment and head: transitions [count - 1, HV, VP + KP, KP] in float32.

    The first segment's b starts from the call's own state, and its M is not needed. With EVERY all of every segment is
    computed, and no state is given. Grid: ((VP + KP) / BV, (count - 1) · HV), with EVERY count · HV.
    """
    i_row = tl.program_id(0) * BV
    i_nh = tl.program_id(1)
    i_n = i_nh // HV
    i_h = i_nh % HV
    if not EVERY:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if (i_n == 0) & (i_row >= VP):
            return
    dt = keys.dtype.element_ty
    slot0, length, first, _ = rows_of(i_n, cu_seqlens, T, T, tl.cdiv(T, C), 0, s_vt, C)
    v += first + i_h.to(tl.int64) * s_vh
    o_k = tl.arange(0, KP)
    o_v = i_row + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    o_ck = o_c[:, None] * KP + o_k[None, :]
    # A row of Mᵀ starts as one of the identity's.
    b_s = tl.where((o_v - VP)[:, None] == o_k[None, :], 1.0, 0.0)
    if initial_state is not None:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if i_n == 0:
            b_s = load_state(initial_state, i_h, o_v, o_k, K, V, V_FIRST)
    for i in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        block = (slot0 + i) * HV + i_h
        m_cv = (i * C + o_c < length)[:, None] & (o_v < V)[None, :]
        b_v = tl.load(v + tl.cast(i, tl.int64) * C * s_vt + o_c[:, None] * s_vt + o_v[None, :], mask=m_cv, other=0.0)
        p_keys = keys + block * (3 * C * KP)
        b_ke = tl.load(p_keys + o_ck)
        b_ka = tl.load(p_keys + 2 * C * KP + o_ck)
        b_d = tl.load(D + block * KP + o_k)
        b_r = tl.dot(b_s.to(dt), tl.trans(b_ke), input_precision=PRECISION) * (1 / LIFT)
        b_r = (tl.trans(b_v).to(tl.float32) - b_r).to(dt)
        b_s = tl.dot(b_r, b_ka, b_s * b_d[None, :], input_precision=PRECISION)
    out = transitions + (i_n.to(tl.int64) * HV + i_h) * ((VP + KP) * KP)
    tl.store(out + o_v[:, None] * KP + o_k[None, :], b_s)


@triton.jit(do_not_specialize=["T", "count", "o_scale"])
def reverse_transitions_kernel(
    keys, P, D, do, grad_final_state, additions, cu_seqlens, s_ot, s_oh, T, count, o_scale,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LIFT: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Gradients of the states at the starts of segments 1 to count - 1, as far as their own outputs add: additions
    [count - 1, HV, VP, KP] in float32. The last one's starts from the final state's gradient. ``o_scale``: as for
    ``backward_reverse``. With EVERY: of every segment, without a gradient of a final state.

    Grid: (VP / BV, (count - 1) · HV), with EVERY count · HV.
    """
    i_v = tl.program_id(0)
    i_nh = tl.program_id(1)
    i_n = i_nh // HV + (1 - EVERY)
    i_h = i_nh % HV
    dt = keys.dtype.element_ty
    slot0, length, first, _ = rows_of(i_n, cu_seqlens, T, T, tl.cdiv(T, C), 0, s_ot, C)
    do += first + i_h.to(tl.int64) * s_oh
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    o_ck = o_c[:, None] * KP + o_k[None, :]
    o_cc = o_c[:, None] * C + o_c[None, :]
    b_s = tl.zeros([BV, KP], tl.float32)
    if grad_final_state is not None:  # noqa: SIM102
        if i_n == count - 1:
            b_s = load_state(grad_final_state, i_h, o_v, o_k, K, V, V_FIRST) * (LIFT / o_scale)
    last = tl.cdiv(length, C) - 1
    for j in tl.range(0, last + 1, num_stages=STAGES):
        i = last - j
        block = (slot0 + i) * HV + i_h
        p_keys = keys + block * (3 * C * KP)
        b_ke = tl.load(p_keys + o_ck)
        b_qg = tl.load(p_keys + C * KP + o_ck)
        b_ka = tl.load(p_keys + 2 * C * KP + o_ck)
        b_d = tl.load(D + block * KP + o_k)
        m_cv = (i * C + o_c < length)[:, None] & (o_v < V)[None, :]
        o_do = tl.cast(i, tl.int64) * C * s_ot + o_c[:, None] * s_ot + o_v[None, :]
        b_do = tl.trans(tl.load(do + o_do, mask=m_cv, other=0.0).to(dt))
        b_p = tl.load(P + block * (C * C) + o_cc)
        b_dv = tl.dot((b_s * (1 / LIFT)).to(dt), tl.trans(b_ka), input_precision=PRECISION)
        b_dv = tl.dot(b_do, b_p, b_dv, input_precision=PRECISION).to(dt)
        b_s = tl.dot(b_do, b_qg, b_s * b_d[None, :], input_precision=PRECISION)
        b_s = tl.dot(-b_dv, b_ke, b_s, input_precision=PRECISION)
    out = additions + i_nh.to(tl.int64) * (VP * KP)
    tl.store(out + o_v[:, None] * KP + o_k[None, :], b_s * (o_scale * (1 / LIFT)))


@triton.jit(do_not_specialize=["count"])
def join_kernel(
    given, transitions, additions, states, count,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, V_FIRST: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """States [count, HV, V, K] (float32) at the starts of the segments, or, in reverse, state gradients at their ends.

    Forward: x(0) is given, x(1) = b(0), x(s + 1) = M(s) x(s) + b(s). Reverse: x(count - 1) is given,
    x(count - 2) = a(count - 1), x(s - 1) = M(s)ᵀ x(s) + a(s). Products in float32; M(s) is used for 0 < s < count - 1.
    Grid: (VP / BV, HV).
    """
    i_v = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, KP)
    mask = (o_v < V)[:, None] & (o_k < K)[None, :]
    at = states + i_h * (V * K) + o_v[:, None] * K + o_k[None, :]
    step = tl.full([], HV * V * K, tl.int64)
    matrices = transitions + i_h * ((VP + KP) * KP)
    matrix_step = tl.full([], HV * (VP + KP) * KP, tl.int64)
    b_x = tl.zeros([BV, KP], tl.float32)
    if given is not None:
        b_x = load_state(given, i_h, o_v, o_k, K, V, V_FIRST)
    i = (count - 1) * REVERSE
    tl.store(at + i * step, b_x, mask=mask)
    for j in range(1, count):
        if REVERSE:
            # The state gradient at the end of segment i - 1.
            own = additions + ((i - 1) * HV + i_h) * (VP * KP)
        else:
            own = matrices + i * matrix_step
        b_x = tl.load(own + o_v[:, None] * KP + o_k[None, :])
        if j > 1:
            # Other threads of this program read in blocks what it has just stored.
            tl.debug_barrier()
            m = matrices + i * matrix_step + VP * KP
            for first in range(0, KP, BK):
                o_b = first + tl.arange(0, BK)
                m_b = (o_v < V)[:, None] & (o_b < K)[None, :]
                b_a = tl.load(states + i * step + i_h * (V * K) + o_v[:, None] * K + o_b[None, :], mask=m_b, other=0.0)
                if REVERSE:
                    # Σ_k x[v, k] Mᵀ[j, k]
                    b_m = tl.trans(tl.load(m + o_k[:, None] * KP + o_b[None, :]))
                else:
                    # Σ_j x[v, j] Mᵀ[j, k]
                    b_m = tl.load(m + o_b[:, None] * KP + o_k[None, :])
                b_x = tl.dot(b_a, b_m, b_x, input_precision=PRECISION)
        i += 1 - 2 * REVERSE
        tl.store(at + i * step, b_x, mask=mask)


@triton.jit(do_not_specialize=["rows", "per", "sequences", "count_starts"])
def chain_kernel(
    matrices,  # of segments: M (reverse: Mᵀ) in float32, or as two parts in bfloat16
    additions,  # of segments, float32
    given,  # states at the starts of sequences (reverse: gradients at the ends), any dtype and strides; or None
    places,  # [F]: of fragments, in ``given``, ``sequences`` for none
    starts,  # [.., HV, K, s_sk] float32: other states at the starts of fragments, in the last V columns; or None
    sources,  # [F]: of fragments, in ``starts``, ``count_starts`` and more for none; or None
    states,  # [segments, HV, V, K] float32: the same for segments, written; or None
    ends,  # states at the ends of fragments [F, HV, K, V] (or [F, HV, V, K]), any dtype, written; or None
    results,  # [F]: of fragments, in ``ends``, ``sequences`` for none; or None
    sends,  # [P]: the fragments of ``summary``; or None
    whole,  # [P, HV, K, s_wk] float32: the matrices whose transposes are those of ``summary``; or None
    summary,  # float32 [P, HV, K, K + V]: the product of the matrices of a fragment | sums, written; or None
    sums,  # float32 [F, HV, K, V]: what a fragment adds to a state of zeros, written; or None
    cu_seqlens,  # [F + 1]: boundaries of fragments in segments of ``rows`` rows (``segments_kernel``); or None
    rows,
    per,  # segments of each fragment, without cu_seqlens
    sequences, count_starts, s_gn, s_gh, s_gk, s_gv, s_sk, s_wk,
    s_m, s_mi, s_mo,  # strides of matrices by segment and head, and by channels of what they multiply and of the result
    s_part,  # from the first part to the second
    s_a, s_ak, s_av,  # strides of additions by segment and head, and by channels
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x ← M x + b over the segments of each fragment, transposed, products in float32.

    From ``given`` and ``starts``: ``states`` at each step, and ``ends``, and ``sums``. Or from [I | given] ``summary``.
    Grid: (columns / BV, HV, F or P) with columns V, or padded K and V.
    """
    i_h = tl.program_id(1)
    i_p = tl.program_id(2)
    i_f = i_p
    if sends is not None:
        i_f = tl.load(sends + i_p).to(tl.int32)
    o_k = tl.arange(0, KP)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    if cu_seqlens is None:
        first = i_f * per
        count = per
    else:
        begin = tl.load(cu_seqlens + i_f).to(tl.int64)
        first = (begin // rows).to(tl.int32) + i_f
        count = ((tl.load(cu_seqlens + i_f + 1).to(tl.int64) - begin + rows - 1) // rows).to(tl.int32)
    m_k = (o_k < K)[None, :]
    if summary is not None:
        # Columns of the identity come first.
        o_v -= KP
    m_v = ((o_v >= 0) & (o_v < V))[:, None]
    i_ph = (i_p * HV + i_h).to(tl.int64)
    i_fh = (i_f * HV + i_h).to(tl.int64)
    at = o_k[None, :] * V + o_v[:, None]
    x = tl.zeros([BV, KP], tl.float32)
    if starts is not None:
        source, known = i_f.to(tl.int64), m_v & m_k
        if sources is not None:
            source = tl.load(sources + i_f).to(tl.int64)
            known &= (o_v < tl.where(source < count_starts, V, 0))[:, None]
        p_s = starts + ((source * HV + i_h) * K + 1) * s_sk - V
        x = tl.load(p_s + o_k[None, :] * s_sk + o_v[:, None], mask=known, other=0.0)
    if given is not None:
        place = tl.load(places + i_f).to(tl.int64)
        p_g = given + place * s_gn + i_h.to(tl.int64) * s_gh
        m_g = m_v & m_k & (o_v < tl.where(place < sequences, V, 0))[:, None]
        at_g = o_k[None, :].to(tl.int64) * s_gk + o_v[:, None].to(tl.int64) * s_gv
        own = tl.load(p_g + at_g, mask=m_g, other=0.0).to(tl.float32)
        x = own if starts is None else x + own
    if summary is not None:
        # Columns of the identity, or of matrices that are known.
        m_i = (o_v < 0)[:, None]
        if whole is None:
            x = tl.where((o_v + KP)[:, None] == o_k[None, :], 1.0, x)
        else:
            p_w = whole + i_ph * K * s_wk + (o_v + KP)[:, None] * s_wk + o_k[None, :]
            x = tl.where(m_i, tl.load(p_w, mask=m_i & (o_v + KP < K)[:, None] & m_k, other=0.0), x)
            count *= (tl.program_id(0) * BV >= KP).to(tl.int32)
    m_square = (o_k < K)[:, None] & m_k
    p_m = matrices + o_k[:, None] * s_mi + o_k[None, :] * s_mo
    p_a = additions + o_v[:, None] * s_av + o_k[None, :] * s_ak
    for j in tl.range(0, count, num_stages=STAGES):
        i_s = first + j
        if REVERSE:
            i_s = first + count - 1 - j
        i_sh = (i_s * HV + i_h).to(tl.int64)
        if states is not None:
            tl.store(states + i_sh * (V * K) + o_v[:, None] * K + o_k[None, :], x, mask=m_v & m_k)
        m = tl.load(p_m + i_sh * s_m, mask=m_square, other=0.0).to(tl.float32)
        if matrices.dtype.element_ty == tl.bfloat16:
            m += tl.load(p_m + i_sh * s_m + s_part, mask=m_square, other=0.0).to(tl.float32)
        b = tl.load(p_a + i_sh * s_a, mask=m_v & m_k, other=0.0)
        x = tl.dot(x, m, b, input_precision=PRECISION)
    if ends is not None:
        result, m_e = i_f.to(tl.int64), m_v & m_k
        if results is not None:
            result = tl.load(results + i_f).to(tl.int64)
            m_e &= (o_v < tl.where(result < sequences, V, 0))[:, None]
        p_e = ends + (result * HV + i_h) * (K * V)
        x = x.to(ends.dtype.element_ty)
        if V_FIRST:
            tl.store(p_e + o_v[:, None] * K + o_k[None, :], x, mask=m_e)
        else:
            tl.store(p_e + at, x, mask=m_e)
    if summary is not None:
        o_c = tl.where(o_v < 0, o_v + KP, o_v + K)
        at_m = o_k[None, :] * (K + V) + o_c[:, None]
        tl.store(summary + i_ph * (K * (K + V)) + at_m, x, mask=(m_v | (o_v + KP < K)[:, None]) & m_k)
    if sums is not None:
        tl.store(sums + i_fh * (K * V) + at, x, mask=m_v & m_k)


@triton.jit(do_not_specialize=["rows", "per"])
def first_segments_kernel(
    grad_starts,  # float32 [S, HV, V, K]: of segments, as ``segments_kernel`` numbers them
    grad_initial_state,  # [N, HV, K, V] (or [N, HV, V, K]): those of each sequence's first segment, written
    cu_seqlens, rows, per,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """Gradients of the states at the starts of sequences. Grid: (V / BV, N · HV)."""
    i_nh = tl.program_id(1)
    n = i_nh // HV
    if cu_seqlens is None:
        first = (n * per).to(tl.int64)
    else:
        first = tl.load(cu_seqlens + n).to(tl.int64) // rows + n
    o_k = tl.arange(0, K)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    x = tl.load(grad_starts + (first * HV + i_nh % HV) * (V * K) + o_v[:, None] * K + o_k[None, :])
    store_state(grad_initial_state, x, i_nh, o_v, o_k, K, V, V_FIRST)

"""Kernels that join segments (``kda_core.triton_lib.segments``), behind the transitions of ``backward_states`` and
``backward_reverse``.

Matrices are held as the recurrences hold states, transposed and in blocks of key channels; states at the boundaries
are stored K first. Every offset is int64, from the program id up.
"""

import triton
import triton.language as tl

from kda_core_amd.recurrence import load_state, store_state


@triton.jit(do_not_specialize=["count", "HV"])
def join_kernel(
    given,  # the call's own state, or its final state's gradient, [1, HV, K, V] (or [..., V, K]), or None
    transitions,  # [count - 1, HV, VP + KP, KP]
    additions,  # [count - 1, HV, VP, KP], in reverse; else None
    states,  # [count, HV, K, V]: states at the starts of the segments, or gradients at their ends
    count,  # segments
    HV, s_gh, s_gk, s_gv,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr,  # key channels of a block of a state
    REVERSE: tl.constexpr,
    IN_TURN: tl.constexpr,  # blocks of the new state one after another
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Forward: x(0) is given, x(1) = b(0), x(s + 1) = M(s) x(s) + b(s). Reverse, with n segments: x(n - 1) is given,
    x(n - 2) = a(n - 1), x(s - 1) = M(s)ᵀ x(s) + a(s). One program a head and block of BV value channels.
    """
    SIZE: tl.constexpr = (VP + KP) * KP
    pid = tl.program_id(0).to(tl.int64)
    i_v = pid // HV
    i_h = pid % HV
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_all = o_v < VP
    p_given = given
    if given is not None:
        p_given += i_h * s_gh
    states += i_h * (V * K)
    last = tl.cast(count, tl.int64) - 1
    i = tl.zeros_like(last)
    own = transitions + i_h * SIZE
    if REVERSE:
        i = last
        own = additions + ((last - 1) * HV + i_h) * (VP * KP)
    x = load_state(p_given, o_v, m_v, s_gk, s_gv, K, KP, BV, BK)
    store_state(states + i * HV * (V * K), x, o_v, m_v, V, 1, K, KP, BK)
    x = load_state(own, o_v, m_all, 1, KP, KP, KP, BV, BK)
    o_xx = o_k[:, None] * KP + o_k[None, :]
    if REVERSE:
        o_xx = o_k[:, None] + o_k[None, :] * KP
    for j in tl.range(1, last, num_stages=STAGES, disable_licm=True):
        i = tl.cast(j, tl.int64)
        if REVERSE:
            i = last - i
        store_state(states + i * HV * (V * K), x, o_v, m_v, V, 1, K, KP, BK)
        own = transitions + (i * HV + i_h) * SIZE
        matrix = own + VP * KP
        if REVERSE:
            own = additions + ((i - 1) * HV + i_h) * (VP * KP)
        x = _step(x, own, matrix, o_v, m_all, o_xx, KP, BV, BK, REVERSE, IN_TURN, DOT)
    i = last
    if REVERSE:
        i = tl.zeros_like(last)
    store_state(states + i * HV * (V * K), x, o_v, m_v, V, 1, K, KP, BK)


@triton.jit
def _step(
    x, own, matrix, o_v, m_all, o_xx,
    KP: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, REVERSE: tl.constexpr, IN_TURN: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """x Mᵀ (in reverse: x M) + own, by blocks."""
    following = ()
    sums = load_state(own, o_v, m_all, 1, KP, KP, KP, BV, BK)
    for i_to in tl.static_range(KP // BK):
        if IN_TURN:
            # Or the compiler would load the operands of all blocks first, more than a lane has registers for.
            tl.debug_barrier()
        block = sums[i_to]
        for i_from in tl.static_range(KP // BK):
            if REVERSE:
                part = matrix + (i_to * BK * KP + i_from * BK)
            else:
                part = matrix + (i_from * BK * KP + i_to * BK)
            block = tl.dot(x[i_from], tl.load(part + o_xx), block, input_precision=DOT)
        following += (block,)
    return following


@triton.jit(do_not_specialize=["rows", "per", "HV", "programs", "sequences", "count_starts"])
def chain_kernel(
    transitions,  # [segments, HV, VP + KP, KP]
    additions,  # [segments, HV, VP, KP], in reverse; else None
    given,  # states at the starts of sequences (reverse: gradients at the ends), any dtype and strides; or None
    places,  # [F]: of fragments, in ``given``, ``sequences`` for none
    starts,  # [.., HV, K, s_sk]: other states at the starts of fragments, in the last V columns; or None
    sources,  # [F]: of fragments, in ``starts``, ``count_starts`` and more for none; or None
    states,  # [segments, HV, K, V]: the same for segments, written; or None
    ends,  # states at the ends of fragments, written; or None
    results,  # [F]: of fragments, in ``ends``, ``sequences`` for none; or None
    sends,  # [P]: the fragments of ``summary``; or None
    whole,  # [P, HV, K, s_wk]: the matrices whose transposes are those of ``summary``; or None
    summary,  # [P, HV, K, K + V]: the product of the matrices of a fragment | sums, written; or None
    sums,  # [F, HV, K, V]: what a fragment adds to a state of zeros, written; or None
    cu_seqlens,  # [F + 1]: boundaries of fragments in segments of ``rows`` rows (``segments_kernel``); or None
    rows, per,  # segments of each fragment, without cu_seqlens
    HV, programs,  # F · HV, or P · HV
    sequences, count_starts, s_gn, s_gh, s_gk, s_gv, s_sk, s_wk, s_en, s_eh, s_ek, s_ev,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr,  # key channels of a block of a state
    REVERSE: tl.constexpr,
    IN_TURN: tl.constexpr,  # blocks of the new state one after another
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """x ← M x + b over the segments of each fragment, from ``given`` and ``starts``, or from [I | given] into
    ``summary``. One program a fragment, head and BV columns, of V columns, or of KP and VP.
    """
    SIZE: tl.constexpr = (VP + KP) * KP
    pid = tl.program_id(0).to(tl.int64)
    i_ph = pid % programs
    i_f = i_ph // HV
    i_h = i_ph % HV
    if sends is not None:
        i_f = tl.load(sends + i_f).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = pid // programs * BV + tl.arange(0, BV)
    if summary is not None:
        # Columns of the identity come first.
        o_v -= KP
    m_v = (o_v >= 0) & (o_v < V)
    m_all = (o_v >= 0) & (o_v < VP)
    first = i_f * per
    count = tl.zeros_like(i_f) + per
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + i_f).to(tl.int64)
        first = begin // rows + i_f
        count = (tl.load(cu_seqlens + i_f + 1).to(tl.int64) - begin + rows - 1) // rows
    source, m_starts, p_starts = i_f, m_v, starts
    if starts is not None:
        if sources is not None:
            source = tl.load(sources + i_f).to(tl.int64)
            m_starts = m_v & (o_v < tl.where(source < count_starts, V, 0))
        p_starts += ((source * HV + i_h) * K + 1) * s_sk - V
    x = load_state(p_starts, o_v, m_starts, s_sk, 1, K, KP, BV, BK)
    if given is not None:
        place = tl.load(places + i_f).to(tl.int64)
        m_given = m_v & (o_v < tl.where(place < sequences, V, 0))
        y = load_state(given + place * s_gn + i_h * s_gh, o_v, m_given, s_gk, s_gv, K, KP, BV, BK)
        if starts is not None:
            both = ()
            for i_k in tl.static_range(KP // BK):
                both += (x[i_k] + y[i_k],)
            y = both
        x = y
    if summary is not None:
        # Columns of the identity, or of matrices that are known.
        o_c = o_v + KP
        p_whole = whole
        if whole is not None:
            p_whole += i_ph * K * s_wk
        known = load_state(p_whole, o_c, o_c < K, 1, s_wk, K, KP, BV, BK)
        unit = ()
        for i_k in tl.static_range(KP // BK):
            if whole is None:
                unit += (tl.where(o_c[:, None] == (i_k * BK + o_k)[None, :], 1.0, x[i_k]),)
            else:
                unit += (tl.where((o_c < KP)[:, None], known[i_k], x[i_k]),)
        x = unit
        if whole is not None:
            count *= (pid // programs * BV >= KP).to(tl.int64)
    o_xx = o_k[:, None] * KP + o_k[None, :]
    if REVERSE:
        o_xx = o_k[:, None] + o_k[None, :] * KP
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        i = first + j
        if REVERSE:
            i = first + count - 1 - j
        if states is not None:
            store_state(states + (i * HV + i_h) * (K * V), x, o_v, m_v, V, 1, K, KP, BK)
        own = transitions + (i * HV + i_h) * SIZE
        matrix = own + VP * KP
        if REVERSE:
            own = additions + (i * HV + i_h) * (VP * KP)
        x = _step(x, own, matrix, o_v, m_all, o_xx, KP, BV, BK, REVERSE, IN_TURN, DOT)
    if ends is not None:
        result, m_ends = i_f, m_v
        if results is not None:
            result = tl.load(results + i_f).to(tl.int64)
            m_ends = m_v & (o_v < tl.where(result < sequences, V, 0))
        store_state(ends + result * s_en + i_h * s_eh, x, o_v, m_ends, s_ek, s_ev, K, KP, BK)
    if summary is not None:
        o_s = tl.where(o_v < 0, o_v + KP, o_v + K)
        store_state(summary + i_ph * (K * (K + V)), x, o_s, m_v | (o_v + KP < K), K + V, 1, K, KP, BK)
    if sums is not None:
        store_state(sums + i_ph * (K * V), x, o_v, m_v, V, 1, K, KP, BK)

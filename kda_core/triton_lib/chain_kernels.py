"""Kernel that joins the segments of sequences (``segments``), and its plan, the same for every Triton backend.

Matrices and states are held transposed, in blocks of key channels (``state_blocks``). Every offset is int64, from the
program id up.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kda_core.request import Request
from kda_core.triton_lib.arguments import named_state_strides
from kda_core.triton_lib.frame import names
from kda_core.triton_lib.layout import padded
from kda_core.triton_lib.plan import Builder, View
from kda_core.triton_lib.segments import edge_arguments
from kda_core.triton_lib.state_blocks import load_state, store_state


@triton.jit
def _step(
    x, m, own, o_v, m_v, o_xx, K: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    M_IN: tl.constexpr, M_OUT: tl.constexpr, PART: tl.constexpr, A_K: tl.constexpr, A_V: tl.constexpr,
    IN_TURN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """x Mᵀ (in reverse: x M) + own, by blocks."""
    following = ()
    sums = load_state(own, o_v, m_v, A_K, A_V, K, KP, BV, BK)
    for i_to in tl.static_range(KP // BK):
        if IN_TURN:
            # Or the compiler would load the operands of all blocks first, more than a lane has registers for.
            tl.debug_barrier()
        block = sums[i_to]
        for i_from in tl.static_range(KP // BK):
            p_m = m + (i_from * BK * M_IN + i_to * BK * M_OUT) + o_xx
            b_m = tl.load(p_m).to(tl.float32)
            if PART:
                b_m += tl.load(p_m + PART).to(tl.float32)
            block = tl.dot(x[i_from], b_m, block, input_precision=DOT)
        following += (block,)
    return following


@triton.jit(do_not_specialize=["rows", "per", "HV", "programs", "sequences", "count_starts"])
def chain_kernel(
    matrices,  # of segments: M (reverse: Mᵀ) in float32, or as two parts in bfloat16
    additions,  # of segments, float32
    given,  # states at the starts of sequences (reverse: gradients at the ends), any dtype and strides; or None
    places,  # [F]: of fragments, in ``given``, ``sequences`` for none; or None: fragments are the sequences
    starts,  # [.., HV, K, s_sk] float32: other states at the starts of fragments, in the last V columns; or None
    sources,  # [F]: of fragments, in ``starts``, ``count_starts`` and more for none; or None
    states,  # [segments, HV, V, K] float32: the same for segments, written; or None
    ends,  # states at the ends of fragments, any dtype and strides, written; or None
    results,  # [F]: of fragments, in ``ends``, ``sequences`` for none; or None
    sends,  # [P]: the fragments of ``summary``; or None
    whole,  # [P, HV, K, s_wk] float32: the matrices whose transposes are those of ``summary``; or None
    summary,  # float32 [P, HV, K, K + V]: the product of the matrices of a fragment | sums, written; or None
    sums,  # float32 [F, HV, K, V]: what a fragment adds to a state of zeros, written; or None
    cu_seqlens,  # [F + 1]: boundaries of fragments in segments of ``rows`` rows (``segments_kernel``); or None
    rows,
    per,  # segments of each fragment, without cu_seqlens
    HV, programs,  # F · HV, or P · HV
    sequences, count_starts, s_gn, s_gh, s_gk, s_gv, s_sk, s_wk, s_en, s_eh, s_ek, s_ev,
    # strides of matrices by segment and head, and by channels of what they multiply and of the result
    S_M: tl.constexpr, M_IN: tl.constexpr, M_OUT: tl.constexpr,
    PART: tl.constexpr,  # from the first part to the second; 0: there is one
    S_A: tl.constexpr, A_K: tl.constexpr, A_V: tl.constexpr,  # of additions by segment and head, and by channels
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr,  # key channels of a block of a state
    REVERSE: tl.constexpr,
    IN_TURN: tl.constexpr,  # blocks of the new state one after another
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """x ← M x + b over the segments of each fragment, transposed, products in float32.

    From ``given`` and ``starts``: ``states`` at each step, and ``ends``, and ``sums``. Or from [I | given] ``summary``.
    One program a fragment, head and BV columns, of V columns, or of padded K and V.
    """
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
        place, m_given = i_f, m_v
        if places is not None:
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
    o_xx = o_k[:, None] * M_IN + o_k[None, :] * M_OUT
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        i = first + j
        if REVERSE:
            i = first + count - 1 - j
        i_sh = i * HV + i_h
        if states is not None:
            store_state(states + i_sh * (V * K), x, o_v, m_v, 1, K, K, KP, BK)
        x = _step(
            x, matrices + i_sh * S_M, additions + i_sh * S_A, o_v, m_v, o_xx, K, KP, BV, BK,
            M_IN, M_OUT, PART, A_K, A_V, IN_TURN, DOT,
        )  # fmt: skip
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


def in_rows(r: Request, transitions: View, additions: View | None = None) -> dict[str, Any]:
    """Arguments for transitions [segments, HV, VP + KP, KP], bᵀ and below it Mᵀ; of gradients with ``additions``.

    Args:
        additions: [segments, HV, VP, KP], transposed.
    """
    KP, VP = padded(r.K), padded(r.V)
    size, matrices = (VP + KP) * KP, transitions.cut(2, slice(VP, VP + KP))
    strides = {"S_M": size, "PART": 0, "A_K": 1, "A_V": KP}
    if additions is None:
        return {"matrices": matrices, "additions": transitions, "M_IN": KP, "M_OUT": 1, "S_A": size, **strides}
    return {"matrices": matrices, "additions": additions, "M_IN": 1, "M_OUT": KP, "S_A": VP * KP, **strides}


def add_chain(
    b: Builder, r: Request, count: int, rows: int, segments: dict[str, Any], num_warps: int, *, reverse: bool = False,
    given: View | None = None, starts: View | None = None, states: View | None = None, ends: View | None = None,
    summary: View | None = None, sums: View | None = None, **options: Any,
) -> None:  # fmt: skip
    """Add a launch of ``chain_kernel``.

    Args:
        r: the call, whose sequences are the fragments.
        count, rows: number of segments, and rows of each; 0 rows: each fragment is one.
        segments: arguments for matrices and additions (``in_rows``), and BV, BK, IN_TURN, STAGES and DOT.
        given: the call's own states, or gradients of its final ones; a call in halves says where its own are.
        options: of the compiler.
    """
    columns, fragments = padded(r.V), r.N
    if summary is not None:
        columns, fragments = columns + padded(r.K), summary.shape[0]
    named = names(r) | segments | edge_arguments(r, starts, summary) | {
        "states": states, "ends": ends, "summary": summary, "sums": sums, "cu_seqlens": b.dense(r.cu_seqlens),
        # Where fragments are not cut, each is one segment, of more rows than there are.
        "rows": rows or r.T + 1, "per": count // r.N if r.N else 0, "programs": fragments * r.HV, "REVERSE": reverse,
        **named_state_strides("e", ends, r.state_v_first),
    }  # fmt: skip
    if given is not None:
        named |= {"given": given, **named_state_strides("g", given, r.state_v_first)}
    b.pick(chain_kernel, columns // named["BV"] * fragments * r.HV, num_warps, named, **options)

"""Kernel of ``commit_kda`` and its plan, the same for every Triton backend: S ← D ⊙ S + k uᵀ for accepted tokens.

The update is that of the backend's ``recurrent``, element by element in the same operations, and no sum is taken: bits
do not depend on the tile. Every state is read once and written once; the records are small beside it, and programs of
one head find most of them in the cache.

Tiles: all key channels and BV value channels of one head, in the order in which the state is stored.
Grid: (N · HV · ceil(V / BV)), value blocks fastest, then heads. Index arithmetic is int64 from the sequence up.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kda_core.request import CommitRequest, Request
from kda_core.triton_lib.arguments import state_strides
from kda_core.triton_lib.factor import multiplied
from kda_core.triton_lib.layout import padded
from kda_core.triton_lib.packing import is_padding
from kda_core.triton_lib.plan import Builder, Plan, input_layouts

ELEMENTS = 4096
"""Elements of a state in a program."""

_NUMBERS = ["T", "HV", "s_accepted", "s_index", "pad_slot_id", "slots", "M"]


@triton.jit
def row_in(x, V_FIRST: tl.constexpr):
    """A vector over key channels as a row of a state's block, [BV, KP] when V comes first and [KP, BV] otherwise."""
    return x[None, :] if V_FIRST else x[:, None]


@triton.jit
def value_in(x, V_FIRST: tl.constexpr):
    """A vector over value channels as a column of it."""
    return x[:, None] if V_FIRST else x[None, :]


@triton.jit
def load_record(p_record, o_k, o_v, live, K: tl.constexpr, V: tl.constexpr):
    """k, the decay and u of a token; zeros past K, past V, and everywhere unless ``live``."""
    m_k = o_k < tl.where(live, K, 0)
    m_v = o_v < tl.where(live, V, 0)
    b_k = tl.load(p_record + o_k, mask=m_k, other=0.0)
    b_d = tl.load(p_record + K + o_k, mask=m_k, other=0.0)
    b_u = tl.load(p_record + 2 * K + o_v, mask=m_v, other=0.0)
    return b_k, b_d, b_u


@triton.jit
def token_of(path, m, most):
    """The number of the m-th token of a path (or m without one), clamped below ``most``; int64."""
    token = tl.cast(m, tl.int64)
    if path is not None:
        token = tl.minimum(tl.maximum(tl.load(path + token).to(tl.int64), 0), tl.cast(most, tl.int64) - 1)
    return token


@triton.jit
def parent_of(parents, t):
    """The token of a tree [T] that token t continues from, -1 for none; what is not below t is t - 1. int64."""
    t = tl.cast(t, tl.int64)
    return tl.minimum(tl.maximum(tl.load(parents + t).to(tl.int64), -1), t - 1)


@triton.jit
def ancestors_of(parents, token):
    """A bit for every token on the way from the root of a tree to ``token``, which may be -1: for none."""
    found = tl.zeros([], tl.int64)
    while token >= 0:
        found |= tl.full([], 1, tl.int64) << token
        token = parent_of(parents, token)
    return found


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["accepted", "indices", "cu_seqlens", "path"])
def commit_kernel(
    pool,  # [slots, HV, K, V] (or [..., V, K])
    records,  # [B, T, HV, 2K + V]
    accepted, indices,  # [N]
    cu_seqlens,  # [N + 1] or None
    path,  # [N, M] tokens of a sequence, or None: the first ones
    s_pn, s_ph,  # strides by slot and head
    s_rn, s_rt, s_rh,  # strides by sequence (the token's when packed), token, head
    T, HV, s_accepted: tl.int64, s_index: tl.int64, pad_slot_id: tl.int64, slots, M,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    P_K: tl.constexpr, P_V: tl.constexpr,  # strides within a state, by key and value channel
    V_FIRST: tl.constexpr,
    SIGNED: tl.constexpr,  # decays below 0 stand for themselves and 1 (``factor``)
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_h = (pid // BLOCKS % HV).to(tl.int64)
    i_n = (pid // BLOCKS // HV).to(tl.int64)
    o_k = tl.arange(0, KP)
    o_v = pid % BLOCKS * BV + tl.arange(0, BV)
    i_state = tl.load(indices + i_n * s_index).to(tl.int64)
    count = tl.load(accepted + i_n * s_accepted).to(tl.int64)
    row = i_n
    length = tl.zeros_like(i_n) + T
    if cu_seqlens is not None:
        row = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - row
    # A count out of range is the caller's error; clamped, it reads no record of another sequence.
    most = length
    if path is not None:
        path += i_n * M
        most = tl.where(length > 0, M, 0).to(tl.int64)
    count = tl.minimum(tl.maximum(count, 0), most)
    if is_padding(i_state, pad_slot_id, slots) | (count == 0):
        return
    p_record = records + row * s_rn + i_h * s_rh
    p_next = p_record + token_of(path, 0, length) * s_rt
    next_k, next_d, next_u = load_record(p_next, o_k, o_v, True, K, V)
    if V_FIRST:
        o_state = o_v.to(tl.int64)[:, None] * P_V + o_k.to(tl.int64)[None, :] * P_K
        m_state = (o_v < V)[:, None] & (o_k < K)[None, :]
    else:
        o_state = o_k.to(tl.int64)[:, None] * P_K + o_v.to(tl.int64)[None, :] * P_V
        m_state = (o_k < K)[:, None] & (o_v < V)[None, :]
    p_state = pool + i_state * s_pn + i_h * s_ph + o_state
    S = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)
    for t in range(0, count):
        b_k = next_k
        b_d = next_d
        b_u = next_u
        # Fetched while this token is computed.
        more = t + 1 < count
        p_next = p_record + token_of(path, tl.where(more, t + 1, 0), length) * s_rt
        next_k, next_d, next_u = load_record(p_next, o_k, o_v, more, K, V)
        b_k = row_in(b_k, V_FIRST)
        b_d = row_in(b_d, V_FIRST)
        b_u = value_in(b_u, V_FIRST)
        S = multiplied(S, b_d, SIGNED)
        S = tl.fma(b_u, b_k, S)
    tl.store(p_state, S.to(pool.dtype.element_ty), mask=m_state)


def plan_commit(r: CommitRequest, num_warps: int, signed: bool, **options: Any) -> Plan:
    """The plan of ``commit_kda``.

    Args:
        r: metadata alone.
        signed: decays below 0 stand for themselves and 1, as the backend's records have them.
        options: of the compiler.
    """
    b = Builder()
    add_commit(b, r, num_warps, signed, **options)
    return b.plan(input_layouts(r), {"pool": r.pool})


def add_first_commit(b: Builder, r: Request, num_warps: int, signed: bool, **options: Any) -> Request:
    """Add the commit that a call begins with; the rest of the call. Other arguments as of ``plan_commit``."""
    add_commit(b, r.committing(), num_warps, signed, **options)
    return r.after_commit()


def add_commit(b: Builder, r: CommitRequest, num_warps: int, signed: bool, **options: Any) -> None:
    """Add the launch."""
    s_pn, s_ph, P_K, P_V = state_strides(r.pool, r.state_v_first)
    s_b, s_t, s_h = r.records.strides[:3]
    KP, VP = padded(r.K), padded(r.V)
    BV = min(VP, max(16, ELEMENTS // KP))
    named = {
        "pool": r.pool, "records": r.records, "accepted": r.num_accepted, "indices": r.state_indices,
        "cu_seqlens": b.dense(r.cu_seqlens), "path": b.dense(r.path), "M": 0 if r.path is None else r.path.shape[1],
        "s_pn": s_pn, "s_ph": s_ph, "s_rn": s_b if r.cu_seqlens is None else s_t,
        "s_rt": s_t, "s_rh": s_h, "T": r.T, "HV": r.HV, "s_accepted": r.num_accepted.stride(0),
        "s_index": r.state_indices.stride(0), "pad_slot_id": r.pad_slot_id, "slots": r.pool.shape[0], "K": r.K,
        "V": r.V, "KP": KP, "BV": BV, "P_K": P_K, "P_V": P_V, "V_FIRST": r.state_v_first, "SIGNED": signed,
    }  # fmt: skip
    b.pick(commit_kernel, r.N * r.HV * -(-r.V // BV), num_warps, named, **options)

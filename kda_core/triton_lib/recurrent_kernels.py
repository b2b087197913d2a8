"""Kernel of ``fused_recurrent_kda``, and its arguments, the same for every Triton backend: token by token, the state in
registers from its one load to its last store.

With q and k as the caller gave them, r_q and r_k their factors (norm and, for q, scale), d = exp γ and S the state
before the token, per value head:

    y = r_k Sᵀ(k⊙d)      u = β(v − y)      o = r_q Sᵀ(q⊙d) + r_q r_k (q·k) u      S ← S + (d − 1)⊙S + k (r_k u)ᵀ

so that both products wait for the old state only, and not for the norms. Slow channels use d − 1, fast ones d, for the
reasons that ``factor`` has; or d is rounded, and its error goes into the next token's d (``factor.step_decay``).

A pool: sequence n starts from slot indices[n, accepted − 1] (the first without counts) and leaves its last state in
indices[n, 0], or, when a sequence has a slot for every token, the state after token i in indices[n, i]. A negative
index or pad_slot_id as the first slot skips the sequence (its output is zero), as a later one it drops that state.

Tiles: all key channels and BV value channels of one head, [BV, KP / KS, KS] when the state is stored V first and
[KP / KS, KS, BV] otherwise. Triton gives the last dimension to neighbouring lanes and the one that it knows least about
to registers, so that KS decides how many lanes share a row: a whole row each would be read best and summed worst (five
shuffles a row and product, where three do for 32 float32 channels).
Where a step is compiled by itself (ONE_TOKEN), multiplications and additions are to be fused where this file says so
and nowhere else: a compiler that chooses does so differently for one token and for several, and a step's bits would
show how it was asked for.
Grid: (N [+ 1] · HV · ceil(V / BV)), value blocks fastest, then heads; with packed sequences, "sequence" N is the rows
behind the last one. Index arithmetic is int64 from the sequence up.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kda_core.request import Request
from kda_core.triton_lib.arguments import state_strides
from kda_core.triton_lib.commit_kernels import ancestors_of, load_record, parent_of, token_of
from kda_core.triton_lib.factor import multiplied, step_decay
from kda_core.triton_lib.frame import names
from kda_core.triton_lib.gate import NORM_EPS, gate_rate, log2_decay, write_strength
from kda_core.triton_lib.layout import power_of_two
from kda_core.triton_lib.packing import is_padding, starts_from_state
from kda_core.triton_lib.plan import Builder, View

ZERO_ROWS = tl.constexpr(8)
"""Rows of output that are zeroed at once."""


@triton.jit
def along_k(x, V_FIRST: tl.constexpr):
    """[KP / KS, KS] key channels against a tile."""
    return x[None, :, :] if V_FIRST else x[:, :, None]


@triton.jit
def along_v(x, V_FIRST: tl.constexpr):
    """[BV] value channels against a tile."""
    return x[:, None, None] if V_FIRST else x[None, None, :]


@triton.jit
def contract(x, V_FIRST: tl.constexpr):
    """Sum of a tile over its key channels: [BV]."""
    AXIS: tl.constexpr = 1 if V_FIRST else 0
    return tl.sum(tl.sum(x, AXIS), AXIS)


@triton.jit
def tile_offsets(o_k, o_v, S_K: tl.constexpr, S_V: tl.constexpr, V_FIRST: tl.constexpr):
    """Offsets of a tile in its head's state; with strides that are known they become immediate operands."""
    return along_k(o_k.to(tl.int64) * S_K, V_FIRST) + along_v(o_v.to(tl.int64) * S_V, V_FIRST)


@triton.jit
def load_row(p_q, p_k, p_v, p_g, p_beta, o_k, o_v, live, K: tl.constexpr, V: tl.constexpr):
    """One token's inputs as the caller wrote them; zeros past K, past V, and everywhere unless ``live``."""
    m_k = o_k < tl.where(live, K, 0)
    m_v = o_v < tl.where(live, V, 0)
    b_q = tl.load(p_q + o_k, mask=m_k, other=0.0)
    b_k = tl.load(p_k + o_k, mask=m_k, other=0.0)
    b_g = tl.load(p_g + o_k, mask=m_k, other=0.0)
    b_v = tl.load(p_v + o_v, mask=m_v, other=0.0)
    b_beta = tl.load(p_beta, mask=live, other=0.0)
    return b_q, b_k, b_v, b_g, b_beta


@triton.jit
def zero_rows(p_o, s_t, s_v, first, end, share, SHARES: tl.constexpr, V: tl.constexpr, VP: tl.constexpr):
    """Zero the rows [first, end) of one head; every one of SHARES programs takes its share."""
    o_v = tl.arange(0, VP)
    o_r = tl.arange(0, ZERO_ROWS)
    zeros = tl.zeros([ZERO_ROWS, VP], p_o.dtype.element_ty)
    for block in range(first + share * ZERO_ROWS, end, SHARES * ZERO_ROWS):
        rows = block + o_r
        p_rows = p_o + rows[:, None].to(tl.int64) * s_t + o_v[None, :].to(tl.int64) * s_v
        tl.store(p_rows, zeros, mask=(rows < end)[:, None] & (o_v < V)[None, :])


_NUMBERS = [
    "scale", "lower_bound", "T", "N", "s_index", "s_slot", "s_accepted", "width", "pad_slot_id", "slots", "s_has",
    "s_final", "s_final_slot", "final_width", "final_slots", "s_committed", "C", "M",
]  # fmt: skip


_INDICES = ["cu_seqlens", "indices", "accepted", "has_state", "final_indices", "committed", "parents", "path"]


@triton.jit(
    do_not_specialize=_NUMBERS,
    # Slices of a server's buffers, which begin anywhere.
    do_not_specialize_on_alignment=_INDICES,
)
def recurrent(
    q, k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    A_log, dt_bias,  # [HV] and [HV, K], or None
    initial_state,  # [N or slots of a pool, HV, K, V] (or [..., V, K]) or None
    final_state,  # likewise; the same tensor when it is advanced in place
    o,  # [B, T, HV, V]
    cu_seqlens,  # [N + 1] or None
    indices,  # [N, width] slots or None
    accepted, has_state,  # [N] and [N] bool, or None
    final_indices,  # [N, final_width] slots of final_state, or None: indices
    records,  # [B, T, HV, 2K + V] or None
    commit,  # [N, C, HV, 2K + V] or None: records that come first
    committed,  # [N], how many of them, or None
    path,  # [N, M], which of them, or None: the first ones
    parents,  # [N, T], tokens that the tokens continue from, or None: each from the one before it
    scale, lower_bound, T, N,
    # strides by sequence (the token's when packed), token, head
    s_qn, s_qt, s_qh, s_kn, s_kt, s_kh, s_vn, s_vt, s_vh, s_gn, s_gt, s_gh, s_bn, s_bt, s_bh, s_on, s_ot, s_oh, s_ov,
    s_rn, s_rt, s_rh, s_cn, s_ct, s_ch, s_committed: tl.int64, C, M, s_in, s_ih, s_fn, s_fh, s_index: tl.int64,
    s_slot: tl.int64, s_accepted: tl.int64, width, pad_slot_id: tl.int64, slots, s_has: tl.int64, s_final: tl.int64,
    s_final_slot: tl.int64, final_width, final_slots,
    HV: tl.constexpr,
    GROUP: tl.constexpr,  # value heads a key head
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, KS: tl.constexpr, BV: tl.constexpr,
    # strides within a state, by key and value channel, of initial_state and final_state
    I_K: tl.constexpr, I_V: tl.constexpr, F_K: tl.constexpr, F_V: tl.constexpr, GATE: tl.constexpr,
    L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr, V_FIRST: tl.constexpr,
    IN_PLACE: tl.constexpr,
    EVERY_TOKEN: tl.constexpr,  # a slot for every token rather than one for the last
    ONE_TOKEN: tl.constexpr,  # dense and T = 1: there is no loop
    AHEAD: tl.constexpr,  # rows are fetched while the token before them is computed, which takes registers
    MOST: tl.constexpr,  # tokens of a packed sequence; longer ones are left to other kernels. 0: no bound
    EVICTION: tl.constexpr,  # eviction policy of the load of the states
    LEAD: tl.constexpr,  # a device function that lets the kernels that follow start before this one ends, or None
    SIGNED: tl.constexpr,  # decays below 0 stand for themselves and 1 (``factor``)
    INDEX: tl.constexpr,  # integer type of a sequence's tokens
):  # fmt: skip
    if LEAD is not None:
        LEAD()
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % BLOCKS
    i_h = (pid // BLOCKS % HV).to(tl.int64)
    i_n = (pid // (BLOCKS * HV)).to(tl.int64)
    o_k = tl.arange(0, KP // KS)[:, None] * KS + tl.arange(0, KS)[None, :]
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V

    length = tl.full([], 1, INDEX)
    if not ONE_TOKEN:
        length *= T
    row = i_n
    if cu_seqlens is not None:
        row = tl.load(cu_seqlens + i_n).to(tl.int64)
        if i_n == N:
            zero_rows(o + i_h * s_oh, s_ot, s_ov, row, row * 0 + T, i_v, BLOCKS, V, VP)
            return
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - row).to(INDEX)
        if MOST:  # noqa: SIM102 (known when the kernel is compiled)
            if length > MOST:
                return
    p_o = o + row * s_on + i_h * s_oh

    i_state = i_n
    if indices is not None:
        p_slot = indices + i_n * s_index
        i_first = 0
        if accepted is not None:
            i_first = tl.load(accepted + i_n * s_accepted).to(tl.int64)
            # Out of range is clamped: the device has nobody to tell, and must not read past the table.
            i_first = tl.minimum(tl.maximum(i_first, 1), width) - 1
        i_state = tl.load(p_slot + i_first * s_slot).to(tl.int64)

    # On their way while the slot is, which the state has to wait for.
    p_q = q + row * s_qn + i_h // GROUP * s_qh
    p_k = k + row * s_kn + i_h // GROUP * s_kh
    p_v = v + row * s_vn + i_h * s_vh
    p_g = g + row * s_gn + i_h * s_gh
    p_beta = beta + row * s_bn + i_h * s_bh
    if AHEAD:
        next_q, next_k, next_v, next_g, next_beta = load_row(p_q, p_k, p_v, p_g, p_beta, o_k, o_v, length > 0, K, V)
    rate = gate_rate(A_log, i_h)
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)

    if indices is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if is_padding(i_state, pad_slot_id, slots):
            zero_rows(p_o, s_ot, s_ov, 0, length, i_v, BLOCKS, V, VP)
            return

    if ((indices is not None) | IN_PLACE) & (commit is None):  # noqa: SIM102 (known when the kernel is compiled)
        # The slot of a sequence without tokens is nobody's to write, not even with what it holds.
        if length == 0:
            return

    if final_indices is not None:
        # From here on only slots that are written are looked up.
        p_slot = final_indices + i_n * s_final
        s_slot = s_final_slot
        width = final_width
        slots = final_slots

    m_state = along_k(m_k, V_FIRST) & along_v(m_v, V_FIRST)
    S = tl.zeros(m_state.shape, tl.float32)
    if initial_state is not None:
        p_state = initial_state + i_state * s_in + i_h * s_ih + tile_offsets(o_k, o_v, I_K, I_V, V_FIRST)
        m_read = m_state
        if has_state is not None:
            m_read = tl.where(starts_from_state(has_state, i_n, s_has), m_read, False)
        S = tl.load(p_state, mask=m_read, other=0.0, eviction_policy=EVICTION).to(tl.float32)
        if commit is not None:
            # The lines of ``commit_kernel``. A count out of range is clamped, as there.
            most = C
            if path is not None:
                path += i_n * M
                most = tl.where(C > 0, M, 0)
            count = tl.minimum(tl.maximum(tl.load(committed + i_n * s_committed), 0), most).to(tl.int32)
            p_commit = commit + i_n * s_cn + i_h * s_ch
            p_next = p_commit + token_of(path, 0, C) * s_ct
            next_record_k, next_d, next_u = load_record(p_next, o_k, o_v, count > 0, K, V)
            for m in range(0, count):
                b_k = next_record_k
                b_d = next_d
                b_u = next_u
                more = m + 1 < count
                p_next = p_commit + token_of(path, tl.where(more, m + 1, 0), C) * s_ct
                next_record_k, next_d, next_u = load_record(p_next, o_k, o_v, more, K, V)
                S = multiplied(S, along_k(b_d, V_FIRST), SIGNED)
                S = tl.fma(along_v(b_u, V_FIRST), along_k(b_k, V_FIRST), S)
            if count > 0:
                tl.store(p_state, S.to(initial_state.dtype.element_ty), mask=m_state)
                S = S.to(initial_state.dtype.element_ty).to(tl.float32)
                m_read = m_state

    lost = tl.zeros(o_k.shape, tl.float32)
    for t in range(0, length):
        if (parents is not None) & (not ONE_TOKEN):
            parent = parent_of(parents + i_n * T, t)
            if parent < t - 1:
                # Another branch: the state is that of the start, advanced by the ancestors, which come in their order.
                ancestors = ancestors_of(parents + i_n * T, parent)
                # This program's own stores of the start and of u may be read by other threads of it.
                tl.debug_barrier()
                S = tl.load(p_state, mask=m_read, other=0.0).to(tl.float32)
                lost = tl.zeros(o_k.shape, tl.float32)
                for a in range(0, parent + 1):
                    if (ancestors >> a) & 1:
                        # k and the decay anew: another program records them, and a decay's rounding goes on.
                        ancestor = tl.cast(a, tl.int64)
                        b_k = tl.load(k + row * s_kn + i_h // GROUP * s_kh + ancestor * s_kt + o_k, mask=m_k, other=0.0)
                        b_g = tl.load(g + row * s_gn + i_h * s_gh + ancestor * s_gt + o_k, mask=m_k, other=0.0)
                        p_record = records + row * s_rn + i_h * s_rh + ancestor * s_rt
                        b_u = tl.load(p_record + 2 * K + o_v, mask=m_v, other=0.0)
                        y = log2_decay(b_g.to(tl.float32), rate, bias, lower_bound, GATE)
                        d, lost = step_decay(y, lost, SIGNED)
                        S = multiplied(S, along_k(d, V_FIRST), SIGNED)
                        S = tl.fma(along_v(b_u, V_FIRST), along_k(b_k.to(tl.float32), V_FIRST), S)
        if not AHEAD:
            next_q, next_k, next_v, next_g, next_beta = load_row(p_q, p_k, p_v, p_g, p_beta, o_k, o_v, True, K, V)
        b_q = next_q.to(tl.float32)
        b_k = next_k.to(tl.float32)
        b_v = next_v.to(tl.float32)
        b_beta = write_strength(next_beta, SIGMOID, NEG_EIGVAL)
        y = log2_decay(next_g.to(tl.float32), rate, bias, lower_bound, GATE)
        if not ONE_TOKEN:
            # Fetched while this token is computed: a row takes longer to come from memory than a step takes.
            p_q += s_qt
            p_k += s_kt
            p_v += s_vt
            p_g += s_gt
            p_beta += s_bt
            if AHEAD:
                live = t + 1 < length
                next_q, next_k, next_v, next_g, next_beta = load_row(p_q, p_k, p_v, p_g, p_beta, o_k, o_v, live, K, V)
        r_q = scale
        r_k = 1.0
        if L2NORM:
            r_q *= tl.rsqrt(tl.sum(b_q * b_q) + NORM_EPS)
            r_k *= tl.rsqrt(tl.sum(b_k * b_k) + NORM_EPS)
        qk = tl.sum(b_q * b_k) * (r_q * r_k)
        d, lost = step_decay(y, lost, SIGNED)
        k_d = multiplied(b_k, d, SIGNED)
        q_d = multiplied(b_q, d, SIGNED)
        u = b_beta * (b_v - r_k * contract(S * along_k(k_d, V_FIRST), V_FIRST))
        b_o = r_q * contract(S * along_k(q_d, V_FIRST), V_FIRST) + qk * u
        S = multiplied(S, along_k(d, V_FIRST), SIGNED)
        S = tl.fma(along_v(r_k * u, V_FIRST), along_k(b_k, V_FIRST), S)
        tl.store(p_o + o_v.to(tl.int64) * s_ov, b_o.to(o.dtype.element_ty), mask=m_v)
        p_o += s_ot
        if records is not None:
            # The terms of the line above, for ``commit_kernel``: k, the decay, and r_k u.
            p_record = records + row * s_rn + i_h * s_rh + tl.cast(t, tl.int64) * s_rt
            m_own = o_k < tl.where(i_v == 0, K, 0)
            tl.store(p_record + o_k, b_k, mask=m_own)
            tl.store(p_record + K + o_k, d, mask=m_own)
            tl.store(p_record + 2 * K + o_v, r_k * u, mask=m_v)
        if EVERY_TOKEN:
            i_slot = tl.load(p_slot + t * s_slot, mask=t < width, other=-1).to(tl.int64)
            if not is_padding(i_slot, pad_slot_id, slots):
                p_kept = final_state + i_slot * s_fn + i_h * s_fh + tile_offsets(o_k, o_v, F_K, F_V, V_FIRST)
                tl.store(p_kept, S.to(final_state.dtype.element_ty), mask=m_state)

    if final_state is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if not EVERY_TOKEN:
            if IN_PLACE:
                p_last = p_state
            else:
                if final_indices is not None:
                    i_state = tl.load(p_slot).to(tl.int64)
                    m_state = tl.where(is_padding(i_state, pad_slot_id, slots), False, m_state)
                p_last = final_state + i_state * s_fn + i_h * s_fh + tile_offsets(o_k, o_v, F_K, F_V, V_FIRST)
            tl.store(p_last, S.to(final_state.dtype.element_ty), mask=m_state)


def sequence_strides(packed: bool, **views: View | None) -> dict[str, int]:
    """Strides by sequence (a token's, when sequences are found by their first token), token and head; zeros of None."""
    found = {}
    for letter, x in views.items():
        s_b, s_t, s_h = (0, 0, 0) if x is None else x.strides[:3]
        found |= {f"s_{letter}n": s_t if packed else s_b, f"s_{letter}t": s_t, f"s_{letter}h": s_h}
    return found


def token_arguments(r: Request, final_state: View | None, o: View) -> dict[str, Any]:
    """Arguments that the launches of a call share, by the kernels' names."""
    s_in, s_ih, I_K, I_V = state_strides(r.initial_state, r.state_v_first)
    s_fn, s_fh, F_K, F_V = state_strides(final_state, r.state_v_first)
    strides = sequence_strides(r.cu_seqlens is not None, q=r.q, k=r.k, v=r.v, g=r.g, b=r.beta, o=o)
    return names(r) | strides | {
        "final_state": final_state, "o": o, "s_ov": o.stride(3), "s_in": s_in, "s_ih": s_ih, "s_fn": s_fn, "s_fh": s_fh,
        "I_K": I_K, "I_V": I_V, "F_K": F_K, "F_V": F_V, "VP": power_of_two(r.V),
    }  # fmt: skip


def record_arguments(b: Builder, r: Request) -> dict[str, Any]:
    """The buffer of records, those that are committed first, their strides, and the tables of trees."""
    path, commit = b.dense(r.commit_path), r.commit
    return sequence_strides(r.cu_seqlens is not None, r=r.records) | sequence_strides(False, c=commit) | {
        "records": r.records, "commit": commit, "committed": r.num_committed, "parents": b.dense(r.parents),
        "path": path, "M": 0 if path is None else path.shape[1], "C": 0 if commit is None else commit.shape[1],
        "s_committed": 0 if commit is None else r.num_committed.stride(0),
    }  # fmt: skip


def _columns(table: View | None) -> tuple[int, int]:
    """Stride and number of the columns of a table of slots."""
    return (0, 1) if table is None or table.dim() == 1 else (table.stride(1), table.shape[1])


def launch_recurrent(
    b: Builder, r: Request, named: dict[str, Any], block_v: int, num_warps: int, row_bytes: int = 0, **options: Any
) -> None:
    """Add a launch of ``recurrent``.

    Args:
        named: ``token_arguments``, and ONE_TOKEN, AHEAD, MOST, EVICTION, LEAD, SIGNED and INDEX.
        row_bytes: V first: how much of a row neighbouring lanes read at once, the rest lies in registers; 0: all.
        options: of the compiler.
    """
    accepted, KP = r.num_accepted_tokens, power_of_two(r.K)
    s_slot, width = _columns(r.ssm_state_indices)
    s_final_slot, final_width = _columns(r.final_state_indices)
    own = {
        **record_arguments(b, r), "accepted": accepted, "s_accepted": 0 if accepted is None else accepted.stride(0),
        "s_slot": s_slot, "width": width, "s_final_slot": s_final_slot, "final_width": final_width, "KP": KP,
        "BV": block_v, "KS": min(KP, row_bytes // r.state_dtype.itemsize) if row_bytes and r.state_v_first else KP,
        "IN_PLACE": r.written_states is not None and r.update_state and r.final_state_indices is None,
        "EVERY_TOKEN": r.writes_every_token,
    }  # fmt: skip
    # With packed sequences one more set of programs zeroes the rows behind the last one.
    programs = (r.N + (r.cu_seqlens is not None)) * r.HV * -(-r.V // block_v)
    b.pick(recurrent, programs, num_warps, named | own, **options)

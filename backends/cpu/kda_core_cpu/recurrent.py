"""``fused_recurrent_kda`` forward: token by token, the state read once and written once for every token.

With q', k', d, β as in inputs.py:

    (y₀, y₁) = (βk'⊙d, q'⊙d) S      u = βv − y₀      S ← d ⊙ S + k' uᵀ      o = y₁ + (q'·k') u

Both products with the old state are one pass over it; the update is the other. Rows are prepared for many lanes and
a run of tokens at once; states are walked in blocks of lanes that stay in cache for the whole run. A state is updated
where it belongs (the final state or the pool's slot) when that memory has the compute dtype and the block is a view
of it, else in the scratch memory of one block. Nothing of a state's size is made for a token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_core.request import ForwardResult, Request
from kda_core_cpu.chunk_forward import empty_output
from kda_core_cpu.inputs import RowInputs
from kda_core_cpu.launch import Sequences, Workspace, lane_budget, lane_groups
from kda_core_cpu.states import PoolRows, States
from kda_core_cpu.windows import TokenWindow, Window

_RUN = 64
"""Tokens whose rows are prepared at once."""

_ROW_BUDGET = 1 << 19
"""Elements of one [lanes, tokens, K] operand when one run serves every token."""

_WORTH_A_CALL = 1 << 16
"""State elements of a sequence from which on its slot is updated where it lies, rather than gathered with others."""

_WORTH_A_BAG = 1 << 13
"""Elements of one state from which on a weighted sum of its rows beats a matrix product of two rows."""


def recurrent_forward(request: Request) -> ForwardResult:
    """Run ``fused_recurrent_kda``."""
    pool = PoolRows.of(request)
    states = States(request, pool)
    o = empty_output(request)
    workspace, inputs = Workspace(request.compute_dtype), RowInputs(request)
    step = TokenWindow.of(request)
    if step is None:
        _run_sequences(request, states, workspace, inputs, o)
    else:
        _run_step(step, states, workspace, inputs, o)
    return ForwardResult(o=o, final_state=states.result)


def _run_step(step: TokenWindow, states: States, workspace: Workspace, inputs: RowInputs, o: Tensor) -> None:
    """One token for every sequence."""
    request, pool = step.request, states.pool
    tokens, rows = _load_tokens(workspace, inputs, step)
    reader = _Reader(workspace, states)
    live = [(0, request.N)]
    if pool is not None and min(pool.slot) < 0:
        live = list(_runs_of(slot >= 0 for slot in pool.slot))
        rows.zero_()
    for first, last in live:
        whole = _Block(list(range(first, last)), [1] * (last - first), step.heads, first * request.HV)
        for block in whole.cut(lane_budget(request), states):
            block.begin(states, workspace)
            block.walk(tokens, states, reader, 0)
            block.end(states)
    if request.N < request.B * request.T:
        o.zero_()
    step.store(rows, o)


def _runs_of(flags: Iterable[bool]) -> Iterator[tuple[int, int]]:
    """[first, last) of every run of true flags."""
    position = 0
    for flag, run in itertools.groupby(flags):
        first, position = position, position + sum(1 for _ in run)
        if flag:
            yield first, position


def _run_sequences(request: Request, states: States, workspace: Workspace, inputs: RowInputs, o: Tensor) -> None:
    """Any number of tokens."""
    run = max(1, min(_RUN, request.T))
    sequences = Sequences.of(request, run, None if states.pool is None else states.pool.skipped)
    if int(sequences.length.sum()) < request.B * request.T:
        o.zero_()
    lanes, reader = lane_budget(request), _Reader(workspace, states)
    # One run prepares the rows of many blocks, because a block is bound by calls. A longer sequence keeps one block
    # of states in cache from its first run to its last.
    group_lanes = max(lanes, _ROW_BUDGET // (run * max(request.K, request.V))) if request.T <= run else lanes
    for group in lane_groups(sequences, request, run, group_lanes):
        runs = len(group.alive)
        whole = _Block(group.ids.tolist(), sequences.length[group.ids].tolist(), group.heads, 0)
        blocks = whole.cut(lanes, states) if runs == 1 else [whole]
        for i in range(runs):
            window = Window(group, i, i + 1)
            tokens, rows = _load_tokens(workspace, inputs, window)
            for block in blocks:
                if i == 0:
                    block.begin(states, workspace)
                block.walk(tokens, states, reader, i * run)
                if i == runs - 1:
                    block.end(states)
            window.store(rows, o)
        if runs == 0:
            whole.begin(states, workspace)
            whole.end(states)


@dataclass(frozen=True)
class _Token:
    """One token of a group's live sequences, longest first."""

    kq: Tensor
    k: Tensor
    d: Tensor
    bv: Tensor
    qk: Tensor
    o: Tensor

    def part(self, first: int, lanes: int) -> _Token:
        """``lanes`` lanes from ``first`` on."""
        if lanes == len(self.kq):
            return self
        return _Token(*(getattr(self, name)[first : first + lanes] for name in _TOKEN_FIELDS))


_TOKEN_FIELDS = tuple(_Token.__dataclass_fields__)


def _load_tokens(workspace: Workspace, inputs: RowInputs, window: Window | TokenWindow) -> tuple[list[_Token], Tensor]:
    """The tokens of a run, and o [lanes, tokens, V] that they fill; padding rows leave a state as it is."""
    request, Z, run = inputs.request, window.Z, window.rows
    K, V = request.K, request.V
    kq, k = workspace("kq", Z, run, 2, K), workspace("k", Z, run, K)
    bk, q = kq.unbind(2)
    inputs.load_unit(request.q, window, q)
    q.mul_(request.scale)
    inputs.load_unit(request.k, window, k)
    beta = inputs.load_beta(window, workspace("beta", Z, run, 1))
    d = inputs.load_decay(window, workspace("d", Z, run, K))
    bv = window.load(request.v, workspace("v", Z, run, V)).mul_(beta)
    qk = torch.mul(q, k, out=workspace("products", Z, run, K)).sum(-1, keepdim=True)
    torch.mul(k, beta, out=bk)
    kq.mul_(d.unsqueeze(2))
    o = workspace("o", Z, run, V)
    fields = (x.unbind(1) for x in (kq, k.unsqueeze(-1), d.unsqueeze(-1), bv, qk, o))
    return [_Token(*token) for token in zip(*fields, strict=True)], o


class _Reader:
    """Forms kq·S [lanes, 2, V], both products in one pass over the states.

    A matrix product of two rows copies S into a packed layout before it reads it, which costs twice its own time
    when S comes from memory. Summing S's rows with weights reads it once: an embedding bag, with kq as weights.
    The choice looks at one state, not at how many there are, so that a row's bits do not depend on the batch.
    """

    def __init__(self, workspace: Workspace, states: States) -> None:
        K, V = states.shape
        self.workspace, self.K = workspace, K
        self.bagged = states.dtype == torch.float32 and K * V >= _WORTH_A_BAG
        self.rows = self.bags = torch.empty(0, 0, dtype=torch.long)

    def read(self, kq: Tensor, states: Tensor) -> Tensor:
        """[lanes, 2, K] times [lanes, K, V]."""
        lanes, K, V = states.shape
        if not self.bagged or not states.is_contiguous():
            return torch.bmm(kq, states, out=self.workspace("y", lanes, 2, V))
        if len(self.rows) < lanes:
            self.rows = torch.arange(lanes * K).view(lanes, 1, K).expand(lanes, 2, K).reshape(lanes, 2 * K)
            self.bags = torch.arange(0, 2 * lanes * K, K)
        rows, bags, weights = self.rows[:lanes].view(-1), self.bags[: 2 * lanes], kq.reshape(-1)
        return torch.embedding_bag(states.view(-1, V), rows, bags, False, 0, False, weights)[0].view(lanes, 2, V)


class _Block:
    """Lanes whose states are walked together: some heads of some sequences, the longest first.

    Args:
        ids: the sequences.
        lengths: their tokens.
        heads: the value heads.
        lane: the first lane within the rows.
    """

    def __init__(self, ids: list[int], lengths: list[int], heads: slice, lane: int) -> None:
        self.ids, self.lengths, self.heads, self.lane = ids, lengths, heads, lane
        self.n_heads = heads.stop - heads.start
        self.S: Tensor
        self.source: Tensor
        self.in_place = False

    def cut(self, lanes: int, states: States) -> list[_Block]:
        """Blocks of about ``lanes`` lanes."""
        count = lanes // self.n_heads
        if count > 1 and self.n_heads * math.prod(states.shape) >= _WORTH_A_CALL:
            count = count if states.in_place(self.ids, self.heads) is not None else 1
        if count >= len(self.ids):
            return [self]
        blocks = []
        for i in range(0, len(self.ids), max(1, count)):
            ids, lengths = self.ids[i : i + max(1, count)], self.lengths[i : i + max(1, count)]
            for h in range(0, self.n_heads, lanes):
                heads = slice(self.heads.start + h, min(self.heads.start + h + lanes, self.heads.stop))
                blocks.append(_Block(ids, lengths, heads, self.lane + i * self.n_heads + h))
        return blocks

    def begin(self, states: States, workspace: Workspace) -> None:
        """Find S, where the states will be, and ``source``, where they are read before the first token."""
        home = states.in_place(self.ids, self.heads)
        self.in_place = home is not None
        self.S = workspace("S", len(self.ids) * self.n_heads, *states.shape) if home is None else home
        source = states.source(self.ids, self.heads)
        self.source = self.S
        if source is None:
            self.S.zero_()
        elif source.dtype != self.S.dtype:
            self.S.copy_(source)
        elif source.data_ptr() != self.S.data_ptr():
            self.source = source
            # Lanes without a token have no first token to read their state.
            live = sum(length > 0 for length in self.lengths) * self.n_heads
            self.S[live:].copy_(source[live:])

    def end(self, states: States) -> None:
        """Put the states where they belong, unless they are there."""
        if not self.in_place:
            states.write(self.ids, self.heads, self.S)

    def walk(self, tokens: list[_Token], states: States, reader: _Reader, first: int) -> None:
        """Advance the states through a run of tokens, of which the first is token ``first``, and fill its outputs."""
        n, S, source = len(self.lengths), self.S, self.source
        lanes = n * self.n_heads
        u = reader.workspace("u", lanes, 1, S.shape[-1])
        for t, whole in enumerate(tokens):
            while n and self.lengths[n - 1] <= first + t:
                n -= 1
            if n == 0:
                break
            if n * self.n_heads < lanes:
                # The shortest sequences have ended: their lanes are the last.
                lanes = n * self.n_heads
                S, source, u = S[:lanes], source[:lanes], u[:lanes]
            token = whole.part(self.lane, lanes)
            y, error = reader.read(token.kq, source), u[:, 0]
            torch.sub(token.bv, y[:, 0], out=error)
            torch.addcmul(y[:, 1], token.qk, error, out=token.o)
            torch.mul(source, token.d, out=S).addcmul_(token.k, u)
            source = S
            states.write_token(self.ids[:n], self.heads, S, first + t)
        self.source = self.S

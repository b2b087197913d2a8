"""``fused_recurrent_kda`` forward: token by token, the state read once and written once for every token.

With q', k', d, β as in inputs.py:

    (y₀, y₁) = (βk'⊙d, q'⊙d) S      u = βv − y₀      S ← d ⊙ S + k' uᵀ      o = y₁ + (q'·k') u

Both products with the old state are one pass over it; the update is the other. Rows are prepared for many lanes and
a run of tokens at once; states are walked in blocks of lanes that stay in cache for the whole run. A state is updated
where it belongs (the final state or the pool's slot) when that memory has the compute dtype and the block is a view
of it, else in the scratch memory of one block. Nothing of a state's size is made for a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kda_core.request import ForwardResult, Request
from kda_core_cpu.chunk_forward import empty_output
from kda_core_cpu.inputs import RowInputs
from kda_core_cpu.launch import Group, Sequences, Window, Workspace, lane_budget, lane_groups
from kda_core_cpu.states import PoolRows, States

_RUN = 64
"""Tokens whose rows are prepared at once."""

_ROW_BUDGET = 1 << 19
"""Elements of one [lanes, tokens, K] operand when one run serves every token."""


def recurrent_forward(request: Request) -> ForwardResult:
    """Run ``fused_recurrent_kda``."""
    pool = PoolRows.of(request)
    run = max(1, min(_RUN, request.T))
    sequences = Sequences.of(request, run, None if pool is None else pool.skip)
    states = States(request, pool)
    o = empty_output(request, sequences)
    workspace, inputs = Workspace(request.compute_dtype), RowInputs(request)
    lanes = lane_budget(request)
    # Decoding is bound by calls: one run prepares the rows of many blocks. A longer sequence keeps one block of
    # states in cache from its first run to its last.
    group_lanes = max(lanes, _ROW_BUDGET // (run * max(request.K, request.V))) if request.T <= run else lanes
    for group in lane_groups(sequences, request, run, group_lanes):
        runs = len(group.alive)
        whole = _Block(group, slice(0, len(group.ids)), group.heads)
        blocks = whole.cut(lanes) if runs == 1 else [whole]
        for i in range(runs):
            window = group.window(i, i + 1)
            rows = _load_rows(workspace, inputs, window)
            for block in blocks:
                if i == 0:
                    block.begin(states, workspace)
                block.walk(rows, states, workspace, i * run)
                if i == runs - 1:
                    block.end(states)
            window.store(rows.o, o)
        if runs == 0:
            whole.begin(states, workspace)
            whole.end(states)
    return ForwardResult(o=o, final_state=states.result)


@dataclass(frozen=True)
class _Rows:
    """Rows of one run: [lanes, tokens, ...] of a group's live sequences, longest first."""

    kq: Tensor
    k: Tensor
    d: Tensor
    bv: Tensor
    qk: Tensor
    o: Tensor


def _load_rows(workspace: Workspace, inputs: RowInputs, window: Window) -> _Rows:
    """Prepare kq = (βk'⊙d, q'⊙d), k', d, βv and q'·k'; padding rows leave a state as it is."""
    request, Z, run = inputs.request, window.Z, window.group.chunk
    K, V = request.K, request.V
    kq, k = workspace("kq", Z, run, 2, K), workspace("k", Z, run, K)
    inputs.load_unit(request.q, window, kq[:, :, 1])
    kq[:, :, 1].mul_(request.scale)
    inputs.load_unit(request.k, window, k)
    beta = inputs.load_beta(window, workspace("beta", Z, run, 1))
    d = inputs.load_decay(window, workspace("d", Z, run, K))
    bv = window.load(request.v, workspace("v", Z, run, V)).mul_(beta)
    qk = torch.mul(kq[:, :, 1], k, out=workspace("products", Z, run, K)).sum(-1, keepdim=True)
    torch.mul(k, beta, out=kq[:, :, 0])
    kq.mul_(d.unsqueeze(2))
    return _Rows(kq, k, d, bv, qk, workspace("o", Z, run, V))


class _Block:
    """Lanes of a group whose states are walked together: all heads of some sequences, or some heads of one.

    Args:
        group: the group.
        rows: its sequences, as positions within the group.
        heads: its value heads.
    """

    def __init__(self, group: Group, rows: slice, heads: slice) -> None:
        self.group, self.rows, self.heads = group, rows, heads
        self.ids = group.ids[rows]
        self.lengths = group.sequences.length[self.ids].tolist()
        self.n_heads = heads.stop - heads.start
        self.S: Tensor
        self.source: Tensor
        self.in_place = False

    def cut(self, lanes: int) -> list[_Block]:
        """Blocks of about ``lanes`` lanes."""
        count = lanes // self.n_heads
        if count >= 1:
            starts = range(0, self.rows.stop, count)
            return [_Block(self.group, slice(i, min(i + count, self.rows.stop)), self.heads) for i in starts]
        heads = [slice(h, min(h + lanes, self.heads.stop)) for h in range(self.heads.start, self.heads.stop, lanes)]
        return [_Block(self.group, slice(i, i + 1), part) for i in range(self.rows.stop) for part in heads]

    def begin(self, states: States, workspace: Workspace) -> None:
        """Find S, where the states will be, and ``source``, where they are read before the first token."""
        home = states.in_place(self.ids, self.heads)
        self.in_place = home is not None
        self.S = workspace("S", len(self.ids) * self.n_heads, *states.shape) if home is None else home
        source = states.source(self.ids, self.heads)
        self.source = self.S
        # Lanes without a token have no first token to read their state.
        live = sum(length > 0 for length in self.lengths) * self.n_heads
        if source is None:
            self.S.zero_()
        elif source.dtype != self.S.dtype:
            self.S.copy_(source)
        elif source.data_ptr() != self.S.data_ptr():
            self.source = source
            self.S[live:].copy_(source[live:])

    def end(self, states: States) -> None:
        """Put the states where they belong, unless they are there."""
        if not self.in_place:
            states.write(self.ids, self.heads, self.S)

    def walk(self, rows: _Rows, states: States, workspace: Workspace, first: int) -> None:
        """Advance the states through the run of tokens from token ``first`` on and fill the block's part of rows.o."""
        offset = self.rows.start * self.group.n_heads + self.heads.start - self.group.heads.start
        per_token = [x[offset:].unbind(1) for x in (rows.kq, rows.k.unsqueeze(-1), rows.d.unsqueeze(-1), rows.bv)]
        qk, o = rows.qk[offset:].unbind(1), rows.o[offset:].unbind(1)
        n = len(self.lengths)
        for t, (kq, k, d, bv) in enumerate(zip(*per_token, strict=True)):
            while n and self.lengths[n - 1] <= first + t:
                n -= 1
            if n == 0:
                break
            lanes = n * self.n_heads
            S = self.S[:lanes]
            y = torch.bmm(kq[:lanes], self.source[:lanes], out=workspace("y", lanes, 2, S.shape[-1]))
            u = torch.sub(bv[:lanes], y[:, 0], out=workspace("u", lanes, S.shape[-1]))
            torch.addcmul(y[:, 1], qk[t][:lanes], u, out=o[t][:lanes])
            torch.mul(self.source[:lanes], d[:lanes], out=S).addcmul_(k[:lanes], u.unsqueeze(1))
            self.source = self.S
            states.write_token(self.ids[:n], self.heads, S, first + t)

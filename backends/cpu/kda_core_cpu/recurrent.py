"""``fused_recurrent_kda`` forward: token by token, the state read once and written once for every token.

With q', k', d, β as in inputs.py:

    S ← d ⊙ S      (y₀, y₁) = (k', q') S      u = βv − βy₀      S ← S + k' uᵀ      o = y₁ + (q'·k') u

The first line streams the states from memory; the others find them in cache, and both products read them together.
Rows are prepared for many lanes and a run of tokens at once; states are walked in blocks of lanes that stay in cache
for the whole run. A state is updated in place (in the final state or the pool's slot) if that memory has the compute
dtype and the block is a view of it, else in the scratch memory of one block. No token allocates memory of a state's
size.

A decoding step spends as much time in torch calls as in memory traffic, so it makes few calls. States fill the cache,
so rows must be small: βv, u and o share one buffer, unless u is recorded, and inputs with the right layout and dtype
are read in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kda_core.request import DATA, ForwardResult, Request
from kda_core_cpu.choose import group_lanes, run_lanes, run_tokens, updates_slot_in_place
from kda_core_cpu.commit import commit
from kda_core_cpu.inputs import RowInputs
from kda_core_cpu.sequences import Sequences, has_one_token_each, lane_groups
from kda_core_cpu.small_step import row_sums, small_step
from kda_core_cpu.states import States, first_slots
from kda_core_cpu.windows import TokenWindow, Window
from kda_core_cpu.workspace import Workspace, empty_output


def recurrent_forward(request: Request) -> ForwardResult:
    if request.commit is not None:
        commit(request.committing())
        request = request.after_commit()
    if request.parents is not None:
        return tree_forward(request)
    return small_step(request) or general_forward(request)


def tree_forward(request: Request) -> ForwardResult:
    packed, (row, sequence, token) = as_branches(request)
    found, o = general_forward(packed).o, empty_output(request)
    o[sequence, token] = found[0, row]
    live = torch.tensor(first_slots(request), device="cpu")[sequence] >= 0
    row, sequence, token = (x[live] for x in (row, sequence, token))
    request.records[sequence, token] = packed.records[0, row]  # type: ignore[index]
    return ForwardResult(o=o)


def as_branches(r: Request) -> tuple[Request, tuple[Tensor, ...]]:
    """Trees as packed sequences, one from the root to each leaf; (row, sequence, token) of each token of the trees.

    A token that branches share is computed once for each of them, with the same bits: those of a draft of its ancestors
    alone. The records are a fresh buffer.
    """
    branches = r.branches()
    owner = torch.tensor([n for n, _ in branches], dtype=torch.long, device="cpu")
    lengths = torch.tensor([0, *(len(tokens) for _, tokens in branches)], device="cpu")
    rows = [(n, t) for n, tokens in branches for t in tokens]
    first = {row: i for i, row in reversed(list(enumerate(rows)))}
    sequence, token = torch.tensor(rows, dtype=torch.long, device="cpu").reshape(-1, 2).unbind(1)
    data = {name: getattr(r, name)[sequence, token][None] for name in DATA}
    by_sequence = ("ssm_state_indices", "num_accepted_tokens", "has_initial_state")
    given = {n: t[owner] for n in by_sequence if (t := getattr(r, n)) is not None}
    records = r.records.new_empty(1, len(rows), *r.records.shape[2:])  # type: ignore[union-attr]
    packed = replace(r, **data, **given, cu_seqlens=lengths.cumsum(0), records=records, parents=None, out=None)
    places = torch.tensor([(i, *row) for row, i in first.items()], dtype=torch.long, device="cpu")
    return packed, places.reshape(-1, 3).unbind(1)


def general_forward(request: Request) -> ForwardResult:
    """Run any call of ``fused_recurrent_kda``."""
    states, o = States(request), empty_output(request)
    workspace, inputs = Workspace(request.compute_dtype), RowInputs(request)
    if request.records is None and request.N and has_one_token_each(request):
        _run_step(TokenWindow(request), states, workspace, inputs, o)
    else:
        _run_sequences(request, states, workspace, inputs, o)
    return ForwardResult(o=o, final_state=states.result)


def _run_step(step: TokenWindow, states: States, workspace: Workspace, inputs: RowInputs, o: Tensor) -> None:
    """One token for every sequence."""
    request, HV = step.request, step.heads.stop
    if step.pairs < request.B * request.T:
        o.zero_()
    own = step.view(o, request.compute_dtype)
    rows = workspace("o", step.Z, request.V) if own is None else own
    token = _Token(*_load_rows(workspace, inputs, step, rows))
    lanes, slots, every = group_lanes(request.K, request.V, step=True), states.slot or [], range(step.pairs)
    some_skipped = min(slots, default=0) < 0
    runs = itertools.groupby(every, lambda n: slots[n] < 0) if some_skipped else [(False, every)]
    for skipped, run in runs:
        ids = list(run)
        first, last = ids[0] * HV, (ids[-1] + 1) * HV
        if skipped:
            rows[first:last].zero_()
            continue
        blocks = _Block(ids, [1] * len(ids), step.heads, states).cut(lanes, step=True)
        live = token.lanes(first, last) if some_skipped else token
        parts = live.split([len(block.ids) * block.n_heads for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            block.begin(workspace)
            _advance(part, block.source, block.S, states, workspace)
            states.write_token(block.ids, block.heads, block.S, 0)
            block.end()
    if own is None:
        step.store(rows, o)


def _run_sequences(request: Request, states: States, workspace: Workspace, inputs: RowInputs, o: Tensor) -> None:
    """Any number of tokens."""
    run = run_tokens(request)
    sequences = Sequences(request, states.skipped)
    if int(sequences.length.sum()) < request.B * request.T:
        o.zero_()
    lanes = group_lanes(request.K, request.V)
    for group in lane_groups(sequences, request, run, run_lanes(request, lanes)):
        runs = len(group.alive)
        whole = _Block(group.ids.tolist(), sequences.length[group.ids].tolist(), group.heads, states)
        blocks = whole.cut(lanes) if runs == 1 else [whole]
        sizes = [block.live for block in blocks]
        for i in range(runs):
            window = Window(group, i, i + 1)
            rows = workspace("o", window.Z, run, request.V)
            updates = rows if request.records is None else workspace("u", *rows.shape)
            fields = (x.unbind(1) for x in _load_rows(workspace, inputs, window, rows, updates))
            tokens = map(_Token._make, zip(*fields, strict=True))
            parts = zip(*(token.split(sizes) for token in tokens), strict=True)
            for block, part in zip(blocks, parts, strict=True):
                if i == 0:
                    block.begin(workspace)
                block.walk(part, workspace, i * run)
                if i == runs - 1:
                    block.end()
            window.store(rows, o)
            if request.records is not None:
                _store_records(workspace, window, updates, request.records)
        if runs == 0:
            whole.begin(workspace)
            whole.end()


def _store_records(workspace: Workspace, window: Window, updates: Tensor, records: Tensor) -> None:
    """Copy k', d and u of a window's rows, as its tokens have left them, to ``records`` [B, T, HV, 2K + V]."""
    V = updates.shape[-1]
    K = (records.shape[-1] - V) // 2
    kq, d = workspace("kq", *window.shape, 2, K), workspace("d", *window.shape, K)
    parts = records.split([K, K, V], -1)
    for rows, into in zip((kq.select(-2, 0), d, updates), parts, strict=True):
        window.store(rows, into)


class _Token(NamedTuple):
    """One token of some lanes.

    ``w`` holds βv first, then u; it is the memory of ``o`` unless u is recorded. ``u`` is a view of it.
    """

    kq: Tensor
    k: Tensor
    d: Tensor
    beta: Tensor
    qk: Tensor
    u: Tensor
    w: Tensor
    o: Tensor

    def split(self, lanes: list[int]) -> Iterator[_Token]:
        """The token cut into as many lanes each."""
        if len(lanes) == 1:
            return iter((self,))
        return map(_Token._make, zip(*(x.split_with_sizes(lanes) for x in self), strict=True))

    def lanes(self, first: int, last: int) -> _Token:
        """Lanes [first, last)."""
        return _Token._make(x[first:last] for x in self)


def _load_rows(
    workspace: Workspace, inputs: RowInputs, window: Window | TokenWindow, o: Tensor, w: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The fields of ``_Token`` for all rows of a window, with results in ``o``; padding rows are never walked."""
    w = o if w is None else w
    K = inputs.request.K
    kq, d = workspace("kq", *window.shape, 2, K), workspace("d", *window.shape, K)
    k, q = inputs.load_units(window, workspace, kq)
    qk = torch.mul(q, k, out=d).sum(-1, keepdim=True)
    inputs.load_decay(window, d, workspace)
    beta = inputs.load_beta(window, workspace)
    torch.mul(inputs.read(inputs.request.v, window, w), beta, out=w)
    return kq, k.unsqueeze(-1), d.unsqueeze(-1), beta, qk, w.unsqueeze(-2), w, o


def _advance(token: _Token, source: Tensor, S: Tensor, states: States, workspace: Workspace) -> None:
    """Write to ``S`` the states after a token of all its lanes, from those before it, and fill its outputs.

    It reads kq·S [lanes, 2, V], both products in one pass: a batched product, or an embedding bag over S's rows with kq
    as weights (``choose.sums_rows``).
    """
    kq, k, d, beta, qk, u, w, o = token
    torch.mul(source, d, out=S)
    shape = (*kq.shape[:2], S.shape[2])
    y = row_sums(kq, S).view(shape) if states.sums_rows else torch.bmm(kq, S, out=workspace("y", *shape))
    along_k, along_q = y.unbind(1)
    w.addcmul_(beta, along_k, value=-1)
    S.addcmul_(k, u)
    torch.addcmul(along_q, qk, w, out=o)


class _Block:
    """Lanes whose states are walked together: ``heads`` of the sequences ``ids``, the longest of ``lengths`` first.

    Attributes:
        home: the memory of their last states if they are updated in it, else None.
        S: the memory that they are updated in.
        source: the states before the next token.
    """

    def __init__(self, ids: list[int], lengths: list[int], heads: slice, states: States) -> None:
        self.ids, self.lengths, self.heads, self.states = ids, lengths, heads, states
        self.n_heads = heads.stop - heads.start
        self.home = states.in_place(ids, heads)
        self.S: Tensor
        self.source: Tensor

    @property
    def live(self) -> int:
        """Lanes with at least one token; they come first."""
        return sum(length > 0 for length in self.lengths) * self.n_heads

    def cut(self, lanes: int, step: bool = False) -> list[_Block]:
        """Blocks of about ``lanes`` lanes."""
        count = lanes // self.n_heads
        if self.home is None and updates_slot_in_place(self.n_heads, *self.states.shape):
            count = min(count, 1)
        # Up to twice the lanes in a step: more calls cost more than one overflow of the cache.
        if count >= len(self.ids) or (step and self.home is not None and len(self.home) <= 2 * lanes):
            return [self]
        blocks = []
        for i in range(0, len(self.ids), max(1, count)):
            ids, lengths = self.ids[i : i + max(1, count)], self.lengths[i : i + max(1, count)]
            for h in range(0, self.n_heads, lanes):
                heads = slice(self.heads.start + h, min(self.heads.start + h + lanes, self.heads.stop))
                blocks.append(_Block(ids, lengths, heads, self.states))
        return blocks

    def begin(self, workspace: Workspace) -> None:
        """Set S and ``source`` before the first token."""
        states = self.states
        if self.home is not None and states.at_home:
            self.S = self.source = self.home
            return
        self.S = states.scratch(workspace, len(self.ids) * self.n_heads) if self.home is None else self.home
        source = states.source(self.ids, self.heads)
        self.source = self.S
        if source is None:
            self.S.zero_()
        elif source.dtype != self.S.dtype:
            self.S.copy_(source)
        elif source.data_ptr() != self.S.data_ptr():
            self.source = source
            # Lanes without a token have no first token to read their state.
            if not self.lengths[-1]:
                self.S[self.live :].copy_(source[self.live :])

    def end(self) -> None:
        """Store the states, unless they were updated in place."""
        if self.home is None:
            self.states.write(self.ids, self.heads, self.S)

    def walk(self, tokens: Iterable[_Token], workspace: Workspace, first: int) -> None:
        """Advance the states through a run of tokens, the first with number ``first``, and fill its outputs."""
        n, S, source = len(self.lengths), self.S, self.source
        lanes = n * self.n_heads
        for t, token in enumerate(tokens, first):
            if self.lengths[n - 1] <= t:
                # The shortest sequences have ended: their lanes are the last.
                n = sum(length > t for length in self.lengths)
                if n == 0:
                    break
                lanes = n * self.n_heads
                S, source = S[:lanes], source[:lanes]
            _advance(token if lanes == token.o.shape[0] else token.lanes(0, lanes), source, S, self.states, workspace)
            source = S
            self.states.write_token(self.ids[:n], self.heads, S, t)
        self.source = self.S

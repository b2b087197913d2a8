"""The part of a call that is compared with the reference, as a call of its own, and the states that it keeps.

Value heads and sequences are independent, so some of them are a smaller call. So are the first tokens of a sequence,
for outputs, states within them and the gradient of q. Checkpoints and records are final states of such calls.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kda_core import reference
from kda_core._pool_checks import PoolSlots
from kda_core.request import DATA, CommitRequest, Request
from kda_core.testing.inputs import Call

BY_QUERY_HEAD, BY_VALUE_HEAD = ("q", "k", "dq", "dk"), ("v", "g", "beta", "o", "dv", "dg", "dbeta")
_KINDS = ("bool", "int", "float", "float | None", "torch.dtype | None")
_OWN = ("pad_slot_id", "save_for_backward", "checkpoint_every")
OPTIONS = tuple(f.name for f in fields(Request) if f.type in _KINDS and f.name not in _OWN)
"""A call's options; a sample's pool has its own slots, and slot -1 is skipped."""

MOST_STATES = 2**22  # Elements of all states of a sample at one token: 32 MiB in float64 at most


def on_cpu(r: Request) -> Request:
    """The request with its index tensors on the CPU; counts of accepted tokens within their range, as on devices."""
    indices, accepted = r.ssm_state_indices, r.num_accepted_tokens
    if accepted is not None and indices is not None and not accepted.is_cpu:
        accepted = accepted.cpu().clamp(1, 1 if indices.dim() == 1 else indices.shape[1])
    tables = "ssm_state_indices", "final_state_indices", "checkpoint_indices"
    names = "cu_seqlens", "has_initial_state", "parents", *tables
    moved = {n: t if (t := getattr(r, n)) is None else t.cpu() for n in names}
    return replace(r, **moved, num_accepted_tokens=accepted if accepted is None else accepted.cpu())


class Slots:
    """The slots of a pool that a call uses.

    Attributes:
        used: all of the pool that it reads, in ascending order; ``written_apart``: of the other one that it writes.
        read: those that a sequence starts from.
        skipped: for every sequence, whether the call leaves it out.
        states: what ``used`` held before the call, on the pool's device.
        rows, targets: [N][W] slots by sequence that are read, and that are written; -1 where none is used. Both are in
            ``rows`` where the call has one table.
        kept: [N][M] slots of checkpoints, -1 where there is none.
        accepted: [N] which of them a sequence starts from, or None.
        given: [N] whether a sequence starts from its slot rather than from zero, or None.
    """

    def __init__(self, r: Request) -> None:
        self.request = r
        found = PoolSlots.of(r, [end - start for _, start, end in reference.sequence_bounds(r)])
        self.accepted = None if r.num_accepted_tokens is None else r.num_accepted_tokens.tolist()
        self.given = None if r.has_initial_state is None else r.has_initial_state.tolist()
        self.skipped, self.read = [slot < 0 for slot in found.start], {slot for slot in found.read if slot >= 0}
        self.targets, self.kept = found.written, found.checkpoints
        table = r.ssm_state_indices
        width = 1 if table is None or table.dim() == 1 else table.shape[1]
        self.rows = [[*row] if r.final_state_indices is None else [-1] * width for row in self.targets]
        for row, count, slot in zip(self.rows, self.accepted or [1] * r.N, found.start, strict=True):
            row[count - 1] = slot
        pool, apart = r.initial_state, r.written_states == "final_state_pool"
        assert pool is not None
        written = self.written()
        used = {slot for row in self.rows for slot in row if slot >= 0}
        self.used, self.written_apart = sorted(used if apart else used | written), sorted(written if apart else ())
        self.states = pool[torch.tensor(self.used, dtype=torch.long, device=pool.device)].detach()

    def written(self) -> set[int]:
        """The slots that the call writes."""
        return {slot for row in self.targets for slot in row if slot >= 0}

    def checkpoints(self) -> set[int]:
        """The slots that its checkpoints are written to."""
        return {slot for row in self.kept for slot in row if slot >= 0}

    def written_by(self, sequences: Iterable[int], lengths: list[int]) -> list[int]:
        """The slots that the first tokens of some sequences write, in order of sequence and token."""
        return [slot for n, k in zip(sequences, lengths, strict=True) for slot in self.targets[n][:k] if slot >= 0]


def whole(r: Request) -> Sample:
    """All of a call, whose index tensors are on the CPU: it says where a row of a result lies."""
    return Sample(r, Slots(r) if r.inplace_final_state else None, sys.maxsize, random.Random(0), sys.maxsize)


class Sample:
    """Some sequences and heads of a call.

    Args:
        r: the call's request, its index tensors on the CPU. slots: of its pool, or None.
        elements: of states that may be computed (tokens times value heads times K times V).
        choice: decides which part of a larger call is taken. most_states: elements of all states at one token.

    Attributes:
        sequences: their numbers. heads, value_heads: slices. tokens: most of every sequence; None: all.
        whole: whether all sequences are in it, with all their tokens.
    """

    def __init__(
        self, r: Request, slots: Slots | None, elements: int, choice: random.Random, most_states: int = MOST_STATES
    ) -> None:
        self.request, self.slots = r, slots
        self.bounds = reference.sequence_bounds(r)
        skipped = [False] * r.N if slots is None else slots.skipped
        self.sequences = [n for n, skip in enumerate(skipped) if not skip]
        group = r.HV // r.H
        of_head = group * r.K * r.V
        total = sum(map(self._all_tokens, self.sequences))
        allowed = min(elements // max(total * of_head, 1), most_states // max(len(self.sequences) * of_head, 1))
        heads = max(1, min(r.H, allowed))
        first = choice.randrange(r.H - heads + 1)
        self.heads, self.value_heads = slice(first, first + heads), slice(group * first, group * (first + heads))
        self.tokens: int | None = None
        self.whole = True
        if allowed < 1:
            self._drop_sequences(elements // of_head, max(most_states // of_head, 1), choice)

    def _all_tokens(self, n: int) -> int:
        _, start, end = self.bounds[n]
        return end - start

    def _drop_sequences(self, tokens: int, most: int, choice: random.Random) -> None:
        """Keep at most ``most`` sequences with ``tokens`` tokens together; cut a longer one to its first tokens."""
        order = choice.sample(self.sequences, len(self.sequences))
        kept: list[int] = []
        left = tokens
        for n in order:
            if len(kept) < most and self._all_tokens(n) <= left:
                kept.append(n)
                left -= self._all_tokens(n)
        too_long = [n for n in order if self._all_tokens(n) > tokens]
        if too_long and not any(map(self._all_tokens, kept)):
            kept, self.tokens = too_long[:1], max(1, tokens)
        self.whole, self.sequences = False, sorted(kept)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence that are in the sample."""
        counts = [self._all_tokens(n) for n in self.sequences]
        return counts if self.tokens is None else [min(count, self.tokens) for count in counts]

    def __str__(self) -> str:
        r = self.request
        parts = []
        if self.value_heads != slice(0, r.HV):
            parts.append(f"value heads {self.value_heads.start} to {self.value_heads.stop - 1} of {r.HV}")
        if not self.whole:
            parts.append(f"sequences {', '.join(map(str, self.sequences))} of {r.N}")
        if self.tokens is not None:
            parts.append(f"their first {self.tokens} tokens")
        return ", ".join(parts) or "all of it"

    def tokens_of(self, name: str, t: Tensor) -> Tensor:
        """[B', T', heads, ...] on the CPU of a tensor [B, T, H or HV, ...]."""
        t = t.detach()[:, :, self.heads if name in BY_QUERY_HEAD else self.value_heads]
        return self._rows_of(t, [self.bounds[n][1] for n in self.sequences], self.lengths)

    def _rows_of(self, t: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        """``counts`` rows of every sequence, from ``starts`` on where sequences are packed, on the CPU."""
        if self.request.cu_seqlens is None:
            there = t[:, : counts[0] if counts else 0]
            return there[torch.tensor(self.sequences, dtype=torch.long, device=t.device)].cpu()
        parts = [t[:, start : start + count] for start, count in zip(starts, counts, strict=True)]
        return (torch.cat(parts, 1) if parts else t[:, :0].clone()).cpu()

    def states_of(self, t: Tensor) -> Tensor:
        """[N', heads, K, V] on the CPU of states [N, HV, K, V]."""
        return t.detach()[torch.tensor(self.sequences, dtype=torch.long, device=t.device)][:, self.value_heads].cpu()

    def chunk_states_of(self, h: Tensor) -> Tensor:
        """[B', NT', heads, K, V] on the CPU of intermediate states [B, NT, HV, K, V]."""
        size = self.request.chunk_size
        counts = [-(-length // size) for length in self.lengths]
        firsts = [sum(-(-self._all_tokens(m) // size) for m in range(n)) for n in self.sequences]
        return self._rows_of(h.detach()[:, :, self.value_heads], firsts, counts)

    def call(self) -> Call:
        """The sample as a call, forward only; copies of its tensors are taken now."""
        r = self.request
        tensors = {n: self.tokens_of(n, getattr(r, n)) for n in DATA}
        shared = {n: t for n in ("A_log", "dt_bias") if (t := getattr(r, n)) is not None}
        tensors |= {n: t.detach()[self.value_heads].to("cpu", copy=True) for n, t in shared.items()}
        if r.cu_seqlens is not None:
            tensors["cu_seqlens"] = torch.tensor([0, *self.lengths], dtype=torch.long, device="cpu").cumsum(0)
        if r.parents is not None:
            tokens = self.lengths[0] if self.sequences else 0
            tensors["parents"] = r.parents[self.sequences, :tokens]
        if self.slots is not None:
            tensors |= self.pool()
        elif r.initial_state is not None:
            tensors["initial_state"] = self.states_of(r.initial_state)
        return Call(r.op, tensors, {n: getattr(r, n) for n in OPTIONS}, name="a checked call")

    def pool(self) -> dict[str, Tensor]:
        """A pool of the slots that the sample uses."""
        slots = self.slots
        assert slots is not None
        states = slots.states[:, self.value_heads].cpu()
        if not len(states):  # a pool has at least one slot
            states = states.new_zeros(1, *states.shape[1:])
        found = {"initial_state": states, "ssm_state_indices": self._table(slots.rows, slots.used)}
        if slots.accepted is not None:
            accepted = [slots.accepted[n] for n in self.sequences]
            found["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32, device="cpu")
        elif len(slots.rows[0] if slots.rows else [0]) == 1:
            found["ssm_state_indices"] = found["ssm_state_indices"][:, 0]
        if slots.given is not None:
            found["has_initial_state"] = torch.tensor([slots.given[n] for n in self.sequences], device="cpu")
        if slots.request.final_state_indices is not None:
            pool = slots.request.final_state_pool
            places = slots.used if pool is None else slots.written_apart
            found["final_state_indices"] = self._table(slots.targets, places)
            if pool is not None:
                shape = (max(1, len(places)), *states.shape[1:])
                found["final_state_pool"] = torch.zeros(shape, dtype=pool.dtype, device="cpu")
        return found

    def _table(self, rows: list[list[int]], places: list[int]) -> Tensor:
        """[N', W] slots of the sample's pool, for rows of slots of the call's."""
        place = {slot: i for i, slot in enumerate(places)}
        table = [[place.get(slot, -1) for slot in rows[n]] for n in self.sequences]
        return torch.tensor(table, dtype=torch.long, device="cpu").reshape(len(table), len(rows[0]) if rows else 1)

    def place(self, name: str, where: tuple[int, ...]) -> str:
        """Where a row of the sample's output ``name`` lies in the call."""
        if name in BY_QUERY_HEAD or name in BY_VALUE_HEAD:
            i, token, head = where[:3]
            first = self.heads.start if name in BY_QUERY_HEAD else self.value_heads.start
            if self.request.cu_seqlens is None:
                return f"token {token} of sequence {self.sequences[i]}, head {first + head}"
            for n, length in zip(self.sequences, self.lengths, strict=True):
                if token < length:
                    row = self.bounds[n][1] + token
                    return f"token {token} of sequence {n} (row {row}), head {first + head}"
                token -= length
        first = self.value_heads.start
        if name == "h":
            return f"chunk {where[1]} of the sample, head {first + where[2]}, row {where[3]}"
        if name not in ("final_state", "dinitial_state"):
            return f"head {first + where[0]}"
        pooled = name == "final_state" and self.slots is not None
        state = f"slot {self.written_slots()[where[0]]}" if pooled else f"sequence {self.sequences[where[0]]}"
        return f"{state}, head {first + where[1]}, row {where[2]}"

    def written_slots(self) -> list[int]:
        """Slots of the pool that the sample's sequences write, in order."""
        assert self.slots is not None
        return self.slots.written_by(self.sequences, self.lengths)


class Kept(NamedTuple):
    """Some states of one kind, and the call whose final states they must be."""

    name: str  # "checkpoints" or "records"
    call: Call  # packed sequences, each up to the token behind which a state is
    states: Tensor  # [N, heads, K, V] in the call's layout
    dtype: torch.dtype  # that they are stored in
    places: list[str]  # where each is


def kept_states(r: Request, sample: Sample, call: Call, elements: int, choice: random.Random) -> Iterator[Kept]:
    """States that a call has kept of a sample's sequences, after the call.

    Args:
        r: the request. call: the sample as a call, as it was before the request ran.
        elements: of states that may be computed; of more checkpoints ``choice`` decides which are looked at.
    """
    if r.checkpoint_states is not None:
        found = _checkpoints(sample, call, elements, choice)
        if found:
            rows, slots = [(n, list(range(count))) for n, count, _ in found], [slot for *_, slot in found]
            pool = getattr(r, r.checkpoint_states)
            states = pool.detach()[torch.tensor(slots, device=pool.device)][:, sample.value_heads].cpu()
            places = [f"slot {s}, {count} tokens of sequence {sample.sequences[n]}" for n, count, s in found]
            yield Kept("checkpoints", ending(call, rows, pool.dtype), states, pool.dtype, places)
    if r.records is not None:
        rows = [(n, list(range(count))) for n, count in enumerate(call.lengths()) if count]
        if "parents" in call.tensors:
            rows = call.request().branches()
        if rows:
            part = ending(call, rows, r.compute_dtype)
            records = call.packed(sample.tokens_of("records", r.records), rows)
            places = [f"token {tokens[-1]} of sequence {sample.sequences[n]}" for n, tokens in rows]
            yield Kept("records", part, _replayed(part, records), r.compute_dtype, places)


def _checkpoints(sample: Sample, call: Call, elements: int, choice: random.Random) -> list[tuple[int, int, int]]:
    """(number in the sample, tokens, slot) of checkpoints; only as many as have ``elements`` of states before them."""
    assert sample.slots is not None
    every, of_token = sample.request.checkpoint_every, math.prod(call.tensors["initial_state"].shape[1:])
    found = [
        (i, (j + 1) * every, slot)
        for i, (n, length) in enumerate(zip(sample.sequences, sample.lengths, strict=True))
        for j, slot in enumerate(sample.slots.kept[n])
        if slot >= 0 and (j + 1) * every <= length
    ]
    chosen, left = [], elements
    for state in choice.sample(found, len(found)):
        if state[1] * of_token <= left:
            chosen.append(state)
            left -= state[1] * of_token
    return chosen


def ending(call: Call, rows: list[tuple[int, list[int]]], dtype: torch.dtype) -> Call:
    """These tokens of the call's sequences as packed ones, whose final states go to a pool of this dtype in order."""
    part = call.having(parents=None).without_pool().with_sequences(rows)
    own = torch.arange(len(rows), device="cpu")
    pool = torch.zeros_like(part.tensors["initial_state"], dtype=dtype)
    return part.having(ssm_state_indices=own, final_state_indices=own, final_state_pool=pool, output_final_state=None)


def _replayed(call: Call, records: Tensor) -> Tensor:
    """The final states of a call of ``ending`` by the records of its tokens."""
    r = call.request()
    assert not any(x is None for x in (r.initial_state, r.cu_seqlens, r.ssm_state_indices))
    states = r.initial_state.double()
    commit = CommitRequest(
        pool=states, records=records, num_accepted=r.cu_seqlens.diff(), state_indices=r.ssm_state_indices,
        cu_seqlens=r.cu_seqlens, state_v_first=r.state_v_first,
    )  # fmt: skip
    for slot, state in reference.committed(commit).items():
        states[slot] = state.mT if r.state_v_first else state
    return states

"""States that a call keeps beside its results, for ``call_checks``: checkpoints, and records by what they replay."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kda_core import reference
from kda_core.request import CommitRequest, Request
from kda_core.testing.call_samples import Sample
from kda_core.testing.inputs import Call


class Kept(NamedTuple):
    """Some states of one kind, and the call whose final states they must be.

    Attributes:
        name: "checkpoints" or "records".
        call: packed sequences, each up to the token behind which a state is.
        states: [N, heads, K, V] in the call's layout; ``dtype``: that they are stored in.
        places: where each is.
    """

    name: str
    call: Call
    states: Tensor
    dtype: torch.dtype
    places: list[str]


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
    assert r.initial_state is not None
    assert r.cu_seqlens is not None
    assert r.ssm_state_indices is not None
    states = r.initial_state.double()
    commit = CommitRequest(
        pool=states, records=records, num_accepted=r.cu_seqlens.diff(), state_indices=r.ssm_state_indices,
        cu_seqlens=r.cu_seqlens, state_v_first=r.state_v_first,
    )  # fmt: skip
    for slot, state in reference.committed(commit).items():
        states[slot] = state.mT if r.state_v_first else state
    return states

"""The rule of slots that the checks and the kit go by, beside what the oracle reads and writes."""

from __future__ import annotations

import random

import pytest
import torch

from kda_core import reference
from kda_core._checks import check, check_values
from kda_core.testing.cases import Case
from kda_core.testing.inputs import Call, same_bits


def drawn(rng: random.Random, op: str) -> Call:
    """A call over pools that are full of NaN wherever it reads nothing."""
    maybe = lambda: rng.random() < 0.5  # noqa: E731
    lengths = tuple(rng.choice((0, 1, 3, 33, 66)) for _ in range(rng.randint(1, 4)))
    lengths = tuple(min(length, 4) for length in lengths) if op != "chunk_kda" and maybe() else lengths
    width = 4 if max(lengths) <= 4 and op != "chunk_kda" else 1
    N, pad, slots = len(lengths), rng.choice((-1, 0, 3)), list(range(40))
    rng.shuffle(slots)

    def table(columns: int) -> torch.Tensor:
        rows = [[rng.choice((-1, -7, pad, *[slots.pop()] * 5)) for _ in range(columns)] for _ in range(N)]
        return torch.tensor(rows, dtype=torch.int32).view((N, columns) if columns > 1 else (N,))

    case = Case(name="slots", op=op, T=sum(lengths), K=4, lengths=lengths, state=torch.float32)
    call = case.call().having(pad_slot_id=pad)
    if op == "chunk_kda":
        call = call.having(chunk_size=32)
    if maybe():
        call = call.having(has_initial_state=torch.tensor([maybe() for _ in range(N)]))
    accepted = torch.tensor([rng.randint(1, width) for _ in range(N)]) if width > 1 and maybe() else None
    call = call.in_pool(table(width), 40, accepted)
    if maybe():
        call = call.written_elsewhere(table(1), rng.choice((0, 40)))
    elif maybe():
        call = call.having(update_state=False, output_final_state=False)
    if op == "chunk_kda" and call.request().written_states and maybe():
        call = call.having(checkpoint_indices=table(2).view(N, 2), checkpoint_every=32)
    return call


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_the_rule_is_the_oracles(op: str):
    """The oracle writes the slots that the rule names, and reads those: all others hold NaN."""
    rng, kinds = random.Random(0), set()
    for _ in range(60):
        call = drawn(rng, op)
        r = call.having(**{n: t.clone() for n, t in call.tensors.items() if n.endswith(("pool", "_state"))}).request()
        check(r)
        check_values(r)
        before = {n: getattr(r, n).clone() for n in ("initial_state", "final_state_pool") if getattr(r, n) is not None}
        o = reference.forward(r).o
        assert not o.isnan().any()
        for n, pool in before.items():
            now = getattr(r, n)
            changed = {slot for slot in range(40) if not same_bits(now[slot], pool[slot])}
            assert changed == set(call.slots_of(n)), (n, call.options, call.tensors)
            assert not now[sorted(changed)].isnan().any()
        poisoned = call.having(initial_state=torch.full_like(call.tensors["initial_state"], float("nan"))).request()
        lost = reference.forward(poisoned).o.isnan()
        for n, (start, read) in enumerate(zip(call.slots().start, call.slots().read, strict=True)):
            _, first, end = reference.sequence_bounds(r)[n]
            assert bool(o[0, first:end].any()) == (start >= 0 and end > first)
            assert bool(lost[0, first:end].any()) == (read >= 0 and end > first)
        kinds.add((r.written_states, r.writes_every_token, r.checkpoint_states))
    assert len(kinds) >= 4


def test_without_a_table_no_slot_is_padding():
    """Sequence n has slot n then, whatever pad_slot_id says."""
    case = Case(name="rows", op="fused_recurrent_kda", B=2, T=1, K=4, state=torch.float32)
    call = case.call().having(inplace_final_state=True, output_final_state=False, pad_slot_id=0)
    r = call.having(initial_state=call.tensors["initial_state"].clone()).request()
    reference.forward(r)
    changed = [n for n in range(2) if not same_bits(r.initial_state[n], call.tensors["initial_state"][n])]
    assert changed == call.written_slots() == call.slots().start == [0, 1]

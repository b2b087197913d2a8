"""Speculative decoding: a slot for every token, and a start at the last accepted one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing import references
from kda_core.testing.cases import BF16, BFLOAT16, FP16, FP32, SOFTPLUS, Case
from kda_core.testing.inputs import Call, indices, same_bits
from kda_core.testing.marks import requires

SPEC = requires(Feature.RECURRENT, Feature.PAGED_STATE, Feature.SPEC_DECODE)


def draft(kda, T: int = 3, **fields) -> Call:
    """Three requests of T tokens, in a dtype that is served."""
    name = " ".join(["draft", *sorted(fields)])
    case = Case(name=name, op="fused_recurrent_kda", B=3, T=T, state=FP32).having(**fields)
    slots = torch.arange(3 * T, dtype=torch.int32).view(3, T)
    return kda.near(case, lambda near: near.call().in_pool(slots, 3 * T)).call()


SLOTS = indices([8, 1, 2], [0, 4, 9], [6, 3, 7])
DRAFTS = {
    # name: fields of the case, slots of its three sequences, accepted tokens
    "from the first": ({}, SLOTS, None),
    "mixed": ({}, SLOTS, (1, 2, 3)),
    "other": ({}, SLOTS, (3, 3, 1)),
    # The slots behind stay as they are.
    "shorter than its slots": ({"T": 2}, indices([8, 1, 2, 5], [0, 4, 9, 10], [6, 3, 7, 11]), (1, 4, 2)),
    "all in kernel": (
        {"HV": 6, "state": BF16, "V": 64, "options": {"state_v_first": True}, **SOFTPLUS, **BFLOAT16}, SLOTS, (2, 1, 3)
    ),
    "float16 pool": ({"state": FP16, "dtype": FP16, "gate_dtype": FP16}, SLOTS, (2, 1, 3)),
    # A row that starts at a negative index is skipped; a negative index later drops that token's state.
    "padding": ({}, indices([-1, -1, -1], [0, 4, -1], [6, -1, 7]), None),
    "own padding index": ({"options": {"pad_slot_id": 5}}, indices([5, 5, 5], [0, 4, 5], [6, 5, 7]), None),
    "null slot": ({"options": {"pad_slot_id": 0}}, indices([8, 0, 2], [0, 4, 9], [6, 3, 0]), None),
    "null slot, accepted": ({"options": {"pad_slot_id": 0}}, indices([8, 0, 2], [0, 4, 9], [6, 3, 0]), (1, 2, 3)),
}  # fmt: skip


@SPEC
@pytest.mark.parametrize("name", DRAFTS)
def test_draft(kda, name: str):
    """FAILURES 8: slot [n, i] holds the state after token i; the start is slot [n, accepted - 1]."""
    fields, slots, accepted = DRAFTS[name]
    counts = None if accepted is None else indices(*accepted)
    kda.check(draft(kda, **fields).in_pool(slots, 12, counts))


@SPEC
def test_draft_packed(kda):
    """Packed drafts of different lengths; boundaries, slots and counts are slices of wider tensors."""
    case = Case(name="packed drafts", op="fused_recurrent_kda", T=6, lengths=(3, 1, 2), state=FP32)
    call = case.call().in_pool(SLOTS, 10, torch.tensor([2, 1, 3]))
    kda.check(replace(call, strided=frozenset({"cu_seqlens", "ssm_state_indices", "num_accepted_tokens"})))


@SPEC
@pytest.mark.parametrize("accepted", [0, 4, 2**40], ids=["below", "above", "past 32 bits"])
def test_draft_accepted_out_of_range(kda, accepted: int):
    """FAILURES 11: a count outside [1, 1 + S]: ValueError on the CPU, clamped elsewhere; other slots stay."""
    counts = torch.tensor([1, accepted, 2], dtype=torch.int64 if accepted > 4 else torch.int32)
    call = draft(kda).in_pool(SLOTS, 10, counts.clamp(1, 3))
    kda.check(call)
    tensors = {n: t.to(kda.device) for n, t in call.tensors.items()} | {"num_accepted_tokens": counts.to(kda.device)}
    pool, before = tensors["initial_state"], call.tensors["initial_state"]
    if kda.device.type == "cpu":
        with pytest.raises(ValueError, match="num_accepted_tokens"):
            call(tensors, kda.name)
        assert same_bits(pool, before)
        return
    with torch.no_grad():
        o, _ = call(tensors, kda.name)
    expected = references.results(call)
    kda.expect(call, "o", o.cpu(), expected["o"], "clamped")
    written = call.written_slots()
    kda.expect(call, "final_state", pool[written].cpu(), expected["final_state"], "clamped")
    others = [slot for slot in range(10) if slot not in written]
    assert same_bits(pool[others].cpu(), before[others])

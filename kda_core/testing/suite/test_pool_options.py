"""Pools as servers use them: sequences that start from zero, outputs alone, states that are written elsewhere."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

from kda_core._plugins import registry
from kda_core.capabilities import Feature
from kda_core.request import DATA
from kda_core.testing.cases import BF16, FP32, FP64, Case
from kda_core.testing.inputs import Call, indices, same_bits
from kda_core.testing.marks import requires
from kda_core.testing.suite import test_paged_pool
from kda_core.testing.suite.test_paged_pool import FUNCTIONS

FRESH = requires(Feature.HAS_INITIAL_STATE)
KEPT = requires(Feature.NO_STATE_UPDATE)
CHECKPOINTS = requires(Feature.CHUNK, Feature.PAGED_STATE, Feature.CHECKPOINTS)
ELSEWHERE = requires(Feature.FINAL_STATE_INDICES)


# The states are asked for only where a test says so: the pool is what is looked at.
sequences = partial(test_paged_pool.sequences, final_state=False)
draft = partial(test_paged_pool.draft, final_state=False)


@requires(Feature.CHUNK, Feature.PAGED_STATE)
@pytest.mark.parametrize("name", ["plain", "fresh", "elsewhere"])
def test_pool_empty_sequence(kda, name: str):
    """A sequence without tokens writes nothing, bit for bit: its slot keeps what it held, and no copy is made of it."""
    call = Case(name="empty in a pool", T=40, lengths=(20, 0, 20), state=FP32, final_state=False).call()
    if name == "fresh":
        call = call.having(has_initial_state=torch.tensor([True, False, False]))
    for empty in (call, call.decoding()):
        pooled = empty.in_pool(indices(1, 4, 0), 8)
        kda.check(pooled.written_elsewhere(indices(5, 6, 7)) if name == "elsewhere" else pooled)


@FUNCTIONS
@FRESH
def test_fresh_sequences_have_the_bits_of_a_zero_slot(kda, op: str, T: int):
    """As servers do it without has_initial_state: they zero the slot first."""
    call = sequences(kda, op, T).in_pool(indices(4, 0, 2), 6)
    pool = call.tensors["initial_state"].clone()
    pool[4] = 0
    expected = kda.run(call.having(initial_state=pool))
    found = kda.run(call.having(has_initial_state=torch.tensor([False, True, True])))
    assert all(same_bits(found[name], expected[name]) for name in ("o", "final_state"))


@FUNCTIONS
@KEPT
def test_outputs_alone(kda, op: str, T: int):
    """update_state=False: the pool stays as it was, bit for bit; two sequences may read one slot."""
    call = sequences(kda, op, T).having(update_state=False)
    kda.check(call.in_pool(indices(4, -1, 2), 6))
    call = call.in_pool(indices(4, 4, 2), 6)
    pool = call.tensors["initial_state"].nan_to_num(0.25)
    expected = kda.run(sequences(kda, op, T).in_pool(indices(4, 0, 2), 6).having(initial_state=pool))
    found = kda.check(call.having(initial_state=pool))
    tokens = found["o"].reshape(3, T, *found["o"].shape[2:])
    assert same_bits(tokens[::2], expected["o"].reshape(tokens.shape)[::2])


@FUNCTIONS
@ELSEWHERE
def test_written_elsewhere_with_the_bits_of_a_copy(kda, op: str, T: int):
    """As servers do it without final_state_indices: they copy the slot first."""
    call = sequences(kda, op, T).in_pool(indices(4, 0, 2), 8)
    copied = call.tensors["initial_state"][[0, 1, 2, 3, 4, 4, 0, 7]]
    expected = kda.run(call.having(initial_state=copied, ssm_state_indices=indices(5, 6, 2)))
    found = kda.run(call.written_elsewhere(indices(5, 6, 2)))
    assert all(same_bits(found[name], expected[name]) for name in ("o", "final_state"))


def _computed(kda, call: Call) -> list[torch.Tensor]:
    """The output and the written pools of a call whose indices nobody has checked."""
    tensors = kda.on_device(call)
    request = call.having(**tensors).request()
    hook = "kda_core_chunk_forward" if call.op == "chunk_kda" else "kda_core_recurrent_forward"
    o = registry.named(kda.name).call(hook, request=request).o
    pools = dict.fromkeys(filter(None, (request.written_states, request.checkpoint_states)))
    return [o.cpu(), *(getattr(request, name).cpu() for name in pools)]


@FUNCTIONS
@ELSEWHERE
@pytest.mark.parametrize("far", [6, 2**30])
def test_index_past_the_pool(kda, op: str, T: int, far: int):
    """It counts as padding where no check can read it: no memory outside of the pool is read or written."""
    if kda.device.type == "cpu" and not kda.target.interpreted:
        pytest.skip("indices on the CPU are checked before any backend sees them")
    call = sequences(kda, op, T).in_pool(indices(4, -1, 2), 6)
    elsewhere = sequences(kda, op, T).in_pool(indices(4, 0, 2), 9).written_elsewhere(indices(3, -1, 1), 6)
    calls = [(call, "ssm_state_indices", 1), (elsewhere, "final_state_indices", 1)]
    if T == 1:
        table = indices([4, 1, -1], [0, 5, 3], [-1, 2, 2])
        calls += [(draft(kda).in_pool(table, 6), "ssm_state_indices", 2)]
        calls += [(draft(kda).in_pool(indices(2, 0, 1), 9).written_elsewhere(table, 6), "final_state_indices", 2)]
    if op == "chunk_kda" and kda.declares(Feature.CHECKPOINTS):
        kept, table = sequences(kda, op, T).in_pool(indices(4, 0, 2), 6), indices([5], [-1], [1])
        calls += [(_kept(kept, table, every, slots), "checkpoint_indices", 2) for every in (64, 48) for slots in (0, 6)]
        calls += [(_kept(call, table, 48, 6), "ssm_state_indices", 1)]
    for padded, name, dims in calls:
        slots = padded.tensors[name]
        assert slots.dim() == dims
        found = _computed(kda, padded.having(**{name: torch.where(slots < 0, far, slots)}))
        assert all(map(same_bits, found, _computed(kda, padded)))


def _kept(call: Call, table: torch.Tensor, every: int, slots: int = 0, dtype: torch.dtype | None = None) -> Call:
    """The call with checkpoints in slots of its pool; with ``slots`` of a pool of that many, full of NaN."""
    states = call.tensors["initial_state"]
    pool = states.new_full((slots, *states.shape[1:]), float("nan"), dtype=dtype) if slots else None
    return call.having(checkpoint_indices=table, checkpoint_every=every, checkpoint_pool=pool)


CHECKPOINTED = {"T": 330, "lengths": (128, 0, 65, 137), "state": FP32, "final_state": False}
TABLE = indices([7, 8], [9, 9], [10, 9], [-1, 11])


@CHECKPOINTS
@pytest.mark.parametrize(
    ("C", "every", "packed"), [(64, 64, True), (32, 64, False), (64, 80, True), (64, 48, False), (32, 16, True)]
)
def test_checkpoints(kda, C: int, every: int, packed: bool):
    """In float32."""
    _check_checkpoints(kda, every, packed, f"checkpoints {C} {every} {packed}", chunk_size=C)


@CHECKPOINTS
@pytest.mark.parametrize(("every", "v_first"), [(96, False), (128, True), (112, True)])
def test_checkpoints_of_16_bit_inputs(kda, every: int, v_first: bool):
    """A size that kernels with matrix units take whole, in both layouts, and where chunks begin anew."""
    size = {"K": 128, "V": 128, "dtype": BF16, "gate_dtype": BF16}
    _check_checkpoints(kda, every, True, f"checkpoints bfloat16 {every}", size, state_v_first=v_first, chunk_size=32)


def _check_checkpoints(
    kda, every: int, packed: bool, name: str, size: dict | None = None, **options: bool | int
) -> None:
    """States after every so many tokens; at the end of a sequence its final state, to the bit; dropped ones nowhere."""
    lengths, dense = (2 * every, 0, every + 1, 3 * every - 55 % every), {"B": 4, "T": 2 * every, "lengths": ()}
    shape = {"T": sum(lengths), "lengths": lengths} if packed else dense
    case = Case(name=name, options=options, **CHECKPOINTED | shape | (size or {}))
    call = kda.near(case, lambda near: near.call().in_pool(indices(4, 0, 2, 5), 12)).call()
    call = call.in_pool(indices(4, 0, 2, 5), 12)
    call = _kept(call, TABLE if packed else indices([7, 8], [9, 6], [10, 1], [-1, 11]), every)
    results = kda.check(call)
    kept = dict(zip(call.checkpoint_slots(), results["checkpoints"], strict=True))
    assert same_bits(kept[8], results["final_state"][0])
    for n, tokens, slot in ((0, every, 7), (2, every, 10), (3, 2 * every, 11)):
        begun = call.tensors["initial_state"][[4, 0, 2, 5][n]][None]
        start = sum(lengths[:n]) if packed else 0
        rows = slice(0 if packed else n, 1 if packed else n + 1), slice(start, start + tokens)
        rows = {x: call.tensors[x][rows].contiguous() for x in DATA}
        prefix = replace(call, tensors={**rows, "initial_state": begun})
        prefix = prefix.having(output_final_state=True, checkpoint_every=0)
        expected = kda.check(prefix)["final_state"][0]
        kda.expect(prefix, "final_state", kept[slot][None], expected[None], f"the state after {tokens} tokens of {n}")


@CHECKPOINTS
@pytest.mark.parametrize("every", [64, 48])
def test_checkpoints_of_no_tokens(kda, every: int):
    """Sequences without tokens have no chunks either; nothing is divided by their number, and the pool stays."""
    case = Case(name="checkpoints of no tokens", **CHECKPOINTED | {"B": 3, "T": 0, "lengths": ()})
    call = _kept(case.call().in_pool(indices(4, 0, 2), 6), indices([5], [1], [3]), every)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # which interpreted kernels give where a device reads anywhere
        assert same_bits(kda.run(call)["pool"], call.tensors["initial_state"])


@CHECKPOINTS
@pytest.mark.parametrize("every", [2**31 - 16, 2**31 + 16, 2**63 - 16], ids=["31 bits", "32 bits", "63 bits"])
@pytest.mark.parametrize("packed", [True, False])
def test_checkpoints_that_no_sequence_reaches(kda, every: int, packed: bool):
    """So may a server say "never"; no sum with such a number overflows."""
    shape = {} if packed else {"B": 4, "T": 70, "lengths": ()}
    call = Case(name=f"checkpoints never {packed}", **CHECKPOINTED | shape).call().in_pool(indices(4, 0, 2, 5), 12)
    kda.check(_kept(call, TABLE, every))


@CHECKPOINTS
def test_checkpoints_change_nothing_else(kda):
    """In another pool and dtype, strided, without an update; other columns of a table are not looked at."""
    call = Case(name="checkpoints elsewhere", V=64, **CHECKPOINTED).call().in_pool(indices(4, 0, -1, 5), 6)
    plain = kda.check(_kept(call, torch.full((4, 2), -1), 64))
    table = torch.tensor([[7, 8, 2**20], [9, 9, 9], [1, 9, 9], [0, 11, 2**20]])
    found = kda.check(replace(_kept(call, table, 64, 12, BF16), strided=frozenset({"checkpoint_indices", "v"})))
    assert all(same_bits(found[n], plain[n]) for n in ("o", "pool"))
    alone = kda.check(_kept(call, table, 64, 12, FP32).having(update_state=False))
    assert same_bits(alone["o"], plain["o"])
    assert same_bits(alone["checkpoints"].bfloat16(), found["checkpoints"])


@CHECKPOINTS
@pytest.mark.parametrize("every", [128, 80])
def test_a_checkpoint_is_gone_on_from_with_the_same_bits(kda, every: int):
    """Chunks begin anew behind a checkpoint; both calls have checkpoints, and so the same kernels."""
    dtype = FP64 if kda.name == "reference" else FP32  # in which the state is advanced
    fields = {"T": 200, "lengths": (200,), "dtype": dtype, "gate_dtype": dtype, "state": dtype, "final_state": False}
    case = Case(name=f"checkpoint and on {every}", **fields)
    call = kda.near(case, lambda near: near.call().in_pool(indices(0), 3)).call().in_pool(indices(0), 3)
    nowhere = torch.full((1, 1), -1, dtype=torch.int32)
    whole = kda.run(_kept(call, indices([1]), every))
    rest = {n: call.tensors[n][:, every:].contiguous() for n in DATA}
    bounds = {"cu_seqlens": indices(0, 200 - every), "initial_state": whole["pool"]}
    second = replace(call, tensors=call.tensors | rest | bounds).having(ssm_state_indices=indices(1))
    found = kda.run(_kept(second, nowhere, every))
    assert same_bits(found["o"], whole["o"][:, every:])
    assert same_bits(found["pool"][1], whole["pool"][0])

"""A pool of states that calls read and advance in place, by slot."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import kda_core
from kda_core._plugins import registry
from kda_core.capabilities import Feature
from kda_core.request import DATA
from kda_core.testing.cases import BF16, BFLOAT16, FP16, FP32, SOFTPLUS, Case
from kda_core.testing.inputs import Call, indices, same_bits
from kda_core.testing.marks import requires, slow

FUNCTIONS = pytest.mark.parametrize(
    ("op", "T"),
    [
        pytest.param("chunk_kda", 70, marks=requires(Feature.CHUNK, Feature.PAGED_STATE), id="chunk"),
        pytest.param("fused_recurrent_kda", 1, marks=requires(Feature.RECURRENT, Feature.PAGED_STATE), id="recurrent"),
        pytest.param("fused_recurrent_kda", 20, marks=requires(Feature.RECURRENT, Feature.PAGED_STATE), id="prompts"),
    ],
)


def sequences(kda, op: str, T: int, N: int = 3, **fields) -> Call:
    """N sequences of T tokens: a dense batch for decoding, packed ones for prefill; in a dtype that is served."""
    name = " ".join(["pool", op, str(T), *sorted(fields)])
    layout = {"T": N * T, "lengths": (T,) * N} if op == "chunk_kda" else {"T": T, "B": N}
    case = Case(name=name, op=op, **({"state": FP32} | layout | fields))
    return kda.near(case, lambda near: near.call().in_pool(torch.arange(N, dtype=torch.int32), N)).call()


def on(slots: torch.Tensor, accepted: tuple = (), elsewhere: tuple = (), more: dict | None = None, **fields) -> tuple:
    """Fields of a case, and what puts its call on slots of a pool of 20.

    Args:
        slots: that are read. accepted: tokens. elsewhere: arguments of ``written_elsewhere``. more: of the call.
    """

    def build(call: Call) -> Call:
        call = call.having(**(more or {})).in_pool(slots, 20, indices(*accepted) if accepted else None)
        return call.written_elsewhere(*elsewhere) if elsewhere else call

    return fields, build


V_FIRST = {"V": 64, "options": {"state_v_first": True}}
MIDDLE = {"has_initial_state": torch.tensor([False, True, False])}
"""The others start from zero, whatever their slots hold (NaN here)."""
POOLS = {
    "int32": on(indices(4, 0, 2)),
    "int64": on(indices(4, 0, 2, dtype=torch.int64)),
    "one column": on(indices([4], [0], [2])),
    "a column of a table": on(indices(4, 0, 2), strided=frozenset({"ssm_state_indices"})),
    "strided": on(indices(4, 0, 2), strided=frozenset({"q", "k", "v", "g", "beta", "initial_state"})),
    "V first": on(indices(1, 3, 0), **V_FIRST),
    "bfloat16": on(indices(1, 3, 0), state=BF16),
    "float16": on(indices(1, -1, 0), state=FP16),
    "float16 V first": on(indices(1, 3, 0), state=FP16, **V_FIRST),
    "all in kernel": on(indices(1, 3, 0), HV=6, **SOFTPLUS, **BFLOAT16),
    # The pool is advanced whether or not the final state is asked for.
    "no final state": on(indices(4, 0, 2), final_state=False),
    # No other slot changes, least of all the last.
    "padding": on(indices(-1, 3, -1)),
    "own padding index": on(indices(2, 4, -3), more={"pad_slot_id": 2}),
    "negative padding index": on(indices(-7, 4, -3), more={"pad_slot_id": -7}),
    # As vLLM counts: slot 0 is nobody's. It holds NaN here, and keeps it.
    "null slot": on(indices(0, 4, 0), more={"pad_slot_id": 0}),
    "null slot and padding": on(indices(5, -1, 2), more={"pad_slot_id": 0}),
    "nothing but padding": on(indices(-1, -1, -1)),
    "padding into out": on(indices(-1, 3, 0), given_out=True),
    "fresh": on(indices(4, 0, 2), more=MIDDLE),
    "fresh and skipped": on(
        indices(-1, 3, 0), more={"has_initial_state": torch.tensor([False, False, True])}, state=BF16,
        strided=frozenset({"has_initial_state"}), **V_FIRST,
    ),
    # A sequence that starts from zero leaves its slot as it was, ...
    "fresh, outputs alone": on(indices(4, 0, 2), more=MIDDLE | {"update_state": False}, final_state=False),
    # ... and this one the slot that it does not read.
    "fresh, elsewhere": on(indices(4, 0, 2), (), (indices(6, 7, 3),), MIDDLE),
    # Two sequences may read one slot: copy on write.
    "elsewhere": on(indices(4, 4, 2), (), (indices(0, 7, 3),)),
    "elsewhere, a column": on(indices(4, 4, 2), (), (indices([0], [-1], [3]),)),
    # A null slot drops a state that would be written, and skips a row that would read it.
    "elsewhere, null slot": on(indices(4, 4, 0), (), (indices(0, 1, 2),), {"pad_slot_id": 0}, final_state=False),
    "another pool, null slot": on(indices(4, 4, 0), (), (indices(0, 1, 2), 4), {"pad_slot_id": 0}),
    # Slots of both pools may have the same numbers, and dtypes may differ.
    "another pool": on(indices(4, -1, 4), (), (indices(4, 0, 1), 5)),
    "another pool in bfloat16": on(indices(4, 0, 2), (), (indices(1, 3, 0), 4, BF16), **V_FIRST),
    "another pool in float32": on(indices(4, 0, 2), (), (indices(1, 3, 0), 4, FP32), state=BF16, **V_FIRST),
    "another pool, strided": on(
        indices(4, 0, 2), (), (indices(3, 1, 4), 5), final_state=False,
        strided=frozenset({"ssm_state_indices", "final_state_indices", "initial_state", "final_state_pool"}),
    ),
}  # fmt: skip


@FUNCTIONS
@pytest.mark.parametrize("name", POOLS)
def test_pool(kda, op: str, T: int, name: str):
    """FAILURES 8, 9, 10, 12: slots in any order, among slots full of NaN that must be neither read nor written.

    Sequences at a negative index, or at that of padding, are skipped: their rows are zero. Slots that are not written
    stay as they were, bit for bit.
    """
    fields, build = POOLS[name]
    kda.check(build(sequences(kda, op, T, **fields)))


@FUNCTIONS
@pytest.mark.parametrize("width", [None, 1])
def test_pool_of_no_sequence(kda, op: str, T: int, width: int | None):
    """A call without sequences, as an idle rank of a server makes it."""
    call = sequences(kda, op, T).in_pool(indices(4, 0, 2), 6)
    kda.check(call)
    tensors = kda.on_device(call)
    before = tensors["initial_state"].clone()
    tensors["ssm_state_indices"] = torch.zeros((0,) if width is None else (0, width), dtype=torch.int32).to(kda.device)
    if op == "chunk_kda":
        tensors["cu_seqlens"] = torch.zeros(1, dtype=torch.int32).to(kda.device)
    else:
        tensors |= {n: tensors[n][:0] for n in DATA}
    with torch.no_grad():
        o, _ = call(tensors, kda.name)
    assert torch.equal(o, torch.zeros_like(tensors["v"]))
    assert same_bits(tensors["initial_state"], before)


@FUNCTIONS
def test_pool_repeats(kda, op: str, T: int):
    """Calls in place are right from the first one on, and equal bit for bit from equal pools."""
    call = sequences(kda, op, T).in_pool(indices(4, 0, 2), 6)
    first = kda.check(call)
    for again in (kda.run(call) for _ in range(3)):
        assert all(same_bits(first[n], again[n]) for n in ("pool", "o"))


@FUNCTIONS
def test_pool_in_a_graph_with_other_slots(kda, op: str, T: int):
    """FAILURES 13: a call captured in a graph and replayed with other indices does what a new call does."""
    if kda.device.type != "cuda":
        pytest.skip(f"torch has no graphs for {kda.device.type}")
    call = replace(sequences(kda, op, T).in_pool(indices(4, 0, 2), 6), given_out=True)
    kda.check(call)  # compile what the first call compiles
    tensors = kda.on_device(call)
    tensors["out"] = torch.empty_like(tensors["v"])
    pool, out, slots = (tensors[n] for n in ("initial_state", "out", "ssm_state_indices"))
    before = pool.nan_to_num(0.25)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call(tensors, kda.name)
        for rows in ((4, 0, 2), (1, -1, 5), (-1, -1, -1), (2, 4, 0)):
            slots.copy_(indices(*rows))
            pool.copy_(before)
            graph.replay()
            replayed = pool.clone(), out.clone()
            pool.copy_(before)
            call(tensors, kda.name)
            assert all(map(same_bits, replayed, (pool, out))), f"slots {rows}"


@requires(Feature.CHUNK, Feature.RECURRENT, Feature.PAGED_STATE)
def test_pool_from_prefill_to_decoding(kda):
    """Prefill two sequences, then decode both for a few steps, out of order, as a server does."""
    call = sequences(kda, "chunk_kda", 70, N=2).in_pool(indices(2, 1), 4)
    pool = kda.check(call)["pool"]
    step = sequences(kda, "fused_recurrent_kda", 1, N=2)
    for order in ((1, 2), (2, 1), (1, 2)):
        pool = kda.check(step.having(initial_state=pool, ssm_state_indices=indices(*order)))["pool"]


FIRST_CALL = """
import sys
import torch
from kda_core.testing.inputs import indices
from kda_core.testing.subject import Subject
from kda_core.testing.suite.test_paged_pool import sequences
from kda_core.testing.targets import Target

backend, device, op, T = sys.argv[1:]
subject = Subject(Target(backend, torch.device(device)))
subject.check(sequences(subject, op, int(T)).in_pool(indices(4, 0, 2), 6))
"""


@slow
@FUNCTIONS
def test_pool_at_the_first_call_of_a_process(kda, op: str, T: int, tmp_path):
    """FAILURES 22: the first call, which may compile and tune, advances the pool once."""
    kda.check(sequences(kda, op, T).in_pool(indices(4, 0, 2), 6))
    if not any(entry.name == kda.name and entry.distribution for entry in kda_core.backends()):
        pytest.skip("the backend was registered by hand: another process does not have it")
    # In an empty folder and with this process's path: no file of the working folder takes a module's place.
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    program = f"import sys; sys.path[:] = {path!r}\n{FIRST_CALL}"
    command = [sys.executable, "-I", "-c", program, kda.name, str(kda.device), op, str(T)]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


SPEC = requires(Feature.RECURRENT, Feature.PAGED_STATE, Feature.SPEC_DECODE)


def draft(kda, T: int = 3, **fields) -> Call:
    """Three requests of T tokens, in a dtype that is served."""
    name = " ".join(["draft", *sorted(fields)])
    case = Case(name=name, op="fused_recurrent_kda", B=3, T=T, state=FP32).having(**fields)
    slots = torch.arange(3 * T, dtype=torch.int32).view(3, T)
    return kda.near(case, lambda near: near.call().in_pool(slots, 3 * T)).call()


SLOTS = indices([8, 1, 2], [0, 4, 9], [6, 3, 7])
EARLIER, WRITTEN = indices([5, 6, 7], [0, 1, 2], [3, 4, 8]), indices([8, 1, -1], [0, 4, 9], [6, 3, 7])
KEPT = {"update_state": False}
DRAFTS = {
    "from the first": on(SLOTS),
    "mixed": on(SLOTS, (1, 2, 3)),
    "other": on(SLOTS, (3, 3, 1)),
    # The slots behind stay as they are.
    "shorter than its slots": on(indices([8, 1, 2, 5], [0, 4, 9, 10], [6, 3, 7, 11]), (1, 4, 2), T=2),
    "all in kernel": on(SLOTS, (2, 1, 3), HV=6, state=BF16, **V_FIRST, **SOFTPLUS, **BFLOAT16),
    "float16 pool": on(SLOTS, (2, 1, 3), state=FP16, dtype=FP16, gate_dtype=FP16),
    # A row that starts at a negative index is skipped; a negative index later drops that token's state.
    "padding": on(indices([-1, -1, -1], [0, 4, -1], [6, -1, 7])),
    "own padding index": on(indices([5, 5, 5], [0, 4, 5], [6, 5, 7]), more={"pad_slot_id": 5}),
    "null slot": on(indices([8, 0, 2], [0, 4, 9], [6, 3, 0]), more={"pad_slot_id": 0}),
    "null slot, accepted": on(indices([8, 0, 2], [0, 4, 9], [6, 3, 0]), (1, 2, 3), more={"pad_slot_id": 0}),
    # A draft that starts from zero does not read the slot of its last accepted token.
    "fresh": on(indices([8, 1, 2], [0, 4, 9], [6, -1, 7]), (2, 1, 3), more={"has_initial_state": torch.arange(3) < 1}),
    # No slot of the table is written; they need not differ.
    "outputs alone": on(indices([8, 1, 1], [0, 4, 9], [1, 6, 7]), (2, 1, 3), more=KEPT, final_state=False),
    # From a committed pool into a buffer of the states after every token, which may have another dtype.
    "elsewhere": on(indices(2, -1, 2), (), (WRITTEN, 10)),
    "elsewhere in bfloat16": on(indices(2, -1, 2), (), (WRITTEN, 10, BF16)),
    # A slot for every token is read as well: the last accepted one.
    "from drafts": on(EARLIER, (3, 1, 2), (WRITTEN + 9,)),
    "from drafts, last states": on(EARLIER, (3, 1, 2), (indices(9, 12, -1),)),
}


@SPEC
@pytest.mark.parametrize("name", DRAFTS)
def test_draft(kda, name: str):
    """FAILURES 8: slot [n, i] holds the state after token i; the start is slot [n, accepted - 1]."""
    fields, build = DRAFTS[name]
    kda.check(build(draft(kda, **fields)))


@SPEC
def test_draft_packed(kda):
    """Packed drafts of different lengths; boundaries, slots and counts are slices of wider tensors."""
    case = Case(name="packed drafts", op="fused_recurrent_kda", T=6, lengths=(3, 1, 2), state=FP32)
    call = case.call().in_pool(SLOTS, 10, torch.tensor([2, 1, 3]))
    kda.check(replace(call, strided=frozenset({"cu_seqlens", "ssm_state_indices", "num_accepted_tokens"})))


@SPEC
@pytest.mark.parametrize("accepted", [0, 4, 2**40, -(2**63)], ids=["below", "above", "past 32 bits", "least of all"])
def test_draft_accepted_out_of_range(kda, accepted: int):
    """FAILURES 11: a count outside [1, 1 + S]: ValueError on the CPU, clamped elsewhere; other slots stay."""
    counts = torch.tensor([1, accepted, 2], dtype=torch.int64 if abs(accepted) > 4 else torch.int32)
    call = draft(kda).in_pool(SLOTS, 10, counts.clamp(1, 3))
    kda.check(call)
    tensors = kda.on_device(call.having(num_accepted_tokens=counts))
    pool, before = tensors["initial_state"], call.tensors["initial_state"]
    if kda.device.type == "cpu":
        with pytest.raises(ValueError, match="num_accepted_tokens"):
            call(tensors, kda.name)
        assert same_bits(pool, before)
        if not kda.target.interpreted:
            return
        # No check comes between the interpreter's kernels and a count.
        request = replace(call, tensors=tensors).request()
        o = registry.named(kda.name).call("kda_core_recurrent_forward", request=request).o
    else:
        with torch.no_grad():
            o, _ = call(tensors, kda.name)
    written = call.written_slots()
    kda.compare(call, {"o": o.cpu(), "final_state": pool[written].cpu()})
    others = [slot for slot in range(10) if slot not in written]
    assert same_bits(pool[others].cpu(), before[others])

"""A pool of states that calls read and advance in place, by slot."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import kda_core
from kda_core.capabilities import Feature
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


POOLS = {
    # name: fields of the case, slots of its three sequences
    "int32": ({}, indices(4, 0, 2)),
    "int64": ({}, indices(4, 0, 2, dtype=torch.int64)),
    "one column": ({}, indices([4], [0], [2])),
    "a column of a table": ({"strided": frozenset({"ssm_state_indices"})}, indices(4, 0, 2)),
    "strided": ({"strided": frozenset({"q", "k", "v", "g", "beta", "initial_state"})}, indices(4, 0, 2)),
    "V first": ({"V": 64, "options": {"state_v_first": True}}, indices(1, 3, 0)),
    "bfloat16": ({"state": BF16}, indices(1, 3, 0)),
    "float16": ({"state": FP16}, indices(1, -1, 0)),
    "float16 V first": ({"state": FP16, "V": 64, "options": {"state_v_first": True}}, indices(1, 3, 0)),
    "all in kernel": ({"HV": 6, **SOFTPLUS, **BFLOAT16}, indices(1, 3, 0)),
    # The pool is advanced whether or not the final state is asked for.
    "no final state": ({"final_state": False}, indices(4, 0, 2)),
    # No other slot changes, least of all the last.
    "padding": ({}, indices(-1, 3, -1)),
    "own padding index": ({"options": {"pad_slot_id": 2}}, indices(2, 4, -3)),
    "negative padding index": ({"options": {"pad_slot_id": -7}}, indices(-7, 4, -3)),
    # As vLLM counts: slot 0 is nobody's. It holds NaN here, and keeps it.
    "null slot": ({"options": {"pad_slot_id": 0}}, indices(0, 4, 0)),
    "null slot and padding": ({"options": {"pad_slot_id": 0}}, indices(5, -1, 2)),
    "nothing but padding": ({}, indices(-1, -1, -1)),
    "padding into out": ({"given_out": True}, indices(-1, 3, 0)),
}


@FUNCTIONS
@pytest.mark.parametrize("name", POOLS)
def test_pool(kda, op: str, T: int, name: str):
    """FAILURES 8, 9, 10, 12: slots in any order, among slots full of NaN that must be neither read nor written.

    Sequences at a negative index, or at that of padding, are skipped: their rows are zero.
    """
    fields, slots = POOLS[name]
    kda.check(sequences(kda, op, T, **fields).in_pool(slots, 6))


@FUNCTIONS
@pytest.mark.parametrize("width", [None, 1])
def test_pool_of_no_sequence(kda, op: str, T: int, width: int | None):
    """A call without sequences, as an idle rank of a server makes it."""
    call = sequences(kda, op, T).in_pool(indices(4, 0, 2), 6)
    kda.check(call)
    tensors = {n: t.to(kda.device) for n, t in call.tensors.items()}
    before = tensors["initial_state"].clone()
    tensors["ssm_state_indices"] = torch.zeros((0,) if width is None else (0, width), dtype=torch.int32).to(kda.device)
    if op == "chunk_kda":
        tensors["cu_seqlens"] = torch.zeros(1, dtype=torch.int32).to(kda.device)
    else:
        tensors |= {n: tensors[n][:0] for n in ("q", "k", "v", "g", "beta")}
    with torch.no_grad():
        o, _ = getattr(kda_core, op)(**tensors, **call.options, backend=kda.name)
    assert o.shape == tensors["v"].shape
    assert not o.any()
    assert same_bits(tensors["initial_state"], before)


@FUNCTIONS
def test_pool_repeats(kda, op: str, T: int):
    """Calls in place are right from the first one on, and equal bit for bit from equal pools."""
    call = sequences(kda, op, T).in_pool(indices(4, 0, 2), 6)
    first = kda.check(call)
    for _ in range(3):
        again = kda.run(call)
        assert same_bits(first["pool"], again["pool"])
        assert same_bits(first["o"], again["o"])


@FUNCTIONS
def test_pool_in_a_graph_with_other_slots(kda, op: str, T: int):
    """FAILURES 13: a call captured in a graph and replayed with other indices does what a new call does."""
    if kda.device.type != "cuda":
        pytest.skip(f"torch has no graphs for {kda.device.type}")
    call = replace(sequences(kda, op, T).in_pool(indices(4, 0, 2), 6), given_out=True)
    kda.check(call)  # compile what the first call compiles
    tensors = {n: t.to(kda.device) for n, t in call.tensors.items() if n != "cu_seqlens_cpu"}
    tensors |= {n: t for n, t in call.tensors.items() if n == "cu_seqlens_cpu"}
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
            assert same_bits(replayed[0], pool), f"slots {rows}"
            assert same_bits(replayed[1], out), f"slots {rows}"


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

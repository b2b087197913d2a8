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
from kda_core.testing.cases import BF16, FP32, Case
from kda_core.testing.inputs import Call, indices, same_bits
from kda_core.testing.marks import requires, slow

FUNCTIONS = pytest.mark.parametrize(
    ("op", "T"),
    [
        pytest.param("chunk_kda", 70, marks=requires(Feature.CHUNK, Feature.PAGED_STATE), id="chunk"),
        pytest.param("fused_recurrent_kda", 1, marks=requires(Feature.RECURRENT, Feature.PAGED_STATE), id="recurrent"),
    ],
)


def _call(kda, op: str, T: int, N: int = 3, **fields) -> Call:
    """N sequences of T tokens: a dense batch for decoding, packed ones for prefill; in a dtype that is served."""
    name = " ".join(["pool", op, *sorted(fields)])
    layout = {"T": N * T, "lengths": (T,) * N} if op == "chunk_kda" else {"T": T, "B": N}
    case = Case(name=name, op=op, **({"state": FP32} | layout | fields))
    return kda.near(case, lambda near: near.call().in_pool(torch.arange(N, dtype=torch.int32), N)).call()


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_pool(kda, op: str, T: int, dtype: torch.dtype):
    """FAILURES 12: slots in any order, among slots full of NaN that must be neither read nor written."""
    kda.check(_call(kda, op, T).in_pool(indices(4, 0, 2, dtype=dtype), 6))


@FUNCTIONS
@pytest.mark.parametrize("width", [None, 1])
def test_pool_of_no_sequence(kda, op: str, T: int, width: int | None):
    """A call without sequences, as an idle rank of a server makes it."""
    call = _call(kda, op, T).in_pool(indices(4, 0, 2), 6)
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
def test_pool_v_first(kda, op: str, T: int):
    """States stored V first, K != V."""
    kda.check(_call(kda, op, T, V=64, options={"state_v_first": True}).in_pool(indices(1, 3, 0), 5))


@FUNCTIONS
def test_pool_bfloat16(kda, op: str, T: int):
    """A pool in bfloat16."""
    kda.check(_call(kda, op, T, state=BF16).in_pool(indices(1, 3, 0), 5))


@FUNCTIONS
def test_pool_all_in_kernel(kda, op: str, T: int):
    """Half inputs, gate, beta and l2norm in the operator, grouped values."""
    fields = {"dtype": BF16, "gate_dtype": BF16, "gate": "softplus", "beta": "sigmoid", "l2norm": True, "HV": 6}
    kda.check(_call(kda, op, T, **fields).in_pool(indices(1, 3, 0), 5))


@FUNCTIONS
def test_pool_skips_padding(kda, op: str, T: int):
    """FAILURES 8: indices [-1, 3, -1]: no other slot changes, least of all the last; skipped rows are zero."""
    call = _call(kda, op, T).in_pool(indices(-1, 3, -1), 6)
    results = kda.check(call)
    o = results["o"].reshape(3, T, *results["o"].shape[2:])
    assert not o[0].any()
    assert not o[2].any()


@FUNCTIONS
@pytest.mark.parametrize("pad", [2, -7])
def test_pool_own_padding_index(kda, op: str, T: int, pad: int):
    """pad_slot_id is skipped, and so is every other negative index."""
    call = _call(kda, op, T).having(pad_slot_id=pad).in_pool(indices(pad, 4, -3), 6)
    kda.check(call)


@FUNCTIONS
def test_pool_of_padding_only(kda, op: str, T: int):
    """Nothing but padding: zero output, no slot touched."""
    results = kda.run(_call(kda, op, T).in_pool(indices(-1, -1, -1), 2))
    assert not results["o"].any()


@FUNCTIONS
@requires(Feature.OUT)
def test_pool_into_out(kda, op: str, T: int):
    """FAILURES 9: a buffer full of NaN is written in full, padded rows with zero."""
    call = replace(_call(kda, op, T).in_pool(indices(-1, 3, 0), 6), given_out=True)
    results = kda.check(call)
    assert results["o"].isfinite().all()


@FUNCTIONS
def test_pool_strided_indices(kda, op: str, T: int):
    """FAILURES 10: indices that are a column of a block table."""
    call = _call(kda, op, T).in_pool(indices(4, 0, 2), 6)
    kda.check(replace(call, strided=frozenset({"ssm_state_indices"})))


@FUNCTIONS
@requires(Feature.STRIDED_INPUT)
def test_pool_strided_everything(kda, op: str, T: int):
    """FAILURES 10: strided q, beta and pool."""
    call = _call(kda, op, T).in_pool(indices(4, 0, 2), 6)
    kda.check(replace(call, strided=frozenset({"q", "k", "v", "g", "beta", "initial_state"})))


@FUNCTIONS
def test_pool_single_column(kda, op: str, T: int):
    """Indices [N, 1]."""
    kda.check(_call(kda, op, T).in_pool(indices(4, 0, 2)[:, None], 6))


@FUNCTIONS
def test_pool_without_final_state(kda, op: str, T: int):
    """The pool is advanced whether or not the final state is asked for."""
    kda.check(_call(kda, op, T, final_state=False).in_pool(indices(4, 0, 2), 6))


@FUNCTIONS
def test_pool_fresh_sequence_in_a_used_slot(kda, op: str, T: int):
    """FAILURES 12: a slot's content before its sequence's state was set has no effect."""
    call = _call(kda, op, T)
    clean = call.in_pool(indices(1, 0, 2), 3)
    dirty = call.in_pool(indices(1, 0, 2), 8)
    first, second = kda.run(clean), kda.run(dirty)
    assert same_bits(first["o"], second["o"])
    assert same_bits(first["final_state"], second["final_state"])


@FUNCTIONS
def test_pool_repeats(kda, op: str, T: int):
    """Calls in place are right from the first one on, and equal bit for bit from equal pools."""
    call = _call(kda, op, T).in_pool(indices(4, 0, 2), 6)
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
    call = replace(_call(kda, op, T).in_pool(indices(4, 0, 2), 6), given_out=True)
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
    call = _call(kda, "chunk_kda", 70, N=2).in_pool(indices(2, 1), 4)
    pool = kda.check(call)["pool"]
    step = _call(kda, "fused_recurrent_kda", 1, N=2)
    for order in ((1, 2), (2, 1), (1, 2)):
        pool = kda.check(step.having(initial_state=pool, ssm_state_indices=indices(*order)))["pool"]


@requires(Feature.CHUNK, Feature.PAGED_STATE)
def test_pool_empty_sequence(kda):
    """A sequence without tokens leaves its slot as it is, bit for bit."""
    call = Case(name="empty in a pool", T=40, lengths=(20, 0, 20), state=FP32).call()
    kda.check(call.in_pool(indices(1, 4, 0), 5))


FIRST_CALL = """
import sys
import torch
from kda_core.testing.inputs import indices
from kda_core.testing.subject import Subject
from kda_core.testing.suite.test_paged_pool import _call
from kda_core.testing.targets import Target

backend, device, op, T = sys.argv[1:]
subject = Subject(Target(backend, torch.device(device)))
subject.check(_call(subject, op, int(T)).in_pool(indices(4, 0, 2), 6))
"""


@slow
@FUNCTIONS
def test_pool_at_the_first_call_of_a_process(kda, op: str, T: int, tmp_path):
    """FAILURES 22: the first call, which may compile and tune, advances the pool once."""
    kda.check(_call(kda, op, T).in_pool(indices(4, 0, 2), 6))
    if not any(entry.name == kda.name and entry.distribution for entry in kda_core.backends()):
        pytest.skip("the backend was registered by hand: another process does not have it")
    # In an empty folder and with this process's path: no file of the working folder takes a module's place.
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    program = f"import sys; sys.path[:] = {path!r}\n{FIRST_CALL}"
    command = [sys.executable, "-I", "-c", program, kda.name, str(kda.device), op, str(T)]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr

"""Packed sequences (cu_seqlens) against the oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.request import DATA
from kda_core.testing.cases import BF16, FP32, PLAIN, SOFTPLUS, Case, select
from kda_core.testing.inputs import Call, same_bits
from kda_core.testing.marks import each, either_function, requires, slow
from kda_core.testing.subject import Subject

CASES = [
    Case(name="single tokens", T=2050, lengths=(1, 1, 2048), state=FP32),
    Case(name="one-token tail", T=8192, lengths=(8191, 1)),
    # More sequences than chunks.
    Case(name="many sequences", T=300, lengths=(0, 1, 2, 3) * 50),
    Case(name="all empty", T=10, lengths=(0, 0), state=FP32),
    Case(name="behind the end of out", T=150, lengths=(30, 40), given_out=True),
]


@requires(Feature.VARLEN)
@each([*select("packed", "-backward"), *CASES])
def test_packed(kda, case: Case):
    """FAILURES 1, 9, 25: output and final states are within their budgets, rows of no sequence are zero."""
    kda.check(case)


def _with_sequences(call: Call, chosen: list[int]) -> Call:
    """A call of these sequences of it alone, packed or dense as it is."""
    if "cu_seqlens" not in call.tensors:
        own = {n: call.tensors[n][chosen].contiguous() for n in (*DATA, "initial_state")}
        return replace(call.having(**own), grads={n: t[chosen] for n, t in call.grads.items()})
    rows = [(n, [*range(call.lengths()[n])]) for n in chosen]
    few = call.with_sequences(rows)
    grads = {n: call.packed(t, rows) if n == "o" else t[chosen] for n, t in call.grads.items()}
    return replace(few.having(cu_seqlens=few.tensors["cu_seqlens"].int()), grads=grads)


def check_company(kda: Subject, call: Call, *companies: list[int]) -> None:
    """Every sequence has the bits in a call of a few chosen ones that it has in the whole call."""
    many, lengths, packed = kda.run(call), call.lengths(), "cu_seqlens" in call.tensors
    for chosen in companies:
        found = kda.run(_with_sequences(call, chosen))
        at = 0
        for i, n in enumerate(chosen):
            start, rows = sum(lengths[:n]), lengths[n]
            for name, got in found.items():
                by_sequence = name.endswith("state") or not packed
                own = got[i] if by_sequence else got[:, at : at + rows]
                expected = many[name][n] if by_sequence else many[name][:, start : start + rows]
                assert same_bits(own, expected), f"{name} of sequence {n} among {chosen}"
            at += rows


@requires(Feature.VARLEN)
@either_function
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_packed_in_any_company(kda, op: str, dtype: torch.dtype):
    """FAILURES 28: a sequence alone has the bits that it has among few and among many others, gradients included."""
    # More sequences times heads than any chip has multiprocessors, by which a backend may choose.
    lengths = (130, 1, 40, 8, 9, *(3,) * kda.draws(40), 33)
    backward = op == "chunk_kda" and kda.declares(Feature.BACKWARD)
    fields = {"op": op, "H": kda.draws(4), "l2norm": True, "backward": backward}
    case = Case(name=f"company {op} {dtype}", T=sum(lengths), lengths=lengths, **PLAIN[dtype] | fields)
    last = len(lengths) - 1
    check_company(kda, kda.near(case).call(), [0], [2], [last], [last, 1, 0, 5], [3, 0, 4])


@requires(Feature.CHUNK, Feature.BATCH_INVARIANT)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "lengths",
    [pytest.param((), id="dense"), pytest.param((130, 1, 5, 64), marks=requires(Feature.VARLEN), id="packed")],
)
def test_batch_invariant(kda, lengths: tuple[int, ...], dtype: torch.dtype):
    """With batch_invariant a sequence, dense or packed, has the same bits alone and in a batch, gradients included."""
    fields = {"lengths": lengths, "T": 200} if lengths else {"B": 4, "T": 130}
    fields |= {"l2norm": True, "backward": True, "options": {"batch_invariant": True}}
    call = Case(name=f"batch invariant {len(lengths)} {dtype}", **PLAIN[dtype] | fields).call()
    check_company(kda, call, [0], [3], [3, 1])


@requires(Feature.CHUNK, Feature.VARLEN, Feature.BACKWARD)
@pytest.mark.parametrize("raw", [False, True], ids=["one to one, as given", "grouped values, raw"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_packed_anything_behind_the_end(kda, raw: bool, value: float):
    """Rows behind the last sequence may hold anything: their gradient is zero, and no other result changes."""
    fields = SOFTPLUS | {"HV": 6} if raw else {}
    fields |= {"lengths": (30, 0, 41), "state": FP32, "backward": True}
    call = Case(name=f"anything behind the end {raw}", T=90, **fields).call()
    expected = kda.check(call)
    rows = {name: call.tensors[name].clone() for name in DATA}
    for x in rows.values():
        x[:, 71:] = value
    results = kda.run(call.having(**rows))
    for name, got in results.items():
        assert same_bits(got, expected[name]), name
    assert not any(results[f"d{name}"][:, 71:].any() for name in rows)


@requires(Feature.CHUNK, Feature.VARLEN)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_packed_boundaries_on_both_sides(kda, dtype: torch.dtype):
    """A copy of the boundaries on the CPU changes nothing, bit for bit, whatever their dtype."""
    call = Case(name="boundaries", T=100, lengths=(33, 67), index_dtype=dtype).call()
    plain = kda.check(call)
    beside = kda.run(call.having(cu_seqlens_cpu=call.tensors["cu_seqlens"].clone()))
    assert same_bits(plain["o"], beside["o"])


@requires(Feature.CHUNK)
def test_gate_dtypes_one_after_the_other(kda):
    """FAILURES 27: float32 g, then bfloat16 g with the same shapes, and a masked tail (T = 1500)."""
    case = Case(name="gate dtypes", T=1500)
    kda.check(case)
    kda.check(case.having(name="gate dtypes, half", gate_dtype=BF16))


@slow
@requires(Feature.CHUNK, Feature.VARLEN)
def test_packed_random_traces(kda):
    """Random boundaries: 40 traces of up to 2,000 tokens."""
    generator = torch.Generator().manual_seed(0)
    for i in range(40):
        N = int(torch.randint(1, 30, (), generator=generator))
        lengths = tuple(torch.randint(0, 150, (N,), generator=generator).tolist())
        T = sum(lengths) + i % 3
        kda.check(Case(name=f"trace {i}", T=max(T, 1), H=1, K=16, lengths=lengths, state=FP32))

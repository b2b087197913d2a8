"""Errors on a slice: right results pass and wrong ones do not, whatever is cut."""

from __future__ import annotations

import pytest
import torch
from bench_rows import CPU, TINY, problem

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("kda_core_cpu")

from kda_core.bench import exactness, peers, shapes
from kda_core.bench.workload import Work

SHAPES = (
    TINY,
    shapes.parse("1,12,2,8:hv=4:packed=3+9"),
    shapes.parse("1,12,4,8:packed=3+1+8:pool"),
    shapes.Shape(3, 12, 4, 8),
)
CALLS = [
    *((mode, "bounded", shape) for shape in SHAPES for mode in ("inference", "training")),
    *((mode, gate, TINY) for gate in ("given", "softplus") for mode in ("inference", "training")),
]


@pytest.mark.parametrize("tokens", [5, 100])
@pytest.mark.parametrize(
    ("mode", "gate", "shape"), [c for c in CALLS if not (c[0] == "training" and c[2].pool)], ids=str
)
def test_ours(mode, gate, shape, tokens, monkeypatch):
    monkeypatch.setitem(exactness.GRADIENT_TOKENS, "cpu", tokens)
    monkeypatch.setitem(exactness.INFERENCE_TOKENS, "cpu", tokens)
    work = Work(problem(mode, shape, gate), CPU)
    part = exactness.slice_of(work)
    call = peers.Ours("cpu").prepare(work)
    call()
    grad_o = None if work.grad_o is None else work.grad_o.clone()
    before = exactness.expected(work, part)
    found = exactness.errors(exactness.results_on_slice(call, work, part), before)
    names = {"o", *(f"d{n}" for n in work.leaves)}
    assert set(found) == (names | {"final_state"} if mode == "inference" and part.whole else names)
    assert all(error < 2e-5 for error in found.values()), found
    # The inputs are as they were.
    assert grad_o is None or torch.equal(work.grad_o, grad_o)
    assert all(torch.equal(x, before[n]) for n, x in exactness.expected(work, part).items())


def test_a_wrong_result_shows():
    work = Work(problem("training"), CPU)
    call = peers.Ours("cpu").prepare(work)
    part = exactness.slice_of(work)
    wrong = lambda: {n: x * 1.01 if n == "dA_log" else x for n, x in call().items()}  # noqa: E731
    found = exactness.errors(exactness.results_on_slice(wrong, work, part), exactness.expected(work, part))
    assert found["dA_log"] == pytest.approx(0.01, rel=0.01)
    assert found["dg"] < 2e-5

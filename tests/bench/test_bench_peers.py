"""Peers of ``kda bench``; where a library needs a GPU our own operator stands in for it: do the arguments arrive?"""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch
from bench_rows import CPU, TINY, problem

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("kda_core_cpu")

import kda_core
from kda_core.bench import exactness, peers, regimes, shapes
from kda_core.bench.workload import Problem, Work


def test_reasons_on_a_cpu():
    reasons = {peer.name: peer.unavailable(CPU) for peer in peers.every_peer() if peer.name in ("fla", "flash_kda")}
    assert set(reasons.values()) == {"its kernels need a GPU"}


def test_a_missing_library_names_the_command():
    assert peers.import_failure("kda_no_such", "pip install it") == "kda_no_such is not installed: pip install it"


def test_a_library_that_breaks_at_import(tmp_path, monkeypatch):
    (tmp_path / "kda_broken_peer.py").write_text("raise OSError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.import_failure("kda_broken_peer", "") == "import failed: OSError: no driver"


@pytest.mark.end_to_end
@pytest.mark.parametrize("gate", regimes.GATES)
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    "peer", [peers.Transformers(), peers.NaiveChunk(), peers.NaiveRecurrent()], ids=lambda p: p.name
)
def test_torch_peers_agree_with_the_oracle(peer, mode, gate):
    if peer.unavailable(CPU):
        pytest.skip(peer.unavailable(CPU))
    work = Work(problem(mode, shapes.Shape(1, 64, 2, 8), gate), CPU)
    if peer.refuses(work.problem):
        assert mode == "training"
        return
    part = exactness.slice_of(work)
    found = exactness.errors(exactness.results_on_slice(peer.prepare(work), work, part), exactness.expected(work, part))
    assert all(error < 2e-4 for error in found.values()), found


def test_ours_is_called_through_the_public_function(monkeypatch):
    """The backend that is named is the one that is timed."""
    seen = []
    chunk_kda = kda_core.chunk_kda

    def watched(**arguments):
        seen.append(arguments["backend"])
        return chunk_kda(**arguments)

    monkeypatch.setattr(kda_core, "chunk_kda", watched)
    peers.Ours("cpu").prepare(Work(problem(), CPU))()
    assert seen == ["cpu"]


SHAPES = (TINY, shapes.parse("1,12,2,8:hv=4:packed=3+9"), shapes.parse("1,12,4,8:packed=3+1+8:pool"))


def chunk_kda(**arguments):
    return kda_core.chunk_kda(**arguments, backend="cpu")


@pytest.fixture
def libraries(monkeypatch):
    """Modules with the signatures that the adapters were written for."""

    def flash(q, k, v, g, beta, scale, out, *, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens):
        states = {"initial_state": initial_state, "output_final_state": True, "state_v_first": True}
        every = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}
        gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
        rows = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        o, state = chunk_kda(**rows, scale=scale, cu_seqlens=cu_seqlens, **states, **every, **gate)
        out.copy_(o)
        final_state.copy_(state)

    def kimi_delta_attention(
        q,
        k,
        v,
        g,
        beta,
        cu_seqlens,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        safe_gate=False,
        gate_lower_bound=None,
        a_log=None,
        dt_bias=None,
    ):
        rows = {"q": q[None], "k": k[None], "v": v[None], "g": g[None], "beta": beta[None]}
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "state_v_first": True}
        options |= {"use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "use_gate_in_kernel": safe_gate}
        gate = {"A_log": a_log, "dt_bias": dt_bias, "lower_bound": gate_lower_bound}
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        o, state = chunk_kda(**rows, cu_seqlens=cu_seqlens, **options, **gate, **states)
        return o[0], torch.empty(0) if state is None else state

    fakes = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.kda": {"chunk_kda": chunk_kda},
        "flash_kda": {"fwd": flash},
        "cudnn": {"__version__": "1.32.0"},
        "cudnn.linear_attention": {"kimi_delta_attention": kimi_delta_attention},
    }
    for name, members in fakes.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


def errors(peer, mode, shape, gate):
    work = Work(problem(mode, shape, gate), CPU)
    part = exactness.slice_of(work)
    return exactness.errors(exactness.results_on_slice(peer.prepare(work), work, part), exactness.expected(work, part))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gate", regimes.GATES)
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", ["fla", "flash_kda", "cudnn-frontend"])
def test_results(libraries, name, mode, gate, shape):
    peer = next(p for p in peers.every_peer() if p.name == name)
    refused = peer.refuses(Problem(mode, shapes.Shape(1, 8, 2, 128), gate, "random", torch.bfloat16, torch.bfloat16))
    if refused or (shape.pool and mode == "training") or (shape.HV > shape.H and name != "fla"):
        return
    found = errors(peer, mode, shape, gate)
    assert all(error < 2e-5 for error in found.values()), found
    assert "final_state" in found if mode == "inference" else "dv" in found
    if name == "fla" and mode == "training":
        assert "dbeta" in found
        assert gate == "given" or "ddt_bias" in found


def test_what_they_refuse():
    fla, flash, cudnn = peers.every_peer()[:3]
    bf16 = torch.bfloat16
    plain = Problem("inference", shapes.Shape(1, 64, 2, 128), "bounded", "random", bf16, bf16)
    assert [p.refuses(plain) for p in (fla, flash, cudnn)] == [None] * 3
    assert fla.refuses(dataclasses.replace(plain, shape=shapes.Shape(1, 64, 2, 512))) == "K: at most 256, got 512"
    assert flash.refuses(dataclasses.replace(plain, mode="training")) == "it has no backward"
    assert flash.refuses(dataclasses.replace(plain, gate="softplus")) == "it takes the bounded gate only"
    assert cudnn.refuses(dataclasses.replace(plain, gate="softplus")) == "it has no softplus gate"
    assert "beforehand" in cudnn.note(dataclasses.replace(plain, mode="training"))

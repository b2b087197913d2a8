"""``kda bench``: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("kda_core_cpu")

from typer.testing import CliRunner

import kda_core
from kda_core import _bench, _commands

TINY = ("--device", "cpu", "--shape", "1,16,2,8", "--seconds", "0.001")
CALLS = ["forward", "training step", "decoding step"]


def run(*arguments: str):
    return CliRunner().invoke(_commands.app, ["bench", *arguments], env={"COLUMNS": "80"})


def test_the_table():
    result = run(*TINY, "--gate", "softplus")
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in (*CALLS, "1,16,2,8, float32, softplus gate"))
    assert "without fla: RuntimeError: its kernels need a GPU" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json():
    result = run(*TINY, "--gate", "given", "--backend", "reference", "--json")
    found = json.loads(result.stdout)
    assert (found["shape"], found["dtype"], found["gate"]) == ("1,16,2,8", "float32", "given")
    assert found["versions"]["kda-core"] is not None
    assert list(found["rows"]) == CALLS
    assert all(row["ms"]["kda_core"] > 0 for row in found["rows"].values())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--shape", "1,2"), "--shape: expected four or five sizes B,T,H,K,V from 1 to below 2**62, got '1,2'"),
        (("--shape", "1,0,1,8"), "--shape: expected four or five sizes"),
        (("--shape", "big"), "--shape: expected whole numbers"),
        (("--dtype", "int8"), "--dtype: expected one of bfloat16, float16, float32, got 'int8'"),
        (("--gate", "open"), "--gate: expected one of bounded, softplus, given, got 'open'"),
        (("--backend", "no_such"), "--backend: backend 'no_such' is not installed"),
        (("--device", "mars"), "--device: expected cpu or cuda, got 'mars'"),
        (("--seconds", "0"), "--seconds: expected a finite number above 0, got 0.0"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(line, message):
    result = run(*TINY, *line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_a_call_that_is_too_large():
    """Its states need more than an address space."""
    result = run(*TINY, "--shape", "1,1,1,8000000")
    assert result.exit_code == 1
    assert result.stderr.startswith("RuntimeError: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("gate", _bench.GATES)
def test_every_call_has_what_fla_takes(gate, monkeypatch):
    """A stand-in for fla, with the arguments of its public functions: it has the same results."""

    def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **options):
        assert set(options) <= {"use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"} | {
            "allow_neg_eigval", "safe_gate", "lower_bound", "A_log", "dt_bias",
        }  # fmt: skip
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        return kda_core.chunk_kda(q, k, v, g, beta, **states, **options)

    cpu = torch.device("cpu")
    for name, call in _bench.calls((1, 16, 2, 8, 4), torch.float32, gate).items():
        ours, theirs = _bench.runner(getattr(kda_core, call.op), call)(), _bench.runner(chunk_kda, call)()
        assert set(ours) == set(theirs)
        assert ("dbeta" in ours) == (name == "training step")
        assert all(torch.allclose(x, theirs[n], atol=1e-4) for n, x in ours.items())
        monkeypatch.setitem(sys.modules, "fla.ops.kda", types.ModuleType("fla.ops.kda"))
        assert _bench.measure(call, "cpu", cpu, 0.001)["left_out"] == {"fla": "RuntimeError: its kernels need a GPU"}

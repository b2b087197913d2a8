"""The programs in ``benchmarks`` on a CPU: their rows, their file, what they refuse, and their child processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from environments import ROOT

pytest.importorskip("kda_core_cpu")

import accuracy
import decode
import figures
import first_call
import inference
import inputs
import layer
import measuring
import memory
import peers
import router
import stacks

import kda_core

# By its file: there is an example of that name.
_spec = importlib.util.spec_from_file_location("benchmarks_training", ROOT / "benchmarks" / "training.py")
training = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(training)

CPU = ("--device", "cpu")
PROGRAMS = (accuracy, decode, first_call, inference, layer, memory, router, stacks, training)
HUGE = "1,1,1,8000000"
TINY = ("--shapes", "1,16,2,8", "--seconds", "0.01", "--peers", "none")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows_of(program, folder: Path, *arguments: str, status: int = 0) -> list[dict]:
    """The rows that a run on the CPU wrote."""
    file = folder / "found.json"
    assert program.main([*CPU, "--json", str(file), *arguments]) == status
    return json.loads(file.read_text())["rows"]


def test_training(tmp_path, capsys):
    shapes = ("--shapes", "1,16,2,8", "1,16,2,8,4:hv=4:packed=9+7")
    rows = rows_of(training, tmp_path, *TINY, *shapes, "--gates", "bounded", "given", "--decays", "slow")
    assert [(row["shape"], row["gate"], row["decay"]) for row in rows] == [
        (shape, gate, "slow") for shape in shapes[1:] for gate in ("bounded", "given")
    ]
    assert rows[2]["sizes"] == {"B": 1, "T": 16, "H": 2, "HV": 4, "K": 8, "V": 4, "N": 2}
    for row in rows:
        ours = row["implementations"]["kda_core"]
        assert ours["ms"]["p10"] <= ours["ms"]["median"] <= ours["ms"]["p90"]
        assert set(ours["errors"]) >= {"o", "dq", "dk", "dv", "dg", "dbeta"}
        assert all(error < 2e-5 for error in ours["errors"].values())
        assert row["floor_ms"] > 0
    out = capsys.readouterr().out
    assert "1,16,2,8,4:hv=4:packed=9+7, given, slow decays (mean -0.0" in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_file_says_where_it_comes_from(tmp_path):
    file = tmp_path / "found.json"
    assert inference.main([*CPU, *TINY, "--backend", "reference", "--no-errors", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert content["schema"] == 1
    assert content["copy_bytes_per_second"] > 0
    environment = content["environment"]
    assert environment["backend"] == "reference"
    assert set(environment) == {"device", "date", "commit", "backend", "versions"}
    assert environment["versions"]["kda_core"] == kda_core.__version__
    (row,) = content["rows"]
    assert "errors" not in row["implementations"]["kda_core"]


def test_a_run_adds_to_the_rows_of_others(tmp_path):
    """Rows that are measured again take the place of the earlier ones."""
    rows_of(training, tmp_path, *TINY, "--shapes", "1,8,1,8", "1,9,1,8")
    rows_of(inference, tmp_path, *TINY, "--append")
    rows = rows_of(training, tmp_path, *TINY, "--shapes", "1,10,1,8", "1,8,1,8", "--no-errors", "--append")
    assert [row["shape"] for row in rows] == ["1,8,1,8", "1,9,1,8", "1,16,2,8", "1,10,1,8"]
    assert ["errors" in row["implementations"]["kda_core"] for row in rows] == [False, True, True, False]
    (row,) = rows_of(inference, tmp_path, *TINY)
    assert row["suite"] == "inference"


def test_the_tables_of_the_documentation_are_made_from_it(tmp_path):
    found = str(tmp_path / "found")
    rows_of(training, tmp_path, *TINY, "--shapes", "1,16,2,8:packed=9+7", "--gates", "given")
    rows_of(inference, tmp_path, *TINY, "--append")
    step = ("--sizes", "2", "--heads", "2", "--channels", "32", "--prompts", "--cold", "1", "--peers", "none")
    rows_of(decode, tmp_path, *step, "--states", "float32", "--layouts", "V first", "--append")
    rows_of(accuracy, tmp_path, "--only", "given decay, float32", "--append")
    assert "| 1, 16, 2, 8, packed in 2 | given | " in figures.speed(found, "training")
    assert "| 1, 16, 2, 8 | bounded, random | " in figures.speed(found, "inference")
    assert "| float32, V first | 2 | " in figures.decoding(found)
    environment = json.loads((tmp_path / "found.json").read_text())["environment"]
    assert figures.machine(found).endswith(f"; {environment['date']}, commit {environment['commit'][:7]}.")
    assert "| given decay, float32 | float32 | kda_core | " in figures.accuracy(found)


def test_a_file_of_another_kind_is_not_added_to(tmp_path, capsys):
    file = tmp_path / "found.json"
    for text in ("[]", "{}", "no JSON"):
        file.write_text(text)
        with pytest.raises(SystemExit):
            inference.main([*CPU, *TINY, "--append", "--json", str(file)])
        assert file.read_text() == text
        assert capsys.readouterr().err == f"inference.py: --append: expected a file with rows, got {file}\n"


def test_inference_has_the_error_of_the_state(tmp_path):
    (row,) = rows_of(inference, tmp_path, *TINY)
    assert set(row["implementations"]["kda_core"]["errors"]) == {"o", "final_state"}


@pytest.mark.end_to_end
def test_beside_torch_code(tmp_path, capsys):
    """The other implementations have the oracle's results, too; one that refuses a row says why."""
    pytest.importorskip("transformers")
    pytest.importorskip("fla")
    shapes = ("--shapes", "1,64,2,8", "1,64,2,8:packed=24+40", "--seconds", "0.01", "--gates", "given", "softplus")
    # The gradients of naive_chunk are not finite.
    for program, names in ((inference, ["naive_chunk"]), (training, [])):
        names = ["kda_core", "transformers", "naive_recurrent", *names]
        for row in rows_of(program, tmp_path, *shapes, "--peers", *names[1:]):
            assert list(row["implementations"]) == (names[:1] if "packed" in row["shape"] else names)
            assert all(e < 2e-4 for found in row["implementations"].values() for e in found["errors"].values())
    assert "without naive_chunk: ValueError: it takes no packed sequences" in capsys.readouterr().out
    steps = ("--sizes", "1", "--heads", "2", "--channels", "8", "--prompts", "--cold", "1", "--peers", "transformers")
    first, *others = rows_of(decode, tmp_path, *steps)
    assert list(first["implementations"]) == ["kda_core", "transformers"]
    assert all(list(row["implementations"]) == ["kda_core"] for row in others)


def test_decode(tmp_path, capsys):
    arguments = ("--sizes", "1", "2", "--heads", "2", "--channels", "32", "--prompts", "3", "--cold", "1")
    rows = rows_of(decode, tmp_path, *arguments, "--seconds", "0.01", "--peers", "none")
    steps = [row for row in rows if row["sizes"]["T"] == 1]
    kinds = {(state, layout) for state in ("float32", "bfloat16") for layout in ("K first", "V first")}
    assert {(row["state"], row["layout"]) for row in steps} == kinds
    for row in steps:
        # States of 2 heads, read and written; then q, k, v, g and o of a token each, and beta.
        N = row["sizes"]["N"]
        assert row["state_bytes"] == 2 * N * 2 * 32 * 32 * (4 if row["state"] == "float32" else 2)
        assert row["bytes"] - row["state_bytes"] == 4 * N * (5 * 2 * 32 + 2)
    assert [list(row["implementations"]) for row in rows if row["sizes"]["T"] == 3] == [["kda_core", "chunk_kda"]]
    assert "of a copy" in capsys.readouterr().out


def test_drafts(tmp_path):
    """No other rows; the commits are of none, some and all tokens."""
    arguments = ("--drafts", "3", "--sizes", "2", "--heads", "2", "--channels", "8", "--layouts", "V first")
    rows = rows_of(decode, tmp_path, *arguments, "--cold", "1", "--seconds", "0.01", "--peers", "none")
    assert [row["sizes"]["T"] for row in rows] == [3, 3]
    names = ["kda_core", "records", *(f"commit of {n}" for n in (0, 1, 2, 3)), "tree"]
    assert all(list(row["implementations"]) == names for row in rows)


def test_a_layers_steps(tmp_path):
    arguments = ("--layer", "--sizes", "2", "--heads", "2", "--channels", "8", "--layouts", "V first", "--cold", "1")
    rows = rows_of(decode, tmp_path, *arguments, "--seconds", "0.01", "--peers", "none")
    assert [list(row["implementations"]) for row in rows] == [["kda_core", "recurrence alone"]] * 2


def test_accuracy(tmp_path):
    (row,) = rows_of(accuracy, tmp_path, "--by-length", "--only", "16 tokens, mild decay, float32", "--draws", "2")
    assert row["by_length"]
    ours = row["implementations"]["kda_core"]
    assert set(ours["errors"]) == {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"}
    first, second = (draw["dq"] for draw in ours["draws"])
    assert first != second
    assert ours["errors"]["dq"] == pytest.approx(((first**2 + second**2) / 2) ** 0.5)
    assert ours["errors"]["dq"] < 1e-5


def test_a_peer_that_fails_is_left_out_and_a_failure_of_ours_fails_the_row():
    def broken(**arguments):
        raise RuntimeError("no kernel\nand more")

    case, cpu = accuracy.BY_LENGTH[0], torch.device("cpu")
    functions = {"kda_core": kda_core.chunk_kda, "fla": broken}
    assert accuracy.measure(case, functions, cpu, 1)["left_out"] == {"fla": "RuntimeError: no kernel"}
    assert accuracy.measure(case, {"kda_core": broken}, cpu, 1)["failed"] == "RuntimeError: no kernel"
    runs, left_out = peers.first_runs({"kda_core": int, "fla": broken})
    assert (runs, left_out) == ({"kda_core": int}, {"fla": "RuntimeError: no kernel"})
    with pytest.raises(RuntimeError, match="no kernel"):
        peers.first_runs({"kda_core": broken})


def test_a_row_that_fails_ends_no_run(tmp_path, capsys):
    """The states need more than an address space; the next row is measured, and the status says so."""
    first, second = rows_of(training, tmp_path, *TINY, "--shapes", HUGE, "1,2,1,8", "--backend", "cpu", status=1)
    assert "RuntimeError: " in first["failed"]
    assert "failed" not in second
    assert "  failed: RuntimeError: " in capsys.readouterr().out


@pytest.mark.end_to_end
def test_router(tmp_path, capsys):
    backends = [backend.info.name for backend in router.registry.backends]
    limits = ("--call-limit-us", "0.001", "--verdict-limit-us", "0.001", "--import-limit-ms", "100000")
    *calls, verdict, imported = rows_of(
        router, tmp_path, "--batches", "2", "--calls", "3", "--processes", "1", *limits, status=1
    )
    assert [row["case"] for row in calls] == list(router.calls())
    assert all(row["public_us"] > row["direct_us"] > 0 for row in calls)
    assert "µs added to a call" in calls[0]["failed"]
    assert "µs of a verdict" in verdict["failed"]
    assert imported["processor_ms"][0] > 0
    assert "failed" not in imported
    # The null backend is gone.
    assert [backend.info.name for backend in router.registry.backends] == backends


@pytest.mark.end_to_end
def test_first_call(tmp_path):
    rows = rows_of(first_call, tmp_path, "--shapes", "1,70,2,16", "--calls", "2")
    assert [row["backward"] for row in rows] == [False, True]
    # The CPU backend compiles nothing.
    assert all(row["seconds"] > 0 and row["kernels"] == 0 for row in rows)
    assert (rows[1]["later_random_T"], rows[1]["later_random_packings"]) == (0, 0)


@pytest.mark.end_to_end
def test_memory(tmp_path):
    (row,) = rows_of(memory, tmp_path, "--shapes", "1,2048,4,64", "--peers", "none")
    # o alone is 2 MiB, and the inputs are not counted.
    assert 2**21 <= row["implementations"]["kda_core"]["grown_bytes"] < 2**26


def test_layer(tmp_path, capsys):
    rows = rows_of(layer, tmp_path, "--sizes", "1,16,8,2,4", "--seconds", "0.01", "--no-peer", "--gate", "bounded")
    assert [(row["case"], row["gate"]) for row in rows] == [("forward", "bounded"), ("training step", "bounded")]
    assert all(row["implementations"]["kda_core"]["ms"]["median"] > 0 for row in rows)
    assert "1,16,8,2,4, training step" in capsys.readouterr().out


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: Path(program.__file__).stem)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--json", "."), "--json: expected a file, got ."),
        (("--json", "no/such/folder/x.json"), "--json: "),
        (("--json", os.devnull), f"--json: expected a file, got {os.devnull}"),
        (("--backend", "no_such"), "--backend: backend 'no_such' is not installed"),
        (("--device", "mars"), "--device: expected cpu or cuda, got 'mars'"),
        (("--device", "meta"), "--device: expected cpu or cuda, which can be timed, got 'meta'"),
        (("--device", "cuda:77"), "--device: torch sees"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_refused_before_anything_is_measured(program, line, message, capsys):
    with pytest.raises(SystemExit) as found:
        program.main(list(line))
    out, err = capsys.readouterr()
    assert (found.value.code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"{Path(program.__file__).name}: ")
    assert message in err


@pytest.mark.parametrize(
    ("program", "line", "message"),
    [
        (training, ("--peers", "no_such"), "--peers: invalid choice: 'no_such'"),
        (training, ("--peers", "fla"), "--peers: fla: RuntimeError: it is timed on cuda only"),
        (inference, ("--gates", "no_such"), "--gates: invalid choice"),
        (inference, ("--shapes", "1,2"), "--shapes: expected B,T,H,K"),
        (inference, ("--seconds", "0"), "--seconds: expected more than 0"),
        (decode, ("--sizes", "1.5"), "--sizes: invalid count value: '1.5'"),
        (router, ("--calls", "0"), "--calls: expected more than 0, got 0"),
        (accuracy, ("--only", "no such case"), "--only: expected a part of the name of a case"),
        (first_call, ("--shapes", "1,8,2,8:hv=4"), "--shapes: expected B,T,H,K alone"),
    ],
)
def test_wrong_arguments(program, line, message, capsys):
    with pytest.raises(SystemExit) as found:
        program.main([*CPU, *line])
    assert found.value.code == 2
    assert message in capsys.readouterr().err


def test_a_number_that_json_lacks_is_spelled(tmp_path):
    nan = torch.tensor([float("nan")])
    assert inputs.errors({"o": nan, "dq": nan}, {"o": torch.ones(1)}) == {"o": "nan"}
    assert accuracy.root_mean_square([{"o": "nan"}, {"o": 1.0}]) == {"o": "nan"}


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_row_on_a_gpu(gpu, mode):
    call, _ = inputs.draw(inputs.parse_shape("1,8,1,4"), mode, "softplus", "initialised", torch.float32, gpu)
    options = Namespace(device=gpu, seconds=0.01, profile=True, no_errors=False)
    kernels = {"one": 1.5, "two": 0.25}
    found = peers.measured(call, {"kda_core": kda_core.chunk_kda}, options, lambda run, device: kernels)
    ours = found["implementations"]["kda_core"]
    assert ours["ms"]["median"] == ours["device_ms"]["median"] == 2.5
    assert ours["peak_bytes"] == inputs.bytes_held(call) + 200
    assert ours["kernels_ms"] == kernels
    row = {"shape": "1,8,1,4", "gate": "softplus", "decay": "initialised", "implementations": {"kda_core": ours}}
    _, line, *kernels = peers.lines(row)
    assert "2.500 ms" in line
    assert "2.500 replayed   0.00 GiB" in line
    assert kernels == ["       1.500 ms one", "       0.250 ms two"]


def test_a_call_that_cannot_be_captured_has_its_time_with_the_host(gpu, monkeypatch):
    def refused(graph, stream):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refused)
    call, _ = inputs.draw(inputs.parse_shape("1,8,1,4"), "inference", "given", "random", torch.float32, gpu)
    options = Namespace(device=gpu, seconds=0.01, profile=False, no_errors=True)
    ours = peers.measured(call, {"kda_core": kda_core.chunk_kda}, options)["implementations"]["kda_core"]
    assert ours["ms"]["median"] == 2.5
    assert "device_ms" not in ours
    assert "not permitted" in ours["not_captured"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_step_on_a_gpu(gpu, broken, monkeypatch):
    """A stand-in for fla gets its arguments, and what it does not do is no failure of ours."""

    def fused_recurrent_kda_fwd(*, inplace_final_state, **arguments):
        assert inplace_final_state
        if broken:
            raise RuntimeError("no kernel")
        return kda_core.fused_recurrent_kda(**arguments)

    for name in ("fla", "fla.ops", "fla.ops.kda", "fla.ops.kda.fused_recurrent"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fla.ops.kda.fused_recurrent"].fused_recurrent_kda_fwd = fused_recurrent_kda_fwd
    options = Namespace(device=gpu, backend="cpu", heads=2, channels=8, cold=1, drafts=None, layer=False)
    row = decode.measure(2, 1, "bfloat16", "V first", ["fla"], options)
    assert "failed" not in row
    assert row["left_out"] == ({"fla": "RuntimeError: no kernel"} if broken else {})
    assert list(row["implementations"]) == (["kda_core"] if broken else ["kda_core", "fla"])
    assert row["implementations"]["kda_core"]["ms"] == {"median": 2.5 / 8, "p10": 2.5 / 8, "p90": 2.5 / 8, "count": 15}


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / name), *CPU, *arguments]


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("router.py", ("--batches", "1", "--calls", "1", "--processes", "1")),
        ("first_call.py", ("--shapes", "1,8,1,8", "--calls", "1")),
        ("memory.py", ("--shapes", "1,64,1,8", "--peers", "none")),
        ("training.py", (*TINY, "--warm", "1")),
    ],
)
def test_a_module_in_the_working_folder_is_not_imported(tmp_path, name, arguments):
    """Neither by a program nor by its child processes."""
    for module in ("torch", "json", "runpy", "inputs"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('the planted module ran')")
    done = subprocess.run(command(name, *arguments), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "planted" not in done.stdout + done.stderr


@pytest.mark.end_to_end
def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path):
    file = tmp_path / "found.json"
    shapes = [f"1,{T},1,8" for T in range(8, 90)]
    line = command("training.py", "--peers", "none", "--seconds", "0.2", "--json", str(file), "--shapes", *shapes)
    run = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    while run.stdout.readline().split(",")[:2] != ["1", "9"]:
        assert run.poll() is None
    while len(json.loads(file.read_text())["rows"]) < 2:
        time.sleep(0.01)
    run.kill()
    run.wait()
    assert [row["shape"] for row in json.loads(file.read_text())["rows"]][:2] == shapes[:2]


@pytest.mark.end_to_end
def test_compiling_first(tmp_path, capfd, monkeypatch):
    """The processes share the shapes and write no file; one that fails is reported, and all is measured."""
    shapes = ("--shapes", "1,8,1,8", HUGE, "1,9,1,8")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    rows = rows_of(training, Path("here"), *TINY, *shapes, "--backend", "cpu", "--warm", "2", status=1)
    assert len(rows) == 3
    err = capfd.readouterr().err
    assert "compiling, process 1: RuntimeError" in err
    assert "compiled in 2 processes" in err


def test_a_child_that_fails_says_why():
    with pytest.raises(measuring.ChildFailed, match="no memory"):
        measuring.child("raise SystemExit('no memory')")


def test_rows_of_an_earlier_run_keep_its_day_and_commit(tmp_path: Path):
    found = rows_of(training, tmp_path, *TINY, "--shapes", "1,16,2,8")
    content = json.loads((tmp_path / "found.json").read_text())
    content["environment"] |= {"date": "2026-01-01", "commit": "a" * 40}
    content["rows"] = [{n: x for n, x in row.items() if n not in ("date", "commit")} for row in found]
    (tmp_path / "found.json").write_text(json.dumps(content))
    old, new = rows_of(training, tmp_path, *TINY, "--shapes", "1,32,2,8", "--append")
    assert (old["date"], old["commit"]) == ("2026-01-01", "a" * 40)
    assert new["date"] > "2026-01-01"
    assert new["commit"] != "a" * 40
    assert "training 2026-01-01, commit aaaaaaa; training 20" in figures.machine(str(tmp_path / "found"))

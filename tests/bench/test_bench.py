"""``kda bench``: its arguments, rows, files and plots, what a broken peer does, and compiling beforehand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from bench_rows import PNG, opened

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("kda_core_cpu")

import kda_core
from kda_core.bench import command, exactness, peers, regimes, run, session, shapes, speed, timing, warm
from kda_core.bench.suites import SUITES


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Toy(peers.Peer):
    """A peer that does as it is told."""

    def __init__(self, name, unavailable=None, refuses=None, error=None):
        self.name, self.reasons, self.error = name, (unavailable, refuses), error

    def unavailable(self, device):
        return self.reasons[0]

    def refuses(self, problem):
        return self.reasons[1]

    def version(self):
        return "1.2"

    def note(self, problem):
        return "a note"

    def prepare(self, work):
        if self.error is not None:
            raise self.error
        return peers.Ours("cpu").prepare(work)


TOYS = [
    Toy("good"),
    Toy("broken", error=RuntimeError("no kernel\nand more")),
    Toy("away", unavailable="it is not installed"),
    Toy("choosy", refuses="it takes K = 1 only"),
]


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setattr(peers, "every_peer", lambda: TOYS)


def main(*arguments) -> int:
    return command.main([str(argument) for argument in arguments])


@pytest.mark.end_to_end
def test_end_to_end(toys, tmp_path, capsys):
    """Two suites with peers that work, break, refuse and are not there: a row each, a table, a plot."""
    file, plot = tmp_path / "found.json", tmp_path / "found.png"
    line = ("training", "inference", "--quick", "--device", "cpu", "--json", file, "--plot", plot)
    assert main(*line) == 0
    content = json.loads(file.read_text())
    rows = content["rows"]
    assert [row["suite"] for row in rows] == ["training"] * 2 + ["inference"] * 2
    assert content["schema"] == session.SCHEMA
    assert content["left_out"] == {"away": "it is not installed"}
    assert content["environment"]["versions"]["good"] == "1.2"
    assert content["environment"]["backend"] == "cpu"
    for row in rows:
        assert list(row["implementations"]) == ["kda_core", "good"]
        assert row["left_out"] == {"broken": "RuntimeError: no kernel", "choosy": "it takes K = 1 only"}
        assert row["implementations"]["good"]["note"] == "a note"
        assert -4 < row["mean_log_decay"] < -2
        assert row["floor_ms"] > 0
        for found in row["implementations"].values():
            assert found["ms"]["p10"] <= found["ms"]["median"] <= found["ms"]["p90"]
            assert all(error < 2e-5 for error in found["errors"].values())
    assert set(rows[0]["implementations"]["kda_core"]["errors"]) >= {"o", "dA_log", "ddt_bias"}
    assert set(rows[2]["implementations"]["kda_core"]["errors"]) == {"o", "final_state"}
    assert plot.read_bytes()[:4] == PNG
    out, err = capsys.readouterr()
    assert "away is left out: it is not installed" in err
    assert out.count("left out of some rows: choosy: it takes K = 1 only") == 2
    assert out.count("good: a note") == 2
    assert out.count("bounded, random") == 4
    # The same tables and plot from the file.
    plot.unlink()
    assert main("--from", file, "--plot", plot) == 0
    assert capsys.readouterr().out == out
    assert plot.read_bytes()[:4] == PNG


def test_a_shape_that_fails_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    file = tmp_path / "found.json"
    draw = regimes.draw

    def scarce(gate, decay, size, *rest):
        if size[1] == 8:
            raise torch.OutOfMemoryError("out of memory")
        return draw(gate, decay, size, *rest)

    monkeypatch.setattr(regimes, "draw", scarce)
    line = ("forward", "--quick", "--device", "cpu", "--peers", "none", "--shapes", "1,8,1,8", "1,9,1,8")
    assert main(*line, "--json", file) == 1
    first, second = json.loads(file.read_text())["rows"]
    assert first["failed"] == "OutOfMemoryError: out of memory"
    assert list(second["implementations"]) == ["kda_core"]
    out, err = capsys.readouterr()
    assert "forward 1,8,1,8 bounded random: OutOfMemoryError" in err
    assert "fails" in out


def test_a_call_of_ours_that_fails_is_reported(tmp_path, capsys):
    line = ("forward", "--quick", "--device", "cpu", "--peers", "none", "--shapes", "1,8,1,8")
    assert main(*line, "--backend", "no_such") == 1
    assert "BackendNotFound" in capsys.readouterr().err


def test_a_peer_that_fails_later_is_left_out(monkeypatch, capsys):
    """It runs once, and fails while it is timed: ours are timed alone."""

    class Tired(Toy):
        def prepare(self, work):
            call, left = peers.Ours("cpu").prepare(work), [1]

            def run():
                if not left:
                    raise RuntimeError("no memory for a graph")
                left.pop()
                return call()

            return run

    monkeypatch.setattr(peers, "every_peer", lambda: [Tired("tired")])
    assert main("forward", "--quick", "--device", "cpu", "--shapes", "1,8,1,8") == 0
    out, err = capsys.readouterr()
    assert "tired: failed while it was timed, or beside one that did: RuntimeError: no memory for a graph" in err
    assert "kda_core" in out


def test_times_stay_where_the_oracle_fails(tmp_path, monkeypatch, capsys):
    file = tmp_path / "found.json"

    def scarce(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(exactness, "expected", scarce)
    line = ("forward", "--quick", "--device", "cpu", "--peers", "none", "--shapes", "1,8,1,8")
    assert main(*line, "--json", file) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["errors_failed"] == "OutOfMemoryError: out of memory"
    assert row["implementations"]["kda_core"]["ms"]["median"] > 0
    assert "no errors: OutOfMemoryError" in capsys.readouterr().out


def test_a_stopped_run_leaves_its_rows(tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    measure = speed.measure

    def stopped(problem, session):
        if problem.shape.T == 9:
            raise KeyboardInterrupt
        return measure(problem, session)

    monkeypatch.setattr(speed, "measure", stopped)
    line = ("forward", "--quick", "--device", "cpu", "--peers", "none", "--shapes", "1,8,1,8", "1,9,1,8")
    with pytest.raises(KeyboardInterrupt):
        main(*line, "--json", file)
    assert [row["shape"] for row in json.loads(file.read_text())["rows"]] == ["1,8,1,8"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("no_such",), "suites: expected some of training"),
        (("--peers", "good,no_such"), "peers: expected some of good, broken, away, choosy or none, got no_such"),
        (("--from", "no_such.json"), "no_such.json"),
        (
            ("--json", "no/such/folder/x.json"),
            "json: expected a file in a folder that is there, got no/such/folder",
        ),
        (("--plot", "x.exe"), "expected a name that ends in .png, .svg, .pdf, got x.exe"),
        (("--retune",), "--retune: needs --warm or --warm-only"),
        (("--device", "mars"), "device: expected cpu or cuda, got 'mars'"),
        (("--device", "meta"), "device: expected cpu or cuda, which this can time, got 'meta'"),
        (("--device", "cuda:77"), "cuda:77"),
        (("router", "--plot", "x.png"), "plot: expected one of the suites accuracy, decode, forward"),
        (("--set", "full", "--shapes", "1,8,2,8"), "--set, --shapes: expected one of the two"),
        (("--graph",), "--graph: needs a GPU, got cpu"),
        (("--profile", "--warm-only"), "--profile, --warm-only: needs a GPU, got cpu"),
        (("--set", "serving"), "set: expected headline on a CPU"),
        (("training", "--shapes", "1,8,2,8:pool"), "a pool is read and advanced in inference only"),
        (("decode", "--seconds", "1"), "--seconds: read by none of the suites decode"),
    ],
)
def test_bad_arguments(toys, line, message, capsys):
    assert main("--device", "cpu", *line) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", [("--gate", "no_such"), ("--shapes", "1,2"), ("--seconds", "0"), ("--decay", "")])
def test_bad_values(line, capsys):
    with pytest.raises(SystemExit) as found:
        main(*line)
    assert found.value.code == 2
    assert line[0] in capsys.readouterr().err


def test_a_file_of_another_kind(tmp_path, capsys):
    file = tmp_path / "found.json"
    file.write_text("[]")
    assert main("--from", file) == 2
    assert "expected JSON that kda bench wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "stray"),
    [("suites", "inference"), ("json", "--json=x.json"), ("gate-dtype", "--gate-dtype=float32"), ("quick", "--quick")],
)
def test_from_measures_nothing(name, stray, tmp_path, capsys):
    file = tmp_path / "found.json"
    file.write_text("{}")
    assert main(stray, "--from", file) == 2
    assert f"--from measures nothing, so it takes no {name}" in capsys.readouterr().err


def test_list(toys, capsys):
    assert main("--list", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*SUITES, "good", "it is not installed"))


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_without_the_extra(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main("--quick", "--plot", "x.png") == 2
    assert f'The benchmark needs {missing}: pip install "kda-core[bench]"' in capsys.readouterr().err


def test_through_kda(toys):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from kda_core import commands

    shown = CliRunner().invoke(commands.app, ["bench", "--help"])
    assert shown.exit_code == 0
    assert "--decay" in shown.output
    refused = CliRunner().invoke(commands.app, ["bench", "--peers", "no_such"])
    assert refused.exit_code == 2


def test_a_process_for_every_shape():
    found = opened("training", "--gate", "all", "--decay", "all", "--backend", "cpu")
    lines = warm.commands(found, {"training": SUITES["training"]})
    told = command.make_parser().parse_args(lines[0][3:])
    assert len(lines) == len(shapes.QUICK_TRAINING)
    assert (told.suites, told.compile, told.backend, told.peers) == (["training"], True, "cpu", "none")
    assert told.gate == regimes.GATES
    assert told.shapes == [shapes.QUICK_TRAINING[0]]


def test_compiling_reports_nothing(toys, capsys):
    assert main("forward", "--compile", "--quick", "--device", "cpu", "--shapes", "1,8,1,8") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("flag", "measured"), [("--warm", True), ("--warm-only", False)])
def test_what_is_measured_after_it(flag, measured, monkeypatch, capsys):
    monkeypatch.setattr(timing, "on_gpu", lambda device: True)
    ran = []
    monkeypatch.setattr(warm, "warm", lambda *_: ran.append("warm"))
    monkeypatch.setattr(run, "_measure", lambda *_: ran.append("measure"))
    monkeypatch.setattr(run, "_pages_missed", lambda *_: [])
    assert main("forward", flag, "--quick", "--device", "cpu", "--peers", "none") == 0
    assert ran == ["warm", "measure"] if measured else ran == ["warm"]


def test_a_process_that_fails_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(warm, "commands", lambda *_: [[sys.executable, "-c", "raise SystemExit('no memory')"]])
    warm.warm(opened("--jobs", "2"), {})
    assert "no memory" in capsys.readouterr().err


def test_json_has_no_infinity():
    found = session.finite({"a": [float("nan"), 1.0], "b": (float("inf"),)})
    assert json.loads(json.dumps(found, allow_nan=False)) == {"a": ["nan", 1.0], "b": ["inf"]}


def test_the_core_does_not_import_it():
    for file in Path(kda_core.__file__).parent.glob("*.py"):
        assert not re.search(r"^(from|import) kda_core\.bench", file.read_text(), re.MULTILINE), file

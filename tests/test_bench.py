"""``kda bench``: its arguments, the regimes of decays, rows, files and plots, and what a broken peer does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("kda_core_cpu")

import kda_core
from kda_core.bench import command, exactness, peers, regimes, session, shapes, speed, timing, warm
from kda_core.bench.suites import SUITES
from kda_core.bench.workload import Problem, Work

CPU = torch.device("cpu")
FP32 = torch.float32
TINY = shapes.Shape(1, 20, 2, 8)
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def problem(mode="inference", shape=TINY, gate="bounded", decay="random") -> Problem:
    return Problem(mode, shape, gate, decay, FP32, FP32)


def opened(*arguments: str) -> session.Session:
    options = command.make_parser().parse_args(["--quick", "--device", "cpu", "--peers", "none", *arguments])
    command.fill_defaults(options)
    return session.open_session(options)


class TestShapes:
    @pytest.mark.parametrize(
        "text",
        [
            "1,8192,96,128",
            "1,64,2,32,16",
            "1,64,2,32:hv=4",
            "1,8192,32,128:packed=16x512:pool",
            "1,9,2,8:packed=3+5+1",
        ],
    )
    def test_round_trip(self, text):
        assert str(shapes.parse(text)) == text

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("1,2,3", "3 sizes"),
            ("1,2,3,x", "invalid literal"),
            ("1,-2,3,4", "sizes of 1 and more"),
            ("1,64,2,32:hv=3", "multiple of H = 2"),
            ("1,64,2,32:packed=3+5", "add up to T = 64"),
            ("2,8,2,32:packed=3+5", "expected B = 1"),
            ("1,64,2,32:pools", "'pools' is no word"),
            ("1,64,2,32:packed=2xx", "too many values"),
        ],
    )
    def test_refused(self, text, why):
        with pytest.raises(ValueError, match=why) as found:
            shapes.parse(text)
        assert text in str(found.value)

    def test_every_set_has_valid_shapes(self):
        for name in (*shapes.SETS, "quick"):
            for training in (False, True):
                for gpu in (False, True):
                    assert all(shapes.parse(str(shape)) == shape for shape in shapes.named(name, training, gpu))


class TestRegimes:
    """Realised decays are those that the regimes promise, for every gate."""

    SIZE = (1, 512, 4, 64)

    def channels(self, gate, decay):
        torch.manual_seed(1)
        raw = regimes.draw(gate, decay, self.SIZE, FP32, CPU)
        found = raw.log_decay()
        assert found.shape == self.SIZE
        assert found.max() <= 0
        if raw.lower_bound is not None:
            assert found.min() >= raw.lower_bound
        return found.mean((0, 1))

    @pytest.mark.parametrize(
        ("gate", "low", "high"), [("bounded", -3.6, -2.6), ("given", -3.6, -2.6), ("softplus", -2.4, -1.2)]
    )
    def test_random(self, gate, low, high):
        assert low < self.channels(gate, "random").mean() < high

    @pytest.mark.parametrize("gate", regimes.GATES)
    def test_slow(self, gate):
        channels = -self.channels(gate, "slow").flatten()
        low, high = regimes.SLOW_DECAY
        assert low * 0.85 < channels.min() < 3 * low
        assert high / 3 < channels.max() < high * 1.15
        # Log-uniform: the logarithms are spread evenly, so the mean is the middle, the deviation range / sqrt(12).
        logs, width = channels.log(), torch.tensor(high / low).log()
        assert abs(logs.mean() - torch.tensor(low * high).sqrt().log()) < 0.08 * width
        assert abs(logs.std() - width / 12**0.5) < 0.05 * width

    def test_a_channel_has_the_mean_that_was_drawn(self):
        """Both gates' biases undo the curvature of the gate: without that means would be off by an eighth."""
        mean, rate = torch.full((1, 3), 0.02), torch.tensor([[1.0, 1.5, 2.5]])
        spread = regimes.SLOW_SPREAD * torch.randn(200_000, 1, generator=torch.Generator().manual_seed(0))
        bounded = 5 * torch.sigmoid(rate * regimes._bounded_bias(mean, rate) + spread)
        softplus = rate * torch.nn.functional.softplus(regimes._softplus_bias(mean, rate) + spread)
        for found in (bounded, softplus):
            assert torch.allclose(found.mean(0), mean[0], rtol=0.02)

    @pytest.mark.parametrize(
        ("gate", "low", "high"), [("bounded", -0.5, -0.004), ("softplus", -1.7, -9e-4), ("given", -1.7, -9e-4)]
    )
    def test_initialised(self, gate, low, high):
        channels = self.channels(gate, "initialised")
        assert low < channels.min() < channels.max() < high

    @pytest.mark.parametrize(("gate", "decay"), [("sigmoid", "slow"), ("bounded", "fast")])
    def test_refused(self, gate, decay):
        with pytest.raises(ValueError, match="expected one of"):
            regimes.draw(gate, decay, self.SIZE, FP32, CPU)


class TestErrors:
    """The slice that is compared: right results pass, wrong ones do not, whatever is cut."""

    SHAPES = (
        TINY,
        shapes.parse("1,20,2,8:hv=4:packed=3+17"),
        shapes.parse("1,20,4,8:packed=3+1+16:pool"),
        shapes.Shape(3, 20, 4, 8),
    )

    @pytest.mark.parametrize("mode", ["inference", "training"])
    @pytest.mark.parametrize("gate", regimes.GATES)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("tokens", [7, 100])
    def test_ours(self, mode, gate, shape, tokens, monkeypatch):
        monkeypatch.setitem(exactness.GRADIENT_TOKENS, "cpu", tokens)
        monkeypatch.setitem(exactness.INFERENCE_TOKENS, "cpu", tokens)
        if mode == "training" and shape.pool:
            pytest.skip("a pool has no gradients")
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

    def test_a_wrong_result_shows(self):
        work = Work(problem("training"), CPU)
        call = peers.Ours("cpu").prepare(work)
        part = exactness.slice_of(work)
        wrong = lambda: {n: x * 1.01 if n == "dA_log" else x for n, x in call().items()}  # noqa: E731
        found = exactness.errors(exactness.results_on_slice(wrong, work, part), exactness.expected(work, part))
        assert found["dA_log"] == pytest.approx(0.01, rel=0.01)
        assert found["dg"] < 2e-5


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


class TestRuns:
    def test_end_to_end(self, toys, tmp_path, capsys):
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
        assert out.count("bounded, random") == 4
        # The same tables and plot from the file.
        plot.unlink()
        assert main("--from", file, "--plot", plot) == 0
        assert capsys.readouterr().out == out
        assert plot.read_bytes()[:4] == PNG

    def test_a_shape_that_fails_does_not_end_the_run(self, tmp_path, monkeypatch, capsys):
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

    def test_a_call_of_ours_that_fails_is_reported(self, tmp_path, capsys):
        line = ("forward", "--quick", "--device", "cpu", "--peers", "none", "--shapes", "1,8,1,8")
        assert main(*line, "--backend", "no_such") == 1
        assert "BackendNotFound" in capsys.readouterr().err

    def test_a_stopped_run_leaves_its_rows(self, tmp_path, monkeypatch):
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
            (("--retune",), "--retune: needs --warm"),
        ],
    )
    def test_bad_arguments(self, toys, line, message, capsys):
        assert main("--device", "cpu", *line) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize("line", [("--gate", "no_such"), ("--shapes", "1,2"), ("--seconds", "0"), ("--decay", "")])
    def test_bad_values(self, line, capsys):
        with pytest.raises(SystemExit) as found:
            main(*line)
        assert found.value.code == 2
        assert line[0] in capsys.readouterr().err

    def test_a_file_of_another_kind(self, tmp_path, capsys):
        file = tmp_path / "found.json"
        file.write_text("[]")
        assert main("--from", file) == 2
        assert "expected JSON that kda bench wrote" in capsys.readouterr().err

    def test_list(self, toys, capsys):
        assert main("--list", "--device", "cpu") == 0
        out = capsys.readouterr().out
        assert all(name in out for name in (*SUITES, "good", "it is not installed"))

    @pytest.mark.parametrize("missing", ["rich", "matplotlib"])
    def test_without_the_extra(self, missing, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, missing, None)
        assert main("--quick", "--plot", "x.png") == 2
        assert f'The benchmark needs {missing}: pip install "kda-core[bench]"' in capsys.readouterr().err

    def test_through_kda(self, toys):
        pytest.importorskip("typer")
        from typer.testing import CliRunner

        from kda_core import commands

        shown = CliRunner().invoke(commands.app, ["bench", "--help"])
        assert shown.exit_code == 0
        assert "--decay" in shown.output
        refused = CliRunner().invoke(commands.app, ["bench", "--peers", "no_such"])
        assert refused.exit_code == 2


class TestPeers:
    def test_reasons_on_a_cpu(self):
        reasons = {peer.name: peer.unavailable(CPU) for peer in peers.every_peer() if peer.name in ("fla", "flash_kda")}
        assert set(reasons.values()) == {"its kernels need a GPU"}

    def test_a_missing_library_names_the_command(self):
        assert peers.import_failure("kda_no_such", "pip install it") == "kda_no_such is not installed: pip install it"

    def test_a_library_that_breaks_at_import(self, tmp_path, monkeypatch):
        (tmp_path / "kda_broken_peer.py").write_text("raise OSError('no driver')")
        monkeypatch.syspath_prepend(tmp_path)
        assert peers.import_failure("kda_broken_peer", "") == "import failed: OSError: no driver"

    @pytest.mark.end_to_end
    @pytest.mark.parametrize("gate", regimes.GATES)
    @pytest.mark.parametrize("mode", ["inference", "training"])
    @pytest.mark.parametrize(
        "peer", [peers.Transformers(), peers.NaiveChunk(), peers.NaiveRecurrent()], ids=lambda p: p.name
    )
    def test_torch_peers_agree_with_the_oracle(self, peer, mode, gate):
        if peer.unavailable(CPU):
            pytest.skip(peer.unavailable(CPU))
        work = Work(problem(mode, shapes.Shape(1, 64, 2, 8), gate), CPU)
        if peer.refuses(work.problem):
            assert mode == "training"
            return
        part = exactness.slice_of(work)
        found = exactness.errors(
            exactness.results_on_slice(peer.prepare(work), work, part), exactness.expected(work, part)
        )
        assert all(error < 2e-4 for error in found.values()), found


class TestPretendedGpu:
    """What is timed on a GPU, on a CPU that pretends: every step runs, and a call that cannot be captured is summed."""

    @pytest.fixture
    def gpu(self, monkeypatch):
        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                pass

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return 2.5

        @contextlib.contextmanager
        def graph(graph, stream):
            yield

        cuda = {
            "Event": Event,
            "Stream": lambda device: None,
            "stream": lambda stream: contextlib.nullcontext(),
            "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),
            "graph": graph,
            "memory_allocated": lambda device: 100,
            "max_memory_allocated": lambda device: 300,
            **dict.fromkeys(("synchronize", "reset_peak_memory_stats", "empty_cache"), lambda *device: None),
        }
        for name, fake in cuda.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(timing, "on_gpu", lambda device: True)
        monkeypatch.setattr(timing, "CACHE", 64)
        monkeypatch.setattr(timing, "kernels", lambda run, device: {"one": 1.5, "two": 0.25})

    @pytest.mark.parametrize("mode", ["inference", "training"])
    def test_a_row(self, gpu, mode):
        found = opened("--profile", "--dtype", "float32")
        found.copy = 1e9
        row = speed.measure(problem(mode), found)
        ours = row["implementations"]["kda_core"]
        assert ours["ms"]["median"] == ours["device_ms"]["median"] == 2.5
        assert ours["device_ms"]["how"] == "graph"
        assert ours["kernels_ms"] == {"one": 1.5, "two": 0.25}
        assert ours["peak_bytes"] == Work(problem(mode), CPU).held_bytes + 200

    def test_a_call_that_cannot_be_captured(self, gpu, monkeypatch):
        def refused(run, device):
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(timing, "capture", refused)
        found = opened()
        found.copy = 1e9
        device_ms = speed.measure(problem(), found)["implementations"]["kda_core"]["device_ms"]
        assert device_ms == {"median": 1.75, "how": "sum of kernels", "why": device_ms["why"]}
        assert "not permitted" in device_ms["why"]


class TestWarming:
    def test_a_process_for_every_shape(self):
        found = opened("training", "--gate", "all", "--decay", "all", "--backend", "cpu")
        lines = warm.commands(found, {"training": SUITES["training"]})
        told = command.make_parser().parse_args(lines[0][3:])
        assert len(lines) == len(shapes.QUICK_TRAINING)
        assert (told.suites, told.compile, told.backend, told.peers) == (["training"], True, "cpu", "none")
        assert told.gate == regimes.GATES
        assert told.shapes == [shapes.QUICK_TRAINING[0]]

    def test_compiling_reports_nothing(self, toys, capsys):
        assert main("forward", "--compile", "--quick", "--device", "cpu", "--shapes", "1,8,1,8") == 0
        assert capsys.readouterr().out == ""

    def test_a_process_that_fails_is_reported(self, monkeypatch, capsys):
        monkeypatch.setattr(warm, "commands", lambda *_: [[sys.executable, "-c", "raise SystemExit('no memory')"]])
        warm.warm(opened("--warm", "--jobs", "2"), {})
        assert "no memory" in capsys.readouterr().err


def test_json_has_no_infinity():
    found = session.finite({"a": [float("nan"), 1.0], "b": (float("inf"),)})
    assert json.loads(json.dumps(found, allow_nan=False)) == {"a": ["nan", 1.0], "b": ["inf"]}


def test_the_core_does_not_import_it():
    for file in Path(kda_core.__file__).parent.glob("*.py"):
        assert not re.search(r"^(from|import) kda_core\.bench", file.read_text(), re.MULTILINE), file


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


class TestGpuAdapters:
    """Peers that need a GPU, with their libraries replaced by our own operator: do the arguments arrive?"""

    SHAPES = (TINY, shapes.parse("1,20,2,8:hv=4:packed=3+17"), shapes.parse("1,20,4,8:packed=3+1+16:pool"))

    @staticmethod
    def chunk_kda(**arguments):
        return kda_core.chunk_kda(**arguments, backend="cpu")

    @pytest.fixture
    def libraries(self, monkeypatch):
        """Modules with the signatures that the adapters were written for."""

        def flash(q, k, v, g, beta, scale, out, *, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens):
            states = {"initial_state": initial_state, "output_final_state": True, "state_v_first": True}
            every = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}
            gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
            rows = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
            o, state = self.chunk_kda(**rows, scale=scale, cu_seqlens=cu_seqlens, **states, **every, **gate)
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
            o, state = self.chunk_kda(**rows, cu_seqlens=cu_seqlens, **options, **gate, **states)
            return o[0], torch.empty(0) if state is None else state

        fakes = {
            "fla": {},
            "fla.ops": {},
            "fla.ops.kda": {"chunk_kda": self.chunk_kda},
            "flash_kda": {"fwd": flash},
            "cudnn": {"__version__": "1.32.0"},
            "cudnn.linear_attention": {"kimi_delta_attention": kimi_delta_attention},
        }
        for name, members in fakes.items():
            module = types.ModuleType(name)
            module.__dict__.update(members)
            monkeypatch.setitem(sys.modules, name, module)

    def errors(self, peer, mode, shape, gate):
        work = Work(problem(mode, shape, gate), CPU)
        part = exactness.slice_of(work)
        return exactness.errors(
            exactness.results_on_slice(peer.prepare(work), work, part), exactness.expected(work, part)
        )

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("gate", regimes.GATES)
    @pytest.mark.parametrize("mode", ["inference", "training"])
    @pytest.mark.parametrize("name", ["fla", "flash_kda", "cudnn-frontend"])
    def test_results(self, libraries, name, mode, gate, shape):
        peer = next(p for p in peers.every_peer() if p.name == name)
        refused = peer.refuses(
            Problem(mode, shapes.Shape(1, 8, 2, 128), gate, "random", torch.bfloat16, torch.bfloat16)
        )
        if refused or (shape.pool and mode == "training") or (shape.HV > shape.H and name != "fla"):
            return
        found = self.errors(peer, mode, shape, gate)
        assert all(error < 2e-5 for error in found.values()), found
        assert "final_state" in found if mode == "inference" else "dv" in found
        if name == "fla" and mode == "training":
            assert "dbeta" in found
            assert gate == "given" or "ddt_bias" in found

    def test_what_they_refuse(self):
        fla, flash, cudnn = peers.every_peer()[:3]
        bf16 = torch.bfloat16
        plain = Problem("inference", shapes.Shape(1, 64, 2, 128), "bounded", "random", bf16, bf16)
        assert [p.refuses(plain) for p in (fla, flash, cudnn)] == [None] * 3
        assert fla.refuses(dataclasses.replace(plain, shape=shapes.Shape(1, 64, 2, 512))) == "K: at most 256, got 512"
        assert flash.refuses(dataclasses.replace(plain, mode="training")) == "it has no backward"
        assert flash.refuses(dataclasses.replace(plain, gate="softplus")) == "it takes the bounded gate only"
        assert cudnn.refuses(dataclasses.replace(plain, gate="softplus")) == "it has no softplus gate"
        assert "beforehand" in cudnn.note(dataclasses.replace(plain, mode="training"))

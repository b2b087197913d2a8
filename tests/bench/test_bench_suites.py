"""The suites ``decode``, ``accuracy``, ``router`` and ``first-call`` of ``kda bench``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("kda_core_cpu")

from kda_core.bench import accuracy, accuracy_report, command, router
from kda_core.plugins import registry
from kda_core.testing.cases import FP32, Case

PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows_of(file: Path, *arguments: str, status: int = 0) -> list[dict]:
    """What a quick run on the CPU without peers wrote."""
    alone = [] if arguments[0] in ("router", "first-call") else ["--peers", "none"]
    line = ["--quick", "--device", "cpu", *alone, "--json", str(file), *arguments]
    assert command.main(line) == status
    return json.loads(file.read_text())["rows"]


def row(case: str, ours: list[dict], theirs: list[dict] | str) -> dict:
    """A row of the suite accuracy out of the errors of every draw."""
    draws = {"kda_core": ours, "fla": theirs}
    right = {
        n: {"errors": accuracy.root_mean_square(x), "draws": x} for n, x in draws.items() if not isinstance(x, str)
    }
    left_out = {n: x for n, x in draws.items() if isinstance(x, str)}
    found = {"suite": "accuracy", "case": case, "dtype": "bfloat16", "by_length": False}
    return found | {"implementations": right, "left_out": left_out}


def content(*rows: dict) -> dict:
    environment = {"device": "a chip", "backend": "its", "versions": {"fla": "0.6.0"}}
    return {"environment": environment, "rows": list(rows), "copy_bytes_per_second": 1e9, "left_out": {}}


@pytest.mark.end_to_end
def test_accuracy_run(tmp_path, capsys):
    """Two draws of a case, to a file, a page and a plot, and read from the file again."""
    file, page, plot = tmp_path / "found.json", tmp_path / "page.md", tmp_path / "found.svg"
    page.write_text(f"before\n{accuracy_report.BEGIN}\nold\n{accuracy_report.END}\nafter\n")
    line = ("accuracy", "--draws", "2", "--only", "gate", "--markdown", str(page), "--plot", str(plot))
    (found,) = rows_of(file, *line)
    assert found["case"] == accuracy.QUICK[0].name
    gradients = {"dq", "dk", "dv", "dg", "dbeta", "dinitial_state", "dA_log", "ddt_bias"}
    assert set(found["implementations"]["kda_core"]["errors"]) == {"o", "final_state"} | gradients
    draws = found["implementations"]["kda_core"]["draws"]
    assert len(draws) == 2
    assert all(0 < error < 1e-5 for draw in draws for error in draw.values())
    first = page.read_text()
    assert f"{accuracy.QUICK[0].name} | float32 | kda_core" in first
    assert "old" not in first
    assert (first.startswith("before\n"), first.endswith("\nafter\n")) == (True, True)
    assert b"<svg" in plot.read_bytes()
    plot.unlink()
    capsys.readouterr()
    assert command.main(["--from", str(file), "--markdown", str(page), "--plot", str(plot)]) == 0
    assert page.read_text() == first
    assert b"<svg" in plot.read_bytes()
    assert accuracy.QUICK[0].name.split(",")[0] in capsys.readouterr().out


def test_a_failure_of_ours_is_reported_and_one_of_a_peer_is_noted():
    def broken(**arguments):
        raise RuntimeError("no kernel")

    case = Case(name="tiny", T=3, H=1, K=4, dtype=FP32, state=FP32, backward=True)
    right = accuracy.measure(case, {"fla": broken}, torch.device("cpu"))
    assert right["left_out"] == {"fla": "RuntimeError: no kernel"}
    assert "failed" not in right
    wrong = accuracy.measure(case, {"kda_core": broken}, torch.device("cpu"))
    assert wrong["failed"] == "RuntimeError: no kernel"
    assert accuracy_report.tables([right | {"implementations": {}}, wrong], content())[0].row_count == 2


def test_the_larger_errors_are_named():
    ours = [{"o": 1e-3, "dq": 2.2e-3}, {"o": 1e-3, "dq": 2e-3}]
    theirs = [{"o": 2e-3, "dq": 2e-3}, {"o": 2e-3, "dq": 2e-3}]
    text = accuracy_report.markdown(content(row("one", ours, theirs), row("two", ours, "fails")))
    # The geometric mean of 1.1 and 1, whose logarithms lie 0.095 apart: a standard error of half of that.
    assert text.splitlines()[-1] == "| one | dq | 1.051 | 1.049 ± 0.048 |"
    assert "| one | bfloat16 | kda_core | 1.0e-03 | 2.1e-03 |" in text
    assert "|  |  | fla | fails | fails |" in text
    assert "root mean square of 2 draws" in text
    assert accuracy_report.compared([row("one", theirs, theirs)]) == []
    worse = accuracy_report.markdown(content(row("one", [{"o": 3e-3}], [{"o": 2e-3}])))
    assert "**3.0e-03**" in worse


def test_an_error_that_is_no_number_is_shown():
    text = accuracy_report.markdown(content(row("one", [{"o": 1e-3}], [{"o": 1e-3}]) | {"case": "a"}))
    assert "nan" not in text
    broken = row("one", [{"o": 1e-3}], [{"o": 1e-3}])
    broken["implementations"]["kda_core"]["errors"]["o"] = "nan"
    assert "**nan**" in accuracy_report.markdown(content(broken))


def test_a_page_without_rows():
    with pytest.raises(ValueError, match="markdown: expected rows of the suite accuracy"):
        accuracy_report.markdown(content())


def test_a_page_without_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no marker")
    with pytest.raises(ValueError, match="markdown: expected <!-- accuracy: begin"):
        accuracy_report.write(page, "text")
    assert page.read_text() == "no marker"


def test_decode_run(tmp_path, capsys):
    plot = tmp_path / "found.png"
    rows = rows_of(tmp_path / "found.json", "decode", "--sizes", "2", "--heads", "2", "--plot", str(plot))
    assert plot.read_bytes()[:4] == PNG
    steps = [row for row in rows if row["sizes"]["T"] == 1]
    assert {(row["state"], row["layout"]) for row in steps} == {
        (dtype, layout) for dtype in ("float32", "bfloat16") for layout in ("K first", "V first")
    }
    for found in steps:
        assert list(found["implementations"]) == ["kda_core", "copy"]
        # Two states of 2 heads, read and written; then q, k, v, g and o of a token each, and beta.
        assert found["state_bytes"] == 2 * 2 * 2 * 32 * 32 * (4 if found["state"] == "float32" else 2)
        assert found["bytes"] - found["state_bytes"] == 4 * (5 * 2 * 2 * 32 + 2 * 2)
    assert all(list(row["implementations"]) == ["kda_core", "chunk_kda"] for row in rows if row["sizes"]["T"] > 1)
    out = capsys.readouterr().out
    assert "one token a sequence" in out
    assert "prefill of short sequences" in out


@pytest.mark.parametrize("name", router.calls())
def test_the_router_is_timed(name):
    backends = [backend.info.name for backend in registry.backends]
    found = router.added_by_the_router(name, batches=2, calls_a_batch=3)
    assert found["public_us"] > found["direct_us"] > 0
    assert found["added_us"] > 0
    # The null backend is gone.
    assert [backend.info.name for backend in registry.backends] == backends


@pytest.mark.end_to_end
def test_router_run(tmp_path, capsys):
    line = ("router", "--batches", "2", "--calls", "3", "--call-limit-us", "0.001")
    rows = rows_of(tmp_path / "found.json", *line, status=1)
    assert {row["case"] for row in rows} == {*router.calls(), "import kda_core after import torch"}
    assert 0 < rows[-1]["processor_ms"][0]
    assert "µs added to a call: " in capsys.readouterr().err


@pytest.mark.end_to_end
def test_memory_run(tmp_path, capsys):
    (found,) = rows_of(tmp_path / "found.json", "memory", "--shapes", "1,2048,4,64")
    # o alone is 2 MiB, and the whole of the inputs is not counted.
    assert 2**21 <= found["implementations"]["kda_core"]["grown_bytes"] < 2**26
    assert "bytes a token and head" in capsys.readouterr().out


@pytest.mark.end_to_end
def test_busy_run(tmp_path, capsys):
    """A busy loop beside one call, both ways to wait; the loop has ended afterwards."""
    rows = rows_of(tmp_path / "found.json", "busy", "--quick")
    assert [row["openmp"] for row in rows] == ["default", "OMP_WAIT_POLICY=passive"]
    assert all(row["busy"] == 1 and 0 < row["ms"]["decoding step [1, 1, 4, 64]"] for row in rows)
    assert "while loops take the cores" in capsys.readouterr().out


@pytest.mark.end_to_end
def test_first_call_run(tmp_path, capsys):
    """Both processes and the steps after them on the CPU, whose backend compiles nothing."""
    rows = rows_of(tmp_path / "found.json", "first-call", "--shapes", "1,70,2,16", "--calls", "3")
    assert [row["backward"] for row in rows] == [False, True]
    assert all(row["seconds"] > 0 and row["kernels"] == 0 for row in rows)
    assert (rows[1]["later_random_T"], rows[1]["later_random_packings"]) == (0, 0)
    assert "0 in 3" in capsys.readouterr().out


@pytest.mark.end_to_end
def test_first_call_of_a_backend_that_is_not_there(tmp_path):
    rows = rows_of(tmp_path / "found.json", "first-call", "--backend", "no_such", status=1)
    assert all("no_such" in row["failed"] for row in rows)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("accuracy", "--only", "no such case"), "only: expected a part of the name of a case"),
        (("decode", "--gate", "bounded"), "--gate: read by none of the suites decode"),
        (("accuracy", "decode", "--one-config"), "goes with the suite accuracy alone"),
        (("first-call", "--shapes", "1,8,2,8:hv=4"), "takes B,T,H,K alone"),
        (("router", "first-call", "--peers", "none"), "--peers: none of the suites stands beside peers"),
    ],
)
def test_bad_arguments(line, message, capsys):
    peers = [] if "first-call" in line else ["--peers", "none"]
    assert command.main([*line, "--device", "cpu", *peers]) == 2
    assert message in capsys.readouterr().err

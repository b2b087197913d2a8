"""The kit's pytest plugin, in runs of pytest within this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import installed
import pytest
import torch

from kda_core import platforms
from kda_core.capabilities import FOREIGN_VARIABLE, Available, Unavailable, runs_on_foreign_device
from kda_core.hookspecs import hookimpl
from kda_core.reference import ReferenceBackend
from kda_core.testing import plugin
from kda_core.testing.plugin import INTERPRETER_VARIABLE, MODE_VARIABLE

TINY = """
from kda_core.capabilities import Feature
from kda_core.testing.cases import named
from kda_core.testing.marks import requires, slow

def test_forward(kda):
    kda.check(named("past a chunk").call())

@slow
def test_long(kda):
    kda.check(named("one chunk").call())

@requires(Feature.CONTEXT_PARALLEL)
def test_never_asked(kda):
    pass

def test_of_no_backend():
    pass
"""


@pytest.fixture(autouse=True)
def tiny(tmp_path):
    """The tests that ``run_inner`` finds."""
    (tmp_path / "test_tiny.py").write_text(TINY)


def test_plugin_reports(run_inner, tmp_path):
    """A named backend: header, summary, JSON; a test that never asked for what it requires fails."""
    status, text = run_inner("--backend=reference", "--kda-report=report.json", "test_tiny.py")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "backend reference" in text
    assert "2 passed" in text
    assert "does not declare CONTEXT_PARALLEL" in text
    assert "1 deselected" in text
    report = json.loads((tmp_path / "report.json").read_text())
    (backend,) = report["backends"]
    assert backend["backend"] == "reference"
    assert backend["coverage"]["length"]["past a chunk"]["state"] == "covered"
    assert backend["coverage"]["layout"]["packed"]["state"] == "not covered"
    assert {e["output"] for e in backend["worst"]} == {"o", "final_state"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend=nowhere",), "backend 'nowhere' is not installed"),
        (("--backend=reference", "--backend=nowhere"), "backend 'nowhere' is not installed"),
    ],
    ids=["alone", "beside another"],
)
def test_plugin_refuses_a_backend_that_cannot_run(run_inner, arguments, message: str):
    status, text = run_inner(*arguments, "test_tiny.py")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert message in text


def test_plugin_fails_when_nothing_ran(run_inner):
    """An explicit run in which no test of the kit ran has not shown anything."""
    status, text = run_inner("--backend=reference", "test_tiny.py", "-k", "no_backend")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "no test of the conformance kit was executed" in text


PLATFORMS = """
import pytest

@pytest.mark.platform("{0}")
def test_elsewhere():
    pass

@pytest.mark.platform("{here}", "{0}")
@pytest.mark.parametrize("x", [0, pytest.param(1, marks=pytest.mark.platform("{1}", "{2}"))])
def test_on_one_of_two(x):
    pass
"""


def test_marker_asks_for_a_platform_when_the_test_runs(run_inner, tmp_path):
    flags, here = platforms.flags(), platforms.this_platform()
    others = [name for name in platforms.platform_names() if not flags[f"IS_{name.upper()}"]]
    # Tests and backends of others ask by these names.
    assert {name: getattr(platforms, name) for name in flags} == flags
    (tmp_path / "test_platforms.py").write_text(PLATFORMS.format(*others, here=here))
    status, text = run_inner("test_platforms.py", "-rs")
    assert status == pytest.ExitCode.OK
    assert "1 passed, 2 skipped" in text
    assert f"test_platforms.py:4: needs {others[0]}, this machine is {here}" in text
    assert f"needs {others[1]} or {others[2]}, this machine is {here}" in text


@pytest.mark.parametrize("names", ["'hopper'", ""])
def test_marker_refuses_unknown_platforms_at_collection(run_inner, tmp_path, names: str):
    file = tmp_path / f"test_unknown_{len(names)}.py"
    file.write_text(f"import pytest\n@pytest.mark.platform({names})\ndef test_elsewhere():\n    pass\n")
    status, text = run_inner(file.name, "--collect-only")
    assert status == pytest.ExitCode.INTERRUPTED
    given = names or "none"
    assert f"test_elsewhere: platform: expected one of {', '.join(platforms.platform_names())}; got {given}" in text


def test_markers_are_described(run_inner):
    status, text = run_inner("--markers")
    assert status == pytest.ExitCode.OK
    assert "@pytest.mark.platform(*names): skip the test on a machine that is none of these: cpu, nvidia" in text


def test_header_says_which_arithmetic_budgets_follow(run_inner, traveller, monkeypatch):
    traveller(device_type="meta")
    monkeypatch.setenv(FOREIGN_VARIABLE, "traveller")
    _, text = run_inner("--backend=traveller", "test_tiny.py", "--collect-only")
    assert re.search(r"backend traveller .* on meta$", text, flags=re.M)
    assert ("budgets: products on meta" in text) == bool(platforms.flushed_below(torch.device("meta"), torch.float16))
    gpu = torch.device("cuda")
    (line,) = plugin._arithmetic(gpu, platforms.flushed_below(gpu, torch.float16, True))
    assert line == "budgets: products on cuda take float16 operands below 6.1e-05 for zero"
    assert plugin._arithmetic(gpu, 0.0) == []


@pytest.mark.parametrize(
    ("mode", "arguments", "passed"),
    [("fast", (), 1), ("slow", (), 1), ("all", (), 2), ("fast", ("-m", "slow"), 1)],
)
def test_plugin_tiers(run_inner, mode: str, arguments: tuple[str, ...], passed: int):
    status, text = run_inner("--backend=reference", "test_tiny.py", "-k", "forward or long", *arguments, mode=mode)
    assert status == pytest.ExitCode.OK, text
    assert f"{passed} passed" in text


def test_plugin_refuses_an_unknown_tier(run_inner):
    status, text = run_inner("test_tiny.py", mode="quick")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert MODE_VARIABLE in text


def test_plugin_without_names_takes_every_backend_but_the_oracle(run_inner):
    status, text = run_inner("test_tiny.py", "-k", "forward")
    assert status == pytest.ExitCode.OK, text
    assert "backend cpu" in text
    assert "backend reference" not in text


def test_plugin_interprets_only_before_triton_is_there(run_inner, monkeypatch):
    monkeypatch.delenv(INTERPRETER_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "triton", object())
    status, text = run_inner("--interpret", "--backend=reference", "test_tiny.py")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert f"set {INTERPRETER_VARIABLE}=1" in text


@pytest.mark.end_to_end
def test_plugin_interprets(run_inner, monkeypatch):
    """With the interpreter switched on, a backend of the CPU alone is tested as ever."""
    monkeypatch.setenv(INTERPRETER_VARIABLE, "1")
    status, text = run_inner("--interpret", "--backend=reference", "test_tiny.py", "-k", "forward")
    assert status == pytest.ExitCode.OK, text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--foreign-device",), "say which backend"),
        (("--foreign-device", "--backend=reference"), "does not declare that it can run on a foreign device"),
        (("--foreign-device", "--backend=reference", "--interpret"), "leave one of the two options out"),
    ],
    ids=["no backend named", "a backend that cannot", "beside the interpreter"],
)
def test_plugin_refuses_a_foreign_device(run_inner, monkeypatch, arguments, message: str):
    monkeypatch.setenv(INTERPRETER_VARIABLE, "1")
    monkeypatch.setenv(FOREIGN_VARIABLE, "")
    status, text = run_inner(*arguments, "test_tiny.py")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert message in text


class Traveller(ReferenceBackend):
    """The oracle under another name: for a device that no machine has, and for any other when it is allowed to."""

    def __init__(self, priority: int | None = None, device_type: str = "cpu") -> None:
        self.priority = priority
        self.device_type = device_type

    @hookimpl
    def kda_core_backend(self):
        changes = {"name": "traveller", "priority": self.priority, "device_types": (self.device_type,)}
        return replace(super().kda_core_backend(), **changes, foreign_device=True)

    @hookimpl
    def kda_core_availability(self, device):
        return Available() if runs_on_foreign_device("traveller") else Unavailable("its device is not here")


@pytest.fixture
def traveller(monkeypatch, registered):
    """Registers a ``Traveller``."""
    monkeypatch.setenv(FOREIGN_VARIABLE, "")
    return lambda **options: registered(Traveller(**options))


def test_plugin_says_how_to_test_without_the_device(run_inner, traveller):
    """Both options are named to whoever tests a backend whose device is not here."""
    traveller()
    status, text = run_inner("--backend=traveller", "test_tiny.py")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "its device is not here" in text
    assert "--interpret" in text
    assert "--foreign-device" in text


@pytest.mark.end_to_end
def test_plugin_tests_on_a_foreign_device(run_inner, traveller):
    traveller()
    status, text = run_inner("--backend=traveller", "--foreign-device", "test_tiny.py", "-k", "forward")
    assert status == pytest.ExitCode.OK, text
    assert "a foreign device" in text


def test_plugin_refuses_a_foreign_device_that_would_serve(run_inner, traveller):
    """On a device that it is not made for, a backend never serves calls that do not name it."""
    traveller(priority=1)
    status, text = run_inner("--backend=traveller", "--foreign-device", "test_tiny.py")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "would serve calls that do not name it" in text


@pytest.mark.end_to_end
def test_plugin_runs_the_installed_suite(run_inner):
    """From any folder: ``--pyargs kda_core.testing.suite``."""
    status, text = run_inner("--pyargs", "kda_core.testing.suite", "--backend=reference", "-k", "test_beta_at_its_ends")
    assert status == pytest.ExitCode.OK, text
    assert "2 passed" in text


@pytest.mark.slow
def test_plugin_gathers_from_workers(run_inner):
    """pytest-xdist: the summary holds what the workers found."""
    installed.need_package("xdist", "pytest-xdist")
    status, text = run_inner("--backend=reference", "-n", "2", "test_tiny.py", "-k", "forward or no_backend")
    assert status == pytest.ExitCode.OK, text
    assert "reference 1.0 on cpu: 1 passed" in text


def pytest_elsewhere(folder, *arguments):
    """pytest with the kit's plugin in a process that starts in a folder, which is not on its path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)}
    program = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main())"
    options = ("-p", "no:cacheprovider", "-p", "kda_core.testing.plugin")
    line = [sys.executable, "-c", program, *options, *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.end_to_end
def test_a_module_in_the_working_folder_takes_no_place_in_a_child_process(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('planted')")
    module, chosen = "kda_core.testing.suite.test_paged_pool", ("-m", "slow", "-k", "first_call and recurrent")
    done = pytest_elsewhere(tmp_path, "--backend=cpu", "--pyargs", module, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.end_to_end
def test_a_report_that_cannot_be_written_is_refused_before_a_test_runs(tmp_path):
    for file in (".", "no/such/folder/x.json"):
        done = pytest_elsewhere(tmp_path, "--kda-report", file)
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert f"--kda-report: expected a file in a folder that exists, got {file}" in done.stderr

"""pytest plugin of the conformance kit: ``pytest -p kda_core.testing.plugin --pyargs kda_core.testing.suite``.

Options: ``--backend=NAME`` (repeatable) names the backends to test; without it every installed one that this
machine can run is tested, the oracle aside. ``--interpret`` runs Triton kernels in Triton's interpreter on the CPU.
``--foreign-device`` tests a named backend on a device that it is not made for, where the backend can do so.
``--kda-report=FILE`` writes the summary as JSON. Tests marked ``slow`` run with ``-m slow``, or with KDA_TEST_MODE=slow
(only those) or KDA_TEST_MODE=all.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("kda_core.testing.suite")

import torch  # noqa: E402

import kda_core  # noqa: E402
from kda_core import platforms  # noqa: E402
from kda_core._plugins import registry  # noqa: E402
from kda_core.capabilities import FOREIGN_VARIABLE, Feature  # noqa: E402
from kda_core.errors import KdaError, UnsupportedCall  # noqa: E402
from kda_core.hookspecs import CONTRACT_VERSION  # noqa: E402
from kda_core.testing.failures import Failures, Outcome, outcome_of  # noqa: E402
from kda_core.testing.interpreter import improve  # noqa: E402
from kda_core.testing.report import BackendReport  # noqa: E402
from kda_core.testing.subject import Refused, Subject  # noqa: E402
from kda_core.testing.targets import Target, find_target  # noqa: E402
from kda_core.testing.tiers import MODE_VARIABLE, MODES, empty_tiers, is_slow, mode, module_of, simplest_first  # noqa: E402

INTERPRETER_VARIABLE = "TRITON_INTERPRET"
ORACLE = "reference"
EMPTY = "kda_core_empty_tiers"

TARGETS = pytest.StashKey[list[Target]]()
NOT_TESTED = pytest.StashKey[list[str]]()
SUBJECT = pytest.StashKey[Subject]()
EMPTY_TIERS = pytest.StashKey[list[str]]()
POSITION = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kda_core", "conformance of kda_core backends")
    default = "without it: every installed one that this machine can run"
    group.addoption("--backend", action="append", metavar="NAME", help=f"test this backend (repeatable); {default}")
    group.addoption("--interpret", action="store_true", help="run Triton kernels in Triton's interpreter, on the CPU")
    foreign = "test the named backends on a device that they are not made for; only those that declare that they can"
    group.addoption("--foreign-device", action="store_true", help=foreign)
    group.addoption("--kda-report", default=None, metavar="FILE", help="write the summary as JSON")


def pytest_configure(config: pytest.Config) -> None:
    report = config.getoption("--kda-report")
    if report is not None and (Path(report).is_dir() or not Path(report).absolute().parent.is_dir()):
        raise pytest.UsageError(f"--kda-report: expected a file in a folder that exists, got {report}")
    config.addinivalue_line("markers", f"slow: runs with -m slow, {MODE_VARIABLE}=slow or {MODE_VARIABLE}=all")
    config.addinivalue_line("markers", "kda_requires(*features): the features of a backend that a test is about")
    known = ", ".join(platforms.platform_names())
    config.addinivalue_line("markers", f"platform(*names): skip the test on a machine that is none of these: {known}")
    if mode() not in MODES:
        raise pytest.UsageError(f"{MODE_VARIABLE}: expected one of {', '.join(MODES)}, got {mode()!r}")
    if config.getoption("interpret"):
        _switch_interpreter_on()
    if config.getoption("foreign_device"):
        _allow_foreign_device(config)
    config.stash[TARGETS], config.stash[NOT_TESTED] = _targets(config)
    if config.getoption("interpret"):
        improve()
    config.stash[EMPTY_TIERS] = []


def _switch_interpreter_on() -> None:
    if os.environ.get(INTERPRETER_VARIABLE) == "1":
        return
    if "triton" in sys.modules:
        raise pytest.UsageError(
            f"--interpret: triton was imported before this plugin could set {INTERPRETER_VARIABLE}=1; set it yourself"
        )
    os.environ[INTERPRETER_VARIABLE] = "1"


def _allow_foreign_device(config: pytest.Config) -> None:
    """Let the named backends run on any device; they look when they are loaded."""
    names = config.getoption("backend")
    if names is None:
        raise pytest.UsageError("--foreign-device: say which backend, with --backend=NAME")
    if config.getoption("interpret"):
        raise pytest.UsageError("--foreign-device: the interpreter runs on the CPU; leave one of the two options out")
    os.environ[FOREIGN_VARIABLE] = ",".join(dict.fromkeys(names))


def _targets(config: pytest.Config) -> tuple[list[Target], list[str]]:
    """The backends to test, and why others that nobody named are not tested."""
    interpret, foreign = config.getoption("interpret"), config.getoption("foreign_device")
    names = config.getoption("backend")
    if names is not None:
        try:
            return [find_target(name, interpret, foreign) for name in dict.fromkeys(names)], []
        except KdaError as error:
            ways = _other_ways(names, interpret or foreign) if isinstance(error, UnsupportedCall) else ""
            raise pytest.UsageError(f"--backend: {error}{ways}") from None
    targets, left_out = [], []
    for name in (backend.info.name for backend in registry.backends if backend.info.name != ORACLE):
        try:
            targets.append(find_target(name, interpret))
        except UnsupportedCall as error:
            left_out.append(str(error))
    return targets, left_out


def _other_ways(names: list[str], chosen: bool) -> str:
    """A hint how to test backends without their device; "" if such an option was given."""
    if chosen:
        return ""
    ways = "; --interpret runs kernels that are written in Triton on the CPU"
    if any(registry.named(name).info.foreign_device for name in names):
        ways += ", --foreign-device runs them on whatever accelerator there is"
    return ways


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [
        f"kda-core {kda_core.__version__} (contract {CONTRACT_VERSION}), torch {torch.__version__}, "
        f"Python {platform.python_version()}, {mode()} tests"
    ]
    if any(t.interpreted for t in config.stash[TARGETS]):
        lines.append("interpreted: one repeat of a call, fewer lengths and random calls, no count of compilations")
    for t in config.stash[TARGETS]:
        info = registry.named(t.backend).info
        how = ", interpreted" * t.interpreted + ", a foreign device" * t.foreign
        lines.append(f"backend {info.name} {info.version} (contract {info.contract}) on {_device_name(t.device)}{how}")
        lines += _arithmetic(t.device, platforms.flushed_below(t.device, torch.float16))
    return lines + [f"not tested: {why}" for why in config.stash[NOT_TESTED]]


def _arithmetic(device: torch.device, below: float) -> list[str]:
    """A line on the products that budgets follow, where they are unlike those of a CPU."""
    return [f"budgets: products on {device} take float16 operands below {below:.1e} for zero"] if below else []


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return f"{device} ({name(device)})" if name is not None else str(device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kda" in metafunc.fixturenames:
        targets = metafunc.config.stash[TARGETS]
        metafunc.parametrize("kda", targets, ids=[t.backend for t in targets], indirect=True)


@pytest.fixture
def kda(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """The backend under test."""
    about = {name for mark in request.node.iter_markers("kda_requires") for name in mark.args}
    subject = Subject(request.param, [Feature[name] for name in about])
    request.node.stash[SUBJECT] = subject
    yield subject
    if request.node.get_closest_marker("slow"):
        # A slow test may hold most of a device's memory, which other processes need.
        getattr(torch.get_device_module(subject.device), "empty_cache", lambda: None)()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("platform"):
        if not any(platforms.is_platform(name) for name in mark.args):
            reason = f"needs {' or '.join(mark.args)}, this machine is {platforms.this_platform()}"
            raise pytest.skip.Exception(reason, _use_item_location=True)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Iterator[Any]:
    found = yield
    known = platforms.platform_names()
    for item in found if isinstance(found, list) else ():
        for mark in item.iter_markers("platform"):
            if not mark.args or not set(mark.args) <= set(known):
                given = ", ".join(map(repr, mark.args)) or "none"
                raise collector.CollectError(f"{item.name}: platform: expected one of {', '.join(known)}; got {given}")
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[EMPTY_TIERS] = empty_tiers(config, items)
    items[:] = simplest_first(items)
    for position, item in enumerate(items):
        item.stash[POSITION] = position
    if mode() == "all" or "slow" in (config.getoption("markexpr") or ""):
        return
    wanted = mode() == "slow"
    if dropped := [item for item in items if is_slow(item) != wanted]:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if is_slow(item) == wanted]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        yield
    except Refused as refusal:
        raise pytest.skip.Exception(str(refusal), _use_item_location=True) from None
    subject = item.stash.get(SUBJECT, None)
    if subject is None:
        return
    wanted = {name for mark in item.iter_markers("kda_requires") for name in mark.args}
    closed = wanted - {f.name for f in subject.info.capabilities.features}
    refused = {name for record in subject.records if record.status == "refused" for name in record.features}
    if closed - refused:
        raise AssertionError(
            f"the test passed, though {subject.name!r} does not declare {', '.join(sorted(closed - refused))}: "
            "either the backend serves what it does not declare, or the test never asked for it"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    subject = item.stash.get(SUBJECT, None)
    if subject is not None and report.when == "call":
        # pytest-xdist sends plain attributes from its workers to the process that reports.
        report.kda_core = {
            "backend": subject.name, "device": str(subject.device), "records": [asdict(r) for r in subject.records],
            "test": _name_for_pytest(item), "position": item.stash[POSITION], "slow": is_slow(item),
        }  # fmt: skip
    return report


def _name_for_pytest(item: pytest.Item) -> str:
    """The argument that runs a test again; for the kit's tests it works from any folder."""
    module = module_of(item)
    return f"{module}::{item.name}" if module.startswith("kda_core.testing.suite.") else item.nodeid


class _Gatherer:
    """The part of the plugin that runs only in the reporting process, not in pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.reports: dict[str, BackendReport] = {}
        self.outcomes: dict[str, list[Outcome]] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist ends; it collected items that this process did not."""
        self.config.stash[EMPTY_TIERS] = getattr(node, "workeroutput", {}).get(EMPTY, self.config.stash[EMPTY_TIERS])

    def failures(self, name: str) -> Failures:
        """The failures on a backend."""
        options = [f"--{o}" for o in ("interpret", "foreign-device") if self.config.getoption(o.replace("-", "_"))]
        return Failures(name, self.outcomes.get(name, []), tuple(options))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found: dict[str, Any] | None = getattr(report, "kda_core", None)
        if found is None:
            return
        name = found["backend"]
        if name not in self.reports:
            self.reports[name] = BackendReport(registry.named(name).info, found["device"])
        self.reports[name].add(report.outcome, found["records"])
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if report.failed and crash is not None else ""
        self.outcomes.setdefault(name, []).append(outcome_of(found, report.failed, message))

    def problems(self) -> list[str]:
        """Why the run fails although no test failed."""
        explicit = self.config.getoption("backend") or []
        found = [*self.config.stash[EMPTY_TIERS]]
        for name in dict.fromkeys(explicit):
            report = self.reports.get(name)
            if report is None or not report.outcomes.keys() & {"passed", "failed"}:
                found.append(f"--backend={name}: no test of the conformance kit was executed")
        for name, report in self.reports.items():
            for feature in report.never_served():
                found.append(f"{name} declares {feature}, and turned down every call that needs it")
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.getoption("collectonly"):
            return
        file = self.config.getoption("kda_report")
        if file is not None:
            backends = [r.as_json() | {"failures": self.failures(n).as_json()} for n, r in self.reports.items()]
            content = {
                "kda_core": kda_core.__version__, "contract": str(CONTRACT_VERSION), "torch": torch.__version__,
                "mode": mode(), "problems": self.problems(), "backends": backends,
            }  # fmt: skip
            Path(file).write_text(json.dumps(content, indent=2) + "\n")
        if self.problems() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.config.getoption("collectonly"):
            return
        problems = self.problems()
        if self.reports or problems:
            terminalreporter.section("kda_core conformance")
        for name, report in self.reports.items():
            for line in report.lines():
                terminalreporter.line(line)
            for line in self.failures(name).lines():
                terminalreporter.line(line, red=True)
        for problem in problems:
            terminalreporter.line(f"ERROR: {problem}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[EMPTY] = session.config.stash[EMPTY_TIERS]


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Gatherer(session.config), "kda_core_gatherer")

"""The conformance kit's fast tier on the mutants (``mutants.py``), and its slow tests of addresses on a few.

``python tests/support/run_mutants.py FILE [NAME ...]`` tests the named mutants (all, and a faultless control, without
names); a mutant that failed a test is not tested further. NAME=TEST runs that test only. FILE gets, as JSON, the test
that found each.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from pathlib import Path

import draft_mutants
import layer_mutants
import memory_mutants
import mutants
import pytest
import quiet_mutants
import rare_mutants
import stride_mutants
import torch
from mutants import Faultless, Mutant

from kda_core._plugins import registry
from kda_core.testing import suite
from kda_core.testing.subject import Refused


class StopTesting:
    """Leaves a backend alone once one of its tests has failed, and remembers which test that was.

    Args:
        only: the one test to run, by the backend's name.
    """

    def __init__(self, only: dict[str, str]) -> None:
        self.found: dict[str, str] = {}
        self.only = only

    def _backend(self, item: pytest.Item) -> str:
        return item.callspec.params["kda"].backend

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        name = self._backend(item)
        if name in self.found or self.only.get(name, item.originalname) != item.originalname:
            pytest.skip("found already, or not asked for")

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        if call.when == "call" and call.excinfo is not None and not call.excinfo.errisinstance(SKIPS):
            self.found.setdefault(self._backend(item), item.name)


# Cheap modules that tell much go first, then every other one that is the first to find something.
FIRST = (
    "test_options", "test_records", "test_layer", "test_paged_pool", "test_state", "test_gates",
    "test_backward", "test_graphs", "test_packing", "test_determinism", "test_extremes", "test_pool_options",
)  # fmt: skip
SKIPS = (pytest.skip.Exception, Refused)
OPTIONS = (
    "-p", "kda_core.testing.plugin", "-p", "no:cacheprovider", "-q", "--tb=short", "--no-header", "-rN", "--pyargs",
)  # fmt: skip


MODULES = (mutants, quiet_mutants, rare_mutants, stride_mutants, memory_mutants, draft_mutants, layer_mutants)


def every_mutant() -> list[type[Mutant]]:
    """All mutants, the control aside."""
    classes = [c for module in MODULES for c in vars(module).values() if isinstance(c, type) and issubclass(c, Mutant)]
    return [c for c in dict.fromkeys(classes) if c not in (Mutant, Faultless) and not vars(c).get("abstract")]


def run(subjects: list[Mutant], only: dict[str, str]) -> dict[str, str]:
    """The test of the kit that found each, by the mutant's name.

    Module by module, so that what was found is not even collected any more.
    """
    stop = StopTesting(only)
    fast, slow = ([subject for subject in subjects if subject.slow == wanted] for wanted in (False, True))
    rest = sorted({m.name for m in pkgutil.iter_modules(suite.__path__)} - set(FIRST))
    for module in (*FIRST, *rest):
        _run_module(module, [subject for subject in fast if subject.name not in stop.found], stop)
    _run_module("test_addressing", slow, stop, "-m", "slow")
    return stop.found


def _run_module(module: str, subjects: list[Mutant], stop: StopTesting, *options: str) -> None:
    if not subjects:
        return
    backends = [f"--backend={subject.name}" for subject in subjects]
    status = pytest.main([*OPTIONS, f"{suite.__name__}.{module}", *options, *backends], plugins=[stop])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{module}: pytest ended with {status!r}")


def main(file: str, names: list[str]) -> None:
    """Run the kit on the named mutants, or on all and the control, and write what was found."""
    registry.load()
    torch.set_num_threads(1)
    only = dict(name.split("=") for name in names if "=" in name)
    chosen = {name.split("=")[0] for name in names}
    subjects = [subject for cls in [Faultless, *every_mutant()] if (subject := cls()).name in chosen or not names]
    for subject in subjects:
        entry = registry.register(subject)
        if entry.state != "loaded":
            raise RuntimeError(f"{subject.name}: {entry.state}: {entry.reason}")
    Path(file).write_text(json.dumps(run(subjects, only), indent=2))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

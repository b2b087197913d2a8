"""Loads the conformance kit's plugin, and leaves end-to-end tests to runs that ask for them."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
from thread_limit import limit_threads

# Before torch loads its OpenMP, and for child processes: threads that spin while they wait take a busy machine's cores
# from those that work (docs/cpu.md).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Imports, compilers and syntax trees make millions of objects that stay; collecting every 700 took a tenth of a run.
gc.set_threshold(20_000, 50, 20)

pytest_plugins = ["kda_core.testing.plugin"]

END_TO_END_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.end_to_end\b", flags=re.M)
"""How a file says that all its tests are end-to-end."""

LONGEST = ("nvidia", "amd", "kit")
"""Folders whose end-to-end tests take longest. They begin first, so that no worker waits long for the last file."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "end_to_end: builds wheels, environments or kernels, or drives other processes; "
        "runs with -m end_to_end, when its file is named, or with KDA_TEST_MODE=slow or all",
    )
    limit_threads(config)


def _wants_end_to_end(config: pytest.Config) -> bool:
    return "end_to_end" in (config.getoption("markexpr") or "") or os.environ.get("KDA_TEST_MODE") in ("slow", "all")


def _named_files(config: pytest.Config) -> set[Path]:
    here = config.invocation_params.dir
    return {Path(here, str(argument).partition("::")[0]) for argument in config.invocation_params.args}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of end-to-end tests only are not even imported: some import minutes of other libraries."""
    if collection_path.suffix != ".py" or _wants_end_to_end(config) or collection_path in _named_files(config):
        return None
    return True if END_TO_END_FILE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_finish() -> None:
    """Imported modules stay: the garbage collector need not look at it again and again, seconds of a run."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _wants_end_to_end(config):
        items.sort(key=lambda item: item.path.parent.name not in LONGEST)
        return
    named = _named_files(config)
    dropped = [item for item in items if item.get_closest_marker("end_to_end") is not None and item.path not in named]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        left_out = set(dropped)
        items[:] = [item for item in items if item not in left_out]

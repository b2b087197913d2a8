"""pytest plugin: note every outcome at once, and leave out tests that an earlier run noted as passed or skipped.

    KDA_NOTES=fast.jsonl pytest -p noted ...

A stopped run keeps its outcomes, and the next run continues. Each line
of the file is a JSON object: {"collected": number}, or "test", "outcome" and "seconds", and "message" unless it passed.
Tests are known by their file's name without its folder: an installed suite may move.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "KDA_NOTES"
MESSAGE = 4000
"""Most characters of a message; its end is kept."""


def read(path: Path) -> list[dict[str, Any]]:
    """The notes of a file, without an incomplete last line; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def write(path: Path, note: dict[str, Any]) -> None:
    """Add a note."""
    with path.open("a") as file:
        file.write(json.dumps(note) + "\n")


def done(notes: list[dict[str, Any]]) -> set[str]:
    """Tests that need no other run."""
    return {note["test"] for note in notes if note.get("outcome") in ("passed", "skipped")}


def _path() -> Path:
    return Path(os.environ[VARIABLE])


def _name(nodeid: str) -> str:
    return nodeid.rsplit("/", 1)[-1]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    notes = read(_path())
    before = done(notes)
    left_out = [item for item in items if _name(item.nodeid) in before]
    left = [item for item in items if _name(item.nodeid) not in before]
    # Workers of pytest-xdist all collect the same tests; the process that reports collects none.
    worker = getattr(config, "workerinput", {}).get("workerid", "gw0")
    if worker == "gw0" and not any("collected" in note for note in notes):
        write(_path(), {"collected": len(items)})
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = left


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Notes())


class _Notes:
    """The part of the plugin that runs only in the reporting process, not in pytest-xdist's workers."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        note = {"test": _name(report.nodeid), "outcome": report.outcome, "seconds": round(report.duration, 1)}
        if report.failed:
            note["message"] = report.longreprtext[-MESSAGE:]
        elif report.skipped:
            note["message"] = str(report.longrepr)[-MESSAGE:]
        write(_path(), note)

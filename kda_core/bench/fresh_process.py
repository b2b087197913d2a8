"""Measurements in a fresh process: of a first call, of memory, and of variables that are read at start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SCRIPT = "import json, sys; from kda_core.bench.{} import child; print(json.dumps(child(json.loads(sys.argv[1]))))"


class ProcessFailed(Exception):
    """A process ended with an error; the message is the last line that it wrote."""


def run(line: list[str], environment: Mapping[str, str] | None = None) -> str:
    """The last line of a process's output.

    Raises:
        ProcessFailed: its exit status is not 0.
    """
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProcessFailed((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return (done.stdout.splitlines() or [""])[-1]


def measure(module: str, options: dict[str, Any], environment: Mapping[str, str] | None = None) -> Any:
    """Call ``child(options)`` of ``kda_core.bench.<module>`` in a fresh process; options and result pass as JSON.

    Raises:
        ProcessFailed: the call failed.
    """
    return json.loads(run([sys.executable, "-c", SCRIPT.format(module), json.dumps(options)], environment))

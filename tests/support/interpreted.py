"""Programs in processes of their own: Triton looks whether it is to interpret when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FROM_OUTSIDE = ("TRITON_INTERPRET", "KDA_FOREIGN_DEVICE", "KDA_BACKEND")
"""Variables of kernels and backends that tests may not inherit from a shell."""


SUPPORT = str(Path(__file__).parent)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run python with these arguments and environment variables; it can import what lies beside this file."""
    clean = {name: value for name, value in os.environ.items() if name not in FROM_OUTSIDE}
    path = os.pathsep.join(filter(None, [SUPPORT, clean.get("PYTHONPATH")]))
    settings = clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment
    return subprocess.run([sys.executable, *arguments], env=settings, capture_output=True, text=True, timeout=600)


def printed(*arguments: str) -> Any:
    """The last line, JSON, that python prints when it is called with these arguments where Triton interprets.

    Raises:
        AssertionError: it failed; says what it wrote to stderr.
    """
    done = python(*arguments, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

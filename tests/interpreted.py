"""Programs in processes of their own, where Triton interprets: it looks for that when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def printed(*arguments: str) -> Any:
    """What python, called with these arguments, prints last, as JSON.

    Raises:
        AssertionError: it failed; says what it wrote to stderr.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

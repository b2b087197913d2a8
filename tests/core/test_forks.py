"""A child that is forked while other threads are inside kda_core works: no lock of ours is left locked in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from interpreted import SUPPORT, python

PROGRAM = str(Path(SUPPORT, "forks.py"))

pytestmark = [pytest.mark.end_to_end, pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")]


def endings(*arguments: str) -> dict[str, int]:
    done = python(PROGRAM, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_children_forked_while_threads_call_answer():
    assert endings("calling", "40") == {"well": 40}


def test_a_child_forked_while_a_thread_loads_backends_waits_for_no_lock():
    assert endings("loading") == {"well": 1}

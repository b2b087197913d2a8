"""What ``import kda_core`` loads and starts, each time in a fresh process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from environments import run

pytestmark = pytest.mark.end_to_end

HERE = Path(__file__).parent
NOT_FOR_THE_CORE = ("hypothesis", "matplotlib", "pytest", "rich", "transformers", "triton", "typer")

# Prints the top-level modules that a statement loads beyond those of torch, and whether a device was started.
OBSERVED = """
import json, sys, torch
before = set(sys.modules)
{statement}
new = sorted({{m.partition('.')[0] for m in set(sys.modules) - before}})
print(json.dumps([new, torch.cuda.is_initialized()]))
"""
CALL = """
import torch, kda_core
q = torch.zeros(1, 2, 1, 4)
kda_core.chunk_kda(q, q, q, q, torch.zeros(1, 2, 1), backend="reference")
"""


def last_line(program: str) -> str:
    # Not in the checkout, whose kda_core would be taken instead of the installed one.
    return run(sys.executable, "-c", program, cwd=HERE).splitlines()[-1]


def observed(statement: str) -> tuple[set[str], bool]:
    modules, device_started = json.loads(last_line(OBSERVED.format(statement=statement)))
    return set(modules), device_started


@pytest.fixture(scope="module")
def after_import():
    return observed("import kda_core, kda_core.platforms")


def test_the_import_loads_no_compiler_and_no_extra(after_import):
    assert after_import[0].isdisjoint(NOT_FOR_THE_CORE)


def test_the_import_starts_no_device(after_import):
    assert after_import[1] is False


def test_the_import_loads_no_backend_wheel(after_import):
    assert not [m for m in after_import[0] if m.startswith("kda_core_")]


def test_the_first_call_loads_every_backend_wheel_and_none_of_their_kernels():
    """The oracle was named, so that the wheels were asked for their identity cards and for nothing else."""
    modules, device_started = observed(CALL)
    assert modules.isdisjoint(NOT_FOR_THE_CORE)
    assert device_started is False


def test_the_core_works_where_triton_cannot_be_imported():
    assert last_line(f"import sys; sys.modules['triton'] = None\n{CALL}\nprint('served')") == "served"

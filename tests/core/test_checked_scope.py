"""KDA_CHECK and checked_calls(): which calls are checked, and that nothing is on the way when off."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import mutants
import pytest
import torch
from checked import inputs, registered

import kda_core
from kda_core import CheckFailed, CheckWarning, _cli, _loaded
from kda_core._plugins import registry
from kda_core.request import Request
from kda_core.testing import call_checks

pytestmark = pytest.mark.usefixtures("one_thread")


def test_outside_of_the_block_nothing_is_checked():
    x = inputs()
    with registered(mutants.ScaleIgnored) as name, torch.no_grad():
        kda_core.chunk_kda(**x, scale=0.5, backend=name)
        with kda_core.checked_calls():
            with kda_core.checked_calls(warn=True), pytest.warns(CheckWarning):
                kda_core.chunk_kda(**x, scale=0.5, backend=name)
            with pytest.raises(CheckFailed):
                kda_core.chunk_kda(**x, scale=0.5, backend=name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kda_core.chunk_kda(**x, scale=0.5, backend=name)
    assert _loaded.watch is None
    hook = registry.named("cpu")._callers["kda_core_chunk_forward"] if registry.named("cpu")._callers else None
    assert hook is None or hook.__module__.startswith("kda_core_cpu")


def test_a_call_that_is_captured_is_not_checked_and_says_so():
    backend, request = registry.named("cpu"), Request(op="chunk_kda", scale=1.0, **inputs())
    assert not call_checks.left_unchecked(backend, request)
    with pytest.warns(CheckWarning, match=r"^chunk_kda on 'cpu' was not checked: the stream is being captured"):
        assert call_checks.left_unchecked(backend, request, lambda device: True)


def test_other_threads_are_checked_too():
    caught = []

    def work(name):
        try:
            with torch.no_grad():
                kda_core.chunk_kda(**inputs(), scale=0.5, backend=name)
        except CheckFailed as error:
            caught.append(error)

    with registered(mutants.ScaleIgnored) as name, kda_core.checked_calls():
        threads = [threading.Thread(target=work, args=(name,)) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert len(caught) == 2


@pytest.mark.parametrize(("elements", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_wrong_limit_is_refused(elements, error):
    with pytest.raises(error, match=r"^elements: expected"), kda_core.checked_calls(elements=elements):
        pass


PROGRAM = """
import sys, torch, kda_core
q = torch.ones(1, 3, 1, 4)
q[0, 1, 0, 2] = float("nan")
ones = torch.ones(1, 3, 1, 4)
o, _ = kda_core.chunk_kda(q, ones, ones, -ones, ones[..., 0])
print(o.isnan().any().item(), "kda_core.testing" in sys.modules, "pytest" in sys.modules)
"""


def in_fresh_process(asked):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KDA_")}
    environment |= {} if asked is None else {"KDA_CHECK": asked}
    here = Path(__file__).parent
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.end_to_end
def test_where_the_environment_asks_for_nothing_nothing_is_checked_and_no_kit_is_loaded():
    off = in_fresh_process(None)
    assert off.stdout.split() == ["True", "False", "False"], off.stderr


@pytest.mark.end_to_end
def test_the_environment_may_ask_for_errors():
    on = in_fresh_process("1")
    assert "kda_core.errors.CheckFailed: chunk_kda, forward, on backend 'cpu'" in on.stderr
    assert "q: nan at [0, 1, 0, 2] (token 1 of sequence 0)" in on.stderr


@pytest.mark.end_to_end
def test_the_environment_may_ask_for_warnings_and_nothing_else():
    warned = in_fresh_process("warn")
    assert "CheckWarning" in warned.stderr
    assert warned.stdout.split() == ["True", "True", "False"]
    assert in_fresh_process("0").stdout.split() == ["True", "False", "False"]
    wrong = in_fresh_process("yes")
    assert "ValueError: KDA_CHECK: expected 0, 1 or warn, got 'yes'" in wrong.stderr


def test_the_variables_are_listed():
    assert {"KDA_CHECK", "KDA_CHECK_DUMP"} <= _cli.ENVIRONMENT_VARIABLES.keys()

"""Any value of any option of ``kda`` ends in results or in one line that says what is wrong, never in a traceback."""

from __future__ import annotations

import contextlib
import io
import math
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from installed import need_package

need_package("typer")
need_package("rich")

import typer.main

from kda_core import _commands

KDA = typer.main.get_command(_commands.app)
COMMANDS = KDA.commands
OPTIONS = [(c, o.opts[0]) for c, command in COMMANDS.items() for o in command.params if not o.is_flag]
# Calls that end soon, should a value be right. No size between these: a call of it could be made, and would take long.
QUICK = {"bench": {"--seconds": "1e-9", "--shape": "1,1,1,16", "--device": "cpu"}, "verify": {"--backend": "nope"}}
SIZES = st.sampled_from([0, 1, 2, -1, 16, 2**45, 2**61, 2**62, 2**63 - 1, 2**63, 10**25])
LISTS = st.lists(SIZES, min_size=1, max_size=6).map(lambda sizes: ",".join(map(str, sizes)))
WORDS = st.sampled_from(["nan", "inf", "-inf", "1e400", "cuda:999999999999", "xpu:-1", "[bold]", "[/]", "\\[", "~"])
VALUES = st.text(max_size=20) | LISTS | WORDS | SIZES.map(str) | st.floats().map(str)


def ended(*arguments: str) -> tuple[int, str, str]:
    """Exit status and what was written. typer's own runner makes the commands again, which takes longest."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        KDA.main(list(arguments), prog_name="kda")
    return left.value.code, out.getvalue(), err.getvalue()


def check(command: str, option: str, value: str) -> None:
    arguments = QUICK.get(command, {}) | {option: value}
    status, out, err = ended(command, *(f"{name}={given}" for name, given in arguments.items()))
    assert status in (0, 1, 2), value
    assert "Traceback" not in out + err
    assert "frame #" not in out + err
    if status == 2:
        # Before its one line click shows the usage.
        told = [line for line in err.splitlines() if line and not line.startswith(("Usage:", "Try "))]
        assert len(told) == 1, err


@pytest.mark.parametrize(("command", "option"), OPTIONS)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES)
@example(value="99999999999999999999,1,1,1,1")
@example(value="9999999999999,9999999,9,9,9")
@example(value="4611686018427387904,1,2,2")
@example(value="99999999999999999999")
@example(value="")
@example(value="[cli]")
def test_no_value_of_an_option_ends_in_a_traceback(command, option, value):
    if (command, option) == ("bench", "--seconds"):
        with contextlib.suppress(ValueError):
            assume(not 1e-3 < float(value) < math.inf)
    check(command, option, value)


@pytest.mark.parametrize("option", [option for command, option in OPTIONS if command == "explain"])
@pytest.mark.parametrize("more", [{"--plan": True}, {"--slots": "3"}, {"--varlen": "0,1"}])
def test_no_value_beside_others_ends_in_a_traceback(option, more):
    given = [name if value is True else f"{name}={value}" for name, value in more.items()]
    for value in ("99999999999999999999", "0", "-1", "1,2,3,4,5", "nvidia", "x"):
        assert ended("explain", *given, f"{option}={value}")[0] in (0, 1, 2)


@pytest.mark.end_to_end
@pytest.mark.parametrize("command", ["info", "explain"])
def test_a_wrong_variable_is_told_in_one_line(command, tmp_path):
    environment = os.environ | {"KDA_CHECK": "yes", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path[1:]))}
    line = [sys.executable, "-m", "kda_core", command]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "KDA_CHECK: expected 0, 1 or warn, got 'yes'\n"

"""``benchmarks/stacks.py`` on a CPU, with a stack that is kda_core itself: its calls, their errors, and its rows."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("kda_core_cpu")

import stacks

import kda_core


def call(x: stacks.Work, i: int, wrong: bool = False):
    """A call on a copy of its states; ``wrong`` ones see another key of the last token."""
    k = x.k.clone()
    k[:, -1] += wrong
    given = {"q": x.q, "k": k, "v": x.v, "g": x.g, "beta": x.beta, "A_log": x.A_log, "dt_bias": x.dt_bias}
    given |= {**stacks.RAW, "lower_bound": x.lower_bound, "cu_seqlens": x.bounds}
    o, states = kda_core.fused_recurrent_kda(**given, initial_state=x.pool[x.first[i].long()])
    return o, states[:, None]


def rows(tmp_path, theirs) -> list[dict]:
    file = tmp_path / "found.json"
    sizes = ("--heads", "2", "--channels", "16", "--cases", "2x1", "2x3", "1x70", "--gates", "softplus", "bounded")
    sizes += ("--turns", "1")
    status = stacks.main(["--device", "cpu", *sizes, "--json", str(file)], {"other": lambda device: (call, theirs)})
    found = json.loads(file.read_text())["rows"]
    assert status == any("failed" in row for row in found)
    assert len(found) == 6
    return found


@pytest.mark.end_to_end
@pytest.mark.parametrize("wrong", [False, True])
def test_errors_tell_a_wrong_side_from_a_right_one(tmp_path, wrong):
    for row in rows(tmp_path, lambda x, i: call(x, i, wrong)):
        ours, theirs = (row["implementations"][name] for name in ("kda_core", "other"))
        assert ours["errors"]["o"] < 3e-3
        assert ours["errors"]["final_state"] < 1e-6
        assert (theirs["errors"]["final_state"] > 1e-2) == wrong
        assert ours["ms"]["median"] > 0


def test_a_side_that_fails_fails_the_row_and_not_the_run(tmp_path):
    def broken(x, i):
        raise RuntimeError("no kernel")

    assert all(row["failed"] == "RuntimeError: no kernel" for row in rows(tmp_path, broken))


def test_states_and_values_are_those_of_the_first_call_again():
    """Each side of the comparison starts from the same pool, whatever the one before it wrote."""

    def writes(x, i):
        o, states = call(x, i)
        x.pool[x.slots[i, :, -1].long()] = states[:, -1]
        x.v.zero_()
        return o, None

    options = stacks.Namespace(heads=2, channels=16, device=torch.device("cpu"))
    x = stacks.Work(2, 70, "bounded", options)
    found = stacks.measure(x, {"first": writes, "second": writes}, turns=1)
    assert found["first"]["errors"] == found["second"]["errors"]
    assert found["first"]["errors"]["final_state"] < 1e-6

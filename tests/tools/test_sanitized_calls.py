"""The program that runs under compute-sanitizer tells right from wrong, and makes the calls that it lists."""

from __future__ import annotations

import sys

import installed
import pytest
import sanitized_calls

from kda_core.testing.subject import Mismatch

installed.need_backend("cpu")

pytestmark = pytest.mark.end_to_end


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sanitized_calls.py", "--backend", "cpu", *arguments])
    return sanitized_calls.main()


@pytest.mark.parametrize("only", ["K 20 V 16", "draft True", "kda_gate", "descriptors 64", "packed torch.float16 64"])
def test_calls_are_right(monkeypatch, capsys, only: str):
    assert run(monkeypatch, "--only", only) == 0
    assert "0 wrong" in capsys.readouterr().out


def test_a_wrong_call_is_told(monkeypatch, capsys):
    def wrong(subject):
        raise Mismatch("other bits")

    monkeypatch.setattr(sanitized_calls, "checks", lambda: [("first", wrong), ("second", lambda subject: None)])
    assert run(monkeypatch) == 1
    assert "WRONG: other bits" in capsys.readouterr().out
    assert run(monkeypatch, "--part", "2/2") == 0


def test_names_are_unique():
    names = [name for name, _ in sanitized_calls.checks()]
    assert len(names) == len(set(names)) > 150


def test_what_was_noted_as_right_is_left_out(monkeypatch, capsys, tmp_path):
    notes = tmp_path / "calls.jsonl"
    assert run(monkeypatch, "--only", "kda_gate", "--notes", str(notes)) == 0
    assert capsys.readouterr().out.count("right") == 6
    assert run(monkeypatch, "--only", "kda_gate", "--notes", str(notes)) == 0
    assert capsys.readouterr().out.count("right") == 0


def test_nothing_done_is_not_right(monkeypatch):
    assert run(monkeypatch, "--only", "no such call") == 1
    assert run(monkeypatch, "--only", "kda_gate", "--seconds", "-1") == 1


def test_parts_hold_every_call(monkeypatch, capsys):
    everything = [str(i) for i in range(7)]
    monkeypatch.setattr(sanitized_calls, "checks", lambda: [(name, lambda subject: None) for name in everything])
    for part in ("1/3", "2/3", "3/3"):
        assert run(monkeypatch, "--part", part) == 0
    found = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[2].rstrip(":") for line in found if "right" in line) == everything


def test_two_tools_meet_in_the_middle(monkeypatch, capsys):
    monkeypatch.setattr(sanitized_calls, "checks", lambda: [(name, lambda subject: None) for name in "abcde"])
    assert run(monkeypatch, "--part", "1/2", "--last-first") == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines() if "right" in line] == ["e:", "c:", "a:"]

"""Numbers that note what becomes of lengths: other lengths give the same numbers as integers do, or nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kda_core.request import Request
from kda_core.triton_lib.lengths import Family, Noted, Notes, Number, filled, picker

OTHERS = [(0, 1), (1, 1), (3, 2), (40, 2), (63, 5), (64, 5), (65, 5), (500, 7), (2**40, 3)]


def sizes(T: Any, N: Any) -> Any:
    """Numbers of every kind, and decisions."""
    chunks = -(-T // 32)
    small = T < 64 or N == 3
    last = {"T": T, "halves": (T / 2, math.ceil(T / 3)), "wide": max(T, 100) if small else min(N, T)}
    bits = T & 31, T | 1, T ^ N, T << 2, T >> 1, 2 ** (N % 5), 1000 // (T + 1), 1000 - T, 7 % (N + 1)
    return chunks, math.prod((chunks, N, 32)), sum([T, N]), last, bits, T % 64 == 0, bool(T - 40)


def used(T: Any, N: Any) -> Any:
    """Numbers whose values are used where nothing is noted."""
    of = {T: "T"}
    return [N] * int(N), f"{T}", (T + N).bit_length(), list(range(N)), of[int(T)], hash(N), float(N)


def followed(notes: Notes, lengths: Any) -> list[Any] | None:
    """All numbers by place for other lengths; None where an answer is another."""
    values = notes.at(lengths)
    return values if notes.follow(values) is None else None


@pytest.mark.parametrize("function", [sizes, used])
@pytest.mark.parametrize("first", OTHERS[1:-1])
def test_numbers_are_those_of_integers(function: Any, first: tuple[int, int]):
    notes = Notes(first)
    made = function(*notes.lengths)
    for lengths in [first, *OTHERS]:
        values = followed(notes, lengths)
        if lengths == first or values is not None:
            assert repr(filled(made, values)) == repr(function(*lengths))
    if function is used:
        assert all(followed(notes, x) is None for x in OTHERS if x != first)


def test_a_decision_that_is_the_same_is_no_hindrance():
    notes = Notes((500, 7))
    made = sizes(*notes.lengths)
    assert isinstance(made[0], Number)
    values = followed(notes, (501, 9))
    assert values is not None
    assert filled(made, values) == sizes(501, 9)
    assert followed(notes, (20, 7)) is None
    assert followed(notes, (512, 7)) is None


class Held:
    """Stands for a plan that is bound."""

    def __init__(self, made: Any) -> None:
        self.made, self.ready = made, True

    def at(self, values: Any) -> Any:
        return filled(self.made, values)


def test_plans_are_made_once_for_each_set_of_decisions():
    """Branches are found by their answers, whichever came first, and followed with their own constants."""
    made, family = [], Family()

    def function(T: Any, N: Any) -> Any:
        if N == 3:
            return "three", T * 7, T // 5
        size = T * 11 + 1 if T < 64 else T * 13
        return size, (N + size) * (2 if T % 2 else 3), int(N > 9)

    def ask(*lengths: int) -> Any:
        def make() -> Noted:
            made.append(lengths)
            notes = Notes(lengths)
            return Noted(notes, (), Request(**request), Held(function(*notes.lengths)))

        return family.bound(lengths, (), make)

    request = dict.fromkeys("qkvg") | {"op": "chunk_kda", "beta": None, "scale": 1.0}
    every = [(T, N) for T in (3, 200, 64, 65, 2, 63, 90) for N in (4, 3, 12, 1)]
    for _ in range(2):
        assert [ask(*x) for x in every] == [function(*x) for x in every]
    assert len(made) == 1 + 2 * 2 * 2


def test_numbers_are_picked_in_one_step():
    notes = Notes((40, 3))
    T, N = notes.lengths
    found = [picker(x) for x in ([T * N, 5, T], [N], [4, 5], [])]
    values = followed(notes, (50, 2))
    assert [pick(values) for pick in found] == [(100, 5, 50), (2,), (4, 5), ()]

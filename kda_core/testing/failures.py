"""What failed tests have in common: features, dtypes and shapes whose calls fail more often than others."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SHAPE_AXES = ("direction", "head dimensions", "length", "initial state")
"""Axes that no feature stands for, in whole or in part; the dtype is one as well."""

MANY = 0.5
"""A value is named when at least this share of the failures involve it."""

OFTEN = 1.5
"""And when tests that involve it fail at least so many times as often as all do."""

EXPECTED = 3.0
"""A value is named as spared when so many failures were to be expected among its tests, and there are none."""

MOST_NAMED = 5


@dataclass(frozen=True)
class Outcome:
    """How one test ended.

    Attributes:
        test: what pytest can be given to run it again.
        position: its place in the order of collection, the simplest tests first.
        failed: whether it failed.
        values: of a failed test: what its last call exercises; of another one: what all that were served do.
        message: of a failed test, in a line.
        slow: whether it belongs to the slow tier.
    """

    test: str
    position: int
    failed: bool
    values: frozenset[str]
    message: str = ""
    slow: bool = False


def values_of(record: dict[str, Any]) -> set[str]:
    """The features of a call, by name, and its values along the other axes."""
    axes = {f"{axis}: {value}" for axis in SHAPE_AXES for value in record["axes"].get(axis, ())}
    return set(record["features"]) | axes | {f"dtype: {record['dtype']}"}


def outcome_of(found: dict[str, Any], failed: bool, message: str = "") -> Outcome:
    """What the records of one test say.

    Args:
        found: "test", "position", "slow" and "records", as the plugin attaches them to a report.
    """
    records = found["records"]
    # A test stops at the call that fails; those before it were right.
    told = records[-1:] if failed else [r for r in records if r["status"] == "served"]
    values = frozenset().union(*map(values_of, told)) if told else frozenset()
    return Outcome(found["test"], found["position"], failed, values, message, found["slow"])


class Failures:
    """The failures of one backend among its outcomes."""

    def __init__(self, backend: str, outcomes: list[Outcome], options: tuple[str, ...] = ()) -> None:
        self.backend, self.options = backend, options
        self.failed = sorted((o for o in outcomes if o.failed), key=lambda o: o.position)
        # A test without a served call shows nothing about any value.
        self.passed = [o for o in outcomes if not o.failed and o.values]

    def involve(self) -> list[dict[str, Any]]:
        """The values that most failures share and that fail more often than others do, the most telling first."""
        found = []
        for value in sorted(frozenset().union(*(o.values for o in self.failed))):
            failed, passed = self._count(value)
            rate = failed / (failed + passed) / self._rate
            if failed >= MANY * len(self.failed) and rate >= OFTEN:
                found.append({"value": value, "failed": failed, "passed": passed, "rate": rate})
        found.sort(key=lambda v: (-v["failed"], -v["rate"], v["value"]))
        return found[:MOST_NAMED]

    def spared(self) -> list[dict[str, Any]]:
        """The values with which no test failed, though several failures were to be expected."""
        values = frozenset().union(*(o.values for o in self.passed)) if self.passed else frozenset()
        counts = [(self._count(value), value) for value in sorted(values)]
        found = [
            {"value": value, "passed": passed}
            for (failed, passed), value in counts
            if not failed and passed * self._rate >= EXPECTED
        ]
        return sorted(found, key=lambda v: -v["passed"])[:MOST_NAMED]

    def rerun(self) -> str:
        """The command that runs the first failed test again."""
        first = self.failed[0]
        options = (*self.options, *(("-m", "slow") if first.slow else ()))
        command = ["pytest", "-p", "kda_core.testing.plugin", "--pyargs", first.test, f"--backend={self.backend}"]
        return shlex.join([*command, *options])

    def as_json(self) -> dict[str, Any]:
        """The failures as JSON values."""
        if not self.failed:
            return {"count": 0, "tests": [], "involve": [], "spared": [], "rerun": None}
        return {
            "count": len(self.failed),
            "tests": [o.test for o in self.failed],
            "involve": self.involve(),
            "spared": self.spared(),
            "rerun": self.rerun(),
        }

    def lines(self) -> Iterator[str]:
        """The failures for the terminal."""
        if not self.failed:
            return
        count = len(self.failed)
        yield f"  {count} failed:"
        for v in self.involve():
            share = "all" if v["failed"] == count else f"{v['failed']} of"
            noun = "failures involve" if count > 1 else "failure involves"
            yield f"    {share} {count} {noun} {v['value']} ({v['passed']} tests with it passed)"
        for v in self.spared():
            yield f"    no failure involves {v['value']} ({v['passed']} tests with it passed)"
        yield f"    the first, simplest tests first: {self.failed[0].test}"
        if self.failed[0].message:
            yield f"      {self.failed[0].message}"
        yield f"    run it again: {self.rerun()}"

    @property
    def _rate(self) -> float:
        return len(self.failed) / (len(self.failed) + len(self.passed))

    def _count(self, value: str) -> tuple[int, int]:
        """How many tests with a value failed, and passed."""
        failed, passed = (sum(value in o.values for o in outcomes) for outcomes in (self.failed, self.passed))
        return failed, passed

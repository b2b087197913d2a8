"""Test functions that failed, and the features, dtypes and shapes that failed tests have in common."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SHAPE_AXES = ("head dimensions", "length", "initial state")
"""Axes whose values are no features; the dtype is one as well."""

MANY = 0.5  # A value is named when at least this share of the failures involve it
OFTEN = 1.5  # And when tests that involve it fail at least this many times as often as others
MOST_NAMED = 5


@dataclass(frozen=True)
class Outcome:
    """How one test ended."""

    test: str  # the node id that runs it again in pytest
    position: int  # in the order of collection, the simplest tests first
    failed: bool
    values: frozenset[str]  # features and axis values: of the last call of a failed test, else of all served calls
    message: str = ""
    slow: bool = False

    @property
    def function(self) -> str:
        """The test function, without its parameters."""
        return self.test.partition("[")[0].removeprefix("kda_core.testing.suite.")


def values_of(record: dict[str, Any]) -> set[str]:
    """The features of a call, by name, and its values along the other axes."""
    axes = {f"{axis}: {value}" for axis in SHAPE_AXES for value in record["axes"].get(axis, ())}
    return set(record["features"]) | axes | {f"dtype: {record['dtype']}"}


def outcome_of(found: dict[str, Any], failed: bool, message: str = "") -> Outcome:
    """The outcome of one test; ``found``: what the plugin attached to its report."""
    records = found["records"]
    # A test stops at the call that fails; earlier calls passed.
    told = records[-1:] if failed else [r for r in records if r["status"] == "served"]
    values = frozenset().union(*map(values_of, told)) if told else frozenset()
    return Outcome(found["test"], found["position"], failed, values, message, found["slow"])


class Failures:
    """The failures of one backend among its outcomes."""

    def __init__(self, backend: str, outcomes: list[Outcome], options: tuple[str, ...] = ()) -> None:
        self.backend, self.options = backend, options
        self.failed = sorted((o for o in outcomes if o.failed), key=lambda o: o.position)
        # A test without a served call has no information about any value.
        self.passed = [o for o in outcomes if not o.failed and o.values]
        self._failed_functions = Counter(o.function for o in self.failed)
        if len(self._failed_functions) == 1:
            # Other functions differ from this one by more than their values.
            self.passed = [o for o in self.passed if o.function in self._failed_functions]

    def functions(self) -> list[dict[str, Any]]:
        """The test functions that failed, those with most failures first."""
        passed = Counter(o.function for o in self.passed)
        counts = self._failed_functions.most_common()
        return [{"function": f, "failed": n, "passed": passed[f]} for f, n in counts]

    def involve(self) -> list[dict[str, Any]]:
        """The values that most failures share and that fail more often than others do, the most telling first.

        Most test functions that failed must share them, too: one function with many parameters is one piece of
        evidence. A value that every test has is left out; so are later values that the same tests have.
        """
        found, seen = [], set()
        # Features, in capitals, come before values of axes.
        for value in sorted(frozenset().union(*(o.values for o in self.failed))):
            failed, passed = (frozenset(o.test for o in x if value in o.values) for x in (self.failed, self.passed))
            others = len(self.failed) - len(failed), len(self.passed) - len(passed)
            if (failed, passed) in seen or not sum(others):
                continue
            seen.add((failed, passed))
            share = len(failed) / (len(failed) + len(passed))
            functions = {o.function for o in self.failed if value in o.values}
            is_shared = len(failed) >= MANY * len(self.failed) and len(functions) >= MANY * len(self._failed_functions)
            if is_shared and share >= OFTEN * others[0] / sum(others):
                found.append({"value": value, "failed": len(failed), "passed": len(passed), "share": share})
        found.sort(key=lambda v: (-v["failed"], -v["share"]))
        return found[:MOST_NAMED]

    def rerun(self) -> str:
        """The command that runs the first failed test again."""
        first = self.failed[0]
        options = (*self.options, *(("-m", "slow") if first.slow else ()))
        command = ["pytest", "-p", "kda_core.testing.plugin", "--pyargs", first.test, f"--backend={self.backend}"]
        return shlex.join([*command, *options])

    def as_json(self) -> dict[str, Any]:
        """The failures as JSON values."""
        found = {"count": len(self.failed), "tests": [o.test for o in self.failed], "functions": self.functions()}
        return found | {"involve": self.involve(), "rerun": self.rerun() if self.failed else None}

    def lines(self) -> Iterator[str]:
        """The failures for the terminal."""
        if not self.failed:
            return
        count = len(self.failed)
        yield f"  {count} failed:"
        functions = self.functions()
        for f in functions[:MOST_NAMED]:
            yield f"    {self._share(f['failed'])} in {f['function']} ({f['passed']} tests of it passed)"
        if len(functions) > MOST_NAMED:
            others = functions[MOST_NAMED:]
            yield f"    {self._share(sum(f['failed'] for f in others))} in {len(others)} other test functions"
        for v in self.involve():
            noun = "failures involve" if count > 1 else "failure involves"
            yield f"    {self._share(v['failed'])} {noun} {v['value']} ({v['passed']} tests with it passed)"
        yield f"    the first, simplest tests first: {self.failed[0].test}"
        # A mismatch names the call in its first line, and the worst output in the second.
        yield from (f"      {line.strip()}" for line in self.failed[0].message.splitlines()[:2])
        yield f"    run it again: {self.rerun()}"

    def _share(self, failed: int) -> str:
        count = len(self.failed)
        return f"all {count}" if failed == count else f"{failed} of {count}"

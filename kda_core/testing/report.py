"""The report of a run of the kit, for the terminal and as JSON."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kda_core.capabilities import BackendInfo, Feature
from kda_core.testing.axes import AXES

MEANING = {
    "refused": "refused as declared",
    "rejected": "refused by its own word, beyond what it declares",
    "left out": "left out",
}
STATUSES = ("served", *MEANING)


@dataclass
class BackendReport:
    """The records of one backend."""

    info: BackendInfo
    device: str
    # axis -> value -> status -> number of calls
    coverage: Any = field(default_factory=lambda: defaultdict(lambda: defaultdict(Counter)))
    # (output, input dtype) -> the error that came closest to its budget
    worst: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    # status -> reason -> number of calls
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    # status -> features of the calls that ended so
    features: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: str, records: list[dict[str, Any]]) -> None:
        """Add one test."""
        self.outcomes[outcome] += 1
        for record in records:
            status = record["status"]
            for axis, values in record["axes"].items():
                for value in values:
                    self.coverage[axis][value][status] += 1
            self.features[status].update(record["features"])
            self.reasons[status].update(record["reasons"])
            for error in record["errors"]:
                key = (error["output"], error["input_dtype"])
                if key not in self.worst or error["share"] > self.worst[key]["share"]:
                    self.worst[key] = error

    def never_served(self) -> list[str]:
        """Declared features whose every call the backend rejected."""
        declared = {f.name for f in self.info.capabilities.features}
        return sorted((self.features["rejected"] & declared) - self.features["served"])

    def state_of(self, axis: str, value: str) -> str:
        """ "covered", "refused", "rejected", "left out" or "not covered"."""
        found = [status for status in STATUSES if self.coverage[axis][value][status]]
        return "not covered" if not found else "covered" if found[0] == "served" else found[0]

    def slack_used(self) -> list[dict[str, Any]]:
        """Every declared slack, with the largest error that needed it, as a share of the budget without slack."""
        used = []
        for slack in self.info.slack:
            dtype = None if slack.dtype is None else str(slack.dtype).removeprefix("torch.")
            fitting = [x for x in self.worst if slack.output in (x[0], "*") and dtype in (None, x[1])]
            entry = {"output": slack.output, "dtype": dtype, "factor": slack.factor, "reason": slack.reason}
            used.append(entry | {"used": max((self.worst[x]["share"] for x in fitting), default=0.0)})
        return used

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        info = self.info
        coverage = {
            axis: {v: {"state": self.state_of(axis, v), **self.coverage[axis][v]} for v in values}
            for axis, values in AXES.items()
        }
        return {
            "backend": info.name, "version": info.version, "contract": str(info.contract), "device": self.device,
            "outcomes": self.outcomes, "features": {f.name: f in info.capabilities.features for f in Feature},
            "coverage": coverage, "reasons": {status: counts for status, counts in self.reasons.items() if counts},
            "never_served": self.never_served(), "slack": self.slack_used(),
            "worst": [{n: _finite(v) for n, v in e.items()} for _, e in sorted(self.worst.items())],
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The report for the terminal."""
        outcomes = ", ".join(f"{n} {outcome}" for outcome, n in sorted(self.outcomes.items()))
        yield f"{self.info.name} {self.info.version} on {self.device}: {outcomes}"
        width = max(map(len, AXES))
        for axis, values in AXES.items():
            by_state: dict[str, list[str]] = {}
            for value in values:
                count, state = self.coverage[axis][value]["served"], self.state_of(axis, value)
                by_state.setdefault(state, []).append(f"{value} {count}" if state == "covered" else value)
            parts = [", ".join(by_state.pop("covered", []))] + [f"{s}: {', '.join(v)}" for s, v in by_state.items()]
            yield f"  {axis:<{width}}  " + " | ".join(p for p in parts if p)
        for status, meaning in MEANING.items():
            for reason, count in self.reasons[status].most_common():
                yield f"  {meaning} ({count} calls): {reason}"
        if self.worst:
            yield "  largest error as a share of its budget (slack aside):"
        for (output, dtype), e in sorted(self.worst.items()):
            yield (
                f"    {output:<14} {dtype:<9} {e['share']:5.2f}  "
                f"frobenius {e['frobenius']:.1e} of {e['budget_frobenius']:.1e}, "
                f"worst row {e['worst_row']:.1e} of {e['budget_worst_row']:.1e}  ({e['case']})"
            )
        for s in self.slack_used():
            dtype = s["dtype"] or "any dtype"
            yield f"  slack: {s['output']} {dtype} x{s['factor']:g}, used {s['used']:.2f}: {s['reason']}"


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

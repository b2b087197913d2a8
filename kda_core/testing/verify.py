"""A quick self-check of an installed backend: the cases tagged "verify" against the oracle.

Needs no pytest; ``kda verify`` prints what it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kda_core.testing import budgets, references
from kda_core.testing.cases import select
from kda_core.testing.inputs import Call
from kda_core.testing.subject import Mismatch, Refused, Subject
from kda_core.testing.targets import Target, find_target


@dataclass(frozen=True, slots=True)
class Row:
    """One output of one case.

    Attributes:
        case: its name.
        output: "o", "final_state", "dq", ...; "" when the call gave no result (see ``note``).
        error: relative error against the float64 oracle: |x - ref| / |ref|.
        budget: what it may be, declared slack included.
        share: the larger of this error and of the worst row's, each as a share of its budget.
        passed: whether the share is at most 1; also True for a call that is refused as declared.
        note: why there is no result, or "".
    """

    case: str
    output: str
    error: float
    budget: float
    share: float
    passed: bool
    note: str = ""


def run(backend: str, device: torch.device | None = None) -> list[Row]:
    """Check a backend on the cases tagged "verify".

    Args:
        backend: its name.
        device: where to run; None: the best device of this machine that it can serve.

    Returns:
        A row for every output of every case.

    Raises:
        BackendNotFound, BrokenBackend: no such backend can be used.
        UnsupportedCall: it cannot run here.
    """
    # A device without an index becomes the current one's.
    there = None if device is None else torch.empty(0, device=device).device
    subject = Subject(find_target(backend) if there is None else Target(backend, there))
    return [row for case in select("verify") for row in _rows(subject, case.call())]


def _rows(subject: Subject, call: Call) -> Iterator[Row]:
    try:
        results = subject.run(call)
    except Refused as refusal:
        yield Row(call.name, "", 0.0, 0.0, 0.0, refusal.status != "rejected", str(refusal))
        return
    except Mismatch as mismatch:
        yield Row(call.name, "", 0.0, 0.0, 0.0, False, str(mismatch))
        return
    request = call.request()
    expected, allowed = references.results(call), budgets.budgets(call)
    dtypes = budgets.result_dtypes(request)
    for name, got in results.tensors.items():
        error = budgets.measure(name, got, expected[name], dtypes[name])
        slack = budgets.slack_of(subject.info.slack, name, request.q.dtype)
        budget = allowed[name] if slack is None else allowed[name].scaled(slack.factor)
        share = error.share(budget)
        yield Row(call.name, name, error.frobenius, budget.frobenius, share, share <= 1)

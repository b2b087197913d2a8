"""A quick self-check of an installed backend against the oracle: every function, forward and gradients.

Needs no pytest; ``kda verify`` prints the result. If a limited backend refuses a call, the nearest call that it serves
is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kda_core.capabilities import FEATURES_1_0, FEATURES_1_2, Feature
from kda_core.testing import gate
from kda_core.testing.cases import BF16, BFLOAT16, BOUNDED, FP16, FP32, Case, named, select
from kda_core.testing.inputs import Call, indices
from kda_core.testing.nearby import Build
from kda_core.testing.subject import Mismatch, Record, Refused, Subject
from kda_core.testing.targets import Target, find_target

R = "fused_recurrent_kda"
TREES = torch.tensor([[-1, 0, 0], [-1, -1, 0], [-1, 0, 1]])


@dataclass(frozen=True, slots=True)
class Row:
    """One output of one case, or a case without a result."""

    case: str  # its name; of an untested feature, the feature's
    output: str  # "o", "final_state", "dq", ...; "" when there is no result
    error: float  # relative, against the float64 oracle: |x - ref| / |ref|
    budget: float  # the largest error allowed, declared slack included
    share: float  # the larger of this error and of the worst row's, each as a share of its budget
    verdict: str  # "passed", "FAILED", "refused" (as declared), "untested" (declared; no case had a result with it)
    note: str = ""  # why there is no result; of the first failed output of a case, all that is wrong with the case

    @property
    def passed(self) -> bool:
        """Whether the row is no failure: refused and untested rows pass."""
        return self.verdict != "FAILED"


Check = tuple[str, Callable[[Subject], object]]  # The name of a case, and what checks it
_POOLS = FEATURES_1_2 - FEATURES_1_0 | {Feature.PAGED_STATE, Feature.SPEC_DECODE}
_HALF: dict[str, Any] = {"K": 64} | BFLOAT16


def _check(case: Case, build: Build = Case.call, about: Collection[Feature] = ()) -> Check:
    """``about``: what the nearest call of a limited backend must still need."""
    return case.name, lambda subject: subject.check(case, build, about)


def _pooled(case: Case, slots: list, accepted: list[int] | None = None, **more: Any) -> Check:
    """The case on slots of a pool; ``more``: further arguments."""
    table, counts = indices(*slots), None if accepted is None else indices(*accepted)

    def build(case: Case) -> Call:
        return case.call().having(**more).in_pool(table, int(table.max()) + 2, counts)

    return _check(case, build, build(case).request().features & _POOLS)


def _gate(name: str, bound: float | None = None, backward: bool = False, A_log: bool = True) -> Check:
    """A call of ``kda_gate``."""
    return name, lambda subject: gate.check(subject, gate.arguments(A_log=A_log), bound, backward)


def checks() -> list[Check]:
    """All checks, in the order of the table."""
    step = Case(name="decoding step", op=R, B=3, T=1, state=FP32)
    prefill = Case(name="prefill in a pool", T=70, lengths=(5, 0, 65), state=FP32)
    draft = Case(name="draft", op=R, B=3, T=3, state=FP32)
    elsewhere, copies = indices([1, 2, 3], [4, 5, -1], [6, 7, 9]), indices(0, 2, 4)
    first_alone = torch.tensor([True, False, False])
    checkpoints = {"checkpoint_indices": indices([2], [2], [4]), "checkpoint_every": 64}
    recorded = frozenset({Feature.DRAFT_RECORDS, Feature.PAGED_STATE})
    in_trees = recorded | {Feature.DRAFT_TREES}
    kept = {"return_intermediate_states": True}
    in_float32 = kept | {"intermediate_states_dtype": FP32}

    def leaves_records(case: Case) -> Call:
        return case.call().in_pool(torch.tensor([1, -1, 0]), 3).recorded()

    def branches(case: Case) -> Call:
        return leaves_records(case).having(parents=TREES)

    return [
        *(_check(case) for case in (*select("verify"), named("float64"))),
        _check(Case(name="intermediate states", T=130, state=FP32, options=kept)),
        _check(Case(name="float16 states, intermediate states in float32", T=130, state=FP16, options=in_float32)),
        _check(Case(name="strided inputs", T=70, strided=frozenset({"q", "g", "beta"}))),
        _check(Case(name="output buffer", T=70, given_out=True)),
        _check(Case(name="gradients without recompute", T=70, backward=True, options={"disable_recompute": True})),
        _check(Case(name="gradients, batch invariant", T=70, backward=True, options={"batch_invariant": True})),
        _check(step),
        _check(step.having(name="decoding step bfloat16", HV=4, **_HALF, **BOUNDED)),
        _check(step.having(name="several tokens, softplus gate", T=7, V=16, gate="softplus")),
        _check(Case(name="packed steps", op=R, T=7, lengths=(1, 0, 3, 1, 2), state=FP32)),
        _check(Case(name="gradients of steps", op=R, T=12, K=16, state=FP32, backward=True)),
        _check(Case(name="gradients of steps, all in kernel", op=R, T=12, K=16, HV=4, backward=True, **BOUNDED)),
        _pooled(prefill, [3, 0, 1]),
        _pooled(step.having(name="step in a pool, one skipped"), [4, -1, 2]),
        _pooled(step.having(name="step in a bfloat16 pool", state=BF16, given_out=True, **_HALF), [4, 0, 2]),
        _check(draft.having(name="draft that leaves records", final_state=False), leaves_records, recorded),
        _check(draft.having(name="tree of draft tokens", final_state=False), branches, in_trees),
        _pooled(draft, [[8, 1, 2], [0, 4, 9], [6, 3, 7]]),
        _pooled(draft.having(name="draft, some accepted"), [[8, 1, 2], [0, 4, 9], [6, 3, 7]], [2, 1, 3]),
        _pooled(prefill.having(name="prefill in a pool, one from zero"), [3, 0, 1], has_initial_state=first_alone),
        _pooled(step.having(name="outputs of a pool alone", final_state=False), [2, 2, 1], update_state=False),
        _pooled(prefill.having(name="prefill in a pool, copy on write"), [3, 1, 3], final_state_indices=copies),
        _pooled(prefill.having(name="prefill in a pool, checkpoints"), [3, 1, 0], **checkpoints),
        _pooled(draft.having(name="draft, states elsewhere"), [[8], [0], [8]], final_state_indices=elsewhere),
        _gate("softplus gate"),
        _gate("lower-bound gate without A_log", -5.0, A_log=False),
        _gate("gradients of the softplus gate", backward=True),
        _gate("gradients of the lower-bound gate", -5.0, backward=True),
    ]


def by_case(backend: str, device: torch.device | None = None, names: Collection[str] = ()) -> Iterator[list[Row]]:
    """Check a backend on a device, or on the best one, case by case: those that are named, or all.

    Yields:
        The rows of a case, as soon as it ran: one for every output, or one that says that it is refused. Then the
        rows of declared features and dtypes that no case had a result with, one at a time.

    Raises:
        BackendNotFound, BrokenBackend: no such backend can be used.
        UnsupportedCall: it cannot run here.
        ValueError: no case has one of the names.
    """
    chosen = dict(checks())
    unknown = [name for name in names if name not in chosen]
    if unknown:
        raise ValueError(f"case: expected names of cases, e.g. {next(iter(chosen))!r}, got {unknown[0]!r}")
    # A device without an index becomes the current one's.
    there = None if device is None else torch.empty(0, device=device).device
    subject = Subject(find_target(backend) if there is None else Target(backend, there))
    for name in names or chosen:
        yield list(_rows(subject, name, partial(chosen[name], subject)))
    for row in _untested(subject):
        yield [row]


def _rows(subject: Subject, name: str, check: Callable[[], object]) -> Iterator[Row]:
    before = len(subject.records)
    wrong = ""
    try:
        check()
    except Refused as refusal:
        if refusal.status == "rejected":
            wrong = str(refusal)
    except Mismatch as mismatch:
        wrong = str(mismatch)
    rows = [row for record in subject.records[before:] for row in _rows_of(record, name)]
    failed = next((row for row in rows if not row.passed), None)
    if failed is not None:
        rows[rows.index(failed)] = replace(failed, note=wrong)
    elif wrong:
        rows = [row for row in rows if row.verdict != "refused"]
        rows.append(Row(name, "", 0.0, 0.0, 0.0, "FAILED", wrong))
    yield from rows


def _rows_of(record: Record, name: str) -> Iterator[Row]:
    """The rows of one call: that of the case, or the nearest one, whose name says so."""
    if record.status != "served":
        yield Row(name, "", 0.0, 0.0, 0.0, "refused", "; ".join(record.reasons))
    # Calls of the gate have no names of their own.
    shown = record.name if record.name.startswith(name) else name
    for e in record.errors:
        share = e["share"] / e["slack"]
        verdict = "passed" if share <= 1 else "FAILED"
        yield Row(shown, e["output"], e["frobenius"], e["budget_frobenius"] * e["slack"], share, verdict)


def _untested(subject: Subject) -> Iterator[Row]:
    """Declared features and dtypes that no call with a result needed."""
    compared = [record for record in subject.records if record.errors]
    features = {name for record in compared for name in record.features}
    capabilities = subject.info.capabilities
    for feature in sorted(capabilities.features, key=lambda f: f.name):
        if feature.name not in features:
            yield Row(feature.name, "", 0.0, 0.0, 0.0, "untested", f"declared: {feature.value}")
    dtypes = {record.dtype for record in compared}
    for dtype in sorted(str(d).removeprefix("torch.") for d in capabilities.dtypes):
        if dtype not in dtypes:
            yield Row(dtype, "", 0.0, 0.0, 0.0, "untested", "declared: a dtype of q, k and v")

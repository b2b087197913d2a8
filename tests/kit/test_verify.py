"""The quick self-check behind ``kda verify``: what it covers, what it finds, what it calls untested."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.request import BackwardResult
from kda_core.testing import verify
from kda_core.testing.axes import DTYPES
from kda_core.testing.cases import Case, named
from kda_core.testing.nearby import Build
from kda_core.testing.subject import Record, Subject
from kda_core.testing.targets import Target

CPU = torch.device("cpu")


class Noted(Subject):
    """Notes the features and dtypes of all calls; makes those of ``kda_gate`` alone."""

    def check(self, case: Case, build: Build, about: object) -> None:
        call = build(case)
        features = sorted(f.name for f in self._features(call.request(), call))
        self.records.append(Record(self.name, {}, DTYPES[case.dtype], features, case.name))


@pytest.fixture(scope="module")
def records() -> list[Record]:
    subject = Noted(Target("reference", CPU))
    for _, check in verify.checks():
        check(subject)
    return subject.records


def test_checks_cover_every_feature(records):
    """Every function, forward and gradients, pools and drafts: all that one device can be asked for."""
    covered = {name for record in records for name in record.features}
    assert {f.name for f in Feature} - covered == {"CONTEXT_PARALLEL"}


def test_checks_have_names_of_their_own():
    names = [name for name, _ in verify.checks()]
    assert len(set(names)) == len(names)


def with_checks(*names: str) -> list[verify.Row]:
    """Run the named checks alone on the oracle."""
    return [row for rows in verify.by_case("reference", CPU, names) for row in rows]


def test_a_case_that_no_check_has_is_refused():
    with pytest.raises(ValueError, match=r"case: expected names of cases, e\.g\. 'one token', got 'two tokens'"):
        with_checks("one token", "two tokens")


def _wrong_output(request, result):
    return replace(result, o=1.1 * result.o)


def _state_in_the_last_slot(request, result):
    if request.inplace_final_state:
        request.initial_state[-1] = 0
    return result


def _wrong_gate(request, result):
    return 1.1 * result


def _wrong_gradient(request, result):
    return BackwardResult({n: 1.1 * t if n in ("g", "dt_bias") else t for n, t in result.grads.items()})


FAULTS = [
    ("kda_core_recurrent_forward", _wrong_output, "decoding step", {"o"}),
    ("kda_core_recurrent_backward", _wrong_gradient, "gradients of steps", {"dg"}),
    ("kda_core_chunk_backward", _wrong_gradient, "gradients without recompute", {"dg"}),
    ("kda_core_recurrent_forward", _state_in_the_last_slot, "step in a pool, one skipped", {""}),
    ("kda_core_recurrent_forward", _wrong_output, "draft, some accepted", {"o"}),
    ("kda_core_gate_forward", _wrong_gate, "lower-bound gate without A_log", {"gate"}),
    ("kda_core_gate_backward", _wrong_gradient, "gradients of the softplus gate", {"dg"}),
]


# A step, a pool and the gate; the others take longer.
QUICK = {"decoding step", "step in a pool, one skipped", "lower-bound gate without A_log"}


@pytest.mark.parametrize(
    ("hook", "change", "check", "wrong"),
    [
        pytest.param(*fault, id=fault[2], marks=[] if fault[2] in QUICK else [pytest.mark.end_to_end])
        for fault in FAULTS
    ],
)
def test_verify_finds(altered, hook: str, change, check: str, wrong: set[str]):
    altered(change, hook)
    rows = with_checks(check)
    assert {row.output for row in rows if row.verdict == "FAILED"} == wrong
    assert not all(row.passed for row in rows)


def test_verify_says_what_it_did_not_test():
    """Declared features and dtypes that no comparison needed; what was compared is not among them."""
    rows = with_checks("one token")
    untested = {row.case for row in rows if row.verdict == "untested"}
    needed = {f.name for f in named("one token").call().request().features}
    assert untested == {f.name for f in Feature} - needed - {"CONTEXT_PARALLEL"} | {"bfloat16", "float16", "float64"}
    assert all(row.passed and not row.output and row.note for row in rows if row.verdict == "untested")


def test_verify_leaves_nothing_untested_where_all_is_checked(records):
    """By the dtypes of its cases; their features are above."""
    assert {record.dtype for record in records} == {"float16", "bfloat16", "float32", "float64"}

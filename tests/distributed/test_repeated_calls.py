"""A call with a context that repeats an earlier one is not bound and checked again; one that differs in anything is."""

from __future__ import annotations

import pytest
import torch
from repeated_jobs import CHANGES, MAY_REPEAT
from whole_calls import inputs

BACKENDS = [None, "halves", "edges"]


def given(N: int = 2) -> dict[str, torch.Tensor]:
    return inputs(64, N, gate=False)


@pytest.mark.end_to_end
@pytest.mark.parametrize("what", CHANGES)
def test_a_call_that_differs_answers_as_it_would_by_itself(ranks, what):
    """With the same bits, or the same error on all ranks, before they wait."""
    for backend, grad in ((None, True), ("halves", False), ("edges", False), ("edges", True)):
        found = ranks.run(2, "repeated_jobs:changed_call", given(), backend, what, grad)
        assert found == [what in MAY_REPEAT] * 2


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_calls_that_are_never_repeated(ranks, backend):
    assert ranks.run(2, "repeated_jobs:never_repeated", given(), backend) == [[], []]


@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_are_part_of_a_call(ranks, backend):
    ranks.run(2, "repeated_jobs:changed_mode", given(), backend)


def test_repeated_calls_are_checked_where_first_ones_are(ranks):
    for repeated, first in ranks.run(2, "repeated_jobs:checked", given()):
        assert first
        assert repeated == ["on", *first]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_refreshed_context_is_read_anew(ranks, backend, grad):
    for error in ranks.run(2, "repeated_jobs:refreshed_between", given(), backend, grad):
        assert ("modified by an inplace operation" in error) == grad


@pytest.mark.end_to_end
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad", [False, True])
def test_memos_hold_neither_contexts_nor_tensors(ranks, backend, grad):
    assert ranks.run(2, "repeated_jobs:left_behind", given(), backend, grad) == [[], []]

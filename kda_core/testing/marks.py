"""Decorators of the kit's tests: the features that a test is about, and the cases that it runs over."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kda_core.capabilities import Feature
from kda_core.testing.cases import Case

slow = pytest.mark.slow


def requires(*features: Feature) -> pytest.MarkDecorator:
    """Say which features a test is about.

    On a backend that does not declare them all, the test still runs: it must end in a call that is refused
    with the declared reason. A test that passes there fails.
    """
    return pytest.mark.kda_requires(*(f.name for f in features))


either_function = pytest.mark.parametrize(
    "op",
    [
        pytest.param("chunk_kda", marks=requires(Feature.CHUNK), id="chunk"),
        pytest.param("fused_recurrent_kda", marks=requires(Feature.RECURRENT), id="recurrent"),
    ],
)
"""Run a test with its argument ``op`` naming either function."""


def either_way(gradients: Feature) -> pytest.MarkDecorator:
    """Run a test with its argument ``backward`` False, and True, which is about ``gradients``."""
    with_gradients = pytest.param(True, id="backward", marks=requires(gradients))
    return pytest.mark.parametrize("backward", [pytest.param(False, id="forward"), with_gradients])


def each(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Run a test once for each case, as its argument ``case``; cases tagged "slow" are slow tests.

    A test is about its case's function, and about its gradients if the case has some.
    """
    params = []
    for case in cases:
        chunk, steps = (Feature.CHUNK, Feature.BACKWARD), (Feature.RECURRENT, Feature.RECURRENT_BACKWARD)
        about = (chunk if case.op == "chunk_kda" else steps)[: 2 if case.backward else 1]
        marks = [requires(*about), slow] if "slow" in case.tags else requires(*about)
        params.append(pytest.param(case, id=case.name, marks=marks))
    return pytest.mark.parametrize("case", params)

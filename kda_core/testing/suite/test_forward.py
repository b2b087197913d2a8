"""Forward of chunk_kda against the oracle."""

from __future__ import annotations

import pytest

from kda_core.capabilities import Feature
from kda_core.testing import references
from kda_core.testing.cases import Case, select
from kda_core.testing.marks import each, requires


@each(select("forward", "-backward"))
def test_forward(kda, case: Case):
    """Output and final state are within their budgets."""
    kda.check(case)


@requires(Feature.CHUNK)
@pytest.mark.parametrize("decay", [-1.0, -8.0, -100.0])
def test_forward_shorter_than_a_chunk(kda, decay: float):
    """FAILURES 3: every length from 1 to 63, with mild and with strong decay."""
    whole = Case(name=f"short, decay {decay}", T=63, decay=decay).call()
    expected = references.results(whole)["o"]
    lengths = (1, 2, 15, 16, 17, 32, 33, 63) if kda.target.interpreted else range(1, 64)
    for T in lengths:
        got = kda.run(whole.slice_tokens(0, T))["o"]
        # The longest call's budget serves all lengths.
        padded = expected.clone()
        padded[:, :T] = got.double()
        kda.expect(whole, "o", padded, expected, f"T = {T}")

"""Forward of chunk_kda: every case against the oracle."""

from __future__ import annotations


from kda_core.capabilities import Feature
from kda_core.testing.cases import Case
from kda_core.testing.marks import each_tagged, requires


@requires(Feature.CHUNK)
@each_tagged("forward")
def test_forward(kda, case: Case):
    kda.check(case.call().forward_only())

"""Sequences that several devices share: the hooks in two halves, every process in this one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kda_core.capabilities import Feature
from kda_core.testing import fragments
from kda_core.testing.cases import BF16, BFLOAT16, BOUNDED, FP16, FP32, SOFTPLUS, Case
from kda_core.testing.marks import each, requires

HALF: dict[str, object] = {"dtype": FP16, "K": 32, "state": FP32}
"""Fields of a case of 16 bits, which every kernel of the halves takes."""

CASES = [
    (Case(name="fragments of a sequence", T=130, **HALF), (64,)),
    (Case(name="fragments of odd lengths", T=103, decay="slow", **HALF), (1, 33, 34)),
    (Case(name="fragments below a chunk, empty ones", T=40, decay="slow", **HALF), (0, 7, 7, 20, 40)),
    (Case(name="fragments of packed sequences", T=150, lengths=(5, 0, 65, 70, 0), decay="slow", **HALF), (3, 40, 100)),
    (Case(name="fragments of a batch", B=2, T=70, HV=4, decay="slow", **HALF), (33,)),
    (Case(name="fragments V first", T=70, V=20, options={"state_v_first": True}, **HALF), (40,)),
    (Case(name="fragments without states", T=70, decay="none", final_state=False, **HALF | {"state": None}), (32,)),
    (Case(name="fragments of bfloat16", T=100, H=1, HV=2, K=64, state=BF16, **BFLOAT16, **SOFTPLUS), (50,)),
    (Case(name="fragments, all in kernel", T=100, H=1, K=128, state=FP32, **BFLOAT16, **BOUNDED), (37,)),
    (Case(name="fragments, everything saved", T=70, H=1, options={"disable_recompute": True}, **HALF), (33,)),
    # A backend may cut long fragments once more.
    (Case(name="long fragments", T=1120, H=1, decay="slow", **HALF | {"K": 16}), (20,)),
    (Case(name="long fragments, packed", T=1120, H=1, lengths=(7, 500, 613), decay="slow", **HALF | {"K": 16}), (5,)),
    (Case(name="fragments, promised decays", T=64, decay="bounded", options={"safe_gate": True}, **HALF), (32,)),
]  # fmt: skip
WITH_EDGES = ("packed sequences", "a batch", "bfloat16", "all in kernel", "long fragments, packed")
CUTS = {case.name: cuts for case, cuts in CASES}
BACKWARD = requires(Feature.CHUNK, Feature.BACKWARD, Feature.STATE_GRADIENT, Feature.CONTEXT_PARALLEL)


@requires(Feature.CONTEXT_PARALLEL)
@each([case for case, _ in CASES if "long" not in case.name])
def test_fragments(kda, case: Case):
    """A call that is begun and finished piece by piece is the whole call."""
    call = case.call()
    kda.compare(call, fragments.run(kda, call, CUTS[case.name]))


@BACKWARD
@each([case.having(name=f"{case.name}, gradients", backward=True) for case, _ in CASES])
def test_fragments_backward(kda, case: Case):
    """So are its gradients, those of states included (FAILURES 17)."""
    call = case.call()
    kda.compare(call, fragments.run(kda, call, CUTS[case.name.removesuffix(", gradients")]))


@BACKWARD
@pytest.mark.parametrize("output", ["o", "final_state"])
def test_fragments_backward_from_one_output(kda, output: str):
    """The gradient of one output alone; from a final state alone fragments have no gradient of o."""
    call = Case(name=f"fragments, gradient of {output}", T=70, decay="slow", backward=True, **HALF).call()
    call = replace(call, grads={output: call.grads[output]})
    kda.compare(call, fragments.run(kda, call, (30,)))


@BACKWARD
@each([case.having(backward=True) for case, _ in CASES if case.name.endswith(WITH_EDGES)])
def test_edges(kda, case: Case):
    """States at the edges of fragments are read and written where tables say, without other bits."""
    if not kda.info.capabilities.edges:
        pytest.skip("does not declare edges")
    fragments.compare_edges(kda, case.call())

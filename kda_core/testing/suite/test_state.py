"""Initial and final states: layouts, dtypes, continuation."""

from __future__ import annotations

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing import references
from kda_core.testing.cases import BF16, FP16, FP32, PLAIN, Case
from kda_core.testing.marks import each, requires

LAYOUTS = pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])


# With K = V a mix-up of the layouts is right in shape and wrong in value.
STATES = [
    Case(name=f"state {v_first} {V} {dtype}", T=70, V=V, state=dtype, options={"state_v_first": v_first})
    for V, dtype in ((32, FP32), (64, FP32), (32, BF16))
    for v_first in (False, True)
] + [
    Case(name="initial state alone", T=70, state=FP32, final_state=False),
    Case(name="final state alone", T=70, V=64, options={"state_v_first": True}),
    # A sequence without tokens passes its state on, bit for bit: ``Subject.run`` looks at that.
    Case(name="no tokens", T=0),
    Case(name="state without tokens", T=0, state=FP32),
    *(Case(name=f"states of no tokens {dtype}", T=0, lengths=(0, 0), **PLAIN[dtype]) for dtype in PLAIN),
]


@requires(Feature.CHUNK)
@each(STATES)
def test_state(kda, case: Case):
    """Both layouts and dtypes, an initial or a final state alone, and no tokens at all."""
    kda.check(case)


@requires(Feature.CHUNK, Feature.INITIAL_STATE, Feature.FINAL_STATE, Feature.FP16_STATE)
@LAYOUTS
def test_state_float16(kda, v_first: bool):
    """States in float16, forward and backward, in both functions."""
    case = Case(name=f"float16 states {v_first}", T=70, V=64, state=FP16, options={"state_v_first": v_first})
    kda.check(case)
    kda.check(case.having(name="float16 states of halves", K=64, dtype=FP16, gate_dtype=FP16, backward=True))
    kda.check(case.having(op="fused_recurrent_kda", T=9, backward=True))


@requires(Feature.CHUNK, Feature.INITIAL_STATE, Feature.FINAL_STATE, Feature.VARLEN, Feature.STATE_V_FIRST)
def test_state_packed_v_first(kda):
    """One state a sequence, V first."""
    case = Case(name="packed states", T=100, V=64, lengths=(30, 0, 70), state=FP32, options={"state_v_first": True})
    kda.check(case)


@requires(Feature.CHUNK, Feature.RECURRENT, Feature.INITIAL_STATE, Feature.FINAL_STATE)
@LAYOUTS
def test_state_from_prefill_to_decoding(kda, v_first: bool):
    """FAILURES 7: K = 64, V = 128: prefill, then decode from its state, in both layouts."""
    case = Case(name="prefill and decode", T=80, K=64, V=128, state=FP32, options={"state_v_first": v_first})
    whole = case.call()
    expected = references.results(whole)
    prefix = whole.slice_tokens(0, 76)
    state = kda.check(prefix)["final_state"]
    for t in range(76, 80):
        step = whole.slice_tokens(t, t + 1).having(initial_state=state).decoding()
        results = kda.check(step)
        state = results["final_state"]
    kda.expect(whole, "final_state", state, expected["final_state"], "after decoding")


@requires(Feature.CHUNK, Feature.INITIAL_STATE, Feature.FINAL_STATE)
@pytest.mark.parametrize("cut", [1, 64, 100])
def test_state_continues(kda, cut: int):
    """Two calls, the second from the first one's state, are one call."""
    whole = Case(name="continued", T=130, state=FP32).call()
    expected = references.results(whole)
    first = kda.run(whole.slice_tokens(0, cut))
    second = kda.run(whole.slice_tokens(cut, 130).having(initial_state=first["final_state"]))
    o = torch.cat([first["o"], second["o"]], 1)
    kda.expect(whole, "o", o, expected["o"], "in two calls")
    kda.expect(whole, "final_state", second["final_state"], expected["final_state"], "in two calls")

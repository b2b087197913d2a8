"""Initial and final states: layouts, dtypes, continuation."""

from __future__ import annotations

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing.cases import BF16, FP16, FP32, PLAIN, Case
from kda_core.testing.inputs import indices
from kda_core.testing.marks import each, requires

LAYOUTS = pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])


FLOAT16: dict[str, dict] = {
    "forward": {"T": 70},
    "of halves": {"T": 70, "K": 64, "dtype": FP16, "gate_dtype": FP16, "backward": True},
    "of steps": {"T": 9, "op": "fused_recurrent_kda", "backward": True},
}
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
    Case(name="packed states", T=100, V=64, lengths=(30, 0, 70), state=FP32, options={"state_v_first": True}),
    *(
        Case(name=f"float16 states {v_first} {name}", V=64, state=FP16, options={"state_v_first": v_first}, **fields)
        for v_first in (False, True)
        for name, fields in FLOAT16.items()
    ),
]


@each(STATES)
def test_state(kda, case: Case):
    """Both layouts, every dtype, an initial or a final state alone, one a packed sequence, and no tokens at all."""
    kda.check(case)


@requires(Feature.CHUNK, Feature.RECURRENT, Feature.INITIAL_STATE, Feature.FINAL_STATE)
@LAYOUTS
def test_state_from_prefill_to_decoding(kda, v_first: bool):
    """FAILURES 7: K = 64, V = 128: prefill, then decode from its state, in both layouts."""
    options = {"state_v_first": v_first}
    whole = Case(name="prefill and decode", T=80, K=64, V=128, state=FP32, options=options).call()
    state = kda.check(whole.slice_tokens(0, 76))["final_state"]
    for t in range(76, 80):
        state = kda.check(whole.slice_tokens(t, t + 1).having(initial_state=state).decoding())["final_state"]
    kda.compare(whole, {"final_state": state})


@requires(Feature.CHUNK, Feature.INITIAL_STATE, Feature.FINAL_STATE)
@pytest.mark.parametrize("cut", [1, 64, 100])
def test_state_continues(kda, cut: int):
    """Two calls, the second from the first one's state, are one call."""
    whole = Case(name="continued", T=130, state=FP32).call()
    first = kda.run(whole.slice_tokens(0, cut))
    second = kda.run(whole.slice_tokens(cut, 130).having(initial_state=first["final_state"]))
    kda.compare(whole, second | {"o": torch.cat([first["o"], second["o"]], 1)})


WITH_H = {"return_intermediate_states": True}

CASES = [
    Case(name="h", B=2, T=130, state=FP32, options=WITH_H),
    Case(name="h without states", T=130, final_state=False, options=WITH_H),
    Case(name="h chunk 32", T=100, state=FP32, options=WITH_H | {"chunk_size": 32}),
    Case(name="h V first", T=130, V=64, state=FP32, options=WITH_H | {"state_v_first": True}),
    Case(name="h bfloat16", T=130, K=64, dtype=BF16, state=BF16, options=WITH_H),
    # A state so large that a kernel with the state in registers may have no room to store it.
    Case(name="h wide heads", T=70, HV=4, H=2, K=256, dtype=BF16, state=FP32, options=WITH_H),
    Case(name="h without rows", B=0, T=130, state=FP32, options=WITH_H),
    Case(name="h without tokens", B=2, T=0, state=FP32, options=WITH_H),
    Case(name="h packed", T=200, lengths=(1, 0, 64, 65, 70), state=FP32, options=WITH_H),
    # Without a state as fla stores them, in the dtype of k.
    *(
        Case(name=f"h {dtype} of {state}", T=130, state=state, options=WITH_H | {"intermediate_states_dtype": dtype})
        for state, dtype in ((BF16, FP32), (FP32, BF16), (FP32, FP16), (None, BF16))
    ),
]


@requires(Feature.INTERMEDIATE_STATES)
@each(CASES)
def test_intermediate_states(kda, case: Case):
    """Every state is within its budget."""
    kda.check(case)


@requires(Feature.CHUNK, Feature.INTERMEDIATE_STATES)
@pytest.mark.parametrize("C", [64, 32])
def test_intermediate_state_is_a_final_state(kda, C: int):
    """FAILURES 14: T = 130: the state at 128 is the final state of the first 128 tokens."""
    call = kda.near(Case(name="prefix", T=130, state=FP32, options=WITH_H | {"chunk_size": C})).call()
    whole = kda.check(call)
    prefix = call.slice_tokens(0, 128)
    final = kda.check(prefix)["final_state"]
    kda.expect(prefix, "final_state", whole["h"][:, 128 // C], final, "h at 128 against the final state")


@requires(Feature.CHUNK, Feature.INTERMEDIATE_STATES, Feature.PAGED_STATE)
@pytest.mark.parametrize("layout", [{"B": 3, "T": 72}, {"T": 150, "lengths": (70, 1, 79)}], ids=["dense", "packed"])
def test_intermediate_states_of_skipped_sequences(kda, layout: dict):
    """Skipped sequences have none: zeros."""
    options = WITH_H | ({"state_v_first": True, "chunk_size": 32} if "lengths" in layout else {})
    call = Case(name=f"h skipped {sorted(layout)}", V=64, state=FP32, options=options, **layout).call()
    results = kda.check(call.in_pool(indices(-1, 2, -1), 4))
    written = results["h"].flatten(0, 1).flatten(1).any(1)
    assert written.any()
    assert not written.all()

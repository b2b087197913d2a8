"""States at the start of every chunk (return_intermediate_states)."""

from __future__ import annotations

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing.cases import BF16, FP16, FP32, Case
from kda_core.testing.marks import each, requires

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
]


@requires(Feature.CHUNK, Feature.INTERMEDIATE_STATES)
@each(CASES)
def test_intermediate_states(kda, case: Case):
    """Every state is within its budget."""
    kda.check(case)


@requires(Feature.CHUNK, Feature.INTERMEDIATE_STATES, Feature.INTERMEDIATE_STATES_DTYPE)
@pytest.mark.parametrize(("state", "dtype"), [(BF16, FP32), (FP32, BF16), (FP32, FP16), (None, BF16)])
def test_intermediate_states_in_another_dtype(kda, state: torch.dtype | None, dtype: torch.dtype):
    """float32 snapshots of bfloat16 states and the reverse; with None as fla stores them, in the dtype of k."""
    options = WITH_H | {"intermediate_states_dtype": dtype}
    kda.check(Case(name=f"h {dtype} of {state}", T=130, state=state, options=options))


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
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param({"B": 3, "T": 72}, {}, id="dense"),
        pytest.param(
            {"T": 150, "lengths": (70, 1, 79)}, {"state_v_first": True, "chunk_size": 32}, id="packed, V first"
        ),
    ],
)
def test_intermediate_states_of_skipped_sequences(kda, layout: dict, options: dict):
    """Skipped sequences have none: zeros."""
    call = Case(name=f"h skipped {sorted(layout)}", V=64, state=FP32, options=WITH_H | options, **layout).call()
    results = kda.check(call.in_pool(torch.tensor([-1, 2, -1], dtype=torch.int32), 4))
    served = results["h"].flatten(0, 1)
    written = served.flatten(1).any(1)
    assert written.any()
    assert not written.all()

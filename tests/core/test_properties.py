"""Random calls in float64, and a property of states in place.

float64 leaves no room for a tolerance to hide in: what is not rounding is a bug.
"""

from __future__ import annotations

import pytest
import torch

import kda_core
from kda_core.testing.cases import FP64
from kda_core.testing.subject import Subject
from kda_core.testing.suite.test_random import drawn
from kda_core.testing.targets import Target

FEW, MORE = range(2), range(2, 6)


@pytest.mark.parametrize("part", [*FEW, *(pytest.param(part, marks=pytest.mark.end_to_end) for part in MORE)])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("op", "most"), [("chunk_kda", 70), ("fused_recurrent_kda", 40)])
def test_random_calls_equal_the_oracle(op: str, most: int, backward: bool, part: int):
    """The kit draws the same kinds, but for their dtypes."""
    for number in range(3):
        case, build = drawn(f"float64 {op}", part, number, 0, op=op, backward=backward, max_tokens=most)
        case = case.having(dtype=FP64, gate_dtype=FP64, state=case.state and FP64)
        Subject(Target("cpu", torch.device("cpu"))).check(case, build)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("pad_slot_id", range(-2, 4))
def test_a_dense_state_in_place_has_no_padding_index(backend: str, pad_slot_id: int):
    """pad_slot_id is about indices: without them every row is its own slot, whatever its number."""
    q, k, v = (torch.randn(3, 2, 1, 4) for _ in range(3))
    call = (q, k, v, -k.abs(), torch.rand(3, 2, 1))
    state = torch.randn(3, 1, 4, 4)
    with torch.no_grad():
        o, final = kda_core.fused_recurrent_kda(*call, initial_state=state, output_final_state=True, backend=backend)
        same, written = kda_core.fused_recurrent_kda(
            *call, initial_state=state, output_final_state=True, inplace_final_state=True, pad_slot_id=pad_slot_id,
            backend=backend,
        )  # fmt: skip
    assert written is state
    torch.testing.assert_close(same, o)
    torch.testing.assert_close(written, final)

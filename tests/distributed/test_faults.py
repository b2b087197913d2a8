"""Faults of an earlier attempt at several devices, each as a test that fails with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from whole_calls import RAW, ROWS, assembled, inputs, normal, oracle, worst


def in_float32(tensors):
    return {n: t.float() for n, t in tensors.items()}


ONE, PACKED = {"tokens": 40}, {"cu_seqlens": [0, 3, 31, 40]}


@pytest.mark.end_to_end
@pytest.mark.parametrize(("context", "loss"), [(ONE, "o"), (ONE, "state"), (PACKED, "o"), (PACKED, "both")])
def test_a_compiled_backward_may_depend_on_any_output(ranks, context, loss):
    """A compiler moved the exchange of a rank whose share depended on no gradient into the forward: ranks hung."""
    tensors = in_float32(inputs(40))
    options = {**RAW, "output_final_state": True}
    assert all(ranks.run(2, "compiled_step", tensors, normal(1, 40, 4, 6).float(), context, options, loss))


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_of_16_bit_calls_are_as_exact_as_one_processs(ranks, size):
    """The products of transitions were stored in bfloat16: dA_log was off by 5e-3, dinitial_state by 2.6e-3."""
    tensors = inputs(256, 1, K=16, V=16)
    tensors = {n: t.bfloat16() if n in ROWS else t.float() for n, t in tensors.items()}
    grads = {"o": normal(1, 256, 4, 16).bfloat16(), "final_state": normal(1, 4, 16, 16).float()}
    options = {**RAW, "output_final_state": True}
    expected = oracle(tensors, grads, None, options)
    found, alone = (
        assembled(ranks.run(n, "training_step", tensors, grads, {"tokens": 256}, options), expected) for n in (size, 1)
    )
    for name in ("final_state", "dA_log", "ddt_bias", "dinitial_state"):
        ours, theirs = (worst({name: x[name]}, {name: expected[name]})[0] for x in (found, alone))
        assert ours < 1e-5, name
        assert ours < 4 * theirs + 1e-6, name


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("cells", [False, True])
def test_sequences_without_rows_pass_their_states_through(ranks, size, cells):
    """The final state had no gradient function where all sequences were empty."""
    tensors = inputs(0, 3)
    grads = {"o": torch.zeros(1, 0, 4, 6, dtype=torch.float64), "final_state": normal(3, 4, 8, 6)}
    context = {"cu_seqlens": [0, 0, 0, 0], "deterministic_degree": cells}
    parts = ranks.run(size, "training_step", tensors, grads, context, {**RAW, "output_final_state": True})
    assert torch.equal(sum(p["final_state"] for p in parts), tensors["initial_state"])
    assert torch.equal(sum(p["dinitial_state"] for p in parts), grads["final_state"])


@pytest.mark.end_to_end
def test_packings_that_change_need_few_graphs(ranks):
    """6 of 14 packings compiled again: lengths were constants of the graph."""
    tensors = in_float32(inputs(64))
    packings = [{"cu_seqlens": [0, 10 + i, 64 - 3 * i, 64]} for i in range(10)]
    packings += [{"cu_seqlens": cu} for cu in ([0, 1, 2, 64], [0, 20, 20, 60], [0, 32, 33, 64], [0, 0, 64, 64])]
    for packing in packings:
        packing |= {"tokens": 64, "fragments": 4}
    for graphs, same in ranks.run(2, "packings", tensors, packings, RAW):
        assert same
        assert graphs == 1


@pytest.mark.end_to_end
def test_packings_of_other_sizes_need_a_few_more(ranks):
    """Tables grow by powers of two."""
    tensors = in_float32(inputs(64))
    bounds = [[0, *range(1, 2 + i), 64] for i in range(14)]
    for graphs, same in ranks.run(2, "packings", tensors, [{"cu_seqlens": b} for b in bounds], RAW):
        assert same
        assert graphs <= 4


def test_a_context_is_made_without_the_other_ranks(ranks):
    """Each context took a collective, and a wait for the device."""
    assert len(ranks.run(1, "made_alone", 2)) == 1


BAD = {
    "rows": ({"q": "short", "k": "short", "v": "short", "g": "short", "beta": "short"}, "ValueError: q: expected [B"),
    "dtype": ({"k": torch.zeros(1, 32, 2, 8)}, "TypeError: k: expected dtype float64"),
    "heads": ({"beta": torch.zeros(1, 32, 3).double()}, "ValueError: beta: expected shape"),
    "option": ({"chunk_size": 48}, "ValueError: chunk_size: expected one of"),
    "pool": ({"ssm_state_indices": torch.tensor([0])}, "UnsupportedCall: chunk_kda: ssm_state_indices is not served"),
    "flags": ({"has_initial_state": torch.tensor([True])}, "UnsupportedCall: chunk_kda: has_initial_state is not"),
    "invariance": ({"batch_invariant": True}, "UnsupportedCall: chunk_kda: batch_invariant is not served with cp_cont"),
    "out": ({"out": torch.zeros(1, 32, 4, 6).double()}, "UnsupportedCall: chunk_kda: out is not served"),
    "state": ({"initial_state": torch.zeros(2, 4, 8, 6).double()}, "ValueError: initial_state: expected shape [N, HV"),
    "bounds": ({"cu_seqlens": torch.tensor([0, 31, 32])}, "ValueError: cu_seqlens: expected None with cp_context"),
    "gate": ({"A_log": torch.zeros(4).double()}, "ValueError: A_log: expected use_gate_in_kernel=True"),
    "flag": ({"state_v_first": 1}, "TypeError: state_v_first: expected True or False, got 1"),
    "backend": ({"backend": "nowhere"}, "BackendNotFound: backend 'nowhere' is not installed"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_raises_on_all_ranks_before_they_wait(ranks, what):
    changes, message = BAD[what]
    tensors = inputs(64, gate=False)
    found = ranks.run(2, "bad_call", tensors, {"tokens": 64, "layout": "zigzag"}, changes)
    for text, seconds in found:
        assert text.startswith(message)
        assert seconds < 0.3
    # The group is as good as before.
    assert [text for text, _ in ranks.run(2, "bad_call", tensors, {"tokens": 64}, {})] == ["", ""]


@pytest.mark.parametrize("what", ["heads", "option", "backend"])
def test_bad_input_raises_on_a_rank_without_cells(ranks, what):
    """It went to the exchange, and waited for ranks that had refused the call."""
    changes, message = BAD[what]
    context = {"tokens": 32, "deterministic_degree": True, "grid": 16, "layout": [[(0, 32)], []]}
    tensors = inputs(32, gate=False)
    if what == "heads":
        tensors["beta"], changes = tensors["beta"][..., :3], {}
    found = ranks.run(2, "bad_call", tensors, context, changes)
    assert all(text.startswith(message) for text, _ in found)
    assert [text for text, _ in ranks.run(2, "bad_call", inputs(32, gate=False), context, {})] == ["", ""]


def test_a_flag_may_be_numpys(ranks):
    """Initial states were expected with K first where it said V."""
    tensors = inputs(32, gate=False)
    tensors["initial_state"] = torch.zeros(1, 4, 6, 8)
    flag = {"state_v_first": np.True_}
    assert [text for text, _ in ranks.run(2, "bad_call", tensors, {"tokens": 32}, flag)] == ["", ""]


@pytest.mark.parametrize("more", [{}, {"deterministic_degree": True, "grid": 16}])
def test_backends_never_see_a_negative_view(ranks, more):
    """Kernels that read memory took gradients, and in a backward all rows, with the wrong sign."""
    tensors = in_float32(inputs(64, gate=False))
    found = ranks.run(2, "negative_views", tensors, normal(1, 64, 4, 6), {"tokens": 64, **more})
    assert found == [[], []]


CELLS = {"tokens": 2048, "deterministic_degree": True, "grid": 256}


@pytest.mark.parametrize("context", [{"tokens": 2048}, {"tokens": 2048, "layout": "zigzag"}, CELLS])
def test_memory_for_the_backward_is_that_of_one_call(ranks, context):
    """It was 1.25 to 1.5 times as much."""
    tensors = in_float32(inputs(2048, H=4, K=16, V=16))
    for ours, plain in ranks.run(2, "saved_bytes", tensors, context, RAW):
        assert ours <= 1.05 * plain


def test_activation_checkpointing(ranks):
    tensors = in_float32(inputs(64))
    assert all(ranks.run(3, "checkpointed", tensors, normal(1, 64, 4, 6).float(), {"tokens": 64}, RAW))

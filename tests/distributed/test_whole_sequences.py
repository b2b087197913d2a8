"""Results and gradients of ranks together are those of the float64 oracle on whole sequences."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import SIZES
from whole_calls import RAW, assert_close, inputs, oracle, worst

CLOSE = 1e-12
STEP = "training_step"


def gradients(tensors, N, *, V_first=False, seed=1):
    generator = torch.Generator().manual_seed(seed)
    HV, V = tensors["v"].shape[2:]
    K = tensors["q"].shape[3]
    state = (N, HV, V, K) if V_first else (N, HV, K, V)
    return {
        "o": torch.randn(tensors["v"].shape, generator=generator, dtype=torch.float64),
        "final_state": torch.randn(state, generator=generator, dtype=torch.float64),
    }


def check(ranks, size, tensors, grads, context, options, close=CLOSE):
    parts = ranks.run(size, STEP, tensors, grads, context, options)
    expected = oracle(tensors, grads, context.get("cu_seqlens"), options)
    assert_close(parts, expected, close)
    return parts, expected


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", SIZES)
def test_one_sequence(ranks, size, layout):
    tensors = inputs(130, 1)
    context = {"tokens": 130, "layout": layout}
    check(ranks, size, tensors, gradients(tensors, 1), context, {**RAW, "output_final_state": True})


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", SIZES)
def test_packed_sequences_with_empty_ones_and_padding(ranks, size, layout):
    cu, T = [0, 0, 31, 32, 32, 77, 125, 125], 130
    tensors = inputs(T, len(cu) - 1)
    grads = gradients(tensors, len(cu) - 1)
    grads["o"][:, cu[-1] :] = 0  # a row of no sequence has no gradient
    context = {"cu_seqlens": cu, "tokens": T, "layout": layout}
    check(ranks, size, tensors, grads, context, {**RAW, "output_final_state": True})


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", [[(0, 9)], [(40, 64), (9, 17)], [(17, 40)]]])
def test_a_batch(ranks, layout):
    tensors = inputs(64, 3, B=3)
    context = {"tokens": 64, "batch": 3, "layout": layout}
    check(ranks, 3, tensors, gradients(tensors, 3), context, {**RAW, "output_final_state": True})


@st.composite
def problems(draw):
    size = draw(st.sampled_from(SIZES))
    T = draw(st.integers(1, 90))
    cu = [0, *sorted(draw(st.lists(st.integers(0, T), max_size=5)))]
    cu += draw(st.sampled_from([[], [T]]))
    parts = draw(st.integers(1, 2 * size))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, T), min_size=parts - 1, max_size=parts - 1))), T]
    layout = [[] for _ in range(size)]
    for a, b in itertools.pairwise(cuts):
        layout[draw(st.integers(0, size - 1))].append((a, b))
    for own in layout:
        # Rows of no sequence stay at the end.
        tail = [r for r in own if r[1] > cu[-1]]
        head = [r for r in own if r[1] <= cu[-1]]
        own[:] = [*draw(st.permutations(head)), *tail]
    return size, T, cu, layout


@pytest.mark.end_to_end
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    problem=problems(), gate=st.booleans(), bound=st.sampled_from([None, -4.0]), v_first=st.booleans(),
    state=st.booleans(), grouped=st.sampled_from([(2, 4), (2, 2), (1, 3)]), gather=st.booleans(),
    negative=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_fragments(ranks, problem, gate, bound, v_first, state, grouped, gather, negative, seed):
    size, T, cu, layout = problem
    N = len(cu) - 1
    H, HV = grouped
    tensors = inputs(T, N * state, H=H, HV=HV, K=4, V=3, seed=seed, gate=gate)
    options = {"output_final_state": True, "state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": negative}
    if gate:
        options |= {"use_gate_in_kernel": True, "lower_bound": bound}
    else:
        tensors["g"] = -tensors["g"].abs()
    if v_first and state and N:
        tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    grads = gradients(tensors, N, V_first=v_first, seed=seed)
    grads["o"][:, cu[-1] :] = 0
    context = {"cu_seqlens": cu, "tokens": T, "layout": layout, "gather": gather}
    if not gather:
        check(ranks, size, tensors, grads, context, options)
        return
    # Every rank has every final state, and its own loss.
    parts = ranks.run(size, STEP, tensors, {**grads, "final_state": grads["final_state"] / size}, context, options)
    expected = oracle(tensors, grads, cu, options)
    states = [part.pop("final_state") for part in parts]
    assert all(torch.equal(s, states[0]) for s in states)
    final = expected.pop("final_state")
    assert worst({"final_state": states[0]}, {"final_state": final})[0] < CLOSE
    assert_close(parts, expected, CLOSE)


def test_a_sequence_goes_on_in_a_second_call(ranks):
    """With ``gather`` every rank has the state that the next call starts from; gradients flow through it."""
    tensors = inputs(90, 1)
    grads, options = gradients(tensors, 1), {**RAW, "output_final_state": True}
    parts = ranks.run(3, "continued", tensors, grads, options)
    expected = oracle(tensors, grads, None, options)
    error, name = worst({n: sum(part[n] for part in parts) for n in expected}, expected)
    assert error < CLOSE, name


def test_a_final_state_lies_where_its_sequence_ends(ranks):
    tensors = inputs(60, 2)
    context = {"cu_seqlens": [0, 20, 60]}
    parts = ranks.run(3, STEP, tensors, {}, context, {**RAW, "output_final_state": True})
    expected = oracle(tensors, {}, context["cu_seqlens"], {**RAW, "output_final_state": True})["final_state"]
    for rank, part in enumerate(parts):
        for n, owner in ((0, 0), (1, 2)):
            assert torch.equal(part["final_state"][n] != 0, torch.full_like(expected[n], rank == owner).bool())


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(
    ("context", "B"),
    [({"cu_seqlens": [0, 70, 70, 200]}, 1), ({"tokens": 128, "batch": 2}, 2), ({"tokens": 128, "layout": "zigzag"}, 1)],
)
def test_intermediate_states_count_from_a_fragments_first_row(ranks, context, B, v_first):
    """Every fragment's are those of a whole call whose chunks begin there."""
    T = context.get("tokens", 200)
    tensors = inputs(T, B=B)
    options = {**RAW, "return_intermediate_states": True, "chunk_size": 32, "state_v_first": v_first}
    if v_first:
        options["intermediate_states_dtype"] = torch.bfloat16
    parts = ranks.run(2, STEP, tensors, {}, context, options)
    bounds = context.get("cu_seqlens", [0, T])
    for part in parts:
        expected = []
        for b in range(B):
            for low, high in part["ranges"]:
                for start, end in itertools.pairwise(bounds):
                    a, e = max(low, start), min(high, end)
                    if a < e:
                        cut = {
                            n: t[b : b + 1, start:e] if n in ("q", "k", "v", "g", "beta") else t
                            for n, t in tensors.items()
                        }
                        packed = torch.tensor([0, a - start, e - start])
                        found = oracle(cut, {}, packed.tolist(), {**RAW, "output_final_state": True})["final_state"]
                        begun = dict(cut, initial_state=torch.stack([found[0] * 0, found[0]]))
                        h = oracle(
                            begun,
                            {},
                            packed.tolist(),
                            options | {"state_v_first": False, "intermediate_states_dtype": None},
                        )["h"]
                        chunks = -(-(e - a) // 32)
                        expected.append((b, h[0, h.shape[1] - chunks :]))
        for b in range(B):
            whole = torch.cat([h for row, h in expected if row == b])
            found, close = part["h"][b], {"rtol": 1e-10, "atol": 1e-12}
            if v_first:
                assert found.dtype == torch.bfloat16
                found, whole, close = found.double(), whole.mT, {"rtol": 2**-8, "atol": 1e-12}
            torch.testing.assert_close(found, whole, **close)

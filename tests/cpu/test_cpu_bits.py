"""The CPU backend's bitwise promises: whatever is cut, batched, repeated or left out, the bits are the same."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import installed
import pytest
import torch

installed.need_backend("cpu")

from cpu_requests import (
    CHUNK,
    LAYOUTS,
    PACKING,
    RECURRENT,
    assert_equal,
    cut_chunks,
    forward,
    gradients,
    hooks,
    make_request,
    relative_error,
)
from kda_core_cpu import recurrent, small_step


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_disable_recompute_gives_the_same_bits(layout):
    """Where K and V fill vectors; otherwise a product of other rows may round its last columns differently."""
    _, expected, _ = gradients(make_request(**LAYOUTS[layout], K=16, V=32))
    _, found, _ = gradients(make_request(**LAYOUTS[layout], K=16, V=32, disable_recompute=True))
    assert_equal(found, expected)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", [CHUNK, RECURRENT])
def test_runs_repeat_bitwise(op, layout):
    r = make_request(op, **LAYOUTS[layout])
    first, expected, _ = gradients(r)
    for _ in range(2):
        again, found, _ = gradients(r)
        assert torch.equal(again.o, first.o)
        assert torch.equal(again.final_state, first.final_state)
        assert_equal(found, expected)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("op", [CHUNK, RECURRENT])
@pytest.mark.parametrize(
    ("K", "V"), [(12, 10), (64, 64), (1, 1), (1, 17), (3, 5), (4, 2), (6, 9), (16, 1), (17, 10), (33, 5), (33, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_does_not_depend_on_its_neighbours(op, K, V, dtype):
    bounds = [*PACKING, 231, 247]  # 32 and 16 tokens, too
    r = make_request(op, cu=bounds, K=K, V=V, dtype=dtype)
    packed, packed_grads, backward = gradients(r, ("q", "k", "v", "g", "beta", "initial_state"))
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        rows = {name: getattr(r, name)[:, start:end] for name in ("q", "k", "v", "g", "beta")}
        alone = replace(r, cu_seqlens=None, initial_state=r.initial_state[n : n + 1], **rows)
        run, back = hooks(op)
        result = run(replace(alone, save_for_backward=True))
        assert torch.equal(result.o, packed.o[:, start:end])
        assert torch.equal(result.final_state[0], packed.final_state[n])
        grads = back(
            replace(
                alone, saved=result.saved, grad_o=backward.grad_o[:, start:end],
                grad_final_state=backward.grad_final_state[n : n + 1], needs_grad=backward.needs_grad,
            )
        ).grads  # fmt: skip
        assert torch.equal(grads.pop("initial_state")[0], packed_grads["initial_state"][n])
        assert_equal(grads, {name: packed_grads[name][:, start:end] for name in grads})


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 130])
@pytest.mark.parametrize(("K", "V"), [(12, 10), (33, 5), (128, 64)])
def test_a_sequence_of_a_dense_batch_does_not_depend_on_the_others(K, V, T, dtype):
    """More states than one group of lanes has (``batch_invariant``): outputs, final states and gradients."""
    names = ("q", "k", "v", "g", "beta")
    r = make_request(B=18, T=T, H=1, HV=4, K=K, V=V, dtype=dtype, batch_invariant=True)
    whole, expected, backward = gradients(r, (*names, "initial_state"))
    run, back = hooks(CHUNK)
    for n in (0, 17):
        row = slice(n, n + 1)
        own = {name: getattr(r, name)[row] for name in (*names, "initial_state")}
        alone = replace(r, **own, save_for_backward=True)
        result = run(alone)
        assert torch.equal(result.o, whole.o[row])
        assert torch.equal(result.final_state, whole.final_state[row])
        asked = {name: getattr(backward, name)[row] for name in ("grad_o", "grad_final_state")}
        found = back(replace(alone, saved=result.saved, needs_grad=backward.needs_grad, **asked)).grads
        assert_equal(found, {name: expected[name][row] for name in found})


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(64, 5), (33, 10), (33, 31), (128, 65)])
def test_rows_of_odd_lengths_do_not_depend_on_the_batch_either(T, v_first, K, V):
    r = make_request(RECURRENT, B=6, T=T, H=3, K=K, V=V, state_v_first=v_first)
    whole = forward(r)
    for rows in (slice(1, 2), slice(5, 6), slice(1, 4)):
        part = {name: getattr(r, name)[rows] for name in ("q", "k", "v", "g", "beta", "initial_state")}
        found = forward(replace(r, **part))
        assert torch.equal(found.o, whole.o[rows])
        assert torch.equal(found.final_state, whole.final_state[rows])


@pytest.mark.parametrize("op", [CHUNK, RECURRENT])
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("HV", [1, 5])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("gap", [0, 1])
def test_a_sequence_of_a_pool_does_not_depend_on_its_neighbours(op, T, HV, v_first, gap):
    """Slots of one sequence are a view that those of several are not, and a state is read in the same order in both."""
    K, V = 128, 96
    memory = torch.randn(9, HV + gap, *((V, K) if v_first else (K, V)))
    slots = torch.tensor([7, 2, 4])
    whole = make_request(op, B=3, T=T, H=HV, K=K, V=V, state=False, state_v_first=v_first)

    def run(rows):
        pool = memory.clone()[:, :HV]
        inputs = {name: getattr(whole, name)[rows] for name in ("q", "k", "v", "g", "beta")}
        own = {"initial_state": pool, "ssm_state_indices": slots[rows], "inplace_final_state": True}
        return forward(replace(whole, **inputs, **own, output_final_state=False)).o, pool[slots[rows]]

    o, states = run([0, 1, 2])
    for rows in ([0], [1], [2], [2, 0]):
        own_o, own_states = run(rows)
        assert torch.equal(own_o, o[rows])
        assert torch.equal(own_states, states[rows])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_do_not_depend_on_how_work_is_cut(layout):
    """Windows of one step and groups of one lane against one window and one group."""
    r = make_request(**LAYOUTS[layout], return_intermediate_states=True)
    expected, expected_grads, _ = gradients(r)
    found, grads, _ = gradients(r, functions=cut_chunks(chunks=1, lanes=1))
    assert torch.equal(found.o, expected.o)
    assert torch.equal(found.final_state, expected.final_state)
    assert torch.equal(found.h, expected.h)
    for name in ("A_log", "dt_bias"):
        # Their sums over tokens are cut as the work is.
        assert relative_error(grads.pop(name), expected_grads.pop(name)) < 1e-6
    assert_equal(grads, expected_grads)


@pytest.mark.parametrize("names", [("v",), ("q",), ("g",), ("A_log",), ("initial_state",), ("beta", "dt_bias")])
@pytest.mark.parametrize("op", [CHUNK, RECURRENT])
def test_asking_for_some_gradients_changes_none(op, names):
    r = make_request(op, cu=PACKING, HV=4)
    _, everything, _ = gradients(r)
    _, some, _ = gradients(r, names)
    assert_equal(some, {name: everything[name] for name in names})


@pytest.mark.parametrize("layout", [{"B": 5, "T": 1}, {"cu": [0, 1, 2, 3], "T": 5}])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(("K", "V"), [(12, 10), (128, 96)])
def test_the_decoding_path_is_the_general_one(layout, pooled, K, V):
    """Which a batch takes that has a sequence of two tokens behind the others."""
    N = 5 if "B" in layout else 3
    options = {"K": K, "V": V}
    if pooled:
        options |= {"inplace_final_state": True, "ssm_state_indices": torch.tensor([6, -1, 0, 3, 2])[:N]}
        options["initial_state"] = torch.randn(7, 4, K, V)
    r = make_request(RECURRENT, **layout, HV=4, **options)
    longer = {n: getattr(r, n).flatten(0, 1)[[*range(N), 0, 1]][None] for n in ("q", "k", "v", "g", "beta")}
    longer["cu_seqlens"] = torch.tensor([*range(N + 1), N + 2])
    if pooled:
        longer["ssm_state_indices"] = torch.cat([r.ssm_state_indices, torch.tensor([1])])
        longer["initial_state"] = r.initial_state.clone()
    else:
        longer["initial_state"] = r.initial_state[[*range(N), 0]]
    general = replace(r, **longer)
    found, expected = forward(r), forward(general)
    assert torch.equal(found.o.flatten(0, 1)[:N], expected.o[0, :N])
    assert not found.o.flatten(0, 1)[N:].any()
    states, wanted = (r.initial_state, general.initial_state) if pooled else (found.final_state, expected.final_state)
    kept = [0, 2, 3, 4, 5, 6] if pooled else range(N)
    assert torch.equal(states[kept], wanted[kept])


STEPS = {
    "plain": {"in_kernel": False}, "half": {"dtype": torch.bfloat16}, "float64": {"dtype": torch.float64},
    "bounded": {"lower_bound": -5.0}, "no rate": {"lower_bound": -5.0, "A_log": None},
    "negative eigenvalues": {"allow_neg_eigval": True}, "no final state": {"output_final_state": False},
    "in place": {"inplace_final_state": True, "output_final_state": False},
    "pool": {"pooled": True}, "half pool call": {"pooled": True, "dtype": torch.float16},
    "V first": {"state_v_first": True}, "V first, in place": {"state_v_first": True, "inplace_final_state": True},
    "V first, pool": {"state_v_first": True, "pooled": True},
}  # fmt: skip


@pytest.mark.parametrize("layout", [{"B": 3, "T": 1}, {"cu": [0, 1, 2, 3]}], ids=["rows", "packed"])
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("H", "K", "V"), [(4, 64, 64), (3, 12, 10), (5, 128, 128), (4, 16, 33)])
def test_a_small_step_has_the_bits_of_the_general_path(layout, options, H, K, V):
    options = dict(options)
    pooled, removed = options.pop("pooled", False), {n: options.pop(n) for n in ("A_log",) if n in options}
    if pooled:
        wide = torch.float32 if options.get("dtype") != torch.float64 else torch.float64
        sizes = (V, K) if options.get("state_v_first") else (K, V)
        options |= {"initial_state": torch.randn(7, H, *sizes, dtype=wide), "output_final_state": False}
        options |= {"inplace_final_state": True, "ssm_state_indices": torch.tensor([6, 0, 3])}

    def run(compute):
        r = replace(make_request(RECURRENT, **layout, H=H, K=K, V=V, **options), **removed)
        r = replace(r, initial_state=r.initial_state.clone())
        result = compute(r)
        return result.o, result.final_state, r.initial_state

    expected = run(recurrent.general_forward)
    for _ in range(2):  # the second reuses scratch memory
        for found, state in zip(run(small_step.small_step), expected, strict=True):
            assert (found is None) == (state is None)
            if found is not None:
                assert torch.equal(found, state)
                assert (found.dtype, found.stride()) == (state.dtype, state.stride())


@pytest.mark.parametrize(
    "options",
    [
        {"T": 2}, {"HV": 4}, {"state": False}, {"state_v_first": True, "K": 11}, {"K": 512, "V": 512},
        {"B": 1, "cu": [0, 0, 2]}, {"slots": [0, -1, 2]}, {"slots": [0, 5, 2]},
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_are_no_small_steps(options):
    options = {"B": 3, "T": 1, "K": 12, "V": 10} | options
    slots = options.pop("slots", None)
    if slots is not None:
        options |= {"initial_state": torch.randn(7, 2, 12, 10), "ssm_state_indices": torch.tensor(slots)}
        options |= {"inplace_final_state": True, "pad_slot_id": 5}
    if "cu" in options:
        options["T"] = None
    assert small_step.small_step(make_request(RECURRENT, **options)) is None


def test_scratch_memory_of_steps_is_bounded():
    for B in range(1, 3 * small_step.MAX_KEPT):
        assert small_step.small_step(make_request(RECURRENT, B=B, T=1)) is not None
    assert len(small_step._kept) == small_step.MAX_KEPT


def test_threads_that_run_the_same_step_do_not_share_scratch_memory():
    r = make_request(RECURRENT, B=4, T=1, H=4, K=64, V=64)
    others = [replace(r, q=r.q * i) for i in range(1, 9)]
    expected = [recurrent.general_forward(other).o for other in others]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for found, o in zip(pool.map(recurrent.recurrent_forward, others), expected, strict=True):
                assert torch.equal(found.o, o)

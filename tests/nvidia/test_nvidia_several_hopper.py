"""Several sequences cut into segments, prefills also over a pool; needs an sm_90 GPU."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import installed
import pytest
import torch

import kda_core

installed.need_backend("nvidia")

from test_nvidia_segments_hopper import INPUTS, KINDS, call, error, kernels, trained, upstream

pytestmark = pytest.mark.platform("nvidia_hopper")

DEVICE = "cuda"
PACKS = {"one": (8200,), "uneven": (5001, 0, 97, 11400), "three": (4096, 4128, 5071)}
"""Lengths of packed sequences; rows behind the last one belong to none."""
LEFT = 77
Arguments = dict[str, Any]


def packed(kind: str, pack: str, H: int = 2, **more: Any) -> Arguments:
    lengths = PACKS[pack]
    arguments = call(kind, sum(lengths) + LEFT, H, H)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    state = torch.randn(len(lengths), H, 128, 128, device=DEVICE)
    return arguments | {"cu_seqlens": bounds, "initial_state": state, **more}


def run(arguments: Arguments, **more: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    with torch.no_grad():
        return kda_core.chunk_kda(**(arguments | more), backend="nvidia")


def in_pool(arguments: Arguments, slots: list[int], size: int = 11, **more: Any) -> Arguments:
    """The states in a pool, of which no other slot is a number; sequence n in slots[n], skipped where that is -1."""
    given = arguments["initial_state"]
    pool = torch.full((size, *given.shape[1:]), torch.nan, device=DEVICE)
    for n, slot in enumerate(slots):
        if slot >= 0:
            pool[slot] = given[n]
    indices = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    return arguments | {"initial_state": pool, "ssm_state_indices": indices, "output_final_state": False, **more}


def one_head(arguments: Arguments, n: int) -> Arguments:
    """Sequence n's first head for the oracle."""
    begin, end = arguments["cu_seqlens"][n : n + 2].tolist()
    rows = {x: arguments[x][:, begin:end, :1].double().cpu() for x in ("q", "k", "v", "g", "beta")}
    own = {"initial_state": arguments["initial_state"][n : n + 1, :1].double().cpu(), "cu_seqlens": None}
    return arguments | rows | own


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("kind", KINDS)
def test_as_exact_as_sequences_that_are_not_cut(kind: str, pack: str):
    arguments = packed(kind, pack)
    assert kernels(arguments)[2:4] == ("transitions_hopper", "join_hopper")
    assert "join_hopper" not in kernels(arguments | {"batch_invariant": True})
    (o, final), (whole, last) = run(arguments), run(arguments, batch_invariant=True)
    assert torch.equal(o[:, -LEFT:], torch.zeros_like(o[:, -LEFT:]))
    for n, length in enumerate(PACKS[pack]):
        if length == 0:
            assert torch.equal(final[n], arguments["initial_state"][n])
            continue
        with torch.no_grad():
            exact, state = kda_core.chunk_kda(**one_head(arguments, n), backend="reference")
        begin, end = arguments["cu_seqlens"][n : n + 2].tolist()
        rows = [x[:, begin:end, :1] for x in (o, whole)]
        assert error(rows[0], exact) <= 1.1 * error(rows[1], exact) + 2e-4
        assert error(final[n : n + 1, :1], state) <= 1.1 * error(last[n : n + 1, :1], state) + 2e-4


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_holds_what_a_call_with_states_returns(kind: str, heads: int):
    """The same bits; other slots stay as they were, and a skipped sequence has no output, whatever its rows hold."""
    arguments = packed(kind, "uneven", heads)
    o, final = run(arguments)
    slots = [7, 2, -1, 4]
    pooled = in_pool(arguments, slots)
    begin, end = arguments["cu_seqlens"][2:4].tolist()
    pooled["v"] = arguments["v"].clone()
    pooled["v"][:, begin:end] = torch.nan
    found, _ = run(pooled)
    assert torch.equal(found[:, :begin], o[:, :begin])
    assert torch.equal(found[:, end:], o[:, end:])
    assert not found[:, begin:end].any()
    pool = pooled["initial_state"]
    for n in (0, 1, 3):
        assert torch.equal(pool[slots[n]], final[n])
    assert pool[[0, 1, 3, 5, 6, 8, 9, 10]].isnan().all()


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_from_zero_and_written_elsewhere(dtype: torch.dtype, v_first: bool):
    arguments = packed("slow", "uneven")
    fresh = torch.tensor([True, False, True, False], device=DEVICE)
    zeros = arguments["initial_state"] * fresh[:, None, None, None]
    o, final = run(arguments, initial_state=zeros)
    pooled = in_pool(arguments, [7, 2, 0, 4])
    pooled["initial_state"][[2, 4]] = torch.nan
    read = pooled["initial_state"].mT.contiguous() if v_first else pooled["initial_state"]
    written = torch.full((9, *final.shape[1:]), -3.0, device=DEVICE, dtype=dtype)
    others = torch.tensor([8, 1, -1, 0], dtype=torch.int64, device=DEVICE)
    more = {"final_state_indices": others, "final_state_pool": written, "state_v_first": v_first}
    before = read.clone()
    found, _ = run(pooled | {"initial_state": read, "has_initial_state": fresh}, **more)
    assert torch.equal(found, o)
    assert torch.equal(before.view(torch.int32), read.view(torch.int32))
    right = final.mT if v_first else final
    assert torch.equal(written[8], right[0].to(dtype))
    assert torch.equal(written[0], right[3].to(dtype))
    # The second sequence has no rows and the third one's state is dropped.
    assert (written[1:8] == -3).all()
    pooled = in_pool(arguments, [7, 2, 0, 4])
    before = pooled["initial_state"].clone()
    o, _ = run(arguments)
    found, _ = run(pooled, update_state=False)
    assert torch.equal(found, o)
    assert torch.equal(before.view(torch.int32), pooled["initial_state"].view(torch.int32))


def as_exact(arguments: Arguments) -> dict[str, torch.Tensor]:
    """Results and gradients, whose errors are those of a call that is not cut; float32 calls never are."""
    assert kernels(arguments | {"save_for_backward": True})[2:4] == ("transitions_hopper", "join_hopper")
    exact = trained(arguments | {n: arguments[n].float() for n in ("q", "k", "v")})
    cut, whole = trained(arguments), trained(arguments, batch_invariant=True)
    for name, right in exact.items():
        right = right.double().cpu()
        assert error(cut[name], right) <= 1.1 * error(whole[name], right) + 2e-4, name
    return cut


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_as_exact_as_of_sequences_that_are_not_cut(kind: str, pack: str):
    found = as_exact(packed(kind, pack))
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not found[name][:, -LEFT:].any(), name
    for n, length in enumerate(PACKS[pack]):
        if length == 0:
            assert torch.equal(found["dinitial_state"][n], upstream(found["final_state"])[n])


@pytest.mark.parametrize("B", [2, 4])
def test_gradients_of_a_batch(B: int):
    one = call("slow", B * 4133, 2, 2)
    rows = {n: one[n].view(B, 4133, *one[n].shape[2:]) for n in INPUTS[:5]}
    batch = one | rows | {"initial_state": torch.randn(B, 2, 128, 128, device=DEVICE), "state_v_first": True}
    right = as_exact(batch)
    wide = torch.zeros(B, 4140, 2, 136, dtype=torch.bfloat16, device=DEVICE)
    for name, x in trained(batch | {"v": wide[:, :4133, :, 8:].copy_(rows["v"])}).items():
        assert torch.equal(right[name], x), name


@pytest.mark.parametrize("kind", ["slow", "mixed"])
def test_gradients_repeat_and_need_nothing_that_a_forward_saved(kind: str):
    """The backward of ``fused_recurrent_kda`` makes the states at the starts of segments itself."""
    arguments = packed(kind, "uneven", 4)
    first = trained(arguments)
    for _ in range(4):
        for name, x in trained(arguments).items():
            assert torch.equal(first[name], x), name
    leaves = {n: arguments[n].detach().requires_grad_() for n in INPUTS}
    o, state = kda_core.fused_recurrent_kda(**(arguments | leaves), backend="nvidia")
    made = torch.autograd.grad([o, state], list(leaves.values()), [upstream(o), upstream(state)])
    for name, x in zip(leaves, made, strict=True):
        assert torch.equal(first[f"d{name}"], x), name


def test_replays_of_a_captured_call_with_other_lengths_and_slots():
    arguments = packed("mixed", "three")
    pooled = in_pool(arguments, [0, 1, 2])
    start = pooled["initial_state"][:3].clone()
    run(pooled)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = run(pooled)
    T = arguments["q"].shape[1]
    for bounds, slots in (([0, 4096, 8224, T], [0, 1, 2]), ([0, 1, 9000, 9000], [5, 3, 0]), ([0, T, T, T], [2, -1, 9])):
        for x in (arguments, pooled):
            x["cu_seqlens"].copy_(torch.tensor(bounds))
        pooled["ssm_state_indices"].copy_(torch.tensor(slots))
        pooled["initial_state"].fill_(torch.nan)
        for n, slot in enumerate(slots):
            if slot >= 0:
                pooled["initial_state"][slot] = start[n]
        twin = pooled | {"initial_state": pooled["initial_state"].clone()}
        graph.replay()
        o, _ = run(twin)
        assert torch.equal(captured, o)
        assert torch.equal(twin["initial_state"].view(torch.int32), pooled["initial_state"].view(torch.int32))
        (whole, _), last = run(arguments, batch_invariant=True, initial_state=start), bounds[-1]
        taken = [slice(*bounds[n : n + 2]) for n, slot in enumerate(slots) if slot >= 0]
        for rows in taken:
            if rows.start < rows.stop:
                assert error(o[:, rows], whole[:, rows].double().cpu()) < 5e-3
        assert not o[:, last:].any()


def test_repeats_bitwise():
    arguments = packed("slow", "uneven", 4)
    o, final = run(arguments)
    for _ in range(5):
        again, state = run(arguments)
        assert torch.equal(o, again)
        assert torch.equal(final, state)


@pytest.mark.parametrize("B", [2, 4])
def test_a_batch(B: int):
    """As exact as a batch that is not cut; the same bits through copies, where its rows do not lie evenly."""
    T, H = 4096 + 37, 2
    one = call("slow", B * T, H, H)
    state = torch.randn(B, H, 128, 128, device=DEVICE)
    rows = {n: one[n].view(B, T, *one[n].shape[2:]) for n in ("q", "k", "v", "g", "beta")}
    batch = one | rows | {"initial_state": state}
    assert kernels(batch)[2:4] == ("transitions_hopper", "join_hopper")
    (o, final), (whole, last) = run(batch), run(batch, batch_invariant=True)
    first = {n: x[:, :, :1].double().cpu() for n, x in rows.items()} | {"initial_state": state[:, :1].double().cpu()}
    with torch.no_grad():
        exact, end = kda_core.chunk_kda(**(batch | first), backend="reference")
    assert error(o[:, :, :1], exact) <= 1.1 * error(whole[:, :, :1], exact) + 2e-4
    assert error(final[:, :1], end) <= 1.1 * error(last[:, :1], end) + 2e-4
    wide = torch.zeros(B, T + 3, H, 136, dtype=torch.bfloat16, device=DEVICE)
    v, out = wide[:, :T, :, 8:].copy_(rows["v"]), torch.zeros(B, T + 3, H, 128, dtype=torch.bfloat16, device=DEVICE)
    again, state = run(batch | {"v": v}, out=out[:, 3:])
    assert torch.equal(again, o)
    assert torch.equal(state, final)
    assert not out[:, :3].any()

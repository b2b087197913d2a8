"""Memory that a call writes: it belongs to no input, and no two of its elements are one."""

from __future__ import annotations

import random

import pytest
import torch
from toys import inputs

import kda_core
from kda_core._expect import meets_itself, share_memory

MEMORY = torch.zeros(400, dtype=torch.uint8)


def drawn(rng: random.Random) -> torch.Tensor:
    """A view of ``MEMORY`` with any strides."""
    dtype = rng.choice([torch.uint8, torch.int16, torch.int32])
    while True:
        sizes = [rng.choice([0, 1, 2, 2, 3, 4]) for _ in range(rng.randint(0, 4))]
        strides = [rng.choice([0, 1, 2, 3, 4, 5, 6, 8, 12, 16]) for _ in sizes]
        offset = rng.randint(0, 60)
        last = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True) if n)
        if (last + 1) * dtype.itemsize <= MEMORY.numel():
            return MEMORY.view(dtype).as_strided(sizes, strides, offset)


def places(t: torch.Tensor) -> list[int]:
    """The first byte of every element."""
    found = [t.data_ptr() - MEMORY.data_ptr()]
    for size, stride in zip(t.shape, t.stride(), strict=True):
        found = [place + i * stride * t.element_size() for place in found for i in range(size)]
    return found


def test_shared_memory_is_what_a_list_of_the_bytes_says():
    rng = random.Random(7)
    shared = met = 0
    for _ in range(3000):
        a, b = drawn(rng), drawn(rng)
        of_a, of_b = ({p + i for p in places(t) for i in range(t.element_size())} for t in (a, b))
        description = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (a, b)]
        assert share_memory(a, b) == bool(of_a & of_b), description
        assert meets_itself(a) == (len(set(places(a))) < a.numel()), description
        shared, met = shared + bool(of_a & of_b), met + meets_itself(a)
    assert shared > 200
    assert met > 300


B, T, H, K = 1, 6, 2, 4


def call_of(memory: torch.Tensor, at: int, **options):
    """A call whose ``out`` lies in ``memory`` from an element on."""
    arguments = dict(zip(("q", "k", "v", "g", "beta"), inputs(T, K=K), strict=True))
    out = memory.view(-1)[at : at + B * T * H * K].view(B, T, H, K)
    return kda_core.chunk_kda(**{**arguments, **options}, out=out)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("seen", [False, True])
def test_an_out_that_overlaps_an_input_is_refused_by_name(name, seen):
    """Only one that began where an input does was found: results were wrong in silence."""
    shape = {"beta": (B, T, H), "initial_state": (B, H, K, K)}.get(name, (B, T, H, K))
    size, memory = torch.Size(shape).numel(), -torch.rand(400)
    memory = memory.abs() if name == "beta" else memory
    given = {name: memory[100 : 100 + size].view(shape)}
    if seen:  # a call with this signature was right
        call_of(torch.zeros(100), 0, **given)
    for at in (100 - 47, 101, 100 + size - 1):
        before = memory.clone()
        with pytest.raises(ValueError, match=f"^out: expected memory of its own, got memory that {name} overlaps"):
            call_of(memory, at, **given)
        torch.testing.assert_close(memory, before, rtol=0, atol=0)
    for at in (100 - 48, 100 + size):
        call_of(memory, at, **given)


@pytest.mark.parametrize("seen", [False, True])
def test_an_out_that_overlaps_a_pool_is_refused(seen):
    pool, index = torch.zeros(3, H, K, K), torch.tensor([1])
    given = {"initial_state": pool, "ssm_state_indices": index}
    if seen:
        call_of(torch.zeros(100), 0, **given)
    with pytest.raises(ValueError, match=r"^out: expected memory of its own, got memory that initial_state overlaps"):
        call_of(pool, 40, **given)
    with pytest.raises(ValueError, match=r"^out: expected memory of its own, got the memory of initial_state"):
        call_of(pool, 0, **given)


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("name", ["q", "v", "g"])
def test_a_pool_that_overlaps_an_input_is_refused(op, name):
    arguments = dict(zip(("q", "k", "v", "g", "beta"), inputs(T, K=K), strict=True))
    memory = -torch.rand(200)
    arguments[name] = memory[90 : 90 + B * T * H * K].view(B, T, H, K)
    pool = memory[:96].view(3, H, K, K)
    with pytest.raises(ValueError, match=f"^initial_state: expected memory of its own, got memory that {name} over"):
        getattr(kda_core, op)(**arguments, initial_state=pool, ssm_state_indices=torch.tensor([1]))


@pytest.mark.parametrize("strides", [(16, 16, 4, 1), (32, 16, 4, 2), (31, 16, 4, 1)])
def test_a_pool_whose_slots_overlap_is_refused(strides):
    pool = torch.zeros(400).as_strided((3, H, K, K), strides)
    for op in (kda_core.chunk_kda, kda_core.fused_recurrent_kda):
        with pytest.raises(
            ValueError, match=r"^initial_state: expected memory of its own for every element, got overl"
        ):
            op(*inputs(T, K=K), initial_state=pool, ssm_state_indices=torch.tensor([1]))
    out = torch.zeros(400).as_strided((B, T, H, K), (48, 8, 3, 1))
    with pytest.raises(ValueError, match=r"^out: expected memory of its own for every element, got overlapping"):
        kda_core.chunk_kda(*inputs(T, K=K), out=out)


def test_views_that_lie_between_each_other_are_served():
    """Slices of one buffer, pages of one pool, and an empty tensor within another overlap nothing."""
    wide = torch.randn(B, T, H, 5 * K)
    q, k, v, out = (wide[..., i * K : (i + 1) * K] for i in range(4))
    g, beta = -torch.rand(B, T, H, K), torch.rand(B, T, H)
    expected = kda_core.chunk_kda(q, k, v, g, beta)[0]
    for _ in range(2):
        assert kda_core.chunk_kda(q, k, v, g, beta, out=out)[0] is out
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    pages = torch.zeros(3, 2, H, K, K)
    for page in (0, 1):
        kda_core.fused_recurrent_kda(
            q, k, v, g, beta, initial_state=pages[:, page], ssm_state_indices=torch.tensor([1]), out=out
        )
    empty = v[:, :0]
    kda_core.chunk_kda(*(t[:, :0] for t in (q, k, v, g, beta)), out=empty.as_strided(empty.shape, empty.stride(), 2))

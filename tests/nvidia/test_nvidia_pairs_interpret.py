"""Pairs of slots in Triton's interpreter: which there are, and the states that the recurrences store of them; and the
segments of several sequences.

The interpreter must be chosen before triton is imported, so one child process (this file, run as a script) computes
everything.
"""

from __future__ import annotations

import itertools
import json

import installed
import interpreted
import pytest
import torch

installed.need_backend("nvidia")
installed.need_package("triton")

C, HV, K = 32, 2, 16

CALLS = {
    # name: (B, T, boundaries)
    "dense, half a pair left": (3, 77, None),
    "dense, many pairs": (2, 1300, None),
    "dense, no pair": (2, 32, None),
    "packed": (1, 460, [0, 1, 32, 32, 64, 97, 160, 224, 289, 439, 439]),
    "packed, one sequence": (1, 128, [0, 128]),
    "packed, nothing in it": (1, 40, [0, 0, 0]),
    "no sequence": (1, 7, [0]),
}


def sequences(name: str) -> list[tuple[int, int, int, int]]:
    """First row of each sequence, its rows, first slot, first place among the states of pairs."""
    B, T, bounds = CALLS[name]
    if bounds is None:
        return [(n * T, T, n * -(-T // C), n * -(-T // (2 * C))) for n in range(B)]
    parts = enumerate(itertools.pairwise(bounds))
    return [(b, e - b, b // C + n, b // (2 * C) + n) for n, (b, e) in parts]


def listed(name: str) -> list[list[list[int]]]:
    """The tables of pairs that ``pairs_kernel`` writes, as far as it says; checks rows behind the last sequence."""
    from kda_core_nvidia.gradients_pairs import pairs_kernel

    B, T, bounds = CALLS[name]
    N = len(sequences(name))
    most = B * -(-T // (2 * C)) if bounds is None else T // (2 * C) + N + 1
    table, count = torch.full((2, most, 4), -7, dtype=torch.int32), torch.full((2,), -7, dtype=torch.int32)
    grads = [torch.full((B * T, HV, K), torch.nan) for _ in range(4)] + [torch.full((B * T, HV), torch.nan)]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    grid, sizes = (N + (1 if bounds is None else 5),), (T, N, -(-T // C), most, HV, K, C, 16)
    pairs_kernel[grid](table, count, *grads, cu_seqlens, *sizes)
    end = B * T if bounds is None else bounds[-1]
    for x in grads:
        assert x[:end].isnan().all()
        assert torch.equal(x[end:], torch.zeros_like(x[end:]))
    assert (table[..., 2] < most).all()
    return [x[: max(1, n)].tolist() for x, n in zip(table, count.tolist(), strict=True)]


def stored(name: str, every_second: bool) -> dict[str, torch.Tensor]:
    """What ``recurrences_kernel`` writes, for inputs that the call's name is the seed of."""
    from kda_core_nvidia.backward_reverse import recurrences_kernel

    torch.manual_seed(len(name))
    B, T, bounds = CALLS[name]
    N, NT, count = len(sequences(name)), -(-T // C), 0
    slots, places = (B * -(-T // n) if bounds is None else T // n + N + 1 for n in (C, 2 * C))
    v, do = torch.randn(B, T, HV, K), torch.randn(B, T, HV, K)
    keys, D = 0.1 * torch.randn(slots, HV, 3, C, K), torch.rand(slots, HV, K)
    X, P = (0.1 * torch.randn(slots, HV, C, C) for _ in range(2))
    initial, final = torch.randn(N, HV, K, K), torch.randn(N, HV, K, K)
    count, rows = (places, 2 * C) if every_second else (slots, C)
    z = torch.full((count, HV, rows, K), torch.nan)
    states, state_grads = (torch.full((count, HV, K, K), torch.nan) for _ in range(2))
    dv, grad = torch.full_like(v, torch.nan), torch.full_like(initial, torch.nan)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    strides = (T * HV * K, HV * K, K)
    recurrences_kernel[(2 * N * HV,)](
        v, do, keys, X, P, D, initial, final, z, states, state_grads, dv, grad, None, None, cu_seqlens,
        *strides, *strides, T, 0, NT, 0.5, N * HV, HV, K, K, C, 1.0, K, K, K, False, False, "ieee", 1, every_second,
        num_warps=1,
    )  # fmt: skip
    return {"z": z, "states": states, "state_grads": state_grads, "dv": dv, "grad": grad}


def check_states(name: str) -> None:
    """Pairs have the states at their starts, their gradients at their ends, and z of their rows."""
    every, second = stored(name, False), stored(name, True)
    for n in ("dv", "grad"):
        assert torch.equal(every[n].nan_to_num(7.0), second[n].nan_to_num(7.0)), n
    for _, rows, slot, place in sequences(name):
        chunks = -(-rows // C)
        for i in range(chunks):
            pair = place + i // 2
            assert torch.equal(every["z"][slot + i], second["z"][pair][:, i % 2 * C : (i % 2 + 1) * C]), (name, i)
            if i % 2 == 0:
                assert torch.equal(every["states"][slot + i], second["states"][pair]), (name, i)
            if i % 2 == 1 or i == chunks - 1:
                assert torch.equal(every["state_grads"][slot + i], second["state_grads"][pair]), (name, i)


POOL, PAD = 9, 3
SEGMENTS: dict[str, tuple[list[int] | None, dict[str, list[int]]]] = {
    # name: boundaries of sequences (None: a batch of three of 100 rows), slots that are read and written
    "packed": ([0, 70, 70, 71, 200, 260], {}),
    "nothing in it": ([0, 0, 0], {}),
    "pool": ([0, 70, 70, 71, 200, 260], {"indices": [5, 0, PAD, POOL, 8]}),
    "elsewhere": ([0, 70, 70, 71, 200, 260], {"indices": [5, 0, 1, 2, -1], "final_indices": [1, 2, PAD, -1, 4]}),
    "batch": (None, {}),
    "batch in a pool": (None, {"indices": [2, -1, 4]}),
}
ROWS, LEFT = 32, 40
"""Rows of a segment, and behind the last sequence."""


def cut(name: str) -> list[list[int]]:
    """What ``segments_kernel`` writes: boundaries, sequences, own numbers, and where the last states go.

    And what ``first_segments_kernel`` takes for each sequence, of 100 times a segment's number and the value channel.
    """
    from kda_core_nvidia.segments import first_segments_kernel

    from kda_core.triton_lib.fragments import segments_kernel

    bounds, more = SEGMENTS[name]
    N = 3 if bounds is None else len(bounds) - 1
    T, per = (100, 4) if bounds is None else (bounds[-1] + LEFT, 0)
    count = N * per if bounds is None else T // ROWS + N
    pools = {n: torch.tensor(more[n]) if n in more else None for n in ("indices", "final_indices")}
    table = [torch.full((count + more,), -7) for more in (1, 1, 0, 0)]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    sizes = (N, T, ROWS, per, 1, PAD, POOL, 1, POOL, "final_indices" not in more)
    segments_kernel[(count + 1,)](cu_seqlens, *pools.values(), *table, *sizes)
    starts = (100.0 * torch.arange(count)[:, None, None, None] + torch.arange(K)[:, None]).expand(-1, HV, K, K)
    first = torch.full((N, HV, K, K), -7.0)
    first_segments_kernel[(1, N * HV)](starts.contiguous(), first, cu_seqlens, ROWS, per, HV, K, K, K, False)
    return [x.tolist() for x in (*table, first[:, 1, 3])]


def boundaries() -> list[int]:
    """Those of a sequence of 200 rows in segments of 64, without any other table."""
    from kda_core.triton_lib.fragments import segments_kernel

    bounds = torch.full((5,), -7)
    segments_kernel[(5,)](None, None, None, bounds, None, None, None, 1, 200, 64, 4, 0, 0, 0, 0, 0, False)
    return bounds.tolist()


def test_boundaries_of_one_sequence(found):
    assert found["boundaries"] == [0, 64, 128, 192, 200]


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_of_several_sequences(found, name: str):
    """Each sequence has one, and skipped ones none; its last state is stored once, where the call asks for it."""
    bounds, more = SEGMENTS[name]
    ends = [100, 200, 300] if bounds is None else bounds[1:]
    places, whose, own, last, first = found[f"segments, {name}"]
    covered: dict[int, list[tuple[int, int]]] = {n: [] for n in range(len(ends))}
    stored: dict[int, int] = {}
    for i, n in enumerate(whose):
        if n >= 0:
            covered[n].append((places[i], places[i + 1]))
            assert own[i] == i
            stored |= {n: last[i]} if last[i] >= 0 else {}
        elif i < len(own):
            assert (own[i], last[i]) == (-1, -1)
    if not more:
        assert first == [[100 * whose.index(n) + v for v in range(K)] for n in range(len(ends))]
    read = more.get("indices", [0] * len(ends))
    written = more.get("final_indices", more.get("indices", list(range(len(ends)))))
    for n, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        if more and (not 0 <= read[n] < POOL or read[n] == PAD):
            assert covered[n] == []
            assert n not in stored
            continue
        starts = list(range(begin, end, ROWS)) or [begin]
        assert covered[n] == [(x, min(x + ROWS, end)) for x in starts]
        # A sequence without rows writes its state where it is a result, and where it lies.
        writes = not more or (0 <= written[n] < POOL and written[n] != PAD)
        writes &= begin < end or "final_indices" not in more
        assert stored.get(n, -1) == (written[n] if writes else -1)


@pytest.fixture(scope="module")
def found():
    return interpreted.printed(__file__)


@pytest.mark.parametrize("name", CALLS)
def test_pairs_of_a_call(found, name: str):
    """Without gaps, each with its rows, its slot and its states: whole ones, and others. A chunk alone is in none."""
    pairs = [
        [row + 2 * C * j, slot + 2 * j, place + j, min(rows - 2 * C * j, 2 * C)]
        for row, rows, slot, place in sequences(name)
        for j in range(-(-(rows - C) // (2 * C)))
    ]
    whole, others = ([pair for pair in pairs if (pair[-1] == 2 * C) == kind] for kind in (True, False))
    assert found[name] == [whole or [[0] * 4], others or [[0] * 4]]


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call[2] != [0]])
def test_states_of_pairs(found, name: str):
    assert f"{name}, states" in found


if __name__ == "__main__":
    from kda_core.testing.interpreter import improve

    improve()
    answer: dict[str, object] = {name: listed(name) for name in CALLS}
    for name, call in CALLS.items():
        if call[2] != [0]:
            check_states(name)
            answer[f"{name}, states"] = True
    answer |= {f"segments, {name}": cut(name) for name in SEGMENTS} | {"boundaries": boundaries()}
    print(json.dumps(answer))

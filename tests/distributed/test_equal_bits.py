"""``deterministic_degree=True``: every number of ranks has the bits of one, gradients of parameters included."""

from __future__ import annotations

import pytest
import torch
from whole_calls import RAW, assembled, inputs, oracle, worst

STEP = "training_step"
ONE = {"tokens": 128}
PACKED = {"cu_seqlens": [0, 0, 21, 80, 80, 120], "tokens": 120}
PADDED = {"cu_seqlens": [0, 5, 125], "tokens": 128}
# Any cells anywhere: a rank without rows, one whose rows are out of order.
SCATTERED = {
    2: [[(64, 96), (16, 64)], [(0, 16), (96, 120)]],
    4: [[], [(112, 120), (0, 48)], [(48, 64), (80, 112)], [(64, 80)]],
}


def drawn(context, dtype=torch.float32):
    T, B, N = context["tokens"], context.get("batch", 1), len(context.get("cu_seqlens", [0, 0])) - 1
    tensors = inputs(T, max(N, B), B=B, K=16, V=12)
    generator = torch.Generator().manual_seed(5)
    grads = {
        n: torch.randn(t, generator=generator)
        for n, t in (("o", (B, T, 4, 12)), ("final_state", (max(N, B), 4, 16, 12)))
    }
    if "cu_seqlens" in context:
        grads["o"][:, context["cu_seqlens"][-1] :] = 0
    return (*({n: t.to(dtype) for n, t in tensors.items()}, {n: t.to(dtype) for n, t in grads.items()}),)


def equal(found, expected):
    """Names of results that differ in a bit."""
    return [n for n, t in expected.items() if not torch.equal(found[n], t)]


@pytest.mark.parametrize(
    ("context", "layout"),
    [
        (ONE, "contiguous"),
        (ONE, "zigzag"),
        (ONE | {"batch": 2}, "contiguous"),
        (PACKED, "scattered"),
        (PADDED, "zigzag"),
    ],
)
@pytest.mark.parametrize("job", ["training_step", "step_by_hooks"])
def test_every_number_of_ranks_has_the_bits_of_one(ranks, context, layout, job):
    tensors, grads = drawn(context)
    options = {**RAW, "output_final_state": True}
    expected, like = None, oracle(tensors, grads, context.get("cu_seqlens"), options)
    for size in (1, 2, 4):
        ranges = "contiguous" if size == 1 else SCATTERED[size] if layout == "scattered" else layout
        asked = {**context, "layout": ranges, "deterministic_degree": True, "grid": 16}
        parts = ranks.run(size, job, tensors, grads, asked, options)
        if job == "step_by_hooks":
            parts, counts = zip(*parts, strict=True)
            assert all(len(set(count.values())) == 1 for count in counts)
            assert sum(count["begin"] for count in counts) == 8
        found = assembled(parts, like)
        assert all(part[f"d{n}"].dtype == t.dtype for part in parts for n, t in tensors.items())
        expected = expected or found
        assert equal(found, expected) == []
        assert all(not part["dA_log"].any() for part in parts[1:])
    assert worst(expected, like)[0] < 2e-5


def test_other_calls_have_other_bits(ranks):
    """So the test above can fail."""
    tensors, grads = drawn(ONE)
    options = {**RAW, "output_final_state": True}
    like = oracle(tensors, grads, None, options)
    one, two = (assembled(ranks.run(size, STEP, tensors, grads, ONE, options), like) for size in (1, 2))
    assert "dA_log" in equal(two, one)


@pytest.mark.end_to_end
def test_compiled_calls_have_the_same_bits(ranks):
    tensors, grads = drawn(PACKED)
    asked = {**PACKED, "layout": SCATTERED[2], "deterministic_degree": True, "grid": 16}
    options = {**RAW, "output_final_state": True}
    assert all(ranks.run(2, "compiled_step", tensors, grads["o"], asked, options, "both"))


@pytest.mark.parametrize("context", [ONE | {"batch": 2}, PACKED])
def test_states_of_chunks_count_from_a_cells_first_row(ranks, context):
    tensors, _ = drawn(context)
    options = {**RAW, "return_intermediate_states": True, "chunk_size": 32, "output_final_state": True}
    asked = {
        **context,
        "deterministic_degree": True,
        "grid": 32,
        "gather": True,
        "layout": [[(0, 96)], [(96, context["tokens"])]],
    }
    (one,) = ranks.run(1, STEP, tensors, {}, {**asked, "layout": "contiguous"}, options)
    first, last = ranks.run(2, STEP, tensors, {}, asked, options)
    assert torch.equal(torch.cat([first["h"], last["h"]], 1), one["h"])
    assert torch.equal(first["final_state"], one["final_state"])
    assert torch.equal(last["final_state"], one["final_state"])
    if "batch" in context:
        whole = oracle(tensors, {}, None, {**options, "output_final_state": False})["h"]
        assert worst({"h": one["h"]}, {"h": whole})[0] < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"grid": 32, "layout": [[(0, 50)], [(50, 128)]]},
            "cells of grid=32 rows with deterministic_degree (multiples of 32, "
            "or the last row 128), got [(0, 50)] on rank 0",
        ),
        ({"grid": 32, "layout": [[(64, 128)], [(0, 32), (32, 64)]]}, ""),
        ({"grid": 32, "layout": [[(32, 128)], [(0, 16), (16, 32)]]}, ""),
        ({"grid": 48}, "got [(0, 64)] on rank 0"),
        (
            {},
            "cells of grid=4096 rows with deterministic_degree (multiples of 4096, "
            "or the last row 128), got [(0, 64)] on rank 0",
        ),
        ({"grid": 0}, "grid: expected a number of at least 1, got 0"),
        ({"grid": 32, "deterministic_degree": False}, "grid: expected None without deterministic_degree=True, got 32"),
    ],
)
def test_cuts_off_the_grid_are_refused_with_the_ranges(ranks, arguments, message):
    """They were accepted, and bits differed in silence."""
    for text in ranks.run(2, "verified", [{"tokens": 128, "deterministic_degree": True, **arguments}]):
        assert message in text
        assert bool(message) == bool(text)


def test_ranks_with_other_grids_are_told_by_verify(ranks):
    asked = [{"tokens": 128, "deterministic_degree": True, "grid": grid} for grid in (32, 64)]
    message = "grid: expected the same on all ranks, got 32 on rank 0 and 64 on rank 1"
    assert ranks.run(2, "verified", asked) == [message] * 2


def test_rows_that_do_not_fit_are_refused_before_they_are_cut(ranks):
    asked = {"tokens": 128, "deterministic_degree": True, "grid": 16}
    found = ranks.run(2, "bad_call", inputs(128, gate=False), asked, {"beta": "short"})
    assert all("beta: expected [B, T, …] = [1, 64, …]" in text for text, _ in found)

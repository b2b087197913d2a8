"""``batch_invariant`` with heads of 128 and 256 channels: few sequences beside more than a chip holds; needs a GPU."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import installed
import pytest
import torch
from torch import Tensor

import kda_core

installed.need_backend("nvidia")

pytestmark = pytest.mark.platform("nvidia_hopper")

DEVICE, BF16 = "cuda", torch.bfloat16
LENGTHS = (4200, *[33] * 70, 64, 600)
"""The first is long enough to be cut, with two heads; all together have a program for every multiprocessor."""
ALONE = (0, 5, 72)
ROWS = ("q", "k", "v", "g", "beta")
GATE = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}


def drawn(T: int, N: int, K: int, dtype: torch.dtype, gate: bool, B: int = 1) -> dict[str, Any]:
    torch.manual_seed(T + N + K)
    shapes = {**dict.fromkeys(("q", "k", "v", "g"), (B, T, 2, K)), "beta": (B, T, 2)}
    call: dict[str, Any] = {n: torch.randn(shape, device=DEVICE).to(dtype) for n, shape in shapes.items()}
    call["initial_state"] = torch.randn(N, 2, K, K, device=DEVICE)
    call |= {"output_final_state": True, "batch_invariant": True, **GATE}
    return call | {"A_log": torch.zeros(2, device=DEVICE), "lower_bound": -5.0 if gate else None}


def results(call: dict[str, Any], backward: bool) -> dict[str, Tensor]:
    """Output and final state, and the gradients of what belongs to one sequence."""
    if not backward:
        with torch.no_grad():
            return dict(zip(("o", "state"), kda_core.chunk_kda(**call, backend="nvidia"), strict=True))
    leaves = {n: call[n].detach().requires_grad_() for n in (*ROWS, "initial_state")}
    o, state = kda_core.chunk_kda(**(call | leaves), backend="nvidia")
    weights = [torch.ones_like(x) * 0.125 for x in (o, state)]
    grads = torch.autograd.grad([o, state], list(leaves.values()), weights)
    found = {"o": o.detach(), "state": state.detach()}
    return found | {f"d{n}": x for n, x in zip(leaves, grads, strict=True)}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("K", "dtype", "gate"),
    [
        (128, torch.bfloat16, True),
        (128, torch.bfloat16, False),
        (128, torch.float16, True),
        (256, torch.bfloat16, True),
    ],
)
def test_packed_sequences(K: int, dtype: torch.dtype, gate: bool, backward: bool):
    bounds = [0, *accumulate(LENGTHS)]
    call = drawn(bounds[-1], len(LENGTHS), K, dtype, gate)
    together = results(call | {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=DEVICE)}, backward)
    for n in ALONE:
        rows = slice(bounds[n], bounds[n + 1])
        own = {x: call[x][:, rows].contiguous() for x in ROWS} | {"initial_state": call["initial_state"][n : n + 1]}
        own["cu_seqlens"] = torch.tensor([0, LENGTHS[n]], dtype=torch.int32, device=DEVICE)
        for name, x in results(call | own, backward).items():
            whole = together[name]
            part = whole[n : n + 1] if name.endswith("state") else whole[:, rows]
            assert torch.equal(x, part), (n, name)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("T", [96, 4128])
def test_dense_batches(K: int, T: int, backward: bool):
    B = 70 if T < 1000 else 8
    call = drawn(T, B, K, BF16, True, B)
    together = results(call, backward)
    for n in (0, B - 1):
        own = {x: call[x][n : n + 1].contiguous() for x in (*ROWS, "initial_state")}
        for name, x in results(call | own, backward).items():
            assert torch.equal(x, together[name][n : n + 1]), (n, name)

"""Training steps whose forward also stores the states of the backward (``disable_recompute``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import installed
import pytest
import torch

import kda_core

installed.need_backend("nvidia")
installed.need_package("triton")

from kda_core_nvidia.aot import kept_cases, trained
from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS
from kda_core_nvidia.plans.forward import saved_specs

from kda_core.hookspecs import MAX_SAVED_TENSORS
from kda_core.request import Request
from kda_core.triton_lib.plan import Plan

STEPS = {case.name: trained(case) for case in kept_cases()}


def saved_by(plan: Plan) -> list[tuple[tuple[int, ...], torch.dtype]]:
    buffers = [plan.buffers[x] for n, x in plan.results.items() if n not in ("o", "final_state", "h") and x]
    return [(b.shape, b.dtype) for b in buffers]


def programs(plan: Plan, kernel: str) -> int:
    return next(x.grid[0] for x in plan.launches if x.name == kernel)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", STEPS)
def test_what_is_saved_is_as_announced(name, arch):
    """On every chip; kernels for Hopper alone write z and states."""
    forward, _ = STEPS[name]
    specs = saved_specs(forward, CHIPS[arch])
    assert len(specs) == (7 if arch == 90 else 5) < MAX_SAVED_TENSORS
    assert saved_by(plan_of(forward, CHIPS[arch])) == [(spec.shape, spec.dtype) for spec in specs]


@pytest.mark.parametrize("name", STEPS)
def test_the_backward_runs_without_states(name):
    """Half of the programs, and no scratch for what the forward has stored."""
    backward = STEPS[name][1]
    kept, whole = (plan_of(x, CHIPS[90]) for x in (backward, replace(backward, disable_recompute=False, saved=())))
    # Programs of 128 channels where there are many.
    factor = 2 if backward.v.shape[2] == 64 else 4
    assert programs(whole, "recurrences_hopper") == factor * programs(kept, "recurrences_hopper")
    assert "prepare_hopper" not in kept.kernels
    assert {"z", "states"} <= whole.buffers.keys() - kept.buffers.keys()


OTHERS: dict[str, dict[str, Any]] = {
    "recomputed": {"disable_recompute": False},
    "intermediate states": {"return_intermediate_states": True},
    "few heads": {"heads": 31},
    "float16": {"dtype": torch.float16},
    "another decay": {"g_dtype": torch.float32},
}


def changed(r: Request, heads: int = 0, dtype: Any = None, g_dtype: Any = None, **fields: Any) -> Request:
    tensors = {n: getattr(r, n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")}
    if heads:
        axes = {"initial_state": 1, "A_log": 0, "dt_bias": 0}
        tensors = {n: x.narrow(axes.get(n, 2), 0, heads) for n, x in tensors.items()}
    if dtype is not None:
        tensors |= {n: tensors[n].to(dtype) for n in ("q", "k", "v", "g", "beta")}
    if g_dtype is not None:
        tensors["g"] = tensors["g"].to(g_dtype)
    return replace(r, **tensors, **fields)


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_save_no_states(name):
    forward = changed(next(iter(STEPS.values()))[0], **OTHERS[name])
    assert len(saved_specs(forward, CHIPS[90])) == (3 if name == "recomputed" else 5)


def test_zeros_stand_for_do_in_a_backward_without_it():
    backward = next(iter(STEPS.values()))[1]
    plan = plan_of(replace(backward, grad_o=None), CHIPS[90])
    assert plan.kernels == plan_of(backward, CHIPS[90]).kernels
    assert plan.buffers["do"].zeros


def test_other_strides_of_v_are_no_other_choice():
    """The forward must have written all that it saves, whatever the backward gets for v."""
    forward = next(iter(STEPS.values()))[0]
    B, T, H, V = forward.v.shape
    v = torch.empty(B, T, H, V + 1, dtype=forward.v.dtype, device=forward.v.device)[..., :V]
    plan = plan_of(replace(forward, v=v), CHIPS[90])
    (launch,) = (x for x in plan.launches if x.name == "recurrence_hopper")
    assert launch.arguments["states"] is not None


ROWS: dict[str, dict[str, Any]] = {
    "pairs": {"T": 256},
    "an odd chunk": {"T": 96 * 7},
    "a tail": {"B": 2, "T": 1003, "H": 32},
    "many heads": {"B": 3, "T": 128, "H": 64},
    "packed": {"T": 2048, "bounds": [0, 1, 65, 65, 400, 1501, 2048]},
}


def arguments(B: int = 1, T: int = 64, H: int = 96, bounds: Any = None) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(B, T, H, 128, device="cuda").to(torch.bfloat16) for _ in range(4))
    N = B if bounds is None else len(bounds) - 1
    found = {
        "q": q, "k": k, "v": v, "g": g, "beta": torch.randn(B, T, H, device="cuda").to(torch.bfloat16),
        "A_log": torch.rand(H, device="cuda"), "dt_bias": torch.rand(H, 128, device="cuda"),
        "initial_state": torch.randn(N, H, 128, 128, device="cuda"),
    }  # fmt: skip
    bounds = bounds and {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    return {n: x.requires_grad_() for n, x in found.items()} | (bounds or {})


@pytest.mark.platform("nvidia_hopper")
@pytest.mark.parametrize("name", ROWS)
def test_gradients_are_the_same_from_kept_states(name):
    """To the bit, and whatever the strides of v."""
    call = arguments(**ROWS[name])
    leaves = [x for x in call.values() if x.requires_grad]
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    options |= {"lower_bound": -5.0, "output_final_state": True}

    def grads(kept: bool, **more: Any) -> tuple[torch.Tensor, ...]:
        o, state = kda_core.chunk_kda(**(call | more), **options, disable_recompute=kept)
        return torch.autograd.grad([o, state], leaves, [torch.cos(o.detach()).to(o.dtype), torch.sin(state.detach())])

    v = torch.nn.functional.pad(call["v"], (0, 1))[..., :-1]
    expected = grads(False)
    for found in (grads(True), grads(True), grads(True, v=v)):
        for n, x, y in zip(call, expected, found, strict=False):
            assert torch.equal(x, y), n

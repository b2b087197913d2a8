"""Plans of the AMD backend as data, for any chip: what a call allocates and launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import installed
import pytest
import torch

installed.need_backend("amd")
installed.need_package("triton")

from kda_core_amd.calls import plan_of
from kda_core_amd.choose import ARCHITECTURES

from kda_core import _explain, api
from kda_core._cli import example_call
from kda_core.request import GateRequest, Request
from kda_core.triton_lib.plan import Copy, Plan, Sum

CHIP = ARCHITECTURES["gfx942"]


def request(
    B: int = 2, T: int = 64, H: int = 2, HV: int = 0, K: int = 64, dtype=torch.bfloat16, **more: Any
) -> Request:
    """A call without memory."""
    q, g = (torch.empty(B, T, h, K, dtype=dtype, device="meta") for h in (H, HV or H))
    return Request(op="chunk_kda", **({"q": q, "k": q, "v": g, "g": g, "beta": g[..., 0], "scale": 1.0} | more))


def backward(**fields: Any) -> Request:
    r = request(**fields)
    return replace(r, grad_o=r.v, needs_grad=frozenset(["q", "k", "v", "g", "beta", "initial_state"]))


def scratch_of(plan: Plan, epoch: int) -> set[str]:
    return {b.name for b in plan.buffers.values() if b.role == "scratch" and b.epochs[0] <= epoch <= b.epochs[1]}


def test_a_forward():
    plan = plan_of(request(), CHIP)
    assert plan.kernels == ("prepare", "recurrence")
    assert {n: b.role for n, b in plan.buffers.items()} == {
        "o": "result",
        "keys": "scratch",
        "P": "scratch",
        "D": "scratch",
    }


def test_what_the_recurrences_read_ends_before_gradients():
    plan = plan_of(backward(T=2**17, use_qk_l2norm_in_kernel=True), CHIP)
    kernels = [[s.name for s in steps] for steps in plan.epochs]
    first = ["prepare", "recurrence", "reverse_kernel"]
    assert kernels == [first, ["gradients_kernel", "finish_kernel"]]
    held = {"z", "states", "state_grads"}
    assert scratch_of(plan, 0) == held | {"keys", "P", "D", "X"}
    assert scratch_of(plan, 1) == held | {"dq by value head", "dk by value head"}


def test_equal_calls_have_equal_plans_and_empty_ones_launch_nothing():
    assert plan_of(request(), CHIP) == plan_of(request(), CHIP)
    assert plan_of(request(), CHIP) != plan_of(request(), ARCHITECTURES["gfx1100"])
    assert plan_of(GateRequest(g=torch.empty(0, 4, 128, device="meta"), lower_bound=-5.0), CHIP).kernels == ()
    assert plan_of(replace(request(H=1), op="fused_recurrent_kda"), CHIP).kernels == ("recurrent",)


def test_inputs_that_kernels_cannot_read_are_copied_once():
    """Also in a backward, where several kernels read them."""
    r = backward()
    crooked = torch.empty(2, 64, 64, 2, dtype=torch.bfloat16, device="meta").mT
    plan = plan_of(replace(r, q=crooked, grad_o=crooked), CHIP)
    assert [s.source.source for s in plan.steps if isinstance(s, Copy)] == ["q", "grad_o"]
    plan = plan_of(replace(request(), out=crooked), CHIP)
    assert plan.steps[-1].target.source == plan.results["o"] == "out"


def test_a_long_sequence_is_cut():
    """The states at the starts of segments replace the call's own; results are of the call's shape."""
    state = torch.empty(1, 1, 64, 64, device="meta")
    r = backward(B=1, T=65536, H=1, initial_state=state, grad_final_state=state)
    plan = plan_of(r, CHIP)
    joined = ("recurrence", "reverse_kernel", "chain_kernel", "chain_kernel")
    recurrences = ("recurrence", "reverse_kernel", "gradients_kernel")
    assert plan.kernels == ("segments_kernel", "prepare", *joined, *recurrences)
    assert plan.launches[0].arguments["rows"] == 2048
    none, states = (x.arguments["initial_state"] for x in plan.launches if x.name == "recurrence")
    assert (none, states.source) == (None, "states at starts")
    given = [x.arguments["given"].source for x in plan.launches if x.name == "chain_kernel"]
    assert given == ["initial_state", "grad_final_state"]
    assert plan.buffers["dinitial_state"].shape == (1, 1, 64, 64)
    assert "chain_kernel" not in plan_of(r, CHIP, rows=0).kernels


def test_sums_of_parameters_gradients():
    gate = {"A_log": torch.empty(4, device="meta"), "dt_bias": torch.empty(4, 64, device="meta")}
    plan = plan_of(backward(HV=4, use_gate_in_kernel=True, **gate), CHIP)
    assert {s.target.source: s.source.shape for s in plan.steps if isinstance(s, Sum)} == {
        "dA_log": (4, 4),
        "ddt_bias": (4, 4, 64),
    }
    assert all(plan.buffers[f"d{n} by slots"].zeros for n in gate)


@pytest.mark.parametrize("chip", sorted(ARCHITECTURES))
def test_explain_shows_plans_for_any_chip(chip: str):
    sizes: dict[str, Any] = {"sizes": (1, 64, 2, 64, 64), "dtype": "bfloat16", "device": torch.device("cuda")}
    call = example_call(api.chunk_kda, {}, **sizes, backward=True)
    forward, back = _explain.plan(**call, chip=chip, backend="amd")
    assert forward.chip == back.chip == chip
    assert [s.name for s in back.steps][-1] == "gradients_kernel"
    assert {b.name for b in back.buffers if b.role == "result"} == {"dq", "dk", "dv", "dg", "dbeta"}

"""One kernel for a decoding step of a layer gives what three give, bit for bit; needs an sm_90 GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import installed
import pytest
import torch
from plan_runs import run_on_nvidia as run_plan
from torch import Tensor

installed.need_backend("nvidia")

from kda_core_nvidia.calls import plan_in_three, plan_of
from kda_core_nvidia.run import chip

from kda_core import empty_records
from kda_core.request import DecodeStepRequest
from kda_core.triton_lib.plan import metadata

pytestmark = pytest.mark.platform("nvidia_hopper")

DEVICE = "cuda"
H, D = 3, 128
KINDS = [(v_first, state) for v_first in (False, True) for state in (torch.float32, torch.bfloat16)]
WRITTEN = ("state", "conv_state", "out", "records")
normal = partial(torch.randn, device=DEVICE)


def step(
    N: int, v_first: bool, state: torch.dtype, dtype: torch.dtype = torch.bfloat16, W: int = 4, T: int = 1, **more: Any
) -> dict[str, Any]:
    """A step whose rows are cut out of one projection, in pools with gaps; the second sequence is padding."""
    torch.manual_seed(N)
    sizes = [3 * H * D, H * D, H * D, H]
    x, g, gate, beta = normal(N, T, sum(sizes) + 29).to(dtype)[..., 16:-13].split(sizes, -1)
    slots = torch.randperm(N + 2, device=DEVICE)
    slots[1] = -1
    call = {
        "x": x, "g": g.unflatten(-1, (H, D)), "beta": beta, "norm_gate": gate.unflatten(-1, (H, D)),
        "norm_weight": normal(D), "norm_eps": 1e-3, "conv_state": normal(N + 2, W - 1, 3 * H * D).to(dtype),
        "weight": normal(3 * H * D, W), "bias": normal(3 * H * D), "scale": D**-0.5, "state_v_first": v_first,
        "state": normal(N + 2, 2 * H, D, D).to(state)[:, ::2], "indices": slots[:N],
        "A_log": torch.rand(H, device=DEVICE), "dt_bias": normal(H, D), "lower_bound": -5.0,
    }  # fmt: skip
    return call | more


def draft(N: int, T: int, C: int, *kind: Any, **more: Any) -> dict[str, Any]:
    """The same for T tokens that are recorded, behind C tokens of which 0, 1, ... are committed."""
    call = step(N, *kind, T=T, **more) | {"records": empty_records(N, T, H, D, D, device=DEVICE).fill_(7.0)}
    if not C:
        return call
    earlier = empty_records(N, C, H, D, D, device=DEVICE).normal_()
    earlier[..., D : 2 * D] = torch.rand(N, C, H, D, device=DEVICE) * 1.5 - 0.5
    inputs = normal(N, C, 3 * H * D + 8).to(call["x"].dtype)[..., :-8]
    return call | {
        "commit": earlier,
        "num_committed": torch.arange(N, device=DEVICE) % (C + 2),
        "commit_inputs": inputs,
    }


def both(call: dict[str, Any], takes: bool = True) -> Tensor:
    """The output of a call, whose launches leave what the three kernels leave."""
    found = []
    for whole in (False, True):
        own = {n: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)
               for n in WRITTEN if (x := call.get(n)) is not None}  # fmt: skip
        made_of = DecodeStepRequest(**(call | own))
        misaligned = frozenset(n for n, x in vars(made_of).items() if isinstance(x, Tensor) and x.data_ptr() & 15)
        plan, on = plan_of(made_of, chip(made_of.device), misaligned), chip(made_of.device)
        kernel = "layer_step" if made_of.records is None else "recurrent_draft"
        assert (plan.kernels == (kernel,)) == takes
        if not whole:
            plan = plan_in_three(metadata(made_of, misaligned), on)
        o = run_plan(plan, made_of)["o"]
        found.append([own["out"] if o is None else o, *(own[n] for n in WRITTEN if n in own)])
    for three, one in zip(*found, strict=True):
        assert torch.equal(three, one)
        assert torch.isfinite(one).all()
    return found[1][0]


@pytest.mark.parametrize(("v_first", "state"), KINDS)
@pytest.mark.parametrize("W", [2, 3, 4])
def test_step_of_any_width(W, v_first, state):
    o = both(step(5, v_first, state, W=W))
    assert not o[1].any()
    both(step(5, v_first, state, W=W, bias=None, norm_gate=None, norm_weight=None))


@pytest.mark.parametrize(("v_first", "state"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_step_of_other_dtypes(dtype, v_first, state):
    both(step(3, v_first, state, dtype))


@pytest.mark.parametrize(("v_first", "state"), KINDS)
@pytest.mark.parametrize("N", [50, 130, 350])  # 150, 390 and 1,050 states
def test_step_of_many_sequences(N, v_first, state):
    """Rows of a call do not depend on how many it has, nor on the configuration that many states take."""
    call = step(N, v_first, state)
    o = both(call)
    for rows in (slice(2, 3), slice(7, 20)):
        by_row = {n: call[n][rows] for n in ("x", "g", "beta", "norm_gate", "indices")}
        assert torch.equal(both(call | by_row), o[rows])


@pytest.mark.parametrize(("v_first", "state"), KINDS)
def test_step_of_other_gates(v_first, state):
    call = step(3, v_first, state)
    both(call | {"lower_bound": None})
    both(call | {"use_gate_in_kernel": False, "g": -call["g"].abs(), "allow_neg_eigval": True})
    plain = {"use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False, "x": call["x"] / 16}
    both(call | plain | {"beta": call["beta"].sigmoid()})


def test_step_of_other_layouts():
    call = step(3, False, torch.float32)
    both(call | {"indices": None})
    both(call | {"indices": call["indices"][:, None]})
    both(call | {"conv_state": call["conv_state"].mT.contiguous().mT})
    both(call | {"out": torch.zeros(3, 1, H, 2 * D, device=DEVICE, dtype=torch.bfloat16)[..., ::2]})
    both(call | {"out": torch.zeros(3, 1, H, D, device=DEVICE, dtype=torch.bfloat16)})
    odd = torch.empty(3, 1, 3 * H * D + 1, device=DEVICE, dtype=torch.bfloat16)[..., 1:].copy_(call["x"])
    both(call | {"x": odd})


def test_calls_that_three_kernels_take():
    call = step(3, False, torch.float32)
    both(call | {"state": call["state"].half()}, takes=False)
    grouped = torch.cat([call["x"][..., : 2 * D], call["x"][..., 2 * H * D :]], -1)
    less = {n: torch.cat([call[n][..., : 2 * D], call[n][..., 2 * H * D :]], -1) for n in ("conv_state", "bias")}
    both(call | less | {"x": grouped, "weight": call["weight"][: grouped.shape[-1]]}, takes=False)
    two = {n: call[n].expand(-1, 2, *call[n].shape[2:]) for n in ("x", "g", "beta", "norm_gate")}
    both(call | two, takes=False)


@pytest.mark.parametrize(("v_first", "state"), KINDS)
@pytest.mark.parametrize(("T", "C"), [(1, 1), (3, 4), (4, 2), (8, 8), (4, 0)])
def test_drafts_of_any_length(T, C, v_first, state):
    o = both(draft(11, T, C, v_first, state))
    assert not o[1].any()


@pytest.mark.parametrize(("v_first", "state"), KINDS)
def test_drafts_of_other_calls(v_first, state):
    for W in (2, 3):
        both(draft(5, 3, 2, v_first, state, W=W))
    both(draft(5, 3, 2, v_first, state, bias=None, norm_gate=None, norm_weight=None, lower_bound=None))
    both(draft(5, 2, 3, v_first, state, torch.float32))
    call = draft(130, 4, 4, v_first, state)
    o = both(call)
    by_row = ("x", "g", "beta", "norm_gate", "indices", "records", "commit", "num_committed", "commit_inputs")
    assert torch.equal(both(call | {n: call[n][7:9] for n in by_row}), o[7:9])


def test_drafts_that_three_kernels_take():
    both(draft(3, 9, 0, False, torch.float32), takes=False)
    both(draft(3, 2, 9, False, torch.float32), takes=False)

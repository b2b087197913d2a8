"""``recurrent_step`` gives what ``recurrent`` gives, bit for bit; needs an sm_90 GPU."""

from __future__ import annotations

from dataclasses import replace

import installed
import pytest
import torch
from plan_runs import run_on_nvidia as run_plan
from torch import Tensor

installed.need_backend("nvidia")

from kda_core_nvidia.choose import choose_recurrent
from kda_core_nvidia.choose.recurrent import STEP_CONFIGS, StepConfig, recurrent_config, step_serves
from kda_core_nvidia.plans.recurrent import plan_recurrent
from kda_core_nvidia.run import chip

from kda_core.request import Request
from kda_core.triton_lib.plan import metadata

pytestmark = pytest.mark.platform("nvidia_hopper")

DEVICE = "cuda"
H, HV, D = 2, 4, 128
CONFIGS = [config for _, config in STEP_CONFIGS]
GATES = {
    "given": {},
    "softplus": {"use_gate_in_kernel": True},
    "bounded": {"use_gate_in_kernel": True, "lower_bound": -5.0},
}


def step(N: int, gate: str, dtype: torch.dtype) -> dict:
    """Arguments of a step, rows of q, k, v, g and beta cut out of one projection."""
    torch.manual_seed(N)
    widths = {"q": (H, D), "k": (H, D), "v": (HV, D), "g": (HV, D), "beta": (HV,)}
    sizes = [torch.Size(w).numel() for w in widths.values()]
    parts = torch.randn(N, 1, sum(sizes) + 44, device=DEVICE).to(dtype)[..., 16:-28].split(sizes, dim=-1)
    call = {n: x.unflatten(-1, w) for (n, w), x in zip(widths.items(), parts, strict=True)}
    call |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "backend": "nvidia"}
    if gate == "given":
        return call | {"g": -call["g"].abs()}
    return call | GATES[gate] | {"A_log": torch.rand(HV, device=DEVICE), "dt_bias": torch.randn(HV * D, device=DEVICE)}


def pool(slots: int) -> Tensor:
    """States with gaps between slots and between heads."""
    return torch.randn(slots, 2 * HV, D, D, device=DEVICE).to(torch.bfloat16)[:, ::2]


def request(call: dict) -> Request:
    """The request that a call makes."""
    fields = {"scale": D**-0.5} | {n: x for n, x in call.items() if n != "backend"}
    fields["inplace_final_state"] = fields.get("inplace_final_state", False) or "ssm_state_indices" in fields
    if "dt_bias" in fields:
        fields["dt_bias"] = fields["dt_bias"].view(HV, D)
    return Request(op="fused_recurrent_kda", **fields)


def both(call: dict, config: StepConfig, takes: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """All that a call gives and leaves behind, from ``recurrent`` and from the kernel that takes it."""
    found = []
    for stepping in (False, True):
        own = {n: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)
               for n in ("initial_state", "out") if (x := call.get(n)) is not None}  # fmt: skip
        made_of = request(call | own)
        misaligned = frozenset(n for n, x in vars(made_of).items() if isinstance(x, Tensor) and x.data_ptr() & 15)
        r, on = metadata(made_of, misaligned), chip(made_of.device)
        choice = choose_recurrent(r, on)
        # Few states, too.
        if stepping and step_serves(r, on, least=0):
            choice = replace(choice, step=config, short=None)
        else:
            given = r.initial_state is not None
            short = recurrent_config(r.N * r.HV, r.K, r.V, r.state_v_first, r.state_dtype, given)
            choice = replace(choice, step=None, short=short)
        plan = plan_recurrent(r, choice)
        assert plan.kernels == ("recurrent_step" if stepping and takes else "recurrent",)
        made = run_plan(plan, made_of)
        state = None if made_of.inplace_final_state else made["final_state"]
        found.append([made["o"], own["initial_state"], *([] if state is None else [state])])
    return found[0], found[1]


def same(call: dict, config=CONFIGS[0], takes: bool = True) -> list[Tensor]:
    plain, stepped = both(call, config, takes)
    for a, b in zip(plain, stepped, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(b).all()
    return stepped


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_step_gives_the_bits_of_recurrent(gate, dtype, config):
    call = step(5, gate, dtype) | {"initial_state": pool(9)}
    same(call | {"initial_state": pool(5), "output_final_state": True}, config)
    same(call | {"initial_state": pool(5), "output_final_state": False}, config)
    same(call | {"initial_state": pool(5), "inplace_final_state": True, "scale": 0.3}, config)
    slots = torch.tensor([4, -1, 8, 0, 3], device=DEVICE)
    o, states = same(call | {"ssm_state_indices": slots, "pad_slot_id": 8}, config)
    assert not o[[1, 2]].any()
    assert torch.equal(states[[1, 2, 5, 6, 7, 8]], call["initial_state"][[1, 2, 5, 6, 7, 8]])
    table = torch.stack([slots, slots], 1).int()[:, 1:]
    out = torch.empty(5, 1, HV, D, device=DEVICE, dtype=dtype)
    same(call | {"ssm_state_indices": table, "out": out}, config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_step_without_norms_and_with_negative_eigenvalues(config):
    call = step(3, "given", torch.bfloat16) | {"initial_state": pool(3), "inplace_final_state": True}
    call |= {"use_qk_l2norm_in_kernel": False, "allow_neg_eigval": True}
    call["q"], call["k"] = call["q"] / 16, call["k"] / 16
    same(call, config)
    same(call | {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False}, config)


def test_calls_that_step_leaves_to_recurrent():
    call = step(3, "bounded", torch.bfloat16) | {"inplace_final_state": True}
    crooked = call["q"].new_empty(3, 1, H * D + 1)[..., 1:].unflatten(-1, (H, D)).copy_(call["q"])
    same(call | {"initial_state": pool(3), "q": crooked}, takes=False)
    odd = torch.randn(3, HV, D * D + 8, device=DEVICE).to(torch.bfloat16)[..., 4:-4].unflatten(-1, (D, D))
    same(call | {"initial_state": odd}, takes=False)
    same(call | {"initial_state": pool(3).float()}, takes=False)
    same(call | {"initial_state": pool(3), "state_v_first": True}, takes=False)
    turned = torch.empty(3, 1, D, HV, device=DEVICE, dtype=torch.bfloat16).transpose(-1, -2)
    same(call | {"initial_state": pool(3), "out": turned}, takes=False)

"""``recurrent_step`` gives what ``recurrent`` gives, bit for bit; needs an sm_90 GPU."""

from __future__ import annotations

import installed
import pytest
import torch
from torch import Tensor

import kda_core

installed.need_backend("nvidia")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an sm_90 GPU", allow_module_level=True)

from kda_core_nvidia import recurrent_launch

DEVICE = "cuda"
H, HV, D = 2, 4, 128
CONFIGS = [config for _, config in recurrent_launch._STEP_CONFIGS]
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


def both(call: dict, monkeypatch, config, takes: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """All that a call gives and leaves behind, from ``recurrent`` and from whatever takes it."""
    found = []
    launch = recurrent_launch._launch_step
    for stepping in (False, True):
        taken = []

        def noted(*arguments, taken=taken):
            taken.append(True)
            launch(*arguments)

        given = call["initial_state"]
        states = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=DEVICE).copy_(given)
        own = {"initial_state": states}
        if "out" in call:
            own["out"] = torch.empty_strided(
                call["out"].shape, call["out"].stride(), dtype=call["q"].dtype, device=DEVICE
            )
        with monkeypatch.context() as patch:
            # Calls of one kind would repeat what the first of them launched.
            patch.setattr(recurrent_launch, "planned", lambda request, kind, inputs, make: make())
            patch.setattr(recurrent_launch, "_launch_step", noted)
            # Few states, too.
            patch.setattr(recurrent_launch, "_STEP_CONFIGS", ((0, config),))
            if not stepping:
                patch.setattr(recurrent_launch, "_step_serves", lambda *facts: False)
            o, state = kda_core.fused_recurrent_kda(**(call | own))
        assert len(taken) == (stepping and takes)
        found.append([o, states, *([] if state is None else [state])])
    return found[0], found[1]


def same(call: dict, monkeypatch, config=CONFIGS[0], takes: bool = True) -> list[Tensor]:
    plain, stepped = both(call, monkeypatch, config, takes)
    for a, b in zip(plain, stepped, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(b).all()
    return stepped


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_step_gives_the_bits_of_recurrent(gate, dtype, config, monkeypatch):
    call = step(5, gate, dtype) | {"initial_state": pool(9)}
    same(call | {"initial_state": pool(5), "output_final_state": True}, monkeypatch, config)
    same(call | {"initial_state": pool(5), "output_final_state": False}, monkeypatch, config)
    same(call | {"initial_state": pool(5), "inplace_final_state": True, "scale": 0.3}, monkeypatch, config)
    slots = torch.tensor([4, -1, 8, 0, 3], device=DEVICE)
    o, states = same(call | {"ssm_state_indices": slots, "pad_slot_id": 8}, monkeypatch, config)
    assert not o[[1, 2]].any()
    assert torch.equal(states[[1, 2, 5, 6, 7, 8]], call["initial_state"][[1, 2, 5, 6, 7, 8]])
    table = torch.stack([slots, slots], 1).int()[:, 1:]
    out = torch.empty(5, 1, HV, D, device=DEVICE, dtype=dtype)
    same(call | {"ssm_state_indices": table, "out": out}, monkeypatch, config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_step_without_norms_and_with_negative_eigenvalues(config, monkeypatch):
    call = step(3, "given", torch.bfloat16) | {"initial_state": pool(3), "inplace_final_state": True}
    call |= {"use_qk_l2norm_in_kernel": False, "allow_neg_eigval": True}
    call["q"], call["k"] = call["q"] / 16, call["k"] / 16
    same(call, monkeypatch, config)
    same(call | {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False}, monkeypatch, config)


def test_calls_that_step_leaves_to_recurrent(monkeypatch):
    call = step(3, "bounded", torch.bfloat16) | {"inplace_final_state": True}
    crooked = call["q"].new_empty(3, 1, H * D + 1)[..., 1:].unflatten(-1, (H, D)).copy_(call["q"])
    same(call | {"initial_state": pool(3), "q": crooked}, monkeypatch, takes=False)
    odd = torch.randn(3, HV, D * D + 8, device=DEVICE).to(torch.bfloat16)[..., 4:-4].unflatten(-1, (D, D))
    same(call | {"initial_state": odd}, monkeypatch, takes=False)
    same(call | {"initial_state": pool(3).float()}, monkeypatch, takes=False)
    same(call | {"initial_state": pool(3), "state_v_first": True}, monkeypatch, takes=False)
    turned = torch.empty(3, 1, D, HV, device=DEVICE, dtype=torch.bfloat16).transpose(-1, -2)
    same(call | {"initial_state": pool(3), "out": turned}, monkeypatch, takes=False)

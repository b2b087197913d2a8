"""Arguments of small valid calls, which tests spoil one at a time."""

from __future__ import annotations

import torch

B, T, H, HV, K, V, SLOTS = 2, 5, 2, 4, 8, 6, 7
POOL = (SLOTS, HV, K, V)


def call_arguments(**changes):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    arguments = {
        "q": normal(B, T, H, K), "k": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V), "g": -normal(B, T, HV, K).abs(), "beta": normal(B, T, HV).sigmoid(),
    }  # fmt: skip
    return {**arguments, **changes}


def packed(**changes):
    arguments = {name: t.reshape(1, B * T, *t.shape[2:]) for name, t in call_arguments().items()}
    return {**arguments, "cu_seqlens": torch.tensor([0, 4, B * T]), **changes}


def paged(**changes):
    return call_arguments(initial_state=torch.zeros(POOL), ssm_state_indices=torch.tensor([1, 3]), **changes)


def elsewhere(**changes):
    return paged(final_state_indices=torch.tensor([0, 5]), **{"final_state_pool": torch.zeros(POOL), **changes})


def speculative(**changes):
    indices = torch.arange(B * T).reshape(B, T) % SLOTS
    indices = torch.tensor([[0, 1, 2], [3, 4, 5]])
    base = call_arguments()
    short = {name: t[:, :3] for name, t in base.items()}
    return {**short, "initial_state": torch.zeros(POOL), "ssm_state_indices": indices, **changes}


gate = {"use_gate_in_kernel": True}

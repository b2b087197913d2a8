"""Arguments of small valid calls, which tests spoil one at a time."""

from __future__ import annotations

import torch

from kda_core.testing.cases import Case

B, T, H, HV, K, V, SLOTS = 2, 5, 2, 4, 8, 6, 7
POOL = (SLOTS, HV, K, V)


def drawn(grad=False, **fields):
    """Tensors of the kit's case with these fields."""
    return {name: t.requires_grad_() if grad else t for name, t in Case(name="drawn", **fields).call().tensors.items()}


def call_arguments(**changes):
    return {**drawn(B=B, T=T, H=H, HV=HV, K=K, V=V), **changes}


def packed(**changes):
    arguments = {name: t.reshape(1, B * T, *t.shape[2:]) for name, t in call_arguments().items()}
    return {**arguments, "cu_seqlens": torch.tensor([0, 4, B * T]), **changes}


def paged(**changes):
    return call_arguments(initial_state=torch.zeros(POOL), ssm_state_indices=torch.tensor([1, 3]), **changes)


def elsewhere(**changes):
    return paged(final_state_indices=torch.tensor([0, 5]), **{"final_state_pool": torch.zeros(POOL), **changes})


def speculative(**changes):
    indices = torch.tensor([[0, 1, 2], [3, 4, 5]])
    short = {name: t[:, :3] for name, t in call_arguments().items()}
    return {**short, "initial_state": torch.zeros(POOL), "ssm_state_indices": indices, **changes}


gate = {"use_gate_in_kernel": True}

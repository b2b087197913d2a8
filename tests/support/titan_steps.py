"""torchtitan's debug model with Kimi Delta Attention, on a CPU: built from an overridden configuration, and trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.llama3 import llama3_configs


def build(override: str, **options: object) -> nn.Module:
    """The model with an override of ``kda_core_torchtitan``; the same weights each time."""
    config = llama3_configs["debugmodel"]("flex")
    assert apply_overrides(OverrideConfig(imports=[(f"kda_core_torchtitan.{override}", options)]), config)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def losses(model: nn.Module, tokens: Tensor, steps: int) -> list[float]:
    """Losses of training steps on rows that hold a document of 40 tokens and the rest."""
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    positions[:, 40:] -= 40
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        logits = model(tokens[:, :-1], positions, model.get_attention_masks(positions))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def ready(group: Any, rank: int) -> None:
    """Nothing: a rank has imported torchtitan when it answers, which takes a while."""


def sharded(group: Any, rank: int, tokens: Tensor) -> list[float]:
    """The same on a rank with its row of the tokens and its part of each parameter."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = build("kimi_delta_attention")
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return losses(model, tokens[rank : rank + 1], 3)

"""torchtitan's debug model with Kimi Delta Attention, on a CPU: built from an overridden configuration, and trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims, full_dtensor, parallel_dims, utils
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

parallel_dims.device_type = "cpu"  # torchtitan takes a GPU for granted
LAYERS = 2


def build(override: str, *, layers: int = 6, sequence_parallel: bool | None = None, **options: object) -> nn.Module:
    """The model with an override of ``kda_core_torchtitan``; the same weights each time."""
    config = llama3_configs["debugmodel"]("flex")
    del config.layers[layers:]
    if sequence_parallel is not None:
        set_llama3_sharding_config(config, enable_sp=sequence_parallel)
    assert apply_overrides(OverrideConfig(imports=[(f"kda_core_torchtitan.{override}", options)]), config)
    with torch.device("meta"):
        model = config.build()
    # As torchtitan's trainer does.
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def documents(tokens: Tensor, first: int) -> Tensor:
    """Positions of rows that hold a document of some tokens and the rest; 0: one document."""
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
    positions[:, first:] -= first
    return positions


def losses(model: nn.Module, tokens: Tensor, steps: int, first: int = 40) -> list[float]:
    """Losses of training steps."""
    positions = documents(tokens[:, :-1], first)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        logits = model(tokens[:, :-1], positions, model.get_attention_masks(positions))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


class Rank:
    """A rank of dp · cp · tp of them with its part of the rows of tokens."""

    def __init__(self, rank: int, backend: str, dp: int, cp: int, tp: int) -> None:
        utils.set_spmd_backend(backend)
        sizes = {"dp_replicate": 1, "dp_shard": dp, "cp": cp, "tp": tp, "pp": 1, "ep": 1, "world_size": dp * cp * tp}
        self.dims = ParallelDims(**sizes, spmd_backend=backend)
        self.dims.build_mesh()
        self.backend, self.row, self.dp = backend, rank // (cp * tp), dp

    def loss(self, model: nn.Module, tokens: Tensor, positions: Tensor, balancer: str | None) -> Tensor:
        """This rank's part of the mean loss."""
        count = tokens[:, 1:].numel()
        tokens, positions = (t.chunk(self.dp)[self.row] for t in (tokens, positions))
        more = {"positions": positions, "attention_masks": model.get_attention_masks(positions)}
        given, wanted = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.dims.cp_enabled:
            mesh = self.dims.get_mesh("cp")
            given, wanted, more = prepare_context_parallel_input(
                given, wanted, more, mesh, torch.device("cpu"), balancer
            )
        if self.backend == "full_dtensor":
            given, wanted, more = full_dtensor.parallelize_inputs(self.dims, given, wanted, more)
        with utils.get_spmd_context(parallel_dims=self.dims)():
            logits = model(given, **more)
            loss, _ = CrossEntropyLoss.Config(global_vocab_size=2048).build()(logits, wanted, torch.tensor(count))
            loss.backward()
        return loss.to_local() if isinstance(loss, DTensor) else loss


def trained(
    group: Any, rank: int, tokens: Tensor, first: int, backend: str, axes: tuple, balancer: str | None, sp: bool
) -> list[float]:
    """This rank's parts of the losses of ``losses``, by torchtitan's own function that shares a model among ranks."""
    place = Rank(rank, backend, *axes)
    model = build("kimi_delta_attention", layers=LAYERS, sequence_parallel=sp)
    parallelism = ParallelismConfig(spmd_backend=backend)
    parallelize_llama(
        model, parallel_dims=place.dims, training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism, compile_config=CompileConfig(), ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo knows sums alone
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(3):
        found.append(place.loss(model, tokens, documents(tokens[:, :-1], first), balancer).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def gradients(group: Any, rank: int, tokens: Tensor, axes: tuple, sp: bool) -> tuple[float, dict[str, Tensor]]:
    """This rank's parts of the loss and of the gradients, with torchtitan's default backend.

    FSDP of released versions of torch does not know that backend: nothing sums the gradients here.
    """
    place = Rank(rank, "spmd_types", *axes)
    model = build("kimi_delta_attention", layers=LAYERS, sequence_parallel=sp)
    model.parallelize(place.dims)
    loss = place.loss(model, tokens, documents(tokens[:, :-1], 40), "headtail")
    return loss.item(), {name: t.grad for name, t in model.layers["0"].attention.named_parameters()}

"""torchtitan's decoders with Kimi Delta Attention in the place of attention, as overrides of their configuration.

``--override.imports kda_core_torchtitan.kimi_linear`` replaces three of four layers, as in Kimi Linear, and
``kda_core_torchtitan.kimi_delta_attention`` all. ``KDA_TORCHTITAN=0`` switches both off: the layers stay as they are.
"""

from dataclasses import dataclass

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.attention import BaseAttention, GQAttention, VarlenMetadata
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.module import Module

from kda_core import nn
from kda_core.errors import UnsupportedStack
from kda_core.integrations import admit

__version__ = "0.1.0"

SHARDED = (
    "torchtitan: kda_core_torchtitan has data parallelism and FSDP: set parallelism.tensor_parallel_degree and "
    "parallelism.context_parallel_degree to 1"
)


class KimiDeltaAttention(BaseAttention):
    """``kda_core.nn.KimiDeltaAttention`` in a torchtitan block. Its weights start as fla's do.

    Documents of a packed row share no state where the model keeps them apart: with ``varlen`` and ``flex`` attention.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        """Arguments of the layer; n_kv_heads, inner_attention and rope are read by torchtitan alone."""

        n_heads: int
        dim: int
        head_dim: int | None = None
        allow_neg_eigval: bool = False
        safe_gate: bool = False
        lower_bound: float | None = None
        disable_recompute: bool = False
        backend: str | None = None
        n_kv_heads: int | None = None
        inner_attention: Module.Config
        rope: RoPE.Config

    def __init__(self, config: Config):
        super().__init__()
        same = ("allow_neg_eigval", "safe_gate", "lower_bound", "disable_recompute", "backend")
        options = {name: getattr(config, name) for name in same}
        head_dim = config.head_dim or config.dim // config.n_heads
        self.layer = nn.KimiDeltaAttention(config.dim, head_dim=head_dim, num_heads=config.n_heads, **options)

    def _init_self_parameters(self) -> None:
        for module in self.layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def parallelize(self, parallel_dims) -> None:
        if parallel_dims.tp_enabled or parallel_dims.cp_enabled:
            raise UnsupportedStack(SHARDED)
        super().parallelize(parallel_dims)

    @property
    def inner_attention(self):
        """torchtitan asks for it where it is about to share rows among ranks (context parallelism)."""
        raise UnsupportedStack(SHARDED)

    def forward(self, x_BLD, attention_masks, positions=None):
        if attention_masks is None:
            return self.layer(x_BLD)
        rows, host = x_BLD.flatten(0, 1).unsqueeze(0), None
        if isinstance(attention_masks, VarlenMetadata):
            bounds = attention_masks.cu_seq_q
            host = None if attention_masks.cu_seq_q_host is None else torch.tensor(attention_masks.cu_seq_q_host)
        else:
            starts = (positions.expand(x_BLD.shape[:2]).flatten() == 0).nonzero().flatten()
            bounds = torch.cat([starts, starts.new_tensor([rows.shape[1]])])
        return self.layer(rows, cu_seqlens=bounds, cu_seqlens_cpu=host).view(x_BLD.shape)


def _replace(config: GQAttention.Config, options: dict) -> BaseAttention.Config:
    if not admit("torchtitan"):
        return config
    # The layer starts its weights itself, and they are not sharded as those of attention.
    return derive(config, KimiDeltaAttention.Config, param_init=None, sharding_config=None, **options)


@override(target=GQAttention.Config, description="Kimi Delta Attention in every layer")
def kimi_delta_attention(config: GQAttention.Config, **options) -> BaseAttention.Config:
    """Replace the attention of every layer; options are fields of ``KimiDeltaAttention.Config``."""
    return _replace(config, options)


@override(
    target=GQAttention.Config,
    fqns=[f"*layers.{i}.attention" for i in range(1024) if i % 4 != 3],
    description="Kimi Delta Attention in three of four layers",
)
def kimi_linear(config: GQAttention.Config, **options) -> BaseAttention.Config:
    """Replace the attention of three of four layers; options as for ``kimi_delta_attention``."""
    return _replace(config, options)

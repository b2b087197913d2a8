"""torchtitan's decoders with Kimi Delta Attention in the place of attention, as overrides of their configuration.

``--override.imports kda_core_torchtitan.kimi_linear`` replaces three of four layers, as in Kimi Linear, and
``kda_core_torchtitan.kimi_delta_attention`` all. ``KDA_TORCHTITAN=0`` switches both off: the layers stay as they are.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.weak import WeakIdKeyDictionary

from kda_core import nn
from kda_core.distributed import build_cp_context, layout_of_positions
from kda_core.errors import UnsupportedStack
from kda_core.integrations import admit

__version__ = "0.1.0"
admit("torchtitan")  # other versions of torchtitan lack some of these names
import spmd_types as spmd  # noqa: E402
from torchtitan.config import derive, override  # noqa: E402
from torchtitan.models.common.attention import BaseAttention, GQAttention, VarlenMetadata  # noqa: E402
from torchtitan.models.common.decoder_sharding import dense_param_placement  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.protocols.sharding import ShardingConfig  # noqa: E402

SHARED = ("f_proj.0", "g_proj.0", "o_norm")
"""Parameters that all heads use: ranks that share heads hold them whole, and have parts of their gradients."""
SUPPORTED = (
    "torchtitan: take context parallelism with parallelism.spmd_backend spmd_types or full_dtensor, no dist_gemm"
)
OPTIONS = ("allow_neg_eigval", "safe_gate", "lower_bound", "disable_recompute", "backend")
THREE_OF_FOUR = [f"*layers.{i}.attention" for i in range(1024) if i % 4 != 3]
_CONTEXTS = WeakIdKeyDictionary()  # the layers of a step have the same tensor of positions
_as_module = cache(lambda kind: type(kind.__name__, (kind, Module), {}))  # torchtitan accepts its own kind alone


class KimiDeltaAttention(nn.KimiDeltaAttention, BaseAttention):
    """``kda_core.nn.KimiDeltaAttention`` in a torchtitan block. Its weights start as fla's do."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        dim: int
        head_dim: int | None = None
        allow_neg_eigval: bool = False
        safe_gate: bool = False
        lower_bound: float | None = None
        disable_recompute: bool = False
        backend: str | None = None
        n_kv_heads: int | None = None  # torchtitan alone reads this, rope and inner_attention
        rope: Module.Config

    def __init__(self, config: Config):
        options = {name: getattr(config, name) for name in OPTIONS}
        head_dim = config.head_dim or config.dim // config.n_heads
        super().__init__(config.dim, head_dim=head_dim, num_heads=config.n_heads, **options)
        self.group = None
        for module in self.modules():
            if not isinstance(module, Module):
                module.__class__ = _as_module(type(module))

    def parallelize(self, parallel_dims) -> None:
        if self._sharding_config is None:
            raise UnsupportedStack(SUPPORTED)
        for name, module in self.named_modules():
            if name and module._parameters:
                along = spmd.R if name in SHARED else spmd.S(1) if name == "o_proj" else spmd.S(0)
                states = dict.fromkeys(module._parameters, dense_param_placement(tp=along))
                module._sharding_config = ShardingConfig(state_shardings=states)
                module._distribute_states(parallel_dims)
                module._sharding_config = None  # its forward stays as it is: the layer may run several as one
        self.group = parallel_dims.get_mesh("cp").get_group() if parallel_dims.cp_enabled else None
        super().parallelize(parallel_dims)

    @property
    def inner_attention(self):
        """torchtitan's oldest backend, partial_dtensor, asks for it where it is about to share rows."""
        raise UnsupportedStack(SUPPORTED)

    def forward(self, x_BLD, attention_masks, positions=None):
        if isinstance(x_BLD, DTensor):
            with _reparametrize_module(self, {name: _local(t) for name, t in self.named_parameters()}):
                o = type(self).forward(self, _local(x_BLD), attention_masks, positions)
            return DTensor.from_local(o, x_BLD.device_mesh, _parts(x_BLD), run_check=False)
        packed, options = attention_masks is not None, {}
        if self.group is not None:
            packed, options["cp_context"] = _context(self.group, self.conv_size, positions, packed)
        elif isinstance(attention_masks, VarlenMetadata):
            host = attention_masks.cu_seq_q_host
            options = {"cu_seqlens": attention_masks.cu_seq_q, "cu_seqlens_cpu": host and torch.tensor(host)}
        elif packed:
            starts = (_local(positions).expand(x_BLD.shape[:2]).flatten() == 0).nonzero().flatten()
            options["cu_seqlens"] = torch.cat([starts, starts.new_tensor([x_BLD[..., 0].numel()])])
        rows = x_BLD.flatten(0, 1).unsqueeze(0) if packed else x_BLD
        return super().forward(rows, **options).view(x_BLD.shape)


def _parts(t: DTensor) -> list:
    """The placements of what ranks with the same rows and parameters compute from their heads, results or gradients."""
    sizes = zip(t.placements, t.device_mesh.shape, strict=True)
    return [Partial() if place.is_replicate() and size > 1 else place for place, size in sizes]


def _local(t: Tensor) -> Tensor:
    return t.to_local(grad_placements=_parts(t)) if isinstance(t, DTensor) else t


def _context(group, taps: int, positions: Tensor, apart: bool):
    """Whether the documents of this step's rows are packed, and the context; asks the other ranks once a step."""
    found, key = _CONTEXTS.setdefault(positions, {}), (group, taps, apart)
    if key not in found:
        own = _local(positions).contiguous()
        every = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(every, own, group=group)
        layout, starts = layout_of_positions(torch.stack(every).cpu())
        if layout is None:
            raise UnsupportedStack("torchtitan: take parallelism.context_parallel_load_balancer headtail or None")
        B, T = starts.shape
        context = build_cp_context(None, group, taps, layout=layout, tokens=T, batch=B, device=own.device)
        if packed := apart and bool(starts[:, 1:].any()):
            bounds = [*starts.flatten().nonzero().flatten().tolist(), B * T]
            context = build_cp_context(bounds, group, taps, layout=context.layout.ranges, device=own.device)
        found[key] = packed, context
    return found[key]


@override(target=BaseAttention.Config, description="Kimi Delta Attention in every layer")
def kimi_delta_attention(config: BaseAttention.Config, **options) -> BaseAttention.Config:
    """Replace the attention of every layer; options are fields of ``KimiDeltaAttention.Config``."""
    if not admit("torchtitan"):
        return config
    if type(config) is not GQAttention.Config:  # subclasses have settings that their models read
        raise UnsupportedStack(f"torchtitan: {config.__module__} is not served; take a model with GQAttention (llama3)")
    own, out = config.sharding_config, config.wo.sharding_config
    if own is not None:  # the layer's rows come and go as those of attention, whose last projection sums over ranks
        ends = {"out_src_shardings": out.out_src_shardings, "out_dst_shardings": out.out_dst_shardings}
        states = dict.fromkeys(("A_log", "dt_bias"), dense_param_placement(tp=spmd.S(0)))
        own = replace(own, state_shardings=states, **ends)
    # The layer starts its weights itself.
    return derive(config, KimiDeltaAttention.Config, param_init=None, sharding_config=own, **options)


@override(target=BaseAttention.Config, fqns=THREE_OF_FOUR, description="Kimi Delta Attention in three of four layers")
def kimi_linear(config: BaseAttention.Config, **options) -> BaseAttention.Config:
    """Replace the attention of three of four layers; options as for ``kimi_delta_attention``."""
    return kimi_delta_attention(config, **options)

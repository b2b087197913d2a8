"""vLLM's own layers with KDA, run on a CPU: their ``_forward`` from projections to outputs, over a pool of states.

Doubles stand for vLLM's other kernels, which need a GPU: convolutions and gated norms that return their input.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from kda_core._plugins import registry
from kda_core.hookspecs import hookimpl
from kda_core.request import Request

SITES = {
    "kimi": ("vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn", "KimiGatedDeltaNetAttention"),
    "kimi_k3": ("vllm.models.kimi_k3.nvidia.kda", "KimiK3DeltaAttention"),
    "glm5next": ("vllm.models.glm5next.common.kda", "Glm5NextLinearAttention"),
    "bailing_moe_v3": ("vllm.model_executor.models.bailing_moe_v3", "BailingMoeV3KimiDeltaAttention"),
}
"""Module and class of each layer."""


class Layer:
    """A layer without projections.

    Args:
        name: in ``SITES``. x: raw rows q, k, v, g [1, T, H, D] and beta [1, T, H], A_log and bias.
        lower_bound: of the gate. pool: [slots, H, D, D]. monkeypatch: binds the doubles.
    """

    def __init__(self, name: str, x: dict[str, Tensor], lower_bound: float | None, pool: Tensor, monkeypatch) -> None:
        self.name, self.x, self.pool = name, x, pool
        home, layer = SITES[name]
        self.site = importlib.import_module(home)
        self.forward = getattr(self.site, layer)._forward
        _, self.tokens, H, D = x["q"].shape
        conv = SimpleNamespace(weight=torch.empty(3 * H * D, 1, 4), bias=None)
        convs = {f"{n}_conv1d": conv for n in "qkv"} if name == "bailing_moe_v3" else {"q_conv1d": conv}
        self.itself = SimpleNamespace(
            prefix="layer", conv1d=conv, local_projection_size=H * D, head_dim=D, local_num_heads=H,
            A_log=x["A_log"], dt_bias=x["bias"], gate_lower_bound=lower_bound, o_norm=lambda o, g: o,
            kv_cache=(torch.empty(1, 3, 3 * H * D), pool), kda_prefill_backend="triton", kda_decode_backend="triton",
            kda_spec_decode_backend="native", use_recoverssm=False, _conv_state_dim_first=False, safe_gate=True,
            _merged_conv_weight=conv.weight, kda_safe_gate=True, kda_lower_bound=lower_bound, lower_bound=lower_bound,
            **convs,
        )  # fmt: skip
        monkeypatch.setattr(self.site, "causal_conv1d_fn", lambda rows, *given, **named: rows)
        monkeypatch.setattr(self.site, "causal_conv1d_update", lambda rows, *given, **named: rows)
        if name == "glm5next":
            monkeypatch.setattr(self.site, "_cast_sigmoid", lambda beta: beta.float().sigmoid())

    def __call__(self, g: Tensor, beta: Tensor, monkeypatch, **metadata: object) -> Tensor:
        """Outputs [1, T, H, D]; g and beta are the layer's arguments, metadata that of vLLM's batch."""
        kind = KimiK3KDAMetadata if self.name == "kimi_k3" else GDNAttentionMetadata
        counts = dict.fromkeys(
            ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_spec_decodes",
             "num_spec_decode_tokens"), 0,
        )  # fmt: skip
        batch = kind(**counts | {"num_actual_tokens": self.tokens} | metadata)
        context = SimpleNamespace(attn_metadata={"layer": batch})
        monkeypatch.setattr(self.site, "get_forward_context", lambda: context)
        rows = [self.x[n].flatten(0, 1).flatten(1) for n in "qkv"]
        out = torch.empty_like(self.x["v"])
        if self.name == "bailing_moe_v3":
            self.forward(self.itself, *rows, g, beta, out)
        elif self.name == "glm5next":
            self.forward(self.itself, torch.cat(rows, 1), g, beta, out)
        else:
            self.forward(self.itself, torch.cat(rows, 1), g, out, beta, out)
        return out


class StateCopies(TorchDispatchMode):
    """Counts the bytes of states that anything but a backend writes: rows of a pool, or new tensors of its rows.

    Attributes:
        bytes: found so far. pools: what backends were given as initial states.
    """

    def __init__(self, pool: Tensor) -> None:
        super().__init__()
        self.row, self.storage = pool.shape[1:], pool.untyped_storage().data_ptr()
        self.bytes, self.pools, self.inside = 0, [], False

    def __enter__(self) -> StateCopies:
        registry.add_wrapper(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        registry.remove_wrapper(self)

    @hookimpl(wrapper=True)
    def kda_core_chunk_forward(self, request: Request) -> Iterator[None]:
        self.pools.append(request.initial_state)
        self.inside = True
        try:
            return (yield)
        finally:
            self.inside = False

    @hookimpl(wrapper=True)
    def kda_core_recurrent_forward(self, request: Request) -> Iterator[None]:
        return (yield from self.kda_core_chunk_forward(request))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in [] if self.inside else tree_leaves(result):
            if isinstance(t, Tensor) and t.shape[-3:] == self.row:
                in_pool = t.untyped_storage().data_ptr() == self.storage
                self.bytes += t.nbytes if func._schema.is_mutable or not in_pool else 0
        return result

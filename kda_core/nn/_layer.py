"""Kimi Delta Attention as a module: projections, short convolutions, the operator, gated norm, output projection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kda_core import _expect
from kda_core._checks import python_value
from kda_core._torch_private import cat
from kda_core.api import chunk_kda, fused_recurrent_kda
from kda_core.nn._cache import Call, KDACache, first_token, last_inputs, may_write
from kda_core.nn._checks import expect_eps, expect_tensor
from kda_core.nn._convolution import ShortConvolution, convolve, sequences
from kda_core.nn._dispatch import is_eager
from kda_core.nn._norm import GatedRMSNorm
from kda_core.nn._projections import Convolutions, Projections, is_bare, normed_projection, project

RATES = (1.0, 16.0)
"""Range of exp(A_log) in a new layer, as in fla and Mamba."""

STEPS = (1e-3, 1e-1)
"""Range of softplus(dt_bias) in a new layer: some channels forget within ten tokens, others in a thousand."""

SHORT = 16
"""Tokens of a call with a cache up to which the recurrent function runs."""


def _two_layers(both: Any) -> Any:
    """The layers of a low-rank projection; where hooks wait for its call, that is the second one."""
    return both if is_bare(both, nn.Sequential) else (lambda x: x, both)


def _are_bare(convolutions: Sequence[Any], biased: bool) -> bool:
    """Whether the calls of all are nothing but convolutions, with a bias or without."""
    return all(is_bare(layer, ShortConvolution) and (layer.bias is not None) == biased for layer in convolutions)


def _mark(layer: Any, *_: Any) -> None:
    """Ask for no weight decay: copies, conversions and ``load_state_dict(assign=True)`` may make parameters anew."""
    for parameter in (layer.A_log, layer.dt_bias):
        parameter._no_weight_decay = True


class KimiDeltaAttention(nn.Module):
    """A KDA layer: [B, T, hidden_size] to the same, causal.

    Arguments and parameters have the names, shapes and meanings of ``fla.layers.KimiDeltaAttention`` 0.6, so that state
    dicts load both ways; ``from_transformers`` and ``to_transformers`` convert those of transformers' Kimi Linear.
    Source: Kimi Linear, arXiv 2510.26692, section 4. Symbols: B batch, T tokens, H and HV heads, K and V head
    dimensions, N sequences.

    Args:
        hidden_size: width of the input and the output.
        expand_v: V / K.
        head_dim: K.
        num_heads: H, of queries and keys.
        num_v_heads: HV, a multiple of H; None: H.
        mode: "chunk", or "fused_recurrent": calls with a cache and without gradients go token by token.
        use_short_conv: convolve q, k and v over the last tokens; otherwise only SiLU.
        allow_neg_eigval: beta is 2 · sigmoid, so that a state may change its sign.
        safe_gate: as in ``chunk_kda``; needs ``lower_bound``. ``A_log`` starts at 0.
        lower_bound: choose the bounded gate, with log decays in [lower_bound, 0).
        conv_size: tokens that the convolution sees.
        conv_bias: whether the convolution has a bias.
        layer_idx: kept for models that number their layers.
        norm_eps: of the gated norm.
        disable_recompute: as in ``chunk_kda``: training takes more memory and less time.
        backend: name of a backend for every call; None: as ``chunk_kda`` chooses.
        device: of the parameters.
        dtype: of the parameters; ``A_log`` and ``dt_bias`` are float32.

    Raises:
        TypeError, ValueError: sizes that are no integers or do not fit, or another mode.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        *,
        disable_recompute: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        sizes = {
            "hidden_size": hidden_size, "head_dim": head_dim, "num_heads": num_heads, "num_v_heads": num_v_heads,
            "conv_size": conv_size,
        }  # fmt: skip
        for name, size in sizes.items():
            _expect.integer(name, python_value(size))
            least = 2 if name == "conv_size" and use_short_conv else 1
            if size < least:
                raise ValueError(f"{name}: expected at least {least}, got {size}")
        head_v_dim = round(head_dim * expand_v) if math.isfinite(expand_v) else 0
        if not math.isclose(head_dim * expand_v, head_v_dim, rel_tol=1e-5) or head_v_dim < 1:
            raise ValueError(f"expand_v: expected a whole number of value channels, got {head_dim} * {expand_v}")
        if num_v_heads % num_heads:
            raise ValueError(f"num_v_heads: expected a multiple of num_heads = {num_heads}, got {num_v_heads}")
        if mode not in ("chunk", "fused_recurrent"):
            raise ValueError(f"mode: expected 'chunk' or 'fused_recurrent', got {mode!r}")
        if safe_gate and lower_bound is None:
            raise ValueError("safe_gate: needs lower_bound")
        self.hidden_size, self.expand_v, self.head_dim = hidden_size, expand_v, head_dim
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_dim, head_v_dim
        self.key_dim, self.value_dim = num_heads * head_dim, num_v_heads * head_v_dim
        self.gate_dim = num_v_heads * head_dim
        self.mode, self.use_short_conv, self.allow_neg_eigval = mode, use_short_conv, allow_neg_eigval
        self.safe_gate, self.lower_bound, self.disable_recompute = safe_gate, lower_bound, disable_recompute
        self.conv_size, self.conv_bias, self.layer_idx, self.backend = conv_size, conv_bias, layer_idx, backend
        expect_eps("norm_eps", norm_eps := python_value(norm_eps))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, **factory)

        def convolution(channels: int) -> nn.Conv1d:
            # Holds and initialises the weights; ``forward`` convolves q, k and v at once, unless one has hooks.
            return ShortConvolution(channels, channels, conv_size, groups=channels, bias=conv_bias, **factory)

        self.q_proj = linear(hidden_size, self.key_dim)
        self.k_proj = linear(hidden_size, self.key_dim)
        self.v_proj = linear(hidden_size, self.value_dim)
        if use_short_conv:
            self.q_conv1d = convolution(self.key_dim)
            self.k_conv1d = convolution(self.key_dim)
            self.v_conv1d = convolution(self.value_dim)
        # Both gates go through V channels: low rank, few parameters.
        self.f_proj = nn.Sequential(linear(hidden_size, head_v_dim), linear(head_v_dim, self.gate_dim))
        self.b_proj = linear(hidden_size, num_v_heads)
        self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32, device=device))
        self.dt_bias = nn.Parameter(torch.empty(self.gate_dim, dtype=torch.float32, device=device))
        self.g_proj = nn.Sequential(linear(hidden_size, head_v_dim), linear(head_v_dim, self.value_dim, bias=True))
        self.o_norm = GatedRMSNorm(head_v_dim, eps=norm_eps, **factory)
        self.o_proj = linear(self.value_dim, hidden_size)
        self.register_load_state_dict_post_hook(_mark)
        self.reset_parameters()

    @property
    def norm_eps(self) -> float:
        """The eps of the gated norm."""
        return self.o_norm.eps

    def _apply(self, *args: Any, **options: Any) -> KimiDeltaAttention:
        super()._apply(*args, **options)
        _mark(self)
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        _mark(self)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw ``A_log`` and ``dt_bias`` again; the submodules have functions of this name for theirs."""
        if self.safe_gate:
            self.A_log.zero_()
        else:
            self.A_log.uniform_(*RATES).log_()
        step = torch.empty_like(self.dt_bias).uniform_(*map(math.log, STEPS)).exp_()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        _mark(self)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: KDACache | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: Any = None,
    ) -> Tensor:
        """Mix tokens; with a ``cache``, continue behind its tokens and update it.

        Args:
            hidden_states: [B, T, hidden_size].
            attention_mask: [B, at least T], 0 where a token is padding; the last T columns are read. The tokens of a
                row stand side by side, with padding before or behind them. Padding changes no state, its output is 0.
            cache: a ``KDACache``. Calls of few tokens without gradients advance it in place.
            cu_seqlens: boundaries of packed sequences (B = 1), as in ``chunk_kda``. Rows behind the last one must be
                finite, because the projections read them; their output is 0.
            cu_seqlens_cpu: a copy of them on the CPU.
            cp_context: from ``kda_core.distributed.build_cp_context`` with ``conv1d_kernel_size=conv_size``: the tokens
                are this rank's, of sequences that several ranks share. It goes with neither of the above.

        Returns:
            [B, T, hidden_size].

        Raises:
            TypeError, ValueError: a wrong type, shape or combination, or (on the CPU) a mask with holes.
        """
        others = {"attention_mask": attention_mask, "cache": cache, "cu_seqlens": cu_seqlens}
        for name, value in others.items():
            if cp_context is not None and value is not None:
                raise ValueError(f"{name}: does not go with cp_context")
        if cu_seqlens_cpu is not None and cu_seqlens is None and cp_context is None:  # short calls would not see it
            raise ValueError("cu_seqlens_cpu: expected cu_seqlens beside it, got None")
        mask = self._check(hidden_states, attention_mask, cache, cu_seqlens)
        if mask is not None:
            # The convolutions see zeros, and nothing of what stands there, NaN too, reaches a gradient.
            hidden_states = hidden_states.masked_fill(~mask[..., None], 0)
        (f_in, f_out), (g_in, g_out) = map(_two_layers, (self.f_proj, self.g_proj))
        linears = Projections(self.q_proj, self.k_proj, self.v_proj, f_in, g_in, self.b_proj, f_out, g_out)
        channels = self.head_k_dim, self.head_v_dim
        alone = cache is None and cp_context is None
        mixed, g, beta, gate = project(
            hidden_states, linears, channels, self._convolutions(cu_seqlens) if alone else None
        )
        if mask is not None:
            # A gate input whose decay is 1, and a beta of 0: the state stays.
            least = torch.finfo(g.dtype).min
            g, beta = g.masked_fill(~mask[..., None, None], least), beta.masked_fill(~mask[..., None], least)
        conv = None
        if isinstance(mixed, Tensor):
            HV = beta.shape[-1]
            if cp_context is not None:
                q, k, v = self._convolve_fragments(mixed, HV, cp_context)
            else:
                (q, k, v), conv = self._convolve(mixed, HV, mask, cache, cu_seqlens)
        else:
            q, k, v = mixed
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        if cp_context is not None:
            tensors["cp_context"] = cp_context
        o = self._attend(tensors, mixed, mask, conv, cache, cu_seqlens, cu_seqlens_cpu)
        o = normed_projection(o, gate, self.o_norm, self.o_proj, self.backend)
        return o if mask is None else o.masked_fill(~mask[..., None], 0)

    def _check(self, x: Any, attention_mask: Any, cache: Any, cu_seqlens: Any) -> Tensor | None:
        """Check the arguments; the mask [B, T] as bool."""
        expect_tensor("hidden_states", x, 3)
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden_states: expected [B, T, {self.hidden_size}], got {list(x.shape)}")
        if cache is not None and not isinstance(cache, KDACache):
            raise TypeError(f"cache: expected a KDACache, got {type(cache).__name__}")
        if cache is not None and cache.crop_calls and cu_seqlens is not None:
            raise ValueError("cache: crop_calls does not go with cu_seqlens")
        if attention_mask is not None and cu_seqlens is not None:
            raise ValueError("attention_mask: does not go with cu_seqlens")
        N = x.shape[0] if cu_seqlens is None else sequences(cu_seqlens, *x.shape[:2])
        if cache is not None and cache.state is not None and cache.state.shape[0] != N:
            raise ValueError(f"cache: expected one of {N} sequences, as in this call, got {cache.state.shape[0]}")
        if attention_mask is None:
            return None
        if not isinstance(attention_mask, Tensor):
            raise TypeError(f"attention_mask: expected a tensor, got {type(attention_mask).__name__}")
        B, T, _ = x.shape
        if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
            raise ValueError(f"attention_mask: expected [{B}, at least {T}], got {list(attention_mask.shape)}")
        mask = attention_mask[:, attention_mask.shape[1] - T :] != 0
        if mask.device.type == "cpu" and is_eager(mask) and T:
            if attention_mask.is_floating_point() and (attention_mask < 0).any():
                raise ValueError("attention_mask: expected 0 and 1, got negative numbers, as of a mask to be added")
            begins = mask[:, 0] + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
            if (begins > 1).any():
                raise ValueError("attention_mask: expected the tokens of a row side by side, got a mask with holes")
        return mask

    def _convolutions(self, cu_seqlens: Tensor | None) -> Convolutions | None:
        """The convolutions where they have neither bias nor state nor hooks."""
        if not self.use_short_conv or self.conv_bias:
            return None
        layers = self.q_conv1d, self.k_conv1d, self.v_conv1d
        if not _are_bare(layers, biased=False):
            return None
        weights = tuple([layer.weight for layer in layers])
        widths = self.head_k_dim, self.head_k_dim, self.head_v_dim
        parts = tuple((w.shape[0] // n, n) for w, n in zip(weights, widths, strict=True))
        return Convolutions(weights, parts, cu_seqlens, self.backend)

    def _convolve(
        self, mixed: Tensor, HV: int, mask: Tensor | None, cache: KDACache | None, cu_seqlens: Tensor | None,
        halo: Tensor | None = None,
    ) -> tuple[Sequence[Tensor], Tensor | None]:  # fmt: skip
        """q, k [B, T, H, K] and v [B, T, HV, V], and the next state of the convolution; ``halo``: the one before."""
        V = HV * self.head_v_dim
        K = (mixed.shape[-1] - V) // 2
        parts = ((K // self.head_k_dim, self.head_k_dim),) * 2 + ((HV, self.head_v_dim),)
        if not self.use_short_conv:
            return [t.unflatten(-1, s) for t, s in zip(F.silu(mixed).split((K, K, V), -1), parts, strict=True)], None
        layers: tuple[Any, ...] = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        before = halo if cache is None else cache.conv
        if before is not None and tuple(before.shape[1:]) != (self.conv_size - 1, mixed.shape[2]):
            expected = f"[N, {self.conv_size - 1}, {mixed.shape[2]}]"
            raise ValueError(f"cache: expected one of this layer, with conv {expected}, got {list(before.shape)}")
        T, shift, inputs = mixed.shape[1], None, mixed
        if mask is not None and before is not None and T > 1:
            # The inputs before this call are followed by a row's first token, not by the padding ahead of it.
            shift = torch.arange(T, device=mask.device) + first_token(mask)
            mixed = torch.take_along_dim(mixed, (shift % T)[:, :, None], 1)
        keep = cache is not None and mask is None
        inplace = keep and may_write(before) and not cache.crop_calls  # type: ignore[union-attr]
        qkv: Sequence[Tensor]
        if _are_bare(layers, self.conv_bias):
            weight = cat([layer.weight for layer in layers]).squeeze(1)
            bias = cat([layer.bias for layer in layers]) if self.conv_bias else None
            flags = {"output_final_state": keep, "inplace_final_state": inplace, "silu": True}
            qkv, after = convolve(mixed, weight, bias, before, cu_seqlens, flags, parts, self.backend)
        else:
            options = {"output_final_state": keep, "cu_seqlens": cu_seqlens, "backend": self.backend}
            states = (None,) * 3 if before is None else before.split((K, K, V), -1)
            rows = zip(layers, mixed.split((K, K, V), -1), states, strict=True)
            found = [layer(x, state, **options) for layer, x, state in rows]
            qkv = [y.unflatten(-1, part) for (y, _), part in zip(found, parts, strict=True)]
            after = cat([state for _, state in found], -1) if keep else None
            after = before.copy_(after) if inplace else after  # type: ignore[union-attr, arg-type]
        if cache is not None and mask is not None:
            after = last_inputs(before, inputs, mask, self.conv_size - 1)
        if shift is not None:
            back = (2 * torch.arange(T, device=shift.device) - shift) % T
            qkv = [torch.take_along_dim(t, back[:, :, None, None], 1) for t in qkv]
        return qkv, after

    def _convolve_fragments(self, mixed: Tensor, HV: int, context: Any) -> Sequence[Tensor]:
        """q, k and v of a rank's fragments, whose rows ahead lie on others."""
        if not self.use_short_conv:
            return self._convolve(mixed, HV, None, None, None)[0]
        from kda_core.distributed import conv_halo  # imports torch.distributed, which few layers need

        if context.conv1d_kernel_size != self.conv_size:
            raise ValueError(
                f"cp_context: expected conv1d_kernel_size={self.conv_size}, got {context.conv1d_kernel_size}"
            )
        F = context.dense or 1
        bounds = None if context.dense else context.cu_seqlens
        rows = mixed.reshape(F, context.batch * context.rows // F, mixed.shape[2])
        parts, _ = self._convolve(rows, HV, None, None, bounds, conv_halo(mixed, context))
        return [t.reshape(*mixed.shape[:2], *t.shape[2:]) for t in parts]

    def _attend(
        self, tensors: dict[str, Any], mixed: Any, mask: Tensor | None, conv: Tensor | None,
        cache: KDACache | None, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Run the operator and update the cache; [B, T, HV, V]."""
        options: dict[str, Any] = {
            "A_log": self.A_log, "dt_bias": self.dt_bias, "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": self.allow_neg_eigval,
            "safe_gate": self.safe_gate, "lower_bound": self.lower_bound, "state_v_first": True,
            "cu_seqlens": cu_seqlens, "backend": self.backend,
        }  # fmt: skip
        chunked: dict[str, Any] = {"cu_seqlens_cpu": cu_seqlens_cpu, "disable_recompute": self.disable_recompute}
        if cache is None:
            return chunk_kda(**tensors, **options, **chunked)[0]
        T = tensors["q"].shape[1]
        if cache.crop_calls:
            cache.record(Call(cache.length, cache.state, cache.conv, mixed, mask, tensors, options))
        states: dict[str, Any] = {"initial_state": cache.state, "output_final_state": True}
        if torch.is_grad_enabled() or (T > SHORT and self.mode == "chunk"):
            o, cache.state = chunk_kda(**tensors, **options, **states, **chunked)
        else:
            inplace = may_write(cache.state) and not cache.crop_calls
            o, cache.state = fused_recurrent_kda(**tensors, **options, **states, inplace_final_state=inplace)
        cache.conv, cache.length = conv, cache.length + T
        return o

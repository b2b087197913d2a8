"""A token mixer made of Kimi Delta Attention, as in the Kimi Linear paper (arXiv 2510.26692, section 4).

The whole use of kda_core is in ``KimiDeltaAttention.forward``: ``chunk_kda`` for training and for a prompt,
``fused_recurrent_kda`` for one token at a time. Both take the raw projections: q/k normalisation, the forget
gate and the sigmoid of beta happen inside the operator. Symbols: B batch, T tokens, D model width, H heads,
K head dimension (here also that of the values).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kda_core

# Where the decay starts (as in Mamba and Kimi Linear): rates exp(A_log) between 1 and 16, and steps
# softplus(dt_bias) between 0.001 and 0.1, so that some channels forget within ten tokens, others in a thousand.
RATE_RANGE = (1.0, 16.0)
STEP_RANGE = (1e-3, 1e-1)


@dataclass
class MixerCache:
    """State of one mixer after the tokens so far; its size does not depend on their number.

    Attributes:
        state: [B, H, K, K] float32, the state of the recurrence.
        conv: [B, conv_size - 1, 3·H·K], the last inputs of the short convolution.
    """

    state: Tensor | None = None
    conv: Tensor | None = None


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over the last few tokens, then SiLU; [B, T, channels] to the same."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        bound = size**-0.5
        self.weight = nn.Parameter(torch.empty(size, channels).uniform_(-bound, bound))

    def forward(self, x: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve x behind the ``previous`` inputs [B, size - 1, channels] (None: zeros).

        Returns:
            The output, and the inputs that the next call needs as ``previous``.
        """
        T, reach = x.shape[1], self.weight.shape[0] - 1
        x = F.pad(x, (0, 0, reach, 0)) if previous is None else torch.cat([previous, x], dim=1)
        weight = self.weight.to(x.dtype)  # under autocast x has half precision
        y = sum(weight[i] * x[:, i : i + T] for i in range(reach + 1))
        return F.silu(y), x[:, T:]


class KimiDeltaAttention(nn.Module):
    """[B, T, D] to [B, T, D], causal.

    Args:
        dim: D.
        heads: H.
        head_dim: K.
        conv_size: tokens that the short convolution sees.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, conv_size: int = 4) -> None:
        super().__init__()
        inner = heads * head_dim
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * inner, bias=False)
        self.short_conv = ShortConvolution(3 * inner, conv_size)
        # The forget gate and the output gate go through head_dim channels: low rank, few parameters.
        self.forget_gate = nn.Sequential(nn.Linear(dim, head_dim, bias=False), nn.Linear(head_dim, inner, bias=False))
        self.output_gate = nn.Sequential(nn.Linear(dim, head_dim, bias=False), nn.Linear(head_dim, inner))
        self.beta = nn.Linear(dim, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*RATE_RANGE).log())
        step = torch.empty(inner).uniform_(*map(math.log, STEP_RANGE)).exp()
        self.dt_bias = nn.Parameter(step.expm1().log())  # the inverse of softplus
        self.norm = nn.RMSNorm(head_dim, eps=1e-5)
        self.out = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, cache: MixerCache | None = None) -> Tensor:
        """Mix tokens; with a ``cache``, continue after its tokens and update it."""
        qkv, conv = self.short_conv(self.qkv(x), None if cache is None else cache.conv)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in qkv.chunk(3, dim=-1))
        inputs = {
            "q": q,
            "k": k,
            "v": v,
            "g": self.forget_gate(x).unflatten(-1, (self.heads, -1)),
            "beta": self.beta(x),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
        }
        if cache is None:
            o, state = kda_core.chunk_kda(**inputs)
        elif cache.state is None or x.shape[1] > 1:
            o, state = kda_core.chunk_kda(**inputs, initial_state=cache.state, output_final_state=True)
        else:
            # One token: advance the state in place, which saves a copy.
            o, state = kda_core.fused_recurrent_kda(
                **inputs, initial_state=cache.state, output_final_state=True, inplace_final_state=True
            )
        if cache is not None:
            # A copy: a view would keep the projections of the whole prompt alive.
            cache.state, cache.conv = state, conv.clone()

        normed = self.norm(o.to(self.norm.weight.dtype))  # under autocast o has half precision
        gated = normed * torch.sigmoid(self.output_gate(x)).unflatten(-1, (self.heads, -1))
        return self.out(gated.flatten(-2))

"""A byte-level language model: an embedding, blocks of KDA and SwiGLU, a head over the 256 bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kda_core.nn import KDACache, KimiDeltaAttention

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model."""

    dim: int = 128  # width of the residual stream
    layers: int = 2
    heads: int = 2  # of KDA, in a block
    head_dim: int = 64  # of keys and values
    mlp_dim: int = 384  # hidden width of the SwiGLU


class SwiGLU(nn.Module):
    """The usual gated MLP."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """Mix tokens, then channels, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.dim)
        self.mixer = KimiDeltaAttention(config.dim, num_heads=config.heads, head_dim=config.head_dim)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = SwiGLU(config.dim, config.mlp_dim)

    def forward(self, x: Tensor, cache: KDACache | None = None) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), cache=cache)
        return x + self.mlp(self.mlp_norm(x))


class ByteLM(nn.Module):
    """Logits of the next byte. No position encoding: the recurrence knows the order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, caches: list[KDACache] | None = None) -> Tensor:
        """Predict the byte behind each of ``tokens`` [B, T] (int64): logits [B, T, 256].

        With ``caches`` (from ``new_caches``) the tokens continue those of the last call.
        """
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        return self.head(self.norm(x))

    def new_caches(self) -> list[KDACache]:
        """Empty caches, one for each block."""
        return [KDACache() for _ in self.blocks]

    @torch.inference_mode()
    def generate(self, prompt: bytes, length: int, temperature: float, top_k: int, seed: int) -> Iterator[int]:
        """Yield ``length`` bytes behind ``prompt``, one by one; the same seed gives the same text on the same machine.

        The prompt goes through ``chunk_kda`` at once, each byte behind it through ``fused_recurrent_kda``. A
        temperature of 0 takes the likeliest byte, ``top_k`` = 0 chooses among all.
        """
        device, caches = self.head.weight.device, self.new_caches()
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            logits = self(tokens, caches)[0, -1].float().cpu()
            byte = sample(logits, temperature, top_k, generator)
            yield byte
            tokens = torch.tensor([[byte]], device=device)


def sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw one index from ``logits`` [256] on the CPU."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.shape[0]:
        logits = logits.where(logits >= logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))

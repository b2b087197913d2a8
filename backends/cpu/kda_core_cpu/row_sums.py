"""Weighted sums of the rows of states, as an embedding bag."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def row_sums(weights: Tensor, S: Tensor) -> Tensor:
    """``weights`` [lanes, 2, K] times S [lanes, K, V]: [2·lanes, V], where ``choose.sums_rows`` says so."""
    lanes, K, V = S.shape
    return sums_of_bags(weights.reshape(-1), S.view(-1, V), *bags(lanes, K))


def sums_of_bags(weights: Tensor, states: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """The same of ``weights`` [lanes·2·K] and ``states`` [lanes·K, V], with ``bags``."""
    return torch.embedding_bag(states, rows, offsets, False, 0, False, weights)[0]


@functools.lru_cache(maxsize=8)
def bags(lanes: int, K: int) -> tuple[Tensor, Tensor]:
    """State rows of every bag and the bags' offsets; two bags a lane."""
    # The cache outlives the call: made in inference mode these would stay inference tensors.
    with torch.inference_mode(False):
        rows = torch.arange(lanes * K, device="cpu").view(lanes, 1, K).expand(lanes, 2, K).reshape(-1)
        return rows, torch.arange(0, 2 * lanes * K, K, device="cpu")

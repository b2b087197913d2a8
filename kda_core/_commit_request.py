"""The request of ``commit_kda``; ``request`` has it for backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kda_core.capabilities import Feature


class Remembering:
    """A request with a memo."""

    def __getstate__(self) -> dict[str, Any]:
        """All fields but the memo, which calls of this process share: a copy or a pickle has none."""
        return {name: value for name, value in vars(self).items() if name != "memo"}


@dataclass(frozen=True, eq=False, kw_only=True)
class CommitRequest(Remembering):
    """One checked call of ``commit_kda``: ``S <- D * S + k u^T`` for some tokens of each sequence.

    Attributes:
        pool: [slots, HV, K, V] ([slots, HV, V, K] with ``state_v_first``), advanced in place; any strides.
        records: [B, T, HV, 2K + V] float32 (float64), a record contiguous: k, the decay D and u of a token. A negative
            number d in the place of a decay stands for D = 1 + d. How a factor is shared between k and u is the
            backend's.
        num_accepted: [N]; sequence n replays its first num_accepted[n] tokens, or the first of its path. Clamped to 0
            and to their number.
        state_indices: [N] slots; negative, ``pad_slot_id`` and past the pool: the sequence is skipped.
        cu_seqlens: [N + 1] or None.
        path: [N, M] numbers of a sequence's tokens in the order of their replay, clamped to its tokens; None: 0, 1, ...
        memo: as in ``Request``.
    """

    pool: Tensor
    records: Tensor
    num_accepted: Tensor
    state_indices: Tensor
    cu_seqlens: Tensor | None = None
    state_v_first: bool = False
    pad_slot_id: int = -1
    path: Tensor | None = None
    op: Literal["commit_kda"] = "commit_kda"
    memo: dict[Any, Any] | None = field(default=None, init=False)

    save_for_backward = False

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def N(self) -> int:
        """Number of sequences."""
        return self.records.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def T(self) -> int:
        return self.records.shape[1]

    @property
    def HV(self) -> int:
        return self.pool.shape[1]

    @property
    def K(self) -> int:
        return self.pool.shape[3 if self.state_v_first else 2]

    @property
    def V(self) -> int:
        return self.pool.shape[2 if self.state_v_first else 3]

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments that the call writes to."""
        return ("pool",)

    @property
    def features(self) -> frozenset[Feature]:
        """The features that this call needs."""
        return frozenset(self._features())

    def _features(self) -> Iterator[Feature]:
        yield Feature.DRAFT_RECORDS
        if self.path is not None:
            yield Feature.DRAFT_TREES
        if self.cu_seqlens is not None:
            yield Feature.VARLEN
        if self.state_v_first:
            yield Feature.STATE_V_FIRST
        if self.pool.dtype in STATES:
            yield STATES[self.pool.dtype]
        if self.K != self.V:
            yield Feature.UNEQUAL_HEAD_DIMS
        if not (is_power_of_two(self.K) and is_power_of_two(self.V)):
            yield Feature.ODD_HEAD_DIMS


STATES = {torch.bfloat16: Feature.BF16_STATE, torch.float16: Feature.FP16_STATE}
"""Dtypes of states that need a feature."""


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0

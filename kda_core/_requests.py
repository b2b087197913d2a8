"""Requests of commits and of the functions around the operator in a layer, and results of hooks in halves.

``request`` has them for backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kda_core.capabilities import Feature


class Remembering:
    """A request with a memo, which says what features it needs."""

    def __getstate__(self) -> dict[str, Any]:
        """All fields but the memo, which calls of this process share: a copy or a pickle has none."""
        return {name: value for name, value in vars(self).items() if name != "memo"}

    @property
    def features(self) -> frozenset[Feature]:
        """The features that this call needs."""
        return frozenset(self._features())

    def _features(self) -> Iterator[Feature]:
        raise NotImplementedError


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
    # Names of the arguments that the call writes to.
    written = ("pool",)

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
        yield from features_of_sizes(self.K, self.V)


STATES = {torch.bfloat16: Feature.BF16_STATE, torch.float16: Feature.FP16_STATE}
"""Dtypes of states that need a feature."""


def features_of_sizes(K: int, V: int) -> Iterator[Feature]:
    """The features that head dimensions need."""
    if K != V:
        yield Feature.UNEQUAL_HEAD_DIMS
    if not all(n > 0 and n & (n - 1) == 0 for n in (K, V)):
        yield Feature.ODD_HEAD_DIMS


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerCall:
    """The common part of calls around the operator in a layer; x decides on device and dtype."""

    x: Tensor
    needs_grad: frozenset[str] = frozenset()
    memo: dict[Any, Any] | None = field(default=None)

    @property
    def device(self) -> torch.device:
        return self.x.device


@dataclass(frozen=True, eq=False, kw_only=True)
class ShortConvolutionRequest(LayerCall):
    """One checked call of ``kda_core.nn.short_convolution``, forward or backward. D channels, W taps.

    Attributes:
        x: [B, T, D], neither B, T nor D 0; any strides.
        weight: [D, W]; W >= 2.
        bias: [D] or None.
        initial_state: [N, W - 1, D], any strides, or None.
        cu_seqlens: [N + 1] or None.
        silu: whether SiLU follows.
        output_final_state: the final state is asked for.
        inplace_final_state: write it over ``initial_state``; then the result's ``final_state`` is None.
        parts: sizes of two or three parts of the channels, each with a gradient of its own backwards; (): one of all.
        grad_output, grad_second, grad_third: backward only: [B, T, part's size].
        grad_final_state: backward only: [N, W - 1, D] or None.
        needs_grad: backward only: names among "x", "weight", "bias", "initial_state".
        memo: as in ``Request``.
    """

    weight: Tensor
    bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    silu: bool = True
    output_final_state: bool = False
    inplace_final_state: bool = False
    parts: tuple[int, ...] = ()
    grad_output: Tensor | None = None
    grad_second: Tensor | None = None
    grad_third: Tensor | None = None
    grad_final_state: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedNormRequest(LayerCall):
    """One checked call of ``kda_core.nn.gated_rms_norm``, forward or backward.

    Attributes:
        x, gate: [..., D], of one shape without a 0; any strides.
        weight: [D].
        eps: added to the mean of squares.
        grad_output: backward only: shape of x.
        needs_grad: backward only: names among "x", "gate", "weight".
        memo: as in ``Request``.
    """

    gate: Tensor
    weight: Tensor
    eps: float
    grad_output: Tensor | None = None


class Begun(NamedTuple):
    """Result of the first half of a forward or a backward: what each fragment does to a state that it is not yet told.

    A fragment is a run of rows of one sequence. A request for halves has ``cp_context=True`` and F = N fragments as its
    sequences: packed (any lengths, also 0), or B dense ones. It has no ``initial_state``, ``grad_final_state``, ``out``
    nor pool: states and their gradients enter as ``starts`` and ``ends``. States are K first, in ``compute_dtype``.

    Attributes:
        matrices: M [F, HV, K, K], contiguous. Forward: S_end = M @ S_start + b. Backward: dS_start = M @ dS_end + b,
            and None stands for the transposed matrices of the forward of the same fragments, which the core has kept.
        additions: b [F, HV, K, V], contiguous. A fragment without rows has M = I and b = 0. A forward may give None,
            and [M | b] as ``matrices``, [F, HV, K, K + V], which needs no copy before it is sent.
        kept: for the second half of the same direction, which may write into these tensors and return them.
    """

    matrices: Tensor | None
    additions: Tensor | None
    kept: tuple[Tensor, ...]


class Edges(NamedTuple):
    """Where the states at the edges of fragments lie, so that hooks in halves read and write them in their places.

    Backends that declare ``Capabilities.edges`` get it as ``cp_context``, in the place of True. For a backward read end
    for start, start for end, and gradients for states. Tables, ``matrices`` and ``starts`` are contiguous.

    Attributes:
        given: states at the starts of all N sequences, [N, HV, K, V] of any dtype and strides; None: zeros.
        places: [F] int64, the sequence that a fragment starts, or N.
        sends: [P] int64, the fragments whose [M | M S + b] the first half returns as ``matrices``, [P, HV, K, K + V],
            with S the given state of a fragment that starts its sequence, or 0; None: all.
        sources: [F] int64, where ``starts`` of the second half has the state of a fragment: [C, HV, K, V or more], the
            last V columns; C and more: nowhere. None: at its number. ``starts`` may be None: there are only given ones.
        results: [F] int64, the sequence that a fragment ends, or N. The final states, and in a backward the gradient of
            "initial_state" (float32) where it is needed, are those of sequences, [N, ...], zeros where no fragment has
            the end. None: fragment f ends sequence f.
        sequences: N.
        matrices: in a backward M of the fragments of ``sends``, [P, HV, K, K or more], the first K columns.
    """

    given: Tensor | None
    places: Tensor | None
    sends: Tensor | None
    sources: Tensor | None
    results: Tensor | None
    sequences: int
    matrices: Tensor | None = None

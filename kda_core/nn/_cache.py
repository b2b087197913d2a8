"""The states that a layer keeps of the tokens that it has seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kda_core import _expect
from kda_core._checks import python_value
from kda_core._torch_private import cat, in_transform
from kda_core.api import chunk_kda


@dataclass(frozen=True)
class Call:
    """One call of a layer, as ``KDACache.crop`` needs it.

    Attributes:
        start: tokens before it.
        state, conv: the cache's before it.
        mixed: [B, T, D], inputs of the short convolutions.
        mask: [B, T] bool, or None.
        tensors: the operator's inputs by name, [B, T, ...].
        options: its other arguments.
    """

    start: int
    state: Tensor | None
    conv: Tensor | None
    mixed: Tensor
    mask: Tensor | None
    tensors: Mapping[str, Any]
    options: Mapping[str, Any]

    def first(self, tokens: int) -> Call:
        """The same call with fewer tokens."""
        cut = {name: t[:, :tokens] for name, t in self.tensors.items()}
        mask = None if self.mask is None else self.mask[:, :tokens]
        return replace(self, mixed=self.mixed[:, :tokens], mask=mask, tensors=cut)

    def map(self, function: Any) -> Call:
        """The same call with every tensor of a batch replaced."""
        changed = {n: t if t is None else function(t) for n, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **changed, tensors={n: function(t) for n, t in self.tensors.items()})


def last_inputs(conv: Tensor | None, mixed: Tensor, mask: Tensor | None, reach: int) -> Tensor:
    """The last ``reach`` inputs [B, reach, D] behind ``conv`` and ``mixed`` [B, T, D]; ``mask``: those that count."""
    every = F.pad(mixed, (0, 0, reach, 0)) if conv is None else cat([conv.to(mixed.dtype), mixed], dim=1)
    if mask is None:
        return every[:, mixed.shape[1] :].clone()
    rows = mask.sum(1)[:, None] + torch.arange(reach, device=mask.device)
    if mask.shape[1]:
        rows += first_token(mask) * (rows >= reach)  # padding lies between the inputs before and these
    return every.gather(1, rows[..., None].expand(-1, -1, every.shape[2]))


def first_token(mask: Tensor) -> Tensor:
    """[B, 1]: how many tokens of padding are ahead of a row's own, for a mask [B, T]."""
    return mask.int().argmax(1, keepdim=True)


def may_write(state: Tensor | None) -> bool:
    """Whether a call may advance ``state`` in place: autograd knows nothing of it, and mode and transforms allow it."""
    if state is None or state.requires_grad or torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():  # compilers do not trace the other three
        return True
    return not in_transform() and (torch.is_inference_mode_enabled() or not state.is_inference())


class KDACache:
    """State of one ``KimiDeltaAttention`` behind the tokens so far; its size does not depend on their number.

    Args:
        crop_calls: how many of the last calls ``crop`` can undo, in part or whole. Their inputs and the states before
            them are kept, and single tokens no longer advance the state in place.

    Attributes:
        length: tokens so far, padding included (of packed sequences: all of them).
        state: [N, HV, V, K] float32, state of the recurrence; None before the first token.
        conv: [N, conv_size - 1, D], the last inputs of the short convolutions of q, k and v side by side; or None.
    """

    def __init__(self, crop_calls: int = 0) -> None:
        crop_calls = python_value(crop_calls)
        _expect.integer("crop_calls", crop_calls)
        if crop_calls < 0:
            raise ValueError(f"crop_calls: expected a number of at least 0, got {crop_calls}")
        self.crop_calls = crop_calls
        self.length = 0
        self.state: Tensor | None = None
        self.conv: Tensor | None = None
        self._calls: list[Call] = []

    def record(self, call: Call) -> None:
        """Keep a call for ``crop``; layers use it."""
        self._calls = [*self._calls, call][-self.crop_calls :]

    def reorder(self, index: Tensor) -> None:
        """Replace sequence n by sequence ``index[n]`` [N'], int64: for beam search, or to drop and repeat sequences."""
        if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
            raise TypeError(f"index: expected a tensor of int64 and one dimension, got {index!r}")

        def moved(t: Tensor) -> Tensor:
            return t.index_select(0, index.to(t.device))

        self.state = None if self.state is None else moved(self.state)
        self.conv = None if self.conv is None else moved(self.conv)
        self._calls = [call.map(moved) for call in self._calls]

    def crop(self, length: int) -> None:
        """Forget all tokens behind the first ``length``, e.g. drafts that were not accepted.

        The tokens that stay of the last call go through the operator again, from the state before the call.

        Raises:
            TypeError, ValueError: ``length`` is no int, is more than ``self.length``, or lies before the last
                ``crop_calls`` calls.
        """
        length = python_value(length)
        _expect.integer("length", length)
        first = self._calls[0].start if self._calls else self.length
        if not first <= length <= self.length:
            raise ValueError(
                f"length: expected {first} to {self.length} tokens (crop_calls = {self.crop_calls}), got {length}"
            )
        while self.length > length:
            call, state, conv = self._calls.pop(), self.state, self.conv
            self.length, self.state, self.conv = call.start, call.state, call.conv
            if call.start < length:
                self.length, call = length, call.first(length - call.start)
                # A call without gradients is cropped without, outside of its no_grad or inference_mode as well.
                with torch.set_grad_enabled(torch.is_grad_enabled() and state is not None and state.requires_grad):
                    _, self.state = chunk_kda(
                        **call.tensors, **call.options, initial_state=call.state, output_final_state=True
                    )
                    if conv is not None:
                        self.conv = last_inputs(call.conv, call.mixed, call.mask, conv.shape[1])
                self._calls.append(call)

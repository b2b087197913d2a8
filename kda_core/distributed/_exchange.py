"""The exchange between ranks: one collective, then states joined in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The newer name, where torch has it: the older one warns there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

resolve_group: Any = dist.distributed_c10d._resolve_process_group
"""Private in torch (2.7 to 2.13): a process group by its name, which is a constant of a compiled graph."""


def gathered(own: Tensor, group: Any, padded: bool) -> Tensor:
    """The tensors of all ranks along the first dimension; with ``padded`` and one place of zeros."""
    ranks, places = group.size(), own.shape[0]
    every = own.new_empty(ranks * places + padded, *own.shape[1:])
    into = every
    if padded:
        into = every[:-1]
        every[-1].zero_()
    if ranks > 1:
        _all_gather(into, own, group=group)
    else:
        into.copy_(own)
    return every


def join(matrices: Tensor, additions: Tensor, received: Tensor, group: Any, padded: bool) -> Tensor | None:
    """The states that this rank's slots need, from the transitions of all ranks' slots.

    Args:
        matrices, additions: [S, HV, K, K] and [S, HV, K, V]: what this rank's slots do to a state.
        received: [L, S] slots of all ranks to join for each of ours, from the farthest on; W S stands for none. A chain
            that is shorter than L begins with those.
        padded: whether any chain is.
        group: the process group.

    Returns:
        [S, HV, K, V], or None where no slot ever receives anything (L = 0).
    """
    K, steps = matrices.shape[-1], received.shape[0]
    own = torch.cat([matrices, additions], -1)
    # One more slot, of zeros: S = 0 stays 0 there, and no other sequence's NaN is multiplied by 0.
    slots, every = own.shape[0], gathered(own, group, padded)
    if not steps:
        return None
    # The farthest slot needs its additions alone.
    state = every[..., K:].index_select(0, received[0])
    if steps == 1:
        return state
    state = state.flatten(0, 1)
    chain = every.index_select(0, received[1:].flatten()).view(steps - 1, -1, *own.shape[2:])
    with full_precision(state.device):
        for step in chain:
            state = torch.baddbmm(step[..., K:], step[..., :K], state)
    return state.view(slots, -1, *state.shape[1:])


def applied(matrices: Tensor, states: Tensor, additions: Tensor) -> Tensor:
    """matrices @ states + additions, [..., K, V] in full precision."""
    with full_precision(states.device):
        lead = states.shape[:-2]
        flat = [t.flatten(0, -3) for t in (additions, matrices, states)]
        return torch.baddbmm(*flat).unflatten(0, lead)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products of float32 without TF32 on GPUs, whatever the program has chosen for its own."""
    # Newer versions of torch refuse to read the older setting where a program has made the newer one.
    owner = torch.backends.cuda.matmul
    name, exact = ("fp32_precision", "ieee") if hasattr(owner, "fp32_precision") else ("allow_tf32", False)
    before = getattr(owner, name)
    if device.type == "cpu" or before == exact:
        yield
        return
    setattr(owner, name, exact)
    try:
        yield
    finally:
        setattr(owner, name, before)


def at(states: Tensor | None, index: Tensor, like: Tensor) -> Tensor:
    """states[index], zeros where an index is past the last state; the shape and dtype of ``like``."""
    if states is None or not states.shape[0]:
        return torch.zeros_like(like)
    last = states.shape[0] - 1
    found = states.index_select(0, index.clamp(max=last))
    return found.masked_fill_((index > last)[:, None, None, None], 0)


def scattered(values: Tensor, index: Tensor, count: int) -> Tensor:
    """[count, ...] with values[i] at index[i] and zeros elsewhere; an index of ``count`` stands for nowhere."""
    found = values.new_zeros(count + 1, *values.shape[1:])
    return found.index_copy_(0, index, values)[:count]

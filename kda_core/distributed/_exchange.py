"""The exchange between ranks: one collective, then states joined in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NAME = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_waiting = dist.distributed_c10d.AllgatherOptions()
_waiting.asyncOp = False


def all_gather(every: Tensor, own: Tensor, group: Any) -> None:
    """``torch.distributed.all_gather_into_tensor`` without what it does on the host around the group's own method.

    That takes longer than a launch. The method is private in torch up to 2.12.
    """
    work = getattr(group, _NAME)(every, own, _waiting)
    if work is not None:
        work.wait()


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
        all_gather(into, own, group)
    else:
        into.copy_(own)
    return every


def join(every: Tensor, received: Tensor) -> Tensor:
    """The states that this rank's slots need, [S, HV, K, V], from the transitions of all ranks' slots.

    Args:
        every: [W S, HV, K, K + V]: what a slot does to a state, matrices and additions; then one of zeros where a chain
            is shorter than L: S = 0 stays 0 there, and no other sequence's NaN is multiplied by 0.
        received: [L, S] slots of all ranks to join for each of ours, from the farthest on; W S stands for none. A chain
            that is shorter than L begins with those.
    """
    K, steps = every.shape[-2], received.shape[0]
    # The farthest slot needs its additions alone.
    state = every[..., K:].index_select(0, received[0])
    chain = every.index_select(0, received[1:].flatten()).view(steps - 1, -1, *every.shape[2:])
    shape, state = state.shape, state.flatten(0, 1)
    with full_precision(state.device):
        for step in chain:
            state = torch.baddbmm(step[..., K:], step[..., :K], state)
    return state.view(shape)


def apply(matrices: Tensor, states: Tensor, additions: Tensor) -> Tensor:
    """additions += matrices @ states, [F, HV, K, V] in full precision."""
    with full_precision(states.device):
        additions.flatten(0, 1).baddbmm_(matrices.flatten(0, 1), states.flatten(0, 1))
    return additions


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


def at(states: Tensor, index: Tensor) -> Tensor:
    """states[index], zeros where an index is past the last state."""
    last = states.shape[0] - 1
    if last < 0:
        return states.new_zeros(index.shape[0], *states.shape[1:])
    found = states.index_select(0, index.clamp(max=last))
    return found.masked_fill_((index > last)[:, None, None, None], 0)


def scattered(values: Tensor, index: Tensor, count: int) -> Tensor:
    """[count, ...] with values[i] at index[i] and zeros elsewhere; an index of ``count`` stands for nowhere."""
    found = values.new_zeros(count + 1, *values.shape[1:])
    return found.index_copy_(0, index, values)[:count]

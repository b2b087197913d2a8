"""The rows ahead of a rank's fragments, which the short convolutions of a layer read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_core._ops import define
from kda_core._torch_private import cat
from kda_core.distributed._call import NAMESPACE, _library
from kda_core.distributed._context import ContextParallel
from kda_core.distributed._exchange import gathered, resolve_group


def conv_halo(x: Tensor, context: ContextParallel) -> Tensor:
    """The rows ahead of each fragment, as the initial state of a short convolution; differentiable.

    One collective each way, of W - 1 rows from each range of a rank. Every rank makes the call, and its backward.

    Args:
        x: [B, T, D] this rank's rows.
        context: made with ``conv1d_kernel_size``, W.

    Returns:
        [F, W - 1, D], oldest first; zeros ahead of a sequence's first row. With ``context.cu_seqlens`` these are the
        states of ``kda_core.nn.short_convolution`` over x as [1, B T, D].

    Raises:
        ValueError: a context without ``conv1d_kernel_size``, or x of other rows.
    """
    if not context.tails.numel():
        raise ValueError("context: expected one that was made with conv1d_kernel_size of at least 2")
    if x.dim() != 3 or tuple(x.shape[:2]) != (context.batch, context.rows):
        raise ValueError(f"x: expected [{context.batch}, {context.rows}, D], got {list(x.shape)}")
    c = context
    return torch.ops.kda_core_distributed.halo(x, c.tails, c.sources, c.slots, c.fragments, c.group_name)


def _halo(x: Tensor, tails: Tensor, sources: Tensor, slots: Tensor, fragments: Tensor, group_name: str) -> Tensor:
    group = resolve_group(group_name)
    # One row more, for those that are not there: no rank asks for them.
    rows = x.flatten(0, 1) if x.shape[1] else x.new_zeros(1, x.shape[2])
    own = rows.index_select(0, tails.flatten().clamp(max=len(rows) - 1))
    every = gathered(own, group, True)
    count, width = tails.shape
    wanted = sources.view(-1, count, width)[group.rank()].flatten()
    ahead = every.index_select(0, wanted).view(count, width, -1)
    found = x.new_zeros(fragments.shape[1], *ahead.shape[1:])
    return found.index_copy_(0, slots[2], ahead)[:-1].contiguous()


def _halo_backward(
    grad: Tensor, tails: Tensor, sources: Tensor, slots: Tensor, batch: int, rows: int, group_name: str
) -> Tensor:
    group = resolve_group(group_name)
    count, width = tails.shape
    padded = cat([grad, grad.new_zeros(1, *grad.shape[1:])])
    every = gathered(padded.index_select(0, slots[2]).flatten(0, 1), group, False)
    # Sums in one order: a row may lie ahead of several short fragments.
    total = every.new_zeros(len(every) + 1, every.shape[1])
    total.index_put_((sources.flatten(),), every, accumulate=True)
    own = total[:-1].view(-1, count * width, every.shape[1])[group.rank()]
    found = grad.new_zeros(batch * rows + 1, every.shape[1])
    found.index_put_((tails.flatten(),), own, accumulate=True)
    return found[:-1].view(batch, rows, every.shape[1])


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, tails, sources, slots, _, ctx.group_name = inputs
    ctx.save_for_backward(tails, sources, slots)
    ctx.size = x.shape[:2]


def _apply_backward(ctx: Any, grad: Tensor) -> tuple:
    found = torch.ops.kda_core_distributed.halo_backward(grad, *ctx.saved_tensors, *ctx.size, ctx.group_name)
    return found, None, None, None, None, None


_TABLES = "Tensor tails, Tensor sources, Tensor slots"
define(
    f"halo(Tensor x, {_TABLES}, Tensor fragments, str group_name) -> Tensor", _halo,
    lambda x, tails, sources, slots, fragments, group_name: x.new_empty(
        fragments.shape[1] - 1, tails.shape[1], x.shape[2]
    ), _library,
)  # fmt: skip
define(
    f"halo_backward(Tensor grad, {_TABLES}, SymInt batch, SymInt rows, str group_name) -> Tensor", _halo_backward,
    lambda grad, tails, sources, slots, batch, rows, group_name: grad.new_empty(batch, rows, grad.shape[2]), _library,
)  # fmt: skip
torch.library.register_autograd(f"{NAMESPACE}::halo", _apply_backward, setup_context=_setup_context, lib=_library)

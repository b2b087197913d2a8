"""Messages about numbers that are not finite: the argument, the first token, the index."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kda_core import reference
from kda_core.request import Request


def live_rows(r: Request, skipped: Sequence[bool] | None) -> Tensor:
    """[B, T] bool on the CPU: rows of sequences that the call computes; the others may hold anything."""
    live = torch.zeros(r.B, r.T, dtype=torch.bool, device="cpu")
    for n, (b, start, end) in enumerate(reference.sequence_bounds(r)):
        live[b, start:end] = skipped is None or not skipped[n]
    return live


def faults_of_rows(name: str, t: Tensor, live: Tensor, r: Request) -> list[str]:
    """A sentence about the first live row of [B, T, ...] with a value that the contract forbids; empty if none has."""
    bad = _not_allowed(name, t.detach(), r) & live.to(t.device).view(*live.shape, *[1] * (t.dim() - 2))
    tokens = bad.flatten(2).any(2).cpu()
    if not tokens.any():
        return []
    first = int(tokens.any(0).nonzero()[0])
    row = int(tokens[:, first].nonzero()[0])
    index = (row, first, *bad[row, first].nonzero()[0].tolist())
    where = f"token {first} of sequence {row}"
    if r.cu_seqlens is not None:
        bounds = reference.sequence_bounds(r)
        n = next(i for i, (_, start, end) in enumerate(bounds) if start <= first < end)
        where = f"token {first - bounds[n][1]} of sequence {n}"
    return [_sentence(name, t, index, where, int(bad.sum()))]


def faults(name: str, t: Tensor, slots: Sequence[int] | None = None, nan_only: bool = False) -> list[str]:
    """``faults_of_rows`` for a tensor without tokens, or for these slots of a pool, which must be finite as a whole."""
    bad = t.detach().isnan() if nan_only else ~t.detach().isfinite()
    if not bad.any():
        return []
    index = tuple(bad.nonzero()[0].tolist())
    where = "" if slots is None else f"slot {slots[index[0]]}"
    return [_sentence(name, t, index, where, int(bad.sum()))]


def padding_faults(name: str, t: Tensor, live: Tensor) -> list[str]:
    """A sentence when rows that belong to no sequence, or to one that is skipped, are not zero."""
    if bool(live.all()):
        return []
    wrong = (t.detach().flatten(2) != 0).any(2).cpu() & ~live
    if not wrong.any():
        return []
    row, token = wrong.nonzero()[0].tolist()
    return [f"{name}: expected zero in row [{row}, {token}], which belongs to no sequence that is computed"]


def _not_allowed(name: str, t: Tensor, r: Request) -> Tensor:
    """Gate inputs and logits may be infinite, which stands for the limit; a decay may be -inf: it forgets all."""
    if (name == "g" and r.use_gate_in_kernel) or (name == "beta" and r.use_beta_sigmoid_in_kernel):
        return t.isnan()
    return t.isnan() | (t == math.inf) if name == "g" else ~t.isfinite()


def _sentence(name: str, t: Tensor, index: tuple[int, ...], where: str, count: int) -> str:
    value = t.detach()[index].item()
    where = f" ({where})" if where else ""
    return f"{name}: {value} at {list(index)}{where}, {count} of {t.numel()} elements are not finite"

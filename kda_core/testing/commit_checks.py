"""Checks a commit of a running program against the float64 reference (``kda_core.checked_calls``); needs no pytest."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda_core import _checks, reference
from kda_core._loaded import Backend, CheckSettings
from kda_core._pool_checks import slot_rows
from kda_core.errors import CheckFailed, CheckWarning
from kda_core.request import CommitRequest
from kda_core.testing.call_checks import bit_sum, left_unchecked

ROUNDINGS = 4  # Roundings of a token: decay, product and sum, and one of the record
_choice = random.Random(0)


def run_checked_commit(
    backend: Backend, hook: str, caller: Callable[..., Any], request: CommitRequest, settings: CheckSettings
) -> Any:
    """Call a backend's commit and check what it wrote.

    Raises:
        CheckFailed: unless the settings say to warn.
        ValueError: index tensors on a device hold values that are refused on the CPU.
    """
    if left_unchecked(backend, request):
        return caller(request=request)
    names = ("num_accepted", "state_indices", "cu_seqlens", "path")
    r = replace(request, **{n: None if (t := getattr(request, n)) is None else t.cpu() for n in names})
    _checks.check_values(r)
    rows = zip(slot_rows(r.state_indices, r.N, r.pad_slot_id), r.num_accepted.tolist(), strict=True)
    slots = sorted({slot for (slot,), count in rows if slot >= 0 and count > 0})
    of_head = max(1, len(slots)) * max(1, _replays(r)) * max(1, r.K * r.V)
    heads = max(1, min(r.HV, settings.elements // of_head))
    first = _choice.randrange(r.HV - heads + 1) if r.HV else 0
    of_sample = slice(first, first + heads)
    pool = request.pool[slots][:, of_sample].detach().cpu()
    places = {slot: i for i, slot in enumerate(slots)}
    own = torch.tensor([places.get(slot, -1) for slot in r.state_indices.tolist()], dtype=torch.int64, device="cpu")
    records = request.records[:, :, of_sample].detach().cpu()
    sample = replace(r, pool=pool, records=records, state_indices=own, pad_slot_id=-1)
    exact = reference.committed(sample)
    keys, decays, values = records.split((r.K, r.K, r.V), -1)
    sizes = torch.cat([keys.abs(), decays, values.abs()], -1)
    bounds = reference.committed(replace(sample, pool=pool.abs(), records=sizes))
    before = bit_sum(request.pool, by_slot=True)
    result = caller(request=request)
    problems = []
    changed = set((bit_sum(request.pool, by_slot=True) != before).nonzero()[:, 0].tolist())
    if wrong := sorted(changed - set(slots)):
        problems.append(f"pool: slot {wrong[0]} changed, which this call must not write")
    found = request.pool[slots][:, of_sample].detach().cpu().double()
    for slot, i in places.items():
        state = found[i].mT if r.state_v_first else found[i]
        if off := _off(state, exact[i], bounds[i], r):
            problems.append(f"pool: {off} elements of slot {slot} are not the replay of its accepted tokens")
    if problems:
        message = f"{r.op} on backend {backend.info.name!r}:\n  " + "\n  ".join(problems)
        if not settings.warn:
            raise CheckFailed(message)
        warnings.warn(message, CheckWarning, stacklevel=3)
    return result


def _replays(r: CommitRequest) -> int:
    """Tokens that a sequence replays at most; a path may name one more than once."""
    return r.T if r.path is None else r.path.shape[1]


def _off(got: Tensor, exact: Tensor, bound: Tensor, r: CommitRequest) -> int:
    """Elements that no order of roundings explains; ``bound``: the replay of sizes."""
    arithmetic = torch.finfo(r.records.dtype)
    allowed = ROUNDINGS * (_replays(r) + 1) * arithmetic.eps * bound + torch.finfo(r.pool.dtype).eps * exact.abs()
    within = (got - exact).abs() <= allowed + torch.finfo(r.pool.dtype).tiny
    # Beyond the pool's range the rounded number is infinite, and a state that was not finite stays so.
    largest = torch.finfo(r.pool.dtype).max
    return int((~(within | (exact.abs() * (1 + allowed) > largest) | exact.isnan())).sum())

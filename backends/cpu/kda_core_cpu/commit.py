"""``commit_kda``: the state update of recurrent.py from records, S ← d ⊙ S, then S ← S + k' uᵀ.

Each step is the same torch call on memory of the same layout, so that its bits are those of the call that recorded.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kda_core.request import CommitRequest
from kda_core_cpu.workspace import Workspace


def commit(request: CommitRequest) -> Tensor:
    """Run ``commit_kda``, a sequence after another."""
    r, (K, V) = request, (request.K, request.V)
    pool = r.pool.transpose(-1, -2) if r.state_v_first else r.pool
    # ``States.scratch`` lays states out alike.
    v_first = r.state_v_first and K % 2 == 0
    workspace = Workspace(r.records.dtype)
    S = workspace("S", r.HV, V, K).transpose(1, 2) if v_first else workspace("S", r.HV, K, V)
    for slot, rows in _accepted(r):
        S.copy_(pool[slot])
        for k, d, u in zip(*(x.unbind(0) for x in rows.split([K, K, V], -1)), strict=True):
            torch.mul(S, d.unsqueeze(-1), out=S)
            S.addcmul_(k.unsqueeze(-1), u.unsqueeze(-2))
        pool[slot].copy_(S)
    return r.pool


def _accepted(r: CommitRequest) -> list[tuple[int, Tensor]]:
    """Slots and the records [tokens, HV, 2K + V] that go into them; the core has checked the values."""
    found = []
    first = [0] * (r.N + 1) if r.cu_seqlens is None else r.cu_seqlens.tolist()
    counts = zip(r.state_indices.tolist(), r.num_accepted.tolist(), itertools.pairwise(first), strict=True)
    for n, (slot, count, (start, _)) in enumerate(counts):
        if slot >= 0 and slot != r.pad_slot_id and count:
            rows = r.records[n if r.cu_seqlens is None else 0, start:]
            found.append((slot, rows[:count] if r.path is None else rows[r.path[n, :count].long()]))
    return found

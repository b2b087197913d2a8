"""``commit_kda``: the state update of recurrent.py from records, S ← d ⊙ S, then S ← S + k' uᵀ.

Each step is the same torch call on memory of the same layout, so that its bits are those of the call that recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_core.reference import sequence_bounds
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
    # The core has checked the values.
    taken = zip(sequence_bounds(r), r.state_indices.tolist(), r.num_accepted.tolist(), strict=True)
    for n, ((batch, start, _), slot, count) in enumerate(taken):
        if slot < 0 or slot == r.pad_slot_id or not count:
            continue
        rows = r.records[batch, start:]
        rows = rows[:count] if r.path is None else rows[r.path[n, :count].long()]
        S.copy_(pool[slot])
        for k, d, u in zip(*(x.unbind(0) for x in rows.split([K, K, V], -1)), strict=True):
            torch.mul(S, d.unsqueeze(-1), out=S)
            S.addcmul_(k.unsqueeze(-1), u.unsqueeze(-2))
        pool[slot].copy_(S)
    return r.pool

"""What the ranks of ``tests/support/ranks.py`` run."""

from __future__ import annotations

from typing import Any

import torch

import kda_core
from kda_core.distributed import build_cp_context

ROWS = ("q", "k", "v", "g", "beta")


def training_step(group: Any, rank: int, inputs: dict, grads: dict, context: dict, options: dict) -> dict[str, Any]:
    """A forward and, with ``grads``, a backward of this rank's rows; all tensors come whole."""
    c = build_cp_context(group=group, **context)
    tensors = {n: c.local(t) if n in ROWS else t for n, t in inputs.items()}
    leaves = {n: t.detach().clone().requires_grad_(bool(grads)) for n, t in tensors.items()}
    o, state, *h = kda_core.chunk_kda(**leaves, **options, cp_context=c)
    found = {"o": o.detach(), "final_state": None if state is None else state.detach(), "ranges": c.ranges}
    if h:
        found["h"] = h[0]
    if grads:
        outputs, given = [o], [c.local(grads["o"])]
        if "final_state" in grads:
            outputs, given = [*outputs, state], [*given, grads["final_state"]]
        if "without o" in grads:
            outputs, given = outputs[1:], given[1:]
        torch.autograd.backward(outputs, given)
        found |= {f"d{n}": t.grad for n, t in leaves.items()}
    return found

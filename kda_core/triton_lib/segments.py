"""One long sequence with few heads, cut into segments that the recurrences run side by side.

A recurrence takes the same time for a chunk whether one head runs or a hundred. Over a segment the state changes by
S' = M S + b, with a matrix M [K, K] for each head: M is the recurrence's result for the identity without values, b its
result for a zero state with them. Three steps replace the recurrence:

1. transitions: M and b of every segment but the last, all side by side, without any output;
2. join: the state at the start of every segment, one after another, in products of float32;
3. the recurrence itself, with the segments as packed sequences that have these initial states.

The backward does the same from the end: the gradient of the state goes through Mᵀ, and each segment's own outputs add
to it what the reverse recurrence finds.

This takes three times the arithmetic. It pays where a recurrence would leave most of the chip idle. Only calls of one
dense sequence are cut, by their length and heads alone, and neither with a pool nor with intermediate states: packed
and batched sequences keep their bits whatever they travel with, and the host never waits for lengths.
"""

from __future__ import annotations

import torch

from kda_core.request import Request
from kda_core.triton_lib.plan import Boundaries, Builder, View, changed


def segments_of(r: Request, rows: int) -> int:
    """Segments of a call in halves: a fragment each without ``rows``; packed, some of them have no rows."""
    if not rows:
        return r.N
    return -(-r.T // rows) if r.cu_seqlens is None else r.T // rows + r.N


def packed_segments(r: Request, rows: int, v_first: bool) -> Request:
    """Metadata of the call with its segments of ``rows`` rows as packed sequences without states.

    Segments of packed fragments are numbered as ``fragments.bounds_kernel`` says.

    Args:
        v_first: layout of the states to come.
    """
    # int64: kernels count rows of a whole tensor in it.
    bounds = View("cu_seqlens of segments", (segments_of(r, rows) + 1,), (1,), torch.int64)
    return changed(r, cu_seqlens=bounds, initial_state=None, grad_final_state=None, state_v_first=v_first)


def write_bounds(b: Builder, r: Request, cut: Request, rows: int) -> Request:
    """``cut``, the call ``r`` in segments of ``rows`` rows, with boundaries that the plan writes where they are new."""
    if cut.cu_seqlens is r.cu_seqlens:
        return cut
    bounds = b.scratch(cut.cu_seqlens.source, cut.cu_seqlens.shape, torch.int64)
    if r.cu_seqlens is None:
        b.step(Boundaries(bounds, rows, r.T))
    else:
        # Not at the top: choices need this module and no triton.
        from kda_core.triton_lib.fragments import bounds_kernel

        b.pick(bounds_kernel, cut.N + 1, 1, {"cu_seqlens": r.cu_seqlens, "bounds": bounds, "N": r.N, "rows": rows})
    return changed(cut, cu_seqlens=bounds)


IN_HALVES = "a sequence over several devices in two halves"


def rejected_in_halves(r: Request) -> str | None:
    """Why no backend's hooks in halves serve the options of a call, or None."""
    named = {"return_intermediate_states": r.return_intermediate_states, "out": r.out is not None}
    named |= {"ssm_state_indices": r.ssm_state_indices is not None, "inplace_final_state": r.inplace_final_state}
    named["initial_state"] = r.initial_state is not None
    given = [n for n, x in named.items() if x]
    return f"{IN_HALVES}: without {', '.join(given)}" if given else None

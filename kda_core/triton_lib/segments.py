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

from dataclasses import replace

import torch

from kda_core.request import Request
from kda_core.triton_lib.plan import Boundaries, Builder, View


def as_packed(request: Request, rows: int, v_first: bool) -> Request:
    """Metadata of the call with segments of ``rows`` rows as packed sequences; ``v_first``: of the states to come."""
    # int64: kernels count rows of a whole tensor in it.
    bounds = View("cu_seqlens of segments", (-(-request.T // rows) + 1,), (1,), torch.int64)
    return replace(request, cu_seqlens=bounds, initial_state=None, grad_final_state=None, state_v_first=v_first)


def segments_of(r: Request, rows: int) -> int:
    """Segments of a call in halves: a fragment each without ``rows``; packed, some of them have no rows."""
    if not rows:
        return r.N
    return -(-r.T // rows) if r.cu_seqlens is None else r.T // rows + r.N


def packed_segments(r: Request, rows: int, v_first: bool) -> Request:
    """Metadata of packed fragments with their segments as sequences, numbered as ``fragments.bounds_kernel`` says."""
    bounds = View("cu_seqlens of segments", (segments_of(r, rows) + 1,), (1,), torch.int64)
    return replace(r, cu_seqlens=bounds, state_v_first=v_first)


def cut_into_segments(b: Builder, request: Request, rows: int, v_first: bool) -> Request:
    """``as_packed``, with boundaries that the plan writes."""
    packed = as_packed(request, rows, v_first)
    bounds = b.scratch(packed.cu_seqlens.source, packed.cu_seqlens.shape, torch.int64)
    b.step(Boundaries(bounds, rows, request.T))
    return replace(packed, cu_seqlens=bounds)

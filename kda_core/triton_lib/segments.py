"""Long sequences with few heads, cut into segments that the recurrences run side by side.

A recurrence takes the same time for a chunk whether one head runs or a hundred. Over a segment the state changes by
S' = M S + b, with a matrix M [K, K] for each head: M is the recurrence's result for the identity without values, b its
result for a zero state with them. Three steps replace the recurrence:

1. transitions: M and b of every segment but the last, all side by side, without any output;
2. join: the state at the start of every segment, one after another, in products of float32;
3. the recurrence itself, with the segments as packed sequences that have these initial states.

The backward does the same from the end: the gradient of the state goes through Mᵀ, and each segment's own outputs add
to it what the reverse recurrence finds.

This takes three times the arithmetic. It pays where a recurrence would leave most of the chip idle. Shapes alone
decide, since the host never waits for lengths. Calls with intermediate states or ``batch_invariant`` are never cut, and
some backends only cut one dense sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from kda_core.request import DATA, Edges, Request
from kda_core.triton_lib.arguments import named_state_strides
from kda_core.triton_lib.frame import names
from kda_core.triton_lib.layout import piece_rows
from kda_core.triton_lib.plan import Builder, View, changed


def segments_of(r: Request, rows: int) -> int:
    """Segments of a call in halves: a fragment each without ``rows``; packed, some of them have no rows."""
    if not rows:
        return r.N
    return r.B * -(-r.T // rows) if r.cu_seqlens is None else r.T // rows + r.N


def edges_of(r: Request) -> Edges:
    """Those of a call in halves; without any, states lie as fragments do."""
    return r.cp_context if isinstance(r.cp_context, Edges) else Edges(None, None, None, None, None, r.N)


def edge_arguments(r: Request, starts: View | None, summary: View | None) -> dict[str, Any]:
    """Arguments of a chain of segments, by the kernels' names."""
    e = edges_of(r)
    found = {n: getattr(e, n) for n in ("given", "places", "sources", "results")}
    found |= {"sends": summary and e.sends, "whole": summary and e.matrices, "starts": starts}
    s_sk, s_wk = (x.shape[3] if x else 0 for x in (starts, e.matrices))
    numbers = {"sequences": e.sequences, "count_starts": starts.shape[0] if starts else 0, "s_sk": s_sk, "s_wk": s_wk}
    return found | numbers | named_state_strides("g", e.given, False)


def sent(b: Builder, r: Request) -> View:
    """The result of a first half."""
    sends = edges_of(r).sends
    return b.result("matrices | additions", (sends.shape[0] if sends else r.N, r.HV, r.K, r.K + r.V), torch.float32)


def sent_back(b: Builder, r: Request) -> tuple[View | None, View | None]:
    """The same of a backward: matrices and additions, or additions alone."""
    if edges_of(r).matrices is not None:
        return sent(b, r), None
    return None, b.result("additions", (r.N, r.HV, r.K, r.V), torch.float32)


def ends_of(b: Builder, r: Request, name: str, dtype: torch.dtype) -> View:
    """A result of the second half: the states at the ends."""
    edges = edges_of(r)
    return b.result(name, (edges.sequences, *r.state_shape[1:]), dtype, edges.results is not None)


def packed_segments(r: Request, rows: int, v_first: bool) -> Request:
    """Metadata of the call with its segments of ``rows`` rows as packed sequences without states.

    ``fragments.segments_kernel`` numbers those of packed sequences.

    Args:
        v_first: layout of the states to come.
    """
    # int64: kernels count rows of a whole tensor in it.
    bounds = View("cu_seqlens of segments", (segments_of(r, rows) + 1,), (1,), torch.int64)
    return changed(r, cu_seqlens=bounds, initial_state=None, grad_final_state=None, state_v_first=v_first)


def lies_evenly(x: View) -> bool:
    """Whether the rows of ``x`` [B, T, ..] lie evenly over all of B · T."""
    return x.shape[0] == 1 or x.shape[1] == 0 or x.strides[0] == x.strides[1] * x.shape[1]


def in_one(x: View) -> View:
    """``x`` [B, T, ..] as [1, B · T, ..], or the layout of such a copy."""
    x = x if lies_evenly(x) else x.contiguous()
    rows = x.shape[0] * x.shape[1]
    return x._replace(shape=(1, rows, *x.shape[2:]), strides=(rows * x.strides[1], *x.strides[1:]))


def written_evenly(b: Builder, o: View) -> View:
    """``o``, or room for it whose rows do so: ``finish_output`` copies them."""
    return o if lies_evenly(o) else b.scratch("o", o.shape, o.dtype)


def one_token_axis(b: Builder, x: View) -> View:
    """``x`` [B, T, ..], copied where its rows do not lie evenly over all of B · T."""
    return x if lies_evenly(x) else b.dense(x)


def in_pieces(r: Request) -> Request:
    """Metadata of what prepares a call: with ``piece_rows``, its pieces are packed sequences of one token axis.

    The recurrence goes on from one piece to the next.
    """
    rows = piece_rows(r)
    if not rows:
        return r
    cut = packed_segments(r, rows, r.state_v_first)
    own = View("own of segments", (cut.N,), (1,), torch.int64)
    axis = {n: in_one(getattr(r, n)) for n in DATA}
    return changed(
        cut, **axis, ssm_state_indices=own, pad_slot_id=-1, has_initial_state=None, final_state_indices=None,
        final_state_pool=None, checkpoint_indices=None, checkpoint_every=0, checkpoint_pool=None,
    )  # fmt: skip


def cut_into_pieces(b: Builder, r: Request) -> Request:
    """``in_pieces``, with tables that the plan writes, and copies of rows that do not lie evenly."""
    if not piece_rows(r):
        return r
    even = changed(r, **{n: one_token_axis(b, getattr(r, n)) for n in DATA})
    cut = in_pieces(even)
    own = b.scratch("own of segments", (cut.N,), torch.int64)
    return changed(cut, cu_seqlens=write_segments(b, r, piece_rows(r), own=own), ssm_state_indices=own)


def segments_each(r: Request, rows: int) -> int:
    """Segments of a sequence of a batch; 0: sequences are packed."""
    return -(-r.T // rows) if r.cu_seqlens is None else 0


def write_segments(b: Builder, r: Request, rows: int, **tables: View | bool | None) -> View:
    """Boundaries of segments, written by the plan as are other ``tables`` of ``segments_kernel``, by its names."""
    # Not at the top: choices need this module and no triton.
    from kda_core.triton_lib.fragments import segments_kernel

    count = segments_of(r, rows) + 1
    bounds = b.scratch("bounds of segments", (count,), torch.int64)
    own = {**dict.fromkeys(("sequences", "own", "ends")), "EMPTY": False, **tables, "bounds": bounds, "rows": rows}
    b.pick(segments_kernel, count, 1, names(r) | own | {"per": segments_each(r, rows)})
    return bounds


def write_bounds(b: Builder, r: Request, cut: Request, rows: int) -> Request:
    """``cut``, the call ``r`` in segments of ``rows`` rows, with boundaries that the plan writes where they are new."""
    if cut.cu_seqlens is r.cu_seqlens:
        return cut
    return changed(cut, cu_seqlens=write_segments(b, r, rows))

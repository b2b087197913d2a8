"""How fragments of sequences that several devices share are cut: calls in two halves (``Feature.CONTEXT_PARALLEL``).

The choice depends on shapes and dtypes, and not on the chip: what a forward saves has the same shapes everywhere.
"""

from __future__ import annotations

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import IN_HALVES, rejected_in_halves
from kda_core.triton_lib.layout import CHUNK, slots
from kda_core.triton_lib.plan import changed
from kda_core.triton_lib.segments import segments_of
from kda_core_nvidia.choose import chunk
from kda_core_nvidia.choose.chip import Chip

MOST_CHANNELS = 128
"""Key channels, at most: ``chain_kernel`` holds a matrix [KP, KP] in float32."""

MOST_FRAGMENTS = 60_000
"""Fragments times heads, at most; with their segments they are the second axis of a grid, which takes 65,535."""

CHAIN_COLUMNS, CHAIN_WARPS = 16, 8
"""Value channels and warps of a program of ``chain_kernel``."""


def rejected(r: Request) -> str | None:
    """Why the hooks in halves do not serve a call that a plain call serves, or None."""
    if r.q.dtype == torch.float32:
        return f"{IN_HALVES}: takes bfloat16 and float16, not float32"
    if r.K > MOST_CHANNELS:
        return f"{IN_HALVES}: takes K up to {MOST_CHANNELS}, not {r.K}"
    if r.N * r.HV > MOST_FRAGMENTS:
        return f"{IN_HALVES}: takes fragments × heads up to {MOST_FRAGMENTS}"
    return rejected_in_halves(r)


def fragment_rows(r: Request) -> int:
    """Rows of a segment, or 0 where each fragment is one segment: batches, short ones, and many heads.

    As many segments as fill the largest chip with programs of the transitions, of which a segment and head has two.
    """
    count = chunk.most_segments(r) if r.B == 1 else 1
    if count < 2:
        return 0
    return chunk.rows_of_each(r.T, count, 2 if r.cu_seqlens is None else count + 1)


def as_fragments(r: Request, rows: int) -> Request:
    """``as_segments``; the call itself, states V first, without ``rows``."""
    return chunk.as_segments(r, rows) if rows else changed(r, state_v_first=True)


def at_once(call: Request, r: Request) -> int:
    """Sequences of ``r``, which are the call's or its segments, that run side by side.

    The last segment of packed sequences has no rows, or there is one more for each sequence but one.
    """
    return r.N - (r is not call and not call.cp_context and call.cu_seqlens is not None)


def fragment_slots(r: Request) -> int:
    """Slots of the call in segments; where it recomputes at least one is saved, as for ``saved_slots``."""
    rows = fragment_rows(r)
    if rows and (r.cu_seqlens is not None or r.T % rows):
        return r.T // CHUNK + segments_of(r, rows) + 1
    return slots(r) if r.disable_recompute else max(1, slots(r))


def fragment_starts_shape(r: Request) -> tuple[int, ...]:
    """Shape of the states at the starts of segments, which a forward saves."""
    return (segments_of(r, fragment_rows(r)), r.HV, r.V, r.K)


def cut_for(request: Request, chip: Chip) -> tuple[int, Request, chunk.BlockConfig | chunk.TransitionsHopperConfig]:
    """Rows of each segment, or 0; the call in segments or fragments, or itself; what joins them, by configuration."""
    if not request.cp_context:
        rows = chunk.segment_rows(request, chip)
        r = as_fragments(request, rows) if rows else request
        return rows, r, chunk.transitions_of(r, chip, chunk.cut_on_hopper(r, chip))
    rows = fragment_rows(request)
    r = as_fragments(request, rows)
    hopper = chunk.joins_on_hopper(r, chip, slots(r)) and chunk.countable(r.B * r.T)
    return rows, r, chunk.transitions_of(r, chip, hopper)

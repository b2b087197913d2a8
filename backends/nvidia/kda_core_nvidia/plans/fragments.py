"""The halves of a forward and of a backward, for fragments of sequences that several devices share.

A forward is prepare, transitions of segments, a chain that joins them, recurrence. Fragments are sequences, cut into
segments (``choose.fragments``). The first half ends with the matrix and the addition of each fragment. The second
begins with the states at the fragments' starts, runs the chain again from them, for the state at the start of each
segment, and the recurrence. A backward does the same from the end.
"""

from __future__ import annotations

from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.frame import names, readable
from kda_core.triton_lib.layout import padded
from kda_core.triton_lib.plan import Builder, Plan, View, changed, handed_over, input_layouts, received
from kda_core.triton_lib.segments import edge_arguments, ends_of, one_token_axis, sent
from kda_core_nvidia.choose import BackwardChoice, ForwardChoice
from kda_core_nvidia.choose.chunk import JOIN_PRECISION, TransitionsHopperConfig, in_parts
from kda_core_nvidia.choose.fragments import CHAIN_COLUMNS, CHAIN_WARPS
from kda_core_nvidia.plans.forward import Prepared, add_prepare, add_recurrence, aligned
from kda_core_nvidia.plans.segments import KEPT, Segments, cut_into_segments
from kda_core_nvidia.segments import chain_kernel

Choice = ForwardChoice | BackwardChoice


def like_segments(x: View, cut: Request) -> View:
    """``x`` [B, T, ..] of the call as the segments see it."""
    return in_parts(x, cut.N) if cut.B != x.shape[0] else x


def reverse_segments(b: Builder, r: Request, choice: Choice, prepared: Prepared) -> tuple[View, ...]:
    """Add the transitions of gradients of states; the tensors that ``add_chain`` takes."""
    segments = Segments(b, r, choice, prepared)
    named = {} if segments.hopper else segments.add_transitions()
    named |= segments.add_reverse_transitions()
    return named["matrices" if segments.hopper else "transitions"], named["additions"]


def add_chain(
    b: Builder, r: Request, cut: Request, choice: Choice, segments: tuple[View, ...], reverse: bool = False,
    starts: View | None = None, states: View | None = None, ends: View | None = None, summary: View | None = None,
    sums: View | None = None,
) -> None:  # fmt: skip
    """Add a launch of ``chain_kernel``.

    Args:
        r: the call; ``cut``: the call in segments.
        segments: matrices and additions for Hopper, else transitions, and additions where ``reverse``.
    """
    K, V, KP, VP = r.K, r.V, padded(r.K), padded(r.V)
    if isinstance(choice.transitions, TransitionsHopperConfig):
        matrices, additions = segments
        strides = (2 * K * K, 1, K, K * K, K * V, V, 1)
    else:
        matrices = segments[0].cut(2, slice(VP, VP + KP))
        additions, step = segments[-1], (VP + KP) * KP
        own = (1, KP) if reverse else (KP, 1)
        strides = (step, *own, 0, VP * KP if reverse else step, 1, KP)
    named = names(r) | dict(zip(("s_m", "s_mi", "s_mo", "s_part", "s_a", "s_ak", "s_av"), strides, strict=True)) | {
        "matrices": matrices, "additions": additions, "states": states, "ends": ends,
        **edge_arguments(r, starts, summary), "summary": summary, "sums": sums, "REVERSE": reverse, "STAGES": 1,
        "PRECISION": JOIN_PRECISION,
        # Where fragments are not cut, each is one segment, of more rows than there are.
        "rows": choice.segment_rows or r.T + 1, "per": cut.N // r.N if r.N else 0, "BV": CHAIN_COLUMNS,
    }  # fmt: skip
    columns, count = (VP, r.N) if summary is None else (KP + VP, summary.shape[0])
    b.pick(chain_kernel, (columns // CHAIN_COLUMNS, r.HV, count), CHAIN_WARPS, named)


def plan_begin(request: Request, choice: ForwardChoice) -> Plan:
    """The first half of a forward; results: matrices and additions in one, then what the second half is given."""
    b = Builder()
    summary, results = _add_begin(b, request, choice)
    return b.plan(input_layouts(request), {"matrices": summary, "additions": None, **handed_over(results)})


def _add_begin(b: Builder, request: Request, choice: ForwardChoice) -> tuple[View, dict[str, View | None]]:
    """Add the first half of a forward; its summary, and what the second half needs.

    That is o, of which rows behind the last fragment are written, everything that ``prepare`` wrote, and the segments'
    own transitions. Tensors that the call does not save lie in one.
    """
    r = readable(b, request)
    cut = cut_into_segments(b, r, choice.segment_rows)
    o = b.result("o", (r.B, r.T, r.HV, r.V), r.q.dtype)
    everything = r.save_for_backward and r.disable_recompute
    keep = choice.saved_slots if r.save_for_backward and not everything else 0
    own = Prepared._fields if everything else ("P", "X", "norms") if r.save_for_backward else ()

    def new(name: str, *layout: Any) -> View:
        return b.result(name, *layout) if name in own else b.within(KEPT, *layout)

    prepared = add_prepare(b, cut, choice, like_segments(o, cut), everything, keep, new=new)
    cut = changed(cut, v=_rows(b, cut.v, choice))
    named = Segments(b, cut, choice, prepared).add_transitions()
    segments = tuple(named[n] for n in ("matrices", "additions", "transitions") if n in named)
    summary = sent(b, r)
    add_chain(b, r, cut, choice, segments, summary=summary)
    return summary, {"o": o, **prepared._asdict(), **{f"segments {i}": x for i, x in enumerate(segments)}}


def plan_finish(request: Request, choice: ForwardChoice) -> Plan:
    """The second half; ``request.saved`` holds what the first half kept, and the states at the fragments' starts.

    Results are those of ``plan_forward``.
    """
    b = Builder()
    r = readable(b, request)
    *kept, starts = r.saved
    _, begun = _add_begin(Builder(), changed(request, saved=()), choice)
    o, keys, P, D, X, norms, *segments = received(begun, kept).values()
    cut = cut_into_segments(b, r, choice.segment_rows)
    make = b.result if r.save_for_backward else b.scratch
    states = make("states at starts", (cut.N, r.HV, r.V, r.K), torch.float32)
    final_state = ends_of(b, r, "final_state", r.state_dtype) if r.output_final_state else None
    add_chain(b, r, cut, choice, tuple(segments), starts=starts, states=states, ends=final_state)
    cut = changed(cut, v=_rows(b, cut.v, choice), initial_state=states)
    add_recurrence(b, cut, choice, Prepared(keys, P, D), like_segments(o, cut), None, None)
    results = {"o": o, "final_state": final_state, "h": None}
    if r.save_for_backward:
        kept = {"P": P, "X": X, "norms": norms, "starts": states}
        results |= {"keys": keys, "P": P, "D": D, **kept} if r.disable_recompute else kept
    return b.plan(input_layouts(request), results)


def _rows(b: Builder, x: View, choice: Choice) -> View:
    """v or do as the transitions take it."""
    return aligned(b, x) if isinstance(choice.transitions, TransitionsHopperConfig) else one_token_axis(b, x)

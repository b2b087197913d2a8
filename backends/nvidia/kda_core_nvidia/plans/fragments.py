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
from kda_core.triton_lib.frame import readable
from kda_core.triton_lib.plan import Builder, Plan, View, changed, handed_over, input_layouts, received
from kda_core.triton_lib.segments import ends_of, one_token_axis, sent
from kda_core_nvidia.choose import BackwardChoice, ForwardChoice
from kda_core_nvidia.choose.chunk import TransitionsHopperConfig, in_parts
from kda_core_nvidia.plans.forward import Prepared, add_prepare, add_recurrence, aligned
from kda_core_nvidia.plans.segments import KEPT, Segments, chain_segments, cut_into_segments

Choice = ForwardChoice | BackwardChoice


def like_segments(x: View, cut: Request) -> View:
    """``x`` [B, T, ..] of the call as the segments see it."""
    return in_parts(x, cut.N) if cut.B != x.shape[0] else x


def reverse_segments(b: Builder, r: Request, choice: Choice, prepared: Prepared) -> tuple[View, ...]:
    """Add the transitions of gradients of states; the tensors that ``chain_segments`` takes."""
    segments = Segments(b, r, choice, prepared)
    if not segments.hopper:
        return segments.add_plain()
    named = segments.add_reverse_transitions()
    return named["matrices"], named["additions"]


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
    segments = Segments(b, cut, choice, prepared)
    if segments.hopper:
        named = segments.add_transitions()
        matrices, additions = named["matrices"], named["additions"]
    else:
        matrices, additions = segments.add_plain()
    summary = sent(b, r)
    chain_segments(b, r, cut.N, choice, matrices, additions, summary=summary)
    return summary, {"o": o, **prepared._asdict(), "matrices of segments": matrices, "additions of segments": additions}


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
    chain_segments(b, r, cut.N, choice, *segments, starts=starts, states=states, ends=final_state)
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

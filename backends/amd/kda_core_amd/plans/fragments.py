"""The halves of a forward and of a backward, for fragments of sequences that several devices share.

Fragments are sequences, cut into segments where heads are few. The first half ends with the matrix and the addition of
each fragment; the second begins with the states at the fragments' starts (in a backward: their gradients at the ends).
A backward is given the states at the starts of segments, and nothing else of the forward.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kda_core.request import Request, TensorSpec
from kda_core.triton_lib.plan import Builder, Plan, input_layouts
from kda_core.triton_lib.segments import ends_of, segments_of, sent, sent_back
from kda_core_amd.choose import Architecture, fragment_rows
from kda_core_amd.plans.backward import add_gradients, add_recurrences
from kda_core_amd.plans.forward import add_prepare
from kda_core_amd.plans.frame import Frame
from kda_core_amd.plans.segments import add_recurrence, add_reverse_transitions, add_transitions, cut, join


def saved_specs(r: Request, chip: Architecture) -> tuple[TensorSpec, ...]:
    """The states at the starts of segments, which the second half of a forward saves.

    A whole call saves nothing, with ``disable_recompute`` as well: its backward computes all again from the inputs.
    """
    if not r.cp_context:
        return ()
    return (TensorSpec((segments_of(r, fragment_rows(r)), r.HV, r.V, r.K), torch.float32),)


def _frame(b: Builder, r: Request, chip: Architecture) -> Frame:
    """The call in segments; its boundaries are contiguous."""
    return cut(b, replace(r, cu_seqlens=b.dense(r.cu_seqlens)), chip, fragment_rows(r))


def plan_begin(r: Request, chip: Architecture) -> Plan:
    """The first half of a forward; results: matrices, additions, then what the second half is given."""
    b = Builder()
    o = b.result("o", (r.B, r.T, r.HV, r.V), r.q.dtype)
    f = _frame(b, r, chip)
    add_prepare(f, o, new=b.result)
    transitions = add_transitions(f, b.result)
    summary = sent(b, r)
    join(f, r, fragment_rows(r), transitions, summary=summary)
    kept = {"o": o, **{n: f.names[n] for n in ("keys", "P", "D")}, "transitions": transitions}
    return b.plan(input_layouts(r), {"matrices": summary, "additions": None, **kept})


def plan_finish(r: Request, chip: Architecture) -> Plan:
    """The second half; ``r.saved`` holds what the first half kept, and the states at the fragments' starts."""
    b = Builder()
    o, keys, P, D, transitions, starts = r.saved
    f = _frame(b, r, chip)
    f.names |= {"keys": keys, "P": P, "D": D}
    states = (b.result if r.save_for_backward else b.scratch)("starts", (f.r.N, r.HV, r.V, r.K), torch.float32)
    final_state = ends_of(b, r, "final_state", r.state_dtype) if r.output_final_state else None
    join(f, r, fragment_rows(r), transitions, starts=starts, states=states, ends=final_state)
    add_recurrence(f, "recurrence", r.V, states, o=o)
    results = {"o": o, "final_state": final_state, "h": None}
    return b.plan(input_layouts(r), results | ({"starts": states} if r.save_for_backward else {}))


def plan_begin_backward(r: Request, chip: Architecture) -> Plan:
    """The first half of a backward; results: matrices (none: those of the forward), additions, and what it keeps."""
    b = Builder()
    f = _frame(b, r, chip)
    dv = b.result("dv", r.v.shape, r.v.dtype)
    add_prepare(f, dv, backward=True, new=b.result)
    transitions, additions = add_transitions(f, b.result), add_reverse_transitions(f, b.result)
    summary, sums = sent_back(b, r)
    join(f, r, fragment_rows(r), transitions, additions, summary=summary, sums=sums)
    kept = {"dv": dv, **{n: f.names[n] for n in ("keys", "P", "D", "X")}, "transitions": transitions}
    return b.plan(input_layouts(r), {"matrices": summary, "additions": sums, **kept, "of segments": additions})


def plan_finish_backward(r: Request, chip: Architecture) -> Plan:
    """The second half; ``r.saved`` holds the states at the segments' starts, what the first half kept, and the
    gradients of the states at the fragments' ends.
    """
    b = Builder()
    starts, dv, keys, P, D, X, transitions, additions, ends = r.saved
    f = _frame(b, r, chip)
    f.names |= {"dv": dv, "keys": keys, "P": P, "D": D, "X": X}
    last = b.scratch("gradients at ends", starts.shape, torch.float32)
    grad_starts = ends_of(b, r, "dinitial_state", torch.float32) if "initial_state" in r.needs_grad else None
    join(f, r, fragment_rows(r), transitions, additions, starts=ends, states=last, ends=grad_starts)
    f.r = replace(f.r, initial_state=starts, grad_final_state=last)
    add_recurrences(f, None)
    b.release(keys, P, D, X)
    grads = add_gradients(f) | {"initial_state": grad_starts}
    return b.plan(input_layouts(r), {n: x for n, x in grads.items() if x is not None})

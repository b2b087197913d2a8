"""Forward of ``chunk_kda``: two launches, ``prepare`` (chunk-parallel) and ``recurrence`` (sequential); forward of
``fused_recurrent_kda``: one launch of ``recurrent``.

One long sequence with few heads is cut (``segments``), which takes two more between them and one before.

Fragments of sequences that several devices share are sequences, cut into segments where heads are few. The first half
of such a call ends with the matrix and the addition of each fragment; the second begins with the states at their starts
(in a backward: their gradients at the ends). A backward is given the states at the starts of segments, and nothing else
of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton.language as tl

from kda_core.request import Request, TensorSpec
from kda_core.triton_lib.arguments import row_strides
from kda_core.triton_lib.commit_kernels import add_first_commit
from kda_core.triton_lib.frame import finish_output, outputs, readable
from kda_core.triton_lib.layout import CHUNK, padded, piece_rows, power_of_two, slots
from kda_core.triton_lib.plan import Builder, Plan, View, input_layouts
from kda_core.triton_lib.recurrent_kernels import launch_recurrent, token_arguments
from kda_core.triton_lib.segments import cut_into_pieces, ends_of, in_one, segments_of, sent, written_evenly
from kda_core_amd.choose import COMMIT, Architecture, compile_options, config, fragment_rows
from kda_core_amd.plans.launches import Frame, add_recurrence, add_transitions, cut, join
from kda_core_amd.prepare import prepare

RECURRENT_OPTIONS = {
    "ONE_TOKEN": False, "AHEAD": False, "MOST": 0, "EVICTION": "", "LEAD": None, "SIGNED": False, "INDEX": tl.int64,
}  # fmt: skip
"""One kernel for every number of tokens, whose decays are rounded: a second product for each element of the state would
cost a step up to a fifth of its time."""


def add_prepare(f: Frame, o: View, backward: bool = False, new: Callable[..., View] | None = None) -> None:
    """Add a launch of ``prepare``, which writes keys, P and D.

    Args:
        o: [B, T, HV, V], zeroed in the rows that no recurrence writes.
        backward: it also writes X.
        new: allocates what it writes; scratch when left out.
    """
    names, dtype, new = f.names, f.r.q.dtype, new or f.b.scratch
    count, HV, KP = slots(f.r), f.r.HV, names["KP"]
    names["keys"] = new("keys", (count, HV, 3, CHUNK, KP), dtype)
    names["P"] = new("P", (count, HV, CHUNK, CHUNK), dtype)
    names["D"] = new("D", (count, HV, KP), torch.float32)
    names["X"] = new("X", (count, HV, CHUNK, CHUNK), dtype) if backward else None
    unit, strides = row_strides(q=names["q"], k=names["k"], g=names["g"], b=names["beta"], o=o)
    chosen = f.config("prepare")
    f.launch(prepare, chosen, count * HV, o=o, BK=min(chosen.block, KP), UNIT=unit, **strides)


def plan_forward(r: Request, chip: Architecture, rows: int, h_shape: tuple[int, ...] = ()) -> Plan:
    """The plan of a forward of ``chunk_kda``, whose results are o, final_state and h.

    Args:
        r: metadata alone.
        rows: of a segment, 0 for none.
        h_shape: of the intermediate states, which follows from values when packed.
    """
    b = Builder()
    o, final_state = outputs(b, r)
    h = None
    if r.return_intermediate_states:
        # Sequences of a pool that are skipped write no state.
        h = b.result("h", h_shape, r.h_dtype, r.ssm_state_indices is not None)
    if rows:
        f = cut(b, r, chip, rows)
        add_prepare(f, o)
        # States at the starts of the segments, as if these were given.
        starts = b.scratch("states at starts", (f.r.N, r.HV, r.V, r.K), torch.float32)
        join(f, r, rows, add_transitions(f), given=r.initial_state, states=starts, ends=final_state)
        add_recurrence(f, "recurrence", r.V, starts, o=o)
    else:
        f = Frame(b, r, chip)
        if piece_rows(r):
            o = written_evenly(b, o)
            pieces = Frame(b, cut_into_pieces(b, f.r), chip)
            add_prepare(pieces, in_one(o))
            f.names |= {n: pieces.names[n] for n in ("keys", "P", "D")}
        else:
            add_prepare(f, o)
        name = "recurrence, pieces" if piece_rows(r) else "recurrence"
        add_recurrence(f, name, r.V, r.initial_state, final_state, o, h=h)
    return b.plan(input_layouts(r), {"o": finish_output(b, r, o), "final_state": final_state, "h": h})


def saved_specs(r: Request, chip: Architecture) -> tuple[TensorSpec, ...]:
    """The states at the starts of segments, which the second half of a forward saves.

    A whole call saves nothing, with ``disable_recompute`` as well: its backward computes all again from the inputs.
    """
    if not r.cp_context:
        return ()
    return (TensorSpec((segments_of(r, fragment_rows(r)), r.HV, r.V, r.K), torch.float32),)


def frame_of_fragments(b: Builder, r: Request, chip: Architecture) -> Frame:
    """The call in segments; its boundaries are contiguous."""
    return cut(b, replace(r, cu_seqlens=b.dense(r.cu_seqlens)), chip, fragment_rows(r))


def plan_begin(r: Request, chip: Architecture) -> Plan:
    """The first half of a forward; results: matrices, additions, then what the second half is given."""
    b = Builder()
    o = b.result("o", (r.B, r.T, r.HV, r.V), r.q.dtype)
    f = frame_of_fragments(b, r, chip)
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
    f = frame_of_fragments(b, r, chip)
    f.names |= {"keys": keys, "P": P, "D": D}
    states = (b.result if r.save_for_backward else b.scratch)("starts", (f.r.N, r.HV, r.V, r.K), torch.float32)
    final_state = ends_of(b, r, "final_state", r.state_dtype) if r.output_final_state else None
    join(f, r, fragment_rows(r), transitions, starts=starts, states=states, ends=final_state)
    add_recurrence(f, "recurrence", r.V, states, o=o)
    results = {"o": o, "final_state": final_state, "h": None}
    return b.plan(input_layouts(r), results | ({"starts": states} if r.save_for_backward else {}))


def plan_recurrent(r: Request, chip: Architecture) -> Plan:
    """The plan of a forward of ``fused_recurrent_kda``, whose results are o and final_state; ``r``: metadata alone."""
    b = Builder()
    o, final_state = add_recurrent(b, r, chip)
    return b.plan(input_layouts(r), {"o": o, "final_state": final_state})


def add_recurrent(b: Builder, r: Request, chip: Architecture) -> tuple[View, View | None]:
    """Add the launch, behind that of a commit; o and the final state."""
    if r.commit is not None:
        r = add_first_commit(b, r, COMMIT.num_warps, False, **compile_options(COMMIT, chip))
    o, final_state = outputs(b, r, any_strides=True)
    state = final_state if r.initial_state is None else r.initial_state
    dtype = torch.float32 if state is None else state.dtype
    chosen = config("recurrent, V first" if r.state_v_first else "recurrent", chip, dtype, padded(r.K))
    given = readable(b, r)
    launch_recurrent(
        b, given, token_arguments(given, final_state, o) | RECURRENT_OPTIONS, min(chosen.block, power_of_two(r.V)),
        chosen.num_warps, **compile_options(chosen, chip),
    )  # fmt: skip
    return finish_output(b, r, o), final_state

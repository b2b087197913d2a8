"""Forward of ``chunk_kda``: two launches, ``prepare`` (chunk-parallel) and ``recurrence`` (sequential).

One long sequence with few heads is cut (``segments``), which takes two more between them and one before.

``kda_core.triton_lib.layout`` has the layout of what passes between them, and the equations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import row_strides
from kda_core.triton_lib.frame import finish_output, outputs
from kda_core.triton_lib.layout import CHUNK, piece_rows, slots
from kda_core.triton_lib.plan import Builder, Plan, View, input_layouts
from kda_core.triton_lib.segments import cut_into_pieces, in_one, written_evenly
from kda_core_amd.choose import Architecture
from kda_core_amd.plans.frame import Frame
from kda_core_amd.plans.segments import add_recurrence, add_transitions, cut, join
from kda_core_amd.prepare import prepare


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

"""Backward of ``chunk_kda``, and of ``fused_recurrent_kda``, which is the same function.

With w = β ⊙ z the rows that the delta rule writes, a chunk is (notation of ``triton_lib.layout``)

    z = v − ke S − Lk w = X (v − ke S)        o = qg S + M w        S' = D ⊙ S + kgᵀ w

1. prepare: the inputs once more through the forward's kernel, which also stores X;
2. states: forward recurrence, z and the state of every slot (recurrence);
3. reverse: backward recurrence, dv and the state gradient of every slot (recurrence);
4. gradients: dq, dk, dg, dβ and partial sums for A_log and dt_bias (backward_gradients);
5. finish: sums over value heads and the gradient of the norms, where there are any (finish_kernels).

One long sequence with few heads is cut (segments), which takes four more between 1 and 2 and one before.

Nothing synchronises with the host, and every sum is ordered, so that results repeat bitwise.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import named_state_strides, row_strides
from kda_core.triton_lib.finish_kernels import finish_kernel
from kda_core.triton_lib.layout import CHUNK, slots
from kda_core.triton_lib.plan import Builder, Plan, Sum, View, input_layouts
from kda_core.triton_lib.segments import ends_of, sent_back
from kda_core_amd.backward_gradients import gradients_kernel
from kda_core_amd.choose import FINISH_ROWS, GATE, Architecture, fragment_rows
from kda_core_amd.plans.forward import add_prepare, frame_of_fragments
from kda_core_amd.plans.launches import (
    Frame,
    add_recurrence,
    add_reverse_transitions,
    add_transitions,
    cut,
    join,
    launch_recurrence,
)
from kda_core_amd.recurrence import reverse_kernel


def plan_backward(call: Request, chip: Architecture, rows: int) -> Plan:
    """The plan of a backward of ``chunk_kda``.

    Args:
        call: metadata alone.
        rows: of a segment, 0 for none.

    Returns:
        a plan whose results are the gradients of q, k, v, g, beta, and of A_log, dt_bias and initial_state where the
        call has them, each in the shape and dtype of its input, contiguous.
    """
    b = Builder()
    f = cut(b, call, chip, rows) if rows else Frame(b, call, chip)
    names = f.names
    names["dv"] = b.result("dv", call.v.shape, call.v.dtype)
    add_prepare(f, names["dv"], backward=True)
    want = call.initial_state is not None and "initial_state" in call.needs_grad
    grad_state = b.result("dinitial_state", call.state_shape, call.state_dtype) if want else None
    if rows:
        # States at the starts of the segments and their gradients at the ends, as if these were given.
        transitions, additions, shape = add_transitions(f), add_reverse_transitions(f), (f.r.N, call.HV, call.V, call.K)
        starts, ends = (b.scratch(n, shape, torch.float32) for n in ("states at starts", "gradients at ends"))
        join(f, call, rows, transitions, given=call.initial_state, states=starts)
        join(f, call, rows, transitions, additions, given=call.grad_final_state, states=ends, ends=grad_state)
        f.r = replace(f.r, initial_state=starts, grad_final_state=ends)
    add_recurrences(f, None if rows else grad_state)
    b.free(*(names[n] for n in ("keys", "P", "D", "X")))
    grads = add_gradients(f)
    grads["initial_state"] = grad_state
    return b.plan(input_layouts(call), {n: x for n, x in grads.items() if x is not None})


def add_recurrences(f: Frame, grad_state: View | None) -> None:
    """Add ``recurrence``, which writes z and the states at the starts of the slots, and ``reverse_kernel``, which
    writes dv, the gradients of states at the ends of the slots, and that of the initial state.
    """
    b, r, names = f.b, f.r, f.names
    v_first, count = r.state_v_first, slots(r)
    KP, VP = names["KP"], names["VP"]
    names["z"] = b.scratch("z", (count, r.HV, CHUNK, VP), r.v.dtype)
    for name in ("states", "state_grads"):
        names[name] = b.scratch(name, (count, r.HV, VP, KP), r.v.dtype)

    made = {n: names[n] for n in ("X", "z", "states")}
    add_recurrence(f, "states", VP, r.initial_state, **made)
    launch_recurrence(
        f, reverse_kernel, "reverse", VP, {"o": names["do"], "v": names["dv"]}, grad_final_state=r.grad_final_state,
        grad_initial_state=grad_state, additions=None, **named_state_strides("f", r.grad_final_state, v_first),
        **named_state_strides("i", grad_state, v_first),
    )  # fmt: skip


def add_gradients(f: Frame) -> dict[str, View | None]:
    """Add ``gradients`` and what follows it: gradients of all inputs but the initial state."""
    b, r, names = f.b, f.r, f.names
    shape, count, KP = (r.B, r.T, r.HV, r.K), slots(r), names["KP"]
    unfinished = r.HV != r.H or r.use_qk_l2norm_in_kernel
    for name in ("dq", "dk"):
        if unfinished:
            names[name] = b.scratch(f"{name} by value head", shape, torch.float32)
        else:
            names[name] = b.result(name, shape, r.q.dtype)
    names["dg"], names["dbeta"] = b.result("dg", shape, r.g.dtype), b.result("dbeta", shape[:3], r.beta.dtype)
    # Slots that hold nothing give nothing.
    shapes = {"A_log": (count, r.HV), "dt_bias": (count, r.HV, r.K)}
    for name, x in shapes.items():
        used = names[name] is not None
        names[f"d{name}"] = b.scratch(f"d{name} by slots", x, torch.float32, True) if used else None
    # Exact ends of sequences of one chunk, where there may be such, and their states are stored in 16 bits.
    ends_given = r.initial_state is not None and r.grad_final_state is not None
    exact = ends_given and r.q.dtype.itemsize == 2 and (r.cu_seqlens is not None or r.T <= CHUNK)
    first, last = (r.initial_state, r.grad_final_state) if exact else (None, None)
    chosen = f.config("gradients")
    rows = {"q": names["q"], "k": names["k"], "g": names["g"], "b": names["beta"], "o": names["do"]}
    unit, strides = row_strides(**rows)
    f.launch(
        gradients_kernel, chosen, count * r.HV, initial_state=first, grad_final_state=last,
        BK=min(chosen.block, KP), BV=min(chosen.block, names["VP"]), UNIT=unit, **strides,
        **named_state_strides("i", first, r.state_v_first), **named_state_strides("f", last, r.state_v_first),
    )  # fmt: skip
    grads = {n: names[f"d{n}"] for n in ("q", "k", "v", "g", "beta")}
    if unfinished:
        grads |= _add_finish(f)
    for n in shapes:
        if names[f"d{n}"] is not None:
            x = getattr(r, n)
            grads[n] = b.result(f"d{n}", x.shape, x.dtype)
            b.step(Sum(grads[n], names[f"d{n}"], (0,)))
    return grads


def _add_finish(f: Frame) -> dict[str, View]:
    """The gradients of q and k from those of their value heads, [B, T, HV, K] float32."""
    r, x, rows = f.r, {n: f.names[n] for n in "qk"}, f.r.B * f.r.T
    grads = {n: f.b.result(f"d{n}", x[n].shape, x[n].dtype) for n in x}
    strides = {f"s_{n}{axis}": s for n in x for axis, s in zip("bth", x[n].strides, strict=False)}
    f.launch(
        finish_kernel, GATE, (-(-rows // FINISH_ROWS), r.H), dq_hat=f.names["dq"], dk_hat=f.names["dk"], dq=grads["q"],
        dk=grads["k"], dbeta_partial=None, dbeta=None, rows=rows, T_row=0, HO=r.HV, NK=1, R=FINISH_ROWS, **strides,
    )  # fmt: skip
    return grads


def plan_begin_backward(r: Request, chip: Architecture) -> Plan:
    """The first half of a backward; results: matrices (none: those of the forward), additions, and what it keeps."""
    b = Builder()
    f = frame_of_fragments(b, r, chip)
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
    f = frame_of_fragments(b, r, chip)
    f.names |= {"dv": dv, "keys": keys, "P": P, "D": D, "X": X}
    last = b.scratch("gradients at ends", starts.shape, torch.float32)
    grad_starts = ends_of(b, r, "dinitial_state", torch.float32) if "initial_state" in r.needs_grad else None
    join(f, r, fragment_rows(r), transitions, additions, starts=ends, states=last, ends=grad_starts)
    f.r = replace(f.r, initial_state=starts, grad_final_state=last)
    add_recurrences(f, None)
    b.release(keys, P, D, X)
    grads = add_gradients(f) | {"initial_state": grad_starts}
    return b.plan(input_layouts(r), {n: x for n, x in grads.items() if x is not None})

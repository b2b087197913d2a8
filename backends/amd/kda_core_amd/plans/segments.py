"""Launches that join the segments of one long sequence; ``kda_core_amd.segments`` has the kernels."""

from __future__ import annotations

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import named_state_strides, row_strides
from kda_core.triton_lib.plan import View
from kda_core_amd.choose import dot_widths
from kda_core_amd.plans.frame import Frame
from kda_core_amd.segments import join_kernel, reverse_transitions_kernel, transitions_kernel


def blocks_of(f: Frame, kernel: str) -> dict[str, int]:
    """Blocks of a recurrence whose programs also have rows of the transitions."""
    found = f.blocks(f.config(kernel))
    return found | {"BV": min(found["BV"], f.names["KP"])}


def add_starts(f: Frame, rows: int, call: Request) -> tuple[View, View]:
    """Compute the state at the start of every segment, and the transitions.

    Args:
        f: of the call in segments, after ``prepare``.
        rows: of a segment.
        call: the call itself, with its initial state.

    Returns:
        states [segments, HV, K, V] and transitions [segments - 1, HV, VP + KP, KP], both in float32.
    """
    state, names, blocks = call.initial_state, f.names, blocks_of(f, "states")
    KP, VP, heads = names["KP"], names["VP"], (f.r.N - 1) * f.r.HV
    transitions = f.b.scratch("transitions", (f.r.N - 1, f.r.HV, VP + KP, KP), torch.float32)
    f.launch(
        transitions_kernel, f.config("states"), (VP + KP) // blocks["BV"] * heads, initial_state=state,
        transitions=transitions, rows=rows, programs=heads, EVERY=False, UNIT=1, **blocks,
        **row_strides(v=names["v"])[1], **named_state_strides("i", state, call.state_v_first),
    )  # fmt: skip
    return _add_join(f, state, call.state_v_first, transitions), transitions


def add_ends(f: Frame, rows: int, call: Request, transitions: View) -> View:
    """Compute the gradient of the state at the end of every segment, [segments, HV, K, V] in float32.

    Args:
        f: of the call in segments, after ``prepare``; it knows ``do``.
        rows: of a segment.
        call: the call itself, with the gradient of its final state.
        transitions: from ``add_starts``.
    """
    state, names, blocks = call.grad_final_state, f.names, blocks_of(f, "reverse")
    KP, VP, heads = names["KP"], names["VP"], (f.r.N - 1) * f.r.HV
    additions = f.b.scratch("additions", (f.r.N - 1, f.r.HV, VP, KP), torch.float32)
    f.launch(
        reverse_transitions_kernel, f.config("reverse"), VP // blocks["BV"] * heads, grad_final_state=state,
        additions=additions, rows=rows, programs=heads, EVERY=False, UNIT=1, **blocks, **row_strides(o=names["do"])[1],
        **named_state_strides("f", state, call.state_v_first),
    )  # fmt: skip
    return _add_join(f, state, call.state_v_first, transitions, additions)


def _add_join(f: Frame, given: View | None, v_first: bool, transitions: View, additions: View | None = None) -> View:
    """States at the starts of the segments, or gradients at their ends."""
    r, names, chosen = f.r, f.names, f.config("join", torch.float32)
    name = "states at starts" if additions is None else "gradients at ends"
    states = f.b.scratch(name, (r.N, r.HV, r.K, r.V), torch.float32)
    f.launch(
        join_kernel, chosen, names["VP"] // chosen.block * r.HV, given=given, transitions=transitions,
        additions=additions, states=states, count=r.N, BV=chosen.block, BK=min(chosen.keys, names["KP"]),
        REVERSE=additions is not None, IN_TURN=chosen.level_loop,
        # As float16's: where a foreign device's matrix unit has no float32, 22 bits are enough beside rounded operands.
        DOT=dot_widths(torch.float16, f.chip)[1], **named_state_strides("g", given, v_first),
    )  # fmt: skip
    return states

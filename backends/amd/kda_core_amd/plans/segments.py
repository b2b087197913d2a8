"""Launches that compute the transitions of segments, and that join them."""

from __future__ import annotations

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import named_state_strides, row_strides
from kda_core.triton_lib.plan import View
from kda_core_amd.backward_reverse import reverse_kernel
from kda_core_amd.backward_states import states_kernel
from kda_core_amd.choose import dot_widths
from kda_core_amd.plans.frame import Frame
from kda_core_amd.segments import join_kernel

_UNUSED = ("s_vb", "s_vt", "s_vh", "s_in", "s_ih", "s_ik", "s_iv")
"""Strides of what ``reverse_kernel`` does not write here."""


def add_transitions(f: Frame, rows: int = 0, call: Request | None = None) -> View:
    """bᵀ and Mᵀ of segments, [segments, HV, VP + KP, KP] in float32.

    Args:
        f: of the call in segments, after ``prepare``.
        rows: of a segment, with ``call``.
        call: the call itself, with its initial state, from which the first segment starts; the last segment has no
            transitions. None for fragments: all segments have transitions, which are a result, and none a state.
    """
    names, blocks, state = f.names, _blocks_of(f, "states"), call and call.initial_state
    count, new = (f.r.N, f.b.result) if call is None else (f.r.N - 1, f.b.scratch)
    KP, VP, programs = names["KP"], names["VP"], count * f.r.HV
    transitions = new("transitions", (count, f.r.HV, VP + KP, KP), torch.float32)
    unit, strides = row_strides(v=names["v"])
    f.launch(
        states_kernel, f.config("states"), (VP + KP) // blocks["BV"] * programs, initial_state=state, X=None, z=None,
        states=None, transitions=transitions, rows=rows, programs=programs, EVERY=call is None, UNIT=unit, **blocks,
        **strides, **named_state_strides("i", state, call is not None and call.state_v_first) | {"s_in": None},
    )  # fmt: skip
    return transitions


def add_reverse_transitions(f: Frame, rows: int = 0, call: Request | None = None) -> View:
    """The gradients of states that come from the outputs of segments, [segments, HV, VP, KP] in float32.

    Arguments as of ``add_transitions``: ``f`` knows ``do``, and ``call`` the gradient of its final state.
    """
    names, blocks, state = f.names, _blocks_of(f, "reverse"), call and call.grad_final_state
    count, new = (f.r.N, f.b.result) if call is None else (f.r.N - 1, f.b.scratch)
    KP, VP, programs = names["KP"], names["VP"], count * f.r.HV
    additions = new("additions of segments", (count, f.r.HV, VP, KP), torch.float32)
    unit, strides = row_strides(o=names["do"])
    f.launch(
        reverse_kernel, f.config("reverse"), VP // blocks["BV"] * programs, grad_final_state=state, dv=None,
        state_grads=None, grad_initial_state=None, additions=additions, rows=rows, programs=programs,
        EVERY=call is None, UNIT=unit, **blocks, **strides, **dict.fromkeys(_UNUSED),
        **named_state_strides("f", state, call is not None and call.state_v_first) | {"s_fn": None},
    )  # fmt: skip
    return additions


def _blocks_of(f: Frame, kernel: str) -> dict[str, int]:
    """Blocks of a recurrence whose programs also have rows of the transitions."""
    found = f.blocks(f.config(kernel))
    return found | {"BV": min(found["BV"], f.names["KP"])}


def add_starts(f: Frame, rows: int, call: Request) -> tuple[View, View]:
    """Compute the state at the start of every segment, and the transitions; arguments as of ``add_transitions``.

    Returns:
        states [segments, HV, K, V] and transitions [segments - 1, HV, VP + KP, KP], both in float32.
    """
    transitions = add_transitions(f, rows, call)
    return _add_join(f, call.initial_state, call.state_v_first, transitions), transitions


def add_ends(f: Frame, rows: int, call: Request, transitions: View) -> View:
    """Compute the gradient of the state at the end of every segment, [segments, HV, K, V] in float32.

    Args:
        transitions: from ``add_starts``; the others as of ``add_reverse_transitions``.
    """
    additions = add_reverse_transitions(f, rows, call)
    return _add_join(f, call.grad_final_state, call.state_v_first, transitions, additions)


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

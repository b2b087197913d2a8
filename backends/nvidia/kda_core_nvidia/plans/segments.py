"""Launches that join the segments of one long sequence; ``segments`` has the kernels and the reason."""

from __future__ import annotations

from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import row_strides
from kda_core.triton_lib.frame import names
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.plan import Builder, View
from kda_core_nvidia.choose import BackwardChoice, ForwardChoice
from kda_core_nvidia.choose.chunk import split_scale
from kda_core_nvidia.segments import join_kernel, reverse_transitions_kernel, transitions_kernel

JOIN_ROWS = 16
"""Value channels of a program of ``join_kernel``."""

Choice = ForwardChoice | BackwardChoice


def _names(r: Request, choice: Choice, v_first: bool) -> dict[str, Any]:
    """What launches between segments take; ``v_first``: the layout of the call's own states."""
    config = choice.transitions
    return names(r) | {
        "count": r.N, "LIFT": lift(r.q.dtype, r.use_qk_l2norm_in_kernel), "BV": config.block_v, "V_FIRST": v_first,
        "PRECISION": "tf32", "STAGES": config.stages,
    }  # fmt: skip


def add_starts(
    b: Builder, r: Request, choice: Choice, v: View, keys: View, D: View, call: Request
) -> tuple[View, View]:
    """Compute the state at the start of every segment, and the transitions.

    Args:
        r: the call in segments (``triton_lib.segments``).
        v: [1, T, HV, V], last dimension contiguous.
        keys, D: what ``prepare`` wrote for ``r``.
        call: the call itself, with its initial state.

    Returns:
        states [count, HV, V, K] in float32, transitions [count - 1, HV, VP + KP, KP] in float32.
    """
    initial_state, named = b.dense(call.initial_state), _names(r, choice, call.state_v_first)
    KP, VP, config, count = named["KP"], named["VP"], choice.transitions, r.N
    transitions = b.scratch("transitions", (count - 1, r.HV, VP + KP, KP), torch.float32)
    own = {"v": v, "keys": keys, "D": D, "initial_state": initial_state, "transitions": transitions}
    grid = ((VP + KP) // config.block_v, (count - 1) * r.HV)
    b.pick(transitions_kernel, grid, config.num_warps, named | own | row_strides(v=v)[1])
    states = b.scratch("states at starts", (count, r.HV, r.V, r.K), torch.float32)
    _add_join(b, choice, named, initial_state, transitions, None, states)
    return states, transitions


def add_ends(
    b: Builder, r: Request, choice: Choice, do: View, prepared: tuple[View, View, View], transitions: View,
    grad_final_state: View | None, v_first: bool,
) -> View:  # fmt: skip
    """Compute the gradient of the state at the end of every segment, [count, HV, V, K] in float32.

    Args:
        do: [1, T, HV, V], last dimension contiguous.
        prepared: keys, P and D, as ``prepare`` wrote them for ``r``.
        transitions: from ``add_starts``.
        grad_final_state: the call's own, contiguous, or None; ``v_first``: its layout.
    """
    named, (keys, P, D) = _names(r, choice, v_first), prepared
    KP, VP, config, count = named["KP"], named["VP"], choice.transitions, r.N
    additions = b.scratch("additions", (count - 1, r.HV, VP, KP), torch.float32)
    own = {"keys": keys, "P": P, "D": D, "do": do, "grad_final_state": grad_final_state, "additions": additions}
    own |= row_strides(o=do)[1] | {"o_scale": split_scale(r.scale, r.q.dtype)[1]}
    b.pick(reverse_transitions_kernel, (VP // config.block_v, (count - 1) * r.HV), config.num_warps, named | own)
    states = b.scratch("gradients at ends", (count, r.HV, r.V, r.K), torch.float32)
    _add_join(b, choice, named, grad_final_state, transitions, additions, states)
    b.free(additions)
    return states


def _add_join(
    b: Builder, choice: Choice, named: dict[str, Any], given: View | None, transitions: View, additions: View | None,
    states: View,
) -> None:  # fmt: skip
    own = {"given": given, "transitions": transitions, "additions": additions, "states": states}
    own |= {"BV": JOIN_ROWS, "BK": min(32, named["KP"]), "REVERSE": additions is not None}
    named = named | own | {"PRECISION": choice.join_precision}
    b.pick(join_kernel, (named["VP"] // JOIN_ROWS, named["HV"]), 4, named)

"""Launches that join the segments of one long sequence; ``segments`` has the kernels and the reason."""

from __future__ import annotations

from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.layout import CHUNK, padded
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.plan import Builder, View
from kda_core_nvidia.choose import BackwardChoice, ForwardChoice
from kda_core_nvidia.choose.chunk import split_scale
from kda_core_nvidia.segments import join_kernel, reverse_transitions_kernel, transitions_kernel

JOIN_ROWS = 16
"""Value channels of a program of ``join_kernel``."""

Choice = ForwardChoice | BackwardChoice


def _shape(r: Request) -> dict[str, int]:
    return {"HV": r.HV, "K": r.K, "V": r.V, "KP": padded(r.K), "VP": padded(r.V)}


def _transition_constants(r: Request, choice: Choice, v_first: bool) -> dict[str, Any]:
    """Constants of both transition kernels."""
    own = {"C": CHUNK, "LIFT": lift(r.q.dtype, r.use_qk_l2norm_in_kernel), "BV": choice.transitions.block_v}
    return _shape(r) | own | {"V_FIRST": v_first, "PRECISION": "tf32", "STAGES": choice.transitions.stages}


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
    initial_state, v_first = b.dense(call.initial_state), call.state_v_first
    shape, count = _shape(r), r.N
    KP, VP = shape["KP"], shape["VP"]
    transitions = b.scratch("transitions", (count - 1, r.HV, VP + KP, KP), torch.float32)
    b.launch(
        transitions_kernel, ((VP + KP) // choice.transitions.block_v, (count - 1) * r.HV, 1),
        choice.transitions.num_warps, _transition_constants(r, choice, v_first), v=v, keys=keys, D=D,
        initial_state=initial_state, transitions=transitions, cu_seqlens=r.cu_seqlens,
        s_vt=v.stride(1), s_vh=v.stride(2), T=r.T, count=count,
    )  # fmt: skip
    states = b.scratch("states at starts", (count, r.HV, r.V, r.K), torch.float32)
    _add_join(b, shape, choice, initial_state, transitions, None, states, v_first)
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
    shape, count = _shape(r), r.N
    keys, P, D = prepared
    KP, VP = shape["KP"], shape["VP"]
    additions = b.scratch("additions", (count - 1, r.HV, VP, KP), torch.float32)
    b.launch(
        reverse_transitions_kernel, (VP // choice.transitions.block_v, (count - 1) * r.HV, 1),
        choice.transitions.num_warps, _transition_constants(r, choice, v_first), keys=keys, P=P, D=D, do=do,
        grad_final_state=grad_final_state, additions=additions, cu_seqlens=r.cu_seqlens,
        s_ot=do.stride(1), s_oh=do.stride(2), T=r.T, count=count, o_scale=split_scale(r.scale, r.q.dtype)[1],
    )  # fmt: skip
    states = b.scratch("gradients at ends", (count, r.HV, r.V, r.K), torch.float32)
    _add_join(b, shape, choice, grad_final_state, transitions, additions, states, v_first)
    b.free(additions)
    return states


def _add_join(
    b: Builder, shape: dict[str, int], choice: Choice, given: View | None, transitions: View, additions: View | None,
    states: View, v_first: bool,
) -> None:  # fmt: skip
    reverse = additions is not None
    constants = shape | {"BV": JOIN_ROWS, "BK": min(32, shape["KP"]), "V_FIRST": v_first, "REVERSE": reverse}
    b.launch(
        join_kernel, (shape["VP"] // JOIN_ROWS, shape["HV"], 1), 4, constants | {"PRECISION": choice.join_precision},
        given=given, transitions=transitions, additions=additions, states=states, count=states.shape[0],
    )  # fmt: skip

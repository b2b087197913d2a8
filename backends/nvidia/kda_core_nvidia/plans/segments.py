"""Launches that join the segments of one long sequence; ``segments`` has the kernels and the reason."""

from __future__ import annotations

from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib import segments
from kda_core.triton_lib.layout import CHUNK, padded
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.plan import Builder, View, matrix_tile, token_tile
from kda_core_nvidia.choose import BackwardChoice, ForwardChoice
from kda_core_nvidia.choose.chunk import BlockConfig, TransitionsHopperConfig, as_segments, split_scale
from kda_core_nvidia.join_hopper import join_hopper
from kda_core_nvidia.reverse_transitions_hopper import reverse_transitions_hopper
from kda_core_nvidia.segments import join_kernel, reverse_transitions_kernel, transitions_kernel
from kda_core_nvidia.transitions_hopper import transitions_hopper

JOIN_ROWS = 16
"""Value channels of a program of ``join_kernel``."""

Choice = ForwardChoice | BackwardChoice


def cut_into_segments(b: Builder, r: Request, rows: int) -> Request:
    """``as_segments``, with boundaries that the plan writes where it has them."""
    return segments.cut_into_segments(b, r, rows, v_first=True) if r.T % rows else as_segments(r, rows)


def _shape(r: Request) -> dict[str, int]:
    return {"HV": r.HV, "K": r.K, "V": r.V, "KP": padded(r.K), "VP": padded(r.V)}


def _transition_constants(r: Request, config: BlockConfig, v_first: bool) -> dict[str, Any]:
    """Constants of both transition kernels."""
    own = {"C": CHUNK, "LIFT": lift(r.q.dtype, r.use_qk_l2norm_in_kernel), "BV": config.block_v}
    return _shape(r) | own | {"V_FIRST": v_first, "PRECISION": "tf32", "STAGES": config.stages}


def add_starts(
    b: Builder, r: Request, choice: Choice, v: View, keys: View, D: View, call: Request, states: View | None = None
) -> tuple[View, View | None]:
    """Compute the state at the start of every segment.

    Args:
        r: the call in segments (``cut_into_segments``).
        v: as of ``r``, last dimension contiguous; for Hopper with rows that bulk copies take.
        keys, D: what ``prepare`` wrote for ``r``.
        call: the call itself, with its initial state.
        states: [count, HV, V, K] in float32, to be written; scratch when left out.

    Returns:
        the states, and the transitions where ``add_ends`` needs them: [count - 1, HV, VP + KP, KP] in float32.
    """
    initial_state, v_first = b.dense(call.initial_state), call.state_v_first
    shape, count, config = _shape(r), r.N, choice.transitions
    if states is None:
        states = b.scratch("states at starts", (count, r.HV, r.V, r.K), torch.float32)
    if isinstance(config, TransitionsHopperConfig):
        made = _transitions_hopper(b, r, config)
        b.launch(
            transitions_hopper, (r.K // config.rows, (count - 1) * r.HV, 1), config.num_warps,
            _hopper_constants(r, config) | {"STAGES": config.stages}, **_hopper_arguments(r, choice, keys, D), **made,
            values=token_tile(v, CHUNK, r.V, swizzled=True), s_vh=v.stride(2),
        )  # fmt: skip
        _add_join_hopper(b, r, config, made, initial_state, v_first, states, reverse=False)
        return states, None
    KP, VP = shape["KP"], shape["VP"]
    transitions = b.scratch("transitions", (count - 1, r.HV, VP + KP, KP), torch.float32)
    b.launch(
        transitions_kernel, ((VP + KP) // config.block_v, (count - 1) * r.HV, 1), config.num_warps,
        _transition_constants(r, config, v_first), v=v, keys=keys, D=D, initial_state=initial_state,
        transitions=transitions, cu_seqlens=r.cu_seqlens, s_vt=v.stride(1), s_vh=v.stride(2), T=r.T, count=count,
    )  # fmt: skip
    _add_join(b, shape, choice, initial_state, transitions, None, states, v_first)
    return states, transitions


def _transitions_hopper(b: Builder, r: Request, config: TransitionsHopperConfig) -> dict[str, View]:
    """Scratch for what ``transitions_hopper`` or ``reverse_transitions_hopper`` writes, by its parameters."""
    lead = (r.N - 1, r.HV)
    return {
        "matrices": b.scratch("matrices of segments", (*lead, 2, r.K, r.K), torch.bfloat16),
        "additions": b.scratch("additions of segments", (*lead, r.K, r.V), torch.float32),
        "forgotten": b.scratch("forgotten", (*lead, r.K // config.rows), torch.int32),
    }


def _hopper_constants(r: Request, config: TransitionsHopperConfig) -> dict[str, Any]:
    shape = {"HV": r.HV, "V": r.V, "KP": r.K, "C": CHUNK}
    return shape | {"BR": config.rows, "UNROLL": config.unroll, "maxnreg": config.registers}


def _hopper_arguments(r: Request, choice: Choice, keys: View, D: View) -> dict[str, Any]:
    """Arguments of both transition kernels for Hopper."""
    tiles = {"single": matrix_tile(keys, CHUNK, r.K, swizzled=True), "decays": matrix_tile(D, 1, r.K, by_rows=True)}
    return tiles | {"chunks": choice.segment_rows // CHUNK, "spare": 0 if r.cu_seqlens is None else 1}


def _add_join_hopper(
    b: Builder, r: Request, config: TransitionsHopperConfig, made: dict[str, View], given: View | None, v_first: bool,
    states: View, reverse: bool,
) -> None:  # fmt: skip
    constants = {
        "HV": r.HV, "K": r.K, "V": r.V, "BV": config.join_block, "PARTS": r.K // config.rows,
        "MOST": max(32, padded(r.N - 1)), "V_FIRST": v_first, "REVERSE": reverse, "STAGES": config.join_stages,
    }  # fmt: skip
    tiles = {"matrices": matrix_tile(made["matrices"], r.K, r.K, swizzled=True)}
    b.launch(
        join_hopper, (r.V // config.join_block, r.HV, r.N), 8, constants, **(made | tiles), given=given, states=states,
        count=r.N,
    )  # fmt: skip


def add_ends(
    b: Builder, r: Request, choice: Choice, do: View, prepared: tuple[View, View, View], transitions: View | None,
    grad_final_state: View | None, v_first: bool,
) -> View:  # fmt: skip
    """Compute the gradient of the state at the end of every segment, [count, HV, V, K] in float32.

    Args:
        do: as of ``r``, last dimension contiguous; for Hopper with rows that bulk copies take.
        prepared: keys, P and D, as ``prepare`` wrote them for ``r``.
        transitions: from ``add_starts``.
        grad_final_state: the call's own, contiguous, or None; ``v_first``: its layout.
    """
    shape, count, config, o_scale = _shape(r), r.N, choice.transitions, split_scale(r.scale, r.q.dtype)[1]
    keys, P, D = prepared
    states = b.scratch("gradients at ends", (count, r.HV, r.V, r.K), torch.float32)
    if isinstance(config, TransitionsHopperConfig):
        made = _transitions_hopper(b, r, config)
        b.launch(
            reverse_transitions_hopper, (r.K // config.rows, (count - 1) * r.HV, 1), config.num_warps,
            _hopper_constants(r, config) | {"STAGES": config.reverse_stages, "maxnreg": config.reverse_registers},
            **_hopper_arguments(r, choice, keys, D), **made, pairs=matrix_tile(keys, 2 * CHUNK, r.K, swizzled=True),
            P=matrix_tile(P, CHUNK, CHUNK, swizzled=True),
            gradients=token_tile(do, CHUNK, r.V, swizzled=True), s_oh=do.stride(2),
            T=r.T * (r.N if r.cu_seqlens is None else 1), o_scale=o_scale,
        )  # fmt: skip
        _add_join_hopper(b, r, config, made, grad_final_state, v_first, states, reverse=True)
        return states
    KP, VP = shape["KP"], shape["VP"]
    additions = b.scratch("additions", (count - 1, r.HV, VP, KP), torch.float32)
    b.launch(
        reverse_transitions_kernel, (VP // config.block_v, (count - 1) * r.HV, 1), config.num_warps,
        _transition_constants(r, config, v_first), keys=keys, P=P, D=D, do=do, grad_final_state=grad_final_state,
        additions=additions, cu_seqlens=r.cu_seqlens, s_ot=do.stride(1), s_oh=do.stride(2), T=r.T, count=count,
        o_scale=o_scale,
    )  # fmt: skip
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

"""Launches that join the segments of one long sequence; ``segments`` has the kernels and the reason."""

from __future__ import annotations

from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib import segments
from kda_core.triton_lib.arguments import row_strides
from kda_core.triton_lib.frame import names
from kda_core.triton_lib.layout import CHUNK, padded
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.plan import Builder, View, matrix_tile, token_tile
from kda_core_nvidia.choose import BackwardChoice, ForwardChoice
from kda_core_nvidia.choose.chunk import TransitionsHopperConfig, as_segments, split_scale
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


def _names(r: Request, v_first: bool) -> dict[str, Any]:
    """Arguments that launches between segments share; ``v_first``: the layout of the call's own states."""
    own = {"count": r.N, "V_FIRST": v_first, "LIFT": lift(r.q.dtype, r.use_qk_l2norm_in_kernel), "PRECISION": "tf32"}
    own["EVERY"] = False
    return names(r) | own


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
    initial_state, named = b.dense(call.initial_state), _names(r, call.state_v_first)
    count, config = r.N, choice.transitions
    if states is None:
        states = b.scratch("states at starts", (count, r.HV, r.V, r.K), torch.float32)
    if isinstance(config, TransitionsHopperConfig):
        named |= _hopper(b, r, choice, config, keys, D)
        own = {"values": token_tile(v, CHUNK, r.V, swizzled=True), "s_vh": v.stride(2)}
        grid = (r.K // config.rows, (count - 1) * r.HV)
        b.pick(transitions_hopper, grid, config.num_warps, named | own, maxnreg=config.registers)
        _add_join_hopper(b, r, config, named, initial_state, states, reverse=False)
        return states, None
    KP, VP = named["KP"], named["VP"]
    transitions = b.scratch("transitions", (count - 1, r.HV, VP + KP, KP), torch.float32)
    named |= {"BV": config.block_v, "STAGES": config.stages, "keys": keys, "D": D, "initial_state": initial_state}
    grid = ((VP + KP) // config.block_v, (count - 1) * r.HV)
    own = row_strides(v=v)[1] | {"v": v, "transitions": transitions}
    b.pick(transitions_kernel, grid, config.num_warps, named | own)
    _add_join(b, choice, named, initial_state, transitions, None, states)
    return states, transitions


def _hopper(
    b: Builder, r: Request, choice: Choice, config: TransitionsHopperConfig, keys: View, D: View
) -> dict[str, Any]:
    """Inputs of both transition kernels for Hopper, and scratch for their outputs."""
    lead = (r.N - 1, r.HV)
    return {
        "cu_seqlens": None, "single": matrix_tile(keys, CHUNK, r.K, swizzled=True),
        "decays": matrix_tile(D, 1, r.K, by_rows=True),
        "chunks": choice.segment_rows // CHUNK, "spare": 0 if r.cu_seqlens is None else 1, "BR": config.rows,
        "UNROLL": config.unroll, "STAGES": config.stages,
        "matrices": b.scratch("matrices of segments", (*lead, 2, r.K, r.K), torch.bfloat16),
        "additions": b.scratch("additions of segments", (*lead, r.K, r.V), torch.float32),
        "forgotten": b.scratch("forgotten", (*lead, r.K // config.rows), torch.int32),
    }  # fmt: skip


def _add_join_hopper(
    b: Builder, r: Request, config: TransitionsHopperConfig, named: dict[str, Any], given: View | None, states: View,
    reverse: bool,
) -> None:  # fmt: skip
    own = {
        "matrices": matrix_tile(named["matrices"], r.K, r.K, swizzled=True), "given": given, "states": states,
        "BV": config.join_block, "PARTS": r.K // config.rows, "MOST": max(32, padded(r.N - 1)), "REVERSE": reverse,
        "STAGES": config.join_stages,
    }  # fmt: skip
    b.pick(join_hopper, (r.V // config.join_block, r.HV, r.N), 8, named | own)


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
    named, count, config, (keys, P, D) = _names(r, v_first), r.N, choice.transitions, prepared
    named["o_scale"] = split_scale(r.scale, r.q.dtype)[1]
    states = b.scratch("gradients at ends", (count, r.HV, r.V, r.K), torch.float32)
    if isinstance(config, TransitionsHopperConfig):
        named |= _hopper(b, r, choice, config, keys, D) | {"STAGES": config.reverse_stages}
        own = {
            "pairs": matrix_tile(keys, 2 * CHUNK, r.K, swizzled=True), "s_oh": do.stride(2),
            "P": matrix_tile(P, CHUNK, CHUNK, swizzled=True), "T": r.T * (r.N if r.cu_seqlens is None else 1),
            "gradients": token_tile(do, CHUNK, r.V, swizzled=True),
        }  # fmt: skip
        grid = (r.K // config.rows, (count - 1) * r.HV)
        b.pick(reverse_transitions_hopper, grid, config.num_warps, named | own, maxnreg=config.reverse_registers)
        _add_join_hopper(b, r, config, named, grad_final_state, states, reverse=True)
        return states
    KP, VP = named["KP"], named["VP"]
    additions = b.scratch("additions", (count - 1, r.HV, VP, KP), torch.float32)
    named |= {"BV": config.block_v, "STAGES": config.stages, "keys": keys, "P": P, "D": D, "do": do}
    own = row_strides(o=do)[1] | {"grad_final_state": grad_final_state, "additions": additions}
    b.pick(reverse_transitions_kernel, (VP // config.block_v, (count - 1) * r.HV), config.num_warps, named | own)
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

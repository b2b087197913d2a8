"""Launches that cut long sequences into segments and join them; ``segments`` has the kernels and the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import named_state_strides, row_strides
from kda_core.triton_lib.frame import names
from kda_core.triton_lib.layout import CHUNK, padded
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.plan import Builder, View, changed, matrix_tile, token_tile
from kda_core.triton_lib.segments import one_token_axis, segments_each, write_bounds, write_segments
from kda_core_nvidia.choose import BackwardChoice, ForwardChoice
from kda_core_nvidia.choose.chunk import JOIN_PRECISION, TransitionsHopperConfig, most_of_several, split_scale
from kda_core_nvidia.choose.fragments import as_fragments
from kda_core_nvidia.join_hopper import join_hopper
from kda_core_nvidia.reverse_transitions_hopper import reverse_transitions_hopper
from kda_core_nvidia.segments import first_segments_kernel, join_kernel, reverse_transitions_kernel, transitions_kernel
from kda_core_nvidia.transitions_hopper import transitions_hopper

ROWS = ("q", "k", "v", "g", "beta", "grad_o")
"""Inputs [B, T, ..] of a call."""

JOIN_ROWS = 16
"""Value channels of a program of ``join_kernel``, and of ``first_segments_kernel``."""

Choice = ForwardChoice | BackwardChoice


def cut_into_segments(b: Builder, r: Request, rows: int) -> Request:
    """``as_fragments``, with boundaries that the plan writes where it has them."""
    return write_bounds(b, r, as_fragments(r, rows), rows)


def cut_several(
    b: Builder, r: Request, rows: int, final_state: View | None = None, starts: View | None = None
) -> tuple[Request, View]:
    """``as_segments`` of several sequences, or of one whose state is in a pool.

    Args:
        final_state: is written as the call asks.
        starts: for the states at the starts of segments, which become the pool of the call in segments; or None.

    Returns:
        the call in segments, and [S + 1] of which sequence each is: -1 where it has no rows, or is skipped.
    """
    r = changed(r, **{n: one_token_axis(b, x) for n in ROWS if (x := getattr(r, n)) is not None})
    cut = as_fragments(r, rows)
    counts = {"sequences": cut.N + 1, "own": starts and cut.N, "ends": final_state and cut.N}
    table = {n: x and b.scratch(f"{n} of segments", (x,), torch.int64) for n, x in counts.items()}
    empty = r.has_initial_state is None and r.final_state_indices is None
    bounds = write_segments(b, r, rows, **table, EMPTY=empty)
    cut = changed(
        cut, cu_seqlens=bounds, initial_state=starts, has_initial_state=None, ssm_state_indices=table["own"],
        pad_slot_id=-1, final_state_indices=table["ends"], final_state_pool=final_state, update_state=True,
        inplace_final_state=final_state is not None,
    )  # fmt: skip
    return cut, table["sequences"]


def add_first_segments(b: Builder, call: Request, rows: int, grad_starts: View, grad_state: View) -> None:
    """Gradients of the states at the starts of sequences from those of ``cut_several``'s segments."""
    named = names(call) | {"grad_starts": grad_starts, "grad_initial_state": grad_state, "rows": rows, "BV": JOIN_ROWS}
    named["per"] = segments_each(call, rows)
    b.pick(first_segments_kernel, (call.V // JOIN_ROWS, call.N * call.HV), 4, named)


KEPT = "kept"
"""The result that holds what the second half of a call is given and the call does not save."""


def _new(b: Builder, call: Request | None) -> Callable[..., View]:
    return b.scratch if call is not None else lambda name, *layout: b.within(KEPT, *layout)


def _names(
    b: Builder, r: Request, choice: Choice, keys: View, D: View, call: Request | None, sequences: View | None = None
) -> dict[str, Any]:
    """Arguments of the launches that compute transitions, with the tensors that those for Hopper write."""
    named = names(r) | {
        "keys": keys, "D": D, "count": r.N, "LIFT": lift(r.q.dtype, r.use_qk_l2norm_in_kernel), "PRECISION": "tf32",
        "EVERY": call is None, "initial_state": call and call.initial_state,
        "grad_final_state": call and call.grad_final_state,
    }  # fmt: skip
    if call is not None:
        named["V_FIRST"] = call.state_v_first
    config = choice.transitions
    if not isinstance(config, TransitionsHopperConfig):
        return named | {"BV": config.block_v, "STAGES": config.stages}
    count, new = r.N if call is None else r.N - (sequences is None), _new(b, call)
    named |= {
        "single": matrix_tile(keys, CHUNK, r.K, swizzled=True), "decays": matrix_tile(D, 1, r.K, by_rows=True),
        "BR": config.rows, "UNROLL": config.unroll, "STAGES": config.stages, "spare": 0, "forgotten": None,
        "sequences": sequences,
        "matrices": new("matrices of segments", (count, r.HV, 2, r.K, r.K), torch.bfloat16),
        "additions": new("additions of segments", (count, r.HV, r.K, r.V), torch.float32),
    }  # fmt: skip
    if call is None:
        return named
    return named | {
        "cu_seqlens": sequences and r.cu_seqlens, "chunks": choice.segment_rows // CHUNK,
        "spare": 0 if r.cu_seqlens is None else 1,
        "forgotten": b.scratch("forgotten", (count, r.HV, r.K // config.rows), torch.int32),
    }  # fmt: skip


def add_transitions(
    b: Builder, r: Request, choice: Choice, v: View, keys: View, D: View, call: Request | None = None,
    sequences: View | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Add the transitions of segments.

    Args:
        r: the call in segments.
        v: as of ``r``, last dimension contiguous; for Hopper with rows that bulk copies take.
        keys, D: what ``prepare`` wrote for ``r``.
        call: the call itself, with its initial state, contiguous, from which the first segment starts; the last segment
            has no transitions. None for fragments: all segments have transitions, which are results, and none a state.
        sequences: from ``cut_several``, else None.

    Returns:
        arguments of the launch, with "matrices" and "additions" for Hopper, else "transitions" [.., HV, VP + KP, KP] in
        float32.
    """
    config, named = choice.transitions, _names(b, r, choice, keys, D, call, sequences)
    count = r.N - (call is not None and sequences is None)
    if isinstance(config, TransitionsHopperConfig):
        own = {"values": token_tile(v, CHUNK, r.V, swizzled=True), "s_vh": v.stride(2)}
        grid = (r.K // config.rows, count * r.HV)
        b.pick(transitions_hopper, grid, config.num_warps, named | own, maxnreg=config.registers)
        return named
    rows = named["VP"] + named["KP"]
    named["transitions"] = _new(b, call)("transitions", (count, r.HV, rows, named["KP"]), torch.float32)
    own = row_strides(v=v)[1] | {"v": v}
    b.pick(transitions_kernel, (rows // config.block_v, count * r.HV), config.num_warps, named | own)
    return named


def add_reverse_transitions(
    b: Builder, r: Request, choice: Choice, do: View, keys: View, P: View, D: View, call: Request | None = None,
    sequences: View | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The same for gradients of states, from ``do``, and from the gradient of the final state of ``call``.

    Returns:
        arguments of the launch, with "additions", and for Hopper "matrices".
    """
    config = choice.transitions
    named = _names(b, r, choice, keys, D, call, sequences) | {"o_scale": split_scale(r.scale, r.q.dtype)[1]}
    count = r.N - (call is not None)
    if isinstance(config, TransitionsHopperConfig):
        if call is not None:
            named["T"] = r.T * (r.N if r.cu_seqlens is None else 1)
        own = {
            "pairs": matrix_tile(keys, 2 * CHUNK, r.K, swizzled=True), "s_oh": do.stride(2),
            "P": matrix_tile(P, CHUNK, CHUNK, swizzled=True), "STAGES": config.reverse_stages,
            "gradients": token_tile(do, CHUNK, r.V, swizzled=True),
        }  # fmt: skip
        grid = (r.K // config.rows, count * r.HV)
        b.pick(reverse_transitions_hopper, grid, config.num_warps, named | own, maxnreg=config.reverse_registers)
        return named
    named["additions"] = _new(b, call)("additions of segments", (count, r.HV, named["VP"], named["KP"]), torch.float32)
    own = row_strides(o=do)[1] | {"P": P, "do": do}
    b.pick(reverse_transitions_kernel, (named["VP"] // config.block_v, count * r.HV), config.num_warps, named | own)
    return named


def add_starts(
    b: Builder, r: Request, choice: Choice, v: View, keys: View, D: View, call: Request, states: View | None = None,
    sequences: View | None = None,
) -> tuple[View, View | None]:  # fmt: skip
    """Compute the state at the start of every segment; arguments as of ``add_transitions``.

    Args:
        states: [count, HV, V, K] in float32, to be written; scratch when left out.

    Returns:
        the states, and the transitions where ``add_ends`` needs them: [count - 1, HV, VP + KP, KP] in float32.
    """
    if states is None:
        states = b.scratch("states at starts", (r.N, r.HV, r.V, r.K), torch.float32)
    named = add_transitions(b, r, choice, v, keys, D, call, sequences)
    if isinstance(choice.transitions, TransitionsHopperConfig):
        _add_join_hopper(b, r, choice.transitions, named, call, call.initial_state, states)
        return states, None
    _add_join(b, named, call.initial_state, named["transitions"], None, states)
    return states, named["transitions"]


def _add_join_hopper(
    b: Builder, r: Request, config: TransitionsHopperConfig, named: dict[str, Any], call: Request, given: View | None,
    states: View, reverse: bool = False,
) -> None:  # fmt: skip
    own = {n: names(call)[n] for n in ("indices", "s_index", "has_state", "s_has")}
    own |= named_state_strides("g", given, call.state_v_first) | {
        "matrices": matrix_tile(named["matrices"], r.K, r.K, swizzled=True), "given": given, "states": states,
        "BV": config.join_block, "PARTS": r.K // config.rows, "REVERSE": reverse, "STAGES": config.join_stages,
        "MOST": max(32, padded(r.N - 1 if named["sequences"] is None else most_of_several(r.HV))),
    }  # fmt: skip
    b.pick(join_hopper, (r.V // config.join_block, r.HV, r.N), 8, named | own)


def add_ends(
    b: Builder, r: Request, choice: Choice, do: View, prepared: tuple[View, View, View], transitions: View | None,
    call: Request, sequences: View | None = None,
) -> View:  # fmt: skip
    """Compute the gradient of the state at the end of every segment, [count, HV, V, K] in float32.

    Args:
        do: as of ``r``, last dimension contiguous; for Hopper with rows that bulk copies take.
        prepared: keys, P and D, as ``prepare`` wrote them for ``r``.
        transitions: from ``add_starts``.
        call: the call itself, with the gradient of its final state, contiguous.
        sequences: from ``cut_several``, else None.
    """
    states = b.scratch("gradients at ends", (r.N, r.HV, r.V, r.K), torch.float32)
    named = add_reverse_transitions(b, r, choice, do, *prepared, call, sequences)
    if isinstance(choice.transitions, TransitionsHopperConfig):
        _add_join_hopper(b, r, choice.transitions, named, call, call.grad_final_state, states, reverse=True)
        return states
    _add_join(b, named, call.grad_final_state, transitions, named["additions"], states)
    b.free(named["additions"])
    return states


def _add_join(
    b: Builder, named: dict[str, Any], given: View | None, transitions: View, additions: View | None, states: View
) -> None:
    own = {"given": given, "transitions": transitions, "additions": additions, "states": states}
    own |= {"BV": JOIN_ROWS, "BK": min(32, named["KP"]), "REVERSE": additions is not None}
    named = named | own | {"PRECISION": JOIN_PRECISION}
    b.pick(join_kernel, (named["VP"] // JOIN_ROWS, named["HV"]), 4, named)

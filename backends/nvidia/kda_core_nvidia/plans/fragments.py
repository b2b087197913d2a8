"""The halves of a forward and of a backward, for fragments of sequences that several devices share.

A forward is prepare, transitions of segments, a chain that joins them, recurrence. Fragments are sequences, cut into
segments (``choose.fragments``). The first half ends with the matrix and the addition of each fragment. The second
begins with the states at the fragments' starts, runs the chain again from them, for the state at the start of each
segment, and the recurrence. A backward does the same from the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import row_strides
from kda_core.triton_lib.fragments import write_bounds
from kda_core.triton_lib.frame import names, readable
from kda_core.triton_lib.layout import CHUNK, padded
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.plan import Builder, Plan, View, input_layouts, matrix_tile, token_tile
from kda_core_nvidia.choose import BackwardChoice, ForwardChoice
from kda_core_nvidia.choose.chunk import TransitionsHopperConfig, in_parts, split_scale
from kda_core_nvidia.choose.fragments import CHAIN_COLUMNS, CHAIN_WARPS, as_fragments
from kda_core_nvidia.plans.forward import Prepared, add_prepare, add_recurrence
from kda_core_nvidia.plans.prepare_hopper import aligned, one_token_axis
from kda_core_nvidia.reverse_transitions_hopper import reverse_transitions_hopper
from kda_core_nvidia.segments import chain_kernel, reverse_transitions_kernel, transitions_kernel
from kda_core_nvidia.transitions_hopper import transitions_hopper

Choice = ForwardChoice | BackwardChoice


def cut_fragments(b: Builder, r: Request, rows: int) -> Request:
    """``as_fragments``, with boundaries that the plan writes where it has them."""
    return write_bounds(b, r, as_fragments(r, rows), rows)


def like_segments(x: View, cut: Request) -> View:
    """``x`` [B, T, ..] of the call as the segments see it."""
    return in_parts(x, cut.N) if cut.B != x.shape[0] else x


def _names(r: Request) -> dict[str, Any]:
    shared = {"T": r.T, "count": r.N, "LIFT": lift(r.q.dtype, r.use_qk_l2norm_in_kernel), "PRECISION": "tf32"}
    return names(r) | shared | {"EVERY": True, "spare": 0, "initial_state": None, "grad_final_state": None}


def _hopper(b: Builder, r: Request, config: TransitionsHopperConfig, keys: View, D: View) -> dict[str, Any]:
    lead = (r.N, r.HV)
    return {
        "single": matrix_tile(keys, CHUNK, r.K, swizzled=True), "decays": matrix_tile(D, 1, r.K, by_rows=True),
        "BR": config.rows, "UNROLL": config.unroll, "forgotten": None,
        "matrices": b.result("matrices of segments", (*lead, 2, r.K, r.K), torch.bfloat16),
        "additions": b.result("additions of segments", (*lead, r.K, r.V), torch.float32),
    }  # fmt: skip


def add_transitions(b: Builder, r: Request, choice: Choice, keys: View, D: View) -> tuple[View, ...]:
    """Add the transitions of segments: matrices and additions by ``transitions_hopper``, or both in one tensor.

    Args:
        r: the call in segments, v as kernels take it.
    """
    config, named, programs = choice.transitions, _names(r), r.N * r.HV
    if isinstance(config, TransitionsHopperConfig):
        named |= _hopper(b, r, config, keys, D) | {"STAGES": config.stages, "s_vh": r.v.stride(2)}
        named["values"] = token_tile(r.v, CHUNK, r.V, swizzled=True)
        grid = (r.K // config.rows, programs)
        b.pick(transitions_hopper, grid, config.num_warps, named, maxnreg=config.registers)
        return named["matrices"], named["additions"]
    KP, VP = padded(r.K), padded(r.V)
    transitions = b.result("transitions", (r.N, r.HV, VP + KP, KP), torch.float32)
    named |= {"BV": config.block_v, "STAGES": config.stages, "keys": keys, "D": D, "transitions": transitions}
    named |= row_strides(v=r.v)[1]
    b.pick(transitions_kernel, ((VP + KP) // config.block_v, programs), config.num_warps, named)
    return (transitions,)


def add_reverse_transitions(b: Builder, r: Request, choice: Choice, keys: View, P: View, D: View) -> tuple[View, ...]:
    """The same for gradients of states, from ``r.grad_o``."""
    config, named, do, programs = choice.transitions, _names(r), r.grad_o, r.N * r.HV
    named["o_scale"] = split_scale(r.scale, r.q.dtype)[1]
    if isinstance(config, TransitionsHopperConfig):
        named |= _hopper(b, r, config, keys, D) | {
            "STAGES": config.reverse_stages, "pairs": matrix_tile(keys, 2 * CHUNK, r.K, swizzled=True),
            "P": matrix_tile(P, CHUNK, CHUNK, swizzled=True), "s_oh": do.stride(2),
            "gradients": token_tile(do, CHUNK, r.V, swizzled=True),
        }  # fmt: skip
        grid = (r.K // config.rows, programs)
        b.pick(reverse_transitions_hopper, grid, config.num_warps, named, maxnreg=config.reverse_registers)
        return named["matrices"], named["additions"]
    KP, VP = padded(r.K), padded(r.V)
    (transitions,) = add_transitions(b, r, choice, keys, D)
    additions = b.result("additions of segments", (r.N, r.HV, VP, KP), torch.float32)
    named |= {"BV": config.block_v, "STAGES": config.stages, "keys": keys, "P": P, "D": D, "do": do}
    named |= row_strides(o=do)[1] | {"additions": additions}
    b.pick(reverse_transitions_kernel, (VP // config.block_v, programs), config.num_warps, named)
    return transitions, additions


def add_chain(
    b: Builder, r: Request, cut: Request, choice: Choice, segments: tuple[View, ...], reverse: bool = False,
    given: View | None = None, states: View | None = None, ends: View | None = None, summary: View | None = None,
    sums: View | None = None,
) -> None:  # fmt: skip
    """Add a launch of ``chain_kernel``.

    Args:
        r: the call; ``cut``: the call in segments.
        segments: from ``add_transitions`` or ``add_reverse_transitions``.
    """
    K, V, KP, VP = r.K, r.V, padded(r.K), padded(r.V)
    if isinstance(choice.transitions, TransitionsHopperConfig):
        matrices, additions = segments
        strides = (2 * K * K, 1, K, K * K, K * V, V, 1)
    else:
        matrices = segments[0].cut(2, slice(VP, VP + KP))
        additions, step = segments[-1], (VP + KP) * KP
        own = (1, KP) if reverse else (KP, 1)
        strides = (step, *own, 0, VP * KP if reverse else step, 1, KP)
    named = names(r) | dict(zip(("s_m", "s_mi", "s_mo", "s_part", "s_a", "s_ak", "s_av"), strides, strict=True)) | {
        "matrices": matrices, "additions": additions, "given": given, "states": states, "ends": ends,
        "summary": summary, "sums": sums, "REVERSE": reverse, "PRECISION": choice.join_precision, "STAGES": 1,
        # Where fragments are not cut, each is one segment, of more rows than there are.
        "rows": choice.segment_rows or r.T + 1, "per": cut.N // r.N if r.N else 0, "BV": CHAIN_COLUMNS,
    }  # fmt: skip
    columns = VP if summary is None else KP + VP
    b.pick(chain_kernel, (columns // CHAIN_COLUMNS, r.HV, r.N), CHAIN_WARPS, named)


def plan_begin(request: Request, choice: ForwardChoice) -> Plan:
    """The first half of a forward; results: matrices, additions, then what the second half is given.

    That is o, of which rows behind the last fragment are written, everything that ``prepare`` wrote, and the segments'
    own transitions.
    """
    b = Builder()
    r = readable(b, request)
    cut = cut_fragments(b, r, choice.segment_rows)
    o = b.result("o", (r.B, r.T, r.HV, r.V), r.q.dtype)
    everything = r.save_for_backward and r.disable_recompute
    keep = choice.saved_slots if r.save_for_backward and not everything else 0
    how = choice.prepare, choice.precision, choice.bounded
    prepared = add_prepare(b, cut, *how, like_segments(o, cut), everything, keep, new=b.result)
    segments = add_transitions(b, replace(cut, v=_rows(b, cut.v, choice)), choice, prepared.keys, prepared.D)
    lead = (r.N, r.HV, r.K)
    summary = b.result("matrices", (*lead, r.K), torch.float32)
    sums = b.result("additions", (*lead, r.V), torch.float32)
    add_chain(b, r, cut, choice, segments, summary=summary, sums=sums)
    results = {"matrices": summary, "additions": sums, "o": o, **prepared._asdict()}
    return b.plan(input_layouts(request), results | {f"segments {i}": x for i, x in enumerate(segments)})


def plan_finish(request: Request, choice: ForwardChoice) -> Plan:
    """The second half; ``request.saved`` holds what the first half kept, and the states at the fragments' starts.

    Results are those of ``plan_forward``.
    """
    b = Builder()
    r = readable(b, request)
    o, keys, P, D, *rest, starts = r.saved
    X = rest.pop(0) if r.save_for_backward else None
    norms = rest.pop(0) if r.save_for_backward and r.use_qk_l2norm_in_kernel else None
    cut = cut_fragments(b, r, choice.segment_rows)
    make = b.result if r.save_for_backward else b.scratch
    states = make("states at starts", (cut.N, r.HV, r.V, r.K), torch.float32)
    final_state = b.result("final_state", r.state_shape, r.state_dtype) if r.output_final_state else None
    add_chain(b, r, cut, choice, tuple(rest), given=starts, states=states, ends=final_state)
    cut = replace(cut, v=_rows(b, cut.v, choice), initial_state=states)
    add_recurrence(b, cut, choice, Prepared(keys, P, D), like_segments(o, cut), None, None)
    results = {"o": o, "final_state": final_state, "h": None}
    if r.save_for_backward:
        kept = {"P": P, "X": X, "norms": norms, "starts": states}
        results |= {"keys": keys, "P": P, "D": D, **kept} if r.disable_recompute else kept
    return b.plan(input_layouts(request), results)


def _rows(b: Builder, x: View, choice: Choice) -> View:
    """v or do as the transitions take it."""
    return aligned(b, x) if isinstance(choice.transitions, TransitionsHopperConfig) else one_token_axis(b, x)

"""Forward of ``chunk_kda``: two launches, ``prepare`` (chunk-parallel) and ``recurrence`` (sequential).

One long sequence with few heads is cut (``segments``), which takes two more between them.

``kda_core.triton_lib.layout`` has the layout of what passes between them, and the equations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kda_core.request import ForwardResult, Request
from kda_core.triton_lib.arguments import (
    batch_strides,
    contiguous,
    decays_bounded,
    gate_kind,
    has_contiguous_rows,
    rows_contiguous,
    state_strides,
)
from kda_core.triton_lib.layout import CHUNK, intermediate_states_shape, padded, slots
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.segments import as_packed
from kda_core_amd import launch
from kda_core_amd.choose import config, dot_widths, segment_rows
from kda_core_amd.prepare import prepare
from kda_core_amd.recurrence import recurrence
from kda_core_amd.segments import starts


class Prepared(NamedTuple):
    """What ``prepare`` wrote; shapes in ``triton_lib.layout``."""

    keys: Tensor
    P: Tensor
    D: Tensor
    X: Tensor | None = None


def run_prepare(request: Request, o: Tensor, for_backward: bool = False) -> Prepared:
    """Launch ``prepare``.

    Args:
        request: the call.
        o: [B, T, HV, V], zeroed in the rows that no recurrence writes.
        for_backward: also return X.
    """
    q, k, g = rows_contiguous(request.q), rows_contiguous(request.k), rows_contiguous(request.g)
    beta, indices = request.beta, request.ssm_state_indices
    T, K, HV = request.T, request.K, request.HV
    KP, count = padded(K), slots(request)
    keys = q.new_empty((count, HV, 3, CHUNK, KP))
    P = q.new_empty((count, HV, CHUNK, CHUNK))
    D = q.new_empty((count, HV, KP), dtype=torch.float32)
    X = torch.empty_like(P) if for_backward else None
    gate = gate_kind(request)
    target = launch.architecture(request.device)
    terms, dot, small_dot = dot_widths(q.dtype, target)
    chosen = config("prepare", target, q.dtype, KP)
    unit, (s_qb, s_kb, s_gb, s_bb, s_ob) = batch_strides(q, k, g, beta, o)
    arguments = (
        q, k, g, beta, contiguous(request.A_log) if gate != "none" else None,
        contiguous(request.dt_bias) if gate != "none" else None, keys, P, D, X, o, contiguous(request.cu_seqlens),
        indices, float(request.scale), 0.0 if request.lower_bound is None else float(request.lower_bound), T, request.N,
        -(-T // CHUNK), HV, HV // request.H,
        s_qb, *q.stride()[1:3], s_kb, *k.stride()[1:3], s_gb, *g.stride()[1:3], s_bb, *beta.stride()[1:3],
        s_ob, *o.stride()[1:3], 0 if indices is None else indices.stride(0), request.pad_slot_id,
    )  # fmt: skip
    constants = {
        "K": K, "V": request.V, "KP": KP, "BK": min(chosen.block, KP), "C": CHUNK,
        "LIFT": lift(request.q.dtype, request.use_qk_l2norm_in_kernel, request.scale), "UNIT": unit, "GATE": gate,
        "BOUNDED": decays_bounded(request), "L2NORM": request.use_qk_l2norm_in_kernel,
        "SIGMOID": request.use_beta_sigmoid_in_kernel, "NEG_EIGVAL": request.allow_neg_eigval,
        "FEW_REGISTERS": target.wave == 32, "LEVEL_LOOP": chosen.level_loop, "TERMS": terms, "DOT": dot,
        "SMALL_DOT": small_dot,
    }  # fmt: skip
    launch.launch(prepare, count * HV, arguments, constants, chosen, target)
    return Prepared(keys, P, D, X)


def run_recurrence(
    request: Request, prepared: Prepared, o: Tensor, final_state: Tensor | None, h: Tensor | None
) -> None:
    """Launch ``recurrence``, which writes ``o``, ``final_state`` and ``h``."""
    v = rows_contiguous(request.v)
    K, V, HV, sequences = request.K, request.V, request.HV, request.N
    KP = padded(K)
    initial_state, indices = request.initial_state, request.ssm_state_indices
    target = launch.architecture(request.device)
    chosen = config("recurrence", target, v.dtype, KP)
    block_v = min(chosen.block, padded(V))
    unit, (s_vb, s_ob) = batch_strides(v, o)
    arguments = (
        prepared.keys, prepared.P, prepared.D, v, o, initial_state, final_state, h, contiguous(request.cu_seqlens),
        indices, request.T, -(-request.T // CHUNK), HV, sequences * HV,
        s_vb, *v.stride()[1:3], s_ob, *o.stride()[1:3], *state_strides(initial_state, request.state_v_first),
        *state_strides(final_state, request.state_v_first), 0 if indices is None else indices.stride(0),
        request.pad_slot_id,
    )  # fmt: skip
    constants = {
        "K": K, "V": V, "KP": KP, "BV": block_v, "BK": min(chosen.keys or KP, KP), "C": CHUNK,
        "LIFT": lift(request.q.dtype, request.use_qk_l2norm_in_kernel, request.scale), "UNIT": unit,
        "V_FIRST": request.state_v_first, "H_EVERY": request.chunk_size // CHUNK, "STAGES": chosen.stages,
        "DOT": dot_widths(v.dtype, target)[1],
    }  # fmt: skip
    launch.launch(recurrence, sequences * HV * -(-V // block_v), arguments, constants, chosen, target)


def output_buffers(request: Request) -> tuple[Tensor, Tensor | None]:
    """``o`` as the kernels can write it (``finished`` puts it where the caller wants it) and the final state."""
    q, o = request.q, request.out
    if o is None or not has_contiguous_rows(o):
        o = q.new_empty((request.B, request.T, request.HV, request.V))
    final_state = None
    if request.inplace_final_state:
        final_state = request.initial_state
    elif request.output_final_state:
        final_state = q.new_empty(request.state_shape, dtype=request.state_dtype)
    return o, final_state


def finished(request: Request, o: Tensor, final_state: Tensor | None, h: Tensor | None = None) -> ForwardResult:
    """The result, with ``o`` in the caller's buffer if there is one; a pool is not a result."""
    if request.out is not None and o is not request.out:
        o = request.out.copy_(o)
    return ForwardResult(o=o, final_state=None if request.inplace_final_state else final_state, h=h)


def _run_segments(request: Request, rows: int, o: Tensor, final_state: Tensor | None) -> None:
    """Run all kernels with the sequence cut into segments of ``rows`` rows; they write ``o`` and ``final_state``."""
    packed = as_packed(request, rows, v_first=False)
    prepared = run_prepare(packed, o)
    first, _ = starts(packed, rows, prepared.keys, prepared.D, request.initial_state, request.state_v_first)
    last = None if final_state is None else torch.empty_like(first)
    run_recurrence(replace(packed, initial_state=first), prepared, o, last, None)
    if final_state is not None:
        final_state.copy_(last[-1:].transpose(-1, -2) if request.state_v_first else last[-1:])


def chunk_forward(request: Request, rows: int | None = None) -> ForwardResult:
    """Run ``chunk_kda`` for a call that the plugin accepted.

    Args:
        rows: of a segment, 0 for none; ``segment_rows`` decides when it is None.
    """
    with launch.on_device(request.device):
        o, final_state = output_buffers(request)
        h = None
        if request.return_intermediate_states:
            # Sequences of a pool that are skipped write no state.
            new = request.q.new_empty if request.ssm_state_indices is None else request.q.new_zeros
            h = new(intermediate_states_shape(request), dtype=request.state_dtype)
        if rows is None:
            rows = segment_rows(request, launch.architecture(request.device), launch.compute_units(request.device))
        if rows:
            _run_segments(request, rows, o, final_state)
        else:
            run_recurrence(request, run_prepare(request, o), o, final_state, h)
        return finished(request, o, final_state, h)

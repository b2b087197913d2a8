"""Forward of ``chunk_kda``: two launches, ``prepare`` (chunk-parallel) and ``recurrence`` (sequential).

``kda_core.triton_lib.layout`` has the layout of what passes between them, and the equations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.request import ForwardResult, Request, TensorSpec
from kda_core.triton_lib.arguments import (
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
from kda_core_nvidia.hopper import HopperConfig, blocks, hopper_config, serves, token_blocks
from kda_core_nvidia.launch import (
    Chip,
    Launcher,
    chip,
    dot_widths,
    on_device,
    prepare_config,
    recurrence_config,
    row_blocks,
    split_scale,
)
from kda_core_nvidia.plan import new_result, new_scratch, planned
from kda_core_nvidia.prepare import prepare
from kda_core_nvidia.recurrence import recurrence
from kda_core_nvidia.recurrence_hopper import recurrence_hopper
from kda_core_nvidia.segments import LEAST_ROWS, segment_rows, starts

_prepare = Launcher(prepare)
_recurrence = Launcher(recurrence)
_recurrence_hopper = Launcher(recurrence_hopper)


class Prepared(NamedTuple):
    """What ``prepare`` wrote; shapes in ``triton_lib.layout``. X and norms only for a backward."""

    keys: Tensor
    P: Tensor
    D: Tensor
    X: Tensor | None = None
    norms: Tensor | None = None


class Kept(NamedTuple):
    """What a forward keeps of that for its backward without ``disable_recompute``; ``inverse``: X in float32."""

    P: Tensor
    inverse: Tensor
    norms: Tensor | None = None


def _rows(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """``rows_contiguous(x)`` and its strides: asking for one at a time costs a call more than the kernel's launch."""
    strides = x.stride()
    if strides[-1] == 1 or x.shape[-1] == 1:
        return x, strides
    x = x.contiguous()
    return x, x.stride()


def _prepared_shapes(count: int, HV: int, KP: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of what ``prepare`` writes for so many slots, in the order of ``Prepared``."""
    square = (count, HV, CHUNK, CHUNK)
    return (count, HV, 3, CHUNK, KP), square, (count, HV, KP), square, (count, HV, 2, CHUNK)


def saved_specs(request: Request) -> tuple[TensorSpec, ...]:
    """Shapes and dtypes of what a forward keeps for its backward.

    With ``disable_recompute``: everything that ``prepare`` wrote, in the order of ``Prepared``. Without: P, the inverse
    in float32 and the norms, from which a second ``prepare`` need not multiply pairs nor invert.
    """
    everything = request.disable_recompute
    rows = slots(request) if everything else _kept_slots(request)
    keys, square, decay, _, norms = _prepared_shapes(rows, request.HV, padded(request.K))
    dtype = request.q.dtype
    specs = [TensorSpec(square, dtype), TensorSpec(square, torch.float32)]
    if everything:
        specs = [TensorSpec(keys, dtype), specs[0], TensorSpec(decay, torch.float32), TensorSpec(square, dtype)]
    if request.use_qk_l2norm_in_kernel:
        specs.append(TensorSpec(norms, torch.float32))
    return tuple(specs)


def _kept_slots(request: Request) -> int:
    """Slots of what is kept without ``disable_recompute``: a bound that a call cut into segments keeps to as well.

    Whether it is cut depends on the device; shapes must not. One at least: none would say that nothing is kept.
    """
    if request.B == 1 and request.cu_seqlens is None:
        return request.T // CHUNK + request.T // LEAST_ROWS + 2
    return max(1, slots(request))


@cache
def _prepare_constants(
    again: bool,
    dtype: torch.dtype,
    K: int,
    V: int,
    unit: int,
    gate: str,
    bounded: bool,
    l2norm: bool,
    sigmoid: bool,
    neg_eigval: bool,
) -> tuple[dict[str, Any], int]:
    """The kernel's constants, and its warps."""
    config = prepare_config(K, dtype, again)
    terms, dot, small_dot = dot_widths(dtype)
    constants = {
        "K": K,
        "V": V,
        "KP": padded(K),
        "BK": config.block_k,
        "BW": config.wide,
        "C": CHUNK,
        "LIFT": lift(dtype, l2norm),
        "STAGES": config.stages,
        "WIDE_STAGES": config.wide_stages,
        "UNIT": unit,
        "GATE": gate,
        "BOUNDED": bounded,
        "L2NORM": l2norm,
        "SIGMOID": sigmoid,
        "NEG_EIGVAL": neg_eigval,
        "TERMS": terms,
        "DOT": dot,
        "SMALL_DOT": small_dot,
    }
    return constants, config.num_warps


def run_prepare(
    request: Request,
    o: Tensor,
    backward: bool = False,
    keep: int = 0,
    kept: Kept | None = None,
    new: Callable[..., Tensor] = new_scratch,
) -> Prepared:
    """Launch ``prepare``.

    Args:
        request: the call.
        o: [B, T, HV, V], to be zeroed where no sequence (or a skipped one) has rows.
        backward: also return what only the backward needs.
        keep: the same, but X in float32, and P, X and norms with room for so many slots: what can be ``kept``.
        kept: what an earlier run kept; for a backward.
        new: allocates all that is not kept.
    """
    q, (s_qb, s_qt, s_qh, _) = _rows(request.q)
    k, (s_kb, s_kt, s_kh, _) = _rows(request.k)
    g, (s_gb, s_gt, s_gh, _) = _rows(request.g)
    beta = request.beta
    s_bb, s_bt, s_bh = beta.stride()
    s_ob, s_ot, s_oh, _ = o.stride()
    B, T, H, K = q.shape
    HV, V = o.shape[2:]
    if B <= 1:
        # No batch stride is used. 8: each is a multiple of 8 elements, so that alignment shows in the kernel.
        unit = 8
        s_qb = s_kb = s_gb = s_bb = s_ob = 0
    else:
        unit = 1 if (s_qb | s_kb | s_gb | s_bb | s_ob) % 8 else 8
        s_qb, s_kb, s_gb, s_bb, s_ob = s_qb // unit, s_kb // unit, s_gb // unit, s_bb // unit, s_ob // unit
    dtype, l2norm, gate = q.dtype, request.use_qk_l2norm_in_kernel, gate_kind(request)
    constants, num_warps = _prepare_constants(
        kept is not None,
        dtype,
        K,
        V,
        unit,
        gate,
        decays_bounded(request),
        l2norm,
        request.use_beta_sigmoid_in_kernel,
        request.allow_neg_eigval,
    )
    count = slots(request)
    shapes = _prepared_shapes(count, HV, constants["KP"])
    keys, D = new(q, shapes[0]), new(q, shapes[2], torch.float32)
    inverse = None
    if kept is not None:
        P, inverse, norms = kept
        exact = dtype == torch.float32
        X = None if exact else new(q, shapes[3])
        written = (keys, None, D, X, norms)
        prepared = Prepared(keys, P, D, inverse if exact else X, norms)
    else:
        if keep:
            shapes, new = _prepared_shapes(keep, HV, constants["KP"]), new_result
        P, X, norms = new(q, shapes[1]), None, None
        if backward or keep:
            X = new(q, shapes[3], torch.float32 if keep else dtype)
            norms = new(q, shapes[4], torch.float32) if l2norm else None
        written = prepared = Prepared(keys, P, D, X, norms)
    indices, bound = request.ssm_state_indices, request.lower_bound
    arguments = (
        q,
        k,
        g,
        beta,
        contiguous(request.A_log) if gate != "none" else None,
        contiguous(request.dt_bias) if gate != "none" else None,
        *written,
        inverse,
        o,
        contiguous(request.cu_seqlens),
        indices,
        split_scale(request.scale, dtype)[0],
        0.0 if bound is None else float(bound),
        T,
        request.N,
        -(-T // CHUNK),
        HV,
        HV // H,
        s_qb,
        s_qt,
        s_qh,
        s_kb,
        s_kt,
        s_kh,
        s_gb,
        s_gt,
        s_gh,
        s_bb,
        s_bt,
        s_bh,
        s_ob,
        s_ot,
        s_oh,
        0 if indices is None else indices.stride(0),
        request.pad_slot_id,
    )
    _prepare((count * HV, 1, 1), arguments, constants, num_warps)
    return prepared


@cache
def _shared_constants(K: int, V: int, lifted: float, unit: int, v_first: bool, last_contiguous: bool) -> dict[str, Any]:
    """Constants of both recurrences."""
    return {
        "K": K,
        "V": V,
        "KP": padded(K),
        "C": CHUNK,
        "LIFT": lifted,
        "UNIT": unit,
        "V_FIRST": v_first,
        "LAST_CONTIGUOUS": last_contiguous,
    }


@cache
def _recurrence_constants(
    target: Chip, dtype: torch.dtype, sequences_heads: int, h: bool, chunk_size: int, descriptors: bool, *shared: Any
) -> tuple[dict[str, Any], int]:
    """The plain recurrence's constants, and its warps; ``shared``: as for ``_shared_constants``."""
    constants = _shared_constants(*shared)
    config = recurrence_config(target, dtype, constants["K"], constants["V"], sequences_heads, h)
    own = {
        "BV": config.block_v,
        "H_EVERY": chunk_size // CHUNK,
        "DESCRIPTORS": descriptors,
        "STAGES": config.stages,
        "DOT": dot_widths(dtype)[1],
    }
    return constants | own, config.num_warps


@cache
def _hopper_constants(target: Chip, sequences_heads: int, *shared: Any) -> tuple[dict[str, Any], HopperConfig]:
    """The same of the recurrence for Hopper, and its configuration."""
    constants = _shared_constants(*shared)
    config = hopper_config("recurrence", target, constants["KP"], constants["V"], sequences_heads)
    return constants | config.constants, config


def run_recurrence(
    request: Request, prepared: Prepared, o: Tensor, final_state: Tensor | None, h: Tensor | None
) -> None:
    """Launch ``recurrence``, which writes ``o``, ``final_state`` and ``h``."""
    v, (s_vb, s_vt, s_vh, _) = _rows(request.v)
    s_ob, s_ot, s_oh, _ = o.stride()
    B, T, HV, V = v.shape
    N, K, v_first = request.N, request.K, request.state_v_first
    initial_state, indices = request.initial_state, request.ssm_state_indices
    if B <= 1:
        unit, s_vb, s_ob = 8, 0, 0
    else:
        unit = 1 if (s_vb | s_ob) % 8 else 8
        s_vb, s_ob = s_vb // unit, s_ob // unit
    target = chip(v.device)
    keys, P, D = prepared[:3]
    KP = D.shape[-1]
    initial, final = state_strides(initial_state, v_first), state_strides(final_state, v_first)
    last = 2 if v_first else 3
    last_contiguous = (initial_state is None or initial[last] == 1) and (final_state is None or final[last] == 1)
    shared = (K, V, lift(v.dtype, request.use_qk_l2norm_in_kernel), unit, v_first, last_contiguous)
    cu_seqlens = contiguous(request.cu_seqlens)
    numbers = (
        T,
        -(-T // CHUNK),
        HV,
        s_vb,
        s_vt,
        s_vh,
        s_ob,
        s_ot,
        s_oh,
        *initial,
        *final,
        0 if indices is None else indices.stride(0),
        request.pad_slot_id,
        split_scale(request.scale, v.dtype)[1],
    )
    if h is None and serves(target, keys, V, v):
        constants, hopper = _hopper_constants(target, N * HV, *shared)
        arguments = (
            blocks(keys, 2 * CHUNK, KP),
            blocks(keys, CHUNK, KP),
            blocks(P, CHUNK, CHUNK),
            blocks(D, 1, KP),
            token_blocks(v, CHUNK, hopper.block_v),
            *(v, o, initial_state, final_state, cu_seqlens, indices),
            *numbers,
        )
        grid = (N * HV, V // hopper.block_v, 1)
        _recurrence_hopper(grid, arguments, constants, hopper.num_warps)
        return
    rows = keys.numel() // KP
    descriptors = target.descriptors and 0 < rows < 2**31
    if descriptors:
        keys, P = row_blocks(keys, KP, CHUNK), row_blocks(P, CHUNK, CHUNK)
    constants, num_warps = _recurrence_constants(
        target, v.dtype, N * HV, h is not None, request.chunk_size, descriptors, *shared
    )
    arguments = (keys, P, D, v, o, initial_state, final_state, h, cu_seqlens, indices, *numbers)
    _recurrence((N * HV, -(-V // constants["BV"]), 1), arguments, constants, num_warps)


def _run_segments(request: Request, rows: int, o: Tensor, final_state: Tensor | None, keep: int) -> Prepared:
    """Run both kernels with the sequence cut into segments of ``rows`` rows; they write ``o`` and ``final_state``."""
    packed = as_packed(request, rows, v_first=True)
    prepared = run_prepare(packed, o, keep=keep)
    given = contiguous(request.initial_state)
    v = rows_contiguous(request.v)
    first, _ = starts(packed, chip(request.device), v, prepared.keys, prepared.D, given, request.state_v_first)
    last = None if final_state is None else torch.empty_like(first)
    run_recurrence(replace(packed, initial_state=first), prepared, o, last, None)
    if final_state is not None:
        final_state.copy_(last[-1:] if request.state_v_first else last[-1:].transpose(-1, -2))
    return prepared


_INPUTS = attrgetter(
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "ssm_state_indices", "out")
)


def _forward(request: Request) -> dict[str, Tensor | None]:
    """Launch; the result's tensors by name, and what of ``Prepared`` is to be kept."""
    q, o = request.q, request.out
    if o is None or not has_contiguous_rows(o):
        o = new_result(q, (request.B, request.T, request.HV, request.V))
    final_state = None
    if request.inplace_final_state:
        final_state = request.initial_state
    elif request.output_final_state:
        final_state = new_result(q, request.state_shape, request.state_dtype)
    h = None
    if request.return_intermediate_states:
        # Sequences of a pool that are skipped write no state.
        zeros = request.ssm_state_indices is not None
        h = new_result(q, intermediate_states_shape(request), request.state_dtype, zeros)
    training, everything = request.save_for_backward, request.disable_recompute
    keep = _kept_slots(request) if training and not everything else 0
    rows = segment_rows(request, chip(q.device))
    if rows:
        prepared = _run_segments(request, rows, o, final_state, keep)
    else:
        everything = everything and training
        prepared = run_prepare(request, o, everything, keep, new=new_result if everything else new_scratch)
        run_recurrence(request, prepared, o, final_state, h)
    made = {"o": o, "final_state": final_state, "h": h}
    if training:
        kept = prepared._asdict() if everything else {"P": prepared.P, "X": prepared.X, "norms": prepared.norms}
        made |= kept
    return made


def chunk_forward(request: Request) -> ForwardResult:
    """Run ``chunk_kda`` for a call that the plugin accepted."""
    with on_device(request.q.device):
        if request.return_intermediate_states and request.cu_seqlens is not None:
            # The shape of h follows from values.
            made = _forward(request)
        else:
            made = planned(request, "forward", _INPUTS(request), lambda: _forward(request))
        o, final_state, h, *kept = made.values()
        if request.out is not None and o is not request.out:
            o = request.out.copy_(o)
    saved = tuple(t for t in kept if t is not None)
    return ForwardResult(o=o, final_state=None if request.inplace_final_state else final_state, h=h, saved=saved)

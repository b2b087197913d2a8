"""Forward of ``chunk_kda``: two launches, ``prepare`` (chunk-parallel) and ``recurrence`` (sequential).

The layout of what passes between them, and the equations, are in ``layout``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kda_core.request import ForwardResult, Request, TensorSpec
from kda_core.triton_lib.decay import BOUND
from kda_core_nvidia.hopper import blocks, hopper_config, serves, token_blocks
from kda_core_nvidia.launch import Launcher, chip, dot_widths, on_device, prepare_config, recurrence_config, row_blocks
from kda_core_nvidia.layout import CHUNK, padded, slots
from kda_core_nvidia.prepare import prepare
from kda_core_nvidia.recurrence import recurrence
from kda_core_nvidia.recurrence_hopper import recurrence_hopper
from kda_core_nvidia.segments import as_packed, segment_rows, starts

_NO_STRIDES = (0, 0, 0, 0)

_prepare = Launcher(prepare)
_recurrence = Launcher(recurrence)
_recurrence_hopper = Launcher(recurrence_hopper)


class Prepared(NamedTuple):
    """What ``prepare`` wrote; shapes in ``layout``. X and norms only for a backward."""

    keys: Tensor
    P: Tensor
    D: Tensor
    X: Tensor | None = None
    norms: Tensor | None = None


def rows_contiguous(x: Tensor) -> Tensor:
    """``x``, copied only when its last dimension is not contiguous (the kernels take every other stride)."""
    return x if _writable(x) else x.contiguous()


def _writable(x: Tensor) -> bool:
    """Whether the kernels can write to ``x`` themselves: its last dimension is contiguous."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def _dense(x: Tensor | None) -> Tensor | None:
    """A small tensor of parameters or boundaries, contiguous."""
    return None if x is None else x.contiguous()


def gate_kind(request: Request) -> str:
    """The kernels' name of the gate."""
    if not request.use_gate_in_kernel:
        return "none"
    return "softplus" if request.lower_bound is None else "bounded"


def decays_bounded(request: Request) -> bool:
    """Whether each row's log decay is known, or promised, to be at least −5, in a dtype that can use it.

    Factors of 2^58 do not fit float16, and an exponent of 58 in float32 has lost digits that a float32 result needs.
    """
    if request.q.dtype != torch.bfloat16:
        return False
    if request.lower_bound is not None and request.lower_bound < BOUND.value:
        return False
    return request.safe_gate or gate_kind(request) == "bounded"


def _unit(*tensors: Tensor) -> int:
    """8 when every batch stride is a multiple of 8 elements (so that alignment shows in the kernel), else 1."""
    return 1 if any(x.stride(0) % 8 for x in tensors) else 8


def prepared_specs(request: Request, backward: bool) -> tuple[TensorSpec, ...]:
    """Shapes and dtypes of what ``prepare`` writes, in the order of ``Prepared``."""
    count, HV, KP, dtype = slots(request), request.HV, padded(request.K), request.q.dtype
    square = TensorSpec((count, HV, CHUNK, CHUNK), dtype)
    specs = (TensorSpec((count, HV, 3, CHUNK, KP), dtype), square, TensorSpec((count, HV, KP), torch.float32))
    if backward:
        specs += (square,)
        if request.use_qk_l2norm_in_kernel:
            specs += (TensorSpec((count, HV, 2, CHUNK), torch.float32),)
    return specs


def run_prepare(request: Request, o: Tensor, backward: bool = False) -> Prepared:
    """Launch ``prepare``.

    Args:
        request: the call.
        o: [B, T, HV, V], to be zeroed where no sequence (or a skipped one) has rows.
        backward: also return what only the backward needs.
    """
    q, k, g = rows_contiguous(request.q), rows_contiguous(request.k), rows_contiguous(request.g)
    beta = request.beta
    B, T, H, K, HV, V = request.B, request.T, request.H, request.K, request.HV, request.V
    prepared = Prepared(*(q.new_empty(spec.shape, dtype=spec.dtype) for spec in prepared_specs(request, backward)))
    indices = request.ssm_state_indices
    config = prepare_config(K, q.dtype)
    terms, dot, small_dot = dot_widths(q.dtype)
    gate = gate_kind(request)
    unit = _unit(q, k, g, beta, o) if B > 1 else 8
    s_qb, s_kb, s_gb, s_bb, s_ob = (x.stride(0) // unit if B > 1 else 0 for x in (q, k, g, beta, o))
    arguments = (
        q,
        k,
        g,
        beta,
        _dense(request.A_log) if gate != "none" else None,
        _dense(request.dt_bias) if gate != "none" else None,
        *prepared,
        o,
        _dense(request.cu_seqlens),
        indices,
        float(request.scale),
        0.0 if request.lower_bound is None else float(request.lower_bound),
        T,
        request.N,
        -(-T // CHUNK),
        HV,
        HV // H,
        s_qb,
        q.stride(1),
        q.stride(2),
        s_kb,
        k.stride(1),
        k.stride(2),
        s_gb,
        g.stride(1),
        g.stride(2),
        s_bb,
        beta.stride(1),
        beta.stride(2),
        s_ob,
        o.stride(1),
        o.stride(2),
        0 if indices is None else indices.stride(0),
        request.pad_slot_id,
    )
    constants = {
        "K": K,
        "V": V,
        "KP": padded(K),
        "BK": config.block_k,
        "C": CHUNK,
        "STAGES": config.stages,
        "UNIT": unit,
        "GATE": gate,
        "BOUNDED": decays_bounded(request),
        "L2NORM": request.use_qk_l2norm_in_kernel,
        "SIGMOID": request.use_beta_sigmoid_in_kernel,
        "NEG_EIGVAL": request.allow_neg_eigval,
        "TERMS": terms,
        "DOT": dot,
        "SMALL_DOT": small_dot,
    }
    _prepare((slots(request) * HV, 1, 1), arguments, constants, config.num_warps)
    return prepared


def _state_strides(state: Tensor | None, v_first: bool) -> tuple[int, int, int, int]:
    """Strides of a state by (sequence, head, K, V)."""
    if state is None:
        return _NO_STRIDES
    s_n, s_h, s_row, s_last = state.stride()
    return (s_n, s_h, s_last, s_row) if v_first else (s_n, s_h, s_row, s_last)


def run_recurrence(
    request: Request, prepared: Prepared, o: Tensor, final_state: Tensor | None, h: Tensor | None
) -> None:
    """Launch ``recurrence``, which writes ``o``, ``final_state`` and ``h``."""
    v = rows_contiguous(request.v)
    B, K, HV, V, N = request.B, request.K, request.HV, request.V, request.N
    KP = padded(K)
    initial_state, indices = request.initial_state, request.ssm_state_indices
    target = chip(request.device)
    unit = _unit(v, o) if B > 1 else 8
    s_vb, s_ob = (v.stride(0) // unit, o.stride(0) // unit) if B > 1 else (0, 0)
    keys, P = prepared.keys, prepared.P
    states = [s for s in (initial_state, final_state) if s is not None]
    cu_seqlens = _dense(request.cu_seqlens)
    numbers = (
        request.T,
        -(-request.T // CHUNK),
        HV,
        s_vb,
        v.stride(1),
        v.stride(2),
        s_ob,
        o.stride(1),
        o.stride(2),
        *_state_strides(initial_state, request.state_v_first),
        *_state_strides(final_state, request.state_v_first),
        0 if indices is None else indices.stride(0),
        request.pad_slot_id,
    )
    constants = {
        "K": K,
        "V": V,
        "KP": KP,
        "C": CHUNK,
        "UNIT": unit,
        "V_FIRST": request.state_v_first,
        "LAST_CONTIGUOUS": all(s.stride(-1) == 1 for s in states),
    }
    if h is None and serves(target, keys, v, K, V):
        hopper = hopper_config(target, V, N * HV)
        arguments = (
            blocks(keys, 2 * CHUNK, KP),
            blocks(keys, CHUNK, KP),
            blocks(P, CHUNK, CHUNK),
            blocks(prepared.D, 1, KP),
            token_blocks(v, CHUNK, hopper.block_v),
            *(v, o, initial_state, final_state, cu_seqlens, indices),
            *numbers,
        )
        constants |= {"BV": hopper.block_v, "STAGES": hopper.stages}
        grid = (N * HV, V // hopper.block_v, 1)
        _recurrence_hopper(grid, arguments, constants, hopper.num_warps, maxnreg=hopper.registers)
        return
    config = recurrence_config(target, v.dtype, K, V, N * HV)
    rows = keys.numel() // KP
    descriptors = target.descriptors and 0 < rows < 2**31
    if descriptors:
        keys, P = row_blocks(keys, KP, CHUNK), row_blocks(P, CHUNK, CHUNK)
    arguments = (keys, P, prepared.D, v, o, initial_state, final_state, h, cu_seqlens, indices, *numbers)
    constants |= {
        "BV": config.block_v,
        "H_EVERY": request.chunk_size // CHUNK,
        "DESCRIPTORS": descriptors,
        "STAGES": config.stages,
        "DOT": dot_widths(v.dtype)[1],
    }
    _recurrence((N * HV, -(-V // config.block_v), 1), arguments, constants, config.num_warps)


def _intermediate_states(request: Request) -> Tensor:
    """An empty h. Packed, its length is Σ ceil(len / chunk_size), which the host knows from ``cu_seqlens_cpu``."""
    size = request.chunk_size
    if request.cu_seqlens is None:
        count = -(-request.T // size)
    else:
        # Without the copy on the CPU the core lets only CPU tensors come this far.
        bounds = request.cu_seqlens if request.cu_seqlens_cpu is None else request.cu_seqlens_cpu
        count = int(((bounds[1:] - bounds[:-1] + size - 1) // size).sum())
    shape = (request.B, count, *request.state_shape[1:])
    return request.q.new_empty(shape, dtype=request.state_dtype)


def _run_segments(request: Request, rows: int, o: Tensor, final_state: Tensor | None) -> None:
    """Run both kernels with the sequence cut into segments of ``rows`` rows; they write ``o`` and ``final_state``."""
    packed = as_packed(request, rows)
    prepared = run_prepare(packed, o)
    given = _dense(request.initial_state)
    v = rows_contiguous(request.v)
    first, _ = starts(packed, chip(request.device), v, prepared.keys, prepared.D, given, request.state_v_first)
    last = None if final_state is None else torch.empty_like(first)
    run_recurrence(replace(packed, initial_state=first), prepared, o, last, None)
    if final_state is not None:
        final_state.copy_(last[-1:] if request.state_v_first else last[-1:].transpose(-1, -2))


def chunk_forward(request: Request) -> ForwardResult:
    """Run ``chunk_kda`` for a call that the plugin accepted."""
    q = request.q
    with on_device(q.device):
        o = request.out
        if o is None or not _writable(o):
            o = q.new_empty((request.B, request.T, request.HV, request.V))
        final_state = None
        if request.inplace_final_state:
            final_state = request.initial_state
        elif request.output_final_state:
            final_state = q.new_empty(request.state_shape, dtype=request.state_dtype)
        h = _intermediate_states(request) if request.return_intermediate_states else None
        keep = request.save_for_backward and request.disable_recompute
        rows = segment_rows(request, chip(request.device))
        if rows:
            prepared = ()
            _run_segments(request, rows, o, final_state)
        else:
            prepared = run_prepare(request, o, keep)
            run_recurrence(request, prepared, o, final_state, h)
        if request.out is not None and o is not request.out:
            o = request.out.copy_(o)
    saved = tuple(t for t in prepared if t is not None) if keep else ()
    return ForwardResult(o=o, final_state=None if request.inplace_final_state else final_state, h=h, saved=saved)

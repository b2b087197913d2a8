"""Backward of ``chunk_kda``, and of ``fused_recurrent_kda``, which is the same function.

With w = β ⊙ z the rows that the delta rule writes, a chunk is (notation of ``triton_lib.layout``)

    z = v − ke S − Lk w = X (v − ke S)        o = qg S + M w        S' = D ⊙ S + kgᵀ w

1. prepare: the inputs once more through the forward's kernel, which also stores X;
2. states: forward recurrence, z and the state of every slot (backward_states);
3. reverse: backward recurrence, dv and the state gradient of every slot (backward_reverse);
4. gradients: dq, dk, dg, dβ and partial sums for A_log and dt_bias (backward_gradients);
5. finish: sums over value heads and the gradient of the norms, where there are any (backward_finish).

One long sequence with few heads is cut (segments), which takes four more between 1 and 2.

Nothing synchronises with the host, and every sum is ordered, so that results repeat bitwise.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kda_core.request import BackwardResult, Request
from kda_core.triton_lib.arguments import batch_strides, contiguous, gate_kind, rows_contiguous, state_strides
from kda_core.triton_lib.layout import CHUNK, padded, slots
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.segments import as_packed
from kda_core_amd import launch
from kda_core_amd.backward_finish import finish_kernel
from kda_core_amd.backward_gradients import gradients_kernel
from kda_core_amd.backward_reverse import reverse_kernel
from kda_core_amd.backward_states import states_kernel
from kda_core_amd.choose import FINISH_ROWS, GATE, Architecture, Config, config, dot_widths, segment_rows
from kda_core_amd.chunk_forward import Prepared, run_prepare
from kda_core_amd.segments import ends, starts


def chunk_backward(call: Request, rows: int | None = None) -> BackwardResult:
    """Gradients of a call that the plugin accepted, for ``call.grad_o`` and ``call.grad_final_state``.

    Args:
        rows: of a segment, 0 for none; ``segment_rows`` decides when it is None.

    Returns:
        gradients of q, k, v, g, beta, and of A_log, dt_bias and initial_state where the call has them, each in the
        shape and dtype of its input (dt_bias as [HV, K]), contiguous.
    """
    with launch.on_device(call.device), torch.no_grad():
        do = call.v.new_zeros(call.v.shape) if call.grad_o is None else rows_contiguous(call.grad_o)
        if rows is None:
            rows = segment_rows(call, launch.architecture(call.device), launch.compute_units(call.device))
        request = as_packed(call, rows, v_first=False) if rows else call
        prepared = run_prepare(request, torch.empty_like(do), for_backward=True)
        if rows:
            # States at the starts of the segments and their gradients at the ends, as if these were given.
            request = _with_states(request, call, rows, prepared, do)
        z, states = _run_states(request, prepared)
        dv, state_grads, grad_state = _run_reverse(request, prepared, do)
        grads = _run_gradients(request, do, z, states, state_grads, dv)
        if grad_state is not None and rows:
            grad_state = grad_state[:1].transpose(-1, -2) if call.state_v_first else grad_state[:1]
            grad_state = grad_state.to(call.state_dtype, memory_format=torch.contiguous_format, copy=True)
    if grad_state is not None:
        grads["initial_state"] = grad_state
    return BackwardResult(grads)


def _with_states(request: Request, call: Request, rows: int, prepared: Prepared, do: Tensor) -> Request:
    """The segments of a call as packed sequences, with initial states and final states' gradients of their own."""
    keys, P, D = prepared[:3]
    first, transitions = starts(request, rows, keys, D, call.initial_state, call.state_v_first)
    last = ends(request, rows, do, (keys, P, D), transitions, call.grad_final_state, call.state_v_first)
    return replace(request, initial_state=first, grad_final_state=last)


def _recurrent_launch(kernel: str, request: Request) -> tuple[Architecture, Config, dict, int]:
    """Target, configuration, constants and number of programs of a recurrence, "states" or "reverse"."""
    KP, V = padded(request.K), request.V
    target = launch.architecture(request.device)
    chosen = config(kernel, target, request.q.dtype, KP)
    block_v = min(chosen.block, padded(V))
    constants = {
        "K": request.K, "V": V, "KP": KP, "VP": padded(V), "BV": block_v, "BK": min(chosen.keys or KP, KP), "C": CHUNK,
        "LIFT": lift(request.q.dtype, request.use_qk_l2norm_in_kernel, request.scale), "STAGES": chosen.stages,
        "DOT": dot_widths(request.q.dtype, target)[1],
    }  # fmt: skip
    return target, chosen, constants, request.N * request.HV * (padded(V) // block_v)


def _run_states(request: Request, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """z [slots, HV, C, VP] and the states [slots, HV, VP, KP] at the starts of the slots."""
    target, chosen, constants, programs = _recurrent_launch("states", request)
    v, state, HV = rows_contiguous(request.v), request.initial_state, request.HV
    count, VP = slots(request), constants["VP"]
    z = v.new_empty((count, HV, CHUNK, VP))
    states = v.new_empty((count, HV, VP, constants["KP"]))
    unit, (s_vb,) = batch_strides(v)
    arguments = (
        prepared.keys, prepared.X, prepared.D, v, state, z, states, contiguous(request.cu_seqlens), request.T,
        -(-request.T // CHUNK), HV, request.N * HV, s_vb, *v.stride()[1:3],
        *state_strides(state, request.state_v_first),
    )  # fmt: skip
    launch.launch(states_kernel, programs, arguments, {**constants, "UNIT": unit}, chosen, target)
    return z, states


def _run_reverse(request: Request, prepared: Prepared, do: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """dv, the state gradients [slots, HV, VP, KP] at the ends of the slots and that of the initial state."""
    target, chosen, constants, programs = _recurrent_launch("reverse", request)
    HV, grad_final = request.HV, request.grad_final_state
    dv = torch.empty(request.v.shape, dtype=request.v.dtype, device=request.device)
    state_grads = do.new_empty((slots(request), HV, constants["VP"], constants["KP"]))
    grad_state = None
    if "initial_state" in request.needs_grad and request.initial_state is not None:
        grad_state = do.new_empty(request.state_shape, dtype=request.state_dtype)
    unit, (s_ob, s_vb) = batch_strides(do, dv)
    arguments = (
        prepared.keys, prepared.P, prepared.D, do, grad_final, dv, state_grads, grad_state,
        contiguous(request.cu_seqlens), request.T, -(-request.T // CHUNK), HV, request.N * HV,
        s_ob, *do.stride()[1:3], s_vb, *dv.stride()[1:3], *state_strides(grad_final, request.state_v_first),
        *state_strides(grad_state, request.state_v_first),
    )  # fmt: skip
    launch.launch(reverse_kernel, programs, arguments, {**constants, "UNIT": unit}, chosen, target)
    return dv, state_grads, grad_state


def _run_gradients(
    request: Request, do: Tensor, z: Tensor, states: Tensor, state_grads: Tensor, dv: Tensor
) -> dict[str, Tensor]:
    """Gradients of all inputs but the initial state."""
    q, k, g, beta = rows_contiguous(request.q), rows_contiguous(request.k), rows_contiguous(request.g), request.beta
    B, T, K, V, HV, H = request.B, request.T, request.K, request.V, request.HV, request.H
    KP, count = padded(K), slots(request)
    gate = gate_kind(request)
    A_log, dt_bias = (contiguous(x) if gate != "none" else None for x in (request.A_log, request.dt_bias))
    unfinished = HV != H or request.use_qk_l2norm_in_kernel
    dq, dk = (q.new_empty((B, T, HV, K), dtype=torch.float32 if unfinished else q.dtype) for _ in range(2))
    dg, dbeta = g.new_empty((B, T, HV, K)), beta.new_empty((B, T, HV))
    # Slots that hold nothing give nothing.
    dA_log = None if A_log is None else torch.zeros((count, HV), dtype=torch.float32, device=q.device)
    ddt_bias = None if dt_bias is None else torch.zeros((count, HV, K), dtype=torch.float32, device=q.device)
    target = launch.architecture(request.device)
    chosen = config("gradients", target, q.dtype, KP)
    terms, dot, _ = dot_widths(q.dtype, target)
    unit, (s_qb, s_kb, s_gb, s_bb, s_ob) = batch_strides(q, k, g, beta, do)
    # Exact ends of sequences of one chunk, where there may be such, and their states are stored in 16 bits.
    ends_given = request.initial_state is not None and request.grad_final_state is not None
    exact = ends_given and q.dtype.itemsize == 2 and (request.cu_seqlens is not None or T <= CHUNK)
    first, last = (request.initial_state, request.grad_final_state) if exact else (None, None)
    arguments = (
        q, k, g, beta, A_log, dt_bias, do, z, states, state_grads, dq, dk, dv, dg, dbeta, dA_log, ddt_bias, first, last,
        contiguous(request.cu_seqlens), float(request.scale),
        0.0 if request.lower_bound is None else float(request.lower_bound), T, request.N, -(-T // CHUNK), HV, HV // H,
        s_qb, *q.stride()[1:3], s_kb, *k.stride()[1:3], s_gb, *g.stride()[1:3], s_bb, *beta.stride()[1:3],
        s_ob, *do.stride()[1:3], *state_strides(first, request.state_v_first),
        *state_strides(last, request.state_v_first),
    )  # fmt: skip
    constants = {
        "K": K, "V": V, "KP": KP, "VP": padded(V), "BK": min(chosen.block, KP), "BV": min(chosen.block, padded(V)),
        "C": CHUNK, "UNIT": unit, "GATE": gate, "L2NORM": request.use_qk_l2norm_in_kernel,
        "SIGMOID": request.use_beta_sigmoid_in_kernel, "NEG_EIGVAL": request.allow_neg_eigval, "ROWS": chosen.rows,
        "LEVEL_LOOP": chosen.level_loop, "TERMS": terms, "DOT": dot,
    }  # fmt: skip
    launch.launch(gradients_kernel, count * HV, arguments, constants, chosen, target)
    if unfinished:
        dq, dk = (_finished(request, x, dy) for x, dy in ((q, dq), (k, dk)))
    grads = {"q": dq, "k": dk, "v": dv, "g": dg, "beta": dbeta}
    if dA_log is not None:
        grads["A_log"] = dA_log.sum(0).to(request.A_log.dtype)
    if ddt_bias is not None:
        grads["dt_bias"] = ddt_bias.sum(0).to(request.dt_bias.dtype)
    return grads


def _finished(request: Request, x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of q or k from those of its value heads, [B, T, HV, K] float32."""
    B, T, H, K = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = (x, dy, dx, B * T, T, H, request.HV // H, *x.stride()[:3])
    constants = {"K": K, "KP": padded(K), "ROWS": FINISH_ROWS, "L2NORM": request.use_qk_l2norm_in_kernel}
    target = launch.architecture(request.device)
    launch.launch(finish_kernel, -(-B * T // FINISH_ROWS) * H, arguments, constants, GATE, target)
    return dx

"""Plans of what is around the operator in a layer: the same for every Triton backend, its warps aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kda_core.request import DecodeStepRequest, GatedNormRequest, LayerRequest, Request, ShortConvolutionRequest
from kda_core.triton_lib.convolution_kernels import convolution_backward_kernel, convolution_forward_kernel
from kda_core.triton_lib.decode_kernels import convolution_step_kernel, norm_step_kernel
from kda_core.triton_lib.frame import finish_output, output
from kda_core.triton_lib.layout import padded
from kda_core.triton_lib.norm_kernels import norm_backward_kernel, norm_forward_kernel
from kda_core.triton_lib.plan import Builder, Copy, Plan, Sum, View, contiguous_strides, input_layouts

ROWS_OF_SLOT = 64
"""Rows of a program of the convolution: the W - 1 rows that it shares with each neighbour cost a tenth."""

CHANNELS_OF_LANE = 4
"""Channels of a lane in the convolution, 8 bytes of a 16-bit row: more would need too many registers backwards."""

UNROLL, UNROLL_BACKWARD = 8, 2
"""Rows that a program of the convolution loads at once: backwards more registers hold sums."""

NORM_ELEMENTS = 32
"""Elements of a lane in the norm."""

STEP_WARPS, STEP_ELEMENTS = 4, 8
"""Warps of a program in a decoding step, and elements of a lane in its norm: there are few rows, and they are short."""


def plan_of_layer(r: LayerRequest, lanes: int, warps: int) -> Plan:
    """The plan of a call; the request is metadata alone (``plan.metadata``).

    Args:
        lanes, warps: lanes of a warp, warps of a program.
    """
    if isinstance(r, GatedNormRequest):
        return _norm(r, lanes, warps)
    return _convolution_backward(r, lanes, warps) if r.needs_grad else _convolution_forward(r, lanes, warps)


def _convolution(b: Builder, r: ShortConvolutionRequest, lanes: int, warps: int) -> tuple[int, dict[str, Any]]:
    """Slots, and the arguments that both kernels share."""
    x = r.x if r.x.strides[2] == 1 else b.dense(r.x)
    B, T, D = x.shape
    N = B if r.cu_seqlens is None else r.cu_seqlens.shape[0] - 1
    chunks = -(-T // ROWS_OF_SLOT)
    slots = B * chunks if r.cu_seqlens is None else T // ROWS_OF_SLOT + N + 1
    return slots, {
        "x": x, "weight": b.dense(r.weight), "bias": b.dense(r.bias), "state": b.dense(r.initial_state),
        "cu_seqlens": b.dense(r.cu_seqlens), "s_xb": x.strides[0], "s_xt": x.strides[1], "T": T, "N": N,
        "chunks": chunks, "D": D, "W": r.weight.shape[1], "SILU": r.silu, "C": ROWS_OF_SLOT,
        "BD": lanes * warps * CHANNELS_OF_LANE,
    }  # fmt: skip


def _convolution_forward(r: ShortConvolutionRequest, lanes: int, warps: int) -> Plan:
    b = Builder()
    slots, named = _convolution(b, r, lanes, warps)
    _, T, D = r.x.shape
    y = b.result("y", r.x.shape, r.x.dtype)
    final = None
    shape = named["N"], r.weight.shape[1] - 1, D
    # In place, a program reads the state and another writes it where a sequence may have several slots.
    direct = r.inplace_final_state and T <= ROWS_OF_SLOT and r.initial_state.is_contiguous()
    if direct:
        final = r.initial_state
    elif r.inplace_final_state:
        final = b.scratch("final state", shape, r.initial_state.dtype)
    elif r.output_final_state:
        final = b.result("final", shape, r.x.dtype if r.initial_state is None else r.initial_state.dtype)
    named |= {"y": y, "final": final, "UNROLL": UNROLL}
    b.pick(convolution_forward_kernel, slots * -(-D // named["BD"]), warps, named)
    if r.inplace_final_state and not direct:
        b.step(Copy(r.initial_state, final))
    return b.plan(input_layouts(r), {"y": y, "final": None if r.inplace_final_state else final})


def _convolution_backward(r: ShortConvolutionRequest, lanes: int, warps: int) -> Plan:
    b = Builder()
    slots, named = _convolution(b, r, lanes, warps)
    D, W = r.weight.shape
    parts = [*(r.parts or (D,)), 0, 0][:3]
    programs = slots * sum(-(-n // named["BD"]) for n in parts)
    dx = b.result("dx", r.x.shape, r.x.dtype)
    dweight, dbias = b.scratch("dweight by slots", (slots, W, D), torch.float32), None
    if r.bias is not None:
        dbias = b.scratch("dbias by slots", (slots, D), torch.float32)
    dstate = None
    if r.initial_state is not None:
        dstate = b.result("dstate", r.initial_state.shape, r.initial_state.dtype)
    named |= {
        "dy_0": b.dense(r.grad_output), "dy_1": b.dense(r.grad_second), "dy_2": b.dense(r.grad_third),
        "dfinal": b.dense(r.grad_final_state), "dx": dx, "dweight": dweight, "dbias": dbias, "dstate": dstate,
        "UNROLL": UNROLL_BACKWARD, "D_0": parts[0], "D_1": parts[1], "D_2": parts[2],
    }  # fmt: skip
    b.pick(convolution_backward_kernel, programs, warps, named)
    # [W, D], as the kernel has it: the caller transposes the few numbers.
    results = {"x": dx, "weight": b.result("dweight", (W, D), r.weight.dtype), "initial_state": dstate}
    b.step(Sum(results["weight"], dweight, (0,)))
    if dbias is not None:
        results["bias"] = b.result("dbias", (D,), r.bias.dtype)
        b.step(Sum(results["bias"], dbias, (0,)))
    return b.plan(input_layouts(r), results)


def _norm(r: GatedNormRequest, lanes: int, warps: int) -> Plan:
    b = Builder()
    D = r.weight.shape[0]
    rows = r.x.numel() // D

    def flat(x: View) -> View:
        return b.dense(x)._replace(shape=(rows, D), strides=contiguous_strides((rows, D)))

    padded = 1 << (D - 1).bit_length()
    block = max(1, lanes * warps * NORM_ELEMENTS // padded)
    programs = -(-rows // block)
    named = {"x": flat(r.x), "gate": flat(r.gate), "weight": b.dense(r.weight), "R": rows, "eps": float(r.eps)}
    named |= {"D": D, "DP": padded, "ROWS": block}
    if not r.needs_grad:
        y = b.result("y", r.x.shape, r.x.dtype)
        b.pick(norm_forward_kernel, programs, warps, named | {"y": y})
        return b.plan(input_layouts(r), {"y": y})
    grads = {n: b.result(f"d{n}", getattr(r, n).shape, getattr(r, n).dtype) for n in ("x", "gate", "weight")}
    dweight = b.scratch("dweight by programs", (programs, D), torch.float32)
    named |= {"dy": flat(r.grad_output), "dx": grads["x"], "dgate": grads["gate"], "dweight": dweight}
    b.pick(norm_backward_kernel, programs, warps, named)
    b.step(Sum(grads["weight"], dweight, (0,)))
    return b.plan(input_layouts(r), grads)


def convolved(r: DecodeStepRequest, y: View) -> list[View]:
    """q, k and v as parts of ``y`` [N, T, D]."""
    N, T, HV, K = r.g.shape
    found, offset = [], 0
    for heads, size in ((r.H, K), (r.H, K), (HV, r.V)):
        aligned = offset * y.itemsize % 16 == 0
        found.append(View(y.source, (N, T, heads, size), (*y.strides[:2], size, 1), y.dtype, offset, aligned))
        offset += heads * size
    return found


def plan_decode_step(
    r: DecodeStepRequest, add_recurrence: Callable[[Builder, Request], object], lanes: int, **options: Any
) -> Plan:
    """The plan of ``kda_decode_step``; the request is metadata alone.

    Args:
        add_recurrence: adds the launches of ``fused_recurrent_kda`` for its request, which has ``out``.
        lanes: of a warp.
        options: further ones of the norm's launch; with ``launch_pdl`` it may start before the recurrence ends.
    """
    b = Builder()
    N, T, D = r.x.shape
    HV, V, dtype = r.g.shape[2], r.V, r.x.dtype
    indices = r.indices
    every_token = indices is not None and indices.dim() == 2 and indices.shape[1] > 1
    x, accepted = b.rows(r.x), b.dense(r.accepted)
    inputs = None if r.commit_inputs is None else b.rows(r.commit_inputs)
    y = b.scratch("y", (N, T, D), dtype)
    named = {
        "x": x, "weight": b.dense(r.weight), "bias": b.dense(r.bias), "conv_state": r.conv_state, "indices": indices,
        "accepted": accepted, "inputs": inputs, "committed": b.dense(r.num_committed), "y": y, "T": T,
        "C": 0 if inputs is None else inputs.shape[1], "s_in": 0 if inputs is None else inputs.stride(0),
        "s_it": 0 if inputs is None else inputs.stride(1), "KEEPS": r.records is None, "slots": r.state.shape[0],
        "pad_slot_id": r.pad_slot_id,
        "s_index": 0 if indices is None else indices.stride(0), "s_slot": indices.stride(1) if every_token else 0,
        "width": indices.shape[1] if every_token else 1, "s_xn": x.stride(0), "s_xt": x.stride(1),
        **dict(zip(("s_cn", "s_ct", "s_cd"), r.conv_state.strides, strict=True)), "D": D, "W": r.weight.shape[1],
        "BD": lanes * STEP_WARPS, "EVERY_TOKEN": every_token,
    }  # fmt: skip
    b.pick(convolution_step_kernel, N * -(-D // named["BD"]), STEP_WARPS, named)
    o = output(b, r.out, (N, T, HV, V), dtype)
    rows = o if r.norm_gate is None else b.scratch("rows", (N, T, HV, V), dtype)
    state = r.state if indices is not None else r.state.cut(0, slice(0, N))
    add_recurrence(b, r.recurrence(*convolved(r, y), state, rows))
    if r.norm_gate is not None:
        gate, VP, R = b.rows(r.norm_gate), padded(V), N * T * HV
        of_program = max(1, lanes * STEP_WARPS * STEP_ELEMENTS // VP)
        strides = {f"s_{n}{i}": s for n, t in (("a", gate), ("o", o)) for i, s in zip("nth", t.strides, strict=False)}
        overlap = options.get("launch_pdl", False)
        named = strides | {
            "rows": rows, "gate": gate, "weight": b.dense(r.norm_weight), "o": o, "R": R, "T": T,
            "eps": float(r.norm_eps), "HV": HV, "V": V, "VP": VP, "ROWS": of_program, "OVERLAP": overlap,
        }  # fmt: skip
        b.pick(norm_step_kernel, -(-R // of_program), STEP_WARPS, named, **options)
    finish_output(b, r, o)
    return b.plan(input_layouts(r), {"o": o if r.out is None else None})

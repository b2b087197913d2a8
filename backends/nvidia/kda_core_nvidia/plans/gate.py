"""``kda_gate`` on its own; the kernels are those of ``kda_core.triton_lib.gate_kernels``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kda_core.request import GateRequest
from kda_core.triton_lib.gate_kernels import ROWS, gate_backward_kernel, gate_forward_kernel
from kda_core.triton_lib.layout import padded
from kda_core.triton_lib.plan import Builder, Plan, Sum, View, contiguous_strides, input_layouts

WARPS = 4


def _flat(b: Builder, r: GateRequest, x: View) -> View:
    """``x`` [.., HV, K] as [R, HV, K], contiguous."""
    shape = (math.prod(r.g.shape[:-2]), *r.g.shape[-2:])
    return replace(b.dense(x), shape=shape, strides=contiguous_strides(shape))


def _shared(b: Builder, r: GateRequest) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Blocks of rows, and the arguments and the constants of both kernels."""
    g = _flat(b, r, r.g)
    R, HV, K = g.shape
    parameters = {"A_log": b.dense(r.A_log), "dt_bias": b.dense(r.dt_bias)}
    arguments = {"g": g, **parameters, "lower_bound": float(r.lower_bound or 0.0), "R": R, "HV": HV}
    constants = {"K": K, "KP": padded(K), "ROWS": ROWS, "BOUNDED": r.lower_bound is not None}
    return -(-R // ROWS), arguments, constants


def plan_gate_forward(r: GateRequest) -> Plan:
    """The plan of ``kda_gate``, whose result is log_decay; the request is metadata alone."""
    b = Builder()
    log_decay = b.result("log_decay", r.g.shape, torch.float32)
    blocks, arguments, constants = _shared(b, r)
    if grid := blocks * r.g.shape[-2]:
        b.launch(gate_forward_kernel, (grid, 1, 1), WARPS, constants, **arguments, log_decay=log_decay)
    return b.plan(input_layouts(r), {"log_decay": log_decay})


def plan_gate_backward(r: GateRequest) -> Plan:
    """The plan of the backward of ``kda_gate``, whose results are the gradients."""
    b = Builder()
    blocks, arguments, constants = _shared(b, r)
    HV, K = r.g.shape[-2:]
    grads = {"g": b.result("dg", r.g.shape, r.g.dtype)}
    # Sums over rows leave one partial result for each block of rows.
    shapes = {"A_log": (blocks, HV), "dt_bias": (blocks, HV, K)}
    wanted = [n for n in shapes if n in r.needs_grad and getattr(r, n) is not None]
    parts = {n: b.scratch(f"d{n} by blocks", shapes[n], torch.float32) for n in wanted}
    if grid := blocks * HV:
        written = {"dg": grads["g"], "dA_log": parts.get("A_log"), "ddt_bias": parts.get("dt_bias")}
        grad = _flat(b, r, r.grad_output)
        b.launch(gate_backward_kernel, (grid, 1, 1), WARPS, constants, **arguments, grad=grad, **written)
    for n, x in parts.items():
        grads[n] = b.result(f"d{n}", getattr(r, n).shape, getattr(r, n).dtype)
        b.step(Sum(grads[n], x, (0,)))
    return b.plan(input_layouts(r), grads)

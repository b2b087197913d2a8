"""Kernels of ``kda_gate`` on its own, and their plans: the log decay γ of the raw gate input g, and its
gradients. With x = g + dt_bias,

    γ = −exp(A_log)·softplus(x), or with a lower bound b, γ = b·sigmoid(exp(A_log)·x).

Gradients: ``gate_gradient``.

Grid: ceil(R / ROWS) · HV programs along axis 0, heads fastest; R rows, ROWS of them a program, all channels of one head
at once. Sums over rows leave one partial result a program, added up afterwards in a fixed order. Offsets are int64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kda_core.request import GateRequest
from kda_core.triton_lib.gate import gate_gradient, gate_rate, sigmoid, softplus
from kda_core.triton_lib.layout import padded
from kda_core.triton_lib.plan import Builder, Plan, Sum, View, contiguous_strides, input_layouts

ROWS = 32
"""Rows of a program: enough to fill four warps at K = 64, few enough that short inputs still spread over a chip."""


@triton.jit
def _inputs(g, A_log, dt_bias, R, HV, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr):
    """Program, head, offsets, mask, x = g + dt_bias [ROWS, KP] and the rate exp(A_log)."""
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HV
    rows = pid // HV * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, KP)
    offsets = (rows[:, None] * HV + i_h) * K + o_k[None, :]
    mask = (rows < R)[:, None] & (o_k < K)[None, :]
    x = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32)
    if dt_bias is not None:
        x += tl.load(dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    return pid, offsets, mask, x, gate_rate(A_log, i_h)


@triton.jit(do_not_specialize=["lower_bound", "R", "HV"])
def gate_forward_kernel(
    g,  # [R, HV, K]
    A_log, dt_bias,  # [HV] and [HV, K], or None
    log_decay,  # [R, HV, K] float32
    lower_bound, R, HV, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    _, offsets, mask, x, rate = _inputs(g, A_log, dt_bias, R, HV, K, KP, ROWS)
    if BOUNDED:
        y = sigmoid(x * rate) * lower_bound
    else:
        y = -(softplus(x) * rate)
    tl.store(log_decay + offsets, y, mask=mask)


@triton.jit(do_not_specialize=["lower_bound", "R", "HV"])
def gate_backward_kernel(
    g,  # [R, HV, K]
    A_log, dt_bias,  # [HV] and [HV, K], or None
    grad, dg,  # [R, HV, K]
    dA_log,  # [blocks, HV] float32 or None
    ddt_bias,  # [blocks, HV, K] float32 or None
    lower_bound, R, HV, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    pid, offsets, mask, x, rate = _inputs(g, A_log, dt_bias, R, HV, K, KP, ROWS)
    b_grad = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
    dx, summand = gate_gradient(x, rate, lower_bound, b_grad, "bounded" if BOUNDED else "softplus")
    dx = tl.where(mask, dx, 0.0)
    tl.store(dg + offsets, dx.to(dg.dtype.element_ty), mask=mask)
    if dA_log is not None:
        tl.store(dA_log + pid, tl.sum(tl.sum(tl.where(mask, summand, 0.0), 1), 0))
    if ddt_bias is not None:
        o_k = tl.arange(0, KP)
        tl.store(ddt_bias + pid * K + o_k, tl.sum(dx, 0), mask=o_k < K)


def _flat(b: Builder, r: GateRequest, x: View) -> View:
    """``x`` [.., HV, K] as [R, HV, K], contiguous."""
    shape = (math.prod(r.g.shape[:-2]), *r.g.shape[-2:])
    return b.dense(x)._replace(shape=shape, strides=contiguous_strides(shape))


def plan_gate(r: GateRequest, num_warps: int, **options: Any) -> Plan:
    """The plan of ``kda_gate``, whose result is log_decay, or of its backward, whose results are the gradients.

    Args:
        r: metadata alone.
        options: of the compiler.
    """
    b = Builder()
    HV, K = r.g.shape[-2:]
    g = _flat(b, r, r.g)
    blocks = -(-g.shape[0] // ROWS)
    named = {
        "g": g, "A_log": b.dense(r.A_log), "dt_bias": b.dense(r.dt_bias), "lower_bound": float(r.lower_bound or 0.0),
        "R": g.shape[0], "HV": HV, "K": K, "KP": padded(K), "ROWS": ROWS, "BOUNDED": r.lower_bound is not None,
    }  # fmt: skip
    results, parts = {}, {}
    if r.needs_grad:
        kernel = gate_backward_kernel
        results["g"] = b.result("dg", r.g.shape, r.g.dtype)
        # Sums over rows leave one partial result for each block of rows.
        shapes = {"A_log": (blocks, HV), "dt_bias": (blocks, HV, K)}
        wanted = [n for n in shapes if n in r.needs_grad and getattr(r, n) is not None]
        parts = {n: b.scratch(f"d{n} by blocks", shapes[n], torch.float32) for n in wanted}
        written = {"dg": results["g"], "dA_log": parts.get("A_log"), "ddt_bias": parts.get("dt_bias")}
        named |= {"grad": _flat(b, r, r.grad_output), **written}
    else:
        kernel = gate_forward_kernel
        named["log_decay"] = results["log_decay"] = b.result("log_decay", r.g.shape, torch.float32)
    b.pick(kernel, blocks * HV, num_warps, named, **options)
    for n, x in parts.items():
        results[n] = b.result(f"d{n}", getattr(r, n).shape, getattr(r, n).dtype)
        b.step(Sum(results[n], x, (0,)))
    return b.plan(input_layouts(r), results)

"""Kernels of ``kda_gate`` on its own, and what surrounds their launch: the log decay γ of the raw gate input g, and its
gradients. With x = g + dt_bias,

    γ = −exp(A_log)·softplus(x), or with a lower bound b, γ = b·sigmoid(exp(A_log)·x).

Gradients: ``gate_gradient``.

Grid: ceil(R / ROWS) · HV programs along axis 0, heads fastest; R rows, ROWS of them a program, all channels of one head
at once. Sums over rows leave one partial result a program, added up afterwards in a fixed order. Offsets are int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_core.request import BackwardResult, GateRequest
from kda_core.triton_lib.gate import gate_gradient, gate_rate, sigmoid, softplus

ROWS = 32
"""Rows of a program: enough to fill four warps at K = 64, few enough that short inputs still spread over a chip."""

Launch = Callable[[int, tuple[Any, ...], dict[str, Any]], None]
"""Launches one kernel: so many programs, its first parameters in order, and the others, constants."""


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
    A_log,  # [HV] or None
    dt_bias,  # [HV, K] or None
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
    A_log,  # [HV] or None
    dt_bias,  # [HV, K] or None
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


def _flat(request: GateRequest) -> tuple[Tensor, Tensor | None, Tensor | None, dict[str, Any]]:
    """g as [R, HV, K], the parameters, all contiguous, and the constants of both kernels."""
    g = request.g.reshape(math.prod(request.g.shape[:-2]), *request.g.shape[-2:]).contiguous()
    A_log = None if request.A_log is None else request.A_log.contiguous()
    dt_bias = None if request.dt_bias is None else request.dt_bias.contiguous()
    K = g.shape[2]
    KP = max(16, triton.next_power_of_2(K))
    return g, A_log, dt_bias, {"K": K, "KP": KP, "ROWS": ROWS, "BOUNDED": request.lower_bound is not None}


def forward(request: GateRequest, launch: Launch) -> Tensor:
    """Run ``kda_gate``: float32, shape of g. ``launch``: of ``gate_forward_kernel``."""
    g, A_log, dt_bias, constants = _flat(request)
    R, HV, _ = g.shape
    log_decay = torch.empty(request.g.shape, dtype=torch.float32, device=g.device)
    bound = float(request.lower_bound or 0.0)
    launch(-(-R // ROWS) * HV, (g, A_log, dt_bias, log_decay, bound, R, HV), constants)
    return log_decay


def backward(request: GateRequest, launch: Launch) -> BackwardResult:
    """Run the backward of ``kda_gate`` for ``request.needs_grad``. ``launch``: of ``gate_backward_kernel``."""
    g, A_log, dt_bias, constants = _flat(request)
    R, HV, K = g.shape
    blocks = -(-R // ROWS)
    grad = request.grad_output.reshape(g.shape).contiguous()
    dg = torch.empty_like(g)
    dA_log = ddt_bias = None
    if "A_log" in request.needs_grad and A_log is not None:
        dA_log = torch.empty((blocks, HV), dtype=torch.float32, device=g.device)
    if "dt_bias" in request.needs_grad and dt_bias is not None:
        ddt_bias = torch.empty((blocks, HV, K), dtype=torch.float32, device=g.device)
    bound = float(request.lower_bound or 0.0)
    launch(blocks * HV, (g, A_log, dt_bias, grad, dg, dA_log, ddt_bias, bound, R, HV), constants)
    grads = {"g": dg.view(request.g.shape)}
    if dA_log is not None:
        grads["A_log"] = dA_log.sum(0).to(A_log.dtype)
    if ddt_bias is not None:
        grads["dt_bias"] = ddt_bias.sum(0).to(dt_bias.dtype)
    return BackwardResult(grads)

"""The gate: the log decay γ of the raw gate input g. With x = g + dt_bias,

    γ = −exp(A_log)·softplus(x), or with a lower bound b, γ = b·sigmoid(exp(A_log)·x).

Gradients, with z = exp(A_log)·x, from dγ:

    softplus      dx = −exp(A_log)·sigmoid(x)·dγ             dA_log = Σ γ·dγ
    lower bound   dx = b·sigmoid(z)·sigmoid(−z)·exp(A_log)·dγ    dA_log = Σ x·dx          dg = dx,  ddt_bias = Σ dx

sigmoid(z)·sigmoid(−z) rather than s·(1 − s), which loses all digits for large z. A rate, a decay or an
input that overflows is held at the largest finite number, so that 0·∞ never turns a vanished gradient into NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_core.request import BackwardResult, GateRequest, Request

_SOFTPLUS_IS_LINEAR = 40.0
"""Above it log(1 + exp(x)) is x, in fp64 too; exp(40) is far from overflow in fp32."""


_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}

_FEW = 1 << 12
"""Elements that are held in less time than it takes to look for a rate of 0."""


def parameters(request: Request | GateRequest, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """exp(A_log) [HV, 1], finite, and dt_bias [HV, K], in ``dtype``; None for a rate of 1, or no bias."""
    rate = None if request.A_log is None else hold_rate(request.A_log.to(dtype).exp()).unsqueeze(-1)
    return rate, None if request.dt_bias is None else request.dt_bias.to(dtype)


def hold_rate(rate: Tensor) -> Tensor:
    """exp(A_log), finite, in place."""
    return rate.clamp_(max=_LARGEST[rate.dtype])


def _gate_input(x: Tensor, rate: Tensor | None, bias: Tensor | None) -> None:
    """x + bias, in place; finite if a rate is 0."""
    if bias is not None:
        x.add_(bias)
    if rate is not None and (x.numel() <= _FEW or not rate.all()):
        largest = _LARGEST[x.dtype]
        x.clamp_(-largest, largest)


def log_decay(
    x: Tensor, rate: Tensor | None, bias: Tensor | None, lower_bound: float | None, memory: Tensor | None = None,
    unit: float = 1.0,
) -> Tensor:  # fmt: skip
    """γ·``unit`` of the raw gate input, in place on ``x``.

    ``rate`` and ``bias`` broadcast against ``x``; ``memory`` is that of ``x``, with slack behind it if there is any.
    """
    memory = x if memory is None else memory
    _gate_input(x, rate, bias)
    if lower_bound is None:
        F.softplus(memory, 1, _SOFTPLUS_IS_LINEAR, out=memory)
        if rate is None:
            return x.mul_(-unit)
        return x.mul_(-(rate if unit == 1.0 else hold_rate(rate * unit)))
    if rate is not None:
        x.mul_(rate)
    memory.sigmoid_()
    return x.mul_(lower_bound * unit)


def log_decay_backward(
    x: Tensor, rate: Tensor | None, bias: Tensor | None, lower_bound: float | None, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """From dγ, the gradient of the raw gate input ``x`` (overwritten) and the summands of dA_log, of x's shape."""
    _gate_input(x, rate, bias)
    if lower_bound is None:
        summand = F.softplus(x, threshold=_SOFTPLUS_IS_LINEAR)
        grad_x = x.sigmoid_()
        if rate is not None:
            summand.mul_(rate).clamp_(max=torch.finfo(x.dtype).max)
            grad_x.mul_(rate)
        return grad_x.mul_(grad).neg_(), summand.mul_(grad).neg_()
    z = x if rate is None else x * rate
    grad_x = torch.sigmoid(z).mul_(torch.sigmoid(-z)).mul_(grad).mul_(lower_bound)
    if rate is not None:
        grad_x.mul_(rate)
    largest = torch.finfo(x.dtype).max
    return grad_x, x.clamp_(-largest, largest).mul_(grad_x)


def gate_forward(request: GateRequest) -> Tensor:
    """``kda_gate``: a fresh contiguous tensor of g's shape, float32 (float64 for float64 g)."""
    dtype = request.output_dtype
    x = torch.empty(request.g.shape, dtype=dtype, device="cpu").copy_(request.g)
    return log_decay(x, *parameters(request, dtype), request.lower_bound)


def gate_backward(request: GateRequest) -> BackwardResult:
    """Gradients of ``kda_gate`` for the inputs in ``request.needs_grad``."""
    dtype = request.output_dtype
    g, needs = request.g, request.needs_grad
    x = torch.empty(g.shape, dtype=dtype, device="cpu").copy_(g)
    grad = torch.zeros_like(x) if request.grad_output is None else request.grad_output.to(dtype)
    grad_x, summand = log_decay_backward(x, *parameters(request, dtype), request.lower_bound, grad)
    leading = tuple(range(g.dim() - 2))
    grads = {}
    if "g" in needs:
        grads["g"] = grad_x.to(g.dtype)
    if "A_log" in needs and request.A_log is not None:
        grads["A_log"] = summand.sum((*leading, -1)).to(request.A_log.dtype)
    if "dt_bias" in needs and request.dt_bias is not None:
        total = grad_x.sum(leading) if leading else grad_x.clone()
        grads["dt_bias"] = total.to(request.dt_bias.dtype)
    return BackwardResult(grads)

"""What q, k, g and β become before the recurrence sees them: l2norm, gate and sigmoid, for the rows of one window.

    q' = scale·q / sqrt(Σq² + ε)    k' = k / sqrt(Σk² + ε)    d = exp(γ)    β = sigmoid(logit), or 2·sigmoid(logit)

each only where the request asks for it, in the compute dtype, with padding rows q' = k' = v = β = 0 and d = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_core.request import Request
from kda_core_cpu.gate import log_decay, log_decay_backward, rate_of
from kda_core_cpu.launch import with_slack
from kda_core_cpu.windows import TokenWindow, Window

L2NORM_EPSILON = 1e-6


def inverse_norm(x: Tensor) -> Tensor:
    """1 / sqrt(Σx² + ε) over the last dimension, kept."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(L2NORM_EPSILON).rsqrt_()


def inverse_norm_backward(unit: Tensor, inverse: Tensor, grad: Tensor) -> Tensor:
    """Gradient of x from that of ``unit`` = x·``inverse``, in place on ``grad``."""
    along = (unit * grad).sum(-1, keepdim=True)
    return grad.addcmul_(unit, along, value=-1).mul_(inverse)


class RowInputs:
    """Loads the rows of windows for one request, and turns gradients back into those of what the caller passed."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.dtype = request.compute_dtype
        self.shared = request.HV // request.H
        self.rate = self.bias = None
        if request.use_gate_in_kernel:
            self.rate = rate_of(request.A_log, self.dtype)
            self.bias = None if request.dt_bias is None else request.dt_bias.to(self.dtype)

    def load_unit(self, x: Tensor, window: Window | TokenWindow, into: Tensor) -> Tensor | None:
        """Rows of q or k; with l2norm they are normalised, and their inverse norms [Z, C, 1] are returned."""
        window.load(x, into, shared=self.shared)
        if not self.request.use_qk_l2norm_in_kernel:
            return None
        inverse = inverse_norm(into)
        into.mul_(inverse)
        return inverse

    def load_units(self, window: Window | TokenWindow, kq: Tensor) -> None:
        """Rows of k and of scale·q side by side in ``kq`` [Z, C, 2, K], in half the calls that two loads take."""
        k, q = kq.unbind(2)
        window.load(self.request.k, k, shared=self.shared)
        window.load(self.request.q, q, shared=self.shared)
        if self.request.use_qk_l2norm_in_kernel:
            inverse = inverse_norm(kq)
            inverse[:, :, 1].mul_(self.request.scale)
            kq.mul_(inverse)
        else:
            q.mul_(self.request.scale)

    def load_decay(self, window: Window | TokenWindow, into: Tensor) -> Tensor:
        """d = exp(γ); ``into`` is scratch."""
        window.load(self.request.g, into)
        memory = with_slack(into)
        if self.request.use_gate_in_kernel:
            heads = into.unflatten(0, (window.pairs, -1))
            log_decay(heads, *self._gate_parameters(window.heads), self.request.lower_bound, memory)
        memory.exp_()
        if self.request.use_gate_in_kernel:
            window.pad(into, 1.0)
        return into

    def load_beta(self, window: Window | TokenWindow, into: Tensor) -> Tensor:
        """β, [Z, C, 1]; ``into`` is scratch."""
        window.load(self.request.beta.unsqueeze(-1), into)
        if self.request.use_beta_sigmoid_in_kernel:
            with_slack(into).sigmoid_()
            if self.request.allow_neg_eigval:
                into.mul_(2)
            window.pad(into, 0.0)
        return into

    def beta_backward(self, beta: Tensor, grad: Tensor) -> Tensor:
        """Gradient of what was passed as beta, in place on ``grad``."""
        if not self.request.use_beta_sigmoid_in_kernel:
            return grad
        # β = top·s, so dβ/dlogit = top·s·(1 − s) = β·(1 − β/top).
        top = 2.0 if self.request.allow_neg_eigval else 1.0
        return grad.mul_(beta).mul_(1 - beta / top)

    def gate_backward(self, window: Window, into: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """From dγ [Z, C, K]: gradient of g, and the summands of dA_log, both [pairs, heads, C, K]."""
        window.pad(grad, 0.0)
        x = window.load(self.request.g, into).unflatten(0, (window.pairs, -1))
        parameters = self._gate_parameters(window.heads)
        return log_decay_backward(x, *parameters, self.request.lower_bound, grad.view_as(x))

    def _gate_parameters(self, heads: slice) -> tuple[Tensor | None, Tensor | None]:
        """Rate [heads, 1, 1] and bias [heads, 1, K]."""
        rate = None if self.rate is None else self.rate[heads, None, None]
        bias = None if self.bias is None else self.bias[heads, None, :]
        return rate, bias

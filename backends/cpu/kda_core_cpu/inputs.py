"""l2norm, gate and sigmoid of the rows of one window, and their gradients.

    q' = scale·q / sqrt(Σq² + ε)    k' = k / sqrt(Σk² + ε)    d = exp(γ)    β = sigmoid(logit), or 2·sigmoid(logit)

Each is applied if the request asks for it, in the compute dtype. Padding rows have q' = k' = v = β = 0 and d = 1.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kda_core.request import Request
from kda_core_cpu.gate import log_decay, log_decay_backward, parameters
from kda_core_cpu.windows import TokenWindow, Window
from kda_core_cpu.workspace import Workspace, with_slack

L2NORM_EPSILON = 1e-6

_CORRECTED = 16
"""Rows whose decays' rounding errors are corrected together, in the last of them; a power of two."""


def inverse_norm(x: Tensor) -> Tensor:
    """1 / sqrt(Σx² + ε) over the last dimension, which the result keeps with one element."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(L2NORM_EPSILON).rsqrt_()


def inverse_norm_backward(unit: Tensor, inverse: Tensor, grad: Tensor) -> Tensor:
    """Gradient of x from that of ``unit`` = x·``inverse``, in place on ``grad``."""
    along = (unit * grad).sum(-1, keepdim=True)
    return grad.addcmul_(unit, along, value=-1).mul_(inverse)


@functools.lru_cache(maxsize=64)
def norm_constants(scale: float, dtype: torch.dtype, dims: int) -> tuple[Tensor, Tensor]:
    """ε, and (1, scale) along the first of ``dims`` dimensions, as tensors: numbers cost a call three times as much."""
    # The cache outlives the call: made in inference mode these would stay inference tensors.
    with torch.inference_mode(False):
        factors = torch.tensor([1.0, scale], dtype=dtype, device="cpu")
        return torch.tensor(L2NORM_EPSILON, dtype=dtype, device="cpu"), factors.view(2, *[1] * (dims - 1))


class RowInputs:
    """Loads the rows of windows for one request, and computes the gradients of the caller's tensors from theirs."""

    def __init__(self, request: Request, K: int | None = None) -> None:
        """Rows of q, k and g are loaded with ``K`` channels, those past ``request.K`` zero before any gate."""
        self.request = request
        self.dtype = request.compute_dtype
        self.shared = request.HV // request.H
        self.rate = self.bias = None
        if request.use_gate_in_kernel:
            self.rate, self.bias = parameters(request, self.dtype)
            if self.bias is not None and K not in (None, request.K):
                self.bias = torch.nn.functional.pad(self.bias, (0, K - request.K))

    def load_unit(self, x: Tensor, window: Window, into: Tensor, scale: float = 1.0) -> Tensor | None:
        """Rows of q or k times ``scale``; with l2norm they are normalised first, and their inverse norms are returned.

        Returns:
            [Z, C, 1], or None.
        """
        rows = window.lift(x, into, self.shared)
        into = into.view(rows.shape)
        if not self.request.use_qk_l2norm_in_kernel:
            torch.mul(rows, scale, out=into)
            return None
        # The first pass over the caller's memory goes through it in order, which is twice as fast.
        inverse = inverse_norm(rows.transpose(-3, -2)).transpose(-3, -2) if rows.dim() > 3 else inverse_norm(rows)
        torch.mul(rows, inverse * scale, out=into)
        return inverse.reshape(*window.shape, 1)

    def read(self, x: Tensor, window: Window | TokenWindow, scratch: Tensor, shared: int = 1) -> Tensor:
        """Rows of ``x``, read-only: a view of the caller's memory if its layout is that of ``scratch``, else a copy."""
        own = window.view(x, self.dtype, shared)
        return window.load(x, scratch, shared=shared) if own is None else own

    def load_units(self, window: Window | TokenWindow, workspace: Workspace, kq: Tensor) -> tuple[Tensor, ...]:
        """Rows of k' and q', side by side in ``kq`` [..., 2, K]; returns both halves."""
        request = self.request
        into_k, into_q = kq.unbind(-2)
        k = self.read(request.k, window, into_k, self.shared)
        q = self.read(request.q, window, into_q, self.shared)
        if not request.use_qk_l2norm_in_kernel:
            if k is not into_k:
                into_k.copy_(k)
            torch.mul(q, request.scale, out=into_q)
            return into_k, into_q
        inverses = workspace("inverses", 2, *window.shape, 1)
        of_k, of_q = inverses.unbind(0)
        torch.linalg.vector_norm(k, dim=-1, keepdim=True, out=of_k)
        torch.linalg.vector_norm(q, dim=-1, keepdim=True, out=of_q)
        epsilon, factors = norm_constants(request.scale, self.dtype, inverses.dim())
        torch.addcmul(epsilon, inverses, inverses, out=inverses).rsqrt_().mul_(factors)
        torch.mul(k, of_k, out=into_k)
        torch.mul(q, of_q, out=into_q)
        return into_k, into_q

    def load_decay(self, window: Window | TokenWindow, into: Tensor, workspace: Workspace) -> Tensor:
        """d = exp(γ); ``into`` is scratch.

        Rounding to the compute dtype changes d by up to half a unit in the last place. A constant γ has the same error
        in every row, and a slow channel would drift. So the last of every _CORRECTED rows that multiply a state one
        after another gets the errors of all of them. expm1(γ) − (d − 1) is the error of d; d − 1 is exact for d ≥ 1/2,
        and faster channels need no correction.
        """
        memory, count = with_slack(into), window.rows // _CORRECTED
        own = None if self.request.use_gate_in_kernel else window.view(self.request.g, self.dtype)
        # The caller's memory has no slack behind it.
        if own is not None and memory.numel() == into.numel():
            return torch.exp(own, out=into)
        log_decay = self.load_log_decay(window, workspace("lost", *into.shape) if count else into)
        if not count:
            memory.exp_()
            return into
        torch.exp(with_slack(log_decay), out=memory)
        lost = with_slack(log_decay).expm1_()[: into.numel()].view(into.shape)
        lost.sub_(into - 1).mul_(into >= 0.5)
        rows, lost = (x[:, : count * _CORRECTED].unflatten(1, (count, _CORRECTED)) for x in (into, lost))
        # Add halves: the order of torch's sum depends on the number of elements.
        while lost.shape[2] > 1:
            half = lost.shape[2] // 2
            lost = lost[:, :, :half].add_(lost[:, :, half:])
        last = rows[:, :, -1]
        last += last * lost[:, :, 0]
        return into

    def load_log_decay(self, window: Window | TokenWindow, into: Tensor, unit: float = 1.0) -> Tensor:
        """γ·``unit``; ``into`` is scratch."""
        window.load(self.request.g, into)
        if self.request.use_gate_in_kernel:
            heads = into.unflatten(0, (window.pairs, -1))
            log_decay(heads, *self._gate_parameters(window), self.request.lower_bound, with_slack(into), unit)
            window.pad(into, 0.0)
        elif unit != 1.0:
            into.mul_(unit)
        return into

    def load_beta(self, window: Window | TokenWindow, workspace: Workspace) -> Tensor:
        """β [..., 1], read-only."""
        logits, scratch = self.request.beta.unsqueeze(-1), workspace("beta", *window.shape, 1)
        if not self.request.use_beta_sigmoid_in_kernel:
            return self.read(logits, window, scratch)
        window.load(logits, scratch)
        with_slack(scratch).sigmoid_()
        if self.request.allow_neg_eigval:
            scratch.mul_(2)
        window.pad(scratch, 0.0)
        return scratch

    def beta_backward(self, window: Window, workspace: Workspace, beta: Tensor, grad: Tensor) -> Tensor:
        """Gradient of the caller's beta, in place on ``grad``."""
        if not self.request.use_beta_sigmoid_in_kernel:
            return grad
        # dβ/dlogit = β·s(−logit), and not β·(1 − s), which loses every digit for large logits.
        slope = window.load(self.request.beta.unsqueeze(-1), workspace("slope of beta", *beta.shape))
        with_slack(slope).neg_().sigmoid_()
        return grad.mul_(beta).mul_(slope)

    def gate_backward(self, window: Window, into: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """From dγ [Z, C, K]: gradient of g, and the summands of dA_log, both [pairs, heads, C, K]."""
        window.pad(grad, 0.0)
        x = window.load(self.request.g, into).unflatten(0, (window.pairs, -1))
        parameters = self._gate_parameters(window)
        return log_decay_backward(x, *parameters, self.request.lower_bound, grad.view_as(x))

    def _gate_parameters(self, window: Window | TokenWindow) -> tuple[Tensor | None, Tensor | None]:
        """Rate and bias of the window's heads, to broadcast against [pairs, heads, ..., K]."""
        rate = None if self.rate is None else self.rate[window.heads]
        bias = None if self.bias is None else self.bias[window.heads]
        if len(window.shape) == 1:
            return rate, bias
        return None if rate is None else rate.unsqueeze(-1), None if bias is None else bias.unsqueeze(1)

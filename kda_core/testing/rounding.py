r"""Samples of rounding errors: the chunk form, with random noise at every place where a kernel rounds.

The kit's budgets come from these samples. A kernel that works in a dtype D on matrix units rounds the
operands of every product to D and accumulates in float32; all else is float32. This module computes
the chunk form in float64, multiplies at every such place by (1 + \delta) with random \delta, and so
yields samples of the error that a right kernel makes. Gradients come from autograd through the same
products: their operands, gradients included, are perturbed in the same way. States pass from chunk to chunk without
noise; the gradient of a chunk's decay, a sum of products of states and their gradients, uses both rounded to q's dtype.

The noise. Round-to-nearest with unit roundoff u makes, on a significand m in [1, 2) that is
log-uniform (Benford), an error that is uniform in +-u / m: its relative rms is u sqrt(E[1 / m^2] / 3) with
E[1 / m^2] = 3 / (8 ln 2). A sum of n products in floating point has, for partial sums that grow like
a random walk, the error u rms sqrt(n / 2) |a * b|_2 (Higham and Mary 2019); when all terms have one
sign, at most u rms sqrt(n / 2) |a . b|. Both are taken, in quadrature.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kda_core import reference
from kda_core.request import Request, chunks_of

RELATIVE_RMS = math.sqrt(3 / (8 * math.log(2)) / 3)  # Root mean square of a rounding error, in unit roundoffs
FUNCTION_ULPS = 2
"""Error of exp, log and 1 / sqrt on accelerators, in units in the last place (two unit roundoffs each)."""

SMALLEST_CHUNK = 32  # Rows of the shortest ``chunk_size``; kernels may use it for any ``chunk_size``
NOISE_POOL = 2**22
"""Random numbers drawn once; each use starts at a random offset, which is far cheaper than new numbers."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


@cache
def _pool(dtype: torch.dtype) -> Tensor:
    """Uniform numbers with the variance of a rounding error of unit roundoff 1."""
    sample = torch.rand(NOISE_POOL, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return (sample - 0.5).mul_(math.sqrt(12) * RELATIVE_RMS)


@dataclass(frozen=True, eq=False)
class Noise:
    """Where and how much to perturb."""

    operand: float  # unit roundoff of the operands of products
    accumulate: float  # unit roundoff of sums, exponentials and elementwise operations
    offsets: random.Random  # chooses the random numbers
    flushed_below: float = 0.0  # an operand of a product counts as zero below this magnitude

    def errors(self, like: Tensor) -> Tensor:
        """Rounding errors of unit roundoff 1, in the shape of ``like``."""
        pool, size = _pool(like.dtype), like.numel()
        if size > NOISE_POOL // 2:
            begin = pool[-self.offsets.randrange(NOISE_POOL) :][:size]
            rounds, rest = divmod(size - len(begin), NOISE_POOL)
            return torch.cat([begin, *[pool] * rounds, pool[:rest]]).view(like.shape)
        start = self.offsets.randrange(NOISE_POOL - size)
        return pool[start : start + size].view(like.shape)

    def relative(self, x: Tensor, unit: float) -> Tensor:
        """x with an error of ``unit``'s rounding."""
        return torch.addcmul(x, x, self.errors(x), value=unit)

    def rounded(self, x: Tensor) -> Tensor:
        """x as an operand of a product."""
        x = self.relative(x, self.operand)
        return x.masked_fill_(x.abs() < self.flushed_below, 0) if self.flushed_below else x

    @property
    def fine(self) -> bool:
        """Whether errors of float32 arithmetic count: beside rounding to half precision they are negligible."""
        return self.operand <= self.accumulate

    def step(self, x: Tensor) -> Tensor:
        """The result of an addition or multiplication, element by element."""
        return _Rounded.apply(x, self.accumulate, self) if self.fine else x

    def function(self, x: Tensor) -> Tensor:
        """The result of an elementary function."""
        return _Rounded.apply(x, 2 * FUNCTION_ULPS * self.accumulate, self) if self.fine else x

    def gate_step(self, x: Tensor) -> Tensor:
        """``step`` inside the gate, whose input and result may be infinite, and then have no error."""
        return torch.where(x.isinf(), x, self.step(x))

    def product(self, a: Tensor, b: Tensor, terms: int = 0) -> Tensor:
        """a @ b of rounded operands; ``terms``: how many a kernel adds, where some that are zero are left out."""
        out = a @ b
        return self._summed(out, a.square() @ b.square(), terms or a.shape[-1]) if self.fine else out

    def inner_product(self, a: Tensor, b: Tensor) -> Tensor:
        """a · b of rounded operands along the last axis, which the result keeps with one element."""
        terms = a * b
        out = terms.sum(-1, keepdim=True)
        return self._summed(out, terms.square().sum(-1, keepdim=True), a.shape[-1]) if self.fine else out

    def _summed(self, out: Tensor, squares: Tensor, terms: int) -> Tensor:
        """A sum with the error of summing so many terms; ``squares`` is the sum of their squares."""
        spread = squares.add_(out.square()).sqrt_()
        return out.addcmul_(spread, self.errors(out), value=self.accumulate * math.sqrt(terms / 2))


class _Rounded(torch.autograd.Function):
    """A value with a rounding error; its gradient gets one too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: float, noise: Noise) -> Tensor:
        ctx.unit, ctx.noise = unit, noise
        return noise.relative(x, unit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.noise.relative(grad, ctx.unit), None, None


class _Product(torch.autograd.Function):
    """A product with rounded operands; the two products of its backward round theirs too.

    ``inner`` and ``rows``: terms of the product, and rows of ``a``, before padding was cut; 0: none was.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, noise: Noise, inner: int = 0, rows: int = 0) -> Tensor:
        a, b = noise.rounded(a), noise.rounded(b)
        ctx.save_for_backward(a, b)
        ctx.noise, ctx.rows = noise, rows
        return noise.product(a, b, inner)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        noise = ctx.noise
        grad = noise.rounded(grad)
        return noise.product(grad, b.mT), noise.product(a.mT, grad, ctx.rows), None, None, None


class _Exp(torch.autograd.Function):
    """exp of a sum of up to ``length`` rounded terms: the error of the sum becomes a relative one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int, noise: Noise) -> Tensor:
        # Every x is a sum of terms <= 0; below -700 the result is 0 in float64 with any error.
        depth = x.clamp_min(-700).abs().mul_(math.sqrt(length / 2)).add_(2 * FUNCTION_ULPS)
        y = x.exp()
        y = torch.addcmul(y, y, depth.mul_(noise.errors(x)), value=noise.accumulate)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.saved_tensors[0], None, None


class _Through(torch.autograd.Function):
    """A chunk's decay times the state before it, without rounding; the decay's gradient is a sum of products.

    Kernels store states and their gradients between chunks in the dtype of q and multiply the stored values. A
    sequence of one chunk stores neither: both ends are the caller's tensors.
    """

    @staticmethod
    def forward(ctx: Any, decay: Tensor, state: Tensor, kept: Tensor, noise: Noise) -> Tensor:
        ctx.save_for_backward(decay, state, kept)
        ctx.noise = noise
        return decay * state

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        decay, state, kept = ctx.saved_tensors
        noise = ctx.noise
        left, right = (torch.where(kept, noise.relative(x, noise.operand), x) for x in (state, grad))
        return noise.inner_product(left, right), decay * grad, None, None


class _L2Norm(torch.autograd.Function):
    """x / sqrt(sum x^2 + eps), stored rounded; its gradient dy - y (y . dy) cancels along x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Noise) -> Tensor:
        ulps = 2 * FUNCTION_ULPS * noise.accumulate
        rate = noise.relative((x.square().sum(-1, keepdim=True) + reference.L2NORM_EPS).rsqrt(), ulps)
        y = noise.relative(x * rate, noise.operand)
        ctx.save_for_backward(y, rate)
        ctx.noise = noise
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, rate = ctx.saved_tensors
        noise = ctx.noise
        along = noise.relative((y * grad).sum(-1, keepdim=True), noise.accumulate * math.sqrt(y.shape[-1] / 2))
        return rate * (grad - noise.relative(y * along, noise.accumulate)), None


def _sum_after(x: Tensor) -> Tensor:
    """The sum of all rows behind each."""
    after = x.flip(-2).cumsum(-2).flip(-2)
    return torch.cat([after[..., 1:, :], torch.zeros_like(after[..., :1, :])], -2)


def _pairs(left: Tensor, right: Tensor, log_decay: Tensor, noise: Noise) -> Tensor:
    """[..., C, C] lower triangle of sum_c left_rc right_sc exp(sum of log_decay_c over rows s+1 .. r).

    ``left`` is [2, ..., C, K] (q and k at once). Halves meet at their boundary, so that no exponent is
    positive and every exponent is a sum over rows of one half.
    """
    length = right.shape[-2]
    if length == 1:
        return _Product.apply(left, right.mT.expand(2, *right.mT.shape), noise)
    half = length // 2
    halves = [t.unflatten(-2, (2, half)) for t in (left, right, log_decay)]
    inner = _pairs(*halves, noise).unbind(-3)
    (_, left), (right, _), (first, second) = (t.unbind(-3) for t in halves)
    reach = left * _Exp.apply(second.cumsum(-2), half, noise)
    source = right * _Exp.apply(_sum_after(first), half, noise)
    across = _Product.apply(reach, source.mT.expand(2, *source.mT.shape), noise)
    zero = torch.zeros_like(across)
    return torch.cat([torch.cat([inner[0], zero], -1), torch.cat([across, inner[1]], -1)], -2)


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, kept: Tensor, noise: Noise, C: int
) -> tuple[Tensor, list[Tensor]]:
    """The chunk form over [..., NT, rows, .]: o (without the scale) and the NT + 1 states at chunk starts and end.

    ``kept`` as in ``_Through``. ``C``: rows of a kernel's chunk, some of which may be left out as padding.
    """
    step = noise.step
    into = _Exp.apply(log_decay.cumsum(-2), C, noise)
    qk, kk = _pairs(torch.stack([q, k]), k, log_decay, noise)
    L = step((beta * kk).tril(-1))
    eye = torch.eye(q.shape[-2], dtype=L.dtype, device=L.device)
    A = torch.linalg.solve_triangular(L + eye, eye.expand_as(L), upper=False)
    u = _Rounded.apply(_Product.apply(A, step(beta * v), noise, C, C), noise.operand, noise)
    w = _Product.apply(A, step(step(beta * k) * into), noise, C, C)
    q_in, k_out, through = step(q * into), step(k * _Exp.apply(_sum_after(log_decay), C, noise)), into[..., -1, :, None]
    # A state sums C rank-one updates in float32, in any order.
    state_unit = noise.accumulate * math.sqrt(C)
    outputs, states = [], [state]
    chunks = (x.unbind(-3) for x in (u, w, q_in, qk, k_out, through))
    for u_i, w_i, q_i, qk_i, k_i, through_i in zip(*chunks, strict=True):
        v_new = step(u_i - _Product.apply(w_i, state, noise, 0, C))
        o = _Product.apply(q_i, state, noise, 0, C) + _Product.apply(qk_i, v_new, noise, C, C)
        outputs.append(step(o))
        state = step(_Through.apply(through_i, state, kept, noise)) + _Product.apply(k_i.mT, v_new, noise, C)
        state = _Rounded.apply(state, state_unit, noise)
        states.append(state)
    return torch.stack(outputs, -3), states


def _initial_state(r: Request) -> Tensor:
    """The initial states [N, HV, K, V]."""
    state = r.v.new_zeros(r.state_shape) if r.initial_state is None else r.initial_state
    return state.mT if r.state_v_first else state


def sample(r: Request, noise: Noise, samples: int, grads: dict[str, Tensor], rounded: dict[str, float]):
    """Samples of every result of a request, perturbed as a kernel's rounding would: by name, along a leading axis.

    Args:
        r: the request with float64 tensors on the CPU (``in_float64``), without a pool.
        grads: gradients of "o" and "final_state" (layout of the request), or empty: forward only.
        rounded: unit roundoff of each result when it is stored.
    """
    # float32 arithmetic is accurate enough for the rounding of half types, and twice as fast.
    working = torch.float32 if noise.operand > 64 * unit_roundoff(torch.float32) else torch.float64
    names = [n for n in reference.DIFFERENTIABLE if getattr(r, n) is not None and n != "initial_state"]
    x = {n: getattr(r, n) for n in names} | {"initial_state": _initial_state(r)}
    x = {n: t.expand(samples, *t.shape).to(working, copy=True) for n, t in x.items()}
    if grads:
        x = {n: t.requires_grad_() for n, t in x.items()}
    with torch.set_grad_enabled(bool(grads)):
        o, states = _forward(r, x, noise)
        counts = [-(-(e - s) // r.chunk_size) for _, s, e in reference.sequence_bounds(r)]
        last = [states[count][:, n] for n, count in enumerate(counts)]
        final = torch.stack(last, 1) if last else states[0]
        at_chunks = [states[i][:, n] for n, count in enumerate(counts) for i in range(count)]
        # Sequences without tokens have no chunk.
        h = torch.stack(at_chunks, 1) if at_chunks else states[0][:, :0]
        h = h.reshape(samples, r.B, chunks_of(r), *h.shape[2:])
        if r.state_v_first:
            final, h = final.mT, h.mT
        results = {"o": o, "final_state": final}
        found: tuple = ()
        if grads:
            outputs = [results[n] for n in grads]
            cotangents = [g.to(working).expand(samples, *g.shape) for g in grads.values()]
            found = torch.autograd.grad(outputs, list(x.values()), cotangents, allow_unused=True)
    results["h"] = h
    for n, grad in zip(x, found, strict=bool(found)):
        grad = torch.zeros_like(x[n]) if grad is None else grad
        results[f"d{n}"] = grad.mT if n == "initial_state" and r.state_v_first else grad
    return {n: noise.relative(t.detach(), rounded.get(n, noise.accumulate)) for n, t in results.items()}


def _power_of_2(n: int) -> int:
    """The least power of 2 from n on; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def _forward(r: Request, x: dict[str, Tensor], noise: Noise) -> tuple[Tensor, list[Tensor]]:
    """o [S, B, T, HV, V] and the list of the states [S, N, HV, K, V] at every chunk."""
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    if r.use_qk_l2norm_in_kernel:
        q, k = (_L2Norm.apply(t, noise) for t in (q, k))
    if r.use_gate_in_kernel:
        g = _gate(r, g, x.get("A_log"), x.get("dt_bias"), noise)
        g = torch.where(g.isinf(), g, noise.function(g))
    if r.use_beta_sigmoid_in_kernel:
        beta = noise.function(reference.sigmoid(beta) * (2.0 if r.allow_neg_eigval else 1.0))
    q, k = (t.repeat_interleave(r.HV // r.H, dim=3) for t in (q, k))
    bounds = reference.sequence_bounds(r)
    longest = max((e - s for _, s, e in bounds), default=0)
    C = min(r.chunk_size, _power_of_2(longest))

    def rows(t: Tensor, start: int, length: int, C: int) -> Tensor:
        """Rows of [S, B, T, HV, D] as [S, N, HV, NT, C, D], short sequences padded."""
        cut = [t[:, b, min(s + start, e) : min(s + start + length, e)] for b, s, e in bounds]
        cut = [F.pad(t, (0, 0, 0, 0, 0, length - t.shape[1])) for t in cut]
        return torch.stack(cut, 1).unflatten(2, (-1, C)).movedim(4, 2)

    states = [x["initial_state"]]
    if longest == 0:
        return 0 * v, states
    kept = torch.tensor([e - s > SMALLEST_CHUNK for _, s, e in bounds]).view(-1, 1, 1, 1)
    # The padding behind a few tokens is cut: it costs much and changes nothing.
    whole = longest // C * C
    last = _power_of_2(longest - whole)
    pieces = []
    for start, length, rows_of_chunk in ((0, whole, C), (whole, last, last)):
        if length:
            tensors = (rows(t, start, length, rows_of_chunk) for t in (q, k, v, g, beta[..., None]))
            o_rows, more = _recurrence(*tensors, states[-1], kept, noise, C)
            pieces.append(o_rows.movedim(2, 4).flatten(2, 3))
            states += more[1:]
    o_rows = noise.step(r.scale * torch.cat(pieces, 2))
    o = torch.zeros_like(v)
    for n, (b, s, e) in enumerate(bounds):
        o[:, b, s:e] = o_rows[:, n, : e - s]
    return o, states


def _gate(r: Request, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, noise: Noise) -> Tensor:
    """The gate with a leading axis of samples on every argument."""
    g = g if dt_bias is None else noise.gate_step(g + dt_bias[:, None, None])
    rate = 1.0 if A_log is None else noise.function(A_log.exp())[:, None, None, :, None]
    if r.lower_bound is None:
        return -rate * torch.logaddexp(g, torch.zeros_like(g))
    return r.lower_bound * reference.sigmoid(noise.gate_step(rate * g))


def in_float64(r: Request) -> Request:
    """The request with float64 copies of its floating tensors, all on the CPU, and results in float64."""
    changes: dict[str, Any] = {"intermediate_states_dtype": None}
    for name, value in vars(r).items():
        if isinstance(value, Tensor):
            copy = value.detach().to("cpu", copy=True)
            changes[name] = copy.double() if copy.is_floating_point() else copy
    return replace(r, **changes)

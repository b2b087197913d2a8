"""Deliberately wrong backends, made from the CPU one; the conformance kit must find each (test_mutants.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda_core import reference
from kda_core._plugins import registry
from kda_core.capabilities import Available, BackendInfo, Unavailable
from kda_core.hookspecs import hookimpl
from kda_core.request import (
    AnyRequest,
    BackwardResult,
    CommitRequest,
    ForwardResult,
    GateRequest,
    Request,
    TensorSpec,
)


class Mutant:
    """The CPU backend with a fault in one of the methods that subclasses override; the docstring says which."""

    slow = False
    """Only tests of the slow tier find it, for their memory."""

    def __init__(self) -> None:
        self.cpu = registry.named("cpu").plugin
        words = "".join(f" {c.lower()}" if c.isupper() else c for c in type(self).__name__)
        self.name = words.strip().replace(" ", "-").replace("_", "-")

    def asked(self, r: Request) -> Request:
        """The request that reaches the CPU backend, forward and backward."""
        return r

    def differentiated(self, r: Request) -> Request:
        """The request that reaches the CPU backend's backward."""
        return self.asked(r)

    def compute(self, r: Request) -> ForwardResult:
        """The forward."""
        hook = self.cpu.kda_core_chunk_forward if r.op == "chunk_kda" else self.cpu.kda_core_recurrent_forward
        return hook(request=r)

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        """The forward's result, changed."""
        return result

    def committed(self, r: CommitRequest) -> CommitRequest:
        """The request that reaches the CPU backend's commit."""
        return r

    def gradients(self, r: Request, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients, changed."""
        return grads

    @hookimpl
    def kda_core_backend(self) -> BackendInfo:
        return replace(self.cpu.kda_core_backend(), name=self.name, priority=None)

    @hookimpl
    def kda_core_availability(self, device: torch.device) -> Available | Unavailable:
        return self.cpu.kda_core_availability(device=device)

    @hookimpl
    def kda_core_reject(self, request: AnyRequest) -> str | None:
        return None

    @hookimpl
    def kda_core_saved_spec(self, request: Request) -> tuple[TensorSpec, ...]:
        return self.cpu.kda_core_saved_spec(request=request)

    @hookimpl
    def kda_core_chunk_forward(self, request: Request) -> ForwardResult:
        return self.answered(request, self.compute(self.asked(request)))

    @hookimpl
    def kda_core_recurrent_forward(self, request: Request) -> ForwardResult:
        return self.answered(request, self.compute(self.asked(request)))

    @hookimpl
    def kda_core_commit(self, request: CommitRequest) -> Tensor:
        self.cpu.kda_core_commit(request=self.committed(request))
        return request.pool

    @hookimpl
    def kda_core_chunk_backward(self, request: Request) -> BackwardResult:
        result = self.cpu.kda_core_chunk_backward(request=self.differentiated(request))
        return BackwardResult(self.gradients(request, dict(result.grads)))

    @hookimpl
    def kda_core_recurrent_backward(self, request: Request) -> BackwardResult:
        result = self.cpu.kda_core_recurrent_backward(request=self.differentiated(request))
        return BackwardResult(self.gradients(request, dict(result.grads)))

    @hookimpl
    def kda_core_gate_forward(self, request: GateRequest) -> Tensor:
        return self.cpu.kda_core_gate_forward(request=request)

    @hookimpl
    def kda_core_gate_backward(self, request: GateRequest) -> BackwardResult:
        return self.cpu.kda_core_gate_backward(request=request)


def _fault_in(method: str) -> Callable[[Callable[..., Any]], type[Mutant]]:
    """A decorator that makes a mutant of its method; one that returns None changes its last argument or nothing."""

    def mutant(function: Callable[..., Any]) -> type[Mutant]:
        def changed(self: Mutant, *given: Any) -> Any:
            found = function(*given)
            return given[-1] if found is None else found

        return type(function.__name__, (Mutant,), {method: changed, "__doc__": function.__doc__})

    return mutant


asked, differentiated, answered, committed, gradients = map(
    _fault_in, ("asked", "differentiated", "answered", "committed", "gradients")
)


class Faultless(Mutant):
    """No fault: the control, which must pass."""


class WrongRecurrence(Mutant):
    """A forward by the token recurrence with one term changed."""

    abstract = True

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor):
        """The output and the next state of one token."""
        raise NotImplementedError

    def compute(self, r: Request) -> ForwardResult:
        if r.save_for_backward:
            return super().compute(r)
        return reference.forward(r, self._recurrence)

    def _recurrence(self, q, k, v, log_decay, beta, state, parents=None):
        outputs, states = [], [state]
        for t in range(q.shape[1]):
            columns = (q[:, t, ..., None], k[:, t, ..., None], v[:, t, ..., None, :])
            decay, rate = log_decay[:, t].exp()[..., None], beta[:, t][..., None, None]
            o, state = self.step(reference._before(states, t, parents), *columns, decay, rate)
            outputs.append(o)
            states.append(state)
        return (torch.stack(outputs, 1) if outputs else v[:, :0]), states


class DecayAfterTheUpdate(WrongRecurrence):
    """The state decays after the update rather than before it."""

    def step(self, state, q, k, v, decay, beta):
        state = decay * (state + k * beta * (v - (k * state).sum(-2, keepdim=True)))
        return (q * state).sum(-2), state


class OutputBeforeTheUpdate(WrongRecurrence):
    """The output reads the state without the token's own update."""

    def step(self, state, q, k, v, decay, beta):
        decayed = decay * state
        o = (q * decayed).sum(-2)
        return o, decayed + k * beta * (v - (k * decayed).sum(-2, keepdim=True))


class NoDeltaRule(WrongRecurrence):
    """Plain gated linear attention: nothing is taken out of the state."""

    def step(self, state, q, k, v, decay, beta):
        state = decay * state + k * beta * v
        return (q * state).sum(-2), state


class DeltaOfTheOldState(WrongRecurrence):
    """The error term reads the state before its decay."""

    def step(self, state, q, k, v, decay, beta):
        state_new = decay * state + k * beta * (v - (k * state).sum(-2, keepdim=True))
        return (q * state_new).sum(-2), state_new


@asked
def dropped_decay(r):
    """The first decay of every chunk is lost."""
    if r.use_gate_in_kernel:
        return r
    g = r.g.clone()
    g[:, :: r.chunk_size] = 0
    return replace(r, g=g)


class NaiveDecay(Mutant):
    """exp(-cumulative decay) overflows in float32: NaN where a chunk's decays sum up to less than -88."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if not r.use_gate_in_kernel and r.op == "chunk_kda" and r.T:
            within = r.g.float()[:, :64].cumsum(1)
            if within.amin() < -math.log(torch.finfo(torch.float32).max):
                result.o.fill_(math.nan)
        return result


@asked
def clamped_decay(r):
    """Decays below -5 are taken for -5."""
    return r if r.use_gate_in_kernel else replace(r, g=r.g.clamp_min(-5))


class TransposedState(Mutant):
    """A square final state comes out V first."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if result.final_state is None or r.K != r.V:
            return result
        return replace(result, final_state=result.final_state.mT.contiguous())


@asked
def layout_ignored(r):
    """state_v_first is ignored where K = V lets it."""
    return replace(r, state_v_first=False) if r.K == r.V else r


@asked
def wrong_head(r):
    """Value head i reads query/key head i modulo H."""
    if r.H == r.HV or r.save_for_backward:
        return r
    heads = torch.arange(r.HV) % r.H
    return replace(r, q=r.q[:, :, heads], k=r.k[:, :, heads])


@asked
def negative_eigenvalues_ignored(r):
    """allow_neg_eigval is accepted and ignored."""
    return replace(r, allow_neg_eigval=False)


class ScaleIgnored(Mutant):
    """scale is accepted and ignored."""

    def asked(self, r: Request) -> Request:
        return replace(r, scale=r.K**-0.5)


@asked
def bound_ignored(r):
    """lower_bound is accepted; -5 is used."""
    return r if r.lower_bound is None else replace(r, lower_bound=-5.0)


@asked
def nan_rate_lost(r):
    """A NaN in A_log becomes the largest rate, as of a minimum that takes the other number."""
    return r if r.A_log is None else replace(r, A_log=r.A_log.nan_to_num(nan=70.0))


@gradients
def nan_gradient_lost(r, grads):
    """A NaN in the decays' gradients becomes 0, as of a maximum that takes the other number."""
    return grads | {n: grads[n].nan_to_num(nan=0.0) for n in ("g", "A_log", "dt_bias") if n in grads}


@asked
def bias_ignored_by_the_bounded_gate(r):
    """The lower-bound gate leaves dt_bias out."""
    if r.lower_bound is None or r.save_for_backward:
        return r
    return replace(r, dt_bias=None)


class NormIgnoredByDecoding(Mutant):
    """fused_recurrent_kda accepts use_qk_l2norm_in_kernel and ignores it."""

    def asked(self, r: Request) -> Request:
        return replace(r, use_qk_l2norm_in_kernel=False) if r.op == "fused_recurrent_kda" else r


@asked
def chunk_size_ignored(r):
    """Intermediate states come every 64 tokens whatever chunk_size says."""
    return replace(r, chunk_size=64)


class LeakedNeighbour(Mutant):
    """A packed sequence starts from its neighbour's final state."""

    def compute(self, r: Request) -> ForwardResult:
        if r.cu_seqlens is None or r.N < 2 or r.save_for_backward or r.inplace_final_state:
            return super().compute(r)
        final = super().compute(replace(r, output_final_state=True, out=None)).final_state
        leaked = torch.cat([torch.zeros_like(final[:1]), final[:-1]])
        state = leaked if r.initial_state is None else (r.initial_state + leaked).to(r.initial_state.dtype)
        return super().compute(replace(r, initial_state=state))


@gradients
def leaked_gradient(r, grads):
    """The gradient of a packed sequence's v leaks into the token before it."""
    if r.cu_seqlens is not None and "v" in grads:
        for start in r.cu_seqlens[1:-1].tolist():
            if 0 < start < r.T:
                grads["v"][:, start - 1] += 0.1 * grads["v"][:, start]


@answered
def tail_unwritten(r, result):
    """Rows of the last, partial chunk are left as they were."""
    if r.op == "chunk_kda" and r.cu_seqlens is None and r.T > r.chunk_size:
        result.o[:, r.T // r.chunk_size * r.chunk_size :] = 0


class PaddingUnwritten(Mutant):
    """Rows that belong to no sequence keep what the buffer held."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if r.cu_seqlens is not None and r.out is not None:
            result.o[:, int(r.cu_seqlens[-1]) :] = math.nan
        return result


class StateOfTheChunkBefore(Mutant):
    """The final state lacks the last, partial chunk."""

    def compute(self, r: Request) -> ForwardResult:
        result = super().compute(r)
        whole = r.T // r.chunk_size * r.chunk_size
        if r.cu_seqlens is not None or result.final_state is None or whole in (0, r.T) or r.save_for_backward:
            return result
        tokens = {n: getattr(r, n)[:, :whole] for n in ("q", "k", "v", "g", "beta")}
        return replace(result, final_state=super().compute(replace(r, out=None, **tokens)).final_state)


@answered
def intermediate_states_off_by_one(r, result):
    """h holds the states at the ends of the chunks."""
    return result if result.h is None else replace(result, h=result.h.roll(-1, 1))


class Bfloat16Accumulation(Mutant):
    """The state is rounded to bfloat16 every 16 tokens."""

    def compute(self, r: Request) -> ForwardResult:
        if (
            r.cu_seqlens is not None
            or r.T <= 16
            or r.save_for_backward
            or r.return_intermediate_states
            or r.out is not None
        ):
            return super().compute(r)
        outputs, state = [], r.initial_state
        for start in range(0, r.T, 16):
            tokens = {n: getattr(r, n)[:, start : start + 16] for n in ("q", "k", "v", "g", "beta")}
            result = super().compute(replace(r, initial_state=state, output_final_state=True, **tokens))
            state = result.final_state.bfloat16().to(result.final_state.dtype)
            outputs.append(result.o)
        return ForwardResult(torch.cat(outputs, 1), state if r.output_final_state else None)


@asked
def short_products(r):
    """float32 inputs are cut to the ten bits of a short product, without declared slack."""
    if r.q.dtype != torch.float32:
        return r
    return replace(r, **{n: _cut(getattr(r, n)) for n in ("q", "k", "v")})


def _cut(t: Tensor) -> Tensor:
    return (t.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32).view(t.shape)


@asked
def rounded_beta(r):
    """Decoding rounds beta to bfloat16."""
    if r.op == "chunk_kda":
        return r
    return replace(r, beta=r.beta.bfloat16().to(r.beta.dtype))


class OneWrongRow(Mutant):
    """One row past the first chunk is off by a tenth."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if r.T > r.chunk_size:
            result.o[:, r.chunk_size, 0] *= 1.1
        return result


@answered
def non_deterministic_sum(r, result):
    """The last bits of the output depend on the order of a sum."""
    return replace(result, o=result.o.mul_(1 + 1e-7 * torch.randn(result.o.shape)))


@gradients
def non_deterministic_gradient(r, grads):
    """The last bits of dk depend on the order of a sum."""
    if "k" in grads:
        grads["k"] *= 1 + 1e-7 * torch.randn(grads["k"].shape)


@gradients
def beta_missing_in_the_backward(r, grads):
    """dv lacks the factor beta."""
    if "v" in grads and not r.use_beta_sigmoid_in_kernel:
        grads["v"] /= r.beta[..., None].to(grads["v"].dtype).clamp_min(1e-3)


@gradients
def sigmoid_missing_in_the_backward(r, grads):
    """dbeta is the gradient of the sigmoid's result."""
    if "beta" in grads and r.use_beta_sigmoid_in_kernel:
        p = torch.sigmoid(r.beta)
        grads["beta"] /= p * (1 - p)


@gradients
def bias_gradient_of_the_wrong_head(r, grads):
    """ddt_bias is summed over the wrong axis: every head gets the mean."""
    if "dt_bias" in grads:
        grads["dt_bias"] = grads["dt_bias"].mean(0, keepdim=True).expand_as(grads["dt_bias"]).contiguous()


@gradients
def state_gradient_undecayed(r, grads):
    """The gradient of the initial state lacks the first token's decay."""
    if "initial_state" in grads and r.T and not r.use_gate_in_kernel and r.cu_seqlens is None:
        decay = r.g[:, 0].float().exp().clamp_min(1e-3)
        grads["initial_state"] /= decay[..., None, :] if r.state_v_first else decay[..., None]


class GroupedGradientOfOneHead(Mutant):
    """dq of a group is that of its first value head alone, scaled."""

    def gradients(self, r: Request, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        if "q" in grads and r.HV != r.H:
            grads["q"] *= r.H / r.HV
        return grads


class InputModified(Mutant):
    """v is overwritten by what is computed of it."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if r.op == "chunk_kda" and not r.save_for_backward:
            r.v.mul_(0.5)
        return result


@answered
def read_past_the_end(r, result):
    """Memory behind g is read and multiplied by zero."""
    if r.K & (r.K - 1) and r.op == "chunk_kda" and r.g.is_contiguous():
        behind = r.g.as_strided((1,), (1,), r.g.storage_offset() + r.g.numel())
        result.o.add_((0 * behind).to(result.o.dtype))


@asked
def strides_ignored(r):
    """q is read as though it were contiguous."""
    if r.q.is_contiguous() or r.save_for_backward:
        return r
    contiguous = torch.empty(r.q.shape).stride()
    return replace(r, q=r.q.as_strided(r.q.shape, contiguous, r.q.storage_offset()))


class BackwardLeftToAutograd(Mutant):
    """Gradients of what autograd has recorded in the hook: in a compiled graph it records nothing."""

    @hookimpl
    def kda_core_chunk_backward(self, request: Request) -> BackwardResult:
        with torch.enable_grad():
            return reference.backward(request)


class EverythingRejected(Mutant):
    """Declares everything and turns every packed call down."""

    @hookimpl
    def kda_core_reject(self, request: AnyRequest) -> str | None:
        return "not today" if isinstance(request, Request) and request.cu_seqlens is not None else None


class WrongDtype(Mutant):
    """A bfloat16 state comes back in float32."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        return result if result.final_state is None else replace(result, final_state=result.final_state.float())

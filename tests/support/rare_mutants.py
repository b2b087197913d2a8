"""Deliberately wrong backends whose faults need a rare call: an option, a length or a subset that few callers use."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec

import torch
from mutants import Mutant, answered, asked, differentiated, gradients
from torch import Tensor

from kda_core import reference
from kda_core.hookspecs import hookimpl
from kda_core.request import BackwardResult, ForwardResult, GateRequest, Request


@asked
def absolute_scale(r):
    """A negative scale loses its sign."""
    return replace(r, scale=abs(r.scale))


@asked
def bound_without_a_promise(r):
    """Given decays keep to lower_bound without safe_gate, too."""
    if r.use_gate_in_kernel or r.lower_bound is None or r.safe_gate:
        return r
    return replace(r, g=r.g.clamp(min=r.lower_bound))


class GroupsOfFourAtMost(Mutant):
    """With HV > 4 H, dq and dk add up the first four heads of each group."""

    def gradients(self, r: Request, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        group = r.HV // r.H
        if group <= 4:
            return grads
        kept = torch.arange(r.HV) % group < 4
        o, state = (
            t if t is None else t * kept.view(shape).to(t.dtype)
            for t, shape in ((r.grad_o, (-1, 1)), (r.grad_final_state, (-1, 1, 1)))
        )
        hook = self.cpu.kda_core_chunk_backward if r.op == "chunk_kda" else self.cpu.kda_core_recurrent_backward
        four = hook(request=replace(r, grad_o=o, grad_final_state=state)).grads
        return grads | {n: four[n] for n in ("q", "k") if n in grads}


@asked
def later_padding_written(r):
    """A positive pad_slot_id is looked for only where a sequence starts; at later drafts its slot is written."""
    indices = r.ssm_state_indices
    if indices is None or indices.dim() == 1 or r.pad_slot_id < 0:
        return r
    first = torch.zeros(r.N, dtype=torch.long) if r.num_accepted_tokens is None else r.num_accepted_tokens.long() - 1
    start = indices.gather(1, first[:, None])
    return replace(r, pad_slot_id=-1, ssm_state_indices=torch.where(start == r.pad_slot_id, -1, indices))


class PackingKeptByShape(Mutant):
    """The boundaries of the first packed call of its shapes serve all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[object, Tensor] = {}

    def asked(self, r: Request) -> Request:
        if r.cu_seqlens is None:
            return r
        key = (r.op, r.q.shape, r.v.shape, r.cu_seqlens.shape)
        cuts = self.kept.setdefault(key, r.cu_seqlens.clone()).to(r.cu_seqlens.dtype)
        return replace(r, cu_seqlens=cuts, cu_seqlens_cpu=None)


class ScaleKeptByShape(Mutant):
    """The scale of the first call of its shapes serves all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[object, float] = {}

    def asked(self, r: Request) -> Request:
        return replace(r, scale=self.kept.setdefault((r.op, r.q.shape, r.v.shape, r.q.dtype), r.scale))


class FinalStateKeptByShape(Mutant):
    """Every call of the same shapes returns its final state in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[object, Tensor] = {}

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        state = result.final_state
        if state is None or r.save_for_backward:
            return result
        kept = self.kept.setdefault((r.op, state.shape, state.dtype), state)
        return replace(result, final_state=kept if kept is state else kept.copy_(state))


class BetaAloneHasNoGradient(Mutant):
    """dbeta is zero where nothing else needs a gradient."""

    alone = frozenset({"beta"})

    def gradients(self, r: Request, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: torch.zeros_like(t) for n, t in grads.items()} if r.needs_grad == self.alone else grads


class RateAloneHasNoGradient(BetaAloneHasNoGradient):
    """dA_log is zero where nothing else needs a gradient."""

    alone = frozenset({"A_log"})


class StateAloneHasNoGradient(BetaAloneHasNoGradient):
    """The gradient of the initial state is zero where nothing else needs one."""

    alone = frozenset({"initial_state"})


@gradients
def gate_gradients_need_that_of_g(r, grads):
    """dA_log and ddt_bias are zero where g needs no gradient."""
    if "g" in r.needs_grad:
        return grads
    return {n: torch.zeros_like(t) if n in ("A_log", "dt_bias") else t for n, t in grads.items()}


@gradients
def key_gradient_needs_that_of_q(r, grads):
    """dk lacks a share where q needs no gradient."""
    return {n: t / 2 if n == "k" and "q" not in r.needs_grad else t for n, t in grads.items()}


class BiasGradientNeedsThatOfA(Mutant):
    """kda_gate's ddt_bias is zero where A_log is given and needs no gradient."""

    @hookimpl
    def kda_core_gate_backward(self, request: GateRequest) -> BackwardResult:
        grads = dict(self.cpu.kda_core_gate_backward(request=request).grads)
        if request.A_log is not None and "A_log" not in request.needs_grad and "dt_bias" in grads:
            grads["dt_bias"].zero_()
        return BackwardResult(grads)


@answered
def sixty_four_chunks_at_most(r, result):
    """States are passed on over 64 chunks; the 65th begins with the state of the first."""
    for b, start, end in reference.sequence_bounds(r):
        if r.op == "chunk_kda" and end - start > 64 * 64:
            result.o[b, start + 64 * 64 : end] *= 0.5


@gradients
def gradients_of_sixty_four_chunks_at_most(r, grads):
    """dk is wrong beyond the 64th chunk."""
    for b, start, end in reference.sequence_bounds(r):
        if r.op == "chunk_kda" and end - start > 64 * 64 and "k" in grads:
            grads["k"][b, start + 64 * 64 : end] *= 0.5


@answered
def prompt_of_one_thousand_at_most(r, result):
    """fused_recurrent_kda is wrong beyond 1,024 tokens."""
    for b, start, end in reference.sequence_bounds(r):
        if r.op == "fused_recurrent_kda" and end - start > 1024:
            result.o[b, start + 1024 : end] *= 0.5


@answered
def empty_sequence_between_others(r, result):
    """An empty sequence between two others has a final state of zero."""
    if r.cu_seqlens is not None and result.final_state is not None:
        lengths = r.cu_seqlens.diff().tolist()
        for n in range(1, len(lengths) - 1):
            if not lengths[n] and lengths[n - 1] and lengths[n + 1]:
                result.final_state[n] = 0


@asked
def states_counted_without_empty_sequences(r):
    """The sequence behind an empty one in the middle starts from the empty one's state."""
    state = r.initial_state
    if r.cu_seqlens is None or state is None or r.inplace_final_state:
        return r
    rows = torch.arange(r.N)
    lengths = r.cu_seqlens.diff()
    for n in range(1, r.N - 1):
        if lengths[n] == 0 and lengths[n - 1] > 0 and lengths[n + 1] > 0:
            rows[n + 1] = n
    return replace(r, initial_state=state[rows])


@asked
def second_sequence_starts_like_the_first(r):
    """With more than four packed sequences, the second reads the first's initial state."""
    if r.cu_seqlens is None or r.initial_state is None or r.inplace_final_state or r.N <= 4:
        return r
    return replace(r, initial_state=r.initial_state[torch.tensor([0, 0, *range(2, r.N)])])


@answered
def last_chunk_of_one_token(r, result):
    """The last token's output is off where it is a chunk of its own behind others."""
    for b, start, end in reference.sequence_bounds(r):
        if r.op == "chunk_kda" and end - start > 1 and (end - start) % 64 == 1:
            result.o[b, end - 1] *= 0.9


@gradients
def gradient_of_a_last_chunk_of_one_token(r, grads):
    """dg of the last token is zero where it is a chunk of its own behind others."""
    for b, start, end in reference.sequence_bounds(r):
        if r.op == "chunk_kda" and end - start > 1 and (end - start) % 64 == 1 and "g" in grads:
            grads["g"][b, end - 1] = 0


class BiasGradientOfTheWrongGroup(Mutant):
    """ddt_bias of value head i of H groups is counted heads first."""

    names = ("dt_bias",)

    def gradients(self, r: Request, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        order = torch.arange(r.HV).view(r.H, -1).T.reshape(-1)
        return {n: t[order] if n in self.names else t for n, t in grads.items()}


class RateGradientOfTheWrongGroup(BiasGradientOfTheWrongGroup):
    """dA_log of value head i of H groups is counted heads first."""

    names = ("A_log",)


@differentiated
def bound_ignored_in_the_backward(r):
    """The backward takes -5 for any lower_bound."""
    return r if r.lower_bound is None else replace(r, lower_bound=-5.0)


class GateBoundIgnoredInTheBackward(Mutant):
    """kda_gate's backward takes -5 for any lower_bound."""

    @hookimpl
    def kda_core_gate_backward(self, request: GateRequest) -> BackwardResult:
        bound = None if request.lower_bound is None else -5.0
        return self.cpu.kda_core_gate_backward(request=replace(request, lower_bound=bound))


class SkippedRowsUnwritten(Mutant):
    """A row that a pool skips keeps what out held."""

    def compute(self, r: Request) -> ForwardResult:
        before = None if r.out is None else r.out.clone()
        result = super().compute(r)
        indices = r.ssm_state_indices
        if before is not None and indices is not None:
            first = indices if indices.dim() == 1 else indices[:, 0]
            for n, (b, start, end) in enumerate(reference.sequence_bounds(r)):
                if first[n] < 0:
                    result.o[b, start:end] = before[b, start:end]
        return result


class OffsetsOfThirtyOneBits(Mutant):
    """An argument whose last element lies beyond 2^31 elements from its first is read as zero there."""

    slow = True

    def asked(self, r: Request) -> Request:
        def wrapped(t: Tensor) -> Tensor:
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            return torch.zeros_like(t) if last >= 2**31 else t

        return replace(r, **{n: wrapped(getattr(r, n)) for n in ("q", "k", "v", "g", "beta")})


class SlotOffsetsOfThirtyOneBits(Mutant):
    """A pool of more than 2^31 elements wraps: the last slot is not advanced."""

    slow = True

    def asked(self, r: Request) -> Request:
        pool = r.initial_state
        if not r.inplace_final_state or not len(pool) or (len(pool) - 1) * pool.stride(0) < 2**31:
            return r
        return replace(r, initial_state=pool.clone())


class GridOfSixteenBits(Mutant):
    """More than 65,535 heads of sequences: those behind are not computed."""

    slow = True

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if r.B * r.HV > 65_535:
            result.o.view(r.B, r.T, -1)[-1] = 0
        return result


class DecayRoundedToTheDtypeOfQ(Mutant):
    """chunk_kda rounds a float32 g to the dtype of q."""

    names = ("g",)

    def asked(self, r: Request) -> Request:
        if r.op != "chunk_kda":
            return r
        return replace(r, **{n: t.to(r.q.dtype) for n in self.names if (t := getattr(r, n)) is not None})

    def gradients(self, r: Request, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t.to(getattr(r, n).dtype) for n, t in grads.items()}


class RateRoundedToTheDtypeOfQ(DecayRoundedToTheDtypeOfQ):
    """chunk_kda rounds A_log and dt_bias to the dtype of q."""

    names = ("A_log", "dt_bias")


@differentiated
def state_gradient_dropped_by_decoding(r):
    """fused_recurrent_kda's backward leaves the gradient of the final state out."""
    return replace(r, grad_final_state=None) if r.op == "fused_recurrent_kda" else r


@gradients
def state_gradient_alone_is_zero(r, grads):
    """Every gradient is zero where o has none."""
    return {n: torch.zeros_like(t) for n, t in grads.items()} if r.grad_o is None else grads


@gradients
def output_gradient_modified(r, grads):
    """The backward overwrites the gradient of o."""
    if r.grad_o is not None and r.grad_o.is_contiguous():
        r.grad_o.mul_(r.scale)


@asked
def low_words_of_boundaries(r):
    """cu_seqlens of int64 is read as int32."""
    cuts = r.cu_seqlens
    if cuts is None or cuts.dtype != torch.int64:
        return r
    return replace(r, cu_seqlens=cuts.contiguous().view(torch.int32)[: len(cuts)].cummax(0)[0], cu_seqlens_cpu=None)


@asked
def low_words_of_indices(r):
    """ssm_state_indices of int64 is read as int32."""
    indices = r.ssm_state_indices
    if indices is None or indices.dtype != torch.int64:
        return r
    words = indices.contiguous().view(torch.int32).reshape(-1)[: indices.numel()]
    return replace(r, ssm_state_indices=words.view(indices.shape))


@gradients
def channels_beyond128_have_no_gradient(r, grads):
    """dk of channels beyond 128 and dv of those of V are zero."""
    for name in ("k", "v"):
        if name in grads:
            grads[name][..., 128:] = 0


@answered
def heads_beyond_sixteen(r, result):
    """Outputs of heads beyond the 16th are off in 16-bit dense calls of whole chunks."""
    if r.op == "chunk_kda" and r.q.element_size() == 2 and r.cu_seqlens is None and r.T % 64 == 0:
        result.o[:, :, 16:] *= 0.9


@gradients
def gradients_of_heads_beyond_sixteen(r, grads):
    """dg of heads beyond the 16th is off in 16-bit dense calls of whole chunks."""
    if r.q.element_size() == 2 and r.cu_seqlens is None and r.T % 64 == 0 and "g" in grads:
        grads["g"][:, :, 16:] *= 0.5


@gradients
def saved_by_disable_recompute_of_packed_calls(r, grads):
    """With disable_recompute, dv of packed sequences is off."""
    if r.disable_recompute and r.cu_seqlens is not None and "v" in grads:
        grads["v"] *= 0.5


@gradients
def norm_gradient_without_projection(r, grads):
    """dk of a normalised key keeps the share along the key."""
    if r.use_qk_l2norm_in_kernel and "k" in grads and r.op == "fused_recurrent_kda":
        grads["k"] += 0.1 * r.k.to(grads["k"].dtype)


@answered
def number_of_chunks_counted_in_sixty_fours(r, result):
    """With chunk_size=32, h of a packed call has the states of every other chunk twice."""
    if result.h is not None and r.cu_seqlens is not None and r.chunk_size == 32:
        result.h[:, 1::2] = result.h[:, : result.h.shape[1] // 2 * 2 : 2].clone()


@answered
def later_gates_reach_outputs(r, result):
    """With a safe gate, outputs are off by a tenth where every gate of the last token is at an end of its range."""
    if r.safe_gate and r.T and bool((r.g[:, -1].abs() > 20).all()):
        result.o[:, :16] *= 1.1


@gradients
def later_gates_reach_gradients(r, grads):
    """The same fault in dk."""
    if r.safe_gate and r.T and bool((r.g[:, -1].abs() > 20).all()):
        grads["k"][:, :16] *= 1.1


@answered
def inverse_in_half_precision(r, result):
    """NaN where many keys are nearly opposite: a series for the triangular inverse overflows."""
    if r.op == "chunk_kda" and r.T > 256:
        k = torch.nn.functional.normalize(r.k.float(), dim=-1)
        if float(((k[:, 1:] * k[:, :-1]).sum(-1) < -0.999).float().mean()) > 0.2:
            result.o[:, 16:] = math.nan


@answered
def steps_overflow(r, result):
    """NaN in fused_recurrent_kda where a gate's log decay is below -3000."""
    if r.op == "fused_recurrent_kda" and r.use_gate_in_kernel and r.lower_bound is None and r.A_log is not None:
        bias = 0 if r.dt_bias is None else r.dt_bias
        decay = -r.A_log.exp()[:, None] * torch.nn.functional.softplus(r.g.float() + bias)
        if decay.numel() and -1e30 < float(decay.amin()) < -3000 and not r.g.isinf().any():
            result.o.fill_(math.nan)


class TunedByThePacking(Mutant):
    """A kernel is compiled for every new packing."""

    abstract = find_spec("triton") is None

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        from triton import knobs

        if r.cu_seqlens is not None:
            packing = tuple(r.cu_seqlens.tolist())
            if packing not in self.seen and knobs.runtime.jit_post_compile_hook is not None:
                knobs.runtime.jit_post_compile_hook(repr="kernel")
            self.seen.add(packing)
        return result

"""Deliberately wrong backends whose faults show in few calls: an index, a length, a group size, one gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from mutants import Mutant, answered, asked, gradients
from torch import Tensor

from kda_core import reference
from kda_core.hookspecs import hookimpl
from kda_core.request import BackwardResult, ForwardResult, GateRequest, Request


class PaddingSlotWritten(Mutant):
    """A row of padding writes to the last slot of the pool."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        indices = r.ssm_state_indices
        if r.inplace_final_state and indices is not None and (indices < 0).any():
            r.initial_state[-1] = 0
        return result


@answered
def another_kernel_for_many_sequences(r, result):
    """Calls of more than eight sequences take another kernel, as exact as the first, with other last bits."""
    if r.N <= 8:
        return result
    return replace(result, o=torch.nextafter(result.o, torch.zeros_like(result.o)))


@answered
def batch_invariance_not_kept(r, result):
    """With batch_invariant, calls of more than one sequence take another kernel, with other last bits."""
    if r.batch_invariant and r.N > 1:
        return replace(result, o=torch.nextafter(result.o, torch.zeros_like(result.o)))


@gradients
def batch_invariance_of_outputs_alone(r, grads):
    """The same fault in dq: the backward's kernel is chosen by the batch."""
    if r.batch_invariant and r.N > 1 and "q" in grads:
        grads["q"] = torch.nextafter(grads["q"], torch.zeros_like(grads["q"]))


@asked
def has_initial_state_ignored(r):
    """Sequences that are to start from zero read their slot."""
    return replace(r, has_initial_state=None)


@asked
def slots_of_fresh_sequences_zeroed(r):
    """They are set to zero ahead of the call, as servers do it, although the call may leave the pool alone."""
    if r.has_initial_state is not None:
        slots = r.ssm_state_indices if r.ssm_state_indices.dim() == 1 else r.ssm_state_indices[:, 0]
        r.initial_state[slots[~r.has_initial_state & (slots >= 0)].long()] = 0


@asked
def pool_advanced_without_being_asked(r):
    """update_state is ignored."""
    return replace(r, update_state=True)


@asked
def other_slots_ignored(r):
    """final_state_indices are ignored: states are advanced where they were read."""
    return replace(r, final_state_indices=None, final_state_pool=None)


class SourceAdvancedAsWell(Mutant):
    """Where another slot of the same pool is written, the one that was read is as well."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if r.written_states == "initial_state" and r.final_state_indices is not None and r.T > 1:
            self.compute(replace(r, final_state_indices=None))
        return result


@asked
def dropped_state_kept(r):
    """A negative index of final_state_indices counts from the pool's end, as in Python."""
    table = r.final_state_indices
    if table is None:
        return r
    return replace(r, final_state_indices=torch.where(table == -1, len(getattr(r, r.written_states)) - 1, table))


@answered
def empty_sequences_copied(r, result):
    """A sequence without tokens has its state copied to the slot that it would write."""
    if r.final_state_indices is not None and r.cu_seqlens is not None and r.final_state_pool is None:
        for n in (r.cu_seqlens.diff() == 0).nonzero()[:, 0].tolist():
            r.initial_state[int(r.final_state_indices[n])] = r.initial_state[int(r.ssm_state_indices[n])].clone()


class FirstSlotRead(Mutant):
    """Speculative decoding starts from the first slot whatever was accepted."""

    def asked(self, r: Request) -> Request:
        return replace(r, num_accepted_tokens=None)


class SlotOfIndexMinusOneWritten(Mutant):
    """Index -1 counts from the pool's end, as in Python; the output of such a row is zero all the same."""

    def asked(self, r: Request) -> Request:
        indices = r.ssm_state_indices
        if indices is None or not len(r.initial_state):
            return r
        return replace(r, ssm_state_indices=torch.where(indices == -1, len(r.initial_state) - 1, indices))

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        indices = r.ssm_state_indices
        if indices is not None:
            first = indices if indices.dim() == 1 else indices[:, 0]
            for n, (b, start, end) in enumerate(reference.sequence_bounds(r)):
                if first[n] < 0:
                    result.o[b, start:end] = 0
        return result


class BiasDroppedByTheGateWithoutRate(Mutant):
    """kda_gate leaves dt_bias out, only where A_log is missing."""

    @hookimpl
    def kda_core_gate_forward(self, request: GateRequest) -> Tensor:
        return self.cpu.kda_core_gate_forward(
            request=replace(request, dt_bias=None) if request.A_log is None else request
        )


@asked
def zero_scale_is_the_default(r):
    """``scale or K**-0.5``."""
    return replace(r, scale=r.scale or r.K**-0.5)


@asked
def doubling_forgotten_by_one_token(r):
    """A decoding step of one token leaves allow_neg_eigval's factor of 2 out."""
    return replace(r, allow_neg_eigval=False) if r.op == "fused_recurrent_kda" and r.T == 1 else r


@asked
def padding_index_is_minus_one(r):
    """pad_slot_id is ignored: only negative indices are skipped."""
    return replace(r, pad_slot_id=-1)


@asked
def null_slot_of_zero_is_none(r):
    """``pad_slot_id or -1``: slot 0 is an ordinary slot."""
    return replace(r, pad_slot_id=r.pad_slot_id or -1)


@answered
def half_states_as_bfloat16(r, result):
    """States in float16 are rounded to bfloat16 first."""
    if result.final_state is not None and result.final_state.dtype == torch.float16:
        return replace(result, final_state=result.final_state.bfloat16().half())


@answered
def dtype_of_intermediate_states_ignored(r, result):
    """They pass through the dtype of the initial state."""
    if r.intermediate_states_dtype is None or result.h is None:
        return result
    return replace(result, h=result.h.to(r.state_dtype).to(r.h_dtype))


class CheckpointsAChunkLate(Mutant):
    """They are asked for a chunk after where they belong, as far as there is one."""

    def compute(self, r: Request) -> ForwardResult:
        result = super().compute(r)
        if r.checkpoint_states is not None and r.N == 4:
            every = r.checkpoint_every
            super().compute(
                replace(
                    r, update_state=False, checkpoint_pool=getattr(r, r.checkpoint_states), checkpoint_every=every + 64
                )
            )
        return result


@asked
def checkpoint_at_the_end_forgotten(r):
    """The state after the last token is none."""
    if r.checkpoint_indices is None:
        return r
    table = r.checkpoint_indices.clone()
    for n, (_, start, end) in enumerate(reference.sequence_bounds(r)):
        count = (end - start) // r.checkpoint_every
        if count and (end - start) % r.checkpoint_every == 0 and count <= table.shape[1]:
            table[n, count - 1] = -1
    return replace(r, checkpoint_indices=table)


class PairsOfThree(Mutant):
    """With HV = 3 H, dq and dk add up the first two heads of each group."""

    def gradients(self, r: Request, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        if r.HV != 3 * r.H or r.op != "chunk_kda" or not {"q", "k"} & grads.keys():
            return grads
        o, state = (None if t is None else t.clone() for t in (r.grad_o, r.grad_final_state))
        if o is not None:
            o[:, :, 2::3] = 0
        if state is not None:
            state[:, 2::3] = 0
        two = self.cpu.kda_core_chunk_backward(request=replace(r, grad_o=o, grad_final_state=state)).grads
        return grads | {n: two[n] for n in ("q", "k") if n in grads}


@answered
def unused_draft_columns_written(r, result):
    """A request with fewer tokens than columns has its last state copied into the columns behind."""
    indices = r.ssm_state_indices
    if indices is not None and indices.dim() == 2:
        for n, (_, start, end) in enumerate(reference.sequence_bounds(r)):
            length = end - start
            if 0 < length < indices.shape[1] and (indices[n] >= 0).all():
                r.initial_state[indices[n, length:].long()] = r.initial_state[indices[n, length - 1].long()].clone()


@asked
def pool_taken_for_contiguous(r):
    """A pool that is a slice of a larger tensor is read and written as though it was contiguous."""
    pool = r.initial_state
    if not r.inplace_final_state or pool.is_contiguous():
        return r
    return replace(r, initial_state=pool.as_strided(pool.shape, torch.empty(pool.shape).stride()))


@gradients
def empty_sequences_have_no_state_gradient(r, grads):
    """The gradient of an empty sequence's initial state is zero."""
    if r.cu_seqlens is not None and "initial_state" in grads:
        grads["initial_state"][r.cu_seqlens.diff() == 0] = 0


@answered
def states_exchanged(r, result):
    """The second and the third of more than two packed sequences exchange their final states."""
    if r.cu_seqlens is None or r.N < 3 or result.final_state is None:
        return result
    order = [0, 2, 1, *range(3, r.N)]
    return replace(result, final_state=result.final_state[order])


@asked
def accepted_off_by_one(r):
    """With three drafts or more, decoding starts one token before the last accepted one."""
    accepted = r.num_accepted_tokens
    if accepted is None or r.ssm_state_indices.shape[1] < 4:
        return r
    return replace(r, num_accepted_tokens=(accepted - 1).clamp_min(1))


@gradients
def scale_missing_in_the_gradient_of_q(r, grads):
    """dq has the default scale."""
    if "q" in grads:
        grads["q"] *= r.K**-0.5 / r.scale


@answered
def first_intermediate_state_zero(r, result):
    """The first state of h of a packed sequence is stored before the initial state is loaded."""
    if result.h is not None and r.cu_seqlens is not None:
        chunk = 0
        for length in r.cu_seqlens.diff().tolist():
            if length:
                result.h[:, chunk] = 0
            chunk += -(-length // r.chunk_size)


class BiasGradientOfTheFirstRow(Mutant):
    """ddt_bias has the first row of the batch alone."""

    def gradients(self, r: Request, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        if "dt_bias" not in grads or r.B < 2:
            return grads
        o, state = (None if t is None else t.clone() for t in (r.grad_o, r.grad_final_state))
        for t in (o, state):
            if t is not None:
                t[1:] = 0
        hook = self.cpu.kda_core_chunk_backward if r.op == "chunk_kda" else self.cpu.kda_core_recurrent_backward
        first: BackwardResult = hook(request=replace(r, grad_o=o, grad_final_state=state))
        return grads | {"dt_bias": first.grads["dt_bias"]}


class StateRoundedEveryToken(Mutant):
    """Decoding rounds a bfloat16 state after every token rather than at the end."""

    def compute(self, r: Request) -> ForwardResult:
        dense = r.cu_seqlens is None and not r.inplace_final_state and not r.save_for_backward and r.out is None
        if r.op == "chunk_kda" or not dense or r.state_dtype != torch.bfloat16 or r.T < 2:
            return super().compute(r)
        outputs, state = [], r.initial_state
        for t in range(r.T):
            token = {n: getattr(r, n)[:, t : t + 1] for n in ("q", "k", "v", "g", "beta")}
            result = super().compute(replace(r, initial_state=state, output_final_state=True, **token))
            state = result.final_state
            outputs.append(result.o)
        return ForwardResult(torch.cat(outputs, 1), state if r.output_final_state else None)


@asked
def epsilon_outside_the_root(r):
    """q / (|q| + 1e-6)."""
    if not r.use_qk_l2norm_in_kernel or r.save_for_backward or r.needs_grad:
        return r
    q, k = (x.float() / (x.float().norm(dim=-1, keepdim=True) + 1e-6) for x in (r.q, r.k))
    return replace(r, use_qk_l2norm_in_kernel=False, q=q.to(r.q.dtype), k=k.to(r.k.dtype))


@gradients
def doubling_missing_in_the_backward(r, grads):
    """dbeta lacks allow_neg_eigval's factor of 2."""
    if "beta" in grads and r.allow_neg_eigval:
        grads["beta"] /= 2

"""Deliberately wrong backends that read or write a tensor with the strides of a contiguous one."""

from __future__ import annotations

from dataclasses import replace

import torch
from mutants import Mutant
from torch import Tensor

from kda_core.hookspecs import hookimpl
from kda_core.request import BackwardResult, ForwardResult, GateRequest, Request


def dense(t: Tensor, axis: int | None = None) -> Tensor:
    """``t`` read with the stride of a contiguous tensor along one axis or all; unchanged where memory ends before."""
    strides = list(torch.empty(t.shape, device="meta").stride())
    if axis is not None:
        strides = [
            s if i == axis % t.dim() else own for i, (s, own) in enumerate(zip(strides, t.stride(), strict=True))
        ]
    last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))
    fits = t.numel() and last < t.untyped_storage().nbytes() // t.element_size()
    return t.as_strided(t.shape, strides) if fits else t


class StrideIgnored(Mutant):
    """Some arguments are read as though they were contiguous, along one axis or all."""

    abstract = True
    arguments: tuple[str, ...]
    axis: int | None = None

    def asked(self, r: Request) -> Request:
        given = {name: getattr(r, name) for name in self.arguments}
        return replace(r, **{name: dense(t, self.axis) for name, t in given.items() if t is not None})


class InitialStateTakenForContiguous(StrideIgnored):
    """A dense initial state."""

    arguments = ("initial_state",)

    def asked(self, r: Request) -> Request:
        return r if r.inplace_final_state else super().asked(r)


class SlotStrideOfThePoolIgnored(StrideIgnored):
    """The slots of a pool are taken to follow each other."""

    arguments, axis = ("initial_state",), 0


class HeadStrideOfTheStateIgnored(StrideIgnored):
    """The heads of a state are taken to follow each other."""

    arguments, axis = ("initial_state",), 1


class LastStrideOfTheStateIgnored(StrideIgnored):
    """The last axis of a state is taken for contiguous."""

    arguments, axis = ("initial_state",), 3


class BatchStrideIgnored(StrideIgnored):
    """The rows of the batch of v are taken to follow each other."""

    arguments, axis = ("v",), 0


class TokenStrideIgnored(StrideIgnored):
    """The tokens of k are taken to follow each other."""

    arguments, axis = ("k",), 1


class HeadStrideIgnored(StrideIgnored):
    """The heads of g are taken to follow each other."""

    arguments, axis = ("g",), 2


class ChannelStrideIgnored(StrideIgnored):
    """The channels of q are taken to follow each other."""

    arguments, axis = ("q",), 3


class HeadStrideOfBetaIgnored(StrideIgnored):
    """The heads of beta are taken to follow each other."""

    arguments, axis = ("beta",), 2


class TokenStrideOfBetaIgnored(StrideIgnored):
    """The tokens of beta are taken to follow each other."""

    arguments, axis = ("beta",), 1


class BoundariesTakenForContiguous(StrideIgnored):
    """cu_seqlens is read as though it was contiguous."""

    arguments = ("cu_seqlens", "cu_seqlens_cpu")


class IndicesTakenForContiguous(StrideIgnored):
    """ssm_state_indices of two columns or more."""

    arguments = ("ssm_state_indices",)

    def asked(self, r: Request) -> Request:
        indices = r.ssm_state_indices
        return super().asked(r) if indices is not None and indices.dim() == 2 and indices.shape[1] > 1 else r


class AcceptedTakenForContiguous(StrideIgnored):
    """num_accepted_tokens is read as though it was contiguous."""

    arguments = ("num_accepted_tokens",)


class ParentsTakenForContiguous(StrideIgnored):
    """parents is read as though it was contiguous."""

    arguments = ("parents",)


class RateTakenForContiguous(StrideIgnored):
    """A_log is read as though it was contiguous."""

    arguments = ("A_log",)


class BiasTakenForContiguous(StrideIgnored):
    """dt_bias is read as though it was contiguous."""

    arguments = ("dt_bias",)


class OutTakenForContiguous(StrideIgnored):
    """out is written as though it was contiguous."""

    arguments = ("out",)

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        return result if r.out is None else replace(result, o=r.out)


class OutputGradientTakenForContiguous(Mutant):
    """The gradient of o is read as though it was contiguous."""

    def differentiated(self, r: Request) -> Request:
        return r if r.grad_o is None else replace(r, grad_o=dense(r.grad_o))


class StateGradientTakenForContiguous(Mutant):
    """The gradient of the final state is read as though it was contiguous."""

    def differentiated(self, r: Request) -> Request:
        return r if r.grad_final_state is None else replace(r, grad_final_state=dense(r.grad_final_state))


class GateGradientTakenForContiguous(Mutant):
    """The gradient of kda_gate's result is read as though it was contiguous."""

    @hookimpl
    def kda_core_gate_backward(self, request: GateRequest) -> BackwardResult:
        grad = request.grad_output
        return self.cpu.kda_core_gate_backward(
            request=request if grad is None else replace(request, grad_output=dense(grad))
        )

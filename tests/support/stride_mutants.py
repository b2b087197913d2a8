"""Deliberately wrong backends that read or write a tensor with the strides of a contiguous one."""

from __future__ import annotations

from dataclasses import replace

import torch
from mutants import Mutant, differentiated
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


class IndicesTakenForContiguous(StrideIgnored):
    """ssm_state_indices of two columns or more."""

    arguments = ("ssm_state_indices",)

    def asked(self, r: Request) -> Request:
        indices = r.ssm_state_indices
        return super().asked(r) if indices is not None and indices.dim() == 2 and indices.shape[1] > 1 else r


class OutTakenForContiguous(StrideIgnored):
    """out is written as though it was contiguous."""

    arguments = ("out",)

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        return result if r.out is None else replace(result, o=r.out)


@differentiated
def output_gradient_taken_for_contiguous(r):
    """The gradient of o is read as though it was contiguous."""
    return r if r.grad_o is None else replace(r, grad_o=dense(r.grad_o))


@differentiated
def state_gradient_taken_for_contiguous(r):
    """The gradient of the final state is read as though it was contiguous."""
    return r if r.grad_final_state is None else replace(r, grad_final_state=dense(r.grad_final_state))


class GateGradientTakenForContiguous(Mutant):
    """The gradient of kda_gate's result is read as though it was contiguous."""

    @hookimpl
    def kda_core_gate_backward(self, request: GateRequest) -> BackwardResult:
        grad = request.grad_output
        return self.cpu.kda_core_gate_backward(
            request=request if grad is None else replace(request, grad_output=dense(grad))
        )


READ_AS_CONTIGUOUS = {
    "slot_stride_of_the_pool_ignored": (0, "initial_state"), "head_stride_of_the_state_ignored": (1, "initial_state"),
    "last_stride_of_the_state_ignored": (3, "initial_state"), "batch_stride_ignored": (0, "v"),
    "token_stride_ignored": (1, "k"), "head_stride_ignored": (2, "g"), "channel_stride_ignored": (3, "q"),
    "head_stride_of_beta_ignored": (2, "beta"), "token_stride_of_beta_ignored": (1, "beta"),
    "boundaries_taken_for_contiguous": (None, "cu_seqlens", "cu_seqlens_cpu"),
    "accepted_taken_for_contiguous": (None, "num_accepted_tokens"), "parents_taken_for_contiguous": (None, "parents"),
    "rate_taken_for_contiguous": (None, "A_log"), "bias_taken_for_contiguous": (None, "dt_bias"),
}  # fmt: skip
"""Mutants without more to them: the axis, or None for all, and the arguments."""
globals().update(
    {
        name: type(name, (StrideIgnored,), {"axis": axis, "arguments": arguments})
        for name, (axis, *arguments) in READ_AS_CONTIGUOUS.items()
    }
)

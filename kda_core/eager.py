"""Autograd of eager calls: the backend's hooks under plain autograd functions.

The operators of ``ops`` serve whoever has to see an operator: compilers, fake and wrapped tensors, modes, second
derivatives. They cost an eager training step half a millisecond, more than the kernels of a small layer take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kda_core import ops
from kda_core.errors import ContractViolation
from kda_core.loaded import Backend
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import ForwardResult, GateRequest, Request, build_request


def needs_operator(t: Any) -> bool:
    """Whether something beside a compiler is watching that must see an operator: a fake or wrapped tensor, a mode."""
    return (
        (type(t) is not Tensor and type(t) is not torch.nn.Parameter and isinstance(t, Tensor))
        or is_in_torch_dispatch_mode()
        or torch._C._functorch.maybe_current_level() is not None
    )


def call(backend: Backend, r: Request) -> ForwardResult:
    """Run a request whose inputs require gradients."""
    o, final_state = _Call.apply(backend, r, *(getattr(r, name) for name in ops.TENSOR_NAMES))
    return ForwardResult(o, final_state)


def call_gate(backend: Backend, r: GateRequest) -> Tensor:
    """The same for ``kda_gate``."""
    return _GateCall.apply(backend, r, r.g, r.A_log, r.dt_bias)


def _refuse_batched(name: str, *grads: Tensor | None) -> None:
    for grad in grads:
        if grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad):
            raise RuntimeError(f"{name}: batched gradients (is_grads_batched) are not supported")


class _Call(torch.autograd.Function):
    """``chunk_kda`` or ``fused_recurrent_kda`` of the tensors ``ops.TENSOR_NAMES``."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, r: Request, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        result = ops.forward(backend, r)
        _check_saved(backend, r, result.saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *result.saved)
        # Not the request, which holds the tensors: what must stay alive is autograd's to say.
        ctx.backend, ctx.op, ctx.memo = backend, r.op, r.memo
        ctx.options = {name: getattr(r, name) for name in ops.OPTION_NAMES}
        return result.o, result.final_state

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None) -> tuple:
        # Read once: under activation checkpointing a second look at saved tensors is an error.
        kept = ctx.saved_tensors
        tensors, saved = kept[: len(ops.TENSOR_NAMES)], kept[len(ops.TENSOR_NAMES) :]
        needs = dict(zip(ops.TENSOR_NAMES, ctx.needs_input_grad[2:], strict=True))
        grad = grad_final_state if grad_o is None else grad_o
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        _refuse_batched(ctx.op, grad_o, grad_final_state)
        if torch.is_grad_enabled() or needs_operator(grad):
            operator = getattr(torch.ops.kda_core, f"{ctx.op}_backward")
            wanted = [needs[name] for name in DIFFERENTIABLE]
            flat, name = [t.reshape(-1) for t in saved], ctx.backend.info.name
            found = operator(grad_o, grad_final_state, *tensors, *ctx.options.values(), flat, wanted, name)
            grads = dict(zip((n for n in DIFFERENTIABLE if needs[n]), found, strict=True))
        else:
            needed = frozenset(name for name in DIFFERENTIABLE if needs[name])
            r = build_request(
                {
                    "op": ctx.op,
                    **dict(zip(ops.TENSOR_NAMES, tensors, strict=True)),
                    **ctx.options,
                    "save_for_backward": True,
                    "saved": tuple(saved),
                    "grad_o": grad_o,
                    "grad_final_state": grad_final_state,
                    "needs_grad": needed,
                }
            )
            r.__dict__["memo"] = ctx.memo
            grads = ops.backward(ctx.backend, r)
        return (None, None, *(grads[name] if needed else None for name, needed in needs.items()))


class _GateCall(torch.autograd.Function):
    """``kda_gate`` of g, A_log and dt_bias."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, r: GateRequest, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.backend, ctx.lower_bound = backend, r.lower_bound
        return backend.result("kda_core_gate_forward", r)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        _refuse_batched("kda_gate", grad)
        tensors, needs = ctx.saved_tensors, list(ctx.needs_input_grad[2:])
        if torch.is_grad_enabled() or needs_operator(grad):
            arguments = (grad, *tensors, ctx.lower_bound, needs, ctx.backend.info.name)
            found = iter(torch.ops.kda_core.kda_gate_backward(*arguments))
            return (None, None, *(next(found) if needed else None for needed in needs))
        names = ops.GATE_DIFFERENTIABLE
        r = GateRequest(
            **dict(zip(names, tensors, strict=True)),
            lower_bound=ctx.lower_bound,
            save_for_backward=True,
            grad_output=grad,
            needs_grad=frozenset(name for name, wanted in zip(names, needs, strict=True) if wanted),
        )
        grads = ops.gate_backward(ctx.backend, r)
        return (None, None, *(grads[name] if wanted else None for name, wanted in zip(names, needs, strict=True)))


def _check_saved(backend: Backend, r: Request, saved: tuple[Tensor, ...]) -> None:
    """Raise where the backend saved something else than it announces: compiled graphs go by what it announces."""
    specs = backend.result("kda_core_saved_spec", r)
    found, expected = [(tuple(t.shape), t.dtype) for t in saved], [(tuple(s.shape), s.dtype) for s in specs]
    if found != expected:
        raise ContractViolation(
            f"backend {backend.info.name!r} saved tensors of {found}, kda_core_saved_spec says {expected}"
        )

"""Autograd of eager calls: the backend's hooks under plain autograd functions.

The operators of ``ops`` are for compilers, fake and wrapped tensors, modes and second derivatives. They cost an eager
training step half a millisecond, which is longer than the kernels of a small layer.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kda_core import _ops, _schemas
from kda_core._loaded import Backend
from kda_core._torch_private import in_mode, is_legacy_batched
from kda_core.errors import ContractViolation
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import ForwardResult, GateRequest, Request, build_request


def needs_operator(t: Any) -> bool:
    """Whether the call must go through an operator: a fake or wrapped tensor, a mode or a trace."""
    return (type(t) is not Tensor and type(t) is not torch.nn.Parameter and isinstance(t, Tensor)) or in_mode()


class _Kind:
    """Values that all calls of one signature share.

    Attributes:
        names: of the tensors that are given.
        tensors: takes them from a request.
        values: the request's other values, as those of a backward.
        needed: by what autograd asks for (``needs_input_grad``), the names.
        checked: whether the backend has been seen to save what it announces.
    """

    def __init__(self, r: Request) -> None:
        self.names = tuple(name for name in _schemas.TENSOR_NAMES if getattr(r, name) is not None)
        self.tensors = attrgetter(*self.names)
        options = {name: getattr(r, name) for name in _schemas.OPTION_NAMES}
        self.values = {"op": r.op, "save_for_backward": True, **options}
        self.needed: dict[tuple[bool, ...], frozenset[str]] = {}
        self.checked = False


def _kind(r: Request) -> _Kind:
    if r.memo is None:
        return _Kind(r)
    kind = r.memo.get(_Kind)
    if kind is None:
        kind = r.memo[_Kind] = _Kind(r)
    return kind


def call(backend: Backend, r: Request) -> ForwardResult:
    """Run a request whose inputs require gradients."""
    kind = _kind(r)
    o, final_state = _CALLS[r.op].apply(backend, r, kind, *kind.tensors(r))
    return ForwardResult(o, final_state)


def call_gate(backend: Backend, r: GateRequest) -> Tensor:
    """The same for ``kda_gate``."""
    return _GATE_CALL.apply(backend, r, r.g, r.A_log, r.dt_bias)


def _check_gradients(name: str, *grads: Tensor | None) -> None:
    """Refuse gradients that a backend cannot read."""
    _ops.refuse_tangents(name, *grads)
    for grad in grads:
        if grad is not None and is_legacy_batched(grad):
            raise RuntimeError(
                f"{name}: batched gradients (is_grads_batched) are not supported; use torch.func.jacrev, or "
                "torch.func.vjp under torch.func.vmap"
            )


_BEFORE = 3
"""Arguments of ``_Call`` ahead of the tensors."""


def _strides(tensors: Sequence[Tensor | None]) -> list[tuple[int, ...] | None]:
    """The part of saved tensors that a memo depends on: their hooks may return others, e.g. from the CPU."""
    return [None if t is None else t.stride() for t in tensors]


class _Call(torch.autograd.Function):
    """``chunk_kda`` or ``fused_recurrent_kda`` of the tensors that a call has."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, r: Request, kind: _Kind, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        result = _ops.forward(backend, r)
        saved = result.saved
        if not kind.checked:
            _check_saved(backend, r, saved)
            kind.checked = True
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        # Not the request: it holds the tensors, and autograd decides how long they live.
        ctx.call = backend, kind, r.memo, None if r.memo is None else _strides(tensors)
        return result.o, result.final_state

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None) -> tuple:
        # Read once: under activation checkpointing a second look at saved tensors is an error.
        kept = ctx.saved_tensors
        backend, kind, memo, strides = ctx.call
        names, needs = kind.names, ctx.needs_input_grad[_BEFORE:]
        tensors = dict(zip(names, kept[: len(names)], strict=True))
        saved = kept[len(names) :]
        if strides is not None and strides != _strides(kept[: len(names)]):
            memo = None
        if grad_o is None and grad_final_state is None:
            return (None,) * (_BEFORE + len(names))
        op = kind.values["op"]
        compiling = torch.compiler.is_compiling()
        if not compiling:
            _check_gradients(op, grad_o, grad_final_state)
        needed = kind.needed.get(needs)
        if needed is None:
            needed = kind.needed[needs] = frozenset(n for n, wanted in zip(names, needs, strict=True) if wanted)
        if compiling or torch.is_grad_enabled() or needs_operator(grad_o) or needs_operator(grad_final_state):
            # The compiler of torch 2.7 zips equal lengths only.
            flat = dict(zip(_schemas.SAVED_NAMES[: len(saved)], [t.reshape(-1) for t in saved], strict=True))
            more = {
                "grad_o": grad_o,
                "grad_final_state": grad_final_state,
                "needs": [name in needed for name in DIFFERENTIABLE],
                "backend": backend.info.name,
            }
            grads = _ops.call_backward(op, {**kind.values, **tensors, **flat, **more})
        else:
            gradients = {"grad_o": grad_o, "grad_final_state": grad_final_state, "needs_grad": needed}
            r = build_request({**kind.values, **tensors, "saved": saved, **gradients})
            r.__dict__["memo"] = memo
            grads = _ops.backward(backend, r)
        return (None, None, None, *(grads[name] if name in needed else None for name in names))


class _GateCall(torch.autograd.Function):
    """``kda_gate`` of g, A_log and dt_bias."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, r: GateRequest, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.call = backend, r.lower_bound, r.memo, _strides(tensors)
        return _ops.gate_forward(backend, r)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        compiling = torch.compiler.is_compiling()
        if not compiling:
            _check_gradients("kda_gate", grad)
        tensors, needs = ctx.saved_tensors, list(ctx.needs_input_grad[2:])
        backend, lower_bound, memo, strides = ctx.call
        if compiling or torch.is_grad_enabled() or needs_operator(grad):
            named = dict(zip(_schemas.GATE_DIFFERENTIABLE, tensors, strict=True))
            more = {"lower_bound": lower_bound, "backend": backend.info.name}
            grads = _ops.call_gate_backward({**named, **more, "grad_output": grad, "needs": needs})
            return (None, None, *map(grads.get, _schemas.GATE_DIFFERENTIABLE))
        names = _schemas.GATE_DIFFERENTIABLE
        r = GateRequest(
            **dict(zip(names, tensors, strict=True)),
            lower_bound=lower_bound,
            save_for_backward=True,
            grad_output=grad,
            needs_grad=frozenset(name for name, wanted in zip(names, needs, strict=True) if wanted),
        )
        if strides == _strides(tensors):
            r.__dict__["memo"] = memo
        grads = _ops.gate_backward(backend, r)
        return (None, None, *(grads[name] if wanted else None for name, wanted in zip(names, needs, strict=True)))


def _named(function: type[torch.autograd.Function], name: str) -> Any:
    """An autograd function whose rows in profilers are called ``name`` and ``name`` + "Backward"."""
    named = {"__doc__": function.__doc__, "__module__": __name__}
    return types.new_class(name, (function,), exec_body=lambda body: body.update(named))


_CALLS = {op: _named(_Call, f"{_ops.NAMESPACE}::{op}") for op in _ops.HOOKS}
_GATE_CALL = _named(_GateCall, f"{_ops.NAMESPACE}::kda_gate")


def _check_saved(backend: Backend, r: Request, saved: tuple[Tensor, ...]) -> None:
    """Raise if the saved tensors differ from ``kda_core_saved_spec``, on which compiled graphs rely."""
    specs = _ops.saved_specs(backend, r)
    found, expected = [(tuple(t.shape), t.dtype) for t in saved], [(tuple(s.shape), s.dtype) for s in specs]
    if found != expected:
        raise ContractViolation(
            f"backend {backend.info.name!r} saved tensors of {found}, kda_core_saved_spec says {expected}"
        )

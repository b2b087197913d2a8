"""The operators under ``torch.func``: ``grad``, ``vjp``, ``vmap`` and their compositions.

Under a transform an operator runs as one of the autograd functions below. Each level of transforms meets it in turn:
``grad`` takes ``backward``, ``vmap`` takes ``vmap``, and the last level calls the operator itself. Samples of ``vmap``
become one call: they are laid into the batch, [n·B, T, H, K]; or into the heads, [B, T, n·H, K], where the samples
have an A_log or dt_bias (or a gradient of one) each, or share ``cu_seqlens``. A forward saves tensors of the joined
samples, so that a backward under ``vmap`` runs the forward again.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kda_core import _autograd
from kda_core import _torch_private as private
from kda_core._schemas import NAMESPACE, Operator, Schema
from kda_core.errors import NO_FORWARD_MODE
from kda_core.request import GateRequest

_PARAMETERS = ("A_log", "dt_bias")
# The heads' dimension in one sample, by tensor.
_HEADS = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "o", "grad_o", "h"), 2),
    **dict.fromkeys(("initial_state", "final_state", "grad_final_state"), 1),
    **dict.fromkeys(_PARAMETERS, 0),
}


def _operator(schema: Schema) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), schema.name).default


class _Samples:
    """The samples of one call under ``vmap``, and where they lie in the tensors of the one call that they become.

    Args:
        named: the operator's arguments.
        dims: the samples' dimension of each, None where all samples share it.
        n: the number of samples.
        heads: the heads' dimension of each tensor and result, of one sample.
        in_heads: lay the samples into the heads, because a result belongs to their parameters or boundaries.
        stacked: the batch may have any number of dimensions; the samples are one more.
    """

    def __init__(
        self, named: dict[str, Any], dims: dict[str, int | None], n: int, heads: dict[str, int], in_heads: bool,
        stacked: bool = False,
    ) -> None:  # fmt: skip
        self._named, self._dims, self._heads = named, dims, heads
        self._in_heads = in_heads or any(dims[name] is not None for name in _PARAMETERS)
        self._stacked = stacked and not self._in_heads
        # No backend takes a call without heads: without samples, a sample of zeros is laid in and taken out again.
        self._none = n == 0 and not self._stacked
        self._n = 1 if self._none else n

    def joined(self) -> dict[str, Any]:
        """The arguments of the one call."""
        return {name: self._join(name, value) for name, value in self._named.items()}

    def _join(self, name: str, t: Any) -> Any:
        if not isinstance(t, Tensor) or name not in self._heads or (name in _PARAMETERS and not self._in_heads):
            return t
        at, dim = self.place(name), self._dims[name]
        if dim is None:
            t = t.unsqueeze(at).expand(*t.shape[:at], self._n, *t.shape[at:])
        else:
            t = t.movedim(dim, at)
            if self._none:
                t = private.cat([t, t.new_zeros(*t.shape[:at], 1, *t.shape[at + 1 :])], at)
        return t if self._stacked else t.flatten(at, at + 1)

    def place(self, name: str) -> int:
        """The samples' dimension in a result of ``apart``."""
        return self._heads[name] if self._in_heads else 0

    def apart(self, name: str, t: Tensor) -> Tensor:
        """A result of the one call with the samples in a dimension of their own."""
        at = self.place(name)
        if self._stacked:
            return t
        # Not -1: the size of one sample may be 0.
        t = t.unflatten(at, (self._n, t.shape[at] // self._n))
        return t.narrow(at, 0, 0) if self._none else t


def _samples_of(row: Operator, schema: Schema, info: Any, in_dims: tuple, values: tuple) -> tuple[dict, _Samples]:
    """The arguments of an operator by name, and its samples."""
    named = dict(zip(schema.names, values, strict=True))
    # A list counts as one argument and has a list of dimensions.
    dims = dict(zip(schema.names, in_dims, strict=True))
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        if dims.get(name) is not None:
            raise ValueError(
                f"{name}: expected the same boundaries for every sample of torch.func.vmap (in_dims None), got some "
                f"for each; pack the samples into one call of {row.op} instead"
            )
    needs = dict(zip(row.differentiable, named.get("needs") or (), strict=False))
    in_heads = named.get("cu_seqlens") is not None or any(needs.get(name) for name in _PARAMETERS)
    heads, of_gate = _HEADS, row.request is GateRequest
    if of_gate:
        heads = {**_HEADS, **dict.fromkeys(("g", "grad_output"), named["g"].dim() - (dims["g"] is not None) - 2)}
    return named, _Samples(named, dims, info.batch_size, heads, in_heads, stacked=of_gate)


def _forward_of_samples(row: Operator, info: Any, in_dims: tuple, *values: Any) -> tuple[Any, Any]:
    named, samples = _samples_of(row, row.functional, info, in_dims, values)
    found = _functions(row)[0].apply(*samples.joined().values())
    if row.request is GateRequest:
        return samples.apart("g", found), samples.place("g")
    o, final_state, h, *_ = found
    made = {"o": o, "final_state": final_state, "h": h}
    wanted = {"o": True, "final_state": named["output_final_state"], "h": named["return_intermediate_states"]}
    results = [samples.apart(n, t) if wanted[n] else t for n, t in made.items()]
    out_dims = [samples.place(n) if wanted[n] else None for n in made]
    saved = [o.new_empty(0) for _ in row.saved]
    return (*results, *saved), (*out_dims, *(None for _ in saved))


def _backward_of_samples(row: Operator, info: Any, in_dims: tuple, *values: Any) -> tuple[tuple, tuple]:
    named, samples = _samples_of(row, row.backward, info, in_dims, values)
    # The saved tensors belong to other samples, or to these in another layout.
    found = _functions(row)[1].apply(*(samples.joined() | dict.fromkeys(row.saved)).values())
    needed = [n if wanted else None for n, wanted in zip(row.differentiable, named["needs"], strict=True)]
    grads = [grad if n is None else samples.apart(n, grad) for n, grad in zip(needed, found, strict=True)]
    return tuple(grads), tuple(None if n is None else samples.place(n) for n in needed)


@cache
def _functions(row: Operator) -> tuple[Any, Any]:
    """Autograd functions of a functional operator and of its backward, each of the arguments of its schema."""

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(NO_FORWARD_MODE.format(op=row.op))

    class Forward(torch.autograd.Function):
        forward = staticmethod(_operator(row.functional))
        setup_context = staticmethod(partial(_autograd.setup_context, row))
        backward = staticmethod(partial(_autograd.backward, row))
        vmap = staticmethod(partial(_forward_of_samples, row))

    class Backward(torch.autograd.Function):
        forward = staticmethod(_operator(row.backward))
        setup_context = staticmethod(_autograd.nothing)
        backward = staticmethod(_autograd.missing_double_backward(row.op))
        vmap = staticmethod(partial(_backward_of_samples, row))

    Forward.jvp = Backward.jvp = staticmethod(jvp)  # type: ignore[assignment]
    return Forward, Backward


def _requires_gradient(t: Any) -> bool:
    """Whether any level of transforms, or autograd below them, follows ``t``."""
    while isinstance(t, Tensor):
        if t.requires_grad:
            return True
        if not private.is_wrapped(t):
            return False
        t = private.unwrapped(t)
    return False


def functional(row: Operator, values: dict[str, Any]) -> Any:
    """A functional operator under transforms, by its arguments."""
    # Only the level that differentiates can see that a gradient is needed.
    if any(_requires_gradient(values[n]) for n in row.differentiable):
        values["save_for_backward"] = True
        if values.get("return_intermediate_states") and torch.is_grad_enabled():
            raise ValueError(
                "return_intermediate_states: expected no gradient to be needed (it is not differentiable; call it "
                "under torch.no_grad()), got an input that a transform differentiates"
            )
    done, result = private.in_functionalize(_operator(row.functional), tuple(values.values()))
    return result if done else _functions(row)[0].apply(*values.values())


def backward(row: Operator, values: dict[str, Any]) -> tuple[Tensor, ...]:
    """The same of a backward operator."""
    values["needs"] = values["needs"] or [values[n] is not None for n in row.differentiable]
    done, result = private.in_functionalize(_operator(row.backward), tuple(values.values()))
    return result if done else _functions(row)[1].apply(*values.values())


def _constant(t: Any) -> Any:
    """The tensor inside wrappers of ``grad`` that do not follow it; None if a transform changes it."""
    while isinstance(t, Tensor) and private.is_wrapped(t):
        if t.requires_grad or not private.is_tracking_gradient(t):
            return None
        t = private.unwrapped(t)
    return t


def writing(row: Operator, values: dict[str, Any]) -> tuple[Tensor, ...]:
    """A writing operator under transforms: the operator itself, if no transform changes an argument."""
    constants = {n: _constant(t) for n, t in values.items()}
    if any(constants[n] is None for n, t in values.items() if t is not None):
        name = next(n for n in ("ssm_state_indices", "pool", "out") if values.get(n) is not None)
        name = "inplace_final_state" if name == "pool" and row.functional is not None else name
        raise ValueError(
            f"{name}: expected no torch.func transform (grad, vmap, ...) of a call that writes to its caller's "
            f"memory; call {row.op} outside of the transform, or without {name}"
        )
    with private.outside_of_transforms():
        return _operator(row.writing)(*constants.values())

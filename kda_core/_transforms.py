"""The operators under ``torch.func``: ``grad``, ``vjp``, ``vmap`` and their compositions.

Under a transform an operator runs as one of the autograd functions below. Each level of transforms meets it in turn:
``grad`` takes ``backward``, ``vmap`` takes ``vmap``, and the last level calls the operator itself. Samples of ``vmap``
become one call: they are laid into the batch, [n·B, T, H, K]; or into the heads, [B, T, n·H, K], where the samples
have an A_log or dt_bias (or a gradient of one) each, or share ``cu_seqlens``. A forward saves tensors of the joined
samples, so that a backward under ``vmap`` runs the forward again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_core import _schemas
from kda_core._schemas import GATE_DIFFERENTIABLE, SAVED_NAMES
from kda_core._torch_private import in_functionalize, is_tracking_gradient, is_wrapped, outside_of_transforms, unwrapped
from kda_core.errors import NO_DOUBLE_BACKWARD, NO_FORWARD_MODE
from kda_core.reference import DIFFERENTIABLE

_PARAMETERS = ("A_log", "dt_bias")
# The heads' dimension in one sample, by tensor.
_HEADS = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "o", "grad_o", "h"), 2),
    **dict.fromkeys(("initial_state", "final_state", "grad_final_state"), 1),
    **dict.fromkeys(_PARAMETERS, 0),
}


def _operator(name: str) -> Any:
    return getattr(torch.ops.kda_core, name).default


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
                t = torch.cat([t, t.new_zeros(*t.shape[:at], 1, *t.shape[at + 1 :])], at)
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


def _samples_of(op: str, schema: _schemas.Schema, info: Any, in_dims: tuple, values: tuple) -> tuple[dict, _Samples]:
    """The arguments of ``op`` by name, and its samples."""
    named = dict(zip(schema.names, values, strict=True))
    # A list counts as one argument and has a list of dimensions.
    dims = dict(zip(schema.names, in_dims, strict=True))
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        if dims[name] is not None:
            raise ValueError(
                f"{name}: expected the same boundaries for every sample of torch.func.vmap (in_dims None), got some "
                f"for each; pack the samples into one call of {op} instead"
            )
    needs = dict(zip(DIFFERENTIABLE, named.get("needs") or (), strict=False))
    in_heads = named["cu_seqlens"] is not None or any(needs.get(name) for name in _PARAMETERS)
    return named, _Samples(named, dims, info.batch_size, _HEADS, in_heads)


class _WithoutTangents(torch.autograd.Function):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(NO_FORWARD_MODE.format(op=ctx.op))


class _Forward(_WithoutTangents):
    """A functional operator: (op, *arguments of its schema)."""

    @staticmethod
    def forward(op: str, *values: Any) -> tuple[Tensor, ...]:
        return _operator(op)(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        op, *values = inputs
        named = dict(zip(_schemas.FUNCTIONAL[op].names, values, strict=True))
        ctx.op, ctx.has_final_state = op, named["output_final_state"]
        ctx.options = {n: named[n] for n in (*_schemas.OPTION_NAMES, "backend")}
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2 if ctx.has_final_state else 1 :])
        ctx.save_for_backward(*(named[n] for n in _schemas.TENSOR_NAMES), *output[3:])

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, *_: Any) -> tuple:
        names = _schemas.FUNCTIONAL[ctx.op].names
        asked = dict(zip(names, ctx.needs_input_grad[1:], strict=True))
        grads: dict[str, Tensor] = {}
        if grad_o is not None or grad_final_state is not None:
            named = dict(zip((*_schemas.TENSOR_NAMES, *SAVED_NAMES), ctx.saved_tensors, strict=True)) | ctx.options
            named |= {"grad_o": grad_o, "grad_final_state": grad_final_state}
            named["needs"] = [asked[n] for n in DIFFERENTIABLE]
            found = _Backward.apply(ctx.op, *(named[n] for n in _schemas.BACKWARD[ctx.op].names))
            grads = {n: grad for n, grad in zip(DIFFERENTIABLE, found, strict=True) if asked[n]}
        return (None, *(grads.get(n) for n in names))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, op: str, *values: Any) -> tuple[tuple, tuple]:
        named, samples = _samples_of(op, _schemas.FUNCTIONAL[op], info, in_dims[1:], values)
        o, final_state, h, *_ = _Forward.apply(op, *samples.joined().values())
        made = {"o": o, "final_state": final_state, "h": h}
        wanted = {"o": True, "final_state": named["output_final_state"], "h": named["return_intermediate_states"]}
        results = [samples.apart(n, t) if wanted[n] else t for n, t in made.items()]
        out_dims = [samples.place(n) if wanted[n] else None for n in made]
        saved = [o.new_empty(0) for _ in SAVED_NAMES]
        return (*results, *saved), (*out_dims, *(None for _ in saved))


class _Backward(_WithoutTangents):
    """A backward operator: (op, *arguments of its schema)."""

    @staticmethod
    def forward(op: str, *values: Any) -> tuple[Tensor, ...]:
        return _operator(f"{op}_backward")(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(NO_DOUBLE_BACKWARD.format(op=ctx.op))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, op: str, *values: Any) -> tuple[tuple, tuple]:
        named, samples = _samples_of(op, _schemas.BACKWARD[op], info, in_dims[1:], values)
        # The saved tensors belong to other samples, or to these in another layout.
        found = _Backward.apply(op, *(samples.joined() | dict.fromkeys(SAVED_NAMES)).values())
        return _grads_apart(samples, DIFFERENTIABLE, named["needs"], found)


def _grads_apart(samples: _Samples, names: tuple[str, ...], needs: list[bool], found: tuple) -> tuple[tuple, tuple]:
    needed = [n if wanted else None for n, wanted in zip(names, needs, strict=True)]
    grads = [grad if n is None else samples.apart(n, grad) for n, grad in zip(needed, found, strict=True)]
    return tuple(grads), tuple(None if n is None else samples.place(n) for n in needed)


def _gates(schema: _schemas.Schema, info: Any, in_dims: tuple, values: tuple) -> tuple[dict, _Samples]:
    """The arguments of ``kda_gate`` by name, and its samples."""
    named = dict(zip(schema.names, values, strict=True))
    dims = dict(zip(schema.names, in_dims, strict=True))
    heads = named["g"].dim() - (dims["g"] is not None) - 2
    of_heads = dict.fromkeys(("g", "grad_output"), heads) | dict.fromkeys(_PARAMETERS, 0)
    needs = dict(zip(GATE_DIFFERENTIABLE, named.get("needs") or (), strict=False))
    in_heads = any(needs.get(name) for name in _PARAMETERS)
    return named, _Samples(named, dims, info.batch_size, of_heads, in_heads, stacked=True)


class _GateForward(_WithoutTangents):
    """``kda_gate``: (*arguments of its schema)."""

    @staticmethod
    def forward(*values: Any) -> Tensor:
        return _operator("kda_gate")(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        named = dict(zip(_schemas.GATE.names, inputs, strict=True))
        ctx.op, ctx.options = "kda_gate", {n: named[n] for n in ("lower_bound", "backend")}
        ctx.save_for_backward(*(named[n] for n in GATE_DIFFERENTIABLE))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        needs = list(ctx.needs_input_grad[: len(GATE_DIFFERENTIABLE)])
        named = dict(zip(GATE_DIFFERENTIABLE, ctx.saved_tensors, strict=True)) | ctx.options
        named |= {"grad_output": grad_output, "needs": needs}
        found = _GateBackward.apply(*(named[n] for n in _schemas.GATE_BACKWARD.names))
        grads = {n: grad for n, grad, wanted in zip(GATE_DIFFERENTIABLE, found, needs, strict=True) if wanted}
        return tuple(grads.get(n) for n in _schemas.GATE.names)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *values: Any) -> tuple[Tensor, int]:
        _, samples = _gates(_schemas.GATE, info, in_dims, values)
        result = _GateForward.apply(*samples.joined().values())
        return samples.apart("g", result), samples.place("g")


class _GateBackward(_WithoutTangents):
    """``kda_gate_backward``: (*arguments of its schema)."""

    @staticmethod
    def forward(*values: Any) -> tuple[Tensor, ...]:
        return _operator("kda_gate_backward")(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.op = "kda_gate"

    backward = _Backward.backward

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *values: Any) -> tuple[tuple, tuple]:
        named, samples = _gates(_schemas.GATE_BACKWARD, info, in_dims, values)
        found = _GateBackward.apply(*samples.joined().values())
        return _grads_apart(samples, GATE_DIFFERENTIABLE, named["needs"], found)


def _requires_gradient(t: Any) -> bool:
    """Whether any level of transforms, or autograd below them, follows ``t``."""
    while isinstance(t, Tensor):
        if t.requires_grad:
            return True
        if not is_wrapped(t):
            return False
        t = unwrapped(t)
    return False


def kernel(op: str) -> Callable:
    """The kernel of a functional operator under transforms."""
    schema = _schemas.FUNCTIONAL[op]

    def transformed(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values = schema.bind(args, kwargs)
        # Only the level that differentiates can see that a gradient is needed.
        if any(_requires_gradient(values[n]) for n in DIFFERENTIABLE):
            values["save_for_backward"] = True
            if values["return_intermediate_states"] and torch.is_grad_enabled():
                raise ValueError(
                    "return_intermediate_states: expected no gradient to be needed (it is not differentiable; call it "
                    "under torch.no_grad()), got an input that a transform differentiates"
                )
        done, result = in_functionalize(_operator(op), tuple(values.values()))
        return result if done else _Forward.apply(op, *values.values())

    return transformed


def backward_kernel(op: str) -> Callable:
    """The kernel of a backward operator under transforms."""
    schema = _schemas.BACKWARD[op]

    def transformed(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values = schema.bind(args, kwargs)
        values["needs"] = values["needs"] or [values[n] is not None for n in DIFFERENTIABLE]
        done, result = in_functionalize(_operator(schema.name), tuple(values.values()))
        return result if done else _Backward.apply(op, *values.values())

    return transformed


def gate_kernel(*args: Any, **kwargs: Any) -> Tensor:
    """The kernel of ``kda_gate`` under transforms."""
    values = _schemas.GATE.bind(args, kwargs)
    values["save_for_backward"] |= any(_requires_gradient(values[n]) for n in GATE_DIFFERENTIABLE)
    done, result = in_functionalize(_operator("kda_gate"), tuple(values.values()))
    return result if done else _GateForward.apply(*values.values())


def gate_backward_kernel(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The kernel of ``kda_gate_backward`` under transforms."""
    values = _schemas.GATE_BACKWARD.bind(args, kwargs)
    values["needs"] = values["needs"] or [values[n] is not None for n in GATE_DIFFERENTIABLE]
    done, result = in_functionalize(_operator("kda_gate_backward"), tuple(values.values()))
    return result if done else _GateBackward.apply(*values.values())


def _constant(t: Any) -> Any:
    """The tensor inside wrappers of ``grad`` that do not follow it; None if a transform changes it."""
    while isinstance(t, Tensor) and is_wrapped(t):
        if t.requires_grad or not is_tracking_gradient(t):
            return None
        t = unwrapped(t)
    return t


def inplace_kernel(schema: _schemas.Schema) -> Callable:
    """The kernel of a writing operator under transforms: the operator, if no transform changes an argument."""
    op = schema.name.removesuffix("_")

    def transformed(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values = schema.bind(args, kwargs)
        constants = {n: _constant(t) for n, t in values.items()}
        if any(constants[n] is None for n, t in values.items() if t is not None):
            name = next(n for n in ("ssm_state_indices", "pool", "out") if values.get(n) is not None)
            name = "inplace_final_state" if name == "pool" and schema is not _schemas.COMMIT else name
            raise ValueError(
                f"{name}: expected no torch.func transform (grad, vmap, ...) of a call that writes to its caller's "
                f"memory; call {op} outside of the transform, or without {name}"
            )
        with outside_of_transforms():
            return _operator(schema.name)(*constants.values())

    return transformed

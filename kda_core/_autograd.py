"""Autograd: of eager calls, the backend's hooks under a plain autograd function; of the operators of ``ops``.

The operators are for compilers, fake and wrapped tensors, modes and second derivatives. They cost an eager
training step half a millisecond, which is longer than the kernels of a small layer. Nor has the function a
``setup_context``: torch then binds the arguments to a signature at every call, which takes longer than the routing.

A call that repeats an earlier one, with gradients or without, has a request made of its tensors, without a look at the
rest of the arguments.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_core import _checks, _torch_private
from kda_core._loaded import Backend
from kda_core._schemas import NAMESPACE, OPERATORS, Operator
from kda_core._signature import Same, is_own
from kda_core._torch_private import needs_operator
from kda_core.errors import NO_DOUBLE_BACKWARD, NO_FORWARD_MODE
from kda_core.request import AnyRequest, ForwardResult, GateRequest, Request

MOST_LAYOUTS = 8
"""Calls of one signature that differ in what a signature leaves out, as a flat bias or the mode, that are kept."""

MOST_RECENT = 4
"""Calls of a function that a new one is compared with before its signature is looked up."""


class Kind:
    """Values that all calls of one signature share.

    Attributes:
        operator: the row of the function.
        names: of the tensors that are given.
        fields: the request's other values, without the memo.
        shaped: names of the tensors that the request has in another shape, with that shape and the given one.
        needed: by what autograd asks for (``needs_input_grad``), the names.
        checked: whether the backend has been seen to save what it announces.
    """

    def __init__(self, r: AnyRequest, names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> None:
        self.operator, self.names, self.memo = OPERATORS[r.op], names, r.memo
        # The class has the defaults. A context is told anew in every call.
        default = vars(type(r)).get
        own = [n for n, x in vars(r).items() if n not in (*names, "memo", "cp_context") and x is not default(n, r)]
        self.fields = {n: getattr(r, n) for n in (*self.operator.options, *own)}
        bound = zip(names, [getattr(r, n) for n in names], tensors, strict=True)
        self.shaped = tuple((n, tuple(x.shape), tuple(t.shape)) for n, x, t in bound if x is not t)
        self.needed: dict[tuple[bool, ...], frozenset[str]] = {}
        self.checked = not self.operator.saved

    def values(self, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
        """The values of a request by name, without the memo."""
        found = self.fields.copy()
        # The compiler of torch 2.7 zips equal lengths only.
        found.update(zip(self.names, tensors, strict=True))
        for name, shape, _ in self.shaped:
            found[name] = found[name].reshape(shape)
        return found

    def request(self, values: dict[str, Any], memo: Any) -> Any:
        """The request with these values, as by ``bind`` and ``Registry.choose``; keeps them."""
        values["memo"] = memo
        made: Any = _new(self.operator.request)
        _set(made, "__dict__", values)
        return made


_new, _set = object.__new__, object.__setattr__


class Repeated(Kind):
    """A call that was seen, with its backend, or what serves calls with a context.

    Attributes:
        same: whether values are those of the call.
        asked: the name of the backend, and whether gradients are recorded: ``same`` knows of neither.
        strides: of the tensors.
        is_plain: whether o and final_state of the backend's result are those of the call.
        has_values: whether there are values of tensors to be checked in every call, or memory of the caller is written.

    Args:
        r: its request, one with a memo.
        values, names: of its arguments.
    """

    def __init__(
        self, backend: Any, asked: tuple[str | None, bool], r: AnyRequest, values: tuple[Any, ...],
        names: tuple[str, ...],
    ) -> None:  # fmt: skip
        # In the order in which a first call saves them.
        first = [names.index(n) for n in OPERATORS[r.op].tensors if n in names]
        places = first + [i for i in range(len(names)) if i not in first]
        self.same = Same(values, places)
        tensors = self.same.tensors(values)
        super().__init__(r, tuple([names[i] for i in places if isinstance(values[i], Tensor)]), tensors)
        self.backend, self.asked, self.strides = backend, asked, [t.stride() for t in tensors]
        self.has_values, self.saves = _checks.has_values(r), r.save_for_backward
        self.output_final_state = getattr(r, "output_final_state", False)
        self.is_plain = isinstance(r, Request) and not (r.return_intermediate_states or r.inplace_final_state)


def with_kind(values: tuple[Any, ...], at: int, bounds: int, state: int) -> tuple[Any, ...] | None:
    """A call's values with all that checks and choices ask of its context in its place, since memos hold no context.

    None where the call may be no repeated one. ``at``, ``bounds``, ``state``: places of the context, of ``cu_seqlens``
    and of the initial state.
    """
    kinds = getattr(values[at], "kinds", None)  # fla's contexts have none
    if kinds is None or values[bounds] is not None:
        return None
    return (*values[:at], kinds[values[state] is not None], *values[at + 1 :])


def note(
    recent: dict[str, tuple[Repeated, ...]], r: Any, asked: tuple[str | None, bool], values: tuple[Any, ...],
    names: tuple[str, ...], choose: Callable[[], Any],
) -> None:  # fmt: skip
    """Keep a call with its signature, and as the last one of its function; arguments as of ``Repeated``."""
    kinds = r.memo[Repeated]
    known = next((k for k in kinds if k.asked == asked and k.same(values) is not None), None)
    if known is None and len(kinds) < MOST_LAYOUTS:
        known = Repeated(choose(), asked, r, values, names)
        kinds.append(known)
    if known is not None and known.same.can_match:
        to_front(recent, known)


def to_front(recent: dict[str, tuple[Repeated, ...]], known: Repeated) -> None:
    """Make a call the last one of its function."""
    op = known.operator.op
    others = [k for k in recent.get(op, ()) if k is not known]
    recent[op] = (known, *others[: MOST_RECENT - 1])


def _given(r: Request | GateRequest, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that the function depends on: the caller's own, rather than views of them in the request's shapes.

    A view is a node of the graph. Repeated calls save the same tensors, as activation checkpointing demands.
    """
    found = {n: t for n in OPERATORS[r.op].tensors if (t := getattr(r, n)) is not None}
    for name, t in found.items():
        own = t if r.memo is None else arguments[name]
        if own is not t and is_own(own):
            found[name] = own
    return found


def _kind(r: Request | GateRequest, given: dict[str, Tensor]) -> Kind:
    """The kind of a request's calls with these tensors."""
    # A context's calls have the memo of a plain one.
    memo = {} if r.memo is None or getattr(r, "cp_context", None) is not None else r.memo
    key = (Kind, *[(n, t.shape) for n, t in given.items() if t is not getattr(r, n)])
    kind = memo.get(key)
    if kind is None:
        kind = memo[key] = Kind(r, tuple(given), tuple(given.values()))
    return kind


def call(backend: Any, r: Request | GateRequest, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The differentiable results of a call whose inputs require gradients: (o, final_state), or (log_decay,).

    ``backend``: a ``Backend``, or what serves a call with a context.
    """
    given = _given(r, arguments)
    strides = None if r.memo is None else strides_of(given.values())
    return _CALLS[r.op].apply(backend, r, _kind(r, given), strides, *given.values())


def repeat(known: Repeated, backend: Any, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same for a call that repeats an earlier one: of the arguments' own tensors."""
    return _APPLY[known.operator.op](backend, None, known, known.strides, *tensors)


def check_gradients(name: str, grads: Sequence[Tensor | None], watched: bool) -> None:
    """Refuse gradients that a backend cannot read."""
    if watched:
        refuse_tangents(name, *grads)
    for grad in grads:
        if grad is not None and _torch_private.is_legacy_batched(grad):
            raise RuntimeError(
                f"{name}: batched gradients (is_grads_batched) are not supported; use torch.func.jacrev, or "
                "torch.func.vjp under torch.func.vmap"
            )


_BEFORE = 4
"""Arguments of ``_Call`` ahead of the tensors."""


def strides_of(tensors: Iterable[Tensor | None]) -> list[tuple[int, ...] | None]:
    """The part of saved tensors that a memo depends on: their hooks may return others, e.g. from the CPU."""
    return [None if t is None else t.stride() for t in tensors]


class _Call(torch.autograd.Function):
    """A call of the tensors that it has."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, r: Any, kind: Kind, strides: Any, *tensors: Tensor) -> tuple:
        if r is None:
            r = kind.request(kind.values(tensors), kind.memo)
        result = backend.forward(r)
        saved = result.saved if kind.operator.saved else ()
        if not kind.checked:
            backend.check_saved(r, saved)
            kind.checked = True
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        # Not the request: it holds the tensors, and autograd decides how long they live.
        ctx.call = backend, kind, strides
        return (result.o, result.final_state) if type(result) is ForwardResult else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        # Read once: under activation checkpointing a second look at saved tensors is an error.
        kept = ctx.saved_tensors
        backend, kind, strides = ctx.call
        names, needs, operator = kind.names, ctx.needs_input_grad, kind.operator
        if grads[0] is None and grads[-1] is None:
            return (None,) * (_BEFORE + len(names))
        given = kept[: len(names)]
        saved = kept[len(names) :]
        compiling = torch.compiler.is_compiling()
        own: Any = grads if compiling else [None if grad is None else grad.resolve_neg() for grad in grads]
        # The compiler of torch 2.7 zips equal lengths only.
        asked = dict(zip(operator.grads, own, strict=True))
        watched = compiling or torch.is_grad_enabled() or needs_operator(*grads)
        if not compiling:
            check_gradients(operator.op, grads, watched)
        # The compiler of torch 2.7 makes no frozenset.
        needed: Any = None if compiling else kind.needed.get(needs)
        if needed is None:
            needed = [n for n, wanted in zip(names, needs[_BEFORE:], strict=True) if wanted]
            if not compiling:
                needed = kind.needed[needs] = frozenset(needed)
        if watched:
            row, more = backend.traced(operator, saved)
            more["needs"] = [n in needed for n in operator.differentiable]
            found = call_backward(row, {**kind.values(given), **asked, **more})
        else:
            more = {"saved": saved, "needs_grad": needed} if operator.saved else {"needs_grad": needed}
            values = kind.values(given)
            values |= asked
            values |= more
            found = backend.backward(kind.request(values, kind.memo if strides == strides_of(given) else None))
        for name, _, shape in kind.shaped:
            if name in needed:
                found = {**found, name: found[name].reshape(shape)}
        return (None,) * _BEFORE + tuple([found[name] if name in needed else None for name in names])


_CALLS: dict[str, Any] = {
    op: types.new_class(
        # The name of its rows in profilers, there followed by "Backward".
        f"{NAMESPACE}::{op}", (_Call,), exec_body=lambda body: body.update(__doc__=_Call.__doc__, __module__=__name__)
    )
    for op, row in OPERATORS.items()
    if row.differentiable
}  # fmt: skip


# Without torch's search for wrappers of transforms that are over, which tensors of repeated calls are not.
_APPLY = {op: super(torch.autograd.Function, function).apply for op, function in _CALLS.items()}


def setup_context(row: Operator, ctx: Any, inputs: tuple, output: Any) -> None:
    """Keep the arguments and results that the backward of a functional operator needs."""
    # Trailing arguments that have their defaults are left out.
    named = row.functional.bind(inputs, {})
    # torch.func asks for a context where no gradient is needed, too.
    if row.saved and not named["save_for_backward"] and any(ctx.needs_input_grad):
        raise ValueError(
            f"save_for_backward: expected True where a gradient is needed; call kda_core.{row.op} with gradients "
            "enabled (a program that was traced or exported without them has none)"
        )
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(named[n] for n in row.tensors), *(output[3:] if row.saved else ()))
    ctx.options = {n: named[n] for n in (*row.options, "backend")}
    if row.saved:
        # Otherwise a gradient of the intermediate states would be dropped in silence.
        ctx.mark_non_differentiable(*output[2 if named["output_final_state"] else 1 :])


def backward(row: Operator, ctx: Any, *grads: Tensor | None) -> tuple:
    """The gradients of a functional operator's arguments."""
    # Read once: under activation checkpointing a second look at saved tensors is an error.
    kept = ctx.saved_tensors
    if not ctx.options.get("output_final_state", True):
        grads = grads[:1]
    given = {n: grad for n, grad in zip(row.grads, grads, strict=False) if grad is not None}
    found: dict[str, Tensor] = {}
    if given:
        named = dict(zip((*row.tensors, *row.saved), kept, strict=True))
        wanted = dict(zip(row.functional.names, ctx.needs_input_grad, strict=False))
        needs = [wanted.get(n, False) for n in row.differentiable]
        found = call_backward(row, {**named, **ctx.options, **given, "needs": needs})
    return tuple(found.get(n) for n in row.functional.names)


def nothing(ctx: Any, inputs: tuple, output: Any) -> None:
    return None


def missing_double_backward(op: str) -> Callable:
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(NO_DOUBLE_BACKWARD.format(op=op))

    return backward


def call_backward(row: Operator, values: dict[str, Any]) -> dict[str, Tensor]:
    """Call a backward operator with its arguments out of ``values``; the gradients that it is asked for, by name."""
    operator = getattr(getattr(torch.ops, row.namespace), row.backward.name)
    found = operator(*(values.get(n) for n in row.backward.names))
    return {n: grad for n, grad, wanted in zip(row.differentiable, found, values["needs"], strict=True) if wanted}


def refuse_tangents(op: str, *values: Any) -> None:
    """Raise if a value has a tangent: operators ignore tangents, so forward-mode results would be wrong."""
    if not _torch_private.in_forward_mode():
        return
    if torch.compiler.is_compiling() or any(map(_has_tangent, values)):
        raise RuntimeError(NO_FORWARD_MODE.format(op=op))


def _has_tangent(t: Any) -> bool:
    if torch.compiler.is_compiling():  # by itself, behind a break of the graph
        return True  # traced tensors have lost their tangents
    # A tangent below vmap is found when the operator reaches that level.
    if not isinstance(t, Tensor) or _torch_private.is_batched(t):
        return False
    return forward_ad.unpack_dual(t).tangent is not None

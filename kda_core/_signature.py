"""Calls that are alike: by their signature, which the choice of a backend depends on, or as repeats of an earlier call.

The signature is a key of the router's cache. A call that repeats an earlier one needs no signature: its tensors and
the options of the earlier one make its request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kda_core import _checks, _torch_private
from kda_core._schemas import OPERATORS
from kda_core._torch_private import is_own
from kda_core.request import AnyRequest, CommitRequest, GateRequest, Request

_PLAIN_OR_ABSENT = frozenset({Tensor, Parameter, type(None)})
_PRIMITIVE = frozenset({bool, int, float, str, type(None), torch.dtype})
_is_nested = attrgetter("is_nested")

MOST_LAYOUTS = 8
"""Calls of one signature that differ in what a signature leaves out, as a flat bias or the mode, that are kept."""

MOST_RECENT = 4
"""Calls of a function that a new one is compared with before its signature is looked up."""

BACKWARD_ONLY = frozenset({"saved", "grad_o", "grad_final_state", "grad_output", "needs_grad"})
"""Fields that the choice does not depend on: a backward runs where its forward ran."""


# A request's fields that a choice may depend on, told apart by their annotations.
_TENSORS = {
    kind: tuple(f.name for f in fields(kind) if f.type in ("Tensor", "Tensor | None") and f.name not in BACKWARD_ONLY)
    for kind in (Request, GateRequest, CommitRequest)
}
_OPTIONS = {
    kind: tuple(f.name for f in fields(kind) if f.name not in {*tensors, *BACKWARD_ONLY, "memo"})
    for kind, tensors in _TENSORS.items()
}
_FIELDS = {kind: (attrgetter(*_OPTIONS[kind]), attrgetter(*_TENSORS[kind])) for kind in _TENSORS}


def signature(request: AnyRequest, name: str | None) -> tuple | None:
    """The key of a call that asks for backend ``name``; None when it has none (fake tensors, values of a wrong type).

    The key holds the types of options, because True == 1 and 64 == 64.0 and the checks accept only one of each. All
    contiguous tensors of a shape count as equal: strides of dimensions of size 1 do not matter. The key holds the
    layout, because an MKL-DNN tensor has the shape, dtype and device of a plain one.
    """
    options, tensors_of = _FIELDS[type(request)]
    values, tensors = options(request), tensors_of(request)
    try:
        if not _PLAIN_OR_ABSENT.issuperset(map(type, tensors)):
            return None
        layouts = [
            None if t is None else (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device, t.layout, t.is_neg())
            for t in tensors
        ]
    except RuntimeError:  # a sparse tensor has no strides: the checks refuse it by name
        return None
    # Types first: keys are compared up to the first difference, and values of different types may not be comparable.
    return (name, *map(type, values), values, *layouts)


class Same:
    """Tells whether values of a call are those of an earlier one, in half the time of the key; None means unknown.

    It compares more than the key does: all strides, ``requires_grad`` and inference mode, but not the gradient mode.

    Args:
        values: of the earlier call.
        keys: of the values that are compared.
        guards: gives torch's class for comparisons, or None.
    """

    def __init__(
        self, values: Any, keys: Iterable[Any], guards: Callable[[], Any] = _torch_private.tensor_guards
    ) -> None:
        given = [k for k in keys if isinstance(values[k], Tensor)]
        self.tensors, self._rest_of = _getter(given), _getter([k for k in keys if k not in given])
        tensors, self._rest = self.tensors(values), self._rest_of(values)
        self._types = tuple(map(type, self._rest))
        # Other options may change between two calls, or hold values of tensors.
        simple = _PRIMITIVE.issuperset(self._types) and all(map(is_own, tensors)) and not any(map(_is_nested, tensors))
        made, self._check = guards() if simple else None, None
        if made is not None:
            sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
            self._check = made(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    @property
    def can_match(self) -> bool:
        """Whether any values will be known as the same."""
        return self._check is not None

    def __call__(self, values: Any) -> tuple[Tensor, ...] | None:
        """The tensors of a call that has the same values."""
        try:
            rest = self._rest_of(values)
            # Types first: values of different types may not be comparable.
            if tuple(map(type, rest)) != self._types or rest != self._rest:
                return None
            tensors = self.tensors(values)
            # torch's check ends the process where a tensor is nested: it has no sizes to compare.
            nested = any(map(_is_nested, tensors))
        except (AttributeError, KeyError):  # something is no tensor, or has another name
            return None
        return None if nested or self._check is None or not self._check(*tensors) else tensors


def _getter(keys: Sequence[Any]) -> Any:
    """The values of these keys, as a tuple."""
    found: Any = itemgetter(*keys) if keys else None
    # A getter returns no tuple for a single key.
    return found if len(keys) > 1 else lambda values: (found(values),) if keys else ()


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

    Args:
        at, bounds, state: places of the context, of ``cu_seqlens`` and of the initial state.

    Returns:
        None where the call may be no repeated one.
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

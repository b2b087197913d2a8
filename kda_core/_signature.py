"""The signature of a call: everything that the choice of a backend depends on, as a key of the router's cache.

Every call passes by here: fields are read by ``attrgetter``, or one by one, because a loop costs 2 µs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kda_core import _torch_private
from kda_core.request import DATA, AnyRequest, CommitRequest, GateRequest, Request

_PLAIN = frozenset({Tensor, Parameter})
_PRIMITIVE = frozenset({bool, int, float, str, type(None), torch.dtype})
_is_nested = attrgetter("is_nested")

BACKWARD_ONLY = frozenset({"saved", "grad_o", "grad_final_state", "grad_output", "needs_grad"})
"""Fields that the choice does not depend on: a backward runs where its forward ran."""


def signature(request: AnyRequest, name: str | None) -> tuple | None:
    """The key of a call that asks for backend ``name``; None when it has none (fake tensors, values of a wrong type).

    A call with a negative view has none either (``checks.resolve_signs``).

    The key holds the types of options, because True == 1 and 64 == 64.0 and the checks accept only one of each. All
    contiguous tensors of a shape count as equal: strides of dimensions of size 1 do not matter. The key holds the
    layout, because an MKL-DNN tensor has the shape, dtype and device of a plain one.
    """
    try:
        return _KINDS[type(request)](request, name)
    except (AttributeError, RuntimeError):
        # A value is no tensor, or a sparse one without strides: the checks refuse it by name.
        return None


def _of_call(r: Any, name: str | None) -> tuple | None:
    q, k, v, g, beta = r.q, r.k, r.v, r.g, r.beta
    if not _PLAIN.issuperset((type(q), type(k), type(v), type(g), type(beta))):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg() or g.is_neg() or beta.is_neg():
        return None
    values = _options_of(r)
    # Types first: keys are compared up to the first difference, and values of different types may not be comparable.
    return (
        name,
        *map(type, values),
        values,
        (q.shape, q.is_contiguous() or q.stride(), q.dtype, q.device, q.layout),
        (k.shape, k.is_contiguous() or k.stride(), k.dtype, k.device, k.layout),
        (v.shape, v.is_contiguous() or v.stride(), v.dtype, v.device, v.layout),
        (g.shape, g.is_contiguous() or g.stride(), g.dtype, g.device, g.layout),
        (beta.shape, beta.is_contiguous() or beta.stride(), beta.dtype, beta.device, beta.layout),
        *[None if t is None else _metadata(t) for t in _optional_tensors_of(r)],
    )


# A request's fields that a choice may depend on, told apart by their annotations.
_TENSORS = {
    kind: tuple(f.name for f in fields(kind) if f.type in ("Tensor", "Tensor | None") and f.name not in BACKWARD_ONLY)
    for kind in (Request, GateRequest, CommitRequest)
}
_OPTIONS = {
    kind: tuple(f.name for f in fields(kind) if f.name not in {*tensors, *BACKWARD_ONLY, "memo"})
    for kind, tensors in _TENSORS.items()
}

_options_of = attrgetter(*_OPTIONS[Request])
_optional_tensors_of = attrgetter(*(n for n in _TENSORS[Request] if n not in DATA))


class Same:
    """Tells whether values of a call are those of an earlier one, in half the time of the key; None means unknown.

    It compares more than the key does: all strides, ``requires_grad`` and inference mode, but not the gradient mode.

    Args:
        values: of the earlier call.
        given: keys of those that are tensors.
        rest: keys of all others.
        getter: ``itemgetter`` or ``attrgetter``, by which keys find values.
        guards: gives torch's class for comparisons, or None.
    """

    def __init__(
        self, values: Any, given: Sequence[Any], rest: Sequence[Any], getter: Any = itemgetter,
        guards: Callable[[], Any] = _torch_private.tensor_guards,
    ) -> None:  # fmt: skip
        self.tensors, self._rest = _getter(given, getter), _getter(rest, getter)
        self.rest = self._rest(values)
        self._types = tuple(map(type, self.rest))
        tensors = self.tensors(values)
        self._check: Any = None if any(map(_is_nested, tensors)) else _comparison(tensors, guards())

    @classmethod
    def of(cls, values: Any, keys: Iterable[Any]) -> Same:
        """That of values by their keys, which says itself which are tensors."""
        given = [k for k in keys if isinstance(values[k], Tensor)]
        rest = [k for k in keys if k not in given]
        # Other options may change between two calls, or hold values of tensors.
        simple = _PRIMITIVE.issuperset([type(values[k]) for k in rest]) and all(is_own(values[k]) for k in given)
        return cls(values, given, rest, guards=_torch_private.tensor_guards if simple else lambda: None)

    @property
    def can_match(self) -> bool:
        """Whether any values will be known as the same."""
        return self._check is not None

    def __call__(self, values: Any) -> tuple[Tensor, ...] | None:
        """The tensors of a call that has the same values."""
        try:
            rest = self._rest(values)
            # Types first: values of different types may not be comparable.
            if tuple(map(type, rest)) != self._types or rest != self.rest:
                return None
            tensors = self.tensors(values)
            # torch's check ends the process where a tensor is nested: it has no sizes to compare.
            nested = any(map(_is_nested, tensors))
        except (AttributeError, KeyError):  # something is no tensor, or has another name
            return None
        return None if nested or self._check is None or not self._check(*tensors) else tensors


class Like:
    """Fast match of a request with an earlier one.

    Args:
        request, name: the call that was seen, one with a key.
        guards: as of ``Same``.
    """

    def __init__(
        self, request: AnyRequest, name: str | None, guards: Callable[[], Any] = _torch_private.tensor_guards
    ) -> None:
        kind = type(request)
        given = [n for n in _TENSORS[kind] if getattr(request, n) is not None]
        absent = [n for n in _TENSORS[kind] if n not in given]
        self._name, self._same = name, Same(request, given, (*_OPTIONS[kind], *absent), attrgetter, guards)

    def __call__(self, request: AnyRequest, name: str | None) -> bool:
        return name == self._name and self._same(request) is not None


def _comparison(tensors: tuple[Tensor, ...], guards: Any) -> Any:
    """A function that tells whether tensors have the metadata of these, in C; None without ``tensor_guards``.

    None of its arguments may be nested: it ends the process, because such a tensor has no sizes to compare.
    """
    if guards is None:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


class Asked:
    """A question of ``supports`` and its answer: it meets the same question without a request.

    Args:
        args, kwargs: tensors by position; tensors and options by name.
        name: the backend that was asked for. answer: of ``supports``.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], name: str | None, answer: tuple[bool, str]) -> None:
        self.answer = answer
        values = dict(enumerate(args)) | kwargs  # type: ignore[operator]
        self._count, self._name, self._grad = len(values), name, torch.is_grad_enabled()
        self._same = Same.of(values, values)

    @property
    def can_match(self) -> bool:
        """Whether any question will be known as the same."""
        return self._same.can_match

    def __call__(self, args: tuple, kwargs: dict[str, Any], name: str | None) -> bool:
        """Whether this question is the same; False means unknown."""
        values = dict(enumerate(args)) | kwargs  # type: ignore[operator]
        if len(values) != self._count or name != self._name or torch.is_grad_enabled() != self._grad:
            return False
        return self._same(values) is not None


def _getter(keys: Sequence[Any], getter: Any) -> Any:
    """The values of these keys, as a tuple."""
    found: Any = getter(*keys) if keys else None
    # A getter returns no tuple for a single key.
    return found if len(keys) > 1 else lambda values: (found(values),) if keys else ()


def _of_other(r: Any, name: str | None) -> tuple:
    options, tensors = _FIELDS_OF_OTHERS[type(r)]
    values = options(r)
    return (name, *map(type, values), values, *[None if t is None else _metadata(t) for t in tensors(r)])


_FIELDS_OF_OTHERS = {k: (attrgetter(*_OPTIONS[k]), attrgetter(*_TENSORS[k])) for k in (GateRequest, CommitRequest)}
_KINDS = {Request: _of_call, GateRequest: _of_other, CommitRequest: _of_other}


def _metadata(t: Tensor) -> tuple:
    if type(t) not in _PLAIN or t.is_neg():
        raise AttributeError(f"{type(t).__name__} has no metadata of its own, or not its own sign")
    return (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device, t.layout)


def is_plain(t: Any) -> bool:
    """Whether ``t`` is a tensor with values, rather than a fake or wrapped one."""
    return type(t) in _PLAIN


def is_own(t: Any) -> bool:
    """Whether ``t`` is a plain tensor that holds its own values: no view with another sign, nothing of a transform."""
    return is_plain(t) and not t.is_neg() and not _torch_private.may_be_wrapped(t)

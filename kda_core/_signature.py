"""The signature of a call: everything that the choice of a backend depends on, as a key of the router's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kda_core import _torch_private
from kda_core.request import AnyRequest, CommitRequest, GateRequest, Request

_PLAIN = frozenset({Tensor, Parameter})
_PLAIN_OR_ABSENT = _PLAIN | {type(None)}
_PRIMITIVE = frozenset({bool, int, float, str, type(None), torch.dtype})
_is_nested = attrgetter("is_nested")

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


def is_plain(t: Any) -> bool:
    """Whether ``t`` is a tensor with values, rather than a fake or wrapped one."""
    return type(t) in _PLAIN


def is_own(t: Any) -> bool:
    """Whether ``t`` is a plain tensor that holds its own values: no view with another sign, nothing of a transform."""
    return is_plain(t) and not t.is_neg() and not _torch_private.may_be_wrapped(t)

"""The signature of a call: everything that the choice of a backend depends on, as a key of the router's cache.

Every call passes by here: fields are read by ``attrgetter``, or one by one, because a loop costs 2 µs more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kda_core import _torch_private
from kda_core.request import DATA, AnyRequest, CommitRequest, GateRequest, Request

_PLAIN = frozenset({Tensor, Parameter})

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


class Like:
    """Fast match with an earlier call, in half the time of the key; False means unknown.

    It compares more than the key does: all strides, ``requires_grad`` and the mode.

    Args:
        request, name: the call that was seen, one with a key.
        guards: gives torch's class for comparisons, or None.
    """

    def __init__(
        self, request: AnyRequest, name: str | None, guards: Callable[[], Any] = _torch_private.tensor_guards
    ) -> None:
        kind = type(request)
        given = [n for n in _TENSORS[kind] if getattr(request, n) is not None]
        absent = [n for n in _TENSORS[kind] if n not in given]
        # torch's check ends the process where a tensor is nested: it has no sizes to compare.
        self._rest = attrgetter(*_OPTIONS[kind], *absent, *(f"{n}.is_nested" for n in given))
        self._name, self._values = name, self._rest(request)
        self._types = tuple(map(type, self._values))
        # attrgetter returns no tuple for a single name.
        self._tensors = attrgetter(*given) if len(given) > 1 else lambda r: (getattr(r, given[0]),)
        self._check = _comparison(self._tensors(request), guards())

    def __call__(self, request: AnyRequest, name: str | None) -> bool:
        if self._check is None or name != self._name:
            return False
        try:
            rest = self._rest(request)
        except AttributeError:  # something is no tensor
            return False
        # Types first: values of different types may not be comparable.
        if tuple(map(type, rest)) != self._types or rest != self._values:
            return False
        return self._check(*self._tensors(request))


def _comparison(tensors: tuple[Tensor, ...], guards: Any) -> Any:
    """A function that tells whether tensors have the metadata of these, in C; None without ``tensor_guards``.

    None of its arguments may be nested: it ends the process, because such a tensor has no sizes to compare.
    """
    if guards is None:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


_is_nested = attrgetter("is_nested")
_PRIMITIVE = frozenset({bool, int, float, str, type(None), torch.dtype})


class Asked:
    """A question of ``supports`` and its answer: it meets the same question without a request.

    Args:
        args, kwargs: tensors by position; tensors and options by name.
        name: the backend that was asked for. answer: of ``supports``.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], name: str | None, answer: tuple[bool, str]) -> None:
        self.answer = answer
        given = [n for n, value in kwargs.items() if isinstance(value, Tensor)]
        rest = [n for n in kwargs if n not in given]
        tensors = (*args, *map(kwargs.__getitem__, given))
        self._count, self._name, self._grad = len(kwargs), name, torch.is_grad_enabled()
        self._given = _getter(given)
        self._rest = _getter(rest)
        self._values = self._rest(kwargs)
        self._types = tuple(map(type, self._values))
        # Other options may change between two questions, or hold values of tensors.
        simple = _PRIMITIVE.issuperset(self._types) and all(map(is_plain, tensors))
        comparable = simple and not any(map(_is_nested, tensors))
        self._check: Any = _comparison(tensors, _torch_private.tensor_guards()) if comparable else None

    @property
    def can_match(self) -> bool:
        """Whether any question will be known as the same."""
        return self._check is not None

    def __call__(self, args: tuple, kwargs: dict[str, Any], name: str | None) -> bool:
        """Whether this question is the same; False means unknown."""
        if len(kwargs) != self._count or name != self._name:
            return False
        try:
            rest = self._rest(kwargs)
            tensors = args + self._given(kwargs)
            if tuple(map(type, rest)) != self._types or rest != self._values or any(map(_is_nested, tensors)):
                return False
        except (KeyError, AttributeError):  # other names, or something is no tensor
            return False
        return torch.is_grad_enabled() == self._grad and self._check(*tensors)


def _getter(names: list[str]) -> Any:
    """The values of these keys of a dictionary, as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    # itemgetter returns no tuple for a single name.
    return (lambda values: (values[names[0]],)) if names else lambda values: ()


def _of_gate(r: Any, name: str | None) -> tuple:
    values = (r.lower_bound, r.save_for_backward)
    return (
        name, *map(type, values), values, _metadata(r.g), None if r.A_log is None else _metadata(r.A_log),
        None if r.dt_bias is None else _metadata(r.dt_bias),
    )  # fmt: skip


def _of_commit(r: Any, name: str | None) -> tuple:
    values = _options_of_commit(r)
    tensors = _tensors_of_commit(r)
    return (name, *map(type, values), values, r.op, *[None if t is None else _metadata(t) for t in tensors])


_options_of_commit = attrgetter(*_OPTIONS[CommitRequest])
_tensors_of_commit = attrgetter(*_TENSORS[CommitRequest])
_KINDS = {Request: _of_call, GateRequest: _of_gate, CommitRequest: _of_commit}


def _metadata(t: Tensor) -> tuple:
    if type(t) not in _PLAIN or t.is_neg():
        raise AttributeError(f"{type(t).__name__} has no metadata of its own, or not its own sign")
    return (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device, t.layout)


def is_plain(t: Any) -> bool:
    """Whether ``t`` is a tensor with values, rather than a fake or wrapped one."""
    return type(t) in _PLAIN

"""The signature of a call: everything that the choice of a backend depends on, as a key of the router's cache.

Every call passes by here: fields are read by ``attrgetter``, or one by one, because a loop costs 2 µs more.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from kda_core import _torch_private
from kda_core.request import DATA, AnyRequest, GateRequest, Request

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
        return _of_gate(request, name) if type(request) is GateRequest else _of_call(request, name)
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
    for kind in (Request, GateRequest)
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
    """

    def __init__(self, request: AnyRequest, name: str | None) -> None:
        kind, guards = type(request), _torch_private.tensor_guards()
        given = [n for n in _TENSORS[kind] if getattr(request, n) is not None]
        absent = [n for n in _TENSORS[kind] if n not in given]
        # torch's check ends the process where a tensor is nested: it has no sizes to compare.
        self._rest = attrgetter(*_OPTIONS[kind], *absent, *(f"{n}.is_nested" for n in given))
        self._name, self._values = name, self._rest(request)
        self._types = tuple(map(type, self._values))
        # attrgetter returns no tuple for a single name.
        self._tensors = attrgetter(*given) if len(given) > 1 else lambda r: (getattr(r, given[0]),)
        self._check: Any = None
        if guards is not None:
            tensors = self._tensors(request)
            sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
            self._check = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

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


def _of_gate(r: Any, name: str | None) -> tuple:
    values = (r.lower_bound, r.save_for_backward)
    return (
        name, *map(type, values), values, _metadata(r.g), None if r.A_log is None else _metadata(r.A_log),
        None if r.dt_bias is None else _metadata(r.dt_bias),
    )  # fmt: skip


def _metadata(t: Tensor) -> tuple:
    if type(t) not in _PLAIN or t.is_neg():
        raise AttributeError(f"{type(t).__name__} has no metadata of its own, or not its own sign")
    return (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device, t.layout)


def is_plain(t: Any) -> bool:
    """Whether ``t`` is a tensor with values, rather than a fake or wrapped one."""
    return type(t) in _PLAIN

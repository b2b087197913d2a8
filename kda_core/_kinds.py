"""Calls that repeat an earlier one: a request is made of their tensors, without a look at the rest of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kda_core import _checks
from kda_core._schemas import OPERATORS
from kda_core._signature import Same
from kda_core.request import AnyRequest, Request

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

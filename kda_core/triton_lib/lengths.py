"""Plans for lengths that were not seen before: what a plan makes of its call's lengths is noted once, then repeated.

A prefill server has another number of tokens and sequences in nearly every call, and so has a trainer of packed
sequences. A plan takes a host longer than many such calls take a GPU, and all that lengths change in it are sizes. So
it is made once with lengths that are ``Number``: they compute as integers do, and note how. Whoever asks such a number
for its value, by a comparison say, notes the answer. For other lengths the notes are followed: where every answer is
the same, so are all decisions, and the plan differs in its numbers alone. A number that is asked for its value in a way
that is not noted here has that value in all that follows, so that a plan made so is never wrong.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from kda_core.request import GatedNormRequest, GateRequest, Request, ShortConvolutionRequest, TensorSpec
from kda_core.triton_lib.plan import View, changed, contiguous_strides, input_layouts, metadata


def _ceil(x: float, _: int) -> int:
    return math.ceil(x)


class Number:
    """A number that follows from lengths.

    Attributes:
        place: among the numbers of ``notes``.
        value: with the lengths that the notes are made with.
    """

    __slots__ = ("notes", "place", "value")

    def __init__(self, notes: Notes, place: int, value: Any) -> None:
        self.notes, self.place, self.value = notes, place, value

    def asked(self) -> Any:
        """The value, which all lengths to come must have here."""
        self.notes.ask(operator.eq, self, self.value)
        return self.value

    def __bool__(self) -> bool:
        return self != 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.asked(), name)

    def __neg__(self) -> Any:
        return 0 - self

    def __ceil__(self) -> Any:
        return self.notes.take(_ceil, self, 0)


class Notes:
    """Numbers that follow from lengths, and how."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._values: list[Any] = list(lengths)
        self.lengths = tuple(Number(self, i, x) for i, x in enumerate(lengths))
        self._known: dict[Any, Any] = {}
        self.steps: list[tuple[Callable[[Any, Any], Any], int, int, int, bool]] = []

    def place(self, x: Any) -> int:
        """The place of a number, which may be a constant."""
        if isinstance(x, Number):
            return x.place
        # Types: 1 and 1.0 are equal.
        found = self._known.get((type(x), x))
        if found is None:
            found = self._known[type(x), x] = len(self._values)
            self._values.append(x)
        return found

    def _step(self, function: Callable[[Any, Any], Any], a: Any, b: Any, asked: bool) -> tuple[int, Any]:
        key = function, *(places := (self.place(a), self.place(b)))
        found = self._known.get(key)
        if found is None:
            value = function(self._values[places[0]], self._values[places[1]])
            found = self._known[key] = len(self._values), value
            self._values.append(value)
            self.steps.append((function, *places, found[0], asked))
        return found

    def take(self, function: Callable[[Any, Any], Any], a: Any, b: Any) -> Number:
        return Number(self, *self._step(function, a, b, False))

    def ask(self, function: Callable[[Any, Any], bool], a: Any, b: Any) -> bool:
        return self._step(function, a, b, True)[1]

    def at(self, lengths: Sequence[int]) -> list[Any]:
        """Numbers by place, before the first step."""
        return [*lengths, *self._values[len(self.lengths) :]]

    def follow(self, values: list[Any], step: int = 0) -> int | None:
        """Fill in numbers from a step on; the step whose answer is another, or None."""
        for i in range(step, len(self.steps)):
            function, a, b, place, asked = self.steps[i]
            value = function(values[a], values[b])
            if not asked:
                values[place] = value
            elif value is not values[place]:
                return i
        return None


def _noted(note: Any, function: Callable[[Any, Any], Any], reflected: bool = False) -> Callable[[Number, Any], Any]:
    """The method of ``Number`` that computes or compares, as ``Notes.take`` or ``Notes.ask`` notes it."""

    def method(self: Number, other: Any) -> Any:
        if not isinstance(other, (Number, int, float)):
            return NotImplemented
        return note(self.notes, function, *((other, self) if reflected else (self, other)))

    return method


for _function in (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv, operator.pow),
    *(operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
):
    _name = _function.__name__.strip("_")
    setattr(Number, f"__{_name}__", _noted(Notes.take, _function))
    setattr(Number, f"__r{_name}__", _noted(Notes.take, _function, True))
for _function in (operator.index, int, float, hash, repr):
    setattr(Number, f"__{_function.__name__}__", lambda self, function=_function: function(self.asked()))
for _function in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
    setattr(Number, f"__{_function.__name__}__", _noted(Notes.ask, _function))


def picker(xs: Sequence[Any]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that gives these numbers with the values that ``Notes.follow`` filled in."""
    notes = next((x.notes for x in xs if type(x) is Number), None)
    if notes is None:
        return lambda values, found=tuple(xs): found
    places = [notes.place(x) for x in xs]
    # itemgetter returns no tuple for a single place.
    return operator.itemgetter(*places) if len(places) > 1 else lambda values: (values[places[0]],)


def filled(x: Any, values: Sequence[Any]) -> Any:
    """A plan, or a part of one, with the numbers that ``Notes.follow`` filled in."""
    if type(x) is Number:
        return values[x.place]
    if isinstance(x, tuple):
        parts = [filled(y, values) for y in x]
        return tuple(parts) if type(x) is tuple else type(x)(*parts)
    if isinstance(x, Mapping):
        return {n: filled(y, values) for n, y in x.items()}
    if is_dataclass(x) and not isinstance(x, type):
        return type(x)(**{f.name: filled(getattr(x, f.name), values) for f in fields(x)})
    return x


MOST_NOTED = 32
"""Plans with numbers that are made of calls that differ in their lengths alone: one for each set of decisions."""

_FIRST = {Request: "q", GateRequest: "g", ShortConvolutionRequest: "x", GatedNormRequest: "x"}
"""Kinds of calls whose plans are noted, and the tensor whose first sizes are the lengths."""

_BY_TOKEN = {
    "q", "k", "v", "g", "beta", "out", "records", "x", "gate", "grad_o", "grad_output", "grad_second", "grad_third",
}  # fmt: skip
_BY_SEQUENCE = {
    "initial_state", "grad_final_state", "ssm_state_indices", "has_initial_state", "final_state_indices", "commit",
    "checkpoint_indices", "num_accepted_tokens", "num_committed", "parents", "commit_path", "cu_seqlens",
    "cu_seqlens_cpu",
}  # fmt: skip


def _is_by_sequence(name: str, request: Any) -> bool:
    is_pool = name == "initial_state" and getattr(request, "ssm_state_indices", None) is not None
    return name in _BY_SEQUENCE and not is_pool


def lengths_of(request: Any) -> tuple[int, int, int] | None:
    """Batch, tokens and sequences; None where plans are not noted: there are none, or more follows from values."""
    name = _FIRST.get(type(request))
    if name is None or (name == "q" and request.return_intermediate_states):
        return None
    shape, cu_seqlens = getattr(request, name).shape, getattr(request, "cu_seqlens", None)
    if len(shape) < 2:
        return None
    return shape[0], shape[1], shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def family(request: Any) -> tuple[Any, ...]:
    """All that a plan follows from, lengths apart."""
    found: list[Any] = [type(request), request.device]
    for name, x in vars(request).items():
        if not isinstance(x, Tensor):
            if name not in ("memo", "saved"):
                found.append((name, x))
        elif name in _BY_TOKEN:
            found.append((name, x.dtype, x.shape[2:], x.is_contiguous() or _rows(x.shape[1], x.stride())))
        else:
            own = x.shape[_is_by_sequence(name, request) :]
            found.append((name, x.dtype, own, x.is_contiguous() or x.stride()))
    return tuple(found)


def _rows(T: int, strides: tuple[int, ...]) -> tuple[bool, tuple[int, ...]]:
    """Strides by token and so on, and whether batches lie one behind the other."""
    return strides[0] == T * strides[1], strides[1:]


def with_numbers(
    request: Any, lengths: Sequence[int], misaligned: frozenset[str],
    saved: Callable[[Request], tuple[TensorSpec, ...]],
) -> tuple[Any, Notes]:  # fmt: skip
    """Metadata of a call with ``Number`` in the place of its lengths, as far as tensors are known to have them.

    Args:
        saved: specs of what a forward saves, for its backward.
    """
    has_saved = bool(getattr(request, "saved", ()))
    r = metadata(changed(request, saved=()) if has_saved else request, misaligned)
    notes = Notes(lengths)
    B, T, N = notes.lengths
    if getattr(r, "cu_seqlens", None) is None:
        N = B
    views = {}
    for name, x in vars(r).items():
        if not isinstance(x, View):
            continue
        if name in _BY_TOKEN:
            dense, others = _rows(lengths[1], x.strides)
            strides = (T * others[0] if dense else x.strides[0], *others)
            views[name] = x._replace(shape=(B, T, *x.shape[2:]), strides=strides)
        elif _is_by_sequence(name, r):
            views[name] = x._replace(shape=(N + 1 if name.startswith("cu_seqlens") else N, *x.shape[1:]))
    r = changed(r, **views)
    if has_saved:
        r.__dict__["saved"] = tuple(
            View(n := f"saved[{i}]", x.shape, contiguous_strides(x.shape), x.dtype, aligned=n not in misaligned)
            for i, x in enumerate(saved(r))
        )
    return r, notes


class Noted:
    """A plan with numbers, bound, and the notes that it was made with.

    Attributes:
        branches: plans for another answer to one of the notes' questions, by its step. Plans are made in one way, so
            that the notes of both are the same up to there.

    Args:
        names: of the inputs.
        r: the request that it was made of.
        plan: has ``at``, which gives it with the values of its numbers.
    """

    def __init__(self, notes: Notes, names: Sequence[str], r: Any, plan: Any) -> None:
        self._notes, self._plan = notes, plan
        views = input_layouts(r)
        found = [views.get(n) for n in names]
        self._layouts = tuple(None if x is None else picker((*x.shape, *x.strides)) for x in found)
        self.branches: dict[int, Noted] = {}

    def look(self, lengths: Sequence[int]) -> tuple[Noted, list[Any], int | None]:
        """The plan for other lengths and its numbers; or the last one, and the step whose answer has no branch."""
        noted, values = self, self._notes.at(lengths)
        step = noted._notes.follow(values)
        while step is not None and step in noted.branches:
            before, noted = noted, noted.branches[step]
            new = noted._notes.at(lengths)
            for *_, place, asked in before._notes.steps[:step]:
                if not asked:
                    new[place] = values[place]
            values, step = new, noted._notes.follow(new, step)
        return noted, values, step

    def add(self, other: Noted, step: int) -> None:
        """A plan for lengths for which ``look`` gave this one and a step."""
        if self._notes.steps[:step] == other._notes.steps[:step]:
            self.branches[step] = other

    def bound(self, values: list[Any], inputs: Sequence[Tensor | None]) -> Any:
        """The plan with these numbers; None where inputs lie in another way."""
        for x, layout in zip(inputs, self._layouts, strict=True):
            if x is not None and (layout is None or (*x.shape, *x.stride()) != layout(values)):
                return None
        return self._plan.at(values)


class Family:
    """Plans with numbers of calls that differ in their lengths alone: a tree of decisions."""

    def __init__(self) -> None:
        self._root: Noted | None = None
        self._made = 0

    def bound(self, lengths: Sequence[int], inputs: Sequence[Tensor | None], make: Callable[[], Noted | None]) -> Any:
        """The plan of a call, bound; None where it has to be made for the call alone.

        Args:
            make: makes it, for any lengths with the same decisions.
        """
        last, values, step = (None, [], 0) if self._root is None else self._root.look(lengths)
        if step is not None:
            self._made += 1
            new = make() if self._made <= MOST_NOTED else None
            if new is None:
                return None
            if last is None:
                self._root = new
            else:
                last.add(new, step)
            last, values, _ = new.look(lengths)
        assert last is not None
        return last.bound(values, inputs)

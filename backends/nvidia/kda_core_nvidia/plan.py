"""Calls like one that came before repeat its launches, with addresses of their own.

What a call launches follows from the shapes, strides, dtypes and options of its arguments, and from nothing else but
where its tensors lie: the way there (descriptors, constants, keys of what is compiled) costs the host more than short
kernels take. So the second call of a kind is noted as it runs, and the ones after it fill in addresses.

Whoever allocates for a call says what for: ``new_result`` (a tensor that outlives it) or ``new_scratch``, which ends
with ``done_with`` or the call. Scratch that begins and ends together is one allocation when it is repeated, never held
for longer than the call that was noted held it. A launch with a tensor from elsewhere (a copy, a part) makes the kind
one that is not repeated.

A plan holds no tensor, and threads share it. It is kept in the memo that the core gives to the calls of one signature,
one for each set of tensors that are not aligned to 16 bytes.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from kda_core.request import Request
from kda_core_nvidia.launch import INTERPRET, Entry, is_descriptor, thread, watched

MAX_PLANS = 1024
"""Plans that are kept, of some 10 KB each: the oldest gives way."""

MAX_ENCODED = 64
"""Addresses for which a launch keeps each of its descriptors, of 0.4 KB: in a model's next step the same come again."""

ALIGNMENT = 512
"""Bytes; as torch allocates."""

_NOT_REPEATED = object()
_SEEN = object()


def new_result(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None, zeros: bool = False) -> Tensor:
    """A tensor that outlives the call, of the dtype of ``like`` unless told otherwise."""
    new = like.new_zeros if zeros else like.new_empty
    x = new(shape) if dtype is None else new(shape, dtype=dtype)
    tape = thread.tape
    if tape is not None:
        tape.note_result(x, zeros)
    return x


def new_scratch(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """A tensor that lasts until ``done_with`` or the end of the call."""
    x = like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=dtype)
    tape = thread.tape
    if tape is not None:
        tape.note_scratch(x)
    return x


def done_with(*tensors: Tensor | None) -> None:
    """Say that no later launch uses this scratch; the caller drops its own references."""
    if thread.tape is not None:
        thread.tape.note_end([x for x in tensors if x is not None])


class _Place:
    """Stands for a tensor of which nothing but its address matters."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Scratch(NamedTuple):
    """Scratch as it was noted: its slot among the values, bytes, and the epoch in which it begins."""

    slot: int
    size: int
    epoch: int


class _Map(NamedTuple):
    """A descriptor of a launch: where it goes, where its address is, what encodes it, and what has been encoded."""

    slot: int
    address: int
    encode: Callable[[int], Any]
    known: dict[int, Any]


class _Launch(NamedTuple):
    """One launch: its descriptors, the function, and what picks its arguments from the values."""

    maps: tuple[_Map, ...]
    call: Callable[..., Any]
    pick: Callable[[list[Any]], tuple[Any, ...]]


class _Epoch(NamedTuple):
    """Launches between two ends of scratch, what is allocated ahead of them and what ends behind them."""

    results: tuple[tuple[int, Callable[[], Tensor]], ...]
    """Each one's slot and what makes it."""
    arenas: tuple[tuple[Callable[[], Tensor], tuple[tuple[int, int], ...]], ...]
    """What makes it, and the slots and offsets of its parts; numbered through all epochs."""
    launches: tuple[_Launch, ...]
    ended: tuple[int, ...]
    """Numbers of arenas."""


_SHARED = frozenset({int, bool, str, type(None)})
"""Types of constants that share a slot when they are equal. Not floats: 0.0 == -0.0."""

_STREAM = 0
"""The slot of the stream."""


class Tape:
    """Notes what a call allocates and launches.

    The values of a call when it is repeated: its stream, the addresses of its inputs, then the template, where
    constants stand and what is allocated and encoded is filled in.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.usable = True
        self._given = 1 + len(inputs)
        self._template: list[Any] = []
        self._constants: dict[Any, int] = {}
        # By id, which is a tensor's own while it lives: the tensor and its slot.
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._alive: dict[int, _Scratch] = {}
        self._ended: list[tuple[_Scratch, int]] = []
        # By epoch: (slot, shape, dtype, zeros); (maps, function, slots)
        self._results: list[list[tuple[int, tuple[int, ...], torch.dtype, bool]]] = [[]]
        self._launches: list[list[tuple[list[_Map], Callable[..., Any], list[int]]]] = [[]]
        for n, x in enumerate(inputs):
            if x is not None:
                self._known[id(x)] = weakref.ref(x), 1 + n

    @property
    def _epoch(self) -> int:
        return len(self._launches) - 1

    def _slot(self, value: Any = None) -> int:
        self._template.append(value)
        return self._given + len(self._template) - 1

    def _constant(self, value: Any) -> int:
        kind = type(value)
        if kind not in _SHARED:
            return self._slot(value)
        found = self._constants.get((kind, value))
        if found is None:
            found = self._constants[kind, value] = self._slot(value)
        return found

    def _slot_of(self, x: Tensor) -> int | None:
        known = self._known.get(id(x))
        if known is None or known[0]() is not x:
            self.usable = False
            return None
        return known[1]

    def note_result(self, x: Tensor, zeros: bool) -> None:
        slot = self._slot()
        self._known[id(x)] = weakref.ref(x), slot
        self._results[-1].append((slot, tuple(x.shape), x.dtype, zeros))

    def note_scratch(self, x: Tensor) -> None:
        slot = self._slot()
        self._known[id(x)] = weakref.ref(x), slot
        self._alive[id(x)] = _Scratch(slot, x.numel() * x.itemsize, self._epoch)

    def note_end(self, tensors: list[Tensor]) -> None:
        ended = [x for x in tensors if id(x) in self._alive]
        for x in ended:
            self._ended.append((self._alive.pop(id(x)), self._epoch))
            del self._known[id(x)]
        if ended:
            self._results.append([])
            self._launches.append([])

    def note_launch(self, found: Entry, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Note a launch of what ``found`` says; ``arguments``: all of the kernel's, its constants among them."""
        if not found.repeats:
            self.usable = False
            return
        slots = [self._constant(x) for x in grid]
        slots += [_STREAM, *(self._constant(x) for x in found.head)]
        maps = []
        for i, x in enumerate(arguments):
            if type(x) in _SHARED:
                slots.append(self._constant(x))
            elif isinstance(x, Tensor):
                slot = self._slot_of(x)
                if slot is None:
                    return
                slots.append(slot)
            elif is_descriptor(x):
                address = self._slot_of(x.base)
                if address is None:
                    return
                maps.append(_Map(self._slot(), address, _encoder(found, i, x), {}))
                slots.append(maps[-1].slot)
                if i in found.descriptors:
                    slots += [self._constant(n) for n in (*x.shape, *x.strides)]
            else:
                slots.append(self._slot(x))
        self._launches[-1].append((maps, found.call, slots))

    def plan(self, made: dict[str, Tensor | None], device: torch.device) -> Plan | None:
        """The plan of what was noted, whose results are ``made``; None when it cannot be repeated."""
        if not self.usable:
            return None
        arenas: dict[tuple[int, int], list[_Scratch]] = {}
        for x, end in (*self._ended, *((x, self._epoch) for x in self._alive.values())):
            arenas.setdefault((x.epoch, end), []).append(x)
        order = sorted(arenas)
        results = [slot for epoch in self._results for slot, *_ in epoch]
        sources: list[tuple[str, int | None, int | None]] = []
        for name, x in made.items():
            slot = None if x is None else self._slot_of(x)
            if slot is None:
                sources.append((name, None, None))
            elif slot < self._given:
                sources.append((name, slot - 1, None))
            elif slot in results:
                sources.append((name, None, results.index(slot)))
            else:
                self.usable = False
        if not self.usable:
            return None
        epochs = []
        for n, (made_here, launched) in enumerate(zip(self._results, self._launches, strict=True)):
            epochs.append(
                _Epoch(
                    tuple((slot, _maker(*rest, device)) for slot, *rest in made_here),
                    tuple(_arena(arenas[key], device) for key in order if key[0] == n),
                    tuple(_Launch(tuple(maps), call, itemgetter(*slots)) for maps, call, slots in launched),
                    tuple(i for i, key in enumerate(order) if key[1] == n),
                )
            )
        return Plan(tuple(epochs), tuple(self._template), tuple(sources), device)


def _maker(shape: tuple[int, ...], dtype: torch.dtype, zeros: bool, device: torch.device) -> Callable[[], Tensor]:
    """What makes a contiguous tensor."""
    if zeros:
        return partial(torch.zeros, shape, dtype=dtype, device=device)
    # The quickest of all functions that allocate.
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def _arena(parts: list[_Scratch], device: torch.device) -> tuple[Callable[[], Tensor], tuple[tuple[int, int], ...]]:
    """What makes an allocation that holds these parts, and (slot, offset) of each."""
    size, places = 0, []
    for x in parts:
        places.append((x.slot, size))
        size += -(-x.size // ALIGNMENT) * ALIGNMENT
    return _maker((size,), torch.uint8, False, device), tuple(places)


def _encoder(found: Entry, position: int, descriptor: Any) -> Callable[[int], Any]:
    """What makes a launch's argument of an address, for a descriptor like this one."""
    kind, fields = type(descriptor), {**vars(descriptor), "base": None}

    def encode(address: int) -> Any:
        new = object.__new__(kind)
        new.__dict__ = {**fields, "base": _Place(address)}
        return found.encode(position, new)

    return encode


class Plan:
    """The launches of a call of one kind."""

    def __init__(
        self,
        epochs: tuple[_Epoch, ...],
        template: tuple[Any, ...],
        sources: tuple[tuple[str, int | None, int | None], ...],
        device: torch.device,
    ) -> None:
        self._epochs, self._template, self._sources = epochs, template, sources
        self._device = device.index
        self._stream = driver.active.get_current_stream

    def repeat(self, inputs: Sequence[Tensor | None], places: list[int]) -> dict[str, Tensor | None]:
        """Launch again, with these inputs, which are at ``places``."""
        values = [self._stream(self._device), *places, *self._template]
        made: list[Tensor] = []
        held: list[Tensor | None] = []
        x: Any
        for results, arenas, launches, ended in self._epochs:
            for slot, make in results:
                x = make()
                made.append(x)
                values[slot] = x.data_ptr()
            for make, parts in arenas:
                x = make()
                held.append(x)
                first = x.data_ptr()
                # Whoever holds it is to be the only one.
                x = None
                for slot, offset in parts:
                    values[slot] = first + offset
            for maps, call, pick in launches:
                for slot, place, encode, known in maps:
                    address = values[place]
                    found = known.get(address)
                    if found is None:
                        found = encode(address)
                        if len(known) >= MAX_ENCODED:
                            known.clear()
                        known[address] = found
                    values[slot] = found
                call(*pick(values))
            for n in ended:
                held[n] = None
        return {
            name: inputs[given] if given is not None else None if n is None else made[n]
            for name, given, n in self._sources
        }


_holders: deque[tuple[dict[Any, Any], Hashable]] = deque()


def planned(
    request: Request,
    key: Hashable,
    inputs: Sequence[Tensor | None],
    run: Callable[[], dict[str, Tensor | None]],
) -> dict[str, Tensor | None]:
    """What ``run()`` returns, by name: results that it allocates and inputs. Repeats its launches where they are known.

    The device of the request is current.

    Args:
        key: tells kinds of calls with one memo apart: all beside the request's signature that launches follow from.
        inputs: every tensor that launches may read or write and ``run`` does not allocate.
    """
    memo = request.memo
    # Of a number that is 0 the sign matters, but two calls with 0.0 and -0.0 are of one signature.
    if memo is None or INTERPRET or not request.scale or watched():
        return run()
    places = [0 if x is None else x.data_ptr() for x in inputs]
    if reduce(or_, places) & 15:
        # What is compiled depends on which of them are aligned, and so does which kernel is taken.
        key = key, tuple(place & 15 == 0 for place in places)
    plan = memo.get(key)
    if isinstance(plan, Plan):
        return plan.repeat(inputs, places)
    if plan is None:
        # Lengths that never come again are not worth a plan.
        memo[key] = _SEEN
        return run()
    given = [id(x) for x in inputs if x is not None]
    if plan is _NOT_REPEATED or len(set(given)) < len(given):
        # Of a tensor that is given twice nobody could say which one a launch takes.
        return run()
    tape = thread.tape = Tape(inputs)
    try:
        made = run()
    finally:
        thread.tape = None
    memo[key] = tape.plan(made, request.device) or _NOT_REPEATED
    _holders.append((memo, key))
    if len(_holders) > MAX_PLANS:
        old, name = _holders.popleft()
        old.pop(name, None)
    return made

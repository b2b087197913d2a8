"""Runs plans: allocates their buffers, binds addresses, launches.

A plan whose kernels are all compiled is bound once: of what a launch is given only addresses and descriptors are new
in every call, and scratch that begins and ends together is one allocation. Where a kernel is not compiled yet, in
Triton's interpreter, and under hooks on launches, the same plan runs through triton's public interface
(``kda_core.triton_lib.run``).

A bound plan holds no tensor, and threads share it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.triton_lib.plan import ALIGNMENT, Buffer, Launch, Plan, Step, Tile, View
from kda_core.triton_lib.run import INTERPRET, PublicPlan, Results, maker, part
from kda_core.triton_lib.run import run_plan as run_plan_with
from kda_core_nvidia import triton_private
from kda_core_nvidia.choose import INTERPRETED, Chip
from kda_core_nvidia.triton_private import Entry


@cache
def chip(device: torch.device) -> Chip:
    """Facts of ``device``."""
    if INTERPRET:
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Chip((properties.major, properties.minor), properties.multi_processor_count)


_entries: dict[Any, _Again | None] = {}
"""How compiled kernels are launched again, by what they were compiled for."""


@cache
def _specialised(kernel: Any) -> frozenset[str]:
    """Names of a kernel's parameters whose integers triton may specialise."""
    return frozenset(x.name for x in kernel.params if not x.do_not_specialize and x.name.startswith("s_"))


def _compiled_for(launch: Launch, device: int | None) -> Hashable:
    """The key for which triton compiles a kernel, by triton's own rules.

    They are: dtypes, 16-byte alignment of tensors, the values of integers that may be specialised, whether other
    integers need 64 bits, and constants. Strides (s_...) are the only integers that the kernels let triton specialise.
    """
    kinds: list[Any] = []
    special = _specialised(launch.kernel)
    for name, x in launch.arguments.items():
        if isinstance(x, View):
            kinds.append((name, x.dtype, x.aligned))
        elif isinstance(x, Tile):
            kinds.append((name, x.base.dtype, *x.block))
        elif isinstance(x, int):
            kinds.append((name, x if name in special else -(2**31) <= x < 2**31))
        else:
            kinds.append((name, x is None))
    return device, id(launch.kernel), launch.num_warps, tuple(launch.constants.items()), tuple(kinds)


class _Map(NamedTuple):
    """A descriptor of a launch: its place, the slot of its address, what encodes it, and what has been encoded."""

    place: int
    slot: int
    encode: Callable[[int], Any]
    known: dict[int, Any]


class _Call(NamedTuple):
    """A step: its descriptors, the function, its arguments, and which places among them take which slots of a call.

    ``arguments`` is None for a step of torch, whose function takes the tensors that are held.
    """

    maps: tuple[_Map, ...]
    function: Callable[..., Any]
    arguments: list[Any] | None
    moves: tuple[tuple[int, int], ...] = ()


class _Epoch(NamedTuple):
    """An epoch of a plan that is bound."""

    allocations: tuple[tuple[Callable[[], Tensor], tuple[tuple[int, int], ...]], ...]
    """A function for each, and the slots and byte offsets of its parts; numbered behind the inputs."""
    calls: tuple[_Call, ...]
    ended: tuple[int, ...]
    """Numbers of allocations."""


class _Again(NamedTuple):
    """How a kernel is launched again, with all that it was compiled for.

    Attributes:
        arguments: constants, and None in the place of others.
        places: those of the others, by the names of parameters.
    """

    entry: Entry
    arguments: list[Any]
    places: tuple[tuple[str, int], ...]


def _again(launch: Launch, entry: Entry | None) -> _Again | None:
    if entry is None:
        return None
    arguments, places = [None] * 4 + list(entry.head), []
    for name in launch.kernel.arg_names:
        if name in launch.arguments:
            places.append((name, len(arguments)))
        arguments.append(launch.constants.get(name))
        if entry.flat and isinstance(launch.arguments.get(name), Tile):
            # Behind a descriptor, its shape and strides.
            arguments += [None] * 4
    return _Again(entry, arguments, tuple(places))


class _Binder:
    """Binds a plan whose kernels are all compiled.

    The slots of a call: its stream, the addresses of its inputs, then those of buffers and of parts of inputs, which
    are filled in.
    """

    def __init__(self, plan: Plan, names: Sequence[str], device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.inputs = {n: i for i, n in enumerate(names)}
        self.filled_in = 0
        self.derived: list[tuple[int, int, int]] = []
        self._places: dict[tuple[str, int], int] = {}
        self._parts: dict[str, list[tuple[int, int]]] = {n: [] for n in plan.buffers}

    def _slot(self) -> int:
        self.filled_in += 1
        return len(self.inputs) + self.filled_in

    def _place(self, x: View) -> int:
        """The slot of a view's address."""
        offset = x.offset * x.itemsize
        number = self.inputs.get(x.source)
        if number is not None and not offset:
            return 1 + number
        found = self._places.get((x.source, offset))
        if found is None:
            found = self._places[x.source, offset] = self._slot()
            if number is None:
                self._parts[x.source].append((found, offset))
            else:
                self.derived.append((found, 1 + number, offset))
        return found

    def _launch(self, launch: Launch, again: _Again) -> _Call:
        # The grid comes first, then the stream.
        arguments, moves = again.arguments.copy(), [(3, 0)]
        arguments[:3] = launch.grid
        maps: list[_Map] = []
        for name, place in again.places:
            x = launch.arguments[name]
            if isinstance(x, View):
                moves.append((place, self._place(x)))
            elif isinstance(x, Tile):
                encode = triton_private.encoder(again.entry, len(maps), x)
                maps.append(_Map(place, self._place(x.base), encode, {}))
                if again.entry.flat:
                    arguments[place + 1 : place + 5] = (*x.shape, x.stride, 1)
            else:
                arguments[place] = x
        return _Call(tuple(maps), again.entry.call, arguments, tuple(moves))

    def epochs(self, entries: dict[int, _Again]) -> tuple[tuple[_Epoch, ...], dict[str, int]]:
        """The epochs, and the number of each result that is a buffer of its own; ``entries``: by id of the launch."""
        plan = self.plan
        calls = [
            [self._launch(s, entries[id(s)]) if isinstance(s, Launch) else s for s in steps] for steps in plan.epochs
        ]
        alone = {x.source for s in plan.steps if not isinstance(s, Launch) for x in s.views()}
        numbers, sizes, made = dict(self.inputs), [], []
        for n in range(len(plan.epochs)):
            groups: dict[Any, list[Buffer]] = {}
            for b in plan.buffers.values():
                if b.epochs[0] == n:
                    own = b.role == "result" or b.zeros or b.name in alone
                    groups.setdefault(b.name if own else b.epochs, []).append(b)
            here = []
            for group in groups.values():
                sizes.append(group[0] if group[0].role == "scratch" else None)
                numbers |= {b.name: len(self.inputs) + len(sizes) - 1 for b in group}
                here.append(self._allocation(group))
            made.append(tuple(here))
        found = []
        for n, (here, steps) in enumerate(zip(made, calls, strict=True)):
            ended = [len(self.inputs) + i for i, b in enumerate(sizes) if b is not None and b.epochs[1] == n]
            bound = tuple(s if isinstance(s, _Call) else _Call((), _torch_step(s, plan, numbers), None) for s in steps)
            found.append(_Epoch(here, bound, tuple(ended)))
        return tuple(found), numbers

    def _allocation(self, group: list[Buffer]) -> tuple[Callable[[], Tensor], tuple[tuple[int, int], ...]]:
        """A function that allocates these buffers as one, and the slots and offsets of their parts."""
        first = group[0]
        if len(group) == 1:
            return maker(first.shape, first.dtype, first.zeros, self.device), tuple(self._parts[first.name])
        size, parts = 0, []
        for b in group:
            parts += [(slot, size + offset) for slot, offset in self._parts[b.name]]
            size += -(-b.nbytes // ALIGNMENT) * ALIGNMENT
        return maker((size,), torch.uint8, False, self.device), tuple(parts)


def _torch_step(step: Step, plan: Plan, numbers: dict[str, int]) -> Callable[[list[Any]], None]:
    """A function of the tensors that are held, for a step of torch."""
    views = tuple(step.views())
    found = [numbers[x.source] for x in views]
    wholes = [b.shape if (b := plan.buffers.get(x.source)) else None for x in views]
    if all(x.shape == whole and not x.offset for x, whole in zip(views, wholes, strict=True)) and len(found) == 2:
        first, second = found
        return lambda held: step.run(held[first], held[second])
    return lambda held: step.run(*(part(held[n], x) for n, x in zip(found, views, strict=True)))


class Bound:
    """A plan that runs for calls of one kind on one device.

    Attributes:
        most_encoded: addresses for which a launch keeps each of its descriptors, of 0.4 KB: a model's next step brings
            the same again.
    """

    most_encoded = 64

    def __init__(
        self, plan: Plan, names: Sequence[str], device: torch.device, private: Any = triton_private,
        entries: dict[Any, _Again | None] = _entries,
    ) -> None:  # fmt: skip
        self.plan, self._names, self._device = plan, tuple(names), device
        self._private, self._entries = private, entries
        self._epochs: tuple[_Epoch, ...] | None = None
        # A kernel that is compiled already, for other lengths, need not be looked for by triton.
        self._bind()

    @cached_property
    def _publicly(self) -> PublicPlan:
        """Runs the plan through triton; few plans need it."""
        return PublicPlan(self.plan, self._names, self._device, self._launch_publicly, triton_private.descriptor)

    def _bind(self) -> None:
        if INTERPRET:
            return
        entries = {id(x): self._entries.get(_compiled_for(x, self._device.index)) for x in self.plan.launches}
        if all(entries.values()):
            binder = _Binder(self.plan, self._names, self._device)
            epochs, numbers = binder.epochs(entries)
            self._empty, self._derived = (0,) * binder.filled_in, tuple(binder.derived)
            results = {n: x if x is None else numbers[x] for n, x in self.plan.results.items()}
            self._results = tuple(results.items())
            self._stream = self._private.current_stream()
            self._epochs = epochs

    def __call__(self, inputs: Sequence[Tensor | None], places: Sequence[int]) -> Results:
        """Run for ``inputs``, which are at ``places``; the results by name."""
        if self._epochs is None or triton_private.watched():
            made = self._publicly(inputs)
            if self._epochs is None:
                self._bind()
            return made
        values = [self._stream(self._device.index), *places, *self._empty]
        for slot, place, offset in self._derived:
            values[slot] = values[place] + offset
        held: list[Tensor | None] = list(inputs)
        x: Any
        for allocations, calls, ended in self._epochs:
            for make, parts in allocations:
                x = make()
                held.append(x)
                first = x.data_ptr()
                for slot, offset in parts:
                    values[slot] = first + offset
            # ``held`` has the only references.
            x = None
            for maps, function, arguments, moves in calls:
                if arguments is None:
                    function(held)
                    continue
                arguments = arguments.copy()
                for place, slot in moves:
                    arguments[place] = values[slot]
                for place, slot, encode, known in maps:
                    address = values[slot]
                    found = known.get(address)
                    if found is None:
                        found = encode(address)
                        if len(known) >= self.most_encoded:
                            known.clear()
                        known[address] = found
                    arguments[place] = found
                function(*arguments)
            for n in ended:
                held[n] = None
        return {name: None if n is None else held[n] for name, n in self._results}

    def _launch_publicly(self, launch: Launch, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        compiled = self._private.launch(launch.kernel, launch.grid, arguments, options)
        if INTERPRET:
            return
        key = _compiled_for(launch, self._device.index)
        if key not in self._entries:
            tiles = sum(isinstance(x, Tile) for x in launch.arguments.values())
            self._entries[key] = _again(launch, self._private.entry(compiled, tiles))


run_plan = partial(run_plan_with, bind=Bound)

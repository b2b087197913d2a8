"""Runs plans: allocates their buffers, binds addresses, launches.

A plan whose kernels are all compiled is bound once: of what a launch is given only addresses and descriptors are new
in every call, and scratch that begins and ends together is one allocation. Where a kernel is not compiled yet, in
Triton's interpreter, and under hooks on launches, the same plan runs through triton's public interface
(``kda_core.triton_lib.run``).

A bound plan holds no tensor, and threads share it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.triton_lib.lengths import Number, filled, picker
from kda_core.triton_lib.plan import ALIGNMENT, Buffer, Launch, Plan, Step, Tile, View, contiguous_strides
from kda_core.triton_lib.run import INTERPRET, PublicPlan, Results, maker, part
from kda_core_nvidia import triton_private
from kda_core_nvidia.choose import INTERPRETED, Chip
from kda_core_nvidia.triton_private import Entry


@cache
def chip(device: torch.device) -> Chip:
    """Facts of ``device``."""
    if INTERPRET:
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Chip(10 * properties.major + properties.minor, properties.multi_processor_count)


_entries: dict[Any, _Again | None] = {}
"""How compiled kernels are launched again, by what they were compiled for."""


@cache
def _specialised(kernel: Any) -> frozenset[str]:
    """Names of a kernel's parameters whose integers triton may specialise."""
    return frozenset(x.name for x in kernel.params if not x.do_not_specialize and x.name.startswith("s_"))


def _compiled_for(launch: Launch, device: int | None) -> Hashable:
    """The key for which triton compiles a kernel, by triton's own rules.

    They are: dtypes, 16-byte alignment of tensors, whether integers need 64 bits, and those that may be specialised are
    1 or multiples of 16, and constants. Strides (s_...) are the only integers that the kernels let triton specialise.
    """
    kinds: list[Any] = []
    special = _specialised(launch.kernel)
    for name, x in launch.arguments.items():
        if isinstance(x, View):
            kinds.append((name, x.dtype, x.aligned))
        elif isinstance(x, Tile):
            kinds.append((name, x.base.dtype, *x.block))
        elif isinstance(x, (int, Number)):
            kinds.append((name, name in special and (x == 1, x % 16 == 0), -(2**31) <= x < 2**31))
        else:
            kinds.append((name, x is None))
    return device, id(launch.kernel), launch.num_warps, tuple(launch.constants.items()), tuple(kinds)


_Pick = Callable[[Sequence[Any]], tuple[Any, ...]]
"""Of ``picker``."""


class Encoded(dict[int, Any]):
    """The descriptors of a tile by their addresses, encoded when they are first asked for.

    Attributes:
        most: descriptors that are kept, of 0.4 KB: a model's next step brings the same again.
    """

    most = 64

    def __init__(self, encode: Callable[[Sequence[int], int], Any], shape: tuple[int, int]) -> None:
        self._encode, self._shape = encode, shape

    def __missing__(self, address: int) -> Any:
        found = self._encode(self._shape, address)
        if len(self) >= self.most:
            self.clear()
        self[address] = found
        return found


class _Call(NamedTuple):
    """A step: its descriptors, the function, its arguments, and which places among them take which slots of a call.

    A descriptor is its place, the slot of its address, and those that are known. ``arguments`` is None for a step of
    torch, whose function takes the tensors that are held.
    """

    maps: tuple[tuple[int, int, Encoded], ...]
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


class _Launch(NamedTuple):
    """A launch as a ``_Call`` for any lengths.

    Attributes:
        numbers: places of arguments that are a ``Number``, and theirs among all numbers.
        tiles: place and slot of each descriptor, what encodes it, and what gives its shape.
    """

    entry: Entry
    arguments: list[Any]
    numbers: tuple[tuple[int, int], ...]
    moves: tuple[tuple[int, int], ...]
    tiles: tuple[tuple[int, int, Callable[[Sequence[int], int], Any], _Pick], ...]

    def at(self, values: Sequence[Any]) -> _Call:
        arguments = self.arguments.copy()
        for place, number in self.numbers:
            arguments[place] = values[number]
        maps = tuple([(place, slot, Encoded(encode, shape(values))) for place, slot, encode, shape in self.tiles])
        return _Call(maps, self.entry.call, arguments, self.moves)


class _TorchStep(NamedTuple):
    """A step of torch for any lengths: the numbers of its tensors, and whether they are parts of these."""

    step: Any
    numbers: tuple[int, ...]
    parts: bool

    def at(self, values: Sequence[Any]) -> _Call:
        step = filled(self.step, values)
        if not self.parts:
            first, second = self.numbers
            return _Call((), lambda held: step.run(held[first], held[second]), None)
        found = tuple(zip(self.numbers, step.views(), strict=True))
        return _Call((), lambda held: step.run(*(part(held[n], x) for n, x in found)), None)


class _Allocation(NamedTuple):
    """An allocation for any lengths, and the slots and byte offsets of its parts."""

    shape: _Pick
    strides: _Pick
    dtype: torch.dtype
    zeros: bool
    slots: tuple[int, ...]
    offsets: _Pick


class _Draft(NamedTuple):
    """An epoch for any lengths."""

    allocations: tuple[_Allocation, ...]
    steps: tuple[_Launch | _TorchStep, ...]
    ended: tuple[int, ...]

    def at(self, values: Sequence[Any], device: torch.device) -> _Epoch:
        made = []
        for x in self.allocations:
            parts = tuple(zip(x.slots, x.offsets(values), strict=True))
            made.append((maker(x.shape(values), x.dtype, x.zeros, device, x.strides(values)), parts))
        return _Epoch(tuple(made), tuple(s.at(values) for s in self.steps), self.ended)


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

    def _place(self, x: View) -> int:
        """The slot of a view's address."""
        # For the few that are a ``Number``: each has plans of its own.
        offset = int(x.offset * x.itemsize)
        number = self.inputs.get(x.source)
        if number is not None and not offset:
            return 1 + number
        found = self._places.get((x.source, offset))
        if found is None:
            self.filled_in += 1
            found = self._places[x.source, offset] = len(self.inputs) + self.filled_in
            if number is None:
                self._parts[x.source].append((found, offset))
            else:
                self.derived.append((found, 1 + number, offset))
        return found

    def _launch(self, launch: Launch, again: _Again) -> _Launch:
        # The grid comes first, then the stream.
        arguments, moves = again.arguments.copy(), [(3, 0)]
        arguments[:3] = launch.grid
        tiles = []
        for name, place in again.places:
            x = launch.arguments[name]
            if isinstance(x, View):
                moves.append((place, self._place(x)))
            elif isinstance(x, Tile):
                encode = triton_private.encoder(again.entry, len(tiles), x)
                tiles.append((place, self._place(x.base), encode, picker(x.shape)))
                if again.entry.flat:
                    arguments[place + 1 : place + 5] = (*x.shape, x.stride, 1)
            else:
                arguments[place] = x
        numbers = tuple((i, x.place) for i, x in enumerate(arguments) if type(x) is Number)
        return _Launch(again.entry, arguments, numbers, tuple(moves), tuple(tiles))

    def epochs(self, entries: dict[int, _Again]) -> tuple[tuple[_Draft, ...], dict[str, int]]:
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
            bound = tuple(s if isinstance(s, _Launch) else _torch_step(s, plan, numbers) for s in steps)
            found.append(_Draft(here, bound, tuple(ended)))
        return tuple(found), numbers

    def _allocation(self, group: list[Buffer]) -> _Allocation:
        """One allocation for these buffers."""
        shape, dtype = group[0].shape, group[0].dtype
        parts = self._parts[group[0].name]
        if len(group) > 1:
            size, parts, dtype = 0, [], torch.uint8
            for b in group:
                parts += [(slot, size + offset) for slot, offset in self._parts[b.name]]
                size += -(-b.nbytes // ALIGNMENT) * ALIGNMENT
            shape = (size,)
        slots, offsets = tuple(slot for slot, _ in parts), picker([offset for _, offset in parts])
        return _Allocation(picker(shape), picker(contiguous_strides(shape)), dtype, group[0].zeros, slots, offsets)


def _torch_step(step: Step, plan: Plan, numbers: dict[str, int]) -> _TorchStep:
    views = tuple(step.views())
    wholes = [b.shape if (b := plan.buffers.get(x.source)) else None for x in views]
    parts = not all(x.shape == whole and not x.offset for x, whole in zip(views, wholes, strict=True))
    return _TorchStep(step, tuple(numbers[x.source] for x in views), parts or len(views) != 2)


class Bound:
    """A plan that runs for calls of one kind on one device."""

    def __init__(
        self, plan: Plan, names: Sequence[str], device: torch.device, private: Any = triton_private,
        entries: dict[Any, _Again | None] = _entries,
    ) -> None:  # fmt: skip
        self._plan, self._names, self._device = plan, tuple(names), device
        self._private, self._entries = private, entries
        self._values: Sequence[Any] = ()
        self._drafts: tuple[_Draft, ...] | None = None
        self._epochs: tuple[_Epoch, ...] | None = None

    @property
    def plan(self) -> Plan:
        return filled(self._plan, self._values) if self._values else self._plan

    @cached_property
    def _publicly(self) -> PublicPlan:
        """Runs the plan through triton; few plans need it."""
        return PublicPlan(self.plan, self._names, self._device, self._launch_publicly, triton_private.descriptor)

    def _draft(self) -> None:
        if INTERPRET:
            return
        entries = {id(x): self._entries.get(_compiled_for(x, self._device.index)) for x in self._plan.launches}
        if all(entries.values()):
            binder = _Binder(self._plan, self._names, self._device)
            drafts, numbers = binder.epochs(entries)
            self._empty, self._derived = (0,) * binder.filled_in, tuple(binder.derived)
            results = {n: x if x is None else numbers[x] for n, x in self._plan.results.items()}
            self._results = tuple(results.items())
            self._stream, self._index = self._private.current_stream(), self._device.index
            # Last: other threads look at it.
            self._drafts = drafts

    @property
    def ready(self) -> bool:
        """Whether ``at`` is of use: what it gives would else be launched through triton for ever."""
        self._draft()
        return INTERPRET or self._drafts is not None

    def at(self, values: Sequence[Any]) -> Bound:
        """The same for a plan with ``Number``, with these values."""
        new = object.__new__(Bound)
        new.__dict__ |= vars(self)
        new._values = values
        return new

    def _bind(self) -> None:
        if self._drafts is None:
            self._draft()
        if self._drafts is not None:
            self._epochs = tuple(x.at(self._values, self._device) for x in self._drafts)

    def __call__(self, inputs: Sequence[Tensor | None], places: Sequence[int]) -> Results:
        """Run for ``inputs``, which are at ``places``; the results by name."""
        if self._epochs is None:
            # A kernel that is compiled already, for other lengths, need not be looked for by triton.
            self._bind()
        if self._epochs is None or triton_private.watched():
            made = self._publicly(inputs)
            if self._epochs is None:
                self._bind()
            return made
        values = [self._stream(self._index), *places, *self._empty]
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
                for place, slot, known in maps:
                    arguments[place] = known[values[slot]]
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

"""Runs plans: allocates their buffers, binds addresses, launches.

A call's plan is looked up by its metadata, or made. A plan whose kernels are all compiled is bound once: what a launch
is given is a tuple picked from a list of addresses and constants, and scratch that begins and ends together is one
allocation. Where a kernel is not compiled yet, in Triton's interpreter, and under hooks on launches, the same plan runs
through triton's public ``kernel[grid](...)``, with every buffer allocated on its own.

A bound plan holds no tensor, and threads share it. It is kept in the memo that the core gives to the calls of one
signature, one for each set of tensors whose addresses are not multiples of 16 bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import cache, partial, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.triton_lib.plan import ALIGNMENT, Buffer, Launch, Plan, Step, Tile, View, contiguous_strides
from kda_core_nvidia import triton_private
from kda_core_nvidia.choose import INTERPRETED, Chip
from kda_core_nvidia.triton_private import Entry

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on CPU tensors (read once: triton reads it once as well)."""

MAX_PLANS = 1024
"""Plans that are kept, of some 20 KB each; the oldest is dropped first."""

MAX_ENCODED = 64
"""Addresses for which a launch keeps each of its descriptors, of 0.4 KB: a model's next step brings the same again."""

_NOTHING_TO_DO = nullcontext()


@cache
def chip(device: torch.device) -> Chip:
    """Facts of ``device``."""
    if INTERPRET:
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Chip((properties.major, properties.minor), properties.multi_processor_count)


def on_device(device: torch.device) -> Any:
    """Make ``device`` current for launches, at no cost when it already is."""
    index = device.index
    if INTERPRET or index is None or index == torch.cuda.current_device():
        return _NOTHING_TO_DO
    return torch.cuda.device(device)


def compile_options(constants: Any) -> dict[str, Any]:
    """Constants and options of a launch as triton is given them.

    Whether multiplications and additions become one instruction is always stated: it decides the bits of results, and
    triton warns (3.9) that its default is going to change.
    """
    return {"enable_fp_fusion": True, **constants}


_entries: dict[Any, Entry | None] = {}
"""How compiled kernels are launched again, by what they were compiled for."""


def _compiled_for(launch: Launch, device: int | None) -> Hashable:
    """What triton compiles a kernel for, by triton's own rules.

    They are: dtypes, 16-byte alignment of tensors, the values of integers that may be specialised, whether other
    integers need 64 bits, and constants. Strides (s_...) are the only integers that the kernels let triton specialise.
    """
    kinds: list[Any] = []
    for parameter in launch.kernel.params:
        x = launch.arguments.get(parameter.name)
        if isinstance(x, View):
            kinds.append((x.dtype, x.aligned))
        elif isinstance(x, Tile):
            kinds.append((x.base.dtype, *x.block))
        elif isinstance(x, int):
            special = not parameter.do_not_specialize and parameter.name.startswith("s_")
            kinds.append(x if special else -(2**31) <= x < 2**31)
        else:
            kinds.append(x is None)
    return device, id(launch.kernel), launch.num_warps, tuple(launch.constants.items()), tuple(kinds)


class _Map(NamedTuple):
    """A descriptor of a launch: where it goes, where its address is, what encodes it, and what has been encoded."""

    slot: int
    address: int
    encode: Callable[[int], Any]
    known: dict[int, Any]


class _Call(NamedTuple):
    """A step: its descriptors, the function, and what picks its arguments from the values.

    ``pick`` is None for a step of torch, whose function takes the tensors that are held.
    """

    maps: tuple[_Map, ...]
    function: Callable[..., Any]
    pick: Callable[[list[Any]], tuple[Any, ...]] | None


class _Epoch(NamedTuple):
    """An epoch of a plan that is bound."""

    allocations: tuple[tuple[Callable[[], Tensor], tuple[tuple[int, int], ...]], ...]
    """A function for each, and the slots and byte offsets of its parts; numbered behind the inputs."""
    calls: tuple[_Call, ...]
    ended: tuple[int, ...]
    """Numbers of allocations."""


_SHARED = frozenset({int, bool, str, type(None)})
"""Types of constants that share a slot when they are equal. Not floats: 0.0 == -0.0."""

_STREAM = 0
"""The slot of the stream."""


class _Binder:
    """Binds a plan whose kernels are all compiled.

    The values of a call: its stream, the addresses of its inputs, then the template, in which constants stand and
    the addresses of buffers, of parts of inputs, and encoded descriptors are filled in.
    """

    def __init__(self, plan: Plan, names: Sequence[str], device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.inputs = {n: i for i, n in enumerate(names)}
        self.template: list[Any] = []
        self.derived: list[tuple[int, int, int]] = []
        self._constants: dict[Any, int] = {}
        self._places: dict[tuple[str, int], int] = {}
        self._parts: dict[str, list[tuple[int, int]]] = {n: [] for n in plan.buffers}

    def _slot(self, value: Any = None) -> int:
        self.template.append(value)
        return len(self.inputs) + len(self.template)

    def _constant(self, value: Any) -> int:
        kind = type(value)
        if kind not in _SHARED:
            return self._slot(value)
        found = self._constants.get((kind, value))
        if found is None:
            found = self._constants[kind, value] = self._slot(value)
        return found

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

    def _launch(self, launch: Launch, found: Entry) -> _Call:
        slots = [self._constant(x) for x in launch.grid]
        slots += [_STREAM, *(self._constant(x) for x in found.head)]
        maps: list[_Map] = []
        for name in launch.kernel.arg_names:
            x = launch.arguments[name] if name in launch.arguments else launch.constants[name]
            if isinstance(x, View):
                slots.append(self._place(x))
            elif isinstance(x, Tile):
                like = triton_private.descriptor(x, _AnyTensor(x.base.dtype))
                encode = triton_private.encoder(found, len(maps), like)
                maps.append(_Map(self._slot(), self._place(x.base), encode, {}))
                slots.append(maps[-1].slot)
                if found.flat:
                    slots += [self._constant(n) for n in (*x.shape, x.stride, 1)]
            else:
                slots.append(self._constant(x))
        return _Call(tuple(maps), found.call, itemgetter(*slots))

    def epochs(self, entries: dict[int, Entry]) -> tuple[tuple[_Epoch, ...], dict[str, int]]:
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
            return _maker(first.shape, first.dtype, first.zeros, self.device), tuple(self._parts[first.name])
        size, parts = 0, []
        for b in group:
            parts += [(slot, size + offset) for slot, offset in self._parts[b.name]]
            size += -(-b.nbytes // ALIGNMENT) * ALIGNMENT
        return _maker((size,), torch.uint8, False, self.device), tuple(parts)


class _AnyTensor:
    """Stands for the tensor of a descriptor that is bound to addresses later."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0

    def element_size(self) -> int:
        return self.dtype.itemsize


def _maker(shape: tuple[int, ...], dtype: torch.dtype, zeros: bool, device: torch.device) -> Callable[[], Tensor]:
    """A function that makes a contiguous tensor."""
    if zeros:
        return partial(torch.zeros, shape, dtype=dtype, device=device)
    # The quickest of all functions that allocate.
    return partial(torch.empty_strided, shape, contiguous_strides(shape), dtype=dtype, device=device)


def _part(base: Tensor, x: View) -> Tensor:
    """The tensor of a view."""
    if not x.offset and tuple(base.shape) == x.shape and base.stride() == x.strides:
        return base
    return base.as_strided(x.shape, x.strides, base.storage_offset() + x.offset)


def _torch_step(step: Step, plan: Plan, numbers: dict[str, int]) -> Callable[[list[Any]], None]:
    """A function of the tensors that are held, for a step of torch."""
    views = tuple(step.views())
    found = [numbers[x.source] for x in views]
    wholes = [b.shape if (b := plan.buffers.get(x.source)) else None for x in views]
    if all(x.shape == whole and not x.offset for x, whole in zip(views, wholes, strict=True)) and len(found) == 2:
        first, second = found
        return lambda held: step.run(held[first], held[second])
    return lambda held: step.run(*(_part(held[n], x) for n, x in zip(found, views, strict=True)))


class Bound:
    """A plan that runs for calls of one kind on one device."""

    def __init__(self, plan: Plan, names: Sequence[str], device: torch.device) -> None:
        self.plan, self._names, self._device = plan, tuple(names), device
        self._epochs: tuple[_Epoch, ...] | None = None
        # What is compiled already, for other lengths, need not be looked for by triton.
        self._bind()

    def _bind(self) -> None:
        if INTERPRET:
            return
        entries = {id(x): _entries.get(_compiled_for(x, self._device.index)) for x in self.plan.launches}
        if all(entries.values()):
            binder = _Binder(self.plan, self._names, self._device)
            epochs, numbers = binder.epochs(entries)
            self._template, self._derived = tuple(binder.template), tuple(binder.derived)
            results = {n: x if x is None else numbers[x] for n, x in self.plan.results.items()}
            self._results = tuple(results.items())
            self._stream = triton_private.current_stream()
            self._epochs = epochs

    def __call__(self, inputs: Sequence[Tensor | None], places: Sequence[int]) -> dict[str, Tensor | None]:
        """Run for ``inputs``, which are at ``places``; the results by name."""
        if self._epochs is None or triton_private.watched():
            return self._run_publicly(inputs)
        values = [self._stream(self._device.index), *places, *self._template]
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
            for maps, function, pick in calls:
                if pick is None:
                    function(held)
                    continue
                for slot, place, encode, known in maps:
                    address = values[place]
                    found = known.get(address)
                    if found is None:
                        found = encode(address)
                        if len(known) >= MAX_ENCODED:
                            known.clear()
                        known[address] = found
                    values[slot] = found
                function(*pick(values))
            for n in ended:
                held[n] = None
        return {name: None if n is None else held[n] for name, n in self._results}

    def _run_publicly(self, inputs: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        """The same through triton's public interface, every buffer on its own."""
        held = dict(zip(self._names, inputs, strict=True))
        plan = self.plan
        for n, steps in enumerate(plan.epochs):
            for b in plan.buffers.values():
                if b.epochs[0] == n:
                    held[b.name] = _maker(b.shape, b.dtype, b.zeros, self._device)()
            for step in steps:
                if isinstance(step, Launch):
                    self._launch_publicly(step, held)
                else:
                    step.run(*(_part(held[x.source], x) for x in step.views()))
            for b in plan.buffers.values():
                if b.role == "scratch" and b.epochs[1] == n:
                    del held[b.name]
        if self._epochs is None:
            self._bind()
        return {name: None if x is None else held[x] for name, x in plan.results.items()}

    def _launch_publicly(self, launch: Launch, held: dict[str, Any]) -> None:
        arguments = []
        for x in (launch.arguments[n] for n in launch.kernel.arg_names if n in launch.arguments):
            if isinstance(x, Tile):
                x = triton_private.descriptor(x, _part(held[x.base.source], x.base))
            arguments.append(_part(held[x.source], x) if isinstance(x, View) else x)
        if INTERPRET:
            triton_private.launch(launch.kernel, launch.grid, arguments, dict(launch.constants))
            return
        options = compile_options(launch.constants) | {"num_warps": launch.num_warps}
        compiled = triton_private.launch(launch.kernel, launch.grid, arguments, options)
        key = _compiled_for(launch, self._device.index)
        if key not in _entries:
            tiles = sum(isinstance(x, Tile) for x in launch.arguments.values())
            _entries[key] = triton_private.entry(compiled, tiles)


_holders: deque[tuple[dict[Any, Any], Hashable]] = deque()


def execute(
    request: Any,
    key: Hashable,
    names: Sequence[str],
    inputs: Sequence[Tensor | None],
    plan: Callable[[Any, Chip, frozenset[str]], Plan],
) -> dict[str, Tensor | None]:
    """Run a call; its results by name.

    Args:
        key: tells plans in one memo apart: everything beside the request's signature that the plan follows from.
        names, inputs: every tensor that a step may read or write and the plan does not allocate.
        plan: makes the plan of the request for a chip; it is told the inputs whose addresses are not multiples of 16
            bytes.
    """
    # Requests of the gate have no memo.
    memo = getattr(request, "memo", None)
    places = [0 if x is None else x.data_ptr() for x in inputs]
    if reduce(or_, places) & 15:
        key = key, tuple(place & 15 == 0 for place in places)
    with on_device(request.device):
        bound = None if memo is None else memo.get(key)
        if bound is None:
            misaligned = frozenset(n for n, place in zip(names, places, strict=True) if place & 15)
            bound = Bound(plan(request, chip(request.device), misaligned), names, request.device)
            if memo is not None:
                memo[key] = bound
                _holders.append((memo, key))
                if len(_holders) > MAX_PLANS:
                    old, name = _holders.popleft()
                    old.pop(name, None)
        return bound(inputs, places)


def run_plan(plan: Plan, request: Any) -> dict[str, Tensor | None]:
    """Run a plan that was made for ``request``, once; its results by name."""
    tensors = {n: x for n, x in vars(request).items() if isinstance(x, Tensor)}
    tensors |= {f"saved[{i}]": x for i, x in enumerate(getattr(request, "saved", ()))}
    inputs = [tensors[n] for n in plan.inputs]
    with on_device(request.device):
        return Bound(plan, tuple(plan.inputs), request.device)(inputs, [x.data_ptr() for x in inputs])

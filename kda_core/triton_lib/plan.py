"""A plan: the buffers and the launches of one call, as data.

A plan follows from a call's metadata (shapes, strides, dtypes, alignment, options) and from facts of the chip, so it
is made without a GPU and holds no tensor. An executor runs it, the ahead-of-time compiler compiles its launches,
``kda explain --plan`` prints it, and tests assert on it.

A plan is divided into epochs. An epoch's buffers are allocated before its first step; scratch that ends with an epoch
is given back after its last step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from kda_core.request import Edges
from kda_core.triton_lib.arguments import has_contiguous_rows

ALIGNMENT = 512
"""Bytes between scratch buffers that share an allocation, as torch's allocator aligns."""

SMALL = 64 * 2**20
"""Bytes of scratch that wait for the end of a call: to the host another allocation is worth more."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch counts them (a dimension of size 0 counts as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))


class View(NamedTuple):
    """A part of an input or of a buffer: all that is known of a tensor without its memory.

    Attributes:
        source: name of the input or the buffer.
        offset: elements from the beginning of the source.
        aligned: the address is a multiple of 16 bytes.
    """

    source: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    aligned: bool = True

    def stride(self, axis: int | None = None) -> Any:
        """As of a tensor: all strides, or one."""
        return self.strides if axis is None else self.strides[axis]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, gaps left out."""
        return self.numel() * self.itemsize

    def is_contiguous(self) -> bool:
        """As of a tensor: strides of dimensions of size 1 do not matter."""
        if 0 in self.shape:
            return True
        own = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return all(n == 1 or s == dense for n, s, dense in own)

    def contiguous(self) -> View:
        """Layout of a contiguous copy; itself if it is contiguous."""
        return self if self.is_contiguous() else dense_view(self.source, self.shape, self.dtype)

    def cut(self, axis: int, rows: slice | None) -> View:
        """``x[..., rows, ...]`` along an axis; itself for None."""
        if rows is None:
            return self
        start = self.strides[axis] * rows.start
        shape = (*self.shape[:axis], rows.stop - rows.start, *self.shape[axis + 1 :])
        aligned = self.aligned and start * self.itemsize % 16 == 0
        return self._replace(shape=shape, offset=self.offset + start, aligned=aligned)

    def flatten(self) -> View:
        """As of a tensor, of [N] or [N, 1]."""
        return self._replace(shape=self.shape[:1], strides=self.strides[:1])

    @property
    def mT(self) -> View:
        """The last two dimensions exchanged."""
        *first, rows, columns = range(len(self.shape))
        order = (*first, columns, rows)
        shape, strides = ([x[i] for i in order] for x in (self.shape, self.strides))
        return self._replace(shape=tuple(shape), strides=tuple(strides))


def dense_view(source: str, shape: Sequence[int], dtype: torch.dtype) -> View:
    """All of a contiguous tensor."""
    return View(source, tuple(shape), contiguous_strides(shape), dtype)


class Tile(NamedTuple):
    """A tensor descriptor: blocks [rows, columns] of a matrix whose last stride is 1.

    Attributes:
        base: where the matrix begins.
        block: rows and columns of a block.
        shape, stride: of the matrix; elements from row to row.
        swizzled: for a kernel written in Gluon, which states how a block lies in shared memory.
        by_rows: for such a kernel, a block whose rows lie one after another.
    """

    base: View
    block: tuple[int, int]
    shape: tuple[int, int]
    stride: int
    swizzled: bool = False
    by_rows: bool = False


def matrix_tile(
    x: View, rows: int, columns: int, width: int = 0, swizzled: bool = False, by_rows: bool = False
) -> Tile:
    """Blocks [rows, width or columns] of contiguous ``x`` as a matrix with rows of ``columns``."""
    return Tile(x, (rows, width or columns), (x.numel() // columns, columns), columns, swizzled, by_rows)


def token_tile(x: View, rows: int, columns: int, swizzled: bool = False, by_rows: bool = False) -> Tile:
    """Blocks of ``rows`` tokens and ``columns`` channels of ``x`` [B, T, H, D], as a matrix of B · T rows."""
    B, T, H, D = x.shape
    _, s_t, s_h, _ = x.strides
    return Tile(x, (rows, columns), (B * T, (H - 1) * s_h + D), s_t, swizzled, by_rows)


class Buffer(NamedTuple):
    """Memory that a plan allocates; contiguous.

    Attributes:
        role: a result outlives the call; scratch ends with its last epoch.
        epochs: the first and the last epoch in which it is used.
        zeros: it is zeroed when it is allocated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Literal["result", "scratch"]
    epochs: tuple[int, int]
    zeros: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Argument = View | Tile | int | float | None


@cache
def _parameters(kernel: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a jitted function's parameters, in order: those that are no constants, and those that are."""
    parameters = inspect.signature(kernel.fn).parameters.values()
    constants = tuple(x.name for x in parameters if "constexpr" in str(x.annotation))
    return tuple(n for n in kernel.arg_names if n not in constants), constants


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: a jitted function with ``arg_names``.
        grid: programs along each axis.
        arguments: the kernel's parameters that are not constants, by name.
        constants: its constants by name, and further options of the compiler.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Any]
    num_warps: int

    def __post_init__(self) -> None:
        names = set(self.kernel.arg_names)
        missing, unknown = names - self.arguments.keys() - self.constants.keys(), self.arguments.keys() - names
        if missing or unknown:
            raise TypeError(f"{self.name}: missing {sorted(missing)}, unknown {sorted(unknown)}")

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def views(self) -> Iterator[View]:
        """The memory that it is given."""
        for x in self.arguments.values():
            if isinstance(x, Tile):
                yield x.base
            elif isinstance(x, View):
                yield x


class Copy(NamedTuple):
    """``target.copy_(source)``."""

    target: View
    source: View

    def views(self) -> Iterator[View]:
        yield from self

    def run(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


class Sum(NamedTuple):
    """``target = source.sum(axes)``, in the order that torch sums."""

    target: View
    source: View
    axes: tuple[int, ...]

    def views(self) -> Iterator[View]:
        yield self.target
        yield self.source

    def run(self, target: Tensor, source: Tensor) -> None:
        if target.dtype == source.dtype:
            torch.sum(source, self.axes, out=target)
        else:
            target.copy_(source.sum(self.axes))


class Release(NamedTuple):
    """Give back the memory of an input that nothing reads afterwards, whoever else holds the tensor."""

    target: View

    def views(self) -> Iterator[View]:
        yield self.target

    def run(self, target: Tensor) -> None:
        target.untyped_storage().resize_(0)


Step = Launch | Copy | Sum | Release


@dataclass(frozen=True)
class Plan:
    """The allocations and launches of one call.

    Attributes:
        inputs: layouts of the tensors that the call is given, by name.
        buffers: what is allocated, by name.
        epochs: the steps of each epoch, in order.
        results: the call's results by name: an input, a buffer, or None.
    """

    inputs: Mapping[str, View]
    buffers: Mapping[str, Buffer]
    epochs: tuple[tuple[Step, ...], ...]
    results: Mapping[str, str | None]

    def __post_init__(self) -> None:
        for number, steps in enumerate(self.epochs):
            for name in {x.source for step in steps for x in step.views()}:
                found = self.buffers.get(name)
                if found is None and name not in self.inputs:
                    raise ValueError(f"{name!r} is neither an input nor a buffer")
                if found is not None and not found.epochs[0] <= number <= found.epochs[1]:
                    raise ValueError(f"{name!r} lasts for epochs {found.epochs} and is used in epoch {number}")

    def whole(self, name: str) -> View:
        """The layout of all of an input or a buffer."""
        b = self.buffers.get(name)
        return self.inputs[name] if b is None else dense_view(name, b.shape, b.dtype)

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(step for steps in self.epochs for step in steps)

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels in the order of their launches."""
        return tuple(x.name for x in self.launches)

    @property
    def peak_scratch(self) -> int:
        """Bytes of scratch in the epoch that holds the most."""
        return max(
            sum(b.nbytes for b in self.buffers.values() if b.role == "scratch" and b.epochs[0] <= n <= b.epochs[1])
            for n in range(len(self.epochs))
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes that pass between steps: each step's tensors counted once.

        A kernel that reads a tensor again (a recurrence reads the keys once for each block of value channels) reads it
        from the cache at best.
        """
        steps = [step for step in self.steps if not isinstance(step, Release)]
        return sum(x.nbytes for step in steps for x in {(x.source, x.offset): x for x in step.views()}.values())

    @property
    def bytes_floor(self) -> int:
        """Bytes of the inputs that are read and of the results: what any implementation has to move."""
        used = {x.source for step in self.steps for x in step.views()}
        results = [b for b in self.buffers.values() if b.role == "result"]
        return sum(x.nbytes for x in [*results, *(x for n, x in self.inputs.items() if n in used)])


class Builder:
    """Collects the buffers and the steps of a plan.

    Args:
        small: bytes of all scratch up to which the plan has one epoch.
    """

    def __init__(self, small: int = SMALL) -> None:
        self._small = small
        self._buffers: dict[str, Buffer] = {}
        self._epochs: list[list[Step]] = [[]]

    def _new(self, name: str, shape: Sequence[int], dtype: torch.dtype, role: Any, zeros: bool) -> View:
        number, unique = 2, name
        while unique in self._buffers:
            number, unique = number + 1, f"{name} {number}"
        now = len(self._epochs) - 1
        self._buffers[unique] = Buffer(unique, tuple(shape), dtype, role, (now, -1), zeros)
        return dense_view(unique, shape, dtype)

    def result(self, name: str, shape: Sequence[int], dtype: torch.dtype, zeros: bool = False) -> View:
        """A tensor that outlives the call."""
        return self._new(name, shape, dtype, "result", zeros)

    def within(self, result: str, shape: Sequence[int], dtype: torch.dtype) -> View:
        """A part of a result of bytes, which becomes as long as all its parts: one allocation for many tensors."""
        if result not in self._buffers:
            self.result(result, (0,), torch.uint8)
        buffer, x = self._buffers[result], dense_view(result, shape, dtype)
        (start,) = buffer.shape
        self._buffers[result] = buffer._replace(shape=(start + -(-x.nbytes // ALIGNMENT) * ALIGNMENT,))
        return x._replace(offset=start // x.itemsize)

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype, zeros: bool = False) -> View:
        """A tensor that lasts until ``free`` or the end of the call."""
        return self._new(name, shape, dtype, "scratch", zeros)

    def free(self, *views: View | None) -> None:
        """End an epoch, and with it the scratch among ``views``; inputs and results are left alone."""
        names = {x.source for x in views if x is not None} & self._buffers.keys()
        ended = [b for n in names if (b := self._buffers[n]).role == "scratch" and b.epochs[1] < 0]
        if ended:
            now = len(self._epochs) - 1
            self._buffers |= {b.name: b._replace(epochs=(b.epochs[0], now)) for b in ended}
            self._epochs.append([])

    def release(self, *inputs: View) -> None:
        """End an epoch, and with it the memory of inputs that the first half of a call made for this one.

        Little memory waits for the end of the call, as scratch does: to the host the call is worth more.
        """
        if sum(x.nbytes for x in inputs) > self._small:
            self._epochs[-1] += [Release(x) for x in inputs]
            self._epochs.append([])

    def step(self, step: Step) -> None:
        self._epochs[-1].append(step)

    def pick(
        self, kernel: Any, grid: int | tuple[int, ...], num_warps: int, named: Mapping[str, Any], /, **options: Any
    ) -> None:
        """Add a launch whose kernel takes what it names from ``named``, constants as well.

        Args:
            grid: programs along axis 0, or along each axis; without any nothing is launched.
            named: values of the kernel's parameters, and of others'.
            options: of the compiler.
        """
        x, y, z = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
        if not x * y * z:
            return
        arguments, constants = ({n: named[n] for n in names if n in named} for names in _parameters(kernel))
        self.step(Launch(kernel, (x, y, z), arguments, {**constants, **options}, num_warps))

    def rows(self, x: View) -> View:
        """``x`` [.., D], copied where its last dimension is not contiguous: kernels take every other stride."""
        return x if has_contiguous_rows(x) else self.dense(x)

    def dense(self, x: View | None) -> View | None:
        """``x`` if it is contiguous, else a contiguous copy in scratch."""
        if x is None or x.is_contiguous():
            return x
        copy = self.scratch(f"{x.source}, contiguous", x.shape, x.dtype)
        self.step(Copy(copy, x))
        return copy

    def plan(self, inputs: Mapping[str, View], results: Mapping[str, View | None]) -> Plan:
        """The plan of all that was added."""
        epochs = [tuple(steps) for steps in self._epochs]
        if sum(b.nbytes for b in self._buffers.values() if b.role == "scratch") <= self._small:
            epochs = [tuple(step for steps in epochs for step in steps)]
        if not epochs[-1] and len(epochs) > 1:
            epochs.pop()
        last = len(epochs) - 1
        buffers = {
            n: b._replace(epochs=(min(b.epochs[0], last), min(b.epochs[1] if b.epochs[1] >= 0 else last, last)))
            for n, b in self._buffers.items()
        }
        return Plan(inputs, buffers, tuple(epochs), {n: x and x.source for n, x in results.items()})


EDGES = tuple(n for n in Edges._fields if n != "sequences")
"""Tensors of ``Edges``."""
EDGE_NAMES = tuple(f"edges.{n}" for n in EDGES)
"""Their names as inputs of plans."""


def handed_over(results: Mapping[str, View | None]) -> dict[str, View | None]:
    """Results of a first half without those that lie in the same buffer as an earlier one (``Builder.within``)."""
    sources = [x and x.source for x in results.values()]
    return {n: x for i, (n, x) in enumerate(results.items()) if x is None or x.source not in sources[:i]}


def received(results: Mapping[str, View | None], kept: Sequence[View]) -> dict[str, View | None]:
    """The results of a first half by name, as parts of the inputs of its second half.

    Args:
        results: of the first half.
        kept: the inputs of the second half for those of ``handed_over`` that are not None.
    """
    given = [x for x in results.values() if x is not None]
    tensors = dict(zip(dict.fromkeys(x.source for x in given), kept, strict=True))
    return {n: x and x._replace(source=tensors[x.source].source) for n, x in results.items()}


def layout(name: str, x: Tensor, aligned: bool = True) -> View:
    return View(name, tuple(x.shape), tuple(x.stride()), x.dtype, aligned=aligned)


def metadata(request: Any, misaligned: frozenset[str] = frozenset()) -> Any:
    """The request with a View in the place of every tensor: what plans and choices follow from.

    Args:
        request: a ``Request`` or a ``GateRequest``; its tensors may be fake.
        misaligned: names of the tensors whose addresses are not multiples of 16 bytes.
    """
    found: dict[str, Any] = {}
    for name, value in vars(request).items():
        if isinstance(value, Tensor):
            found[name] = layout(name, value, name not in misaligned)
        elif name == "saved":
            names = [f"saved[{i}]" for i in range(len(value))]
            views = [x if x is None else layout(n, x, n not in misaligned) for n, x in zip(names, value, strict=True)]
            found[name] = tuple(views)
        elif isinstance(value, Edges):
            given = [(e, n) for e, n in zip(EDGES, EDGE_NAMES, strict=True) if getattr(value, e) is not None]
            views = {e: layout(n, getattr(value, e), n not in misaligned) for e, n in given}
            found[name] = value._replace(**views)
    return changed(request, **found)


R = TypeVar("R", bound=Any)


def changed(request: R, /, **values: Any) -> R:
    """``dataclasses.replace`` of a request, without its initialiser, which sets fifty fields one by one."""
    if unknown := values.keys() - request.__dataclass_fields__.keys():
        raise TypeError(f"{type(request).__name__} has no {', '.join(sorted(unknown))}")
    new = object.__new__(type(request))
    new.__dict__.update(vars(request), **values)
    new.__dict__.pop("memo", None)
    return new


def input_layouts(request: Any) -> dict[str, View]:
    """The layouts in what ``metadata`` returned, by name."""
    values = vars(request).values()
    views = [x for value in values for x in (value if type(value) in (tuple, Edges) else (value,))]
    return {x.source: x for x in views if isinstance(x, View)}

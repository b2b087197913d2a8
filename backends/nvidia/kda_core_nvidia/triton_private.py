"""Everything of triton that its documentation does not promise, in one place, with a fallback.

Triton's own launcher in Python goes through all arguments of every launch, which takes the host longer than short
kernels take the device. The functions that it calls in the end differ from version to version. They are known for
KNOWN; any other version is launched by ``CompiledKernel.run``, as triton launches it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from kda_core.triton_lib.plan import Tile

KNOWN = ("3.6",)
"""Versions whose last function of a launch is called directly."""

SEEN = ("3.6", "3.9")
"""Versions with which this file was checked. A test fails for any other: check this file, then add the version."""

VERSION = ".".join(triton.__version__.split(".")[:2])

_NO_HOOKS = (None, None, None)


def current_stream() -> Callable[[int], int]:
    """The function that gives a device's current stream."""
    return driver.active.get_current_stream


_runtime = triton.knobs.runtime


def watched() -> bool:
    """Whether hooks are set on triton's launches (profilers set them)."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    # Hook chains (empty by default), or a user's replacement.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Entry(NamedTuple):
    """How a compiled kernel is launched again.

    Attributes:
        call: takes the grid, the stream, ``head`` and the kernel's arguments.
        head: the same for every launch.
        flat: descriptors are passed as what ``encode`` made, their shape and their strides.
        encode: (number of the descriptor, descriptor): what is passed in its place.
    """

    call: Callable[..., Any]
    head: tuple[Any, ...]
    flat: bool = False
    encode: Callable[[int, Any], Any] = lambda number, x: x


def entry(compiled: Any, descriptors: int, version: str = VERSION) -> Entry | None:
    """How ``compiled`` is launched again; None when a launch needs more than its arguments.

    Args:
        descriptors: how many of its arguments are descriptors.
        version: of triton.
    """
    run = compiled.run
    if getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0):
        return None
    found = Entry(run, (compiled.function, compiled.packed_metadata, *_NO_HOOKS))
    call = getattr(run, "launch", None)
    if call is None or version not in KNOWN:
        return found
    head = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)
    if not descriptors:
        return Entry(call, (*head, *_NO_HOOKS))
    from triton.backends.nvidia.driver import make_tensordesc_arg

    # ``launch`` encodes descriptors, puts their shapes and strides behind them, and calls this.
    names, cells = getattr(getattr(call, "__code__", None), "co_freevars", ()), getattr(call, "__closure__", None) or ()
    inner = dict(zip(names, cells, strict=False)).get("launcher")
    kinds = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if inner is None or len(kinds) != descriptors or not all(kinds):
        return found
    return Entry(inner.cell_contents, (*head, *_NO_HOOKS), True, lambda n, x: make_tensordesc_arg(x, kinds[n])[0])


def _begin() -> None:
    torch.zeros((), device="cuda")


def in_context(function: Callable[..., Any], *args: Any, begin: Callable[[], None] = _begin) -> Any:
    """``function(*args)``, which may encode descriptors.

    The driver encodes them, and a thread has no context of the driver before it first calls CUDA's runtime.
    """
    try:
        return function(*args)
    except RuntimeError as error:
        if "invalid device context" not in str(error):
            raise
    begin()
    return function(*args)


def launch(kernel: Any, grid: tuple[int, int, int], arguments: list[Any], options: dict[str, Any]) -> Any:
    """Launch through triton's public interface, compiling where that is needed; the compiled kernel."""
    return in_context(lambda: kernel[grid](*arguments, **options))


class _Place:
    """Stands for a tensor of which only the address and the dtype matter."""

    def __init__(self, address: int, dtype: torch.dtype | None = None) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def descriptor(tile: Tile, base: torch.Tensor) -> Any:
    """Triton's descriptor of a tile."""
    shape, strides, block = list(tile.shape), [tile.stride, 1], list(tile.block)
    if not (tile.swizzled or tile.by_rows):
        return TensorDescriptor(base, shape, strides, block)
    return GluonDescriptor(base, shape, strides, block, shared_layout(tile.base.dtype, tile.block, tile.by_rows))


@cache
def shared_layout(dtype: torch.dtype, block: tuple[int, int], by_rows: bool = False) -> Any:
    """How a block lies in shared memory."""
    if by_rows:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=2)
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), kind)


@cache
def _checked(dtype: torch.dtype, block: tuple[int, int], stride: int, swizzled: bool, by_rows: bool) -> Any:
    """A descriptor with these strides and blocks, which triton's constructor has checked."""
    base: Any = _Place(0, dtype)
    return descriptor(Tile(base, block, block, stride, swizzled, by_rows), base)


def encoder(found: Entry, number: int, tile: Tile) -> Callable[[Sequence[int], int], Any]:
    """A function that makes a launch's argument of a shape and an address, for a descriptor of ``tile``.

    The constructor checks the same blocks and strides again, which takes longer than the rest: it is left out.
    """
    # No ``Number`` belongs into a cache.
    like = _checked(tile.base.dtype, tile.block, int(tile.stride), tile.swizzled, tile.by_rows)
    kind, fields = type(like), vars(like)

    def encode(shape: Sequence[int], address: int) -> Any:
        new = object.__new__(kind)
        new.__dict__ = {**fields, "shape": list(shape), "base": _Place(address)}
        return in_context(found.encode, number, new)

    return encode

"""Configurations of the forward's kernels (frozen data: nothing is tuned at run time) and how they are launched."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, fields
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from kda_core.triton_lib.layout import padded

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on CPU tensors (read once: triton reads it once as well)."""


@dataclass(frozen=True, slots=True)
class PrepareConfig:
    """Launch configuration of ``prepare``: channels at a time, warps, depth of the load pipeline.

    ``wide`` and ``wide_stages``: channels and depth of the loops that only multiply what they load.
    """

    block_k: int
    num_warps: int
    stages: int
    wide: int
    wide_stages: int


@dataclass(frozen=True, slots=True)
class RecurrenceConfig:
    """Launch configuration of ``recurrence``: value channels of a program, warps, depth of the load pipeline."""

    block_v: int
    num_warps: int
    stages: int


class Chip(NamedTuple):
    """What the host needs to know about a device."""

    capability: tuple[int, int]
    multiprocessors: int

    @property
    def descriptors(self) -> bool:
        """Whether tiles are loaded through TensorDescriptor (sm_90 and later)."""
        return self.capability >= (9, 0)


@cache
def chip(device: torch.device) -> Chip:
    """Facts about ``device``; the interpreter stands in for a Hopper chip, so that descriptors are exercised."""
    if INTERPRET:
        return Chip((9, 0), 132)
    properties = torch.cuda.get_device_properties(device)
    return Chip((properties.major, properties.minor), properties.multi_processor_count)


_NOTHING_TO_DO = nullcontext()


def on_device(device: torch.device):
    """Make ``device`` current for launches, at no cost when it already is."""
    index = device.index
    if INTERPRET or index is None or index == torch.cuda.current_device():
        return _NOTHING_TO_DO
    return torch.cuda.device(device)


def prepare_config(K: int, dtype: torch.dtype, again: bool = False) -> PrepareConfig:
    """Configuration of ``prepare``; ``again``: of its second run, with what the first one kept."""
    if dtype.itemsize != 2:
        return PrepareConfig(block_k=16, num_warps=1, stages=4, wide=16, wide_stages=4)
    # The way to memory takes so many rows of a block at a time, however short they are: blocks as wide as registers
    # allow, up to a cache line.
    wide = min(64, padded(K))
    if again and wide > 16:
        return PrepareConfig(block_k=32, num_warps=2, stages=4, wide=wide, wide_stages=3)
    # One warp: chunks are many and small, and what a warp does alone needs no barrier. More than 16 channels spill.
    return PrepareConfig(block_k=16, num_warps=1, stages=4, wide=wide, wide_stages=3)


def recurrence_config(
    target: Chip, dtype: torch.dtype, K: int, V: int, sequences_heads: int, h: bool = False
) -> RecurrenceConfig:
    """Configuration of ``recurrence``.

    Blocks of 128 value channels read the keys' tiles half as often, but only wgmma holds their state without spills,
    and with few sequences and heads they would leave most of the chip idle.

    Args:
        h: whether states are stored at chunks: on the way there a whole block passes through shared memory.
    """
    major, wide = target.capability[0], padded(K) > 128
    if dtype == torch.float32:
        if wide:
            return RecurrenceConfig(16, 8, 1)
        return RecurrenceConfig(16, 4, 2)
    if major == 10:
        # Fewer warps spill there, and so do blocks of 64 where the state takes all of them.
        return RecurrenceConfig(32, 8, 2) if wide else RecurrenceConfig(min(padded(V), 64), 8, 3)
    if wide:
        # wgmma holds the state of 128 channels, and each tile of keys is read half as often.
        many = major == 9 and padded(V) >= 128 and not h
        return RecurrenceConfig(128, 8, 3) if many else RecurrenceConfig(min(padded(V), 64), 8, 2)
    if major == 9 and padded(V) >= 128 and sequences_heads * (-(-V // 128)) > 0.6 * target.multiprocessors:
        return RecurrenceConfig(128, 8, 3)
    return RecurrenceConfig(min(padded(V), 64), 4, 3)


def split_scale(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """The output's scale as (power of two, rest): the former enters q, where it rounds nothing, the latter the output.

    An operand that is rounded to 16 bits is the better for every product that it need not hold: without decays, q is
    its own operand. With float32 operands there is nothing to gain, and the rest is 1. float16 operands take no power
    above 1: they have little room upwards, and LIFT has taken most of it. Nor one below 2⁻⁶, which has few digits.
    """
    scale = float(scale)  # an integer would compile kernels that take integers
    mantissa, exponent = math.frexp(scale)
    if dtype.itemsize > 2 or not math.isfinite(scale) or abs(exponent) > 100 or scale == 0:
        return scale, 1.0
    if abs(mantissa) < math.sqrt(0.5):
        exponent -= 1
    power = math.ldexp(1.0, exponent)
    if dtype == torch.float16:
        power = min(max(power, 2.0**-6), 1.0)
    return power, scale / power


def dot_widths(dtype: torch.dtype) -> tuple[int, str, str]:
    """(16-bit terms of a decay, precision of large products, precision of 16×16 products) for an input dtype."""
    if dtype == torch.float32:
        # Three bfloat16 parts hold all of a float32; of two tf32 parts the lower is cut, which single products show.
        # Six bfloat16 products take what three of tf32 do. (The interpreter multiplies float32 whatever it is told.)
        return (1, "ieee", "ieee") if INTERPRET else (3, "bf16x6", "bf16x6")
    # tf32 operands are cut to 11 bits, not rounded: a bias that bfloat16 results hide and float16 ones do not.
    return 2, "tf32", "tf32" if dtype == torch.bfloat16 else "tf32x3"


@cache
def _descriptor(device: torch.device, dtype: torch.dtype, columns: int, rows: int, width: int) -> dict[str, Any]:
    """The fields of a checked descriptor of blocks [rows, width] of a contiguous matrix with so many columns."""
    matrix = torch.empty(rows, columns, dtype=dtype, device=device)
    return vars(TensorDescriptor(matrix, [rows, columns], [columns, 1], [rows, width]))


def row_blocks(x: Tensor, columns: int, rows: int, width: int = 0) -> TensorDescriptor:
    """A descriptor of blocks [rows, width or columns] of ``x``, contiguous and freshly allocated, as [.., columns].

    Checking a descriptor takes longer than the rest of it; those of one kind differ in base and length only.
    """
    found = object.__new__(TensorDescriptor)
    fields = _descriptor(x.device, x.dtype, columns, rows, width or columns)
    found.__dict__ = {**fields, "base": x, "shape": [x.numel() // columns, columns]}
    return found


def token_tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of blocks of ``rows`` tokens and ``columns`` channels of ``x`` [B, T, H, D], as B · T rows."""
    B, T, H, D = x.shape
    _, s_t, s_h, _ = x.stride()
    found = object.__new__(TensorDescriptor)
    fields = _descriptor(x.device, x.dtype, columns, rows, columns)
    found.__dict__ = {**fields, "base": x, "shape": [B * T, (H - 1) * s_h + D], "strides": [s_t, 1]}
    return found


_GLUON_DEFAULTS = {f.name: f.default for f in fields(GluonDescriptor) if f.default is not MISSING}


def gluon_fields(strides: list[int], block_shape: list[int], layout: Any) -> dict[str, Any]:
    """What ``gluon_descriptor`` needs to know beside a tensor and a shape."""
    return {**_GLUON_DEFAULTS, "strides": strides, "block_shape": block_shape, "layout": layout}


def gluon_descriptor(fields: dict[str, Any], x: Tensor, shape: list[int]) -> GluonDescriptor:
    """A descriptor for a kernel written in Gluon, without the checks of its constructor."""
    found = object.__new__(GluonDescriptor)
    found.__dict__ = {**fields, "base": x, "shape": shape}
    return found


def watched() -> bool:
    """Whether somebody hooked into triton's launches (profilers do)."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Chains that are empty unless somebody adds to them, or what somebody put in their places.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _several(positions: Iterable[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that picks what is at these positions (itemgetter answers a tuple for two or more only)."""
    chosen = tuple(positions)
    return itemgetter(*chosen) if len(chosen) > 1 else lambda arguments: tuple(arguments[n] for n in chosen)


class _Thread(threading.local):
    """What a thread is doing: noting the launches of a call (``plan.Tape``), or not."""

    tape: Any = None


thread = _Thread()

_DESCRIPTORS = frozenset({TensorDescriptor, GluonDescriptor})


def is_descriptor(x: Any) -> bool:
    """Whether ``x`` is a descriptor of blocks of a tensor."""
    return type(x) in _DESCRIPTORS


class Entry(NamedTuple):
    """How a compiled kernel is launched once more.

    Attributes:
        compiled: as triton gave it.
        call: takes the grid, the stream, ``head`` and the kernel's arguments.
        head: what is the same for every launch.
        descriptors: positions of descriptors that are not passed as they are, the last one first.
        encode: (position, descriptor): what is passed in its place, and ahead of its shape and strides.
        repeats: whether a launch needs nothing but its arguments.
    """

    compiled: Any
    call: Callable[..., Any]
    head: tuple[Any, ...]
    descriptors: tuple[int, ...] = ()
    encode: Callable[[int, Any], Any] = lambda position, x: x
    repeats: bool = True


# Triton's own launcher in Python goes through all arguments of every launch. What it calls in the end differs from
# version to version; where it is not known, triton's launcher it is.
_KNOWN_DRIVER = triton.__version__.startswith("3.6.")

_NO_HOOKS = (None, None, None)


def entry(compiled: Any, arguments: tuple[Any, ...]) -> Entry:
    """How ``compiled`` is launched again with arguments like these."""
    run = compiled.run
    repeats = not (getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0))
    found = Entry(compiled, run, (compiled.function, compiled.packed_metadata, *_NO_HOOKS), repeats=repeats)
    call = getattr(run, "launch", None)
    if call is None or not _KNOWN_DRIVER or not repeats:
        return found
    head = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)
    positions = tuple(i for i, x in enumerate(arguments) if is_descriptor(x))
    if not positions:
        return Entry(compiled, call, (*head, *_NO_HOOKS))
    from triton.backends.nvidia.driver import make_tensordesc_arg

    # ``launch`` encodes descriptors, puts their shapes and strides behind them, and calls this.
    names, cells = getattr(getattr(call, "__code__", None), "co_freevars", ()), getattr(call, "__closure__", None) or ()
    inner = dict(zip(names, cells, strict=False)).get("launcher")
    kinds = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if inner is None or len(kinds) != len(positions) or not all(kinds):
        return found
    kind = dict(zip(positions, kinds, strict=True))

    def encode(position: int, x: Any) -> Any:
        return make_tensordesc_arg(x, kind[position])[0]

    return Entry(compiled, inner.cell_contents, (*head, *_NO_HOOKS), positions[::-1], encode)


def compile_options(constants: dict[str, Any]) -> dict[str, Any]:
    """Constants and options of a launch as triton is given them.

    Whether multiplications and additions become one instruction is always stated: it decides the bits of results, and
    triton warns (3.9) that what it does by default is going to change.
    """
    return {"enable_fp_fusion": True, **constants}


class Launcher:
    """Launches one kernel, and remembers what was compiled for which kind of arguments.

    Triton finds a compiled kernel again by going through all arguments in Python, which costs more than these kernels
    take for short inputs; here the few that matter make the key. The rules are triton's own: dtypes, 16-byte alignment
    of tensors, the values of integers that may be specialised, and constants. What is found is launched with addresses
    for tensors: of a tensor triton would ask the driver where its memory is, which the core has checked.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Any, Any] = {}
        if INTERPRET:
            return
        # Strides (s_...) are the only numbers that the kernels let triton specialise; the other parameters are tensors.
        free = [p for p in kernel.params if not p.is_constexpr and not p.do_not_specialize]
        self._strides = _several(p.num for p in free if p.name.startswith("s_"))
        # Of the other numbers a kernel knows whether they need 64 bits, where their parameter does not say so.
        narrow = [p for p in kernel.params if p.do_not_specialize and not p.annotation_type]
        self._numbers = _several(p.num for p in narrow)
        self._tensors = tuple(p.num for p in free if not p.name.startswith("s_"))

    def __call__(
        self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int
    ) -> None:
        """Launch.

        Args:
            grid: programs along each axis.
            arguments: the kernel's first parameters, in order.
            constants: its remaining parameters, all constexpr, and further options of the compiler.
            num_warps: warps of a program.
        """
        if INTERPRET:
            self.kernel[grid](*arguments, **constants)
            return
        device = torch.cuda.current_device()
        values, kinds, addresses = list(arguments), [], 0
        for i in self._tensors:
            x = arguments[i]
            if x is None:
                kinds.append(None)
            elif isinstance(x, Tensor):
                address = values[i] = x.data_ptr()
                addresses |= address
                kinds.append(x.dtype)
            else:
                kinds += x.block_shape
        if addresses & 15:
            kinds += [isinstance(arguments[i], Tensor) and values[i] & 15 == 0 for i in self._tensors]
        numbers = self._numbers(arguments)
        if numbers and (max(numbers) >= 2**31 or min(numbers) < -(2**31)):
            kinds += [not -(2**31) <= x < 2**31 for x in numbers]
        key = (device, num_warps, *constants.values(), *self._strides(arguments), *kinds)
        found = self._compiled.get(key)
        tape = thread.tape
        if found is None:
            compiled = self.kernel[grid](*arguments, **compile_options(constants), num_warps=num_warps)
            rest = tuple(constants[name] for name in self.kernel.arg_names[len(arguments) :])
            self._compiled[key] = entry(compiled, arguments), rest
            if tape is not None:
                tape.note_launch(self._compiled[key][0], grid, (*arguments, *rest))
            return
        known, rest = found
        if watched():
            known.compiled[grid](*arguments, *rest)
            return
        if tape is not None:
            tape.note_launch(known, grid, (*arguments, *rest))
        for i in known.descriptors:
            x = values[i]
            values[i : i + 1] = known.encode(i, x), *x.shape, *x.strides
        stream = driver.active.get_current_stream(device)
        known.call(*grid, stream, *known.head, *values, *rest)

"""Patches Triton's interpreter: a third of the time, and a device's arithmetic.

Time: the interpreter prepares ``triton.language`` (hundreds of attributes) at every launch, and again at every call of
a device function within a launch, where it is prepared already; and it builds the type of every value anew, which takes
longer than numpy's arithmetic. ``quicken`` skips the second preparation and remembers types.

Arithmetic (triton 3.6 to 3.9): the interpreter stores bfloat16 as 16-bit integers, multiplies and adds these integers,
and truncates float32 to bfloat16. Its float32 products are those of numpy's BLAS, which rounds differently on every
CPU: with cancelling terms one CPU was 10 times as far off as another. ``correct_arithmetic`` replaces both.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar


def improve() -> None:
    """``quicken`` and ``correct_arithmetic``, if an installed triton supports them."""
    quicken()
    correct_arithmetic()


def _interpreter() -> Any:
    """The module of Triton's interpreter; None: there is no triton."""
    try:
        return importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return None


def quicken() -> bool:
    """Let device functions skip the preparation of their launch, and values of a type share it; False: no triton."""
    interpreter = _interpreter()
    prepare: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if prepare is None or scope is None:
        return False
    if getattr(prepare, "__wrapped__", None) is not None:
        return True
    language = interpreter.tl

    @functools.cache
    def used_by(function: Any) -> list[Any]:
        return [m for m in function.__globals__.values() if inspect.ismodule(m) and m in (language, language.core)]

    @functools.wraps(prepare)
    def prepare_once(function: Any) -> Any:
        used = used_by(function)
        # A prepared function of the language is no longer a built-in one.
        if used and not any(language.core.is_builtin(module.load) for module in used):
            return scope()
        return prepare(function)

    interpreter._patch_lang = prepare_once
    _remember_types(interpreter)
    return True


def _remember_types(interpreter: Any) -> None:
    """Make each block type, each shape of a tensor and each numpy type once; nothing changes them later."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    make_type, make_tensor, numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    broadcast = type(semantic).broadcast_impl_value
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        known = types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        else:
            vars(self).update(known, element_ty=element_ty)  # a pointer's name leaves its address space out

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = shapes.get(type.name)
        if known is None:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    def numpy_type_of(type: Any) -> Any:
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type)
        return numpy_types[name]

    def broadcast_unless_equal(self: Any, a: Any, b: Any) -> Any:
        if a.type.is_block() and b.type.is_block() and a.type.shape.values == b.type.shape.values:
            return a, b
        return broadcast(self, a, b)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    interpreter._get_np_dtype = numpy_type_of
    type(semantic).broadcast_impl_value = broadcast_unless_equal


DEPTH = 16  # Terms of a product that a matrix unit adds up at once


def correct_arithmetic() -> bool:
    """Let the interpreter compute with bfloat16 numbers in float32, and round results and conversions to nearest.

    Products with float32 accumulators are added up DEPTH terms at once, exactly, and then rounded, on every CPU. False:
    there is no triton that can be corrected in this way.
    """
    interpreter = _interpreter()
    builder = getattr(interpreter, "InterpreterBuilder", None)
    if not all(hasattr(builder, name) for name in _Arithmetic.WRAPPERS):
        return False
    if not bfloat16_is_right():
        arithmetic = _Arithmetic(interpreter)
        for name, wrapper in _Arithmetic.WRAPPERS.items():
            setattr(builder, name, wrapper(arithmetic, getattr(builder, name)))
    return True


def bfloat16_is_right() -> bool:
    """Whether ``correct_arithmetic`` has patched the interpreter."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    return hasattr(getattr(getattr(interpreter, "InterpreterBuilder", None), "create_dot", None), "__wrapped__")


class _Arithmetic:
    """Replacements of the builder's methods; ``np`` is the interpreter's numpy."""

    def __init__(self, interpreter: Any) -> None:
        self.handle, self.np = interpreter.TensorHandle, interpreter.np
        self.bfloat16, self.float32 = interpreter.tl.bfloat16, interpreter.tl.float32
        names = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
        self.comparisons = {getattr(self.np, name) for name in names}

    def _is_bfloat16(self, x: Any) -> bool:
        return x.dtype.scalar == self.bfloat16

    def _widened(self, x: Any) -> Any:
        """A handle in float32 instead of bfloat16; any other as it is."""
        if not self._is_bfloat16(x):
            return x
        return self.handle((x.data.astype(self.np.uint32) << 16).view(self.np.float32), self.float32)

    def _narrowed(self, x: Any) -> Any:
        """A float32 handle rounded to bfloat16, to nearest, ties to even. NaN stays NaN."""
        np = self.np
        bits = np.ascontiguousarray(x.data).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return self.handle(np.where(np.isnan(x.data), 0x7FC0, rounded).astype(np.uint16), self.bfloat16)

    def _multiplying(self, multiply: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(multiply)
        def create_dot(builder: Any, a: Any, b: Any, accumulator: Any, *more: Any) -> Any:
            np = self.np
            left, right, total = self._widened(a).data, self._widened(b).data, accumulator.data
            exact = all(x.dtype in (np.float16, np.float32) for x in (left, right)) and total.dtype == np.float32
            if not exact:
                return multiply(builder, a, b, accumulator, *more)
            left, right = left.astype(np.float64), right.astype(np.float64)
            for k in range(0, left.shape[-1], DEPTH):
                terms = left[..., k : k + DEPTH] @ right[..., k : k + DEPTH, :]
                total = (total + terms).astype(np.float32)
            return self.handle(total, accumulator.dtype.scalar)

        return create_dot

    def _converting(self, convert: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(convert)
        def converted(builder: Any, source: Any, to: Any, *more: Any) -> Any:
            if self.bfloat16 not in (source.dtype.scalar, to.scalar) or source.dtype.scalar == to.scalar:
                return convert(builder, source, to, *more)
            wide = self._widened(source)
            new = self.float32 if to.scalar == self.bfloat16 else to
            if wide.dtype.scalar != new.scalar:
                wide = convert(builder, wide, new, *more)
            return self._narrowed(wide) if to.scalar == self.bfloat16 else wide

        return converted

    def _computing(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """A wrapper of ``compute(builder, operand, ..., operation)`` that computes bfloat16 in float32."""

        @functools.wraps(compute)
        def computed(builder: Any, *arguments: Any) -> Any:
            *operands, operation = arguments
            if not any(map(self._is_bfloat16, operands)):
                return compute(builder, *arguments)
            found = compute(builder, *map(self._widened, operands), operation)
            return found if operation in self.comparisons else self._narrowed(found)

        return computed

    WRAPPERS: ClassVar[dict[str, Callable[..., Any]]] = {
        "create_dot": _multiplying,
        "cast_impl": _converting,
        "create_fp_to_fp": _converting,
        "binary_op": _computing,
        "unary_op": _computing,
    }
    """The wrapper of each method of the builder."""

"""Interfaces of torch and of Python that are not public, and what stands in for each where a version lacks it.

Checked with torch 2.7 to 2.13 and Python 3.10 to 3.14. ``MISSING`` names those that the installed versions lack;
``tests/core/test_torch_private.py`` fails when there are any, or when one answers in another way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter
from torch.nn.modules import module as modules
from torch.utils import _python_dispatch

MISSING: list[str] = []
"""Names of the interfaces that are not there."""

F = TypeVar("F", bound=Callable[..., Any])


def _found(owner: Any, path: str, instead: Any) -> Any:
    """The attribute of ``owner`` at ``path``, or ``instead``."""
    found = owner
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        MISSING.append(path)
        return instead
    return found


def _refuse(*args: Any) -> NoReturn:
    raise RuntimeError(f"torch {torch.__version__} lacks what kda_core needs for torch.func; use torch 2.7 to 2.13")


# Modes, wrapped tensors and traces, before which a call must be an operator. Asked for at every call. Without them
# every call is one, which is right and slow.
_in_dispatch_mode = _found(_python_dispatch, "is_in_torch_dispatch_mode", lambda: True)
_transform_level = _found(torch._C, "_functorch.maybe_current_level", lambda: 0)
_tracing_state = _found(torch._C, "_get_tracing_state", lambda: True)


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` watches the operators."""
    return _transform_level() is not None


_forward_mode: Any = None if _found(torch.autograd, "forward_ad._current_level", None) is None else forward_ad


_any_autocast: Callable[[], bool] = _found(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocasts(kind: str) -> bool:
    """Whether autocast is on for devices of this kind."""
    return _any_autocast() and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """A region in which it is off for devices of this kind."""
    return torch.autocast(kind, enabled=False) if autocasts(kind) else nullcontext()


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat`` without autocast, which refuses 16-bit tensors of another dtype than its own."""
    if not _any_autocast():  # a region, even an empty one, takes longer than the rest
        return torch.cat([*tensors], dim)
    with without_autocast(tensors[0].device.type):
        return torch.cat([*tensors], dim)


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open.

    Without torch's count of levels: True outside of compilers, so that each tensor is asked for its tangent.
    """
    if _forward_mode is None:
        return not torch.compiler.is_compiling()
    return _forward_mode._current_level >= 0


def needs_operator(*values: Any) -> bool:
    """Whether a call of these must be an operator: one is a fake or wrapped tensor, or something watches.

    That is a dispatch mode, a transform of ``torch.func``, ``torch.jit.trace``, or forward mode, in which the operator
    finds out whether a tensor has a tangent.
    """
    for t in values:
        if type(t) is not Tensor and type(t) is not Parameter and isinstance(t, Tensor):
            return True
    # Forward mode as in ``in_forward_mode``, written out: every call passes by here.
    if _in_dispatch_mode() or _transform_level() is not None or _tracing_state() is not None:
        return True
    return _forward_mode is None or _forward_mode._current_level >= 0


# Without them a layer calls each of its parts, which is right and slow.
_forward_pre, _forward, _backward_pre, _backward = (
    _found(modules, f"_global_{when}_hooks", {0: None})
    for when in ("forward_pre", "forward", "backward_pre", "backward")
)


def has_global_hooks() -> bool:
    """Whether hooks wait for the calls of every module (``torch.nn.modules.module.register_module_forward_hook``)."""
    return bool(_forward_pre or _forward or _backward_pre or _backward)


# Tensors that transforms wrap.
is_batched: Callable[[Tensor], bool] = _found(torch._C, "_functorch.is_batchedtensor", lambda t: False)
# A backend that cannot read such a gradient raises an error of its own.
is_legacy_batched: Callable[[Tensor], bool] = _found(torch._C, "_functorch.is_legacy_batchedtensor", lambda t: False)
is_wrapped: Callable[[Tensor], bool] = _found(torch._C, "_functorch.is_functorch_wrapped_tensor", _refuse)
is_tracking_gradient: Callable[[Tensor], bool] = _found(torch._C, "_functorch.is_gradtrackingtensor", _refuse)
unwrapped: Callable[[Tensor], Tensor] = _found(torch._C, "_functorch.get_unwrapped", _refuse)

may_be_wrapped: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda t: True)

TRANSFORMS_KEY = "FuncTorchDynamicLayerFrontMode"
"""Dispatch key that ``torch.func`` asks first."""


def implement_under_transforms(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    """Register what an operator does under ``torch.func``; without the key torch reports that it does not work."""
    try:
        library.impl(name, kernel, TRANSFORMS_KEY)
    except RuntimeError:  # torch knows no such key
        MISSING.append(TRANSFORMS_KEY)


def in_functionalize(operator: Callable[..., Any], arguments: tuple) -> tuple[bool, Any]:
    """Run an operator under ``torch.func.functionalize``, which autograd functions do not support.

    Returns:
        Whether the innermost transform is ``functionalize``, and the operator's result when it is.
    """
    try:
        from torch._functorch.pyfunctorch import FunctionalizeInterpreter, retrieve_current_functorch_interpreter
        from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI
    except ImportError:
        _refuse()
    interpreter = retrieve_current_functorch_interpreter()
    if not isinstance(interpreter, FunctionalizeInterpreter):
        return False, None
    context = FunctorchFunctionalizeAPI(interpreter)
    inner = context.unwrap_tensors(arguments)
    with context.redispatch_to_next():
        return True, context.wrap_tensors(operator(*inner))


def outside_of_transforms() -> AbstractContextManager[Any]:
    """A context in which no transform of ``torch.func`` sees the operators."""
    try:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    except ImportError:
        _refuse()
    return temporarily_clear_interpreter_stack()


def constant_in_graphs(function: F) -> F:
    """Let a compiler call a function while it traces, and keep the result as a constant of the graph.

    The same mark as ``torch.compiler.assume_constant_result`` sets. Calling that would import the compiler (a second,
    and triton) into every process.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@cache
def tensor_guards() -> Any:
    """The class by which torch's compiled graphs compare tensors with those that they were made for; None without it.

    ``TensorGuards(*tensors, dynamic_dims_sizes=..., dynamic_dims_strides=...).check(*others)``.
    """
    try:
        from torch._C._dynamo import guards

        made: Any = guards.TensorGuards
        one = torch.empty(1, 2, device="cpu")
        like = made(one, dynamic_dims_sizes=[[1, 2]], dynamic_dims_strides=[[2, 1]]).check
        works = like(one) and not like(one.t()) and not like(one.double()) and not like(None)
    except Exception:  # a private function that has changed may raise anything: SystemError was seen
        works = False
    if not works:
        MISSING.append("_C._dynamo.guards.TensorGuards")
        return None
    return made


@cache
def empty_strided_on(device_type: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """A function that allocates on the current device of a type, in half the time of ``torch.empty_strided``.

    Code that ``torch.compile`` generates allocates by it.
    """

    def publicly(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device_type)

    return _found(torch._C, f"_dynamo.guards._empty_strided_{device_type}", publicly)


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which new tensors have metadata and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """While it lasts, this process is the first of a group of processes that are not there."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


profiling: Any = profiler
"""``profiling._is_profiler_enabled`` says whether a profiler runs. Without it calls have no rows in profilers.

The public ``torch.autograd._profiler_enabled()`` takes five times as long.
"""
if _found(torch.autograd, "profiler._is_profiler_enabled", None) is None:
    profiling = SimpleNamespace(_is_profiler_enabled=False)


def environment(variable: str) -> tuple[Any, Any]:
    """``os.environ`` without encoding the name each time, which takes a microsecond of every call: mapping and key."""
    with suppress(AttributeError):
        return os.environ._data, os.environ.encodekey(variable)  # type: ignore[attr-defined]
    MISSING.append("os.environ._data")
    return os.environ, variable

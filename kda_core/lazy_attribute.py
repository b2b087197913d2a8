"""An attribute that is computed at its first use, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class lazy_attribute(Generic[Value]):
    """``functools.cached_property`` without its lock.

    Before Python 3.12 ``cached_property`` holds one lock for all objects of a class while it computes. A child process
    that is forked meanwhile inherits the locked lock without the thread that would release it, and waits for ever.
    Here two threads may compute at once; both get the first answer.

    Args:
        compute: the method; its answer depends on nothing that changes.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy_attribute[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        # No data descriptor: from now on the instance's own entry is found first.
        return instance.__dict__.setdefault(self.name, self.compute(instance))

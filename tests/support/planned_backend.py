"""A backend with the plans of an installed one, for another chip or another executor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kda_core.capabilities import Available
from kda_core.hookspecs import hookimpl


class PlannedBackend:
    """A backend whose calls are those of a ``Calls`` object, on any device.

    Args:
        plugin: the installed backend's plugin, which says what it declares.
        calls: a ``Calls``.
        info: fields of its ``BackendInfo`` that differ.
    """

    def __init__(self, plugin: Any, calls: Any, **info: Any) -> None:
        self.plugin, self.calls, self.info = plugin, calls, replace(plugin.kda_core_backend(), **info)

    @hookimpl
    def kda_core_backend(self) -> Any:
        return self.info

    @hookimpl
    def kda_core_availability(self, device: Any) -> Any:
        return Available("planned as for another device")

    @hookimpl
    def kda_core_reject(self, request: Any) -> Any:
        return self.plugin.kda_core_reject(request)

    @hookimpl
    def kda_core_chunk_finish(self, request: Any, kept: Any, starts: Any) -> Any:
        return self.calls.chunk_finish(request, kept, starts)

    @hookimpl
    def kda_core_chunk_finish_backward(self, request: Any, kept: Any, ends: Any) -> Any:
        return self.calls.chunk_finish_backward(request, kept, ends)

    @hookimpl
    def kda_core_commit(self, request: Any) -> Any:
        return request.pool


def _passed_on(name: str) -> Any:
    @hookimpl
    def hook(self: PlannedBackend, request: Any) -> Any:
        return getattr(self.calls, name)(request)

    return hook


for _name in (
    "chunk_forward", "chunk_backward", "chunk_begin", "chunk_begin_backward", "recurrent_forward",
    "recurrent_backward", "gate_forward", "gate_backward", "saved_specs",
):  # fmt: skip
    setattr(PlannedBackend, f"kda_core_{_name.removesuffix('s')}", _passed_on(_name))

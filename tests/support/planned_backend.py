"""A backend with the plans of an installed one, for another chip or another executor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kda_core.capabilities import Available
from kda_core.hookspecs import hookimpl


class PlannedBackend:
    """A backend whose calls are those of a ``Calls`` object, on any device.

    Args:
        plugin: the installed backend's plugin, which says what it declares and saves.
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
    def kda_core_saved_spec(self, request: Any) -> Any:
        return self.plugin.kda_core_saved_spec(request)

    @hookimpl
    def kda_core_chunk_forward(self, request: Any) -> Any:
        return self.calls.chunk_forward(request)

    @hookimpl
    def kda_core_chunk_backward(self, request: Any) -> Any:
        return self.calls.chunk_backward(request)

    @hookimpl
    def kda_core_chunk_begin(self, request: Any) -> Any:
        return self.calls.chunk_begin(request)

    @hookimpl
    def kda_core_chunk_finish(self, request: Any, kept: Any, starts: Any) -> Any:
        return self.calls.chunk_finish(request, kept, starts)

    @hookimpl
    def kda_core_chunk_begin_backward(self, request: Any) -> Any:
        return self.calls.chunk_begin_backward(request)

    @hookimpl
    def kda_core_chunk_finish_backward(self, request: Any, kept: Any, ends: Any) -> Any:
        return self.calls.chunk_finish_backward(request, kept, ends)

    @hookimpl
    def kda_core_recurrent_forward(self, request: Any) -> Any:
        return self.calls.recurrent_forward(request)

    @hookimpl
    def kda_core_recurrent_backward(self, request: Any) -> Any:
        return self.calls.recurrent_backward(request)

    @hookimpl
    def kda_core_commit(self, request: Any) -> Any:
        return request.pool

    @hookimpl
    def kda_core_gate_forward(self, request: Any) -> Any:
        return self.calls.gate_forward(request)

    @hookimpl
    def kda_core_gate_backward(self, request: Any) -> Any:
        return self.calls.gate_backward(request)

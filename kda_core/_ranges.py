"""Names of calls in profilers, e.g. ``kda_core::chunk_kda (cpu) [1, 2048, 8, 128]``.

A row covers the work of a backend in one call, forward or backward. It lies within the row of the operator or autograd
function (``kda_core::chunk_kda``) and contains those of the kernels. torch.profiler shows it, and so do tools that read
``torch.autograd.profiler.emit_nvtx`` or ``emit_itt``. While no profiler runs, a call reads one flag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

from kda_core._schemas import NAMESPACE, OPERATORS
from kda_core.request import AnyRequest, CommitRequest, GateRequest

ROWS = {
    hook: f"{NAMESPACE}::{row.op}{direction}"
    for row in OPERATORS.values()
    for hook, direction in zip(row.hooks, ("", "_backward"), strict=False)
}
"""Hooks that compute, with the operator that each one serves."""


def call_within_range(caller: Callable[..., Any], backend: str, hook: str, request: Any) -> Any:
    """Call a backend's hook inside a row; hooks that compute nothing have none."""
    if hook not in ROWS:
        return caller(request=request)
    with profiler.record_function(row_name(backend, hook, request)):
        return caller(request=request)


def row_name(backend: str, hook: str, request: AnyRequest) -> str:
    """The operator, the backend and the shape: of q; of v too where that differs; the number of packed sequences."""
    if isinstance(request, GateRequest):
        return f"{ROWS[hook]} ({backend}) {list(request.g.shape)}"
    if isinstance(request, CommitRequest):
        return f"{ROWS[hook]} ({backend}) {list(request.records.shape)}"
    shapes = str(list(request.q.shape))
    if request.v.shape != request.q.shape:
        shapes += f", v {list(request.v.shape)}"
    if request.cu_seqlens is not None:
        shapes += f", {request.N} sequences"
    return f"{ROWS[hook]} ({backend}) {shapes}"

"""Names of calls in profilers, e.g. ``kda_core::chunk_kda (cpu) [1, 2048, 8, 128]``.

A row covers the work of a backend in one call, forward or backward. It lies within the row of the operator or autograd
function (``kda_core::chunk_kda``) and contains those of the kernels. torch.profiler shows it, and so do tools that read
``torch.autograd.profiler.emit_nvtx`` or ``emit_itt``. While no profiler runs, a call reads one flag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

from kda_core.request import AnyRequest, CommitRequest, GateRequest

ROWS = {
    "kda_core_chunk_forward": "kda_core::chunk_kda",
    "kda_core_chunk_backward": "kda_core::chunk_kda_backward",
    "kda_core_recurrent_forward": "kda_core::fused_recurrent_kda",
    "kda_core_recurrent_backward": "kda_core::fused_recurrent_kda_backward",
    "kda_core_commit": "kda_core::commit_kda",
    "kda_core_gate_forward": "kda_core::kda_gate",
    "kda_core_gate_backward": "kda_core::kda_gate_backward",
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

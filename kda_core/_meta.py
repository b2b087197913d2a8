"""Tensors on ``device="meta"``: results have the shapes, dtypes and strides of a real call, and no values.

Results do not depend on the backend: none has to be installed and none runs. If the caller names a backend, the call
must need only features that it declares; its devices do not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from kda_core._loaded import Backend
from kda_core._results import chunks_of
from kda_core.capabilities import BackendInfo, Capabilities
from kda_core.request import AnyRequest, BackwardResult, CommitRequest, ForwardResult, GateRequest, Request, TensorSpec

NAME = "meta"


def is_meta(request: AnyRequest) -> bool:
    """Whether the call's tensors have no values; fake tensors that stand for tensors of a device do not count."""
    return request.device.type == "meta"


def empty_o(r: Request) -> Tensor:
    """The output of a call, with any content."""
    return r.v.new_empty((r.B, r.T, r.HV, r.V), dtype=r.q.dtype)


def empty_results(r: Request, chunks: Callable[[Request], int | torch.SymInt] = chunks_of) -> ForwardResult:
    """Results of a call, with any content; ``chunks``: the number of its intermediate states."""
    final_state = h = None
    if r.output_final_state and not r.inplace_final_state:
        final_state = r.v.new_empty(r.state_shape, dtype=r.state_dtype)
    if r.return_intermediate_states:
        h = r.v.new_empty((r.B, chunks(r), *r.state_shape[1:]), dtype=r.h_dtype)
    return ForwardResult(empty_o(r) if r.out is None else r.out, final_state, h)


class MetaBackend(Backend):
    """Serves calls on meta tensors; no user can name it."""

    def __init__(self) -> None:
        nothing = Capabilities(frozenset(), frozenset())
        info = BackendInfo(NAME, "1.0", SpecifierSet("~=1.0"), (NAME,), None, nothing)
        super().__init__(info, plugin=self, manager=None)  # type: ignore[arg-type]

    def _caller(self, hook: str) -> Callable[..., Any]:
        return getattr(self, hook)

    def kda_core_saved_spec(self, request: Request) -> tuple[TensorSpec, ...]:
        return ()

    def kda_core_chunk_forward(self, request: Request) -> ForwardResult:
        return empty_results(request)

    def kda_core_chunk_backward(self, request: Request | GateRequest) -> BackwardResult:
        inputs = {name: getattr(request, name) for name in request.needs_grad}
        return BackwardResult(
            {name: torch.empty_like(t, memory_format=torch.contiguous_format) for name, t in inputs.items()}
        )

    kda_core_recurrent_forward = kda_core_chunk_forward
    kda_core_recurrent_backward = kda_core_gate_backward = kda_core_chunk_backward

    def kda_core_commit(self, request: CommitRequest) -> Tensor:
        return request.pool

    def kda_core_gate_forward(self, request: GateRequest) -> Tensor:
        return request.g.new_empty(request.g.shape, dtype=request.output_dtype)


META = MetaBackend()

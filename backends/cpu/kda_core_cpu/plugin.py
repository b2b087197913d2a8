"""The CPU backend's hooks and what it declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from kda_core.capabilities import FEATURES_1_2, Available, BackendInfo, Capabilities, Feature, Unavailable
from kda_core.hookspecs import hookimpl
from kda_core.request import AnyRequest, BackwardResult, CommitRequest, ForwardResult, GateRequest, Request, TensorSpec
from kda_core_cpu import __version__, chunk_backward, chunk_forward, commit, gate, recurrent
from kda_core_cpu.results import saved_spec

Call = TypeVar("Call")
Result = TypeVar("Result")

_INFO = BackendInfo(
    name="cpu",
    version=__version__,
    contract=SpecifierSet("~=1.2"),
    device_types=("cpu",),
    priority=10,
    capabilities=Capabilities(
        features=FEATURES_1_2,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
        closed={Feature.CONTEXT_PARALLEL: "it has no hooks in halves; the core makes plain calls of it"},
    ),
    summary="vectorised torch: chunk and recurrent form, hand-derived backward, any log decay",
)


def _without_autograd(compute: Callable[[Call], Result], request: Call) -> Result:
    """Run a hook's computation with the caller's autograd and autocast off."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return _without_autograd(compute, request)
    if torch.is_grad_enabled():
        with torch.no_grad():
            return compute(request)
    return compute(request)


@hookimpl
def kda_core_backend() -> BackendInfo:
    return _INFO


@hookimpl
def kda_core_availability(device: torch.device) -> Available | Unavailable:
    if device.type != "cpu":
        return Unavailable(f"serves cpu tensors, not {device.type}")
    return Available(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")


@hookimpl
def kda_core_reject(request: AnyRequest) -> str | None:
    return None


@hookimpl
def kda_core_saved_spec(request: Request) -> tuple[TensorSpec, ...]:
    return saved_spec(request) if request.op == "chunk_kda" else ()


@hookimpl
def kda_core_chunk_forward(request: Request) -> ForwardResult:
    return _without_autograd(chunk_forward.chunk_forward, request)


@hookimpl
def kda_core_chunk_backward(request: Request) -> BackwardResult:
    return _without_autograd(chunk_backward.chunk_backward, request)


@hookimpl
def kda_core_recurrent_forward(request: Request) -> ForwardResult:
    return _without_autograd(recurrent.recurrent_forward, request)


@hookimpl
def kda_core_recurrent_backward(request: Request) -> BackwardResult:
    return _without_autograd(chunk_backward.recurrent_backward, request)


@hookimpl
def kda_core_commit(request: CommitRequest) -> Tensor:
    return _without_autograd(commit.commit, request)


@hookimpl
def kda_core_gate_forward(request: GateRequest) -> Tensor:
    return _without_autograd(gate.gate_forward, request)


@hookimpl
def kda_core_gate_backward(request: GateRequest) -> BackwardResult:
    return _without_autograd(gate.gate_backward, request)

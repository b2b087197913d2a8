"""The CPU backend's hooks and what it declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from kda_core.capabilities import FEATURES_1_2, Available, BackendInfo, Capabilities, Feature, Unavailable
from kda_core.hookspecs import hookimpl
from kda_core.request import AnyRequest, Request, TensorSpec
from kda_core_cpu import __version__, chunk_backward, chunk_forward, commit, gate, recurrent

_INFO = BackendInfo(
    name="cpu", version=__version__, contract=SpecifierSet("~=1.2"), device_types=("cpu",), priority=10,
    capabilities=Capabilities(
        features=FEATURES_1_2,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
        closed={Feature.CONTEXT_PARALLEL: "it has no hooks in halves; the core makes plain calls of it"},
    ),
    summary="vectorised torch: chunk and recurrent form, hand-derived backward, any log decay",
)  # fmt: skip


def _served_by(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hook that runs this computation, with the caller's autograd and autocast off."""

    @hookimpl
    def hook(request: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return hook(request)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return compute(request)
        return compute(request)

    return hook


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
    return chunk_forward.saved_spec(request) if request.op == "chunk_kda" else ()


kda_core_chunk_forward = _served_by(chunk_forward.chunk_forward)
kda_core_chunk_backward = _served_by(chunk_backward.chunk_backward)
kda_core_recurrent_forward = _served_by(recurrent.recurrent_forward)
kda_core_recurrent_backward = _served_by(chunk_backward.recurrent_backward)
kda_core_commit = _served_by(commit.commit)
kda_core_gate_forward = _served_by(gate.gate_forward)
kda_core_gate_backward = _served_by(gate.gate_backward)

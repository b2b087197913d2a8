"""A user's file, as type checkers see it; tests/core/test_typing.py checks it, nothing runs it.

Every ``type: ignore`` stands on a line that must be an error: both checkers report one that is not needed.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from typing_extensions import assert_type

import kda_core
from kda_core import (
    BackendNotFound,
    BrokenBackend,
    ContractViolation,
    KdaError,
    UnsupportedCall,
    chunk_kda,
    default_device,
    explain,
    fused_recurrent_kda,
    kda_gate,
    use_backend,
)
from kda_core._ledger import Explanation, LedgerEntry, Verdict
from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature, Slack, Unavailable
from kda_core.hookspecs import hookimpl
from kda_core.request import AnyRequest, ForwardResult, Request

Two = tuple[Tensor, Tensor | None]
Three = tuple[Tensor, Tensor | None, Tensor]


def results(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, wanted: bool) -> None:
    o, state = chunk_kda(q, k, v, g, beta)
    assert_type(o, Tensor)
    assert_type(state, Tensor | None)
    assert_type(chunk_kda(q, k, v, g, beta, 0.5, None, True), Two)
    assert_type(chunk_kda(q=q, k=k, v=v, g=g, beta=beta, scale=1, output_final_state=True), Two)
    assert_type(chunk_kda(q, k, v, g, beta, return_intermediate_states=False), Two)
    o, state, h = chunk_kda(q, k, v, g, beta, 0.5, return_intermediate_states=True, chunk_size=32)
    assert_type(h, Tensor)
    assert_type(chunk_kda(q, k, v, g, beta, return_intermediate_states=True), Three)
    assert_type(chunk_kda(q, k, v, g, beta, return_intermediate_states=wanted), Two | Three)
    o, state = fused_recurrent_kda(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 3]), backend="cpu")
    assert_type(fused_recurrent_kda(q, k, v, g, beta, inplace_final_state=wanted), Two)
    assert_type(kda_gate(g, None, None, -5.0), Tensor)
    assert_type(kda_core.chunk_kda(q, k, v, g, beta)[0], Tensor)


def options(module: torch.nn.Module) -> None:
    with use_backend("cpu") as nothing:
        assert_type(nothing, None)
        assert_type(default_device(), torch.device)
    answer = explain(op="kda_gate", g=torch.zeros(2, 3), lower_bound=-1.0)
    assert_type(answer, Explanation)
    assert_type(answer.chosen, str | None)
    assert_type(answer.verdicts, tuple[Verdict, ...])
    assert_type(kda_core.backends(), tuple[LedgerEntry, ...])
    for entry in kda_core.backends():
        assert_type(entry.info, BackendInfo | None)
        if entry.info is not None:
            assert_type(entry.info.capabilities.features, frozenset[Feature])
            assert_type(copy.deepcopy(entry.info.slack), tuple[Slack, ...])
    assert_type(kda_core.__version__, str)
    try:
        module()
    except UnsupportedCall as error:
        refused: NotImplementedError = error
        print(refused)
    except (BackendNotFound, BrokenBackend, ContractViolation) as error:
        known: KdaError = error
        print(known)


class Plugin:
    """A backend of the user's own."""

    @hookimpl
    def kda_core_availability(self, device: torch.device) -> Available | Unavailable:
        return Available() if device.type == "cpu" else Unavailable("runs on the CPU only")

    @hookimpl
    def kda_core_reject(self, request: AnyRequest) -> str | None:
        assert_type(request.features, frozenset[Feature])
        return None

    @hookimpl
    def kda_core_chunk_forward(self, request: Request) -> ForwardResult:
        assert_type(request.K, int)
        return ForwardResult(request.v, saved=(request.q,))


def served() -> Capabilities:
    return Capabilities(frozenset({Feature.CHUNK}), frozenset({torch.float32}), closed={Feature.OUT: "no room"})


def mistakes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    _o, _s, _h = chunk_kda(q, k, v, g, beta)  # type: ignore[misc]
    _a, _b = chunk_kda(q, k, v, g, beta, return_intermediate_states=True)  # type: ignore[misc]
    chunk_kda(q, k, v, g)  # type: ignore[call-overload]
    chunk_kda(q, k, v, g, beta, scale="1")  # type: ignore[call-overload]
    chunk_kda(q, k, v, g, beta, use_gate=True)  # type: ignore[call-overload]
    fused_recurrent_kda(q, k, v, g, beta, backend=3)  # type: ignore[arg-type]
    kda_gate(1.0)  # type: ignore[arg-type]
    use_backend(None)  # type: ignore[arg-type]
    Feature.TELEPATHY  # type: ignore[attr-defined]  # noqa: B018
    _, state = fused_recurrent_kda(q, k, v, g, beta)
    state.sum()  # type: ignore[union-attr]

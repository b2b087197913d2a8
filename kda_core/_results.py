"""The checks of what a backend's hooks return: shapes, dtypes and devices, once for each signature of calls.

A hook that passed is not looked at again as long as its call's ``memo`` lives, so that repeated calls pay nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kda_core.errors import ContractViolation
from kda_core.request import (
    AnyRequest,
    BackwardResult,
    Begun,
    CommitRequest,
    Edges,
    ForwardResult,
    GateRequest,
    Request,
)


def chunks_of(r: Request) -> int:
    """NT, the number of chunks. For packed sequences it depends on values; the checks demand them on the CPU."""
    C = r.chunk_size
    if r.cu_seqlens is None:
        return (r.T + C - 1) // C
    bounds = (r.cu_seqlens if r.cu_seqlens_cpu is None else r.cu_seqlens_cpu).tolist()
    return sum((end - start + C - 1) // C for start, end in itertools.pairwise(bounds))


def check_forward(backend: str, r: AnyRequest, result: Any) -> None:
    """Raise ContractViolation unless ``result`` is what the request's forward must return."""
    if isinstance(r, CommitRequest):
        if result is not r.pool:
            raise ContractViolation(f"backend {backend!r} returned another tensor than the pool it committed to")
        return
    if isinstance(r, GateRequest):
        _expect(backend, "log_decay", result, r.g.shape, r.output_dtype, r.device)
    else:
        _check_call(backend, r, result)
    if r.memo is not None:
        r.memo[ForwardResult] = type(result)


def _check_call(backend: str, r: Request, result: Any) -> None:
    if not isinstance(result, ForwardResult):
        raise ContractViolation(f"backend {backend!r} returned {type(result).__name__}, expected ForwardResult")
    _expect(backend, "o", result.o, (r.B, r.T, r.HV, r.V), r.q.dtype, r.device)
    if r.out is not None and result.o is not r.out:
        raise ContractViolation(f"backend {backend!r} returned another tensor as o, expected the call's out")
    has_final = r.output_final_state and not r.inplace_final_state
    final = (_of_sequences(r, *r.state_shape[2:]), r.state_dtype) if has_final else None
    h = ((r.B, chunks_of(r), *r.state_shape[1:]), r.h_dtype) if r.return_intermediate_states else None
    for name, found, expected in (("final_state", result.final_state, final), ("h", result.h, h)):
        if expected is not None:
            _expect(backend, name, found, *expected, r.device)
        elif found is not None:
            _fail(backend, name, "None, because the call asks for none", found)


def _of_sequences(r: Request, *last: int) -> tuple[int, ...]:
    edges = r.cp_context
    return (edges.sequences if isinstance(edges, Edges) else r.N, r.HV, *last)


def check_gradients(backend: str, r: Request | GateRequest, result: Any, memo: dict | None) -> None:
    """The same for a backward: a gradient for every name in ``needs_grad``, of its input's shape and dtype."""
    if not isinstance(result, BackwardResult):
        raise ContractViolation(f"backend {backend!r} returned {type(result).__name__}, expected BackwardResult")
    if missing := sorted(r.needs_grad - result.grads.keys()):
        raise ContractViolation(f"backend {backend!r} returned no gradient of {', '.join(missing)}")
    for name in r.needs_grad:
        like, found = getattr(r, name), result.grads[name]
        if like is None and isinstance(r, Request):  # of ``Edges``
            _expect(backend, f"d{name}", found, _of_sequences(r, r.K, r.V), r.compute_dtype, r.device)
            continue
        _expect(backend, f"d{name}", found, like.shape, like.dtype, like.device)
    if memo is not None:
        memo[BackwardResult, r.needs_grad] = True


def check_begun(backend: str, r: Request, begun: Any) -> None:
    """The same for a first half; ``matrices`` may be None where the request is for a backward."""
    if not isinstance(begun, Begun):
        raise ContractViolation(f"backend {backend!r} returned {type(begun).__name__}, expected Begun")
    edges = r.cp_context if isinstance(r.cp_context, Edges) else None
    count = r.N if edges is None or edges.sends is None else edges.sends.shape[0]
    lead, dtype = (count, r.HV, r.K), r.compute_dtype
    if edges is not None or (begun.additions is None and not r.needs_grad):
        _expect(backend, "matrices", begun.matrices, (*lead, r.K + r.V), dtype, r.device)
        return
    if begun.matrices is not None or not r.needs_grad:
        _expect(backend, "matrices", begun.matrices, (*lead, r.K), dtype, r.device)
    _expect(backend, "additions", begun.additions, (*lead, r.V), dtype, r.device)


def _expect(
    backend: str, output: str, found: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(found, Tensor) or (found.shape, found.dtype, found.device) != (tuple(shape), dtype, device):
        _fail(backend, output, _text(shape, dtype, device), found)


def _text(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def _fail(backend: str, output: str, expected: str, found: Any) -> None:
    got = _text(found.shape, found.dtype, found.device) if isinstance(found, Tensor) else repr(found)
    raise ContractViolation(f"backend {backend!r} returned {output}: expected {expected}, got {got}")

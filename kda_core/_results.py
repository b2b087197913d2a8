"""The checks of what a backend's hooks return: shapes, dtypes and devices, once for each signature of calls.

A hook that passed is not looked at again as long as its call's ``memo`` lives, so that repeated calls pay nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kda_core import _meta
from kda_core._loaded import Backend
from kda_core.errors import ContractViolation
from kda_core.request import BackwardResult, Begun, ForwardResult, GateRequest, Request


def check_forward(backend: Backend, r: Request, result: Any) -> None:
    """Raise ContractViolation unless ``result`` is what the request's forward must return."""
    if not isinstance(result, ForwardResult):
        raise ContractViolation(
            f"backend {backend.info.name!r} returned {type(result).__name__}, expected ForwardResult"
        )
    _expect(backend, "o", result.o, (r.B, r.T, r.HV, r.V), r.q.dtype, r.device)
    if r.out is not None and result.o is not r.out:
        raise ContractViolation(f"backend {backend.info.name!r} returned another tensor as o, expected the call's out")
    if r.output_final_state and not r.inplace_final_state:
        _expect(backend, "final_state", result.final_state, r.state_shape, r.state_dtype, r.device)
    elif result.final_state is not None:
        _fail(backend, "final_state", "None, because the call asks for none", result.final_state)
    if r.return_intermediate_states:
        shape = (r.B, _meta.chunks_of(r), *r.state_shape[1:])
        _expect(backend, "h", result.h, shape, r.h_dtype, r.device)
    elif result.h is not None:
        _fail(backend, "h", "None, because the call asks for none", result.h)
    if r.memo is not None:
        r.memo[ForwardResult] = True


def check_gradients(backend: Backend, r: Request | GateRequest, result: Any, memo: dict | None) -> None:
    """The same for a backward: a gradient for every name in ``needs_grad``, of its input's shape and dtype."""
    if not isinstance(result, BackwardResult):
        raise ContractViolation(
            f"backend {backend.info.name!r} returned {type(result).__name__}, expected BackwardResult"
        )
    if missing := sorted(r.needs_grad - result.grads.keys()):
        raise ContractViolation(f"backend {backend.info.name!r} returned no gradient of {', '.join(missing)}")
    for name in r.needs_grad:
        like = getattr(r, name)
        _expect(backend, f"d{name}", result.grads[name], like.shape, like.dtype, like.device)
    if memo is not None:
        memo[BackwardResult, r.needs_grad] = True


def check_begun(backend: Backend, r: Request, begun: Any) -> None:
    """The same for a first half; ``matrices`` may be None where the request is for a backward."""
    if not isinstance(begun, Begun):
        raise ContractViolation(f"backend {backend.info.name!r} returned {type(begun).__name__}, expected Begun")
    lead, dtype = (r.N, r.HV, r.K), r.compute_dtype
    if begun.matrices is not None or not r.needs_grad:
        _expect(backend, "matrices", begun.matrices, (*lead, r.K), dtype, r.device)
    _expect(backend, "additions", begun.additions, (*lead, r.V), dtype, r.device)


def check_decay(backend: Backend, r: GateRequest, result: Any) -> None:
    """The same for the forward of ``kda_gate``."""
    _expect(backend, "log_decay", result, r.g.shape, r.output_dtype, r.device)
    if r.memo is not None:
        r.memo[ForwardResult] = True


def _expect(
    backend: Backend, output: str, found: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(found, Tensor) or (found.shape, found.dtype, found.device) != (tuple(shape), dtype, device):
        _fail(backend, output, _text(shape, dtype, device), found)


def _text(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def _fail(backend: Backend, output: str, expected: str, found: Any) -> None:
    got = _text(found.shape, found.dtype, found.device) if isinstance(found, Tensor) else repr(found)
    raise ContractViolation(f"backend {backend.info.name!r} returned {output}: expected {expected}, got {got}")

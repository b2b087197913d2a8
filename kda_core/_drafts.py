"""Drafts without a state for every token: records of the tokens, and their commit into a pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_core import _checks, _eager, _ops, _plugins, _schemas
from kda_core._loaded import Backend
from kda_core._plugins import registry
from kda_core._torch_private import in_forward_mode
from kda_core.api import traced_name
from kda_core.errors import ContractViolation
from kda_core.request import CommitRequest


def empty_records(
    B: int,
    T: int,
    HV: int,
    K: int,
    V: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A buffer for the ``records`` of ``fused_recurrent_kda``, with any content.

    It takes ``4 * (2 * K + V)`` bytes a token and value head: 1.5 KiB at K = V = 128, where a float32 state takes 64.
    Slices of it along B, T and HV are buffers, too.

    Args:
        B: batch rows of q.
        T: tokens of q.
        HV: value heads.
        K: key channels.
        V: value channels.
        device: that of q.
        dtype: float32; float64 for float64 q.

    Returns:
        [B, T, HV, 2K + V]: for each token and head k, the decay and u of ``S <- D * S + k u^T``, in a form that the
        backend which writes it reads again.
    """
    return torch.empty(B, T, HV, 2 * K + V, device=device, dtype=dtype)


def commit_kda(
    pool: Tensor,
    records: Tensor,
    num_accepted: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    pad_slot_id: int = -1,
    backend: str | None = None,
    path: Tensor | None = None,
) -> None:
    """Advance states of a pool by the accepted tokens of drafts, in one read and one write of each state.

    ``S <- D * S + k u^T`` for the first ``num_accepted[n]`` tokens of sequence n (of its path, if the draft was a
    tree), from the records that ``fused_recurrent_kda`` wrote. The state has the bits that the call with a slot for
    every token would have left in the slot of the last accepted one, on the same backend. Not differentiable; nothing
    waits for the device.

    Args:
        pool: [slots, HV, K, V], as ``initial_state`` of the call that wrote the records.
        records: [B, T, HV, 2K + V], written by the backend that commits them.
        num_accepted: [N] int32 or int64, on the device of the pool: from 0, which leaves the slot as it was, to the
            sequence's tokens, or to M with ``path``. Out of range: ValueError on the CPU and under ``KDA_CHECK=1``;
            clamped on other devices.
        state_indices: [N] int32 or int64: the slot of each sequence. Negative ones and ``pad_slot_id`` are skipped. A
            slot past the pool, or twice: ValueError in the same cases; otherwise one past the pool is skipped, and
            sequences that share a slot race.
        cu_seqlens: [N+1], as in the call that wrote the records; then B = 1.
        state_v_first: states are stored [..., V, K].
        pad_slot_id: as in ``fused_recurrent_kda``.
        backend: as in ``chunk_kda``.
        path: [N, M] int32 or int64: the accepted tokens of sequence n by their numbers in its draft, from the root of
            the tree on; entries behind ``num_accepted[n]`` are not read. Out of range: as ``num_accepted``.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or value; nothing has been written.
        UnsupportedCall, BackendNotFound, BrokenBackend: as ``chunk_kda``.
    """
    tensors = {
        "pool": pool, "records": records, "num_accepted": num_accepted, "state_indices": state_indices,
        "cu_seqlens": cu_seqlens, "path": path,
    }  # fmt: skip
    request = CommitRequest(**tensors, state_v_first=state_v_first, pad_slot_id=pad_slot_id)  # type: ignore[arg-type]
    if torch.is_grad_enabled():
        for name in ("pool", "records"):
            if getattr(tensors[name], "requires_grad", False):
                raise ValueError(f"{name}: commit_kda is not differentiable; use torch.no_grad(), or detach it")
    compiling = torch.compiler.is_compiling()
    asked = traced_name(backend) if compiling else _plugins.requested_name(backend)
    if compiling or in_forward_mode() or any(map(_eager.needs_operator, tensors.values())):
        if not compiling:
            _checks.convert_scalars(request)
            _checks.check_kinds(request)
            _checks.check(request)
        torch.ops.kda_core.commit_kda_(
            pool, records, num_accepted, state_indices, cu_seqlens, request.state_v_first, request.pad_slot_id,
            asked or "", path,
        )  # fmt: skip
        return
    _commit(registry.choose(request, asked), request)


def _commit(backend: Backend, r: CommitRequest) -> None:
    result = backend.result("kda_core_commit", r)
    if result is not r.pool:
        raise ContractViolation(f"backend {backend.info.name!r} returned another tensor than the pool it committed to")
    if not r.pool.is_inference():
        torch.autograd.graph.increment_version(r.pool)


def _request(args: tuple, kwargs: dict[str, Any]) -> tuple[CommitRequest, str | None]:
    values = _schemas.COMMIT.bind(args, kwargs)
    asked = _ops.asked(values.pop("backend"))
    return CommitRequest(**values), asked


def _committed(*args: Any, **kwargs: Any) -> None:
    _ops.refuse_tangents("commit_kda", *args, *kwargs.values())
    request, name = _request(args, kwargs)
    _commit(registry.choose(request, name), request)


def _fake(*args: Any, **kwargs: Any) -> None:
    registry.choose(*_request(args, kwargs))


_ops.define(_schemas.COMMIT, _committed, _fake, _ops.under_transforms(lambda t: t.inplace_kernel(_schemas.COMMIT)))

"""Tensors that a call returns or saves: o, the states at chunk starts, and the operands of a backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kda_core.request import Request, TensorSpec
from kda_core_cpu.choose import product_dims
from kda_core_cpu.sequences import Sequences, chunk_bound
from kda_core_cpu.states import key_first
from kda_core_cpu.windows import Window


class ChunkRecord:
    """One tensor for every chunk and value head: [B, NT, HV, ...] seen as [B·NT, HV, ...]."""

    def __init__(self, tensor: Tensor, view: Tensor | None = None) -> None:
        self.tensor = tensor
        self.flat = (tensor if view is None else view).flatten(0, 1)

    def put(self, window: Window, x: Tensor, step: int | None = None) -> None:
        """Store [Z, ...] of a window, or [lanes, ...] of one of its steps; larger matrices are cut to fit."""
        pairs = slice(0, window.pairs) if step is None else window.steps[step]
        heads, rows = window.heads, x.unflatten(0, (pairs.stop - pairs.start, -1))
        if rows.shape[-2:] != self.flat.shape[-2:]:
            rows = rows[..., : self.flat.shape[-2], : self.flat.shape[-1]]
        places = window.chunks()
        if isinstance(places, slice):
            self.flat[places.start + pairs.start : places.start + pairs.stop, heads] = rows
        else:
            self.flat[places[pairs], heads] = rows.to(self.flat.dtype)

    def get(self, window: Window, into: Tensor) -> Tensor:
        """[Z, ...] of a window: a view where the chunks lie together, else loaded into ``into``."""
        places = window.chunks()
        rows = self.flat[places, window.heads]
        if isinstance(places, slice) and rows.shape[1] == self.flat.shape[1]:
            return rows.flatten(0, 1)
        return into.view_as(rows).copy_(rows).view_as(into)


@dataclass(frozen=True)
class Saved:
    """Tensors that the forward saves for the backward.

    Attributes:
        states: S at every chunk's start.
        products: v_new, M and A, with ``disable_recompute``; else None.
    """

    states: ChunkRecord
    products: tuple[ChunkRecord, ...] | None = None

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> Saved:
        """View the tensors that ``saved_spec`` announces."""
        states, *products = map(ChunkRecord, tensors)
        return cls(states, tuple(products) or None)


def saved_spec(request: Request) -> tuple[TensorSpec, ...]:
    """Shapes and dtypes of ``Saved``: [B, NT, HV, ...], with an upper bound as NT for packed sequences."""
    C, (K, V) = request.chunk_size, product_dims(request)
    tails = [(K, V)]
    if request.disable_recompute:
        tails += [(C, V), (C, C), (C, C)]
    leading = (request.B, chunk_bound(request), request.HV)
    return tuple(TensorSpec((*leading, *tail), request.compute_dtype) for tail in tails)


def empty_output(request: Request) -> Tensor:
    """The tensor for o, with any content."""
    shape = (request.B, request.T, request.HV, request.V)
    return torch.empty(shape, dtype=request.q.dtype, device=request.q.device) if request.out is None else request.out


def intermediate_states(request: Request, sequences: Sequences) -> ChunkRecord | None:
    if not request.return_intermediate_states:
        return None
    shape = (request.B, sequences.chunks, request.HV, *request.state_shape[2:])
    # Skipped rows of a pool have no state to report.
    h = torch.zeros(shape, dtype=request.h_dtype, device="cpu")
    return ChunkRecord(h, key_first(h, request))


def unfilled(request: Request) -> tuple[Tensor, ...]:
    """New saved tensors; zero for packed sequences, whose NT leaves some chunks unused."""
    make = torch.empty if request.cu_seqlens is None else torch.zeros
    return tuple(make(spec.shape, dtype=spec.dtype, device="cpu") for spec in saved_spec(request))

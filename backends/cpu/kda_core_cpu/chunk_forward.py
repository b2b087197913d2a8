"""``chunk_kda`` forward.

Chunk of C rows with state S at its start, q', k', d, β as in inputs.py, G the running sum of log d, and M, A, L as
in levels.py:

    r = βv − (β k' ⊙ exp G) S      v_new = A r      o = (q' ⊙ exp G) S + M v_new
    S ← exp(G_C) ⊙ S + (k' ⊙ exp(G_C − G))ᵀ v_new

Everything but these four lines is done for all chunks of a window at once. The scan then steps over chunks with all
lanes of the group in one batched product; the query and the key rows, interleaved in X, read S together. Applying A
to r, rather than to βv and βk' beforehand, saves the C·C·K product that forms w.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kda_core.request import ForwardResult, Request, TensorSpec
from kda_core_cpu.inputs import RowInputs
from kda_core_cpu.launch import (
    Sequences,
    Workspace,
    chunk_bound,
    lane_budget,
    lane_groups,
    product_dims,
    rows_per_chunk,
    window_budget,
)
from kda_core_cpu.levels import pairwise
from kda_core_cpu.states import PoolRows, States, key_first
from kda_core_cpu.windows import Window


class ChunkRecord:
    """One tensor for every chunk and value head: [B, NT, HV, ...] seen as [B·NT, HV, ...]."""

    def __init__(self, tensor: Tensor, view: Tensor | None = None) -> None:
        self.tensor = tensor
        self.flat = (tensor if view is None else view).flatten(0, 1)

    def put(self, window: Window, x: Tensor, step: int | None = None) -> None:
        """Store [Z, ...] of a window, or [lanes, ...] of one of its steps; of larger matrices, what has room."""
        pairs = slice(0, window.pairs) if step is None else window.steps[step]
        heads, rows = window.heads, x.unflatten(0, (pairs.stop - pairs.start, -1))
        if rows.shape[-2:] != self.flat.shape[-2:]:
            rows = rows[..., : self.flat.shape[-2], : self.flat.shape[-1]]
        first = window.first_of_run
        if first is None:
            self.flat[window.chunk_index[pairs], heads] = rows.to(self.flat.dtype)
        else:
            self.flat[first + pairs.start : first + pairs.stop, heads] = rows

    def get(self, window: Window, into: Tensor) -> Tensor:
        """[Z, ...] of a window: a view where the chunks lie together, else loaded into ``into``."""
        heads, first = window.heads, window.first_of_run
        if first is None:
            rows = self.flat[window.chunk_index, heads]
        else:
            rows = self.flat[first : first + window.pairs, heads]
            if rows.shape[1] == self.flat.shape[1]:
                return rows.flatten(0, 1)
        return into.view_as(rows).copy_(rows).view_as(into)


@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward.

    Attributes:
        states: S at every chunk's start.
        products: v_new, M and A, with ``disable_recompute``; else None.
    """

    states: ChunkRecord
    products: tuple[ChunkRecord, ChunkRecord, ChunkRecord] | None = None

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> Saved:
        """View the tensors that ``saved_spec`` announces."""
        if len(tensors) == 1:
            return cls(ChunkRecord(tensors[0]))
        states, v_new, M, A = map(ChunkRecord, tensors)
        return cls(states, (v_new, M, A))


def saved_spec(request: Request) -> tuple[TensorSpec, ...]:
    """What ``Saved`` holds for ``request``: [B, NT, HV, ...], NT an upper bound for packed sequences."""
    C, (K, V) = request.chunk_size, product_dims(request)
    tails = [(K, V)]
    if request.disable_recompute:
        tails += [(C, V), (C, C), (C, C)]
    leading = (request.B, chunk_bound(request), request.HV)
    return tuple(TensorSpec((*leading, *tail), request.compute_dtype) for tail in tails)


def chunk_forward(request: Request) -> ForwardResult:
    """Run ``chunk_kda``."""
    pool = PoolRows.of(request)
    C = rows_per_chunk(request)
    sequences = Sequences.of(request, C, None if pool is None else pool.skipped)
    states = States(request, pool)
    o = empty_output(request)
    if int(sequences.length.sum()) < request.B * request.T:
        o.zero_()
    h = _intermediate_states(request, sequences)
    tensors = _blank(request) if request.save_for_backward else ()
    saved = Saved.of(tensors) if tensors else None
    K, V = product_dims(request)
    workspace, inputs = Workspace(request.compute_dtype), RowInputs(request, K)
    budget = window_budget(K, V, C)
    for group in lane_groups(sequences, request, C, lane_budget(K, V)):
        S = torch.empty(len(group.ids) * group.n_heads, K, V, dtype=request.compute_dtype, device="cpu")
        states.read(group.ids.tolist(), group.heads, into=S)
        for i0, i1 in group.windows(budget):
            _run_window(workspace, inputs, Window(group, i0, i1), S, o, h, saved)
        states.write(group.ids.tolist(), group.heads, S)
    return ForwardResult(o=o, final_state=states.result, h=None if h is None else h.tensor, saved=tensors)


def load_rows(workspace: Workspace, inputs: RowInputs, window: Window) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X = (q', β k') [Z, C, 2, K], F = k' [Z, C, K], γ [Z, C, K] and βv [Z, C, V] of a window, not decayed yet.

    K and V are those of ``product_dims``.
    """
    request, Z, C = inputs.request, window.Z, window.rows
    K, V = product_dims(request)
    X = workspace("X", Z, C, 2, K)
    F = workspace("F", Z, C, K)
    inputs.load_unit(request.q, window, X[:, :, 0])
    X[:, :, 0].mul_(request.scale)
    inputs.load_unit(request.k, window, F)
    beta = inputs.load_beta(window, workspace("beta", Z, C, 1))
    torch.mul(F, beta, out=X[:, :, 1])
    decay = inputs.load_log_decay(window, workspace("decay", Z, C, K))
    bv = window.load(request.v, workspace("v", Z, C, V)).mul_(beta)
    return X, F, decay, bv


def empty_output(request: Request) -> Tensor:
    """The tensor for o, with any content."""
    shape = (request.B, request.T, request.HV, request.V)
    return torch.empty(shape, dtype=request.q.dtype, device=request.q.device) if request.out is None else request.out


def _intermediate_states(request: Request, sequences: Sequences) -> ChunkRecord | None:
    if not request.return_intermediate_states:
        return None
    shape = (request.B, sequences.chunks, request.HV, *request.state_shape[2:])
    # Skipped rows of a pool have no state to report.
    h = torch.zeros(shape, dtype=request.state_dtype, device="cpu")
    return ChunkRecord(h, key_first(h, request))


def _blank(request: Request) -> tuple[Tensor, ...]:
    """Unfilled saved tensors; for packed sequences zero, because the bound leaves some chunks unused."""
    make = torch.empty if request.cu_seqlens is None else torch.zeros
    return tuple(make(spec.shape, dtype=spec.dtype, device="cpu") for spec in saved_spec(request))


def _run_window(
    workspace: Workspace,
    inputs: RowInputs,
    window: Window,
    S: Tensor,
    o: Tensor,
    h: ChunkRecord | None,
    saved: Saved | None,
) -> None:
    """Advance the states ``S`` [lanes, K, V] of a group through a window and write its outputs."""
    Z, C, V = window.Z, window.rows, S.shape[-1]
    X, F, decay, r = load_rows(workspace, inputs, window)
    M, A, total = pairwise(workspace, X, F, decay)
    X, total = X.flatten(1, 2), total.unsqueeze(-1)
    outputs, v_new = workspace("o", Z, C, V), workspace("v_new", Z, C, V)
    for step in range(len(window.steps)):
        lanes = window.lanes(step)
        n = lanes.stop - lanes.start
        state = S[:n]
        for record in (h, None if saved is None else saved.states):
            if record is not None:
                record.put(window, state, step)
        read = torch.bmm(X[lanes], state, out=workspace("read", n, 2 * C, V)).view(n, C, 2, V)
        torch.bmm(A[lanes], r[lanes].sub_(read[:, :, 1]), out=v_new[lanes])
        torch.baddbmm(read[:, :, 0], M[lanes], v_new[lanes], out=outputs[lanes])
        state.mul_(total[lanes]).baddbmm_(F[lanes].transpose(1, 2), v_new[lanes])
    window.store(outputs, o)
    if saved is not None and saved.products is not None:
        for record, x in zip(saved.products, (v_new, M, A), strict=True):
            record.put(window, x)

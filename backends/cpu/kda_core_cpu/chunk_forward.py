"""``chunk_kda`` forward.

Chunk of C rows with state S at its start, q', k', d, β as in inputs.py, G the running sum of log d, and M, A, L as
in levels.py:

    r = βv − (β k' ⊙ exp G) S      v_new = A r      o = (q' ⊙ exp G) S + M v_new
    S ← exp(G_C) ⊙ S + (k' ⊙ exp(G_C − G))ᵀ v_new

All other computations run for all chunks of a window at once. The scan steps over chunks with all lanes of the group
in one batched product; the query and the key rows, interleaved in X, read S together. A multiplies r, and not βv and
βk' beforehand: this saves the C·C·K product that forms w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_core.request import ForwardResult, Request, TensorSpec, chunks_of
from kda_core_cpu.choose import group_lanes, product_dims, rows_per_chunk, window_chunks
from kda_core_cpu.inputs import RowInputs
from kda_core_cpu.levels import LOG2_E, pairwise
from kda_core_cpu.sequences import Sequences, lane_groups
from kda_core_cpu.states import States, key_first
from kda_core_cpu.windows import Window
from kda_core_cpu.workspace import Workspace, empty_output, product


def chunk_forward(request: Request, chunks: int | None = None, lanes: int | None = None) -> ForwardResult:
    """Run ``chunk_kda``, in windows of ``chunks`` and groups of ``lanes``; by default those of ``choose``."""
    C, states, o = rows_per_chunk(request), States(request), empty_output(request)
    sequences = Sequences(request, states.skipped)
    if int(sequences.length.sum()) < request.B * request.T:
        o.zero_()
    h: Tensor | None = None
    saved: tuple[Tensor, ...] = ()
    starts: list[Tensor] = []
    products: list[Tensor] = []
    if request.return_intermediate_states:
        # Skipped rows of a pool have no state to report.
        shape = (request.B, chunks_of(request), *request.state_shape[1:])
        h = torch.zeros(shape, dtype=request.h_dtype, device="cpu")
        starts.append(key_first(h, request).flatten(0, 1))
    if request.save_for_backward:
        # Packed sequences leave some of the saved chunks unused.
        make = torch.empty if request.cu_seqlens is None else torch.zeros
        saved = tuple(make(spec.shape, dtype=spec.dtype, device="cpu") for spec in saved_spec(request))
        first, *products = (x.flatten(0, 1) for x in saved)
        starts.append(first)
    K, V = product_dims(request)
    workspace, inputs = Workspace(request.compute_dtype), RowInputs(request, K)
    chunks = chunks or window_chunks(K, V, C)
    for group in lane_groups(sequences, request, C, lanes or group_lanes(K, V)):
        S = torch.empty(len(group.ids) * group.n_heads, K, V, dtype=request.compute_dtype, device="cpu")
        states.read(group.ids.tolist(), group.heads, into=S)
        for i0, i1 in group.windows(chunks):
            _run_window(workspace, inputs, Window(group, i0, i1), S, o, states, starts, products)
        states.write(group.ids.tolist(), group.heads, S)
    return ForwardResult(o=o, final_state=states.result, h=h, saved=saved)


def saved_spec(request: Request) -> tuple[TensorSpec, ...]:
    """Tensors that are saved: S at the chunks' starts, and with ``disable_recompute`` v_new, M and A.

    [B, NT, HV, ...]; NT of packed sequences is an upper bound, from metadata alone.
    """
    C, (K, V) = request.chunk_size, product_dims(request)
    chunks = -(-request.T // C) if request.cu_seqlens is None else request.T // C + request.N
    tails = [(K, V), (C, V), (C, C), (C, C)] if request.disable_recompute else [(K, V)]
    return tuple(TensorSpec((request.B, chunks, request.HV, *tail), request.compute_dtype) for tail in tails)


def _run_window(
    workspace: Workspace, inputs: RowInputs, window: Window, S: Tensor, o: Tensor, states: States,
    starts: list[Tensor], products: list[Tensor],
) -> None:  # fmt: skip
    """Advance the states ``S`` [lanes, K, V] of a group through a window and write its outputs.

    ``starts`` take the states at chunks' starts, and ``products`` v_new, M and A where they are saved.
    """
    request, Z, C, (_, K, V) = inputs.request, window.Z, window.rows, S.shape
    # Rows before any decay: X = (q', β k'), F = k', γ·LOG2_E and βv, which becomes r.
    X, F, r = workspace("X", Z, C, 2, K), workspace("F", Z, C, K), workspace("v", Z, C, V)
    inputs.load_unit(request.q, window, X[:, :, 0], request.scale)
    inputs.load_unit(request.k, window, F)
    beta = inputs.load_beta(window, workspace)
    torch.mul(F, beta, out=X[:, :, 1])
    decay = inputs.load_log_decay(window, workspace("decay", Z, C, K), LOG2_E)
    v = window.lift(request.v, r)
    torch.mul(v, beta.view(*v.shape[:-1], 1), out=r.view(v.shape))
    M, A, total = pairwise(workspace, X, F, decay)
    outputs, v_new = workspace("o", Z, C, V), workspace("v_new", Z, C, V)
    operands = window.by_step(*X.unbind(2), F.transpose(1, 2), total.unsqueeze(-1), A, r, outputs, v_new)
    for step, (xq, xk, f, decay, a, u, out, v) in enumerate(operands):
        state = S[: len(out)]
        recorded = (window.i0 + step) * C % window.group.sequences.chunk_size == 0
        for record in starts if recorded else ():
            window.put_chunks(state, record, sum(window.alive[:step]))
        product(xq, state, out=out)
        product(a, u.baddbmm_(xk, state, alpha=-1), out=v)
        state.mul_(decay).baddbmm_(f, v)
        if states.checkpoints is not None:
            ids = window.group.ids[: window.alive[step]].tolist()
            states.write_checkpoint(ids, window.heads, state, (window.i0 + step + 1) * C)
    window.store(outputs.baddbmm_(M, v_new), o)
    for record, x in zip(products, (v_new, M, A), strict=False):
        window.put_chunks(x, record)

"""``chunk_kda`` backward, derived by hand.

With the forward's notation (chunk_forward.py, levels.py), from do and the gradient dS of the state after the chunk:

    dv_new = Mᵀ do + (k'⊙exp(G_C − G)) dS      dr = Aᵀ dv_new
    d(q'⊙exp G) = do Sᵀ     d(βk'⊙exp G) = −dr Sᵀ     d(k'⊙exp(G_C − G)) = v_new dSᵀ
    dM = do v_newᵀ          dL = −dr v_newᵀ           d log exp(G_C) = exp(G_C) ⊙ Σ_v S⊙dS
    dS ← exp(G_C)⊙dS + (q'⊙exp G)ᵀ do − (βk'⊙exp G)ᵀ dr

(dL = −Aᵀ(dv_new rᵀ)Aᵀ = −dr v_newᵀ: A's gradient is never formed.) With D = (do, −dr) interleaved like X, the three
pairs above are D Sᵀ, D v_newᵀ and XᵀD: one product each. Only dv_new, dr and dS are sequential; they are scanned
from the last chunk to the first with all lanes of a group in one batch; the rest runs for a whole window at once.
levels.py takes the gradients of the decayed rows and of M and L back to q', k' and γ.

The states at chunk starts come from the forward; M, A and v_new are computed again unless ``disable_recompute``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kda_core.request import BackwardResult, Request
from kda_core_cpu.choose import group_lanes, product_dims, rows_per_chunk, window_chunks
from kda_core_cpu.chunk_forward import chunk_forward
from kda_core_cpu.inputs import RowInputs, inverse_norm_backward
from kda_core_cpu.levels import LOG2_E, decay_rows, pairwise, pairwise_backward
from kda_core_cpu.results import Saved
from kda_core_cpu.sequences import Sequences, lane_groups
from kda_core_cpu.states import key_first
from kda_core_cpu.windows import Window
from kda_core_cpu.workspace import Workspace, product

_ROW_INPUTS = frozenset({"q", "k", "g", "beta", "A_log", "dt_bias"})
"""Inputs whose gradient needs that of the decayed rows."""


def chunk_backward(request: Request, chunks: int | None = None, lanes: int | None = None) -> BackwardResult:
    """Gradients of ``chunk_kda`` for the inputs in ``request.needs_grad``; other arguments as for ``chunk_forward``."""
    C = rows_per_chunk(request)
    sequences = Sequences.of(request)
    saved = Saved.of(request.saved)
    K, V = product_dims(request)
    workspace, inputs = Workspace(request.compute_dtype), RowInputs(request, K)
    grads = _Gradients(request)
    chunks = chunks or window_chunks(K, V, C, backward=True)
    for group in lane_groups(sequences, request, C, lanes or group_lanes(K, V)):
        dS = torch.zeros(len(group.ids), group.n_heads, K, V, dtype=request.compute_dtype, device="cpu")
        of_states = dS[..., : request.K, : request.V]
        if request.grad_final_state is not None:
            of_states.copy_(group.rows_of(key_first(request.grad_final_state, request)))
        of_lanes = dS.flatten(0, 1)
        for i0, i1 in reversed(group.windows(chunks)):
            _Backstep(workspace, inputs, Window(group, i0, i1), saved, grads).run(of_lanes)
        if grads.initial_state is not None:
            index = group.ids if group.span is None else group.span
            grads.initial_state[index, group.heads] = of_states.to(grads.initial_state.dtype)
    return grads.result()


def recurrent_backward(request: Request) -> BackwardResult:
    """Gradients of ``fused_recurrent_kda``, by the chunk form, which computes the same function."""
    forward = replace(
        request, save_for_backward=True, output_final_state=False, return_intermediate_states=False,
        disable_recompute=False, out=None, saved=(), grad_o=None, grad_final_state=None, needs_grad=frozenset(),
    )  # fmt: skip
    return chunk_backward(replace(request, disable_recompute=False, saved=chunk_forward(forward).saved))


class _Gradients:
    """Gradients by input, filled window by window; only those that are asked for."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.rows = bool(request.needs_grad & _ROW_INPUTS)
        self.decay = bool(request.needs_grad & {"g", "A_log", "dt_bias"})
        self.tensors: dict[str, Tensor] = {}
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            if name in request.needs_grad:
                like = getattr(request, name)
                # Rows of no sequence have zero gradients; only packed layouts have such rows.
                make = torch.empty if request.cu_seqlens is None or name == "initial_state" else torch.zeros
                self.tensors[name] = make(like.shape, dtype=like.dtype, device="cpu")
        # Sums over all tokens stay in the compute dtype until the end.
        if "A_log" in request.needs_grad:
            self.tensors["A_log"] = torch.zeros(request.HV, dtype=request.compute_dtype, device="cpu")
        if "dt_bias" in request.needs_grad:
            self.tensors["dt_bias"] = torch.zeros(request.HV, request.K, dtype=request.compute_dtype, device="cpu")
        initial = self.tensors.get("initial_state")
        self.initial_state = None if initial is None else key_first(initial, request)

    def store(self, name: str, window: Window, x: Tensor, shared: int = 1) -> None:
        """Write rows [Z, C, D]; ``shared`` value heads that read one query/key head are summed."""
        if name not in self.tensors:
            return
        if shared > 1:
            x = x.unflatten(0, (-1, shared)).sum(1)
        into = self.tensors[name]
        window.store(x, into.unsqueeze(-1) if name == "beta" else into, shared)

    def add(self, name: str, window: Window, x: Tensor) -> None:
        """Add sums over a window's tokens to a parameter's gradient."""
        if name in self.tensors:
            self.tensors[name][window.heads] += x

    def result(self) -> BackwardResult:
        grads = dict(self.tensors)
        for name in ("A_log", "dt_bias"):
            if name in grads:
                grads[name] = grads[name].to(getattr(self.request, name).dtype)
        return BackwardResult(grads)


@dataclass(frozen=True)
class _Rows:
    """Rows of a window before any decay (inputs.py), which the gradients of the inputs need.

    ``decay`` is γ·LOG2_E, and becomes d when the rows are decayed.
    """

    q: Tensor
    q_inverse_norm: Tensor | None
    k: Tensor
    k_inverse_norm: Tensor | None
    v: Tensor
    beta: Tensor
    decay: Tensor


@dataclass(frozen=True)
class _Backstep:
    workspace: Workspace
    inputs: RowInputs
    window: Window
    saved: Saved
    grads: _Gradients

    def run(self, dS: Tensor) -> None:
        """Take the gradients ``dS`` [lanes, K, V] of a group's states back through the window, in place."""
        request, workspace, window, saved = self.inputs.request, self.workspace, self.window, self.saved
        Z, C, (K, V) = window.Z, window.rows, product_dims(request)
        rows = self._load_rows()
        X, F = workspace("X", Z, C, 2, K), workspace("F", Z, C, K)
        torch.mul(rows.q, request.scale, out=X[:, :, 0])
        torch.mul(rows.k, rows.beta, out=X[:, :, 1])
        F.copy_(rows.k)
        S = saved.states.get(window, workspace("S", Z, K, V))
        v_new = workspace("v_new", Z, C, V)
        if saved.products is None:
            M, A, total = pairwise(workspace, X, F, rows.decay, keep=self.grads.rows)
            read = product(X[:, :, 1], S, out=workspace("dr", Z, C, V))
            r = torch.mul(rows.v, rows.beta, out=workspace("dv_new", Z, C, V)).sub_(read)
            product(A, r, out=v_new)
        else:
            total = decay_rows(workspace, X, F, rows.decay, keep=self.grads.rows)
            scratch = (v_new, workspace("M", Z, C, C), workspace("A", Z, C, C))
            v_new, M, A = (record.get(window, x) for record, x in zip(saved.products, scratch, strict=True))
        total = total.unsqueeze(-1)

        D = workspace("D", Z, C, 2, V)
        dv_new = workspace("dv_new", Z, C, V)
        if request.grad_o is None:
            D[:, :, 0] = 0
            dv_new.zero_()
        else:
            product(M.transpose(1, 2), window.load(request.grad_o, D[:, :, 0]), out=dv_new)
        dF, dlog_total = workspace("dF", Z, C, K), workspace("dlog_total", Z, K)
        dr = workspace("dr", Z, C, V)
        operands = (X.flatten(1, 2).transpose(1, 2), F, total, A.transpose(1, 2), v_new, S)
        results = (dv_new, dr, D[:, :, 1], D.flatten(1, 2), dF, dlog_total)
        for x, f, decay, a, v, s, du, dv, minus_dv, d, df, dlog in reversed(window.by_step(*operands, *results)):
            state_grad = dS[: len(x)]
            product(a, du.baddbmm_(f, state_grad), out=dv)
            torch.neg(dv, out=minus_dv)
            if self.grads.rows:
                product(v, state_grad.transpose(1, 2), out=df)
                products = torch.mul(s, state_grad, out=workspace("state products", *s.shape))
                torch.sum(products, -1, out=dlog)
            state_grad.mul_(decay).baddbmm_(x, d)
        dbeta = torch.mul(rows.v, dr, out=workspace("v products", Z, C, V)).sum(-1, keepdim=True)
        self.grads.store("v", window, dr.mul_(rows.beta))
        if not self.grads.rows:
            return
        dX = product(D.flatten(1, 2), S.transpose(1, 2), out=workspace("dX", Z, 2 * C, K)).view(Z, C, 2, K)
        dP = product(D.flatten(1, 2), v_new.transpose(1, 2), out=workspace("dP", Z, 2 * C, C)).view(Z, C, 2, C)
        dlog_total.mul_(total.squeeze(-1))
        dlog = pairwise_backward(workspace, rows.decay, dX, dF, dP, dlog_total)
        diagonal = dP[:, :, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)
        self._row_gradients(rows, dX, dF, dlog, diagonal, dbeta)

    def _load_rows(self) -> _Rows:
        workspace, inputs, window = self.workspace, self.inputs, self.window
        request, Z, C = inputs.request, window.Z, window.rows
        K, V = product_dims(request)
        q, k = workspace("q", Z, C, K), workspace("k", Z, C, K)
        q_inverse_norm = inputs.load_unit(request.q, window, q)
        k_inverse_norm = inputs.load_unit(request.k, window, k)
        beta = inputs.load_beta(window, workspace("beta", Z, C, 1))
        decay = inputs.load_log_decay(window, workspace("decay", Z, C, K), LOG2_E)
        v = window.load(request.v, workspace("v", Z, C, V))
        return _Rows(q, q_inverse_norm, k, k_inverse_norm, v, beta, decay)

    def _row_gradients(
        self, rows: _Rows, dX: Tensor, dF: Tensor, dlog: Tensor, diagonal: Tensor, dbeta: Tensor
    ) -> None:
        """From gradients of (q', βk'), k', the diagonal of M and γ's sum so far, those of the inputs."""
        request, window, inputs, grads = self.inputs.request, self.window, self.inputs, self.grads
        dq, dbk = dX[:, :, 0], dX[:, :, 1]
        k_products = torch.mul(rows.k, dbk, out=self.workspace("products", *rows.k.shape))
        dbeta = inputs.beta_backward(window, self.workspace, rows.beta, dbeta + k_products.sum(-1, keepdim=True))
        grads.store("beta", window, dbeta)
        if grads.decay:
            dlog.addcmul_(k_products, rows.beta)
            dlog.addcmul_(torch.mul(rows.q, dq, out=k_products), dq.new_tensor(request.scale))
            self._gate_gradients(dlog)
        dF.addcmul_(dbk, rows.beta).addcmul_(rows.q, diagonal * request.scale)
        dq.addcmul_(rows.k, diagonal).mul_(request.scale)
        for name, unit, inverse, grad in (
            ("q", rows.q, rows.q_inverse_norm, dq),
            ("k", rows.k, rows.k_inverse_norm, dF),
        ):
            if inverse is not None:
                inverse_norm_backward(unit, inverse, grad)
            grads.store(name, window, grad, inputs.shared)

    def _gate_gradients(self, dlog: Tensor) -> None:
        """From dγ [Z, C, K], gradients of g, A_log and dt_bias."""
        grads, window = self.grads, self.window
        if not self.inputs.request.use_gate_in_kernel:
            grads.store("g", window, dlog)
            return
        grad, summand = self.inputs.gate_backward(window, self.workspace("g", *dlog.shape), dlog)
        grads.add("dt_bias", window, grad[..., : self.inputs.request.K].sum((0, 2)))
        grads.add("A_log", window, summand.sum((0, 2, 3)))
        grads.store("g", window, grad.flatten(0, 1))

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

from dataclasses import replace

import torch
from torch import Tensor

from kda_core.request import BackwardResult, Request
from kda_core_cpu.choose import group_lanes, product_dims, rows_per_chunk, window_chunks
from kda_core_cpu.chunk_forward import chunk_forward
from kda_core_cpu.inputs import RowInputs, inverse_norm_backward
from kda_core_cpu.levels import LOG2_E, decay_rows, pairwise, pairwise_backward
from kda_core_cpu.sequences import Sequences, lane_groups
from kda_core_cpu.states import key_first
from kda_core_cpu.windows import Window
from kda_core_cpu.workspace import Workspace, product

_ROW_INPUTS = frozenset({"q", "k", "g", "beta", "A_log", "dt_bias"})
"""Inputs whose gradient needs that of the decayed rows."""


def chunk_backward(request: Request, chunks: int | None = None, lanes: int | None = None) -> BackwardResult:
    """Gradients of ``chunk_kda`` for the inputs in ``request.needs_grad``; other arguments as for ``chunk_forward``."""
    C = rows_per_chunk(request)
    K, V = product_dims(request)
    backward = _Backward(request)
    chunks = chunks or window_chunks(K, V, C, backward=True)
    given = request.grad_final_state
    for group in lane_groups(Sequences(request), request, C, lanes or group_lanes(K, V)):
        dS = torch.zeros(len(group.ids), group.n_heads, K, V, dtype=request.compute_dtype, device="cpu")
        of_states = dS[..., : request.K, : request.V]
        ids = group.ids if group.span is None else group.span
        if given is not None:
            of_states.copy_(key_first(given, request)[ids, group.heads])
        for i0, i1 in reversed(group.windows(chunks)):
            backward.run(Window(group, i0, i1), dS.flatten(0, 1))
        if "initial_state" in backward.grads:
            grad = backward.grads["initial_state"]
            key_first(grad, request)[ids, group.heads] = of_states.to(grad.dtype)
    return backward.result()


def recurrent_backward(request: Request) -> BackwardResult:
    """Gradients of ``fused_recurrent_kda``, by the chunk form, which computes the same function."""
    forward = replace(
        request, save_for_backward=True, output_final_state=False, return_intermediate_states=False,
        disable_recompute=False, out=None, saved=(), grad_o=None, grad_final_state=None, needs_grad=frozenset(),
    )  # fmt: skip
    return chunk_backward(replace(request, disable_recompute=False, saved=chunk_forward(forward).saved))


class _Backward:
    """One backward call, window by window; ``grads``: the gradients that are asked for, by input."""

    def __init__(self, request: Request) -> None:
        self.request, dtype = request, request.compute_dtype
        self.workspace, self.inputs = Workspace(dtype), RowInputs(request, product_dims(request)[0])
        self.starts, *self.products = (x.flatten(0, 1) for x in request.saved)
        self.rows = bool(request.needs_grad & _ROW_INPUTS)
        self.decay = bool(request.needs_grad & {"g", "A_log", "dt_bias"})
        self.grads: dict[str, Tensor] = {}
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            if name in request.needs_grad:
                like = getattr(request, name)
                # Rows of no sequence have zero gradients; only packed layouts have such rows.
                make = torch.empty if request.cu_seqlens is None or name == "initial_state" else torch.zeros
                self.grads[name] = make(like.shape, dtype=like.dtype, device="cpu")
        # Sums over all tokens stay in the compute dtype until the end.
        for name, shape in (("A_log", (request.HV,)), ("dt_bias", (request.HV, request.K))):
            if name in request.needs_grad:
                self.grads[name] = torch.zeros(shape, dtype=dtype, device="cpu")

    def store(self, name: str, window: Window, x: Tensor, shared: int = 1) -> None:
        """Write rows [Z, C, D]; ``shared`` value heads that read one query/key head are summed."""
        if name not in self.grads:
            return
        if shared > 1:
            x = x.unflatten(0, (-1, shared)).sum(1)
        into = self.grads[name]
        window.store(x, into.unsqueeze(-1) if name == "beta" else into, shared)

    def result(self) -> BackwardResult:
        for name in ("A_log", "dt_bias"):
            if name in self.grads:
                self.grads[name] = self.grads[name].to(getattr(self.request, name).dtype)
        return BackwardResult(self.grads)

    def run(self, window: Window, dS: Tensor) -> None:
        """Take the gradients ``dS`` [lanes, K, V] of a group's states back through the window, in place."""
        request, workspace, inputs = self.request, self.workspace, self.inputs
        Z, C, (K, V) = window.Z, window.rows, product_dims(request)
        # Rows before any decay (inputs.py); ``decay`` is γ·LOG2_E, and becomes d when they are decayed.
        q, k = workspace("q", Z, C, K), workspace("k", Z, C, K)
        inverse_norms = inputs.load_unit(request.q, window, q), inputs.load_unit(request.k, window, k)
        beta = inputs.load_beta(window, workspace)
        decay = inputs.load_log_decay(window, workspace("decay", Z, C, K), LOG2_E)
        values = window.load(request.v, workspace("v", Z, C, V))
        X, F = workspace("X", Z, C, 2, K), workspace("F", Z, C, K)
        torch.mul(q, request.scale, out=X[:, :, 0])
        torch.mul(k, beta, out=X[:, :, 1])
        F.copy_(k)
        S = window.get_chunks(self.starts, workspace("S", Z, K, V))
        v_new = workspace("v_new", Z, C, V)
        if self.products:
            total = decay_rows(workspace, X, F, decay, keep=self.rows)
            scratch = (v_new, workspace("M", Z, C, C), workspace("A", Z, C, C))
            v_new, M, A = (window.get_chunks(record, x) for record, x in zip(self.products, scratch, strict=True))
        else:
            M, A, total = pairwise(workspace, X, F, decay, keep=self.rows)
            read = product(X[:, :, 1], S, out=workspace("dr", Z, C, V))
            r = torch.mul(values, beta, out=workspace("dv_new", Z, C, V)).sub_(read)
            product(A, r, out=v_new)
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
        for x, f, d_total, a, v, s, du, dv, minus_dv, d, df, dlog in reversed(window.by_step(*operands, *results)):
            state_grad = dS[: len(x)]
            product(a, du.baddbmm_(f, state_grad), out=dv)
            torch.neg(dv, out=minus_dv)
            if self.rows:
                product(v, state_grad.transpose(1, 2), out=df)
                products = torch.mul(s, state_grad, out=workspace("state products", *s.shape))
                torch.sum(products, -1, out=dlog)
            state_grad.mul_(d_total).baddbmm_(x, d)
        dbeta = torch.mul(values, dr, out=workspace("v products", Z, C, V)).sum(-1, keepdim=True)
        self.store("v", window, dr.mul_(beta))
        if not self.rows:
            return
        dX = product(D.flatten(1, 2), S.transpose(1, 2), out=workspace("dX", Z, 2 * C, K)).view(Z, C, 2, K)
        dP = product(D.flatten(1, 2), v_new.transpose(1, 2), out=workspace("dP", Z, 2 * C, C)).view(Z, C, 2, C)
        dlog_total.mul_(total.squeeze(-1))
        dlog = pairwise_backward(workspace, decay, dX, dF, dP, dlog_total)
        diagonal = dP[:, :, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)
        self._row_gradients(window, (q, k, beta), inverse_norms, (dX, dF, dlog, diagonal, dbeta))

    def _row_gradients(
        self, window: Window, rows: tuple[Tensor, ...], inverse_norms: tuple[Tensor | None, ...],
        gradients: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """From gradients of (q', βk'), k', γ's sum so far, the diagonal of M and β, those of the inputs."""
        request, inputs, (q, k, beta) = self.request, self.inputs, rows
        dX, dF, dlog, diagonal, dbeta = gradients
        dq, dbk = dX[:, :, 0], dX[:, :, 1]
        k_products = torch.mul(k, dbk, out=self.workspace("products", *k.shape))
        dbeta = inputs.beta_backward(window, self.workspace, beta, dbeta + k_products.sum(-1, keepdim=True))
        self.store("beta", window, dbeta)
        if self.decay:
            dlog.addcmul_(k_products, beta)
            dlog.addcmul_(torch.mul(q, dq, out=k_products), dq.new_tensor(request.scale))
            self._gate_gradients(window, dlog)
        dF.addcmul_(dbk, beta).addcmul_(q, diagonal * request.scale)
        dq.addcmul_(k, diagonal).mul_(request.scale)
        for name, unit, inverse, grad in zip("qk", (q, k), inverse_norms, (dq, dF), strict=True):
            if inverse is not None:
                inverse_norm_backward(unit, inverse, grad)
            self.store(name, window, grad, inputs.shared)

    def _gate_gradients(self, window: Window, dlog: Tensor) -> None:
        """From dγ [Z, C, K], gradients of g, A_log and dt_bias."""
        if self.request.use_gate_in_kernel:
            grad, summand = self.inputs.gate_backward(window, self.workspace("g", *dlog.shape), dlog)
            if "dt_bias" in self.grads:
                self.grads["dt_bias"][window.heads] += grad[..., : self.request.K].sum((0, 2))
            if "A_log" in self.grads:
                self.grads["A_log"][window.heads] += summand.sum((0, 2, 3))
            dlog = grad.flatten(0, 1)
        self.store("g", window, dlog)

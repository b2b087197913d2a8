"""One token for each of a few small states: the arithmetic of recurrent.py, bit for bit, in half of its torch calls.

Such a step spends its time in calls of torch, and most of those make scratch memory and views. So the scratch memory
of the last shapes is kept, with every view of it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kda_core.request import ForwardResult, Request
from kda_core_cpu.choose import is_small_step, sums_rows
from kda_core_cpu.gate import hold_rate, log_decay
from kda_core_cpu.inputs import norm_constants
from kda_core_cpu.sequences import has_one_token_each
from kda_core_cpu.workspace import Workspace, empty_output, with_slack

MAX_KEPT = 16
"""Shapes whose scratch memory is kept: each takes twice the memory of q, k and v in the compute dtype."""

_kept: dict[tuple, _SmallStep] = {}


def small_step(request: Request) -> ForwardResult | None:
    """Run ``fused_recurrent_kda`` if the call is a small step, else return None."""
    memo = {} if request.memo is None else request.memo
    key = memo.get(small_step)
    if key is None:
        r = request
        known = (r.q.shape, r.V, r.compute_dtype, r.scale, r.state_v_first)
        key = memo[small_step] = known if is_small_step(r) else ()
    if not key or not has_one_token_each(request) or _skips(request):
        return None
    # Another thread that runs a step of this shape meanwhile finds nothing, and makes its own.
    step = _kept.pop(key, None) or _SmallStep(request)
    result = step.run(request)
    _kept[key] = step
    if len(_kept) > MAX_KEPT:
        _kept.pop(next(iter(_kept.copy()), None), None)
    return result


def _skips(r: Request) -> bool:
    if r.ssm_state_indices is None:
        return False
    slots = r.ssm_state_indices.flatten().tolist()
    return min(slots) < 0 or r.pad_slot_id in slots


class _SmallStep:
    """The scratch memory of a step with the shapes, compute dtype, scale and layout of states of ``request``."""

    def __init__(self, request: Request) -> None:
        N, H, K, V = request.N, request.H, request.K, request.V
        rows, dtype = request.q.shape[:3], request.compute_dtype
        self.shape, self.sums_rows = (N * H, K, V), sums_rows(dtype, K, V, request.state_v_first)
        # Kept beyond the call: made in inference mode these would stay inference tensors.
        with torch.inference_mode(False):
            new = Workspace(dtype)
            self.kq, self.norms, self.qk = new("kq", *rows, 2, K), new("norms", *rows, 2, 1), new("qk", *rows, 1)
            self.d, self.rate, self.beta = new("d", *rows, K), new("rate", H), new("beta", *rows, 1)
            self.u, self.y = new("u", *rows, V), new("y", *rows, 2, V)
            self.epsilon, self.factors = norm_constants(request.scale, dtype, 2)
            self.k, self.q = self.kq.unbind(-2)
            self.products = self.y.unbind(-2)
            self.d_memory, self.beta_memory = with_slack(self.d), with_slack(self.beta)
            self.rate_column, self.logits = self.rate.unsqueeze(-1), self.beta.squeeze(-1)
            # Rows as columns and rows of the states [N, H, K, V], and as operands of a batched product.
            self.k_column, self.d_column = self.k.view(N, H, K, 1), self.d.view(N, H, K, 1)
            self.u_row = self.u.view(N, H, 1, V)
            self.weights, self.y_of_lanes = self.kq.view(N * H, 2, K), self.y.view(N * H, 2, V)
            # Arguments of a sum of rows, besides the states.
            self.flat_weights, self.bags = self.kq.view(-1), bags(N * H, K)

    def run(self, r: Request) -> ForwardResult:
        kq, norms, d, beta, u = self.kq, self.norms, self.d, self.beta, self.u
        self.k.copy_(r.k)
        self.q.copy_(r.q)
        if r.use_qk_l2norm_in_kernel:
            torch.linalg.vector_norm(kq, dim=-1, keepdim=True, out=norms)
            kq.mul_(torch.addcmul(self.epsilon, norms, norms, out=norms).rsqrt_().mul_(self.factors))
        else:
            self.q.mul_(r.scale)
        torch.sum(torch.mul(self.q, self.k, out=d), -1, True, out=self.qk)
        d.copy_(r.g)
        if r.use_gate_in_kernel:
            rate = None
            if r.A_log is not None:
                rate = self.rate_column
                hold_rate(self.rate.copy_(r.A_log).exp_())
            log_decay(d, rate, r.dt_bias, r.lower_bound, self.d_memory)
        self.d_memory.exp_()
        self.logits.copy_(r.beta)
        if r.use_beta_sigmoid_in_kernel:
            self.beta_memory.sigmoid_()
            if r.allow_neg_eigval:
                beta.mul_(2)
        states, slots = r.initial_state, r.ssm_state_indices
        if slots is not None:
            slots = slots.flatten()
            states = states.index_select(0, slots)
        # [N, H, K, V], as a view where they are stored V first.
        S = states.mT if r.state_v_first else states
        S = S.mul_(self.d_column) if r.inplace_final_state or slots is not None else S * self.d_column
        if self.sums_rows:
            sums = sums_of_bags(self.flat_weights, S.view(-1, self.shape[2]), *self.bags)
            along_k, along_q = sums.view_as(self.y).unbind(-2)
        else:
            torch.bmm(self.weights, S.view(self.shape), out=self.y_of_lanes)
            along_k, along_q = self.products
        torch.mul(r.v, beta, out=u).addcmul_(beta, along_k, value=-1)
        S.addcmul_(self.k_column, self.u_row)
        if slots is not None:
            r.initial_state.index_copy_(0, slots.long(), states)
        if r.out is None and r.v.dtype == u.dtype:
            o = torch.addcmul(along_q, self.qk, u)
        else:
            o = torch.addcmul(along_q, self.qk, u, out=empty_output(r))
        if not r.output_final_state or r.inplace_final_state:
            return ForwardResult(o, None)
        return ForwardResult(o, S.mT if r.state_v_first else S)


def row_sums(weights: Tensor, S: Tensor) -> Tensor:
    """``weights`` [lanes, 2, K] times S [lanes, K, V]: [2·lanes, V], by an embedding bag (``choose.sums_rows``)."""
    lanes, K, V = S.shape
    return sums_of_bags(weights.reshape(-1), S.view(-1, V), *bags(lanes, K))


def sums_of_bags(weights: Tensor, states: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """The same of ``weights`` [lanes·2·K] and ``states`` [lanes·K, V], with ``bags``."""
    return torch.embedding_bag(states, rows, offsets, False, 0, False, weights)[0]


@functools.lru_cache(maxsize=8)
def bags(lanes: int, K: int) -> tuple[Tensor, Tensor]:
    """State rows of every bag and the bags' offsets; two bags a lane."""
    # The cache outlives the call: made in inference mode these would stay inference tensors.
    with torch.inference_mode(False):
        rows = torch.arange(lanes * K, device="cpu").view(lanes, 1, K).expand(lanes, 2, K).reshape(-1)
        return rows, torch.arange(0, 2 * lanes * K, K, device="cpu")

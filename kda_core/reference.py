r"""The oracle: Kimi Delta Attention token by token in float64, written like the equation.

Per value head, with state S in R^{K x V}, log decay \gamma_t <= 0 in R^K and a scalar \beta_t:

    S_t = (I - \beta_t k_t k_t^T) Diag(exp \gamma_t) S_{t-1} + \beta_t k_t v_t^T
    o_t = scale * S_t^T q_t

Source: Kimi Linear, arXiv 2510.26692. Slow on purpose: it shares no algorithm with any backend. It is
also reachable as ``backend="reference"`` and is never chosen by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.nn import functional as F

from kda_core.capabilities import FEATURES_1_2, Available, BackendInfo, Capabilities, Feature, Unavailable
from kda_core.hookspecs import hookimpl
from kda_core.request import (
    DATA,
    DIFFERENTIABLE,
    AnyRequest,
    BackwardResult,
    CommitRequest,
    ForwardResult,
    GateRequest,
    Request,
    TensorSpec,
    chunks_of,
)

L2NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class OracleResult:
    """Everything in float64.

    Attributes:
        o: [B, T, HV, V].
        final_state: [N, HV, K, V], K first whatever the request's layout; rows that a pool skips keep
            the state they began with (zero).
        h: [B, NT, HV, K, V], K first.
        token_states: [N, L, HV, K, V] with L the longest sequence, or None unless asked for.
        skipped: [N] bool, rows that a pool's indices skip.
        records: [N, L, HV, 2K + V], or None unless the request has records.
    """

    o: Tensor
    final_state: Tensor
    h: Tensor
    token_states: Tensor | None
    skipped: Tensor
    records: Tensor | None = None


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    return x * (x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sigmoid(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x) * torch.sigmoid(-x)


def sigmoid(x: Tensor) -> Tensor:
    """torch.sigmoid with the gradient s(x) s(-x); torch's own, s (1 - s), has no digit left of it from x = 37 on."""
    return _Sigmoid.apply(x)


def gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Log decay of [..., HV, K]: -exp(A_log) softplus(g + dt_bias), or b sigmoid(exp(A_log) (g + dt_bias))."""
    # An infinite input stands for its limit; autograd would multiply it by the zero slope there.
    largest = torch.finfo(g.dtype).max
    x = g.clamp(-largest, largest)
    x = x if dt_bias is None else x + dt_bias
    if lower_bound is None:
        if A_log is None:
            raise ValueError("A_log: the softplus gate needs it, got None")
        # logaddexp(x, 0) is softplus without the threshold of F.softplus, which is off by 2e-9 in float64.
        return -A_log.exp()[:, None] * torch.logaddexp(x, torch.zeros_like(x))
    return lower_bound * sigmoid(x if A_log is None else A_log.exp()[:, None] * x)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, parents: Tensor | None = None
):
    """The equation above over [N, L, HV, ...] from ``state`` [N, HV, K, V]; ``parents`` [N, L] as in ``Request``.

    Returns:
        o [N, L, HV, V] (without the scale) and the list of the L + 1 states.
    """
    outputs, states = [], [state]
    # The gradient of a row taken by its index would fill a tensor of all rows.
    rows = (x.unbind(1) for x in (q[..., None], k[..., None], v, log_decay.exp()[..., None], beta[..., None]))
    for t, (q_t, k_t, v_t, decay, beta_t) in enumerate(zip(*rows, strict=True)):
        decayed = decay * _before(states, t, parents)
        error = v_t - (k_t * decayed).sum(-2)
        state = decayed + k_t * (beta_t * error)[..., None, :]
        outputs.append((q_t * state).sum(-2))
        states.append(state)
    o = torch.stack(outputs, 1) if outputs else v[:, :0]
    return o, states


def _before(states: list[Tensor], t: int, parents: Tensor | None) -> Tensor:
    """The states [N, HV, K, V] that token t continues from; ``states``: those before each token, and after the last."""
    if parents is None:
        return states[t]
    return torch.stack([states[min(p, t - 1) + 1 if p >= 0 else 0][n] for n, p in enumerate(parents[:, t].tolist())])


def sequence_bounds(r: Request | CommitRequest) -> list[tuple[int, int, int]]:
    """(batch row, first token, end) of every sequence."""
    if r.cu_seqlens is None:
        return [(n, 0, r.T) for n in range(r.N)]
    copy = getattr(r, "cu_seqlens_cpu", None)
    cuts = (r.cu_seqlens if copy is None else copy).tolist()
    return [(0, start, end) for start, end in itertools.pairwise(cuts)]


def _slots(r: Request, table: Tensor | None) -> Tensor:
    """[N, W] int64 slot indices of a pool, every skipped entry as -1; without a table row n is slot n."""
    if table is None:
        return torch.arange(r.N, device="cpu")[:, None]
    indices = table.cpu().long()
    indices = indices[:, None] if indices.dim() == 1 else indices
    return torch.where((indices < 0) | (indices == r.pad_slot_id), -1, indices)


def _initial(r: Request, x: Tensor | None) -> tuple[Tensor, Tensor]:
    """The dense initial state [N, HV, K, V] and which rows are skipped."""
    none = torch.zeros(r.N, dtype=torch.bool, device="cpu")
    if x is None:
        return r.v.new_zeros(r.N, r.HV, r.K, r.V, dtype=torch.float64), none
    if r.inplace_final_state:
        slots = _slots(r, r.ssm_state_indices)
        if r.num_accepted_tokens is None:
            start = slots[:, 0]
        else:
            start = slots.gather(1, r.num_accepted_tokens.cpu().long()[:, None] - 1)[:, 0]
        none = start < 0
        if not len(x):  # a pool without slots: there is none to stand in for what is skipped
            x = x.new_zeros(1, *x.shape[1:])
        x = x[start.clamp_min(0).to(x.device)]
        # where(), not a product: a row that reads no slot must not get NaN from the one that stands in for it.
        zero = none if r.has_initial_state is None else none | ~r.has_initial_state.cpu()
        x = torch.where(zero.to(x.device)[:, None, None, None], torch.zeros_like(x), x)
    return (x.mT if r.state_v_first else x), none


def _within(x: Tensor, r: Request, bounds: list[tuple[int, int, int]]) -> Tensor:
    """Rows [B, T, ...], those behind the last sequence as zeros: they may hold anything, and have no gradient."""
    end = r.T if r.cu_seqlens is None else max((end for _, _, end in bounds), default=0)
    if end == r.T:
        return x
    return torch.cat([x[:, :end], torch.zeros_like(x[:, end:])], 1)


def oracle(
    r: Request,
    *,
    token_states: bool = False,
    inputs: dict[str, Tensor] | None = None,
    steps: Callable[..., tuple[Tensor, list[Tensor]]] = recurrence,
) -> OracleResult:
    """Compute a request in float64, differentiably with respect to ``inputs`` (float64 copies by name).

    ``steps``: what stands for ``recurrence``, for tests of the kit.
    """
    x = {name: getattr(r, name) for name in DIFFERENTIABLE}
    x = {name: t if t is None else t.double() for name, t in x.items()} | (inputs or {})
    bounds = sequence_bounds(r)
    q, k, v, g, beta = (_within(x[name], r, bounds) for name in DATA)
    if r.use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    log_decay = gate(g, x["A_log"], x["dt_bias"], r.lower_bound) if r.use_gate_in_kernel else g
    if r.use_beta_sigmoid_in_kernel:
        beta = sigmoid(beta) * (2.0 if r.allow_neg_eigval else 1.0)
    group = r.HV // r.H
    q, k = (t.repeat_interleave(group, dim=2) for t in (q, k))

    # Every sequence becomes a row; the padding behind a short one has no decay and beta = 0, so that
    # its state stays as it is.
    length = max((end - start for _, start, end in bounds), default=0)

    def rows(t: Tensor) -> Tensor:
        padded = [
            F.pad(t[b, start:end].movedim(0, -1), (0, length - (end - start))).movedim(-1, 0)
            for b, start, end in bounds
        ]
        return torch.stack(padded) if padded else t.new_zeros(0, length, *t.shape[2:])

    state, skipped = _initial(r, x["initial_state"])
    q, k, v_rows, log_decay, beta = map(rows, (q, k, v, log_decay, beta))
    o_rows, states = steps(q, k, v_rows, log_decay, beta, state, r.parents)
    o_rows = r.scale * o_rows

    o = v.new_zeros(r.B, r.T, r.HV, r.V)
    h: list[Tensor] = []
    for n, (b, start, end) in enumerate(bounds):
        if not skipped[n]:
            o[b, start:end] = o_rows[n, : end - start]
        at_chunks = [states[t][n] for t in range(0, end - start, r.chunk_size)]
        h += [torch.zeros_like(state) for state in at_chunks] if skipped[n] else at_chunks
    shape = (r.B, chunks_of(r), r.HV, r.K, r.V)
    h_tensor = torch.stack(h).reshape(shape) if h else v.new_zeros(shape)
    per_token = torch.stack(states[1:], 1) if token_states and length else None
    records = None
    if r.records is not None and length:
        before = torch.stack([_before(states, t, r.parents) for t in range(length)], 1)
        records = _records(k, v_rows, log_decay, beta, before)
    return OracleResult(o, states[-1], h_tensor, per_token, skipped, records)


def _records(k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, before: Tensor) -> Tensor:
    """k, the decay and u of every token [N, L, HV, ...], from the states [N, L, HV, K, V] before them."""
    decay = log_decay.exp()
    decayed = decay[..., None] * before
    u = beta[..., None] * (v - (k[..., None] * decayed).sum(-2))
    return torch.cat([k, decay, u], -1)


def forward(r: Request, steps: Callable[..., tuple[Tensor, list[Tensor]]] = recurrence) -> ForwardResult:
    """A request's forward with the results in the contract's shapes and dtypes; ``steps`` as in ``oracle``."""
    if r.commit is not None:
        commit(r.committing())
        r = r.after_commit()
    result = oracle(r, token_states=r.inplace_final_state, steps=steps)

    every = 1 if r.writes_every_token else 0
    _write_states(r, result, r.written_states, r.written_slots, every)
    _write_states(r, result, r.checkpoint_states, r.checkpoint_indices, r.checkpoint_every)
    _write_records(r, result)
    o = result.o.to(r.q.dtype)
    if r.out is not None:
        o = r.out.copy_(o)
    final_state = None
    if r.output_final_state and not r.inplace_final_state:
        final_state = _stored(r, result.final_state, r.state_dtype)
    return ForwardResult(o, final_state, _stored(r, result.h, r.h_dtype) if r.return_intermediate_states else None)


def _stored(r: Request | CommitRequest, states: Tensor, dtype: torch.dtype) -> Tensor:
    """States [..., K, V] in the layout of the call."""
    return (states.mT if r.state_v_first else states).to(dtype).contiguous()


def _write_states(r: Request, result: OracleResult, name: str | None, table: Tensor | None, every: int) -> None:
    """Write the states after ``every`` so many tokens to the slots in the table's columns; 0: after the last token."""
    if name is None or result.token_states is None:
        return
    pool, slots = getattr(r, name), _slots(r, table).tolist()
    for n, (_, start, end) in enumerate(sequence_bounds(r)):
        length = end - start
        ends = range(every, length + 1, every) if every else [length] if length else []
        for slot, t in zip(slots[n], ends, strict=False):
            if 0 <= slot < len(pool) and not result.skipped[n]:
                pool[slot] = _stored(r, result.token_states[n, t - 1], pool.dtype)


def _write_records(r: Request, result: OracleResult) -> None:
    if r.records is None or result.records is None:
        return
    for n, (b, start, end) in enumerate(sequence_bounds(r)):
        if not result.skipped[n]:
            r.records[b, start:end] = result.records[n, : end - start].to(r.records.dtype)


def committed(r: CommitRequest) -> dict[int, Tensor]:
    """The states that a commit writes, in float64 and [HV, K, V], by their slots."""
    found: dict[int, Tensor] = {}
    rows_of = zip(sequence_bounds(r), r.state_indices.tolist(), r.num_accepted.tolist(), strict=True)
    for n, ((b, start, end), slot, count) in enumerate(rows_of):
        count = min(max(count, 0), end - start if r.path is None else r.path.shape[1])
        if not 0 <= slot < len(r.pool) or slot == r.pad_slot_id or not count or start == end:
            continue
        tokens = torch.arange(count, device="cpu") if r.path is None else r.path[n, :count].cpu().long()
        tokens = tokens.clamp(0, end - start - 1).to(r.records.device)
        rows = r.records[b, start + tokens].double()
        state = (r.pool[slot].mT if r.state_v_first else r.pool[slot]).double()
        for k, decay, u in zip(*rows.split([r.K, r.K, r.V], -1), strict=True):
            decay = torch.where(decay < 0, 1 + decay, decay)
            state = decay[..., None] * state + k[..., None] * u[..., None, :]
        found[slot] = state
    return found


def commit(r: CommitRequest) -> Tensor:
    """Run ``commit_kda``."""
    for slot, state in committed(r).items():
        r.pool[slot] = _stored(r, state, r.pool.dtype)
    return r.pool


def _on_a_fresh_thread(compute: Callable[[], BackwardResult]) -> BackwardResult:
    """Run ``compute`` where autograd records: inside an operator it is switched off for the calling thread."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(compute).result()


def backward(r: Request) -> BackwardResult:
    """Gradients of a request by autograd through the token recurrence."""
    names = [name for name in DIFFERENTIABLE if name in r.needs_grad and getattr(r, name) is not None]
    inputs = {name: getattr(r, name).detach().double().requires_grad_() for name in names}
    result = oracle(r, inputs=inputs)
    grad_state = r.grad_final_state
    if grad_state is not None and r.state_v_first:
        grad_state = grad_state.mT
    pairs = [
        (output, grad.double())
        for output, grad in ((result.o, r.grad_o), (result.final_state, grad_state))
        if grad is not None and output.requires_grad
    ]
    found: tuple[Tensor | None, ...] = (None,) * len(names)
    if pairs:
        outputs, grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, list(inputs.values()), grads, allow_unused=True)
    result_grads = {}
    for name, grad in zip(names, found, strict=True):
        like = getattr(r, name)
        full = torch.zeros_like(like, memory_format=torch.contiguous_format)
        result_grads[name] = full if grad is None else full.copy_(grad)
    return BackwardResult(result_grads)


def gate_backward(r: GateRequest) -> BackwardResult:
    """Gradients of ``kda_gate`` by autograd."""
    given = {"g": r.g, "A_log": r.A_log, "dt_bias": r.dt_bias}
    inputs = {name: t.detach().double().requires_grad_() for name, t in given.items() if t is not None}
    names = [name for name in inputs if name in r.needs_grad]
    y = gate(inputs["g"], inputs.get("A_log"), inputs.get("dt_bias"), r.lower_bound)
    grad_output = torch.zeros_like(y) if r.grad_output is None else r.grad_output.double()
    found = torch.autograd.grad(y, [inputs[name] for name in names], grad_output)
    return BackwardResult(
        {name: grad.to(getattr(r, name).dtype).contiguous() for name, grad in zip(names, found, strict=True)}
    )


class ReferenceBackend:
    """The oracle behind the plugin contract."""

    @hookimpl
    def kda_core_backend(self) -> BackendInfo:
        return BackendInfo(
            name="reference",
            version="1.0",
            contract=SpecifierSet("~=1.2"),
            device_types=("cpu",),
            priority=None,
            capabilities=Capabilities(
                features=FEATURES_1_2,
                dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
                closed={Feature.CONTEXT_PARALLEL: "it has no hooks in halves; the core makes plain calls of it"},
            ),
            summary="float64 token recurrence, the oracle of the tests; only when named",
        )

    @hookimpl
    def kda_core_availability(self, device: torch.device) -> Available | Unavailable:
        return Available() if device.type == "cpu" else Unavailable("runs on the CPU only")

    @hookimpl
    def kda_core_reject(self, request: AnyRequest) -> str | None:
        return None

    @hookimpl
    def kda_core_saved_spec(self, request: Request) -> tuple[TensorSpec, ...]:
        return ()

    @hookimpl
    def kda_core_chunk_forward(self, request: Request) -> ForwardResult:
        return forward(request)

    @hookimpl
    def kda_core_chunk_backward(self, request: Request) -> BackwardResult:
        return _on_a_fresh_thread(lambda: backward(request))

    kda_core_recurrent_forward, kda_core_recurrent_backward = kda_core_chunk_forward, kda_core_chunk_backward

    @hookimpl
    def kda_core_commit(self, request: CommitRequest) -> Tensor:
        return commit(request)

    @hookimpl
    def kda_core_gate_forward(self, request: GateRequest) -> Tensor:
        A_log, dt_bias = (t if t is None else t.double() for t in (request.A_log, request.dt_bias))
        return gate(request.g.double(), A_log, dt_bias, request.lower_bound).to(request.output_dtype).contiguous()

    @hookimpl
    def kda_core_gate_backward(self, request: GateRequest) -> BackwardResult:
        return _on_a_fresh_thread(lambda: gate_backward(request))

"""The one object that goes through every hook, and the results that come back.

A request holds the caller's tensors as they came (any strides, never to be modified, pool and ``out``
aside) and every option, already checked. Symbols: B batch, T tokens, H query/key heads, HV value
heads, K and V head dimensions, N sequences, C chunk size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kda_core._requests import (
    STATES,
    CommitRequest,
    GatedNormRequest,
    LayerCall,
    Remembering,
    ShortConvolutionRequest,
    features_of_sizes,
)
from kda_core._requests import Begun as Begun
from kda_core._requests import Edges as Edges
from kda_core.capabilities import Feature

Op = Literal["chunk_kda", "fused_recurrent_kda"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Request(Remembering):
    """One checked call of ``chunk_kda`` or ``fused_recurrent_kda``, forward or backward.

    The fields from ``q`` to ``save_for_backward`` are the table of the arguments, in the order of
    ``fused_recurrent_kda``: checks, features, cache keys and the command line read it, and a test compares the
    signatures with it. Any value but the default needs the feature that its field names.

    Attributes:
        op: the public function that was called.
        q, k: [B, T, H, K].
        v: [B, T, HV, V], dtype of q.
        g: [B, T, HV, K]; natural-log decay, or the raw gate input with ``use_gate_in_kernel``.
        beta: [B, T, HV]; or logits with ``use_beta_sigmoid_in_kernel``.
        A_log: [HV] or None.
        dt_bias: [HV, K] or None (always two-dimensional here).
        initial_state: [N, HV, K, V], or a pool [slots, HV, K, V] when ``inplace_final_state``;
            [..., V, K] with ``state_v_first``; or None.
        ssm_state_indices: [N] or [N, 1+S] slots of the pool, or None (row n is slot n).
        final_state_indices: [N] or [N, 1+S] slots that states are written to, or None: those of ssm_state_indices.
        final_state_pool: [slots, HV, K, V] pool that states are written to, or None: initial_state.
        intermediate_states_dtype: of h, or None: ``state_dtype``.
        checkpoint_pool: [slots, HV, K, V] pool of the checkpoints, or None: that of ``written_states``.
        records: [B, T, HV, 2K + V] float32 (float64), to be written as ``CommitRequest`` says, or None. Rows of no
            sequence, and of one that is skipped, are not written. With it ``update_state`` is False.
        commit: [N, T', HV, 2K + V] records of an earlier call, or None: the pool is first advanced by num_committed of
            them, as ``committing`` says, and the call starts from that. Only beside records, without cu_seqlens.
        parents: [N, T] or None: token t continues from the state after token parents[n, t] < t, or from the sequence's
            first state where that is negative. Numbers from t on stand for t - 1. None: t - 1. Only beside records.
        commit_path: [N, M] or None, the ``path`` of the commit.
        batch_invariant: no choice that changes bits may depend on the other sequences of the call, nor on their number.
        inplace_final_state: ``initial_state`` is a pool that is read and advanced in place; then the
            result's ``final_state`` is None.
        save_for_backward: the result's ``saved`` must match ``kda_core_saved_spec``.
        saved: backward only: what the forward saved.
        grad_o: backward only: [B, T, HV, V] or None.
        grad_final_state: backward only: shape of the final state, or None.
        needs_grad: backward only: names of the inputs whose gradient is asked for.
        cp_context: hooks are given None, or in a call in two halves (``Begun`` says which fields that has) True, or
            ``Edges``.
        memo: None, or a dictionary for values that a backend derives from options and tensor metadata (shapes, strides,
            dtypes, device). All calls with the same ones share it, forward and backward, in all threads. It may be
            dropped at any time. A copy of a request (``replace``) has none.

    The other fields are the arguments of the public function under the same names; defaults are filled in.
    """

    op: Op
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    scale: float
    initial_state: Tensor | None = field(default=None, metadata={"needs": Feature.INITIAL_STATE})
    output_final_state: bool = field(default=False, metadata={"needs": Feature.FINAL_STATE})
    use_qk_l2norm_in_kernel: bool = field(default=False, metadata={"needs": Feature.QK_L2NORM})
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = field(default=False, metadata={"needs": Feature.BETA_SIGMOID})
    allow_neg_eigval: bool = field(default=False, metadata={"needs": Feature.NEG_EIGVAL})
    safe_gate: bool = field(default=False, metadata={"needs": Feature.SAFE_GATE})
    lower_bound: float | None = None
    disable_recompute: bool = field(default=False, metadata={"needs": Feature.DISABLE_RECOMPUTE})
    return_intermediate_states: bool = field(default=False, metadata={"needs": Feature.INTERMEDIATE_STATES})
    state_v_first: bool = field(default=False, metadata={"needs": Feature.STATE_V_FIRST})
    cu_seqlens: Tensor | None = field(default=None, metadata={"needs": Feature.VARLEN})
    cu_seqlens_cpu: Tensor | None = None
    cp_context: Any = field(default=None, metadata={"needs": Feature.CONTEXT_PARALLEL})
    chunk_size: int = 64
    ssm_state_indices: Tensor | None = field(default=None, metadata={"needs": Feature.PAGED_STATE})
    num_accepted_tokens: Tensor | None = field(default=None, metadata={"needs": Feature.SPEC_DECODE})
    inplace_final_state: bool = field(default=False, metadata={"needs": Feature.PAGED_STATE})
    pad_slot_id: int = -1
    out: Tensor | None = field(default=None, metadata={"needs": Feature.OUT})
    has_initial_state: Tensor | None = field(default=None, metadata={"needs": Feature.HAS_INITIAL_STATE})
    update_state: bool = field(default=True, metadata={"needs": Feature.NO_STATE_UPDATE})
    final_state_indices: Tensor | None = field(default=None, metadata={"needs": Feature.FINAL_STATE_INDICES})
    final_state_pool: Tensor | None = field(default=None, metadata={"needs": Feature.FINAL_STATE_INDICES})
    intermediate_states_dtype: torch.dtype | None = field(
        default=None, metadata={"needs": Feature.INTERMEDIATE_STATES_DTYPE}
    )
    checkpoint_indices: Tensor | None = field(default=None, metadata={"needs": Feature.CHECKPOINTS})
    checkpoint_every: int = 0
    checkpoint_pool: Tensor | None = field(default=None, metadata={"needs": Feature.CHECKPOINTS})
    records: Tensor | None = field(default=None, metadata={"needs": Feature.DRAFT_RECORDS})
    commit: Tensor | None = field(default=None, metadata={"needs": Feature.DRAFT_RECORDS})
    num_committed: Tensor | None = None
    parents: Tensor | None = field(default=None, metadata={"needs": Feature.DRAFT_TREES})
    commit_path: Tensor | None = field(default=None, metadata={"needs": Feature.DRAFT_TREES})
    batch_invariant: bool = field(default=False, metadata={"needs": Feature.BATCH_INVARIANT})
    save_for_backward: bool = False
    saved: tuple[Tensor, ...] = ()
    grad_o: Tensor | None = None
    grad_final_state: Tensor | None = None
    needs_grad: frozenset[str] = frozenset()
    memo: dict[Any, Any] | None = field(default=None, init=False)

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def B(self) -> int:
        return self.q.shape[0]

    @property
    def T(self) -> int:
        return self.q.shape[1]

    @property
    def H(self) -> int:
        return self.q.shape[2]

    @property
    def K(self) -> int:
        return self.q.shape[3]

    @property
    def HV(self) -> int:
        return self.v.shape[2]

    @property
    def V(self) -> int:
        return self.v.shape[3]

    @property
    def N(self) -> int:
        """Number of sequences: B, or len(cu_seqlens) - 1 when packed."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of state arithmetic: float32, or float64 when q is float64."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of states unless the call says otherwise: that of the initial state, or the compute dtype."""
        return self.compute_dtype if self.initial_state is None else self.initial_state.dtype

    @property
    def h_dtype(self) -> torch.dtype:
        """Dtype of the intermediate states."""
        return self.intermediate_states_dtype or self.state_dtype

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a dense state, [N, HV, K, V] or [N, HV, V, K]."""
        last = (self.V, self.K) if self.state_v_first else (self.K, self.V)
        return (self.N, self.HV, *last)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments that the call writes to, where they are given."""
        names = "out", "records", self.written_states, self.checkpoint_states
        return tuple(filter(None, names))

    @property
    def written_states(self) -> str | None:
        """Name of the argument whose states the call advances in place; None where it writes to none."""
        if self.commit is not None:
            return "initial_state"
        if not self.inplace_final_state or self.update_state is False:
            return None
        return "initial_state" if self.final_state_pool is None else "final_state_pool"

    def committing(self) -> CommitRequest:
        """The commit that comes first in a call with ``commit``."""
        assert self.initial_state is not None
        assert self.commit is not None
        assert self.num_committed is not None
        assert self.ssm_state_indices is not None
        return CommitRequest(
            pool=self.initial_state, records=self.commit, num_accepted=self.num_committed,
            state_indices=self.ssm_state_indices.flatten(), state_v_first=self.state_v_first,
            pad_slot_id=self.pad_slot_id, path=self.commit_path,
        )  # fmt: skip

    def after_commit(self) -> Request:
        """The rest of such a call."""
        return replace(self, commit=None, num_committed=None, commit_path=None)

    def branches(self) -> list[tuple[int, list[int]]]:
        """A sequence's number and tokens from the root to a leaf, for every leaf of the trees; reads ``parents``."""
        assert self.parents is not None
        found = []
        for n, row in enumerate(self.parents.tolist()):
            parents = [min(parent, t - 1) for t, parent in enumerate(row)]
            for leaf in sorted({*range(len(parents))} - {*parents}):
                branch, token = [], leaf
                while token >= 0:
                    branch.append(token)
                    token = parents[token]
                found.append((n, branch[::-1]))
        return found

    @property
    def checkpoint_states(self) -> str | None:
        """Name of the pool that checkpoints go to; None without checkpoints."""
        if self.checkpoint_indices is None:
            return None
        return self.written_states if self.checkpoint_pool is None else "checkpoint_pool"

    @property
    def written_slots(self) -> Tensor | None:
        """[N] or [N, 1+S], the slots that states are written to; None: row n is slot n, or there is no pool."""
        return self.ssm_state_indices if self.final_state_indices is None else self.final_state_indices

    @property
    def writes_every_token(self) -> bool:
        """Whether every token has a slot of its own, rather than the last one."""
        slots = self.written_slots
        return self.update_state and slots is not None and slots.dim() == 2 and slots.shape[1] > 1

    @property
    def final_dtype(self) -> torch.dtype:
        """Dtype of the final states: that of the pool that they are written to, or of the initial state."""
        return self.state_dtype if self.final_state_pool is None else self.final_state_pool.dtype

    def _features(self) -> Iterator[Feature]:
        for name, feature, absent in _FEATURE_OF:
            if getattr(self, name) is not absent:
                yield feature
        chunked = self.op == "chunk_kda"
        yield Feature.CHUNK if chunked else Feature.RECURRENT
        if self.save_for_backward or self.needs_grad:
            yield Feature.BACKWARD if chunked else Feature.RECURRENT_BACKWARD
            if self.initial_state is not None or self.output_final_state:
                yield Feature.STATE_GRADIENT
        if self.HV != self.H:
            yield Feature.GVA
        yield from features_of_sizes(self.K, self.V)
        for states in (self.initial_state, self.final_state_pool, self.checkpoint_pool):
            if states is not None and states.dtype in STATES:
                yield STATES[states.dtype]
        tables = (self.ssm_state_indices, self.final_state_indices)
        if any(t is not None and t.dim() == 2 and t.shape[1] > 1 for t in tables):
            yield Feature.SPEC_DECODE
        if self.use_gate_in_kernel:
            yield Feature.SOFTPLUS_GATE if self.lower_bound is None else Feature.LOWER_BOUND_GATE
        if chunked and self.chunk_size == 32:
            yield Feature.CHUNK_32
        if not all(t.is_contiguous() for t in (self.q, self.k, self.v, self.g, self.beta)):
            yield Feature.STRIDED_INPUT


def chunks_of(r: Request) -> int:
    """NT, the number of chunks. For packed sequences it depends on values; the checks demand them on the CPU."""
    C = r.chunk_size
    if r.cu_seqlens is None:
        return (r.T + C - 1) // C
    bounds = (r.cu_seqlens if r.cu_seqlens_cpu is None else r.cu_seqlens_cpu).tolist()
    return sum((end - start + C - 1) // C for start, end in itertools.pairwise(bounds))


DATA = tuple(f.name for f in fields(Request) if f.type == "Tensor")
"""Names of the arguments that every call has: q, k, v, g and beta."""

DIFFERENTIABLE = (*DATA, "A_log", "dt_bias", "initial_state")
"""Those that have a gradient."""

GATE_DIFFERENTIABLE = ("g", "A_log", "dt_bias")
"""The same of ``kda_gate``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GateRequest(Remembering):
    """One checked call of ``kda_gate``, forward or backward.

    Attributes:
        g: [..., HV, K], the raw gate input.
        A_log: [HV] or None (only with ``lower_bound``).
        dt_bias: [HV, K] or None.
        lower_bound: negative, or None for the softplus gate.
        save_for_backward: the call has a backward to come.
        grad_output: backward only: shape of g, float32 or float64.
        needs_grad: backward only: names among "g", "A_log", "dt_bias".
        memo: as in ``Request``.
    """

    g: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    save_for_backward: bool = False
    grad_output: Tensor | None = None
    needs_grad: frozenset[str] = frozenset()
    op: Literal["kda_gate"] = "kda_gate"
    memo: dict[Any, Any] | None = field(default=None, init=False)

    @property
    def device(self) -> torch.device:
        return self.g.device

    @property
    def output_dtype(self) -> torch.dtype:
        """float32, or float64 when g is float64."""
        return torch.float64 if self.g.dtype == torch.float64 else torch.float32

    def _features(self) -> Iterator[Feature]:
        yield Feature.GATE
        yield Feature.SOFTPLUS_GATE if self.lower_bound is None else Feature.LOWER_BOUND_GATE
        if self.save_for_backward or self.needs_grad:
            yield Feature.GATE_BACKWARD
        if not self.g.is_contiguous():
            yield Feature.STRIDED_INPUT


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeStepRequest(LayerCall):
    """One checked call of ``kda_core.nn.kda_decode_step``: T tokens of each of N sequences. W taps, D = 2·H·K + HV·V.

    Attributes:
        x: [N, T, D], inputs of the convolution: q, k and v side by side; neither N nor T 0.
        g: [N, T, HV, K].
        beta: [N, T, HV].
        conv_state: [slots, W - 1, D], any strides; advanced.
        weight: [D, W].
        bias: [D] or None.
        state: [slots, HV, K, V] (V and K exchanged with ``state_v_first``), a head's numbers contiguous; advanced.
        indices: [N] or [N, 1], a slot read and written; [N, T] and more, a slot written for each token; None: slot n of
            sequence n.
        accepted: [N] or None: sequence n starts from slot [n, accepted - 1], and from [n, 0] without it.
        A_log, dt_bias: [HV], [HV, K] or None.
        norm_gate: [N, T, HV, V] or None: no norm.
        norm_weight: [V] or None: no norm.
        norm_eps, scale, lower_bound, pad_slot_id and the flags: as in the function.
        out: [N, T, HV, V], to be written; or None.
        records: [N, T, HV, 2K + V], to be written as in ``Request``, and neither state advances; or None.
        commit: [N, T', HV, 2K + V] or None: as in ``Request``, and the convolution's states advance by as many inputs.
        num_committed: [N] or None.
        commit_inputs: [N, T', D] in the dtype of x, the inputs of the committed tokens; or None.
        memo: as in ``Request``.
    """

    g: Tensor
    beta: Tensor
    conv_state: Tensor
    weight: Tensor
    state: Tensor
    bias: Tensor | None = None
    indices: Tensor | None = None
    accepted: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    norm_gate: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-5
    scale: float = 1.0
    lower_bound: float | None = None
    use_qk_l2norm_in_kernel: bool = True
    use_gate_in_kernel: bool = True
    use_beta_sigmoid_in_kernel: bool = True
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    pad_slot_id: int = -1
    out: Tensor | None = None
    records: Tensor | None = None
    commit: Tensor | None = None
    num_committed: Tensor | None = None
    commit_inputs: Tensor | None = None

    @property
    def H(self) -> int:
        """Heads of q and k."""
        *_, HV, K = self.g.shape
        return (self.x.shape[2] - HV * self.V) // (2 * K)

    @property
    def V(self) -> int:
        return self.state.shape[2 if self.state_v_first else 3]

    def recurrence_arguments(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> dict[str, Any]:
        """Arguments of ``fused_recurrent_kda`` behind a convolution that gave q, k and v; ``state``: the pool, or N."""
        return {
            "q": q, "k": k, "v": v, "g": self.g, "beta": self.beta, "A_log": self.A_log, "dt_bias": self.dt_bias,
            "scale": self.scale, "initial_state": state, "inplace_final_state": True,
            "use_qk_l2norm_in_kernel": self.use_qk_l2norm_in_kernel, "use_gate_in_kernel": self.use_gate_in_kernel,
            "use_beta_sigmoid_in_kernel": self.use_beta_sigmoid_in_kernel, "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound, "state_v_first": self.state_v_first, "ssm_state_indices": self.indices,
            "num_accepted_tokens": self.accepted, "pad_slot_id": self.pad_slot_id, "records": self.records,
            "update_state": self.records is None, "commit": self.commit, "num_committed": self.num_committed,
        }  # fmt: skip

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, out: Tensor | None = None) -> Request:
        """The call with them."""
        return Request(op="fused_recurrent_kda", out=out, **self.recurrence_arguments(q, k, v, state))


AnyRequest = Request | GateRequest | CommitRequest
LayerRequest = ShortConvolutionRequest | GatedNormRequest | DecodeStepRequest
"""Calls around the operator in a layer, which a backend may serve; the core has code of its own for them."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardResult:
    """Result of a forward hook; every tensor is freshly made, contiguous and aliases no input.

    Attributes:
        o: [B, T, HV, V], dtype of q; the request's ``out`` when that was given.
        final_state: ``request.state_shape`` in ``request.state_dtype``; None unless
            ``output_final_state`` (and always None for a pool).
        h: [B, NT, HV, K, V] (or [..., V, K]) in ``request.h_dtype``; None unless asked for.
        saved: tensors for the backward, as ``kda_core_saved_spec`` announced; () unless asked for.
    """

    o: Tensor
    final_state: Tensor | None = None
    h: Tensor | None = None
    saved: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class BackwardResult:
    """Result of a backward hook: gradients by input name, each in that input's shape and dtype, contiguous.

    Holds at least the names in ``request.needs_grad``; dt_bias as [HV, K].
    """

    grads: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor that a forward saves for its backward."""

    shape: tuple[int, ...]
    dtype: torch.dtype


# With each field that needs a feature, the value that does not: a False is none of the options that are no flags.
_FEATURE_OF = tuple((f.name, f.metadata["needs"], f.default) for f in fields(Request) if "needs" in f.metadata)

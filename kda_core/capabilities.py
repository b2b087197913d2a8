"""The declarations of a backend: features, limits and numerical slack. Data only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from packaging.specifiers import SpecifierSet


class Feature(Enum):
    """One promise that a test of the conformance kit can check.

    A backend declares the features that it serves. Any other is closed: a call that needs it is
    refused before the backend is asked, so that a backend which is older than a feature refuses it
    rather than ignores it. The value is the text that users see in refusals.
    """

    CHUNK = "chunk_kda"
    RECURRENT = "fused_recurrent_kda"
    GATE = "kda_gate"
    BACKWARD = "gradients of chunk_kda"
    RECURRENT_BACKWARD = "gradients of fused_recurrent_kda"
    GATE_BACKWARD = "gradients of kda_gate"
    VARLEN = "packed sequences (cu_seqlens)"
    GVA = "grouped value attention (HV > H)"
    UNEQUAL_HEAD_DIMS = "different key and value head dimensions (K != V)"
    ODD_HEAD_DIMS = "head dimensions that are no power of two"
    INITIAL_STATE = "an initial state"
    FINAL_STATE = "a final state (output_final_state)"
    STATE_GRADIENT = "gradients through the initial and the final state"
    STATE_V_FIRST = "states stored V first (state_v_first)"
    BF16_STATE = "bfloat16 states"
    FP16_STATE = "float16 states"
    INTERMEDIATE_STATES = "intermediate states (return_intermediate_states)"
    INTERMEDIATE_STATES_DTYPE = "intermediate states in a dtype of their own (intermediate_states_dtype)"
    PAGED_STATE = "a pool of states, advanced in place (ssm_state_indices, inplace_final_state)"
    SPEC_DECODE = "a slot for every token (ssm_state_indices [N, 1+S], num_accepted_tokens)"
    QK_L2NORM = "q/k normalisation (use_qk_l2norm_in_kernel)"
    SOFTPLUS_GATE = "the softplus gate (use_gate_in_kernel)"
    LOWER_BOUND_GATE = "the lower-bound gate (use_gate_in_kernel with lower_bound)"
    BETA_SIGMOID = "raw beta logits (use_beta_sigmoid_in_kernel)"
    NEG_EIGVAL = "negative eigenvalues (allow_neg_eigval)"
    SAFE_GATE = "the bounded-decay hint (safe_gate)"
    CHUNK_32 = "chunk_size=32"
    DISABLE_RECOMPUTE = "saving instead of recomputing (disable_recompute)"
    OUT = "the caller's output buffer (out)"
    STRIDED_INPUT = "inputs that are not contiguous"
    CONTEXT_PARALLEL = "a sequence spread over devices (cp_context)"
    HAS_INITIAL_STATE = "sequences of a pool that start from zero (has_initial_state)"
    NO_STATE_UPDATE = "outputs alone, from a pool that stays as it was (update_state=False)"
    CHECKPOINTS = "states at multiples of a number of tokens, in slots (checkpoint_indices, checkpoint_every)"
    FINAL_STATE_INDICES = "final states in other slots, or in another pool (final_state_indices, final_state_pool)"
    DRAFT_RECORDS = "records of a draft instead of its states, and their commit (records, commit_kda)"
    DRAFT_TREES = "a tree of draft tokens, and the commit of one of its paths (parents, path, commit_path)"
    BATCH_INVARIANT = "the same bits alone and in any batch (batch_invariant)"


FEATURES_1_0 = frozenset(
    {
        Feature.CHUNK, Feature.RECURRENT, Feature.GATE, Feature.BACKWARD, Feature.RECURRENT_BACKWARD,
        Feature.GATE_BACKWARD, Feature.VARLEN, Feature.GVA, Feature.UNEQUAL_HEAD_DIMS, Feature.ODD_HEAD_DIMS,
        Feature.INITIAL_STATE, Feature.FINAL_STATE, Feature.STATE_GRADIENT, Feature.STATE_V_FIRST, Feature.BF16_STATE,
        Feature.INTERMEDIATE_STATES, Feature.PAGED_STATE, Feature.SPEC_DECODE, Feature.QK_L2NORM, Feature.SOFTPLUS_GATE,
        Feature.LOWER_BOUND_GATE, Feature.BETA_SIGMOID, Feature.NEG_EIGVAL, Feature.SAFE_GATE, Feature.CHUNK_32,
        Feature.DISABLE_RECOMPUTE, Feature.OUT, Feature.STRIDED_INPUT,
    }
)  # fmt: skip
"""Every feature of contract 1.0 that one device can serve.

The set names its features and never grows: a wheel that declares it does not know features that came later.
"""

FEATURES_1_2 = FEATURES_1_0 | {
    Feature.HAS_INITIAL_STATE, Feature.NO_STATE_UPDATE, Feature.FINAL_STATE_INDICES, Feature.FP16_STATE,
    Feature.INTERMEDIATE_STATES_DTYPE, Feature.CHECKPOINTS, Feature.DRAFT_RECORDS, Feature.DRAFT_TREES,
    Feature.BATCH_INVARIANT,
}  # fmt: skip
"""The same of contract 1.2."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The calls that a backend can serve, as data.

    Attributes:
        features: the features it promises; every other one is refused.
        dtypes: dtypes of q, k and v that it takes.
        max_head_dim_k: largest K, or None for any.
        max_head_dim_v: largest V, or None for any.
        closed: for features that are left out on purpose, the reason that users are given.
        edges: with ``Feature.CONTEXT_PARALLEL``, hooks in halves take ``kda_core.request.Edges``.
    """

    features: frozenset[Feature]
    dtypes: frozenset[torch.dtype]
    max_head_dim_k: int | None = None
    max_head_dim_v: int | None = None
    closed: Mapping[Feature, str] = field(default_factory=dict)
    edges: bool = False

    def __post_init__(self) -> None:
        # Copy into a dictionary: backends may give a view of one, which can be neither pickled nor copied.
        object.__setattr__(self, "closed", dict(self.closed))

    def refusal(self, feature: Feature) -> str | None:
        """The reason why ``feature`` is refused, or None when it is declared."""
        if feature in self.features:
            return None
        reason = self.closed.get(feature)
        return f"does not serve {feature.value}" + (f": {reason}" if reason else "")


@dataclass(frozen=True, slots=True)
class Slack:
    """A declared, printed widening of the conformance budget of one output.

    Attributes:
        output: "o", "final_state", "h", "dq", ... or "*".
        dtype: input dtype that it applies to, or None for all.
        factor: the budget is multiplied by this number (> 1).
        reason: why the backend needs it.
    """

    output: str
    dtype: torch.dtype | None
    factor: float
    reason: str

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise ValueError(f"factor: expected a number above 1, got {self.factor}")
        if not self.reason.strip():
            raise ValueError("reason: expected the reason for the slack, got an empty string")


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend's identity card, the result of the hook ``kda_core_backend``.

    Attributes:
        name: what users write in ``backend=``; lower case, unique among installed wheels.
        version: version of the wheel.
        contract: versions of the plugin contract that it was written for, e.g. ``SpecifierSet("~=1.0")``.
        device_types: torch device types that it serves, e.g. ``("cpu",)``.
        priority: the highest one that accepts a call serves it; None: only when named.
        capabilities: what it can serve.
        slack: declared numerical slack; empty for most backends.
        summary: one line for ``kda_core info``.
        foreign_device: for tests, it can run on a device that it is not made for (``runs_on_foreign_device``); it then
            serves only when named.
    """

    name: str
    version: str
    contract: SpecifierSet
    device_types: tuple[str, ...]
    priority: int | None
    capabilities: Capabilities
    slack: tuple[Slack, ...] = ()
    summary: str = ""
    foreign_device: bool = False


@dataclass(frozen=True, slots=True)
class Available:
    """The backend can run on the device that it was asked about."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The backend cannot run on the device that it was asked about."""

    reason: str


FOREIGN_VARIABLE = "KDA_FOREIGN_DEVICE"
"""For tests only: names of backends, separated by commas, that are to run on a device that they are not made for."""


def runs_on_foreign_device(backend: str) -> bool:
    """Whether the environment says so; a backend that declares ``foreign_device`` asks when it is loaded."""
    return backend in os.environ.get(FOREIGN_VARIABLE, "").split(",")

"""The declarations of a backend: features, limits and numerical slack. Data only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from packaging.specifiers import SpecifierSet

from kda_core.options import Feature as Feature

FEATURES_1_0 = frozenset(
    {
        Feature.CHUNK,
        Feature.RECURRENT,
        Feature.GATE,
        Feature.BACKWARD,
        Feature.RECURRENT_BACKWARD,
        Feature.GATE_BACKWARD,
        Feature.VARLEN,
        Feature.GVA,
        Feature.UNEQUAL_HEAD_DIMS,
        Feature.ODD_HEAD_DIMS,
        Feature.INITIAL_STATE,
        Feature.FINAL_STATE,
        Feature.STATE_GRADIENT,
        Feature.STATE_V_FIRST,
        Feature.BF16_STATE,
        Feature.INTERMEDIATE_STATES,
        Feature.PAGED_STATE,
        Feature.SPEC_DECODE,
        Feature.QK_L2NORM,
        Feature.SOFTPLUS_GATE,
        Feature.LOWER_BOUND_GATE,
        Feature.BETA_SIGMOID,
        Feature.NEG_EIGVAL,
        Feature.SAFE_GATE,
        Feature.CHUNK_32,
        Feature.DISABLE_RECOMPUTE,
        Feature.OUT,
        Feature.STRIDED_INPUT,
    }
)
"""Every feature of contract 1.0 that one device can serve.

The set names its features and never grows: a wheel that declares it does not know features that came later.
"""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The calls that a backend can serve, as data.

    Attributes:
        features: the features it promises; every other one is refused.
        dtypes: dtypes of q, k and v that it takes.
        max_head_dim_k: largest K, or None for any.
        max_head_dim_v: largest V, or None for any.
        closed: for features that are left out on purpose, the reason that users are given.
    """

    features: frozenset[Feature]
    dtypes: frozenset[torch.dtype]
    max_head_dim_k: int | None = None
    max_head_dim_v: int | None = None
    closed: Mapping[Feature, str] = field(default_factory=dict)

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

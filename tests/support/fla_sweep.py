"""The shapes of the broad comparison with fla: 32 dense and 36 packed calls, each with both gates and every option.

The shapes follow those of fla 0.6's own tests of KDA: lengths below, at and past a chunk, head dimensions that are no
power of two, short sequences beside long ones. They are small: on the CPU the other side is a loop over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kda_core.testing.cases import BF16, FP16, FP32, Case
from kda_core.testing.inputs import Call


@dataclass(frozen=True)
class Swept:
    """One call of the sweep.

    Attributes:
        case: all of it but the dtype of beta, which a case has in common with g.
        beta_dtype: dtype of beta.
    """

    case: Case
    beta_dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.case.name

    def call(self) -> Call:
        """Its inputs, on the CPU."""
        call = self.case.call()
        return call.having(beta=call.tensors["beta"].to(self.beta_dtype))


@dataclass(frozen=True)
class Style:
    """How a shape is called: dtypes, gate and options."""

    name: str
    fields: dict[str, Any]
    beta_dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)


STYLES = (
    Style("softplus", {"gate": "softplus", "l2norm": True}, FP32),
    Style(
        "softplus, half",
        {"gate": "softplus", "l2norm": True, "beta": "sigmoid", "dtype": BF16, "gate_dtype": BF16},
        BF16,
        {"disable_recompute": True},
    ),
    Style(
        "bounded",
        {"gate": "lower bound", "beta": "negative eigenvalues", "l2norm": True},
        FP16,
        {"safe_gate": True, "disable_recompute": True, "scale": 0.3},
    ),
    Style(
        "bounded, half",
        {"gate": "lower bound", "A_log": False, "dtype": BF16, "l2norm": True},
        FP32,
        {"state_v_first": True, "chunk_size": 32},
    ),
)

# B, T, H, HV, K, V
DENSE_SHAPES = (
    (1, 63, 1, 1, 64, 64), (2, 64, 3, 3, 32, 32), (1, 65, 2, 4, 32, 64), (3, 33, 2, 2, 50, 50), (2, 17, 4, 4, 60, 60),
    (1, 100, 2, 6, 16, 24), (2, 31, 1, 3, 64, 16), (1, 130, 2, 2, 16, 16),
)  # fmt: skip
# Lengths, H, HV, K, V
PACKED_SHAPES = (
    ((15,), 2, 2, 60, 60), ((16, 17), 1, 2, 32, 32), ((64, 1), 2, 2, 32, 64), ((1, 63, 65), 1, 1, 16, 16),
    ((5, 34, 0, 6), 3, 3, 32, 20), ((33, 67), 2, 4, 16, 32), ((1, 1, 1, 40), 2, 2, 50, 50), ((0, 70, 0), 1, 3, 16, 16),
    ((25, 24, 20, 30), 1, 1, 64, 64),
)  # fmt: skip


def _swept(name: str, style: Style, **shape: Any) -> Swept:
    case = Case(name=f"fla sweep {name}, {style.name}", state=FP32, backward=True, **shape, **style.fields)
    return Swept(case.having(options=style.options), style.beta_dtype)


DENSE = tuple(
    _swept("x".join(map(str, shape)), style, **dict(zip(("B", "T", "H", "HV", "K", "V"), shape, strict=True)))
    for shape in DENSE_SHAPES
    for style in STYLES
)
PACKED = tuple(
    _swept(f"{lengths} {H}x{HV}x{K}x{V}", style, T=sum(lengths), lengths=lengths, H=H, HV=HV, K=K, V=V)
    for lengths, H, HV, K, V in PACKED_SHAPES
    for style in STYLES
)

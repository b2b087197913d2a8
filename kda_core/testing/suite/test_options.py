"""FAILURES 29: every option changes the result exactly as stated, or is refused; none is swallowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing import budgets, references
from kda_core.testing.cases import Case
from kda_core.testing.inputs import Call
from kda_core.testing.marks import requires

# An option's effect on its test case must be at least this many budgets, or the test could not see it.
POWER = 50.0


@dataclass(frozen=True)
class Option:
    """One option: the arguments that it adds to a prepared call, and whether these change its results."""

    changes: dict[str, Any]
    feature: Feature | None = None
    on: str = "plain"
    effect: bool = True


WITH_H = {"return_intermediate_states": True}
OPTIONS = {
    "scale": Option({"scale": -0.4}),
    # The call passes it although it is false.
    "scale of zero": Option({"scale": 0.0}),
    "initial_state": Option({"initial_state": "state"}, Feature.INITIAL_STATE),
    "use_qk_l2norm_in_kernel": Option({"use_qk_l2norm_in_kernel": True}, Feature.QK_L2NORM, "unnormalised"),
    "use_gate_in_kernel": Option({"use_gate_in_kernel": True, "A_log": "rate"}, Feature.SOFTPLUS_GATE),
    "A_log": Option({"A_log": "rate"}, Feature.LOWER_BOUND_GATE, "lower bound"),
    "dt_bias": Option({"dt_bias": "bias"}, Feature.SOFTPLUS_GATE, "softplus"),
    "lower_bound": Option({"lower_bound": -3.0}, Feature.LOWER_BOUND_GATE, "softplus"),
    "use_beta_sigmoid_in_kernel": Option({"use_beta_sigmoid_in_kernel": True}, Feature.BETA_SIGMOID),
    "allow_neg_eigval": Option({"allow_neg_eigval": True}, Feature.NEG_EIGVAL, "sigmoid"),
    "state_v_first": Option({"state_v_first": True}, Feature.STATE_V_FIRST, "state"),
    "cu_seqlens": Option({"cu_seqlens": "bounds"}, Feature.VARLEN),
    "safe_gate": Option({"safe_gate": True}, Feature.SAFE_GATE, "bounded", effect=False),
    "disable_recompute": Option({"disable_recompute": True}, Feature.DISABLE_RECOMPUTE, effect=False),
    "batch_invariant": Option({"batch_invariant": True}, Feature.BATCH_INVARIANT, effect=False),
    "chunk_size": Option({"chunk_size": 32}, Feature.CHUNK_32, effect=False),
    "return_intermediate_states": Option(WITH_H, Feature.INTERMEDIATE_STATES, effect=False),
}

_BASES = {
    "plain": Case(name="option", T=70),
    "unnormalised": Case(name="option l2norm", T=70, l2norm=True),
    "softplus": Case(name="option softplus", T=70, gate="softplus", dt_bias=False, rate=2.0),
    "lower bound": Case(name="option bound", T=70, gate="lower bound", A_log=False),
    "sigmoid": Case(name="option sigmoid", T=70, beta="sigmoid"),
    "state": Case(name="option state", T=70, state=torch.float32),
    "bounded": Case(name="option bounded", T=70, decay="bounded"),
}
_TENSORS = {
    "state": torch.linspace(-1, 1, 2 * 32 * 32).reshape(1, 2, 32, 32),
    "rate": torch.tensor([0.1, 0.9]),
    "bias": torch.linspace(-1, 1, 64),
    "bounds": torch.tensor([0, 30, 70], dtype=torch.int32),
}
_NOT_FOR_DECODING = (
    *("cu_seqlens", "safe_gate", "disable_recompute", "batch_invariant", "chunk_size", "return_intermediate_states"),
)


def _calls(option: Option) -> tuple[Call, Call]:
    """The call without and with the option."""
    base = _BASES[option.on].call().having(use_qk_l2norm_in_kernel=None)
    changes = {n: _TENSORS.get(v, v) if isinstance(v, str) else v for n, v in option.changes.items()}
    return base, base.having(**changes)


def _each() -> Iterator[Any]:
    """Every option of either function: its name, and whether the call is one of ``fused_recurrent_kda``."""
    for name, option in OPTIONS.items():
        features = (option.feature,) if option.feature else ()
        yield pytest.param(name, False, marks=requires(Feature.CHUNK, *features), id=name)
        if name not in _NOT_FOR_DECODING:
            yield pytest.param(name, True, marks=requires(Feature.RECURRENT, *features), id=f"{name}, recurrent")


@pytest.mark.parametrize(("name", "recurrent"), [*_each()])
def test_option(kda, name: str, recurrent: bool):
    """The result with the option is the oracle's, which is far from the one without it."""
    base, call = _calls(OPTIONS[name])
    if recurrent:
        base, call = (c.slice_tokens(0, 6).decoding() for c in (base, call))
    kda.check(call)
    if OPTIONS[name].effect:
        without, expected = references.results(base)["o"], references.results(call)["o"]
        error = budgets.measure("o", without, expected, torch.float32)
        assert error.share(budgets.budgets(call)["o"]) > POWER, "the case does not show whether the option is honoured"

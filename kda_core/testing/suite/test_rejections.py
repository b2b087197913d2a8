"""A backend serves the features that it declares and refuses all others with the declared reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kda_core
from kda_core.capabilities import Feature
from kda_core.testing import gate
from kda_core.testing.cases import BF16, FP16, FP32, FP64, Case
from kda_core.testing.inputs import indices
from kda_core.testing.nearby import Build
from kda_core.testing.subject import Refused, Subject, refusal_of, undeclared

CHUNK, RECURRENT, WITH_H = {"op": "chunk_kda"}, {"op": "fused_recurrent_kda"}, {"return_intermediate_states": True}


def _case(**fields) -> Case:
    return Case(name="rejection", **({"T": 5} | fields))


# The smallest call that needs a feature: fields of its case; of the other function when only that one is served.
CALLS: dict[Feature, dict[str, Any]] = {
    Feature.CHUNK: CHUNK,
    Feature.RECURRENT: RECURRENT,
    Feature.BACKWARD: CHUNK | {"backward": True},
    Feature.RECURRENT_BACKWARD: RECURRENT | {"backward": True},
    Feature.VARLEN: {"lengths": (2, 3)},
    Feature.GVA: {"HV": 6},
    Feature.UNEQUAL_HEAD_DIMS: {"V": 64},
    Feature.ODD_HEAD_DIMS: {"K": 20},
    Feature.INITIAL_STATE: {"state": FP32},
    Feature.FINAL_STATE: {},
    Feature.STATE_GRADIENT: {"backward": True},
    Feature.STATE_V_FIRST: {"options": {"state_v_first": True}},
    Feature.BF16_STATE: {"state": BF16},
    Feature.FP16_STATE: {"state": FP16},
    Feature.INTERMEDIATE_STATES: CHUNK | {"options": WITH_H},
    Feature.INTERMEDIATE_STATES_DTYPE: CHUNK | {"options": WITH_H | {"intermediate_states_dtype": FP16}},
    Feature.PAGED_STATE: {"state": FP32},
    Feature.SPEC_DECODE: RECURRENT | {"state": FP32},
    Feature.QK_L2NORM: {"l2norm": True},
    Feature.SOFTPLUS_GATE: {"gate": "softplus"},
    Feature.LOWER_BOUND_GATE: {"gate": "lower bound"},
    Feature.BETA_SIGMOID: {"beta": "sigmoid"},
    Feature.NEG_EIGVAL: {"beta": "negative eigenvalues"},
    Feature.SAFE_GATE: CHUNK | {"decay": "bounded", "options": {"safe_gate": True}},
    Feature.CHUNK_32: CHUNK | {"options": {"chunk_size": 32}},
    Feature.DISABLE_RECOMPUTE: CHUNK | {"options": {"disable_recompute": True}},
    Feature.BATCH_INVARIANT: CHUNK | {"options": {"batch_invariant": True}},
    Feature.OUT: {"given_out": True},
    Feature.STRIDED_INPUT: {"strided": frozenset({"q"})},
}
SLOTS = {Feature.PAGED_STATE: indices(3), Feature.SPEC_DECODE: indices([1, 2, 3, 4, 5])}


def _smallest(kda: Subject, feature: Feature) -> tuple[Case, Build]:
    """The case that needs a feature, and what makes its call."""
    slots = SLOTS.get(feature)
    build = Case.call if slots is None else (lambda near: near.call().in_pool(slots, 8))
    return _case(**{"op": _function(kda)} | CALLS[feature]), build


def _function(kda: Subject) -> str:
    return "chunk_kda" if kda.declares(Feature.CHUNK) or not kda.declares(Feature.RECURRENT) else "fused_recurrent_kda"


@pytest.mark.parametrize("feature", CALLS, ids=lambda f: f.name)
def test_feature_is_served_or_refused(kda, feature: Feature):
    """Every feature: right when it is declared, refused with the declared reason when it is not."""
    refusal = refusal_of(lambda: kda.check(*_smallest(kda, feature), about={feature}))
    assert refusal is None or refusal.status != "rejected", f"declares all that the call needs, and says: {refusal}"


@pytest.mark.parametrize("feature", [Feature.GATE, Feature.GATE_BACKWARD], ids=lambda f: f.name)
def test_gate_function_is_served_or_refused(kda, feature: Feature):
    """The same for kda_gate."""
    backward = feature is Feature.GATE_BACKWARD
    refusal = refusal_of(lambda: gate.check(kda, gate.arguments(), lower_bound=-5.0, backward=backward))
    assert refusal is None or refusal.status == "refused", str(refusal)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
def test_dtype_is_served_or_refused(kda, dtype: torch.dtype):
    """Every dtype of q: right when it is declared, refused when it is not."""
    refusal = refusal_of(lambda: kda.check(_case(op=_function(kda), dtype=dtype)))
    assert refusal is None or refusal.status != "rejected", str(refusal)


@pytest.mark.parametrize("symbol", ["K", "V"])
def test_head_dimension_limits(kda, symbol: str):
    """The largest head dimension that is declared is served, the next one is refused."""
    limit = getattr(kda.info.capabilities, f"max_head_dim_{symbol.lower()}")
    if limit is None:
        kda.check(_case(op=_function(kda), **{symbol: 272}))
        return
    kda.check(_case(op=_function(kda), **{symbol: limit}))
    with pytest.raises(Refused, match="up to"):
        kda.run(_case(op=_function(kda), **{symbol: limit + 16}).call())


@pytest.mark.parametrize("feature", CALLS, ids=lambda f: f.name)
def test_explanation_agrees(kda, feature: Feature):
    """explain says what the call would do, with the same reason, and runs nothing."""
    case, build = _smallest(kda, feature)
    call = build(kda.near(case, build, about={feature}))
    call = replace(call, grads={}, given_out=False, strided=frozenset())
    reasons = undeclared(kda.info, call.request())
    tensors = kda.on_device(call)
    verdicts = kda_core.explain(op=call.op, **tensors, **call.options, backend=kda.name).verdicts
    verdict = next(v for v in verdicts if v.backend == kda.name)
    if reasons:
        assert verdict.status == "refused"
        assert all(reason in verdict.reason for reason in reasons)
    elif verdict.status == "refused" and not kda.is_complete:
        # The backend rejects a declared call: the call must raise the same reason.
        refusal = refusal_of(lambda: kda.run(call))
        assert refusal is not None
        assert verdict.reason in str(refusal)
    else:
        assert verdict.status == "chosen"

"""Beta: as given, as logits, with negative eigenvalues."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kda_core.capabilities import Feature
from kda_core.testing.budgets import slack_of
from kda_core.testing.cases import BF16, FP32, FP64, Beta, Case
from kda_core.testing.marks import requires

LOGITS = pytest.mark.parametrize(
    "beta",
    [
        pytest.param("sigmoid", marks=requires(Feature.BETA_SIGMOID)),
        pytest.param("negative eigenvalues", marks=requires(Feature.BETA_SIGMOID, Feature.NEG_EIGVAL)),
    ],
)


@requires(Feature.CHUNK)
@LOGITS
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_beta(kda, beta: Beta, dtype: torch.dtype):
    """sigmoid(beta), or twice that, in the operator."""
    kda.check(Case(name=f"beta {beta} {dtype}", T=70, HV=6, beta=beta, gate_dtype=dtype, state=None))


@requires(Feature.CHUNK, Feature.BACKWARD)
@LOGITS
@pytest.mark.parametrize("shift", [-40.0, -8.0, 4.0, 8.0, 12.0])
def test_beta_backward_of_large_logits(kda, beta: Beta, shift: float):
    """s(x) and the slope s(x) s(-x) keep their digits, also where 1 - s(x) has none; at +-inf the slope is 0."""
    case = Case(name=f"beta gradient {beta} at {shift}", T=20, HV=6, beta=beta, final_state=False, backward=True)
    call = case.call()
    beta = call.tensors["beta"] + shift
    beta[:, 3], beta[:, 11] = torch.inf, -torch.inf
    kda.check(call.having(beta=beta))


@requires(Feature.CHUNK, Feature.BACKWARD, Feature.BETA_SIGMOID, Feature.NEG_EIGVAL)
@pytest.mark.parametrize("K", [1, 32])
@pytest.mark.parametrize("shift", [5.0, 8.0])
def test_beta_backward_of_reflections(kda, K: int, shift: float):
    """beta = 2 and equal keys: every token reflects the key's value, so sums over tokens have terms of both signs."""
    fields = {"T": 50, "K": K, "keys": "equal", "decay": "slow", "beta": "negative eigenvalues"}
    call = Case(name=f"reflections {K} {shift}", state=FP32, backward=True, **fields).call()
    kda.check(call.having(q=call.tensors["k"].clone(), beta=call.tensors["beta"] + shift))


@requires(Feature.CHUNK)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_beta_at_its_ends(kda, value: float):
    """beta = 0 writes nothing to the state; beta = 1 replaces the value of a key."""
    results = kda.check(Case(name=f"beta {value}", T=70, beta=value).call())
    if value == 0:
        assert not results["final_state"].any()


@requires(Feature.CHUNK, Feature.BETA_SIGMOID)
def test_beta_large_logits(kda):
    """Logits of +-100 and +-inf: the sigmoid is 0 or 1, not NaN."""
    call = Case(name="large logits", T=70, beta="sigmoid").call()
    beta = 100 * call.tensors["beta"]
    beta[:, ::5] *= torch.inf
    kda.check(call.having(beta=beta))


def solved(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The output of sequences [N, H, T, ..] without decays, by a triangular solve in the tensors' dtype."""
    writes = (beta.unsqueeze(-1) * k @ k.mT).tril(-1) + torch.eye(k.shape[-2], dtype=k.dtype)
    values = torch.linalg.solve_triangular(writes, beta.unsqueeze(-1) * (v - k @ state), upper=False)
    return k.shape[-1] ** -0.5 * (q @ state + (q @ k.mT).tril() @ values)


@requires(Feature.CHUNK)
@pytest.mark.parametrize("T", [32, 64])
def test_equal_keys_are_forgotten_as_by_a_triangular_solve(kda, T: int):
    """A chunk's inverse has large terms of both signs: in float32 errors stay within twice those of torch's solve."""
    call = Case(name=f"forgotten {T}", B=4, T=T, K=64, decay="none", keys="equal", beta=0.9, state=FP32).call()
    call = call.having(v=torch.zeros_like(call.tensors["v"]))
    rows = [call.tensors[n].transpose(1, 2) for n in ("q", "k", "v", "beta")]
    exact = solved(*(t.to(FP64) for t in (*rows, call.tensors["initial_state"])))
    plain = (solved(*rows, call.tensors["initial_state"]) - exact).norm()
    got = kda.run(call)["o"].cpu().transpose(1, 2)
    slack = slack_of(kda.info.slack, "o", FP32)
    assert (got - exact).norm() <= 2 * plain * (slack.factor if slack else 1)

"""The gate: in the operator, and as a function of its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kda_core
from kda_core.capabilities import Feature
from kda_core.testing import gate
from kda_core.testing.budgets import slack_of
from kda_core.testing.cases import BF16, FP16, FP32, FP64, PLAIN, SOFTPLUS, Beta, Case
from kda_core.testing.marks import each, either_function, either_way, requires

OPTIONAL = [(True, True), (True, False), (False, True), (False, False)]
"""Whether a gate with a lower bound has A_log, and dt_bias."""

GATES = [
    *(
        Case(name=f"softplus {dt_bias} {dtype}", T=70, HV=6, gate="softplus", dt_bias=dt_bias, gate_dtype=dtype)
        for dtype in (FP32, BF16)
        for dt_bias in (True, False)
    ),
    # Far out on both sides neither exp overflows nor is the tail lost.
    Case(name="large gate inputs", T=70, gate="softplus", rate=1.0, raw_scale=60.0),
    *(Case(name=f"lower bound {a} {b}", T=70, HV=6, gate="lower bound", A_log=a, dt_bias=b) for a, b in OPTIONAL),
    *(
        Case(name=f"bound {b}", T=70, gate="lower bound", rate=2.0, options={"lower_bound": b, "safe_gate": True})
        for b in (-5.0, -1.0, -0.1, -40.0)
    ),
]


@each(GATES)
def test_gate(kda, case: Case):
    """-exp(A_log) softplus(g + dt_bias), and b sigmoid(exp(A_log) (g + dt_bias)), in the operator."""
    kda.check(case)


REAL = Case(name="real gate", T=70, HV=6, rate=201.0, final_state=False, **SOFTPLUS)
STEPS = REAL.having(name="real gate of steps", op="fused_recurrent_kda", raw_scale=5.0)


@requires(Feature.SOFTPLUS_GATE)
@each([REAL.having(H=1, raw_scale=4.0), STEPS])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_gate_of_real_models(kda, case: Case, backward: bool):
    """FAILURES 4, 34: exp(A_log) up to 201 and decays to -2661 a token, as trained models have; to -4175 in steps."""
    kda.check(case.having(backward=backward))


@requires(Feature.CHUNK, Feature.LOWER_BOUND_GATE)
@pytest.mark.parametrize(("bound", "shift"), [(-1000.0, 8.0), (-1e30, 69.0), (-1e38, 0.0)])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["float32", "float16", "bfloat16"])
def test_lower_bound_gate_of_a_bound_far_away(kda, bound: float, shift: float, dtype: torch.dtype):
    """A bound far below every decay changes none; a bound that many decays reach makes no NaN."""
    call = Case(name=f"far bound {bound} {dtype}", T=40, gate="lower bound", rate=1.0, **PLAIN[dtype]).call()
    kda.check(call.having(lower_bound=bound, g=call.tensors["g"] - shift))


@either_function
def test_bound_without_a_promise(kda, op: str):
    """Beside given decays and without safe_gate, lower_bound changes nothing: many lie below it."""
    kda.check(Case(name=f"no promise {op}", op=op, T=40).call().having(lower_bound=-0.25))


STATES = requires(Feature.INITIAL_STATE, Feature.FINAL_STATE)


@requires(Feature.LOWER_BOUND_GATE)
@pytest.mark.parametrize("T", [1, 12, 40])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=[STATES, requires(Feature.CHUNK)], id="forward"),
        pytest.param({"backward": True}, marks=requires(Feature.BACKWARD, Feature.STATE_GRADIENT), id="backward"),
        pytest.param({"op": "fused_recurrent_kda"}, marks=[STATES, requires(Feature.RECURRENT)], id="recurrent"),
    ],
)
def test_lower_bound_gate_where_the_bias_cancels(kda, T: int, fields: dict):
    """g and dt_bias are large and their sum is small: multiplying each by the rate would leave rounding errors."""
    case = Case(name=f"bias cancels {T}", T=T, HV=6, state=FP32, **SOFTPLUS | {"gate": "lower bound"} | fields)
    call = case.call()
    g, bias = call.tensors["g"], 4 * call.tensors["dt_bias"]
    kda.check(call.having(dt_bias=bias, g=0.05 * g - bias.view(1, 1, *g.shape[2:])))


GATE_CALLS = [
    *({"dt_bias": dt_bias, "dtype": dtype} for dtype in (FP32, BF16) for dt_bias in (True, False)),
    *({"A_log": A_log, "dt_bias": dt_bias, "lower_bound": -3.0} for A_log, dt_bias in OPTIONAL),
    # Any leading axes.
    *({"shape": shape} for shape in ((4, 16), (3, 4, 16), (2, 3, 5, 4, 16), (0, 4, 16))),
]


@requires(Feature.GATE)
@either_way(Feature.GATE_BACKWARD)
@pytest.mark.parametrize("call", GATE_CALLS, ids=str)
def test_gate_function(kda, call: dict, backward: bool):
    """kda_gate with and without a bound, and its gradients."""
    bound = call.get("lower_bound")
    tensors = gate.arguments(**{n: x for n, x in call.items() if n != "lower_bound"})
    gate.check(kda, tensors, bound, backward)


@requires(Feature.GATE, Feature.GATE_BACKWARD, Feature.SOFTPLUS_GATE)
def test_gate_function_without_a_gradient_of_its_rate(kda):
    """The gradients of some inputs."""
    gate.check(kda, gate.arguments(), backward=True, wrt=("g", "dt_bias"))


@requires(Feature.GATE, Feature.GATE_BACKWARD, Feature.SOFTPLUS_GATE)
@pytest.mark.parametrize("shape", [(0, 2, 8), (4, 0, 8), (4, 2, 0), (0, 3, 2, 8)], ids=str)
def test_gate_function_without_elements(kda, shape: tuple[int, ...]):
    """No rows, no heads, no channels: empty results, and gradients of zero."""
    gate.check(kda, gate.arguments(), backward=True)  # a refusal ends the test here
    sizes = (shape, shape[-2:-1], shape[-2:])
    g, A_log, dt_bias = (torch.zeros(size, device=kda.device, requires_grad=True) for size in sizes)
    decay = kda_core.kda_gate(g, A_log, dt_bias, backend=kda.name)
    assert decay.shape == shape
    for t, grad in zip((g, A_log, dt_bias), torch.autograd.grad(decay.sum(), (g, A_log, dt_bias)), strict=True):
        assert torch.equal(grad, torch.zeros_like(t))


@requires(Feature.GATE, Feature.GATE_BACKWARD, Feature.SOFTPLUS_GATE, Feature.LOWER_BOUND_GATE)
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("shift", [-40.0, -15.0, 15.0])
def test_gate_function_far_out(kda, shift: float, bound: float | None):
    """Results and gradients that are a tiny exp(x) keep their digits."""
    tensors = gate.arguments(A_log=bound is None)
    tensors["g"] += shift
    gate.check(kda, tensors, lower_bound=bound, backward=True)


@requires(Feature.GATE, Feature.GATE_BACKWARD, Feature.SOFTPLUS_GATE, Feature.LOWER_BOUND_GATE)
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("value", [-math.inf, math.inf], ids=str)
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["float32", "float16"])
def test_gate_function_infinite(kda, dtype: torch.dtype, value: float, bound: float | None):
    """An input of +-inf gives the gate's limit, and other gradients stay right."""
    tensors = gate.arguments(dtype=dtype)
    # A backend without the function refuses here, with its reason.
    gate.check(kda, tensors, lower_bound=bound, backward=True)
    infinite = torch.zeros(tensors["g"].shape, dtype=torch.bool)
    infinite[:, ::7, :, 3] = True
    found = []
    for stand_in in (value, math.copysign(1e4, value)):
        there = {n: t.clone().to(kda.device).requires_grad_() for n, t in tensors.items()}
        g = torch.where(infinite.to(kda.device), stand_in, there["g"])
        y = kda_core.kda_gate(**there | {"g": g}, lower_bound=bound, backend=kda.name)
        cotangent = torch.where(infinite, 0.0, 1.0).to(kda.device)
        found.append([y.detach().cpu(), *(t.cpu() for t in torch.autograd.grad(y, list(there.values()), cotangent))])
    limit = -math.inf if bound is None else bound
    assert (found[0][0][infinite] == (limit if value > 0 else 0.0)).all()
    assert torch.equal(found[0][0][~infinite], found[1][0][~infinite])
    for at_infinity, far_out in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.equal(at_infinity, far_out)


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
    name = f"beta gradient {beta} at {shift}"
    call = Case(name=name, T=20, HV=6, beta=beta, final_state=False, backward=True).call()
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

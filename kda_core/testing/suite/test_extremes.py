"""Numerical extremes: strong and isolated decays, repeating keys, very long sequences."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing import references
from kda_core.testing.cases import BF16, BOUNDED, DECAYS, FP16, FP32, PLAIN, SOFTPLUS, Beta, Case, Gate, Keys
from kda_core.testing.inputs import Call, same_bits
from kda_core.testing.marks import each, either_way, requires, slow

R = "fused_recurrent_kda"


FORWARD = [Case(name=f"decay {d} {t}", T=130, decay=d, **PLAIN[t]) for t in (FP32, BF16) for d in DECAYS]
DECAY_GRADIENTS = [
    *(Case(name=f"decay gradients {d}", T=70, decay=d, final_state=False) for d in (-5.0, -1000.0, "isolated")),
    # float16 has few digits below 6e-5: operands that decay to there lose no more than they must.
    *(Case(name=f"float16, decay {d}", T=70, decay=d, l2norm=True, **PLAIN[FP16]) for d in (-6.0, -8.0, -10.0)),
    # Strong decays in the few rows after the last whole chunk: results are small beside cancelling terms.
    *(
        Case(name=f"{T} rows, decay {d}", T=T, K=128, dtype=BF16, decay=d, state=FP32)
        for T in (37, 70)
        for d in (-3.0, -8.0, -14.0)
    ),
]


@requires(Feature.CHUNK)
@each([*FORWARD, *(case.having(backward=True) for case in DECAY_GRADIENTS)])
def test_decay(kda, case: Case):
    """FAILURES 4, 6: no decay overflows, results after an isolated one are exact, gradients stay finite and right."""
    kda.check(case)


@requires(Feature.CHUNK)
@pytest.mark.parametrize("T", [37, 100])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_later_decays_change_no_earlier_output(kda, dtype: torch.dtype, T: int):
    """FAILURES 32: outputs of the first T tokens are as exact as alone, however the tokens behind them decay."""
    call = kda.near(Case(name=f"later decays {dtype} {T}", T=130, final_state=False, **PLAIN[dtype])).call()
    first = call.slice_tokens(0, T)
    expected = references.results(first)["o"]
    for later in (0.0, -5.0, -2661.0):
        g = call.tensors["g"].clone()
        g[:, T:] = later
        found = kda.run(call.having(g=g))["o"][:, :T]
        kda.expect(first, "o", found, expected, f"decays of {later} behind token {T}")


@requires(Feature.CHUNK, Feature.BACKWARD, Feature.LOWER_BOUND_GATE, Feature.SAFE_GATE)
@pytest.mark.parametrize(("T", "first"), [(22, 21), (130, 37), (130, 100)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_later_tokens_change_no_earlier_gradient(kda, dtype: torch.dtype, T: int, first: int):
    """FAILURES 32: a safe gate: outputs and gradients of the first tokens are as exact as alone."""
    raw = BOUNDED | PLAIN[dtype] | {"state": None, "final_state": False, "options": {"safe_gate": True}}
    call = kda.near(Case(name=f"later tokens {dtype} {T} {first}", T=T, backward=True, **raw)).call()
    alone = replace(call.slice_tokens(0, first), grads={"o": call.grads["o"][:, :first].contiguous()})
    expected = references.results(alone)
    call.grads["o"][:, first:] = 0
    for later in (-30.0, 30.0):  # decays of 1, and of the bound
        changed = {n: call.tensors[n].clone() for n in ("k", "v", "g", "beta")}
        for n in ("k", "v", "beta"):
            changed[n][:, first:] *= -3
        changed["g"][:, first:] = later
        found = kda.run(call.having(**changed))
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            what = f"{name} before token {first}, gates of {later} behind it"
            kda.expect(alone, name, found[name][:, :first], expected[name], what)


@requires(Feature.CHUNK, Feature.INITIAL_STATE, Feature.FINAL_STATE)
@pytest.mark.parametrize(("T", "decay"), [(16, -2.0), (64, "mild"), (150, -0.05), (300, -0.003)])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["float32", "float16", "bfloat16"])
def test_state_that_only_decays(kda, T: int, decay: str | float, dtype: torch.dtype):
    """Nothing is written: the final state shows every error of a sum of decays, all of the same sign.

    No operand is rounded then, so that 16-bit inputs have no more to lose.
    """
    kda.check(Case(name=f"only decays {T} {decay}", T=T, decay=decay, beta=0.0, **PLAIN[dtype]))


INFINITE_GATES = [("softplus", FP32), ("lower bound", FP32), ("softplus", BF16), ("lower bound", FP16)]
INFINITE_DECAYS = [
    *(
        Case(name=f"-inf {dtype} {gate_dtype}", T=40, gate_dtype=gate_dtype, backward=True, **PLAIN[dtype])
        for dtype, gate_dtype in ((FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, FP16))
    ),
    # One channel, where no other keeps anything, and dimensions that are no power of two.
    *(Case(name=f"-inf {K}", T=40, K=K, state=FP32, backward=True) for K in (1, 20)),
    *(Case(name=f"-inf steps {dtype}", op=R, T=24, gate_dtype=dtype, **PLAIN[dtype]) for dtype in PLAIN),
    *(Case(name=f"-inf steps {dtype}, gradients", op=R, T=24, backward=True, **PLAIN[dtype]) for dtype in PLAIN),
]


def _with_infinite(call: Call, value: float = -math.inf) -> Call:
    """The call with g infinite in whole tokens (the first, the last, two in a row) and in single channels."""
    g = call.tensors["g"].clone()
    g[:, [0, 5, 6, 21, -1]] = value
    g[:, 3::9, :, 0] = value
    g[:, 8::13, :, -1] = value
    return call.having(g=g)


@each(INFINITE_DECAYS)
def test_infinite_decay(kda, case: Case):
    """A log decay of -inf (-1e30 in float16) forgets everything and has no gradient; its neighbours are exact."""
    kda.check(_with_infinite(case.call()))


@requires(Feature.CHUNK, Feature.BACKWARD, Feature.SOFTPLUS_GATE, Feature.LOWER_BOUND_GATE)
@pytest.mark.parametrize(("gate", "dtype"), INFINITE_GATES)
@pytest.mark.parametrize("value", [-math.inf, math.inf], ids=str)
def test_infinite_gate_input(kda, gate: Gate, dtype: torch.dtype, value: float):
    """A raw gate input of +-inf is the gate's limit, as +-1e4 already is, in results and gradients."""
    raw = SOFTPLUS | {"gate": gate, "HV": 6} | PLAIN[dtype]
    call = Case(name=f"{value} {gate} {dtype}", T=40, gate_dtype=dtype, backward=True, **raw).call()
    # The oracle's autograd has 0 * inf at the limit itself.
    kda.compare(_with_infinite(call, math.copysign(1e4, value)), kda.run(_with_infinite(call, value)))


PARALLEL: tuple[Keys, ...] = ("equal", "nearly parallel")
KINDS = [(keys, decay, dtype) for dtype in (FP32, BF16) for keys in PARALLEL for decay in ("none", "mild")]
REPEATING = [
    *(Case(name=f"keys {k} {d} {t}", T=130, keys=k, decay=d, beta=1.0, **PLAIN[t]) for k, d, t in KINDS),
    *(Case(name=f"keys {k} 2 sigmoid", T=130, keys=k, decay="none", beta="negative eigenvalues") for k in PARALLEL),
]
KEY_GRADIENTS = [
    Case(name="key gradients", T=70, keys="equal", decay="none", beta=1.0, final_state=False),
    # An inverse that is rounded to 16 bits shows in dv and dbeta.
    *(
        Case(name=f"key gradients {dtype} {decay}", T=64, keys="equal", beta=1.0, decay=decay, **PLAIN[dtype])
        for dtype in (BF16, FP16)
        for decay in (0.0, -0.003, -0.01)
    ),
]


@requires(Feature.CHUNK)
@each([*REPEATING, *(case.having(backward=True) for case in KEY_GRADIENTS)])
def test_repeating_keys(kda, case: Case):
    """FAILURES 5: beta = 1 and keys that repeat, where a series for the triangular inverse cancels; beta up to 2."""
    kda.check(case)


@requires(Feature.CHUNK)
@pytest.mark.parametrize("T", [512, pytest.param(4096, marks=slow)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("beta", [1.0, "negative eigenvalues"], ids=str)
def test_collinear_keys(kda, beta: Beta | float, dtype: torch.dtype, T: int):
    """FAILURES 33: keys that differ by their sign and by up to a thousandth."""
    name = f"collinear keys {beta} {dtype}"
    kda.check(Case(name=name, T=T, keys="collinear", beta=beta, decay="slow", **PLAIN[dtype]))


@requires(Feature.CHUNK, Feature.QK_L2NORM)
@pytest.mark.parametrize("scale", [300.0, 1000.0, 10000.0])
@either_way(Feature.BACKWARD)
def test_large_scale(kda, scale: float, backward: bool):
    """Rows of norm 1 times a large scale: results that float16 holds come from operands that it holds, too."""
    dtype = FP16 if kda.takes(FP16) else BF16
    case = Case(name=f"scale {scale}", T=40, l2norm=True, options={"scale": scale}, **PLAIN[dtype])
    call = case.having(backward=backward).call()
    if backward:  # gradients of q are as large as the scale, too
        call.grads["o"].mul_(1 / scale)
    kda.check(call)


@requires(Feature.CHUNK)
def test_zero_inputs(kda):
    """All-zero q, k and v: zero output, not NaN."""
    call = Case(name="zeros", T=70, l2norm=True, final_state=False).call()
    zeros = {n: torch.zeros_like(call.tensors[n]) for n in ("q", "k", "v")}
    assert not kda.run(call.having(**zeros))["o"].any()


@requires(Feature.CHUNK, Feature.BACKWARD, Feature.QK_L2NORM)
def test_zero_inputs_backward(kda):
    """The gradient of the normalisation of a zero vector is finite."""

    def build(case: Case) -> Call:
        call = case.call()
        keep = (torch.arange(case.T) != 5).view(1, -1, 1, 1)
        return call.having(q=call.tensors["q"] * keep, k=call.tensors["k"] * keep)

    kda.check(Case(name="zero gradients", T=20, l2norm=True, state=FP32, backward=True), build)


@slow
@requires(Feature.CHUNK, Feature.INITIAL_STATE, Feature.FINAL_STATE)
@pytest.mark.parametrize("decay", ["slow", -1e-9, -100.0], ids=str)
def test_very_long_sequence(kda, decay):
    """FAILURES 31: T = 300,000: finite, and the state is that of a prefill in pieces."""
    call = Case(name=f"very long {decay}", T=300_000, H=1, K=16, decay=decay, final_state=True).call()
    whole = kda.run(call)
    assert all(t.isfinite().all() for t in whole.values())
    state = None
    for start in range(0, 300_000, 30_000):
        piece = call.slice_tokens(start, start + 30_000).having(initial_state=state)
        state = kda.run(piece)["final_state"]
    last = call.slice_tokens(300_000 - 64, 300_000) if decay == -100.0 else piece
    kda.expect(last, "final_state", state, whole["final_state"].double(), "in pieces")
    if decay == -100.0:
        kda.compare(last, kda.run(last.having(initial_state=state.new_zeros(state.shape))))


@slow
@requires(Feature.CHUNK)
def test_memory_is_linear(kda, tmp_path):
    """FAILURES 6: a forward's peak memory is below half of a tensor of pairwise decays."""
    T, H, K, C = 4096, 4, 64, 64
    call = Case(name="memory", T=T, H=H, K=K, final_state=False).call()
    kda.run(call)
    tensors = kda.on_device(call)
    pairwise = T * H * K * C * 4
    results = 4 * tensors["v"].numel()
    assert results <= _peak(kda, partial(call, tensors, kda.name), tmp_path / "trace.json") < pairwise / 2


@torch.no_grad()
def _peak(kda, forward: Callable[[], object], trace: Path) -> int:
    """Bytes that a forward allocates at its peak. ``trace``: a file for torch's profiler."""
    if kda.device.type != "cpu":
        module = getattr(torch, kda.device.type)
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        forward()
        return module.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        forward()
    # The trace has every allocation; the profiler's events have most of them summed up in operators.
    profile.export_chrome_trace(str(trace))
    now = peak = 0
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["name"] == "[memory]":
            now += event["args"]["Bytes"]
            peak = max(peak, now)
    return peak


@requires(Feature.CHUNK)
def test_extreme_magnitudes(kda):
    """v of 1e4 and of 1e-6, q of 1e3: results scale with them."""
    call = Case(name="magnitudes", T=70).call()
    kda.check(call.having(v=1e4 * call.tensors["v"], q=1e3 * call.tensors["q"]))
    kda.check(call.having(v=1e-6 * call.tensors["v"]))


@requires(Feature.CHUNK, Feature.INITIAL_STATE)
def test_state_that_is_forgotten(kda):
    """A token that forgets everything: a state of 1e30 before it leaves no trace."""
    call = Case(name="forgotten", T=70, state=FP32).call()
    g = call.tensors["g"].clone()
    g[:, 0] = -1e30
    call = call.having(g=g)
    first = kda.run(call)
    second = kda.run(call.having(initial_state=1e30 * call.tensors["initial_state"]))
    assert all(same_bits(first[n], second[n]) for n in ("o", "final_state"))

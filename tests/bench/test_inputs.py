"""Inputs of the benchmarks: spellings of shapes, decays as documented, and errors that show what is wrong."""

from __future__ import annotations

import argparse

import pytest
import torch

pytest.importorskip("kda_core_cpu")

import inputs

import kda_core
from kda_core._bench import runner

CPU, FP32 = torch.device("cpu"), torch.float32
SIZE = (1, 512, 4, 64)
GATES = ("given", "bounded", "softplus")


def test_shapes():
    case = inputs.parse_shape("1,8192,32,128:packed=16x512")
    assert (case.B, case.T, case.H, case.K, case.lengths) == (1, 8192, 32, 128, (512,) * 16)
    case = inputs.parse_shape("1,9,2,8,4:hv=4:packed=3+5+1")
    assert (case.HV, case.V, case.lengths, case.N, case.name) == (4, 4, (3, 5, 1), 3, "1,9,2,8,4:hv=4:packed=3+5+1")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1,2,3", "four or five sizes"), ("1,2,3,x", "invalid literal"),
        ("1,-2,3,4", "four or five sizes of 1 and more"), ("1,64,2,32:hv=3", "multiple of H = 2"),
        ("1,64,2,32:packed=3+5", "add up to T = 64"), ("2,8,2,32:packed=3+5", "with B = 1"),
        ("1,64,2,32:pools", "'pools' is no word"), ("1,64,2,32:packed=2xx", "invalid literal"),
    ],
)  # fmt: skip
def test_shapes_that_are_none(text, why):
    with pytest.raises(argparse.ArgumentTypeError, match=why) as found:
        inputs.parse_shape(text)
    assert text in str(found.value)


def channel_means(gate, decay):
    torch.manual_seed(1)
    drawn = inputs.draw_gate(gate, decay, SIZE, FP32, CPU)
    found = inputs.log_decay(**drawn)
    assert found.shape == SIZE
    assert found.max() <= 0
    if drawn["lower_bound"] is not None:
        assert found.min() >= drawn["lower_bound"]
    return found.mean((0, 1))


@pytest.mark.parametrize(
    ("gate", "low", "high"), [("bounded", -3.6, -2.6), ("given", -3.6, -2.6), ("softplus", -2.4, -1.2)]
)
def test_random(gate, low, high):
    assert low < channel_means(gate, "random").mean() < high


@pytest.mark.parametrize("gate", GATES)
def test_slow(gate):
    channels = -channel_means(gate, "slow").flatten()
    low, high = inputs.SLOW_DECAY
    assert low * 0.85 < channels.min() < 3 * low
    assert high / 3 < channels.max() < high * 1.15
    # Log-uniform: the logarithms are spread evenly, so the mean is the middle, the deviation range / sqrt(12).
    logs, width = channels.log(), torch.tensor(high / low).log()
    assert abs(logs.mean() - torch.tensor(low * high).sqrt().log()) < 0.08 * width
    assert abs(logs.std() - width / 12**0.5) < 0.05 * width


def test_a_channel_has_the_mean_that_was_drawn():
    """Both gates' biases undo the curvature of the gate: without that means would be off by an eighth."""
    mean, rate = torch.full((1, 3), 0.02), torch.tensor([[1.0, 1.5, 2.5]])
    spread = inputs.SLOW_SPREAD * torch.randn(200_000, 1, generator=torch.Generator().manual_seed(0))
    bounded = 5 * torch.sigmoid(rate * inputs.bounded_bias(mean, rate) + spread)
    softplus = rate * torch.nn.functional.softplus(inputs.softplus_bias(mean, rate) + spread)
    for found in (bounded, softplus):
        assert torch.allclose(found.mean(0), mean[0], rtol=0.02)


@pytest.mark.parametrize(
    ("gate", "low", "high"), [("bounded", -0.5, -0.004), ("softplus", -1.7, -9e-4), ("given", -1.7, -9e-4)]
)
def test_initialised(gate, low, high):
    channels = channel_means(gate, "initialised")
    assert low < channels.min() < channels.max() < high


SHAPES = ("1,12,2,8", "1,12,2,8:hv=4:packed=3+9", "3,12,4,8")


@pytest.mark.parametrize("tokens", [5, 100])
@pytest.mark.parametrize(
    ("mode", "gate", "shape"),
    [(mode, gate, shape) for mode in ("inference", "training") for gate in GATES for shape in SHAPES],
)
def test_right_results_have_small_errors_whatever_is_cut(mode, gate, shape, tokens):
    call, mean = inputs.draw(inputs.parse_shape(shape), mode, gate, "slow", FP32, CPU)
    assert -0.5 < mean < 0
    kept = {n: t.clone() for n, t in (call.tensors | call.grads).items()}
    found = inputs.Part(call, tokens).errors(runner(kda_core.chunk_kda, call))
    names = {"o"} | ({f"d{n}" for n in call.tensors if n != "cu_seqlens"} if mode == "training" else set())
    assert set(found) == names | ({"final_state"} if mode == "inference" and tokens == 100 else set())
    assert all(error < 2e-5 for error in found.values()), found
    # The inputs are as they were.
    assert all(torch.equal(t, kept[n]) for n, t in (call.tensors | call.grads).items())


def test_a_wrong_result_has_a_large_error():
    call, _ = inputs.draw(inputs.parse_shape("1,12,2,8"), "training", "bounded", "random", FP32, CPU)
    run = runner(kda_core.chunk_kda, call)
    found = inputs.Part(call).errors(lambda: {n: x * 1.01 if n == "dA_log" else x for n, x in run().items()})
    assert found["dA_log"] == pytest.approx(0.01, rel=0.01)
    assert found["dg"] < 2e-5


def test_bytes():
    call, _ = inputs.draw(inputs.parse_shape("1,8,2,4"), "training", "given", "random", FP32, CPU)
    rows, beta, o = 4 * 8 * 2 * 4, 4 * 8 * 2, 4 * 8 * 2 * 4
    data = 4 * rows + beta
    assert inputs.bytes_held(call) == data + o
    assert inputs.bytes_moved(call) == 3 * data + 2 * o
    call, _ = inputs.draw(inputs.parse_shape("1,8,2,4"), "inference", "given", "random", FP32, CPU)
    assert inputs.bytes_moved(call) == data + o + 2 * 4 * 2 * 4 * 4

"""Realised decays are those that the regimes promise, for every gate."""

from __future__ import annotations

import pytest
import torch
from bench_rows import CPU, FP32

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("kda_core_cpu")

from kda_core.bench import regimes

SIZE = (1, 512, 4, 64)


def channel_means(gate, decay):
    torch.manual_seed(1)
    raw = regimes.draw(gate, decay, SIZE, FP32, CPU)
    found = raw.log_decay()
    assert found.shape == SIZE
    assert found.max() <= 0
    if raw.lower_bound is not None:
        assert found.min() >= raw.lower_bound
    return found.mean((0, 1))


@pytest.mark.parametrize(
    ("gate", "low", "high"), [("bounded", -3.6, -2.6), ("given", -3.6, -2.6), ("softplus", -2.4, -1.2)]
)
def test_random(gate, low, high):
    assert low < channel_means(gate, "random").mean() < high


@pytest.mark.parametrize("gate", regimes.GATES)
def test_slow(gate):
    channels = -channel_means(gate, "slow").flatten()
    low, high = regimes.SLOW_DECAY
    assert low * 0.85 < channels.min() < 3 * low
    assert high / 3 < channels.max() < high * 1.15
    # Log-uniform: the logarithms are spread evenly, so the mean is the middle, the deviation range / sqrt(12).
    logs, width = channels.log(), torch.tensor(high / low).log()
    assert abs(logs.mean() - torch.tensor(low * high).sqrt().log()) < 0.08 * width
    assert abs(logs.std() - width / 12**0.5) < 0.05 * width


def test_a_channel_has_the_mean_that_was_drawn():
    """Both gates' biases undo the curvature of the gate: without that means would be off by an eighth."""
    mean, rate = torch.full((1, 3), 0.02), torch.tensor([[1.0, 1.5, 2.5]])
    spread = regimes.SLOW_SPREAD * torch.randn(200_000, 1, generator=torch.Generator().manual_seed(0))
    bounded = 5 * torch.sigmoid(rate * regimes._bounded_bias(mean, rate) + spread)
    softplus = rate * torch.nn.functional.softplus(regimes._softplus_bias(mean, rate) + spread)
    for found in (bounded, softplus):
        assert torch.allclose(found.mean(0), mean[0], rtol=0.02)


@pytest.mark.parametrize(
    ("gate", "low", "high"), [("bounded", -0.5, -0.004), ("softplus", -1.7, -9e-4), ("given", -1.7, -9e-4)]
)
def test_initialised(gate, low, high):
    channels = channel_means(gate, "initialised")
    assert low < channels.min() < channels.max() < high


@pytest.mark.parametrize(("gate", "decay"), [("sigmoid", "slow"), ("bounded", "fast")])
def test_refused(gate, decay):
    with pytest.raises(ValueError, match="expected one of"):
        regimes.draw(gate, decay, SIZE, FP32, CPU)

"""Gates and the distributions of their decays.

A gate maps a raw input g to a log decay per token and channel, with parameters A_log [HV] and dt_bias [HV, K]:

    softplus   -exp(A_log) * softplus(g + dt_bias)
    bounded    b * sigmoid(exp(A_log) * (g + dt_bias)), b = -5
    given      no gate: the operator gets log decays. "random" and "slow" ones are the bounded gate's, "initialised"
               ones those of the softplus gate

Distributions of the decays:
    random       g ~ N(0, 1), A_log and dt_bias ~ U[0, 1): about -3 a token where the gate is bounded, -2 where it is
                 softplus. A channel forgets within a token.
    slow         each channel's mean log decay is log-uniform in -[0.001, 0.5]: long memories. A_log ~ U[0, 1),
                 g ~ N(0, 0.5 / exp(A_log)), dt_bias solved for the mean.
    initialised  as layers are initialised (fla 0.6): dt_bias the inverse softplus of a log-uniform step in
                 [0.001, 0.1], A_log = log U[1, 16] (0 where the gate is bounded), g ~ N(0, 0.1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GATES = ("given", "bounded", "softplus")
DECAYS = ("random", "slow", "initialised")
LOWER_BOUND = -5.0

SLOW_DECAY = (1e-3, 0.5)
SLOW_SPREAD = 0.5
INITIAL_STEP = (1e-3, 0.1)
INITIAL_RATE = (1.0, 16.0)
INITIAL_SPREAD = 0.1


@dataclass(frozen=True)
class RawGate:
    """A gate's input and parameters.

    Attributes:
        g: [B, T, HV, K], raw. A_log: [HV], float32. dt_bias: [HV, K], float32.
        lower_bound: of the bounded gate; None: softplus.
    """

    g: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None

    def log_decay(self, tokens: int | None = None) -> Tensor:
        """[B, T, HV, K] float32 natural-log decays of the first ``tokens``."""
        x = self.g[:, :tokens].float() + self.dt_bias
        rate = self.A_log.exp()[:, None]
        if self.lower_bound is None:
            return -rate * torch.nn.functional.softplus(x)
        return self.lower_bound * torch.sigmoid(rate * x)


def gate_of(gate: str, decay: str) -> str:
    """The gate that makes the decays; for "given", the one that the module's docstring names."""
    if gate != "given":
        return gate
    return "softplus" if decay == "initialised" else "bounded"


def draw(gate: str, decay: str, size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> RawGate:
    """Draw a gate's input and parameters.

    Args:
        gate: one of GATES. decay: one of DECAYS.
        size: B, T, HV, K.
        dtype: of g.

    Raises:
        ValueError: an unknown gate or decay.
    """
    if gate not in GATES:
        raise ValueError(f"gate: expected one of {', '.join(GATES)}, got {gate!r}")
    if decay not in DECAYS:
        raise ValueError(f"decay: expected one of {', '.join(DECAYS)}, got {decay!r}")
    bounded = gate_of(gate, decay) == "bounded"
    HV, K = size[2:]
    g = torch.randn(size, dtype=dtype, device=device)
    A_log, dt_bias = torch.rand(HV, device=device), torch.rand(HV, K, device=device)
    if decay == "slow":
        mean = _log_uniform(dt_bias, *SLOW_DECAY)
        rate = A_log.exp()[:, None]
        g.mul_(SLOW_SPREAD / rate if bounded else SLOW_SPREAD)
        dt_bias = _bounded_bias(mean, rate) if bounded else _softplus_bias(mean, rate)
    elif decay == "initialised":
        dt_bias = _inverse_softplus(_log_uniform(dt_bias, *INITIAL_STEP))
        low, high = INITIAL_RATE
        A_log = torch.zeros_like(A_log) if bounded else (low + (high - low) * A_log).log()
        g.mul_(INITIAL_SPREAD)
    return RawGate(g, A_log, dt_bias, LOWER_BOUND if bounded else None)


def _log_uniform(u: Tensor, low: float, high: float) -> Tensor:
    """Log-uniform in [low, high) out of u, uniform in [0, 1)."""
    return (math.log(low) + u * math.log(high / low)).exp()


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


# The mean of f(x + s z) over normal z is f(x) + s^2 / 2 f''(x); moving x by -s^2 / 2 f'' / f' corrects it.
# f''/f' is 1 - 2 sigmoid of a sigmoid, and 1 - sigmoid of a softplus.


def _bounded_bias(mean: Tensor, rate: Tensor) -> Tensor:
    share = mean / -LOWER_BOUND
    return (torch.logit(share) - SLOW_SPREAD**2 / 2 * (1 - 2 * share)) / rate


def _softplus_bias(mean: Tensor, rate: Tensor) -> Tensor:
    x = _inverse_softplus(mean / rate)
    return x - SLOW_SPREAD**2 / 2 * (1 - torch.sigmoid(x))

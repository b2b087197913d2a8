"""Errors of decoding with states that are rounded after every token to fewer bits, beside exact ones.

    python benchmarks/state_formats.py --steps 100000

A state is rounded as a pool of this format would hold it. 8-bit formats have one float32 scale for each key channel,
its largest value over the format's largest number. "stochastic" rounds up as often as the remainder says, so that
steps below half a digit do not vanish. Printed are errors of o and of the state, |x - r| / |r| over all heads, at
steps 1, 10, 100, ...
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

HEADS = 4
DECAYS = {"initialised": (-1.0, 1.0), "slow": (-8.0, 1.0)}
"""Mean and deviation of x, of log decays -softplus(x)."""
Format = Callable[[Tensor], Tensor]


def nearest(dtype: torch.dtype) -> Format:
    return lambda s: s.to(dtype).to(s.dtype)


def scaled(largest: float, rounded: Format) -> Format:
    """Each row [.., V] over its scale."""

    def rounder(s: Tensor) -> Tensor:
        scale = (s.abs().amax(-1, keepdim=True) / largest).float().clamp_min(1e-30).to(s.dtype)
        return rounded(s / scale) * scale

    return rounder


def stochastic(x: Tensor) -> Tensor:
    return (x + torch.rand_like(x)).floor()


def stochastic_fp8(x: Tensor) -> Tensor:
    """float8_e4m3fn: 3 bits behind the leading one, exponents from -6 on."""
    step = torch.exp2(torch.frexp(x).exponent.clamp_min(-5) - 4.0)
    return (stochastic(x / step) * step).clamp(-448, 448)


FORMATS: dict[str, Format] = {
    "float32": nearest(torch.float32),
    "float16": nearest(torch.float16),
    "bfloat16": nearest(torch.bfloat16),
    "fp8 e4m3": scaled(448, nearest(torch.float8_e4m3fn)),
    "fp8 e4m3, stochastic": scaled(448, stochastic_fp8),
    "int8": scaled(127, torch.round),
    "int8, stochastic": scaled(127, stochastic),
}


def decode(decays: str, channels: int, steps: int) -> None:
    """Print a row for each format and power of ten."""
    torch.manual_seed(0)
    mean, deviation = DECAYS[decays]
    names = list(FORMATS)
    exact = torch.zeros(HEADS, channels, channels, dtype=torch.float64)
    states = exact.repeat(len(names), 1, 1, 1)
    # Each channel keeps its own speed, as A_log and dt_bias give it.
    speeds = mean + deviation * torch.randn(HEADS, channels, dtype=torch.float64)
    for step in range(1, steps + 1):
        q, k, v = torch.randn(3, HEADS, channels, dtype=torch.float64)
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        decay = (-torch.nn.functional.softplus(speeds + 0.5 * torch.randn_like(speeds))).exp()[..., None]
        beta = torch.rand(HEADS, 1, dtype=torch.float64)

        def advance(s: Tensor, decay=decay, k=k, v=v, beta=beta) -> Tensor:
            s = decay * s
            u = beta * (v - torch.einsum("hk,...hkv->...hv", k, s))
            return s + k[..., None] * u[..., None, :]

        exact, states = advance(exact), advance(states)
        for i, name in enumerate(names):
            states[i] = FORMATS[name](states[i])
        if step == 10 ** (len(str(step)) - 1):
            o = torch.einsum("hk,hkv->hv", q, exact)
            for name, s in zip(names, states, strict=True):
                of_o = (torch.einsum("hk,hkv->hv", q, s) - o).norm() / o.norm()
                of_state = (s - exact).norm() / exact.norm()
                print(f"{decays:12} {step:7} {name:22} o {of_o:.1e}  state {of_state:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--channels", type=int, default=128)
    options = parser.parse_args()
    for decays in DECAYS:
        decode(decays, options.channels, options.steps)


if __name__ == "__main__":
    main()

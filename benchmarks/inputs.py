"""Shapes, gates, and the calls that are timed: the conformance kit's ``Call``, drawn on the device.

The kit's own cases draw on the CPU, the same numbers on every machine. Here tensors of gigabytes are drawn where they
are used, in the distributions that the documentation names.

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

import argparse
import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda_core import reference
from kda_core.reference import DIFFERENTIABLE
from kda_core.testing import references
from kda_core.testing.cases import LOWER_BOUND, Case
from kda_core.testing.inputs import Call

SYNTAX = "B,T,H,K[,V][:hv=N][:packed=16x512|3+5+8]"
DECAYS = ("random", "slow", "initialised")
DATA = ("q", "k", "v", "g", "beta")

SLOW_DECAY, SLOW_SPREAD = (1e-3, 0.5), 0.5
INITIAL_STEP, INITIAL_RATE, INITIAL_SPREAD = (1e-3, 0.1), (1.0, 16.0), 0.1

COMPARED_HEADS, COMPARED_SEQUENCES = 2, 16
COMPARED_TOKENS = {"training": {"cuda": 512, "cpu": 128}, "inference": {"cuda": 8192, "cpu": 2048}}
STATE_BYTES = {"cuda": 4 * 2**30, "cpu": 2**29}  # Most bytes of the oracle's states: it keeps the states of all tokens


def parse_shape(text: str) -> Case:
    """A case with the sizes that ``text`` spells, and ``text`` as its name; for argparse."""
    try:
        sizes, *words = text.split(":")
        numbers = [int(n) for n in sizes.split(",")]
        fields: dict[str, Any] = dict(zip(("B", "T", "H", "K", "V"), numbers, strict=False))
        if len(numbers) not in (4, 5) or min(numbers) < 1:
            raise ValueError("four or five sizes of 1 and more")
        for name, _, value in (word.partition("=") for word in words):
            if name == "hv":
                fields["HV"] = int(value)
            elif name == "packed" and "x" in value:
                count, length = map(int, value.split("x"))
                fields["lengths"] = (length,) * count
            elif name == "packed":
                fields["lengths"] = tuple(map(int, value.split("+")))
            else:
                raise ValueError(f"{name!r} is no word of it")
        case = Case(name=text, **fields)
        if case.HV % case.H:
            raise ValueError(f"hv is a multiple of H = {case.H}")
        if case.lengths and (case.B != 1 or sum(case.lengths) != case.T or min(case.lengths) < 1):
            raise ValueError(f"packed lengths add up to T = {case.T}, with B = 1")
        return case
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {SYNTAX}, got {text!r} ({error})") from None


def draw_gate(gate: str, decay: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Raw g [B, T, HV, K] of a dtype, float32 A_log [HV] and dt_bias [HV * K], and lower_bound (None: softplus)."""
    bounded = gate == "bounded" or (gate == "given" and decay != "initialised")
    HV, K = size[2:]
    g = torch.randn(size, dtype=dtype, device=device)
    A_log, dt_bias = torch.rand(HV, device=device), torch.rand(HV, K, device=device)
    if decay == "slow":
        mean, rate = _log_uniform(dt_bias, *SLOW_DECAY), A_log.exp()[:, None]
        g.mul_(SLOW_SPREAD / rate if bounded else SLOW_SPREAD)
        dt_bias = bounded_bias(mean, rate) if bounded else softplus_bias(mean, rate)
    elif decay == "initialised":
        dt_bias = _inverse_softplus(_log_uniform(dt_bias, *INITIAL_STEP))
        low, high = INITIAL_RATE
        A_log = torch.zeros_like(A_log) if bounded else (low + (high - low) * A_log).log()
        g.mul_(INITIAL_SPREAD)
    return {"g": g, "A_log": A_log, "dt_bias": dt_bias.flatten(), "lower_bound": LOWER_BOUND if bounded else None}


def _log_uniform(u: Tensor, low: float, high: float) -> Tensor:
    """Log-uniform in [low, high) out of u, uniform in [0, 1)."""
    return (math.log(low) + u * math.log(high / low)).exp()


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


# The mean of f(x + s z) over normal z is f(x) + s^2 / 2 f''(x); moving x by -s^2 / 2 f'' / f' corrects it.
# f''/f' is 1 - 2 sigmoid of a sigmoid, and 1 - sigmoid of a softplus.


def bounded_bias(mean: Tensor, rate: Tensor) -> Tensor:
    """dt_bias [HV, K] with which the bounded gate's slow decays have these means [HV, K]; rate [HV, 1]."""
    share = mean / -LOWER_BOUND
    return (torch.logit(share) - SLOW_SPREAD**2 / 2 * (1 - 2 * share)) / rate


def softplus_bias(mean: Tensor, rate: Tensor) -> Tensor:
    """The same for the softplus gate."""
    x = _inverse_softplus(mean / rate)
    return x - SLOW_SPREAD**2 / 2 * (1 - torch.sigmoid(x))


def log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """[B, T, HV, K] float32 natural-log decays."""
    return reference.gate(g.float(), A_log, dt_bias.view(g.shape[2:]), lower_bound)


def draw(case: Case, mode: str, gate: str, decay: str, dtype: torch.dtype, device: torch.device) -> tuple[Call, float]:
    """A call of ``chunk_kda`` on the device, and the mean log decay of its first tokens.

    Args:
        case: its sizes.
        mode: "training" (with a gradient of o) or "inference" (float32 states in and out, V first).
        gate: of kda_core._bench.GATES. decay: of DECAYS. dtype: of all inputs.
    """
    torch.manual_seed(0)
    HV, V = case.HV or case.H, case.V or case.K

    def normal(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    tensors = {"q": normal(case.B, case.T, case.H, case.K), "k": normal(case.B, case.T, case.H, case.K)}
    tensors["v"] = normal(case.B, case.T, HV, V)
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    drawn = draw_gate(gate, decay, (case.B, case.T, HV, case.K), dtype, device)
    mean = log_decay(**(drawn | {"g": drawn["g"][:, :2048]})).mean().item()
    bound, beta = drawn["lower_bound"], normal(case.B, case.T, HV)
    if gate == "given":
        tensors |= {"g": log_decay(**drawn).to(dtype), "beta": beta.sigmoid()}
    else:
        tensors |= {"beta": beta} | {n: drawn[n] for n in ("g", "A_log", "dt_bias")}
        options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "lower_bound": bound}
    # A softplus gate cannot promise bounded decays.
    options["safe_gate"] = bound is not None
    if case.lengths:
        tensors["cu_seqlens"] = torch.tensor([0, *case.lengths]).cumsum(0).to(device)
    if mode == "training":
        return Call("chunk_kda", tensors, options, {"o": torch.randn_like(tensors["v"])}, name=case.name), mean
    tensors["initial_state"] = normal(case.N, HV, V, case.K, dtype=torch.float32)
    options |= {"state_v_first": True, "output_final_state": True}
    return Call("chunk_kda", tensors, options, name=case.name), mean


def bytes_held(call: Call) -> int:
    """Bytes of all inputs, gradients of the outputs included."""
    return sum(t.nbytes for t in (*call.tensors.values(), *call.grads.values()))


def bytes_moved(call: Call) -> int:
    """Bytes that have to be read and written: inputs and results, in training once more for the backward."""
    data, o = sum(call.tensors[n].nbytes for n in DATA), call.tensors["v"].nbytes
    states = call.tensors["initial_state"].nbytes if "initial_state" in call.tensors else 0
    return data + o + 2 * states + (2 * data + o if call.grads else 0)


def oracle(call: Call) -> dict[str, Tensor]:
    """Results by name, with gradients if the call has them, in float64 by the token recurrence on its device."""
    r, grads = call.request(), {n: t.double() for n, t in call.grads.items()}
    if grads:
        return references.whole_backward(r, grads)
    found = reference.oracle(r, inputs={n: getattr(r, n).double() for n in DIFFERENTIABLE if n in call.tensors})
    return {"o": found.o, "final_state": found.final_state.mT if r.state_v_first else found.final_state}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float | str]:
    """``|x - r| / |r|`` of every result x that both have; a number that JSON lacks is spelled."""
    both = {n: (found[n].double().reshape(r.shape), r) for n, r in expected.items() if n in found}
    sizes = {n: ((x - r).norm() / r.norm().clamp_min(1e-300)).item() for n, (x, r) in both.items()}
    return {n: size if math.isfinite(size) else str(size) for n, size in sizes.items()}


class Part:
    """The part of a call that the oracle can compute: the first tokens of the first sequences, on few heads.

    The timed call runs once more in full, with the gradient of o zeroed outside of the part: then the gradients inside,
    and those of A_log and dt_bias, are those of the part alone.
    """

    def __init__(self, call: Call, most: int | None = None) -> None:
        """``most``: tokens to compare; by default ``COMPARED_TOKENS``."""
        self.call = call
        q, v = call.tensors["q"], call.tensors["v"]
        group = v.shape[2] // q.shape[2]
        self.H = max(1, min(q.shape[2], COMPARED_HEADS // group))
        self.HV = self.H * group
        most = most or COMPARED_TOKENS["training" if call.grads else "inference"][q.device.type]
        left = max(1, min(most, STATE_BYTES[q.device.type] // (8 * self.HV * q.shape[3] * v.shape[3])))
        packed = "cu_seqlens" in call.tensors
        self.lengths, cut = [], False
        for length in call.lengths()[: COMPARED_SEQUENCES if packed else 1]:
            self.lengths += [min(length, left)] if left else []
            cut, left = cut or length > left, max(0, left - length)
        tensors = {n: self.cut(n, t) for n, t in call.tensors.items() if n != "cu_seqlens"}
        if packed:
            tensors["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(self.lengths)], device=q.device)
        part = replace(call, tensors=tensors, grads={n: self.cut(n, t) for n, t in call.grads.items()})
        self.expected = oracle(part)
        if cut:  # the whole sequence has another final state
            del self.expected["final_state"]

    def cut(self, name: str, x: Tensor) -> Tensor:
        """The part of a tensor or of a result."""
        name = {"o": "v", "final_state": "initial_state", **{f"d{n}": n for n in DIFFERENTIABLE}}.get(name, name)
        if name == "initial_state":
            return x[: len(self.lengths), : self.HV]
        if name in ("A_log", "dt_bias"):
            return x[: x.shape[0] * self.HV // self.call.tensors["v"].shape[2]]
        return x[:1, : sum(self.lengths), : self.H if name in ("q", "k") else self.HV]

    def errors(self, run: Any) -> dict[str, float | str]:
        """Errors of a run of the call; its gradient of o is as before afterwards."""
        kept = {n: t.clone() for n, t in self.call.grads.items()}
        for n, t in self.call.grads.items():
            self.cut(n, t.zero_()).copy_(self.cut(n, kept[n]))
        try:
            return errors({n: self.cut(n, t) for n, t in run().items()}, self.expected)
        finally:
            for n, t in self.call.grads.items():
                t.copy_(kept[n])

"""Errors of a timed call against the float64 token recurrence, on a slice small enough for the oracle.

The timed call runs once more in full. Its o, and in inference its final state, are compared on the first tokens of the
first sequences and on few heads. In training the gradient of o is zeroed behind those tokens: then the gradients of the
slice, and those of A_log and dt_bias, equal those of the slice alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_core import reference
from kda_core.bench.workload import DATA, Call, Results, Work
from kda_core.request import Request

VALUE_HEADS = 2
STATE_BYTES = {"cuda": 4 * 2**30, "cpu": 2**29}
"""Most bytes of the oracle's states: it keeps the states of all tokens."""
GRADIENT_TOKENS = {"cuda": 512, "cpu": 128}
INFERENCE_TOKENS = {"cuda": 8192, "cpu": 2048}
SEQUENCES = 16


@dataclass(frozen=True)
class Slice:
    """The part of a call that is compared: the first batch rows, tokens, query/key heads and value heads.
    Attributes:
        lengths: of the packed sequences inside, the last one maybe cut; empty: dense.
        whole: no sequence inside is cut: final states are compared as well.
    """

    B: int
    T: int
    H: int
    HV: int
    lengths: tuple[int, ...]
    whole: bool

    def __str__(self) -> str:
        sequences = len(self.lengths) or self.B
        return f"{self.HV} heads, {self.T} tokens, {sequences} sequence{'s' if sequences > 1 else ''}"


def slice_of(work: Work) -> Slice:
    """The part of a problem that the oracle computes."""
    shape, device = work.problem.shape, work.device.type
    group = shape.HV // shape.H
    H = max(1, min(shape.H, VALUE_HEADS // group))
    HV = H * group
    most = (GRADIENT_TOKENS if work.problem.training else INFERENCE_TOKENS)[device]
    most = max(1, min(most, STATE_BYTES[device] // (8 * HV * shape.K * shape.V)))
    if not shape.lengths:
        T = min(shape.T, most)
        return Slice(1, T, H, HV, (), T == shape.T)
    lengths, left = [], most
    for length in shape.lengths[:SEQUENCES]:
        if left:
            lengths.append(min(length, left))
            left -= lengths[-1]
    whole = tuple(lengths) == shape.lengths[: len(lengths)]
    return Slice(1, sum(lengths), H, HV, tuple(lengths), whole)


def expected(work: Work, part: Slice) -> Results:
    """Results of the slice in float64; the initial states are those that ``work`` holds now."""
    cut = {n: work.tensors[n].detach()[: part.B, : part.T] for n in DATA}
    tensors: dict[str, Any] = {n: x[:, :, : part.HV if n in ("v", "g", "beta") else part.H] for n, x in cut.items()}
    tensors |= {n: work.tensors[n].detach()[: part.HV] for n in ("A_log", "dt_bias") if n in work.tensors}
    N = len(part.lengths) or part.B
    if not work.problem.training:
        tensors["initial_state"] = work.states()[:N, : part.HV].mT
    options = {n: x for n, x in work.options.items() if n.startswith("use_") or n == "lower_bound"}
    if part.lengths:
        options["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(part.lengths)], device=work.device)
    request = Request(
        op="chunk_kda", scale=tensors["q"].shape[-1] ** -0.5, output_final_state=True, **tensors, **options
    )
    if work.grad_o is None:
        with torch.no_grad():
            found = reference.oracle(request)
        states = {} if work.problem.training or not part.whole else {"final_state": found.final_state.mT}
        return {"o": found.o, **states}
    leaves = {n: tensors[n].double().requires_grad_() for n in work.leaves}
    o = reference.oracle(request, inputs=leaves).o
    gradient = work.grad_o[: part.B, : part.T, : part.HV].double()
    grads = torch.autograd.grad(o, list(leaves.values()), gradient)
    return {"o": o.detach()} | {f"d{n}": x for n, x in zip(leaves, grads, strict=True)}


def _cut(name: str, x: Tensor, part: Slice) -> Tensor:
    """The slice of a result."""
    if name == "final_state":
        return x[: len(part.lengths) or part.B, : part.HV]
    if name in ("dA_log", "ddt_bias"):
        return x[: part.HV]
    return x[: part.B, : part.T, : part.H if name in ("dq", "dk") else part.HV]


def results_on_slice(call: Call, work: Work, part: Slice) -> Results:
    """One run of the call, on the pool as it was and with the gradient of o zeroed outside of the slice."""
    pool = work.tensors["initial_state"].clone() if work.problem.shape.pool else None
    grad = None if work.grad_o is None else work.grad_o.clone()
    if work.grad_o is not None:
        inside = work.grad_o[: part.B, : part.T].clone()
        work.grad_o.zero_()[: part.B, : part.T] = inside
    try:
        results = call()
        if pool is not None:
            # Some peers return the pool and others states: read the slots.
            results["final_state"] = work.states()
        found = {n: _cut(n, x, part).clone() for n, x in results.items()}
    finally:
        if pool is not None:
            work.tensors["initial_state"].copy_(pool)
        if grad is not None and work.grad_o is not None:
            work.grad_o.copy_(grad)
    return found


def errors(found: Results, oracle: Results) -> dict[str, float]:
    """``|x - r| / |r|`` of every result that both have."""
    return {
        n: ((found[n].double() - r).norm() / r.norm().clamp_min(1e-300)).item() for n, r in oracle.items() if n in found
    }

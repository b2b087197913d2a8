"""Suite ``accuracy``: relative errors of every output and gradient of ``chunk_kda`` against the float64 oracle.

Every implementation gets the same inputs and the same gradients of o and of the final state. The error of a result x
is |x - r| / |r| with the oracle's r, computed in float64 from the rounded inputs. With ``--draws`` it is the root mean
square over that many draws of the inputs: errors vary by a tenth between draws, those of dA_log by more. With
``--one-config`` a peer's autotuners take their first configuration, which saves minutes and changes tiles, not
precision.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core import reference
from kda_core.bench.peers import OURS
from kda_core.bench.session import Row, Session, Task, failure
from kda_core.reference import DIFFERENTIABLE
from kda_core.testing.cases import BF16, FP16, FP32, Case
from kda_core.testing.inputs import Call

PEERS = ("fla",)
"""Peers that take every argument of ``chunk_kda`` and have every gradient."""

_ALL: dict[str, Any] = {"l2norm": True, "beta": "sigmoid", "state": FP32, "backward": True, "index_dtype": torch.int64}
_PACKED = (1, 63, 200, 0, 248)
TABLE = [
    Case(name="given decay", B=2, T=512, H=4, K=128, dtype=BF16, state=FP32, backward=True),
    Case(name="given decay, safe_gate", T=512, H=4, K=128, dtype=BF16, decay="bounded", options={"safe_gate": True})
    .having(state=FP32, backward=True),
    Case(name="slow decay", T=512, H=4, K=128, dtype=BF16, decay="slow", state=FP32, backward=True),
    Case(name="lower-bound gate", T=512, H=4, K=128, dtype=BF16, gate_dtype=BF16, gate="lower bound", **_ALL)
    .having(options={"safe_gate": True}),
    Case(name="softplus gate", T=512, H=4, K=128, dtype=BF16, gate_dtype=BF16, gate="softplus", **_ALL),
    Case(name="real model's gate", T=512, H=4, K=128, dtype=BF16, gate_dtype=BF16, gate="softplus", rate=201.0, **_ALL),
    Case(name="packed, grouped values", T=512, H=2, HV=4, K=128, dtype=BF16, lengths=_PACKED, gate="softplus", **_ALL),
    Case(name="equal keys, beta 1, no decay", T=512, H=4, K=128, dtype=BF16, keys="equal", decay="none", beta=1.0)
    .having(state=FP32, backward=True),
    Case(name="K = V = 64", T=512, H=4, K=64, dtype=BF16, state=FP32, backward=True),
    Case(name="K = V = 256", T=512, H=2, K=256, dtype=BF16, state=FP32, backward=True),
    Case(name="given decay, float16", T=512, H=4, K=128, dtype=FP16, state=FP32, backward=True),
    Case(name="packed softplus gate, float16", T=512, H=4, K=128, dtype=FP16, lengths=_PACKED, gate="softplus", **_ALL),
    Case(name="given decay, float32", T=512, H=4, K=64, dtype=FP32, state=FP32, backward=True),
    Case(name="packed softplus gate, float32", T=512, H=4, K=64, dtype=FP32, lengths=_PACKED, gate="softplus", **_ALL),
]  # fmt: skip

LENGTHS = (64, 256, 1024, 4096)
LONGEST_ON_CPU = 256


def _by_length(T: int, dtype: torch.dtype, decay: str) -> Case:
    # float32 has fewer channels, which peers' kernels can hold in shared memory.
    sizes: dict[str, Any] = {"T": T, "H": 2, "K": 64 if dtype == FP32 else 128, "dtype": dtype}
    name = f"{T} tokens, {decay}, {NAMES[dtype]}"
    if decay == "slow decay":
        return Case(name=name, decay="slow", state=FP32, backward=True, **sizes)
    return Case(name=name, gate_dtype=dtype, gate="lower bound", **_ALL, **sizes).having(options={"safe_gate": True})


NAMES = {BF16: "bfloat16", FP16: "float16", FP32: "float32"}
BY_LENGTH = [_by_length(T, x, decay) for decay in ("lower-bound gate", "slow decay") for x in NAMES for T in LENGTHS]
QUICK = [case for case in BY_LENGTH if case.T == 64 and case.dtype == FP32]

Function = Callable[..., tuple]


def tasks(session: Session) -> list[Task]:
    """One task a case."""
    options = session.options
    cases = QUICK if options.quick else [*TABLE, *BY_LENGTH]
    cases = [c for c in cases if options.only in c.name and (session.gpu or c.T <= LONGEST_ON_CPU or c in TABLE)]
    if not cases:
        raise ValueError(f"only: expected a part of the name of a case that runs here, got {options.only!r}")
    functions = _functions(session)
    device, draws = session.device, options.draws
    return [Task(case.name, functools.partial(measure, case, functions, device, draws)) for case in cases]


def _functions(session: Session) -> dict[str, Function]:
    backend = session.options.backend
    found: dict[str, Function] = {OURS: lambda **x: kda_core.chunk_kda(**x, backend=backend)}
    if any(peer.name in PEERS for peer in session.peers):
        from fla.ops.kda import chunk_kda

        found["fla"] = chunk_kda
    return found


def take_first_configurations() -> None:
    """Give every Triton autotuner that is defined from now on one configuration; call before a peer is imported."""
    from triton.runtime.autotuner import Autotuner

    tune = Autotuner.__init__

    def first_only(self: Any, fn: Any, arg_names: Any, configs: Any, *arguments: Any, **options: Any) -> None:
        tune(self, fn, arg_names, configs[:1], *arguments, **options)

    Autotuner.__init__ = first_only


def oracle(call: Call, device: torch.device) -> dict[str, Tensor]:
    """Results and gradients in float64."""
    there = {n: t.to(device) for n, t in call.tensors.items()}
    request = replace(call, tensors=there).request()
    leaves = {n: getattr(request, n).double().requires_grad_() for n in DIFFERENTIABLE if n in there}
    found = reference.oracle(request, inputs=leaves)
    outputs = {"o": found.o, "final_state": found.final_state}
    grads = [call.grads[n].to(device).double() for n in outputs]
    return _named(outputs, torch.autograd.grad(list(outputs.values()), list(leaves.values()), grads), leaves)


def results(function: Function, call: Call, device: torch.device) -> dict[str, Tensor]:
    """Results and gradients of an implementation."""
    there = {n: t.to(device) for n, t in call.tensors.items()}
    leaves = {n: there[n].requires_grad_() for n in DIFFERENTIABLE if n in there}
    o, final_state = function(**there, **call.options)[:2]
    outputs = {"o": o, "final_state": final_state}
    grads = [call.grads[n].to(device) for n in outputs]
    return _named(outputs, torch.autograd.grad(list(outputs.values()), list(leaves.values()), grads), leaves)


def _named(outputs: dict[str, Tensor], found: Sequence[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = {f"d{n}": g for n, g in zip(leaves, found, strict=True)}
    return {n: t.detach() for n, t in (outputs | gradients).items()}


def errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """|x - r| / |r| of every result."""
    return {n: ((got[n].double().reshape(r.shape) - r).norm() / r.norm()).item() for n, r in expected.items()}


def measure(case: Case, functions: dict[str, Function], device: torch.device, draws: int = 1) -> Row:
    """Errors of one case by implementation; a peer that fails has its message among ``left_out``."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in functions}
    left_out: dict[str, str] = {}
    for draw in range(draws):
        # The name is the seed.
        call = case.having(name=f"{case.name}, draw {draw}" if draw else case.name).call()
        expected = oracle(call, device)
        for name, function in functions.items():
            if name in left_out:
                continue
            try:
                found[name].append(errors(results(function, call, device), expected))
            # Any library may fail in any way, and its failure is a row of the table.
            except Exception as error:
                left_out[name] = failure(error)
    implementations = {
        name: {"errors": root_mean_square(x), "draws": x} for name, x in found.items() if name not in left_out
    }
    row: Row = {
        "suite": "accuracy",
        "case": case.name,
        "dtype": NAMES[case.dtype],
        "sizes": {n: getattr(case, n) for n in ("B", "T", "H", "K")},
        "by_length": case in BY_LENGTH,
        "implementations": implementations,
        "left_out": left_out,
    }
    return row | ({"failed": left_out.pop(OURS)} if OURS in left_out else {})


def root_mean_square(draws: list[dict[str, float]]) -> dict[str, float]:
    """Root mean square over the draws, by output."""
    return {n: math.sqrt(sum(d[n] ** 2 for d in draws) / len(draws)) for n in draws[0]}

"""``kda_gate`` on the backend under test, against the oracle.

The budget is twice the largest of three errors: the formula's own error in float32 on these inputs; the error of an
accelerator's elementary functions, relative to each element (a large row may have a large error); and the error of the
rate, which exp(−z) with z = exp(A_log)·x multiplies by z.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core import reference
from kda_core.errors import ContractViolation, UnsupportedCall
from kda_core.request import GateRequest
from kda_core.testing.axes import DTYPES
from kda_core.testing.budgets import FACTOR, Budget, Error, compare, measure
from kda_core.testing.inputs import guards, placed
from kda_core.testing.rounding import FUNCTION_ULPS, RELATIVE_RMS, unit_roundoff
from kda_core.testing.subject import Mismatch, Record, Subject, expect_kind

DIFFERENTIABLE = ("g", "A_log", "dt_bias")


def arguments(
    shape: tuple[int, ...] = (2, 40, 4, 16),
    dtype: torch.dtype = torch.float32,
    A_log: bool = True,
    dt_bias: bool = True,
) -> dict[str, Tensor]:
    """Arguments of ``kda_gate`` on the CPU, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    HV, K = shape[-2:]
    tensors = {"g": (3 * torch.randn(shape, generator=generator)).to(dtype)}
    if A_log:
        tensors["A_log"] = torch.linspace(0, 3, HV)
    if dt_bias:
        tensors["dt_bias"] = torch.randn(HV * K, generator=generator)
    return tensors


def check(
    subject: Subject, tensors: dict[str, Tensor], lower_bound: float | None = None, backward: bool = False,
    wrt: Collection[str] = DIFFERENTIABLE,
) -> None:  # fmt: skip
    """Call ``kda_gate`` and compare its result, and gradients of ``wrt``, with the oracle's; raises as ``Subject.run``.

    The result's gradient is a slice of a wider tensor.
    """
    g = tensors["g"]
    by_head = {n: t.reshape(g.shape[-2:]) if n == "dt_bias" else t for n, t in tensors.items()}
    request = GateRequest(**by_head, lower_bound=lower_bound, save_for_backward=backward)
    axes = {"function": ["kda_gate"], "direction": ["forward", "backward"] if backward else ["forward"]}
    features = sorted(request.features, key=lambda f: f.name)
    record = Record(subject.name, axes, DTYPES[g.dtype], [f.name for f in features], "kda_gate")
    subject.records.append(record)
    reasons = [r for f in features if (r := subject.info.capabilities.refusal(f)) is not None]
    there = {n: placed(t, subject.device).requires_grad_(backward and n in wrt) for n, t in tensors.items()}
    before = {n: guards(t.detach()).clone() for n, t in there.items()}
    # All positive: a sum of both signs could lose all its digits.
    positive = 0.5 + torch.rand(g.shape, generator=torch.Generator().manual_seed(2))
    cotangent = positive.to(request.output_dtype) if backward else None
    try:
        got = _call(there, lower_bound, subject, cotangent)
    except UnsupportedCall as refusal:
        raise record.refused(refusal, reasons) from None
    except ContractViolation as error:
        raise Mismatch(str(error)) from None
    if reasons:
        raise Mismatch(f"served a call that it does not declare: {'; '.join(reasons)}")
    subject.expect_untouched(before, there)
    for name, (expected, dtype, budget) in expectations(tensors, lower_bound, request.output_dtype, cotangent).items():
        if name not in got:
            continue
        expect_kind(name, got[name], expected.shape, dtype, torch.device("cpu"))
        by_head = (_by_head(name, t, g) for t in (got[name], expected))
        error, _, problem = compare(name, *by_head, dtype, budget, _place)
        record.note(name, error, budget)
        if problem:
            raise Mismatch(f"kda_gate: {problem}")


def _place(name: str, where: tuple[int, ...]) -> str:
    *token, head = where
    return f"token {token}, head {head}" if token else f"head {head}"


def expectations(
    tensors: dict[str, Tensor], lower_bound: float | None, output_dtype: torch.dtype, cotangent: Tensor | None
) -> dict[str, tuple[Tensor, torch.dtype, Budget]]:
    """The oracle's result, and its gradients for ``cotangent`` unless that is None, each with its dtype and budget."""
    exact = _evaluate(tensors, lower_bound, torch.float64, cotangent)
    rounded = _evaluate(tensors, lower_bound, torch.float32, cotangent)
    unit = 2 * FUNCTION_ULPS * unit_roundoff(torch.float32)
    faster = _evaluate(tensors, lower_bound, torch.float64, cotangent, unit)
    found = {}
    for name, expected in exact.items():
        dtype = output_dtype if name == "gate" else tensors[name[1:]].dtype
        # The last: float32 functions in the largest row.
        *errors, largest = (
            _measure(name, x, expected, dtype, tensors["g"])
            for x in (rounded[name], faster[name], expected * (1 + unit))
        )
        least = 2 * FUNCTION_ULPS * unit_roundoff(dtype)  # an ulp is two unit roundoffs
        frobenius = max(RELATIVE_RMS * least, *(e.frobenius for e in errors))
        worst_row = max(least, largest.worst_row, *(e.worst_row for e in errors))
        found[name] = expected, dtype, Budget(frobenius, worst_row).scaled(FACTOR)
    return found


def _measure(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype, g: Tensor) -> Error:
    return measure(name, _by_head(name, got, g), _by_head(name, expected, g), dtype)


def _by_head(name: str, t: Tensor, g: Tensor) -> Tensor:
    """dg like the gate itself; ddt_bias as [HV, K]."""
    return t.reshape(g.shape[-2:]) if name == "ddt_bias" else t


def _call(
    there: dict[str, Tensor], bound: float | None, subject: Subject, cotangent: Tensor | None
) -> dict[str, Tensor]:
    y = kda_core.kda_gate(**there, lower_bound=bound, backend=subject.name)
    results = {"gate": y.detach().cpu()}
    if cotangent is not None:
        names = [n for n, t in there.items() if t.requires_grad]
        given = placed(cotangent, subject.device, strided=True)
        found = torch.autograd.grad(y, [there[n] for n in names], given)
        results |= {f"d{n}": d.cpu() for n, d in zip(names, found, strict=True)}
    return results


def _evaluate(
    tensors: dict[str, Tensor], bound: float | None, dtype: torch.dtype, cotangent: Tensor | None, rate_error: float = 0
) -> dict[str, Tensor]:
    """The gate and its gradients in ``dtype``, with rates that are larger by the relative error ``rate_error``."""
    x = {n: t.to(dtype, copy=True) for n, t in tensors.items()}
    if "A_log" in x:
        x["A_log"] += rate_error
    g = x["g"]
    with torch.enable_grad():
        leaves = {n: t.requires_grad_() for n, t in x.items()}
        bias = leaves["dt_bias"].reshape(g.shape[-2:]) if "dt_bias" in leaves else None
        y = reference.gate(leaves["g"], leaves.get("A_log"), bias, bound)
    results: dict[str, Any] = {"gate": y.detach().double()}
    if cotangent is not None:
        names = [n for n in DIFFERENTIABLE if n in leaves]
        found = torch.autograd.grad(y, [leaves[n] for n in names], cotangent.to(dtype))
        results |= {f"d{n}": d.double() for n, d in zip(names, found, strict=True)}
    return results

"""How far a result may be from the float64 oracle; derived from the call, never typed in.

The budget of an output is FACTOR times the error that the same computation makes when it is rounded to
the dtype of its inputs. That error is measured, call by call, on samples of ``rounding.sample``: the
chunk form, whose products take operands rounded to the dtype of q and accumulate in float32, with all
else in float32 (float64 for float64 inputs), and results rounded to their own dtype. So the budget
includes the effect of the inputs: nearly parallel keys amplify rounding errors, decay forgets them.
float32 inputs give float32-accurate budgets: a backend that uses shorter products must declare a
``Slack``. The forward of ``fused_recurrent_kda`` is held to float32 operands for every dtype of q. On a device whose
matrix units take 16-bit subnormal operands for zero (``platforms.flushed_below``), so do the samples.

Two errors are held to a budget each, so that neither a small error everywhere nor a large one in one
place can hide:

- ``frobenius``: |x - ref| / |ref| over the whole output;
- ``worst_row``: the largest |x_r - ref_r| of any row r (a token's vector of one head, a row of a
  state, a single number of dbeta and dA_log), relative to the rms of the rows of its head.

No environment variable and no option changes a budget.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_core import platforms
from kda_core.capabilities import Slack
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import Request
from kda_core.testing import references
from kda_core.testing.inputs import Call
from kda_core.testing.rounding import Noise, in_float64, sample, unit_roundoff

FACTOR = 2.0  # Budget over the measured error of rounding

HEAD_AXIS = {
    **dict.fromkeys(("o", "h", "dq", "dk", "dv", "dg", "dbeta"), 2), "final_state": 1, "dinitial_state": 1,
    "dA_log": None, "ddt_bias": 0, "gate": -2,
}  # fmt: skip
"""Outputs, with the axis of their heads; rows are compared within a head. None: the output is one head."""

SINGLE_NUMBERS = frozenset({"dbeta", "dA_log"})
"""Outputs whose rows are single numbers; the rows of all others are vectors along their last axis."""

MIN_SAMPLES, MAX_SAMPLES = 2, 8
SAMPLED_ELEMENTS = 2**19
"""A sample of few numbers has a noisy error, so small calls take more samples, of about this many numbers in all."""


@dataclass(frozen=True, slots=True)
class Error:
    """Distance of a result from the oracle, both parts relative; infinite where the result alone is not finite."""

    frobenius: float
    worst_row: float
    where: tuple[int, ...] = ()  # index of the worst row

    def share(self, budget: Budget) -> float:
        """The larger of the two errors as a share of its budget: at most 1 passes."""
        pairs = ((self.frobenius, budget.frobenius), (self.worst_row, budget.worst_row))
        return max((math.inf if not allowed else error / allowed) if error else 0.0 for error, allowed in pairs)


@dataclass(frozen=True, slots=True)
class Budget:
    """The two errors that an output may have at most."""

    frobenius: float
    worst_row: float

    def scaled(self, factor: float) -> Budget:
        return Budget(self.frobenius * factor, self.worst_row * factor)


def result_dtypes(r: Request) -> dict[str, torch.dtype]:
    """The dtype that each result of a request is stored in."""
    dtypes = {"o": r.q.dtype, "final_state": r.final_dtype, "h": r.h_dtype}
    return dtypes | {f"d{n}": getattr(r, n).dtype for n in DIFFERENTIABLE if getattr(r, n) is not None}


def measure(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> Error:
    """The error of output ``name``, beside the oracle's float64 one; ``dtype``: that the result is stored in."""
    return _measure(name, got.detach().to("cpu", torch.float64)[None], expected, dtype)[0]


def _measure(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> list[Error]:
    """``measure`` for results with a leading axis of samples."""
    if got.shape[1:] != expected.shape:
        raise ValueError(f"{name}: expected shape {list(expected.shape)}, got {list(got.shape[1:])}")
    if not expected.numel():
        return [Error(0.0, 0.0)] * len(got)
    if name in SINGLE_NUMBERS:
        got, expected = got[..., None], expected[..., None]
    axis = HEAD_AXIS[name]
    rows = expected.square().sum(-1)
    # Errors of smaller numbers are relative to this: below it the dtype, or float32, loses digits.
    smallest = max(torch.finfo(dtype).tiny, torch.finfo(torch.float32).tiny / unit_roundoff(torch.float32))
    smallest *= math.sqrt(expected.shape[-1])
    others = [d for d in range(rows.dim()) if axis is None or d != axis % expected.dim()]
    scale = rows.mean(others, keepdim=True).sqrt().clamp_min(smallest)
    whole = rows.sum().sqrt().clamp_min(smallest)
    errors = []
    for one in got:
        difference = (one - expected).square().sum(-1)
        difference = torch.where(difference.isfinite(), difference, math.inf)
        relative = difference.sqrt() / scale
        place = _place(int(relative.argmax()), relative.shape)
        errors.append(Error((difference.sum().sqrt() / whole).item(), relative.max().item(), place))
    return errors


def _place(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The indices of an element by its number; ``torch.unravel_index`` takes longer than the rest of a comparison."""
    found: list[int] = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        found.append(index)
    return tuple(reversed(found))


CPU = torch.device("cpu")

_cache: dict[str, dict[str, Budget]] = {}
MAX_CACHED_BUDGETS = 4096  # Calls that call_checks.py checks hardly ever repeat: past this many, empty the cache


def budgets(call: Call, device: torch.device = CPU, flushed_below: float | None = None) -> dict[str, Budget]:
    """The budget of every output of a call on a device, by name; ``flushed_below`` stands for the platform's."""
    # Only the slots that the call writes are compared, so only these sequences count in the samples too.
    advanced = call.advanced_sequences() if call.has_pool else None
    request = call.request()
    draft, dtypes = call if request.writes_every_token else None, result_dtypes(request)
    call = call.without_pool()
    seed = call.digest()
    if flushed_below is None:
        flushed_below = platforms.flushed_below(device, call.tensors["q"].dtype)
    key = f"{seed} {advanced} {flushed_below} {dtypes['final_state']} {dtypes['h']}"
    if key not in _cache:
        if len(_cache) >= MAX_CACHED_BUDGETS:
            _cache.clear()
        with references.single_threaded():
            _cache[key] = _budgets(call, random.Random(seed), flushed_below, advanced, dtypes)
    return _cache[key] if draft is None else _with_states_of_tokens(draft, _cache[key], dtypes["final_state"])


def _with_states_of_tokens(call: Call, allowed: dict[str, Budget], dtype: torch.dtype) -> dict[str, Budget]:
    """The budgets of a draft, widened by the rounding of its states, which are stored after every token.

    The samples have only the last states, which are fewer, and smaller where decays are strong.
    """
    exact = references.results(call)["final_state"]
    storing = _measure("final_state", exact[None].to(dtype).double(), exact, dtype)[0]
    state = allowed["final_state"]
    frobenius, worst_row = FACTOR * storing.frobenius, FACTOR * storing.worst_row
    wider = Budget(max(state.frobenius, frobenius), max(state.worst_row, worst_row))
    return allowed | {"final_state": wider}


def _budgets(
    call: Call, offsets: random.Random, flushed_below: float, advanced: list[int] | None, dtypes: dict[str, torch.dtype]
) -> dict[str, Budget]:
    """The budgets of results in ``dtypes``; those of states count only the ``advanced`` sequences (None: all)."""
    request = call.request()
    expected = references.results(call)
    accumulate = unit_roundoff(request.compute_dtype)
    # Rounding errors in float64 cannot be told from the oracle's own: take those of float32 and scale them.
    # Results that are stored in a shorter dtype are rounded after that.
    in_double, rescale = request.compute_dtype == torch.float64, 1.0
    if in_double:
        rescale, accumulate = accumulate / unit_roundoff(torch.float32), unit_roundoff(torch.float32)
    units = {n: accumulate if in_double else max(unit_roundoff(d), accumulate) for n, d in dtypes.items()}
    operand = max(unit_roundoff(request.q.dtype), accumulate)
    r = in_float64(request)
    grads = {n: t.double() for n, t in call.grads.items()}
    work = r.N * r.HV * (r.T if r.cu_seqlens is None else -(-r.T // r.N)) * (r.K + r.V) if r.N else 1
    samples = max(MIN_SAMPLES, min(MAX_SAMPLES, SAMPLED_ELEMENTS // max(work, 1)))
    found = sample(r, Noise(operand, accumulate, offsets, flushed_below), samples, grads, units)
    if request.op == "fused_recurrent_kda" and operand != accumulate:
        strict = sample(r, Noise(accumulate, accumulate, offsets), samples, {}, units)
        found |= {n: t for n, t in strict.items() if n in found}
    result = {}
    for name, samples_of in found.items():
        if name not in expected:
            continue
        stored_short = in_double and dtypes[name] != torch.float64
        got, exact = samples_of.double(), expected[name]
        got = got if stored_short else _stored(got, dtypes[name])
        if name == "final_state" and advanced:
            got, exact = got[:, advanced], exact[advanced]
        if name == "h" and advanced is not None:
            skipped = _skipped_chunks(call, advanced)
            got, exact = (torch.where(skipped.view(*exact.shape[:2], 1, 1, 1), 0, x) for x in (got, exact))
        errors = _measure(name, got, exact, dtypes[name])
        budget = Budget(max(e.frobenius for e in errors), max(e.worst_row for e in errors)).scaled(rescale)
        if stored_short:
            storing = _measure(name, exact[None].to(dtypes[name]).double(), exact, dtypes[name])[0]
            budget = Budget(budget.frobenius + storing.frobenius, budget.worst_row + storing.worst_row)
        result[name] = budget.scaled(FACTOR)
    return result


def _skipped_chunks(call: Call, advanced: list[int]) -> Tensor:
    """A flag for every chunk, sequence by sequence: whether its sequence is not ``advanced``."""
    size = call.options.get("chunk_size", 64)
    counts = torch.tensor([-(-length // size) for length in call.lengths()])
    skipped = torch.tensor([n not in advanced for n in range(len(counts))], dtype=torch.bool)
    return skipped.repeat_interleave(counts)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` (float64), rounded to the subnormal numbers of ``dtype``, whose relative errors are larger.

    float16 is subnormal below 6e-5, where all gradients of strongly decayed tokens may lie.
    """
    if dtype.itemsize > 4:
        return x
    limits = torch.finfo(dtype)
    step = limits.smallest_normal * limits.eps
    return torch.where(x.abs() < limits.smallest_normal, (x / step).round() * step, x)


def slack_of(slack: tuple[Slack, ...], output: str, dtype: torch.dtype | None) -> Slack | None:
    """The declared slack that applies to an output of a call with inputs of ``dtype``: the widest one."""
    fitting = [s for s in slack if s.output in (output, "*") and s.dtype in (None, dtype)]
    return max(fitting, key=lambda s: s.factor, default=None)


def compare(
    name: str, got: Tensor, expected: Tensor, dtype: torch.dtype, budget: Budget,
    place: Callable[[str, tuple[int, ...]], str], slack: tuple[Slack, ...] = (), inputs: torch.dtype | None = None,
) -> tuple[Error, float, str]:  # fmt: skip
    """The error of a result beside the oracle's, the declared slack, and a sentence where it is outside its budget.

    Args:
        name, got, expected, dtype: as for ``measure``.
        place: the place in the call of an index of the output.
        slack: that the backend declares. inputs: dtype of the call's inputs, which slack depends on.
    """
    error, declared = measure(name, got, expected, dtype), slack_of(slack, name, inputs)
    factor = 1.0 if declared is None else declared.factor
    if error.share(budget) <= factor:
        return error, factor, ""
    there, wanted = (", ".join(f"{x:.4g}" for x in t[error.where].flatten()[:3].tolist()) for t in (got, expected))
    widened = "" if factor == 1 else f", widened by the backend's declared slack {factor}"
    return error, factor, (
        f"{name}: relative error {error.frobenius:.3g} (budget {budget.frobenius:.3g}), worst row "
        f"{error.worst_row:.3g} (budget {budget.worst_row:.3g}){widened} at {place(name, error.where)}: "
        f"got [{there}], expected [{wanted}]"
    )  # fmt: skip

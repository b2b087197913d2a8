"""Plans of calls as the core shows them (``kda explain --plan``)."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch

from kda_core.call_plan import CallPlan, PlannedBuffer, PlannedStep
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import AnyRequest, GateRequest, Request
from kda_core.triton_lib.plan import Launch, Plan, Step
from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS, Chip
from kda_core_nvidia.plans.forward import saved_specs
from kda_core_nvidia.run import chip as chip_of


def describe(request: AnyRequest, chip: str | None) -> tuple[CallPlan, ...]:
    """The plan of a call's forward, and of its backward where the forward saves for one.

    Raises:
        ValueError: ``chip`` is none of CHIPS, or shapes follow from values.
    """
    known = {f"sm_{arch}": facts for arch, facts in CHIPS.items()}
    if chip is not None and chip not in known:
        raise ValueError(f"chip: expected one of {', '.join(known)}, got {chip!r}")
    if isinstance(request, Request) and request.return_intermediate_states and request.cu_seqlens is not None:
        raise ValueError("return_intermediate_states: how many there are follows from the values of cu_seqlens")
    facts = chip_of(request.device) if chip is None else known[chip]
    plans = [_described("forward", plan_of(request, facts), facts)]
    if request.save_for_backward:
        plans.append(_described("backward", plan_of(_backward(request), facts), facts))
    return tuple(plans)


def _backward(request: AnyRequest) -> AnyRequest:
    """The request of a backward of everything, without memory."""
    if isinstance(request, GateRequest):
        grad = torch.empty(request.g.shape, device="meta")
        needs = frozenset(n for n in ("g", "A_log", "dt_bias") if getattr(request, n) is not None)
        return replace(request, grad_output=grad, needs_grad=needs)
    needs = frozenset(n for n in DIFFERENTIABLE if getattr(request, n) is not None)
    saved = saved_specs(request) if request.op == "chunk_kda" else ()
    changed = {
        "saved": tuple(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in saved),
        "grad_o": torch.empty(request.v.shape, dtype=request.v.dtype, device="meta"),
        "needs_grad": needs,
    }
    if request.output_final_state:
        changed["grad_final_state"] = torch.empty(request.state_shape, dtype=request.state_dtype, device="meta")
    return replace(request, **changed)


def _described(name: str, plan: Plan, facts: Chip) -> CallPlan:
    ends = list(accumulate(len(steps) for steps in plan.epochs))
    starts = [0, *ends[:-1]]
    buffers = tuple(
        PlannedBuffer(b.name, b.shape, b.dtype, b.role, (starts[b.epochs[0]], max(0, ends[b.epochs[1]] - 1)), b.nbytes)
        for b in plan.buffers.values()
    )
    return CallPlan(
        name, f"sm_{facts.arch}", tuple(map(_step, plan.steps)), buffers, plan.bytes_moved, plan.bytes_floor,
        plan.peak_scratch,
    )  # fmt: skip


def _step(step: Step) -> PlannedStep:
    if isinstance(step, Launch):
        return PlannedStep(step.name, step.grid, step.num_warps, step.constants.get("maxnreg"))
    return PlannedStep(type(step).__name__.lower())

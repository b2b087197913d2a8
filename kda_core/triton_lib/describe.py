"""Plans of calls as the core shows them (``kda explain --plan``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from kda_core.call_plan import CallPlan, PlannedBuffer, PlannedStep
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import AnyRequest, GateRequest, Request, TensorSpec
from kda_core.triton_lib.plan import Launch, Plan, Step


def describe(
    request: AnyRequest,
    chip: Any,
    plan_of: Callable[[AnyRequest, Any], Plan],
    saved_specs: Callable[[Request], tuple[TensorSpec, ...]],
) -> tuple[CallPlan, ...]:
    """The plan of a call's forward, and of its backward where the forward saves for one.

    Args:
        chip: its facts, with a ``name``.
        saved_specs: of what a forward of ``chunk_kda`` saves.

    Raises:
        ValueError: shapes follow from values.
    """
    if isinstance(request, Request) and request.return_intermediate_states and request.cu_seqlens is not None:
        raise ValueError("return_intermediate_states: how many there are follows from the values of cu_seqlens")
    plans = [_described("forward", plan_of(request, chip), chip)]
    if request.save_for_backward:
        plans.append(_described("backward", plan_of(_backward(request, saved_specs), chip), chip))
    return tuple(plans)


def _backward(request: AnyRequest, saved_specs: Callable[[Request], tuple[TensorSpec, ...]]) -> AnyRequest:
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


def _described(name: str, plan: Plan, chip: Any) -> CallPlan:
    ends = list(accumulate(len(steps) for steps in plan.epochs))
    starts = [0, *ends[:-1]]
    buffers = tuple(
        PlannedBuffer(b.name, b.shape, b.dtype, b.role, (starts[b.epochs[0]], max(0, ends[b.epochs[1]] - 1)), b.nbytes)
        for b in plan.buffers.values()
    )
    return CallPlan(
        name, chip.name, tuple(map(_step, plan.steps)), buffers, plan.bytes_moved, plan.bytes_floor,
        plan.peak_scratch,
    )  # fmt: skip


def _step(step: Step) -> PlannedStep:
    if isinstance(step, Launch):
        return PlannedStep(step.name, step.grid, step.num_warps, step.constants.get("maxnreg"))
    return PlannedStep(type(step).__name__.lower())

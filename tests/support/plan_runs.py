"""Runs a plan that a test has made, outside of the calls that find plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from kda_core.triton_lib.plan import Plan
from kda_core.triton_lib.run import PublicPlan, Results, is_current


def run_plan(plan: Plan, request: Any, bind: Callable[..., Callable[..., Results]] = PublicPlan) -> Results:
    """Run a plan that was made for ``request``, once; its results by name."""
    tensors = {n: x for n, x in vars(request).items() if isinstance(x, torch.Tensor)}
    tensors |= {f"saved[{i}]": x for i, x in enumerate(getattr(request, "saved", ()))}
    inputs = [tensors[n] for n in plan.inputs]
    with nullcontext() if is_current(request.device) else torch.cuda.device(request.device):
        return bind(plan, tuple(plan.inputs), request.device)(inputs, [x.data_ptr() for x in inputs])


def run_on_nvidia(plan: Plan, request: Any) -> Results:
    """The same as the calls of that backend run it."""
    from kda_core_nvidia.run import Bound

    return run_plan(plan, request, Bound)

"""The short convolution and the gated RMS norm of a layer: the plans of ``kda_core.triton_lib.layer_plans``."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from kda_core.request import BackwardResult, ForwardResult, GatedNormRequest, LayerRequest, ShortConvolutionRequest
from kda_core.triton_lib.layer_plans import plan_of_layer
from kda_core.triton_lib.plan import Launch, View, metadata
from kda_core_amd import launch
from kda_core_amd.choose import Config

LANES = 128
"""Lanes of a program: two waves of 64, four of 32."""


def _run(request: LayerRequest) -> dict[str, Tensor | None]:
    """Run the plan of a call; its results by name."""
    target = launch.architecture(request.device)
    warps = LANES // target.wave
    plan = plan_of_layer(metadata(request), target.wave, warps)
    held = {f.name: value for f in fields(request) if isinstance(value := getattr(request, f.name), Tensor)}
    held |= {b.name: torch.empty(b.shape, dtype=b.dtype, device=request.device) for b in plan.buffers.values()}

    def tensor(x: View) -> Tensor:
        base = held[x.source]
        return base.as_strided(x.shape, x.strides, base.storage_offset() + x.offset)

    with launch.on_device(request.device):
        for step in plan.steps:
            if isinstance(step, Launch):
                named = (step.arguments[n] for n in step.kernel.arg_names if n in step.arguments)
                arguments = tuple(tensor(x) if isinstance(x, View) else x for x in named)
                launch.launch(step.kernel, step.grid[0], arguments, dict(step.constants), Config(0, warps), target)
            else:
                step.run(*map(tensor, step.views()))
    return {n: None if name is None else held[name] for n, name in plan.results.items()}


def short_convolution_forward(request: ShortConvolutionRequest) -> ForwardResult:
    """Run ``kda_core.nn.short_convolution``."""
    made = _run(request)
    return ForwardResult(o=made["y"], final_state=made["final"])


def short_convolution_backward(request: ShortConvolutionRequest) -> BackwardResult:
    """Run its backward."""
    grads = _run(request)
    return BackwardResult({**grads, "weight": grads["weight"].t()})


def gated_rms_norm_forward(request: GatedNormRequest) -> Tensor:
    """Run ``kda_core.nn.gated_rms_norm``."""
    return _run(request)["y"]


def gated_rms_norm_backward(request: GatedNormRequest) -> BackwardResult:
    """Run its backward."""
    return BackwardResult(_run(request))

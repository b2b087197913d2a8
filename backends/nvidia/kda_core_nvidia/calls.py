"""Calls of this backend: choose, plan, run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kda_core.request import (
    AnyRequest,
    BackwardResult,
    ForwardResult,
    GatedNormRequest,
    GateRequest,
    LayerRequest,
    Request,
    ShortConvolutionRequest,
)
from kda_core.triton_lib.layer_plans import plan_of_layer
from kda_core.triton_lib.layout import intermediate_states_shape
from kda_core.triton_lib.plan import Plan, metadata
from kda_core_nvidia.choose import Chip, choose_backward, choose_forward, choose_recurrent
from kda_core_nvidia.plans.backward import plan_backward
from kda_core_nvidia.plans.forward import plan_forward
from kda_core_nvidia.plans.gate import plan_gate_backward, plan_gate_forward
from kda_core_nvidia.plans.recurrent import plan_recurrent
from kda_core_nvidia.run import execute

LAYER_WARPS = 4
"""Warps of a program of the kernels around the operator in a layer."""


def plan_of(request: AnyRequest | LayerRequest, on: Chip, misaligned: frozenset[str] = frozenset()) -> Plan:
    """The plan of a call; pure, of the call's metadata and the chip.

    Args:
        request: forward, or backward where it has ``needs_grad``; its tensors may be fake.
        misaligned: names of the tensors whose addresses are not multiples of 16 bytes.
    """
    r = metadata(request, misaligned)
    if isinstance(r, LayerRequest):
        return plan_of_layer(r, 32, LAYER_WARPS)
    if isinstance(r, GateRequest):
        return plan_gate_backward(r) if r.needs_grad else plan_gate_forward(r)
    if r.needs_grad:
        r = replace(r, op="chunk_kda")
        return plan_backward(r, choose_backward(r, on))
    if r.op == "fused_recurrent_kda":
        return plan_recurrent(r, choose_recurrent(r, on))
    return plan_forward(r, choose_forward(r, on), _h_shape(request))


def _h_shape(request: Request) -> tuple[int, ...]:
    """Shape of the intermediate states; () where none are asked for."""
    return intermediate_states_shape(request) if request.return_intermediate_states else ()


def _kind(request: Request, name: Hashable) -> Hashable:
    """The key of a call's plan. The sign of a scale that is 0 matters, and 0.0 and -0.0 are of one signature."""
    return name if request.scale else (name, str(float(request.scale)))


_CHUNK = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "ssm_state_indices", "out")
_chunk_inputs = attrgetter(*_CHUNK)


def chunk_forward(request: Request) -> ForwardResult:
    """Run ``chunk_kda`` for a call that the plugin accepted."""
    key: Hashable = "forward"
    if request.return_intermediate_states:
        # The shape of h follows from values.
        key = key, _h_shape(request)
    made = execute(request, _kind(request, key), _CHUNK, _chunk_inputs(request), plan_of)
    o, final_state, h, *kept = made.values()
    saved = tuple([x for x in kept if x is not None]) if kept else ()
    return ForwardResult(o=o, final_state=None if request.inplace_final_state else final_state, h=h, saved=saved)


_BACKWARD = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "grad_o", "grad_final_state"),
)
_backward_inputs = attrgetter(*_BACKWARD)
_SAVED = tuple((*_BACKWARD, *(f"saved[{i}]" for i in range(n))) for n in range(9))
"""Names of a backward's inputs, by the number of tensors that the forward saved."""


def _gradient_kind(x: Tensor | None) -> Any:
    """What a plan follows from of a gradient that is given: its shape follows from the call's."""
    return None if x is None else (x.is_contiguous() or x.stride(), x.dtype)


def chunk_backward(request: Request) -> BackwardResult:
    """Gradients of ``chunk_kda`` for ``request.grad_o`` and ``request.grad_final_state`` (either may be None).

    Returns:
        gradients of q, k, v, g, beta, and of A_log, dt_bias and initial_state where the call has them, each in the
        shape and dtype of its input (dt_bias as [HV, K]), contiguous.
    """
    if torch.is_grad_enabled():
        # Autograd has it off already, and the context takes as long as a launch.
        with torch.no_grad():
            return chunk_backward(request)
    given = _gradient_kind(request.grad_o), _gradient_kind(request.grad_final_state)
    key = "backward", *given, "initial_state" in request.needs_grad
    inputs = (*_backward_inputs(request), *request.saved)
    return BackwardResult(grads=execute(request, _kind(request, key), _SAVED[len(request.saved)], inputs, plan_of))


_RECURRENT = (*_CHUNK, "num_accepted_tokens")
_recurrent_inputs = attrgetter(*_RECURRENT)


def recurrent_forward(request: Request) -> ForwardResult:
    """Run ``fused_recurrent_kda`` for a call that the plugin accepted."""
    made = execute(request, _kind(request, "forward"), _RECURRENT, _recurrent_inputs(request), plan_of)
    return ForwardResult(o=made["o"], final_state=None if request.inplace_final_state else made["final_state"])


recurrent_backward: Callable[[Request], BackwardResult] = chunk_backward
"""Gradients of ``fused_recurrent_kda``: the same function as ``chunk_kda``, so the same backward.

Its other arguments (a pool, ``num_accepted_tokens``) are not differentiable and never come this far.
"""


_GATE = ("g", "A_log", "dt_bias", "grad_output")
_gate_inputs = attrgetter(*_GATE)


def _gate(request: GateRequest) -> dict[str, Tensor]:
    return execute(request, "gate", _GATE, _gate_inputs(request), plan_of)


def gate_forward(request: GateRequest) -> Tensor:
    """Run ``kda_gate``: float32, shape of g."""
    return _gate(request)["log_decay"]


def gate_backward(request: GateRequest) -> BackwardResult:
    """Run the backward of ``kda_gate`` for ``request.needs_grad``."""
    return BackwardResult(_gate(request))


_CONVOLUTION = ("x", "weight", "bias", "initial_state", "cu_seqlens", "grad_output", "grad_final_state")
_convolution_inputs = attrgetter(*_CONVOLUTION)


def _convolve(request: ShortConvolutionRequest) -> dict[str, Tensor | None]:
    key = _gradient_kind(request.grad_output), _gradient_kind(request.grad_final_state)
    return execute(request, key, _CONVOLUTION, _convolution_inputs(request), plan_of)


def short_convolution_forward(request: ShortConvolutionRequest) -> ForwardResult:
    """Run ``kda_core.nn.short_convolution``."""
    made = _convolve(request)
    return ForwardResult(o=made["y"], final_state=made["final"])


def short_convolution_backward(request: ShortConvolutionRequest) -> BackwardResult:
    """Run its backward."""
    grads = _convolve(request)
    return BackwardResult({**grads, "weight": grads["weight"].t()})


_NORM = ("x", "gate", "weight", "grad_output")
_norm_inputs = attrgetter(*_NORM)


def _norm(request: GatedNormRequest) -> dict[str, Tensor]:
    return execute(request, _gradient_kind(request.grad_output), _NORM, _norm_inputs(request), plan_of)


def gated_rms_norm_forward(request: GatedNormRequest) -> Tensor:
    """Run ``kda_core.nn.gated_rms_norm``."""
    return _norm(request)["y"]


def gated_rms_norm_backward(request: GatedNormRequest) -> BackwardResult:
    """Run its backward."""
    return BackwardResult(_norm(request))

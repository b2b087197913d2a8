"""``kda_gate`` on its own: the kernels of ``kda_core.triton_lib.gate_kernels``."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from kda_core.request import BackwardResult, GateRequest
from kda_core.triton_lib.gate_kernels import backward, forward, gate_backward_kernel, gate_forward_kernel
from kda_core_amd import launch
from kda_core_amd.choose import GATE


def _launch(
    kernel: Any, request: GateRequest, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    launch.launch(kernel, programs, arguments, constants, GATE, launch.architecture(request.device))


def gate_forward(request: GateRequest) -> Tensor:
    """Run ``kda_gate``: float32, shape of g."""
    with launch.on_device(request.device):
        return forward(request, partial(_launch, gate_forward_kernel, request))


def gate_backward(request: GateRequest) -> BackwardResult:
    """Run the backward of ``kda_gate`` for ``request.needs_grad``."""
    with launch.on_device(request.device):
        return backward(request, partial(_launch, gate_backward_kernel, request))

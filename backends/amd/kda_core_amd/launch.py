"""Facts of the device at hand, and launches."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from kda_core_amd.choose import ARCHITECTURES, FOREIGN_ARCHITECTURE, Architecture, Config, compile_options
from kda_core_amd.switches import FOREIGN, INTERPRET


@cache
def architecture(device: torch.device) -> Architecture:
    """The architecture of ``device``; the interpreter stands in for gfx942."""
    if INTERPRET:
        return ARCHITECTURES["gfx942"]
    if FOREIGN and torch.version.hip is None:
        return ARCHITECTURES[FOREIGN_ARCHITECTURE]
    return ARCHITECTURES[torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]]


@cache
def compute_units(device: torch.device) -> int:
    """Compute units of ``device``: what its programs spread over."""
    return 304 if INTERPRET else torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device):
    """Make ``device`` current for launches, at no cost when it already is."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    chosen: Config,
    target: Architecture,
) -> None:
    """Launch ``programs`` programs along axis 0.

    Args:
        kernel: the kernel.
        arguments: its first parameters, in order.
        constants: its remaining parameters, all constexpr.
        chosen: its configuration.
        target: what it runs on.
    """
    if programs == 0:
        return
    if INTERPRET:
        kernel[(programs,)](*arguments, **constants)
        return
    kernel[(programs,)](*arguments, **constants, **compile_options(chosen, target))

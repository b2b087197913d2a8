"""Calls over several devices: found without an import of torch.distributed, which few programs need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kda_core.request import GateRequest, Request


def over_devices() -> Any:
    """The module that serves calls with a context."""
    from kda_core.distributed import _call

    return _call


def is_sharded(t: Any) -> bool:
    """Whether ``t`` is a DTensor."""
    return type(t) is not Tensor and hasattr(t, "device_mesh")


def on_shards(r: Request | GateRequest, function: Callable[..., Any], backend: Any) -> Any:
    """Make a call of DTensors on each rank's shards; what ``function`` returns, as DTensors."""
    from kda_core.distributed import _shards

    return _shards.run(r, function, backend)

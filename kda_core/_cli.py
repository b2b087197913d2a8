"""The facts that ``kda info`` shows; nothing here needs the extra ``cli``."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from kda_core import _checked, _plugins, hookspecs, platforms
from kda_core._contract import found_entry_points
from kda_core._explain import default_device
from kda_core._ledger import said_by
from kda_core.capabilities import FOREIGN_VARIABLE, Available, BackendInfo, Unavailable
from kda_core.errors import BackendNotFound, BrokenBackend, UnsupportedCall
from kda_core.integrations import integrations

EXIT_BAD_ARGUMENTS = 2

ENVIRONMENT_VARIABLES = {
    _plugins.ENVIRONMENT_VARIABLE: "backend of every call that names none",
    _checked.VARIABLE: "1: compare every call with the float64 reference; warn: warn where it is off",
    _checked.DUMP_VARIABLE: "file for the first call that fails its check",
    FOREIGN_VARIABLE: "backends that may run on devices that they are not made for, for tests",
    "KDA_TEST_MODE": "tier of the conformance kit: fast, slow or all",
    "TRITON_INTERPRET": "1: Triton kernels run in its interpreter, on the CPU",
}
"""Variables that change what kda_core, its kit or its kernels do."""

DISTRIBUTIONS = ("kda-core", "torch", "triton", "pluggy", "packaging")
"""Distributions whose versions matter in a bug report."""


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, which is not imported; None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def machine_devices() -> list[torch.device]:
    """Every device of this machine, accelerators first."""
    devices = []
    for device_type in platforms.device_types():
        count = 1 if device_type == "cpu" else torch.accelerator.device_count()
        devices += [torch.device(device_type, i) if device_type != "cpu" else torch.device("cpu") for i in range(count)]
    return devices


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    runtime = torch.get_device_module(device)
    return runtime.get_device_name(device) if hasattr(runtime, "get_device_name") else device.type


def info(registry: _plugins.Registry = _plugins.registry) -> dict[str, Any]:
    """Everything that ``kda info`` shows, ready for JSON. Asks the machine's devices for their names."""
    devices = machine_devices()
    default, reason = _default_device()
    return {
        "versions": versions(),
        "devices": [{"device": str(d), "name": device_name(d)} for d in devices],
        "default_device": default,
        "default_device_reason": reason,
        "backends": [*_backends(registry, devices)],
        "entry_points": [
            {n: getattr(e, n) for n in ("name", "value", "group")}
            | {"distribution": f"{e.dist.name} {e.dist.version}" if e.dist else None}
            for e in found_entry_points()
        ],
        "integrations": [dataclasses.asdict(found) for found in integrations()],
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT_VARIABLES},
        "platform": platforms.flags(),
    }


def _default_device() -> tuple[str | None, str]:
    try:
        return str(default_device()), ""
    except (UnsupportedCall, BackendNotFound, BrokenBackend) as error:
        return None, str(error)
    # It asks the backends' hooks, which may raise anything; a report on what is wrong must survive that and say so.
    except Exception as error:
        return None, f"a backend failed when it was asked: {said_by(error)}"


def versions() -> dict[str, str | None]:
    return {
        **{name: version_of(name) for name in DISTRIBUTIONS},
        "plugin contract": str(hookspecs.CONTRACT_VERSION),
        "CUDA (of torch)": torch.version.cuda,
        "HIP (of torch)": torch.version.hip,
        "Python": platform.python_version(),
    }


def _backends(registry: _plugins.Registry, devices: list[torch.device]) -> Iterator[dict[str, Any]]:
    """Those of the ledger, then wheels that are not installed."""
    loaded = {b.info.name: b for b in registry.backends}
    for entry in registry.ledger:
        backend = loaded.get(entry.name) if entry.state == "loaded" else None
        answers = [] if backend is None else [_availability(backend, d) for d in backend.devices_among(devices)]
        found = {n: getattr(entry, n) for n in ("name", "state", "reason", "distribution", "entry_point")}
        yield found | ({} if entry.info is None else _identity(entry.info)) | {"availability": answers}
    for wheel, name in platforms.BACKEND_OF_WHEEL.items():
        if all(entry.name != name for entry in registry.ledger):
            yield {"name": name, "state": "not installed", "reason": platforms.install_command(wheel)}


def _availability(backend: _plugins.Backend, device: torch.device) -> dict[str, Any]:
    try:
        answer: Available | Unavailable = backend.availability(device)
    # The hook may return anything.
    except Exception as error:
        answer = Unavailable(f"kda_core_availability failed: {said_by(error)}")
    detail = answer.detail if isinstance(answer, Available) else answer.reason
    return {"device": str(device), "available": isinstance(answer, Available), "detail": detail}


def _identity(card: BackendInfo) -> dict[str, Any]:
    c = card.capabilities
    return {
        "version": card.version,
        "contract": str(card.contract),
        "device_types": list(card.device_types),
        "priority": card.priority,
        "summary": card.summary,
        "dtypes": sorted(str(d).removeprefix("torch.") for d in c.dtypes),
        "max_head_dim_k": c.max_head_dim_k,
        "max_head_dim_v": c.max_head_dim_v,
        "features": sorted(f.name for f in c.features),
        "closed": {f.name: reason for f, reason in c.closed.items()},
        "slack": [
            dataclasses.asdict(s) | {"dtype": None if s.dtype is None else str(s.dtype).removeprefix("torch.")}
            for s in card.slack
        ],
    }

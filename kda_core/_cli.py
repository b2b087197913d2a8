"""The facts that ``kda info`` shows, and the calls that ``kda explain`` asks about, without the extra ``cli``.

The tensors of such a call are fake: one of any size, on a device that this machine may not have, takes no memory.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from kda_core import _checked, _expect, _plugins, hookspecs, platforms
from kda_core._contract import found_entry_points
from kda_core._explain import default_device
from kda_core._ledger import said_by
from kda_core._torch_private import fake_group, fake_tensors
from kda_core.capabilities import FOREIGN_VARIABLE, Available, BackendInfo, Unavailable
from kda_core.errors import BackendNotFound, BrokenBackend, UnsupportedCall
from kda_core.integrations import integrations
from kda_core.request import DATA, DIFFERENTIABLE

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


DATA_DTYPES = {str(d).removeprefix("torch."): d for d in _expect.DATA_DTYPES}

MOST_BYTES = 2**62
"""Bytes of a tensor: torch counts them in 64 bits with a sign, and a strided tensor has twice as many."""


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


def example_call(
    function: Callable[..., Any], options: Mapping[str, Any], *, sizes: tuple[int, int, int, int, int],
    device: torch.device, HV: int | None = None, dtype: str = "float32", gate_dtype: str | None = None,
    state_dtype: str = "float32", bounds: tuple[int, ...] | None = None, slots: int | None = None,
    slots_per_sequence: int = 1, strided: bool = False, backward: bool = False, present: Collection[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of a public function of kda_core: tensors of these sizes B, T, H, K, V, and ``options``.

    The options of ``kda explain`` say what the others mean; ``present``: names of the optional tensors to pass.

    Raises:
        ValueError: a size, a dtype or ``bounds`` is wrong, or the function has no such argument.
    """
    parameters = inspect.signature(function).parameters
    # kda_gate takes only g of q, k, v, g and beta; any other argument that a function does not take is an error.
    if unknown := sorted({*present, *options} - parameters.keys()):
        raise ValueError(f"{', '.join(unknown)}: not taken by {function.__name__}")
    B, T, H, K, V = sizes
    HV, data, states = H if HV is None else HV, _dtype(dtype), _dtype(state_dtype)
    gate_data = data if gate_dtype is None else _dtype(gate_dtype)
    # Fake tensors hold no values for the call's own checks.
    if bounds is not None and (not bounds or bounds[0] != 0 or bounds[-1] > T or sorted(bounds) != [*bounds]):
        raise ValueError(f"cu_seqlens: expected values from 0 to at most T = {T} that do not decrease, got {bounds}")
    N = B if bounds is None else len(bounds) - 1
    rows = N if slots is None else slots

    def tensor(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        if math.prod(max(n, 1) for n in size) * dtype.itemsize > MOST_BYTES:
            raise ValueError(f"shape: expected tensors of less than 2**62 bytes, got one of {list(size)}")
        return torch.empty(size, dtype=dtype, device=device)

    def activation(*size: int) -> Tensor:
        if not strided:
            return tensor(*size, dtype=data)
        wider = tensor(*size[:-1], 2 * size[-1], dtype=data)
        return torch.empty_strided(size, wider.stride(), dtype=data, device=device)

    with fake_tensors():
        made = {
            "q": activation(B, T, H, K), "k": activation(B, T, H, K), "v": activation(B, T, HV, V),
            "g": tensor(B, T, HV, K, dtype=gate_data), "beta": tensor(B, T, HV, dtype=gate_data),
            "A_log": tensor(HV, dtype=torch.float32), "dt_bias": tensor(HV, K, dtype=torch.float32),
            "initial_state": tensor(rows, HV, *((V, K) if options.get("state_v_first") else (K, V)), dtype=states),
            "ssm_state_indices": tensor(N, slots_per_sequence), "final_state_indices": tensor(N, slots_per_sequence),
            "num_accepted_tokens": tensor(N, dtype=torch.int32), "num_committed": tensor(N, dtype=torch.int32),
            "has_initial_state": tensor(N, dtype=torch.bool), "parents": tensor(N, T), "commit_path": tensor(N, T),
            "cu_seqlens": tensor(N + 1), "cu_seqlens_cpu": torch.empty(N + 1, dtype=torch.int64),
            "out": tensor(B, T, HV, V, dtype=data), "checkpoint_indices": tensor(N, 1),
        }  # fmt: skip
        made["records"] = tensor(B, T, HV, 2 * K + V, dtype=torch.float64 if data == torch.float64 else torch.float32)
        made["commit"] = torch.empty_like(made["records"])
        for name in ("checkpoint_pool", "final_state_pool"):
            made[name] = torch.empty_like(made["initial_state"])
        # Last, so that no view follows: recording one on a device that torch was not built for ends the process.
        for name in DIFFERENTIABLE:
            made[name].requires_grad_(backward)
    passed = {name: t for name, t in made.items() if name in (*DATA, *present)} | dict(options)
    return {name: value for name, value in passed.items() if name in parameters}


@contextmanager
def example_context(sizes: tuple[int, ...], device: torch.device, ranks: int) -> Iterator[Any]:
    """A context of as many ranks, of which this one alone is there, with rows of these sizes."""
    from kda_core.distributed import build_cp_context

    with fake_group(ranks):
        context = build_cp_context(tokens=sizes[1] * ranks, batch=sizes[0], device="cpu")
        with fake_tensors():
            for name in ("fragments", "slots"):
                table = getattr(context, name)
                setattr(context, name, torch.empty(table.shape, dtype=table.dtype, device=device))
        yield context


def _dtype(name: str) -> torch.dtype:
    if name not in DATA_DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DATA_DTYPES)}, got {name!r}")
    return DATA_DTYPES[name]

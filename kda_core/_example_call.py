"""The arguments of a call, made out of sizes and switches: what ``kda explain`` asks about.

The tensors are fake: a call of any size, on a device that this machine may not have, takes no memory.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kda_core import _expect
from kda_core._torch_private import fake_group, fake_tensors
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import DATA

DATA_DTYPES = {str(d).removeprefix("torch."): d for d in _expect.DATA_DTYPES}

MOST_BYTES = 2**62
"""Bytes of a tensor: torch counts them in 64 bits with a sign, and a strided tensor has twice as many."""


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

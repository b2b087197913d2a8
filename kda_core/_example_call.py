"""The arguments of a call, made out of sizes and switches: what ``kda explain`` asks about.

The tensors are fake: a call of any size, on a device that this machine may not have, takes no memory.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """Sizes, dtypes and the optional tensors of a call: everything but its flags and numbers.

    Attributes:
        sizes: B, T, H, K, V.
        HV: value heads; None: H.
        dtype: of q, k, v and out.
        gate_dtype: of g and beta; None: that of q.
        state_dtype: of the initial state or the pool.
        device: of every tensor but ``cu_seqlens_cpu``.
        bounds: values of ``cu_seqlens``, or None.
        slots: size of the pool that ``ssm_state_indices`` points into, or None.
        slots_per_sequence: columns of ``ssm_state_indices``.
        strided: q, k and v are slices of wider tensors.
        backward: floating inputs require a gradient.
        present: names of the optional tensors to pass.
    """

    sizes: tuple[int, int, int, int, int]
    HV: int | None = None
    dtype: str = "float32"
    gate_dtype: str | None = None
    state_dtype: str = "float32"
    device: torch.device
    bounds: tuple[int, ...] | None = None
    slots: int | None = None
    slots_per_sequence: int = 1
    strided: bool = False
    backward: bool = False
    present: frozenset[str] = frozenset()


def example_call(function: Callable[..., Any], shape: CallShape, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a public function of kda_core: tensors of that shape, and ``options``.

    Raises:
        ValueError: a size, a dtype or ``bounds`` is wrong, or the function has no such argument.
    """
    parameters = inspect.signature(function).parameters
    # kda_gate takes only g of q, k, v, g and beta; any other argument that a function does not take is an error.
    if unknown := sorted({*shape.present, *options} - parameters.keys()):
        raise ValueError(f"{', '.join(unknown)}: not taken by {function.__name__}")
    made = _tensors(shape, bool(options.get("state_v_first")))
    passed = {name: t for name, t in made.items() if name in (*DATA, *shape.present)} | dict(options)
    return {name: value for name, value in passed.items() if name in parameters}


@contextmanager
def example_context(shape: CallShape, ranks: int) -> Iterator[Any]:
    """A context of as many ranks, of which this one alone is there, with rows of that shape."""
    from kda_core.distributed import build_cp_context

    B, T = shape.sizes[:2]
    with fake_group(ranks):
        context = build_cp_context(tokens=T * ranks, batch=B, device="cpu")
        with fake_tensors():
            for name in ("fragments", "slots"):
                table = getattr(context, name)
                setattr(context, name, torch.empty(table.shape, dtype=table.dtype, device=shape.device))
        yield context


def _tensors(shape: CallShape, v_first: bool) -> dict[str, Tensor]:
    B, T, H, K, V = shape.sizes
    HV = H if shape.HV is None else shape.HV
    data, state_dtype = _dtype(shape.dtype), _dtype(shape.state_dtype)
    gate_data = data if shape.gate_dtype is None else _dtype(shape.gate_dtype)
    _check_bounds(shape)
    N = B if shape.bounds is None else len(shape.bounds) - 1
    rows = N if shape.slots is None else shape.slots

    def tensor(*size: int, dtype: torch.dtype) -> Tensor:
        if math.prod(max(n, 1) for n in size) * dtype.itemsize > MOST_BYTES:
            raise ValueError(f"shape: expected tensors of less than 2**62 bytes, got one of {list(size)}")
        return torch.empty(size, dtype=dtype, device=shape.device)

    def activation(*size: int) -> Tensor:
        if not shape.strided:
            return tensor(*size, dtype=data)
        wider = tensor(*size[:-1], 2 * size[-1], dtype=data)
        return torch.empty_strided(size, wider.stride(), dtype=data, device=shape.device)

    with fake_tensors():
        made = {
            "q": activation(B, T, H, K), "k": activation(B, T, H, K), "v": activation(B, T, HV, V),
            "g": tensor(B, T, HV, K, dtype=gate_data), "beta": tensor(B, T, HV, dtype=gate_data),
            "A_log": tensor(HV, dtype=torch.float32), "dt_bias": tensor(HV, K, dtype=torch.float32),
            "initial_state": tensor(rows, HV, *((V, K) if v_first else (K, V)), dtype=state_dtype),
            "ssm_state_indices": tensor(N, shape.slots_per_sequence, dtype=torch.int64),
            "num_accepted_tokens": tensor(N, dtype=torch.int32), "cu_seqlens": tensor(N + 1, dtype=torch.int64),
            "has_initial_state": tensor(N, dtype=torch.bool),
            "final_state_indices": tensor(N, shape.slots_per_sequence, dtype=torch.int64),
            "cu_seqlens_cpu": torch.empty(N + 1, dtype=torch.int64), "out": tensor(B, T, HV, V, dtype=data),
        }  # fmt: skip
        made["records"] = tensor(B, T, HV, 2 * K + V, dtype=torch.float64 if data == torch.float64 else torch.float32)
        made["commit"], made["num_committed"] = torch.empty_like(made["records"]), tensor(N, dtype=torch.int32)
        made["parents"], made["commit_path"] = tensor(N, T, dtype=torch.int64), tensor(N, T, dtype=torch.int64)
        made["checkpoint_indices"] = tensor(N, 1, dtype=torch.int64)
        made["checkpoint_pool"] = torch.empty_like(made["initial_state"])
        made["final_state_pool"] = torch.empty_like(made["initial_state"])
        # Last, so that no view follows: recording one on a device that torch was not built for ends the process.
        for name in DIFFERENTIABLE:
            made[name].requires_grad_(shape.backward)
    return made


def _dtype(name: str) -> torch.dtype:
    if name not in DATA_DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DATA_DTYPES)}, got {name!r}")
    return DATA_DTYPES[name]


def _check_bounds(shape: CallShape) -> None:
    """Check the boundaries: fake tensors hold no values for the call's own checks."""
    bounds, T = shape.bounds, shape.sizes[1]
    if bounds is None:
        return
    if not bounds or bounds[0] != 0 or bounds[-1] > T or any(b < a for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens: expected values from 0 to at most T = {T} that do not decrease, got {bounds}")

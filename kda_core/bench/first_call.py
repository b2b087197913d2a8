"""Suite ``first-call``: time of a process's first call with an empty Triton cache, and later compilations.

Every row is a fresh process: one runs the forward, another forward and backward. The second goes on with ``--calls``
training steps of random T and as many with random packings of up to ten sequences, and counts the kernels that each
compiled. The clock starts after torch is imported and the device is started. A backend without Triton compiles nothing.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core.bench import fresh_process
from kda_core.bench.session import Row, Session, Task
from kda_core.bench.shapes import Shape

CACHE = "TRITON_CACHE_DIR"
DEFAULT = Shape(1, 2048, 16, 128)
QUICK = Shape(1, 70, 2, 16)


def tasks(session: Session) -> list[Task]:
    """The forward, and the training step."""
    options = session.options
    shapes = options.shapes or [QUICK if options.quick else DEFAULT]
    if any(shape.lengths or shape.pool or shape.HV != shape.H or shape.V != shape.K for shape in shapes):
        raise ValueError("shapes: the suite first-call takes B,T,H,K alone")
    return [
        Task(f"first call {shape} {name}", functools.partial(measure, shape, backward, session))
        for shape in shapes
        for name, backward in (("forward", False), ("forward and backward", True))
    ]


def measure(shape: Shape, backward: bool, session: Session) -> Row:
    """The measurements of a fresh process with an empty cache."""
    options = session.options
    calls = options.calls or (3 if options.quick else 100)
    told = {
        "sizes": (shape.B, shape.T, shape.H, shape.K),
        "device": str(session.device),
        "backend": options.backend,
        "backward": backward,
        "calls": calls,
    }
    row: Row = {"suite": "first-call", "shape": str(shape), "backward": backward, "calls": calls}
    with tempfile.TemporaryDirectory() as cache:
        try:
            return row | fresh_process.measure("first_call", told, os.environ | {CACHE: cache})
        except fresh_process.ProcessFailed as error:
            return row | {"failed": str(error)}


def child(options: dict[str, Any]) -> dict[str, float]:
    """In a fresh process: seconds and kernels of its first call, and kernels of later ones."""
    device = torch.device(options["device"])
    torch.ones(1, device=device).sum().item()
    tensors = _inputs(options["sizes"], device)
    start = time.perf_counter()
    _step(tensors, options)
    torch.ones(1, device=device).sum().item()  # waits for the device
    found: dict[str, float] = {"seconds": time.perf_counter() - start, "kernels": _compiled()}
    if options["backward"]:
        found |= _later(options, device)
    return found


def _compiled() -> int:
    """Kernels in the cache of this process."""
    # Every kernel has one such file, Triton's and Gluon's alike.
    return len(list(Path(os.environ[CACHE]).rglob("__grp__*.json")))


def _inputs(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """q, k, v, g and beta."""
    B, T, H, K = sizes
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(B, T, H, K, **kind, requires_grad=True) for _ in range(3))
    g = (-5 * torch.rand(B, T, H, K, **kind)).requires_grad_()
    return [q, k, v, g, torch.rand(B, T, H, **kind, requires_grad=True)]


def _step(tensors: list[Tensor], options: dict[str, Any], cu_seqlens: Tensor | None = None) -> None:
    """A call, and its backward if asked for."""
    q, k, v, g, beta = tensors
    with torch.set_grad_enabled(options["backward"]):
        o = kda_core.chunk_kda(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens, backend=options["backend"]
        )[0]
    if options["backward"]:
        torch.autograd.grad(o, tensors, torch.ones_like(o))


def _later(options: dict[str, Any], device: torch.device) -> dict[str, int]:
    """Kernels that other lengths compile after the first call."""
    B, T, H, K = options["sizes"]
    draw = random.Random(0)
    before = _compiled()
    for _ in range(options["calls"]):
        _step(_inputs((B, draw.randint(1, 2 * T), H, K), device), options)
    found = {"later_random_T": _compiled() - before}
    before = _compiled()
    for _ in range(options["calls"]):
        lengths = [draw.randint(1, max(1, T // 4)) for _ in range(draw.randint(1, 10))]
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
        _step(_inputs((1, sum(lengths), H, K), device), options, cu_seqlens)
    return found | {"later_random_packings": _compiled() - before}


def tables(rows: list[Row], content: dict[str, Any]) -> list[Any]:
    """One line a process."""
    from rich.table import Table

    columns = ("B,T,H,K", "call", "seconds", "kernels", "compiled by later T", "by later packings")
    table = Table(*columns, title="first-call: a fresh process, an empty cache", title_justify="left")
    for row in rows:
        what = "forward and backward" if row["backward"] else "forward"
        if "failed" in row:
            table.add_row(row["shape"], what, "fails")
            continue
        later = [f"{row[n]} in {row['calls']}" if n in row else "" for n in ("later_random_T", "later_random_packings")]
        table.add_row(row["shape"], what, f"{row['seconds']:.1f}", str(row["kernels"]), *later)
    return [table]

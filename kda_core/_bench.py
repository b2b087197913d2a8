"""The measurements of ``kda bench``, and the clock that the programs in ``benchmarks`` share with it."""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import kda_core
from kda_core import _plugins
from kda_core.capabilities import Unavailable
from kda_core.errors import KdaError
from kda_core.reference import DIFFERENTIABLE

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GATES = {"bounded": "lower bound", "softplus": "softplus", "given": "given"}
"""Names of the gates, and what the conformance kit calls them."""

CACHE = 256 * 2**20
"""More bytes than any cache of a GPU."""
FEWEST_TURNS, MOST_TURNS = 5, 100
FEWEST_ON_CPU = 3

Run = Callable[[], Any]
Function = Callable[..., Any]
"""A function with the arguments and the results of a public function."""


def device_for(name: str | None, backend: str | None) -> torch.device:
    """The device of that name, or the best one.

    Raises:
        ValueError: calls cannot be timed there, or the backend is not installed or does not run there.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device: expected cpu or cuda, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, which can be timed, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: torch sees {torch.cuda.device_count()} GPUs, got {name!r}")
    try:
        answer = None if backend is None else _plugins.registry.named(backend).availability(device)
    except KdaError as error:
        raise ValueError(f"--backend: {error}") from None
    if isinstance(answer, Unavailable):
        raise ValueError(f"--backend: {backend} does not run on {device}: {answer.reason}")
    return device


def take_turns(runs: Mapping[str, Run], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every call.

    The runs take turns for about ``seconds`` altogether, so that a load on the machine slows all of them. On a GPU the
    cache is flushed before each call, and times include the host's where it takes longer than the kernels.
    """
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    if device.type == "cpu":
        while len(next(iter(times.values()))) < FEWEST_ON_CPU or time.perf_counter() - begin < seconds:
            for name, run in runs.items():
                before = time.perf_counter()
                run()
                times[name].append(1e3 * (time.perf_counter() - before))
        return times
    flush = torch.empty(CACHE // 8, dtype=torch.int64, device=device)

    def turn() -> list[tuple[str, torch.cuda.Event, torch.cuda.Event]]:
        event = functools.partial(torch.cuda.Event, enable_timing=True)
        events = [(name, event(), event()) for name in runs]
        for name, start, end in events:
            flush.zero_()
            start.record()
            runs[name]()
            end.record()
        return events

    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    turn()
    torch.cuda.synchronize(device)
    turns = max(FEWEST_TURNS, min(MOST_TURNS, int(seconds / (time.perf_counter() - begin))))
    events = [event for _ in range(turns) for event in turn()]
    torch.cuda.synchronize(device)
    for name, start, end in events:
        times[name].append(start.elapsed_time(end))
    return times


def on_device(call: Any, device: torch.device) -> Any:
    """The kit's call with its tensors on the device."""
    tensors, grads = ({n: t.to(device) for n, t in part.items()} for part in (call.tensors, call.grads))
    return replace(call, tensors=tensors, grads=grads)


def runner(function: Function, call: Any) -> Run:
    """A closure that makes the kit's call with a function, and its backward if the call has gradients.

    It returns the results by name: "o", "final_state", and a gradient "d..." of every differentiable input.
    """

    def outputs(leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        o, state = function(**{**call.tensors, **leaves}, **call.options)[:2]
        return {"o": o} if state is None else {"o": o, "final_state": state}

    leaves = {n: call.tensors[n].detach().requires_grad_() for n in DIFFERENTIABLE if n in call.tensors}

    def run() -> dict[str, torch.Tensor]:
        if not call.grads:
            with torch.inference_mode():
                return outputs({})
        found = outputs(leaves)
        given = [found[n] for n in call.grads]
        grads = torch.autograd.grad(given, list(leaves.values()), list(call.grads.values()))
        return {n: t.detach() for n, t in found.items()} | {f"d{n}": t for n, t in zip(leaves, grads, strict=True)}

    return run


def reason(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def calls(sizes: tuple[int, ...], dtype: torch.dtype, gate: str) -> dict[str, Any]:
    """The kit's calls for B, T, H, K, V, by name: a forward with states, a training step, a step of one token."""
    from kda_core.testing.cases import FP32, Case

    shape: Any = dict(zip(("B", "T", "H", "K", "V"), sizes, strict=True))
    raw: Any = {"decay": "bounded"} if gate == "given" else {"gate": GATES[gate], "beta": "sigmoid"}
    case = Case(name="kda bench", dtype=dtype, gate_dtype=dtype, l2norm=True, state=FP32, **shape, **raw)
    chunked = case.having(options={"safe_gate": gate != "softplus"})
    return {
        "forward": chunked.call(),
        "training step": chunked.having(state=None, final_state=False, backward=True).call(),
        "decoding step": case.having(T=1, op="fused_recurrent_kda").call(),
    }


def measure(call: Any, backend: str | None, device: torch.device, seconds: float) -> dict[str, Any]:
    """Median milliseconds of a kit's call by implementation, and why fla has none."""
    call, left_out = on_device(call, device), {}
    runs = {"kda_core": runner(functools.partial(getattr(kda_core, call.op), backend=backend), call)}
    runs["kda_core"]()
    try:
        if device.type == "cpu":
            raise RuntimeError("its kernels need a GPU")
        theirs = runner(getattr(importlib.import_module("fla.ops.kda"), call.op), call)
        theirs()
        runs["fla"] = theirs
    # Another library may fail in any way, which is no failure of ours.
    except Exception as error:
        left_out["fla"] = reason(error)
    times = take_turns(runs, device, seconds)
    return {"ms": {name: statistics.median(ms) for name, ms in times.items()}, "left_out": left_out}

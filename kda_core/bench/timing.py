"""Times of calls, by turns, with the host and replayed from a graph; peak memory; a copy's bandwidth."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

CACHE = 256 * 2**20
"""More bytes than any cache."""
LEAST_TURNS, MOST_TURNS = 5, 100
LEAST_ON_CPU = 3

Run = Callable[[], object]


def on_gpu(device: torch.device) -> bool:
    """Whether times are those of a GPU."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if on_gpu(device):
        torch.cuda.synchronize(device)


def take_turns(
    runs: Mapping[str, Run], device: torch.device, seconds: float, stretch: int = 1, least: int = LEAST_ON_CPU
) -> dict[str, list[float]]:
    """Milliseconds of every call.

    The runs take turns for about ``seconds`` altogether, so that a load on the machine slows all of them. On a GPU the
    cache is flushed before each call.

    Args:
        stretch: on a CPU, calls in a row of each run. If there are several the first is not counted: it warms the cache
            for the others, as in a loop of steps.
        least: turns on a CPU at least.
    """
    for run in runs.values():
        run()
    if not on_gpu(device):
        return _turns_on_cpu(runs, seconds, stretch, least)
    flush = torch.empty(CACHE // 8, dtype=torch.int64, device=device)

    def turn() -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = {}
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            events[name] = (start, end)
            flush.zero_()
            start.record()
            run()
            end.record()
        return events

    torch.cuda.synchronize(device)
    before = time.perf_counter()
    turn()
    torch.cuda.synchronize(device)
    turns = max(LEAST_TURNS, min(MOST_TURNS, int(seconds / (time.perf_counter() - before))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for events in [turn() for _ in range(turns)]:
        for name, (start, end) in events.items():
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def _turns_on_cpu(runs: Mapping[str, Run], seconds: float, stretch: int, least: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin, turns = time.perf_counter(), 0
    while turns < least or time.perf_counter() - begin < seconds:
        turns += 1
        for name, run in runs.items():
            for i in range(stretch):
                before = time.perf_counter()
                run()
                if i or stretch == 1:
                    times[name].append(1e3 * (time.perf_counter() - before))
    return times


def capture(run: Run, device: torch.device) -> Run:
    """Replays of a graph of one call. The call must have run before: compilers and autotuners cannot be captured.

    Raises:
        Exception: whatever the call or the device raises when the call cannot be captured.
    """
    # The capture runs on another stream, which does not wait for the inputs.
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = run()
    torch.cuda.synchronize(device)

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def kernels(run: Run, device: torch.device, calls: int = 3) -> dict[str, float]:
    """Milliseconds a call of every kernel, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            run()
        torch.cuda.synchronize(device)
    found = {e.key: e.self_device_time_total / calls / 1e3 for e in profile.key_averages()}
    return dict(sorted(((n, ms) for n, ms in found.items() if ms > 0), key=lambda item: -item[1]))


def growth(run: Run, device: torch.device) -> int:
    """Peak bytes that a call allocates on the device, above the tensors that exist before it."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def copy_bandwidth(device: torch.device, quick: bool = False) -> float:
    """Bytes a second, read and written, of a large copy: the faster of a memcpy and an elementwise kernel."""
    size = (2**31 if on_gpu(device) else 2**22 if quick else 2**27) // 4
    source = torch.ones(size, device=device)
    target = torch.empty_like(source)
    runs: dict[str, Run] = {
        "memcpy": lambda: target.copy_(source),
        "kernel": lambda: torch.abs(source, out=target),
    }
    best = min(map(statistics.median, take_turns(runs, device, 0.01 if quick else 0.2).values()))
    return 2 * source.nbytes / (1e-3 * best)


def matmul_rate(device: torch.device, quick: bool = False) -> float:
    """Multiplications and additions a second of a large float32 matrix product."""
    n = 256 if quick else 2048
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    times = take_turns({"product": lambda: a @ b}, device, 0.01 if quick else 1.0)["product"]
    return 2 * n**3 / (1e-3 * statistics.median(times))


def summary(times: list[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile and count of a list, for the JSON."""
    tenths = statistics.quantiles(times, n=10) if len(times) > 1 else times
    return {"median": statistics.median(times), "p10": tenths[0], "p90": tenths[-1], "count": len(times)}

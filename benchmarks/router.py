"""Time what kda_core adds to a call and to ``import torch``, in processor time on a CPU.

    python benchmarks/router.py --batches 12 --processes 5 --import-limit-ms 150

A null backend returns ready tensors. The router's time is that of the public call minus that of the backend's hook
called directly with the same request. Two parts of it are shown beside it: reading the values of index tensors on the
CPU, which the contract demands, and telling autograd about memory that was written in place. A figure is the median
over many batches of calls ("least": the quickest batch); public and direct calls alternate batch by batch.
``kda_core.supports`` is timed for a decoding step that it was asked before. The import is timed in fresh processes that
have imported torch. Limits apply to processor time, which depends least on the load.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from measuring import Parser, Row, Rows, child, count, positive
from packaging.specifiers import SpecifierSet

import kda_core
from kda_core import _checks, _ops
from kda_core._plugins import registry
from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature
from kda_core.hookspecs import hookimpl
from kda_core.reference import ReferenceBackend
from kda_core.request import ForwardResult, Request

ORACLES = ReferenceBackend().kda_core_backend().capabilities.features
LEFT_OUT = {
    Feature.BACKWARD, Feature.RECURRENT_BACKWARD, Feature.GATE_BACKWARD, Feature.STATE_GRADIENT, Feature.DRAFT_RECORDS,
    Feature.DRAFT_TREES,
}  # fmt: skip
PLAINEST, STEP = "chunk_kda, no option", "fused_recurrent_kda, decode over a pool"

# The child imports torch, then times the import of kda_core, in wall and in processor time.
IMPORT_SCRIPT = """
import time, torch
start = time.perf_counter(), time.thread_time()
import kda_core
print(time.perf_counter() - start[0], time.thread_time() - start[1])
"""


class NullBackend:
    """Accepts everything that needs no gradient and computes nothing."""

    def __init__(self) -> None:
        self.result: object = None
        self.request: object = None

    @hookimpl
    def kda_core_backend(self) -> BackendInfo:
        # Every feature of this core: the benchmark always comes with its core.
        capabilities = Capabilities(ORACLES - LEFT_OUT, frozenset({torch.float32, torch.bfloat16}))
        return BackendInfo("null", "1.0", SpecifierSet("~=1.0"), ("cpu",), 1_000_000, capabilities)

    @hookimpl
    def kda_core_availability(self, device):
        return Available()

    @hookimpl
    def kda_core_reject(self, request):
        return None

    @hookimpl
    def kda_core_chunk_forward(self, request):
        self.request = request
        return self.result

    kda_core_recurrent_forward = kda_core_gate_forward = kda_core_chunk_forward


@contextmanager
def null_backend() -> Iterator[NullBackend]:
    backend = NullBackend()
    registry.load()
    entry = registry.register(backend)
    if entry.state != "loaded":
        raise RuntimeError(f"the null backend is {entry.state}: {entry.reason}")
    try:
        yield backend
    finally:
        registry.unregister("null")


def calls() -> dict[str, tuple[str, Callable[[], Any], object]]:
    """Name -> (hook, public call, the null backend's answer)."""
    B, T, H, K = 8, 1, 4, 64
    data = [*(torch.zeros(B, T, H, K) for _ in range(4)), torch.zeros(B, T, H)]
    v, g = data[2:4]
    A_log, dt_bias = torch.zeros(H), torch.zeros(H, K)
    state, pool, out = torch.zeros(B, H, K, K), torch.zeros(2 * B, H, K, K), torch.empty_like(v)
    indices, cu_seqlens = torch.arange(B), torch.arange(B + 1)
    row = [t.flatten(0, 1)[None] for t in data]
    raw: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0}
    raw |= {f"use_{n}_in_kernel": True for n in ("qk_l2norm", "gate", "beta_sigmoid")}
    states: dict[str, Any] = {"initial_state": state, "output_final_state": True}
    slots: dict[str, Any] = {"initial_state": pool, "ssm_state_indices": indices, "out": out}
    answer, with_state, in_pool = ForwardResult(v), ForwardResult(v, state), ForwardResult(out)
    chunk, recurrent, gate = "kda_core_chunk_forward", "kda_core_recurrent_forward", "kda_core_gate_forward"
    chunk_kda, fused_recurrent_kda = kda_core.chunk_kda, kda_core.fused_recurrent_kda
    return {
        PLAINEST: (chunk, lambda: chunk_kda(*data), answer),
        "chunk_kda, backend named": (chunk, lambda: chunk_kda(*data, backend="null"), answer),
        "chunk_kda, all in the kernel, states": (chunk, lambda: chunk_kda(*data, **states, **raw), with_state),
        "chunk_kda, packed": (chunk, lambda: chunk_kda(*row, cu_seqlens=cu_seqlens), ForwardResult(row[2])),
        "fused_recurrent_kda, no option": (recurrent, lambda: fused_recurrent_kda(*data), answer),
        STEP: (recurrent, partial(fused_recurrent_kda, *data, **slots, **raw), in_pool),
        "kda_gate": (gate, lambda: kda_core.kda_gate(g, A_log, dt_bias), torch.zeros_like(g)),
    }


def _batch_us(function: Callable[[], object], calls_a_batch: int) -> float:
    """Processor time of a call in microseconds: calls do not wait, and other processes must not count."""
    start = time.thread_time_ns()
    for _ in range(calls_a_batch):
        function()
    return (time.thread_time_ns() - start) / calls_a_batch / 1e3


def main(arguments: list[str] | None = None) -> int:
    """Measure every kind of call, and the import; status 1 where one is above its limit."""
    parser = Parser(__file__, __doc__)
    parser.add_argument("--calls", type=count, default=200, help="calls a batch; default: 200")
    parser.add_argument("--batches", type=count, default=300, help="batches of calls; default: 300")
    parser.add_argument("--processes", type=count, default=9, help="processes that time the import; default: 9")
    parser.add_argument("--call-limit-us", type=positive, help="status 1 when the plainest call costs more")
    parser.add_argument("--verdict-limit-us", type=positive, help="status 1 when a verdict that is kept costs more")
    parser.add_argument("--import-limit-ms", type=positive, help="status 1 when the import takes longer")
    options = parser.parse(arguments)
    rows = Rows(options)
    names = ("public", "hook alone", "added", "values", "routing", "least")
    print("µs a call".ljust(40), *(f"{name:>10}" for name in names))
    for name in calls():
        row = added_by_the_router(name, options.batches, options.calls)
        keys = ("public_us", "direct_us", "added_us", "values_us", "routing_us", "least_us")
        check(row, "µs added to a call", row["added_us"], options.call_limit_us if name == PLAINEST else None)
        rows.add(row, " ".join([f"{name:40}", *(f"{row[key]:10.2f}" for key in keys)]))
    row = of_a_kept_verdict(options.batches, options.calls)
    check(row, "µs of a verdict", row["us"], options.verdict_limit_us)
    rows.add(row, f"{row['case']:40}{row['us']:11.2f}")
    row = added_to_the_import(options.processes)
    check(row, "ms of import", statistics.median(row["processor_ms"]), options.import_limit_ms)
    times = {clock: row[f"{clock}_ms"] for clock in ("wall", "processor")}
    lines = (f"  {c:9} {statistics.median(ms):6.1f} ({ms[0]:.1f} to {ms[-1]:.1f})" for c, ms in times.items())
    rows.add(row, "ms of the import after torch's: median (least to most)", *lines)
    return rows.status


def check(row: Row, what: str, figure: float, limit: float | None) -> None:
    """Mark a row that is above its limit as failed."""
    if limit is not None and figure > limit:
        row["failed"] = f"{what}: {figure:.1f} is above the limit {limit:.1f}"


@torch.no_grad()
def added_by_the_router(name: str, batches: int, calls_a_batch: int) -> Row:
    hook, call, result = calls()[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with null_backend() as backend:
            backend.result = result
            call()
            request, implementation = backend.request, getattr(backend, hook)

            def values() -> None:
                if type(request) is Request:
                    _checks.check_values(request)
                    if _ops.writes_to_caller(request):
                        _ops.count_writes(request)

            functions = (call, lambda: implementation(request=request), values)
            turns = [tuple(_batch_us(f, calls_a_batch) for f in functions) for _ in range(batches)]
    finally:
        torch.set_num_threads(threads)
    columns = list(zip(*turns, strict=True))
    row = {n: statistics.median(x) for n, x in zip(("public_us", "direct_us", "values_us"), columns, strict=True)}
    row["added_us"] = statistics.median(p - h for p, h, _ in turns)
    row["routing_us"] = statistics.median(p - h - v for p, h, v in turns)
    public, *inside = map(min, columns)
    return {"suite": "router", "case": name, **row, "least_us": public - sum(inside)}


@torch.no_grad()
def of_a_kept_verdict(batches: int, calls_a_batch: int) -> Row:
    """Microseconds of ``kda_core.supports``, which an adapter asks at every call."""
    with null_backend():
        _, step, _ = calls()[STEP]
        question = partial(kda_core.supports, "fused_recurrent_kda", *step.args, **step.keywords)
        if question() != (True, ""):
            raise RuntimeError(f"the null backend does not serve the step: {question()}")
        us = statistics.median(_batch_us(question, calls_a_batch) for _ in range(batches))
    return {"suite": "router", "case": "supports, a call like an earlier one", "us": us}


def added_to_the_import(processes: int) -> Row:
    """Milliseconds that ``import kda_core`` takes after ``import torch``, sorted, one fresh process each."""
    # The first process may have to write bytecode, which an installed package has.
    found = [child(IMPORT_SCRIPT) for _ in range(processes + 1)][1:]
    wall, processor = zip(*([1e3 * float(seconds) for seconds in line.split()] for line in found), strict=True)
    row: Row = {"suite": "router", "case": "import kda_core after import torch"}
    return row | {"wall_ms": sorted(wall), "processor_ms": sorted(processor)}


if __name__ == "__main__":
    sys.exit(main())

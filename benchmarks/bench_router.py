"""What kda_core adds to a call and to ``import torch``.

    python benchmarks/bench_router.py [--json FILE] [--import-limit-ms MS] [--call-limit-us US]

A null backend answers every call with tensors made beforehand. What the router adds is the time of the
public call minus that of the backend's hook called directly with the same request. Part of it is no routing
and is shown beside it: reading the values of index tensors that lie on the CPU (boundaries, slots: in order,
in range, nobody's twice), which the contract promises, and telling autograd what was written to the caller's
memory. Each figure is the median over many batches of calls (``least``: that of the quickest batch); public and
direct calls alternate batch by batch, so that both meet the same machine. The import is timed in fresh processes that
have imported torch already. Limits are compared with processor time, which a busy machine changes least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from packaging.specifiers import SpecifierSet

import kda_core
from kda_core import checks, ops
from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature
from kda_core.hookspecs import hookimpl
from kda_core.plugins import registry
from kda_core.reference import ReferenceBackend
from kda_core.request import ForwardResult, Request

TARGET_CALL_US = 10.0
TARGET_IMPORT_MS = 50.0
ORACLES = ReferenceBackend().kda_core_backend().capabilities.features
NO_BACKWARD = {Feature.BACKWARD, Feature.RECURRENT_BACKWARD, Feature.GATE_BACKWARD, Feature.STATE_GRADIENT}

# The child imports torch first, and then times what kda_core adds to it, on the clock and on the processor.
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
        capabilities = Capabilities(ORACLES - NO_BACKWARD, frozenset({torch.float32, torch.bfloat16}))
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

    @hookimpl
    def kda_core_recurrent_forward(self, request):
        self.request = request
        return self.result

    @hookimpl
    def kda_core_gate_forward(self, request):
        self.request = request
        return self.result


@contextmanager
def null_backend():
    backend = NullBackend()
    registry.load()
    entry = registry.register(backend)
    if entry.state != "loaded":
        raise RuntimeError(f"the null backend is {entry.state}: {entry.reason}")
    try:
        yield backend
    finally:
        registry.unregister("null")


def calls() -> dict[str, tuple[str, Callable[[], object], object]]:
    """Name -> (hook, public call, the null backend's answer)."""
    B, T, H, K = 8, 1, 4, 64
    q, k, v = (torch.zeros(B, T, H, K) for _ in range(3))
    g, beta = torch.zeros(B, T, H, K), torch.zeros(B, T, H)
    A_log, dt_bias = torch.zeros(H), torch.zeros(H, K)
    state, pool = torch.zeros(B, H, K, K), torch.zeros(2 * B, H, K, K)
    indices, out = torch.arange(B), torch.empty_like(v)
    packed = tuple(t.reshape(1, B * T, *t.shape[2:]) for t in (q, k, v, g, beta))
    cu_seqlens = torch.arange(B + 1)
    in_kernel = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }
    answer, with_state = ForwardResult(v), ForwardResult(v, state)
    chunk, recurrent, gate = "kda_core_chunk_forward", "kda_core_recurrent_forward", "kda_core_gate_forward"
    return {
        "chunk_kda, no option": (chunk, lambda: kda_core.chunk_kda(q, k, v, g, beta), answer),
        "chunk_kda, backend named": (chunk, lambda: kda_core.chunk_kda(q, k, v, g, beta, backend="null"), answer),
        "chunk_kda, all in the kernel, states": (
            chunk,
            lambda: kda_core.chunk_kda(
                q, k, v, g, beta, initial_state=state, output_final_state=True, **in_kernel, lower_bound=-5.0
            ),
            with_state,
        ),
        "chunk_kda, packed": (chunk, lambda: kda_core.chunk_kda(*packed, cu_seqlens=cu_seqlens), answer),
        "fused_recurrent_kda, no option": (
            recurrent,
            lambda: kda_core.fused_recurrent_kda(q, k, v, g, beta),
            answer,
        ),
        "fused_recurrent_kda, decode over a pool": (
            recurrent,
            lambda: kda_core.fused_recurrent_kda(
                q, k, v, g, beta, initial_state=pool, ssm_state_indices=indices, out=out, **in_kernel
            ),
            ForwardResult(out),
        ),
        "kda_gate": (gate, lambda: kda_core.kda_gate(g, A_log, dt_bias), torch.zeros_like(g)),
    }


def batch_us(function: Callable[[], object], calls_a_batch: int) -> float:
    """Processor time of a call in microseconds: a call waits for nothing, and other processes must not count."""
    start = time.thread_time_ns()
    for _ in range(calls_a_batch):
        function()
    return (time.thread_time_ns() - start) / calls_a_batch / 1e3


def added_by_the_router(batches: int, calls_a_batch: int) -> list[dict[str, float | str]]:
    """A row for each kind of call, in microseconds a call."""
    rows: list[dict[str, float | str]] = []
    with null_backend() as backend, torch.no_grad():
        for name, (hook, call, result) in calls().items():
            backend.result = result
            call()
            request, implementation = backend.request, getattr(backend, hook)

            def direct(implementation=implementation, request=request) -> object:
                return implementation(request=request)

            def values(request=request) -> None:
                if type(request) is Request:
                    checks.check_values(request)
                    if ops.writes_to_caller(request):
                        ops.count_writes(request)

            functions = (call, direct, values)
            turns = [tuple(batch_us(f, calls_a_batch) for f in functions) for _ in range(batches)]
            public, hook_alone, of_values = zip(*turns, strict=True)
            rows.append(
                {
                    "call": name,
                    "public_us": statistics.median(public),
                    "direct_us": statistics.median(hook_alone),
                    "values_us": statistics.median(of_values),
                    "added_us": statistics.median(p - h for p, h, _ in turns),
                    "routing_us": statistics.median(p - h - v for p, h, v in turns),
                    "least_us": min(public) - min(hook_alone) - min(of_values),
                }
            )
    return rows


def import_ms(processes: int) -> dict[str, list[float]]:
    """Milliseconds that ``import kda_core`` takes after ``import torch``, sorted, one fresh process each."""
    # As installed: with bytecode, which the first process may still have to write.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for i in range(processes + 1):
        # Not in the checkout, whose kda_core would be taken instead of the installed one.
        child = subprocess.run(
            [sys.executable, "-c", IMPORT_SCRIPT],
            cwd=Path(__file__).parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        if i:
            found.append([float(seconds) * 1e3 for seconds in child.stdout.split()])
    return {name: sorted(times) for name, times in zip(("wall", "processor"), zip(*found, strict=True), strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--calls", type=int, default=200, help="calls a batch")
    parser.add_argument("--processes", type=int, default=9, help="fresh processes that time the import")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--call-limit-us", type=float, help="fail when the plainest call costs more")
    parser.add_argument("--import-limit-ms", type=float, help="fail when the import takes the processor longer")
    options = parser.parse_args()
    torch.set_num_threads(1)

    rows = added_by_the_router(options.batches, options.calls)
    columns = ("public", "hook alone", "added", "values", "routing", "least")
    keys = ("public_us", "direct_us", "added_us", "values_us", "routing_us", "least_us")
    print(f"{'':42}" + "".join(f"{c:>12}" for c in columns) + "   (µs a call)")
    for r in rows:
        print(f"{r['call']:42}" + "".join(f"{r[k]:12.2f}" for k in keys))
    print(f"target: below {TARGET_CALL_US:.0f} µs of routing\n")

    imports = import_ms(options.processes)
    print(f"{'import kda_core after import torch (ms)':42}{'median':>10}{'least':>12}{'most':>10}")
    for clock, times in imports.items():
        print(f"{clock + ' time':42}{statistics.median(times):10.1f}{times[0]:12.1f}{times[-1]:10.1f}")
    print(f"target: below {TARGET_IMPORT_MS:.0f} ms")
    if options.json is not None:
        options.json.write_text(json.dumps({"torch": torch.__version__, "calls": rows, "import_ms": imports}, indent=2))
    too_slow = [
        f"{what}: {figure:.1f} is above the limit {limit:.1f}"
        for what, figure, limit in (
            ("µs added to a call", rows[0]["added_us"], options.call_limit_us),
            ("ms of import", statistics.median(imports["processor"]), options.import_limit_ms),
        )
        if limit is not None and figure > limit
    ]
    print(*too_slow, sep="\n", file=sys.stderr, end="\n" if too_slow else "")
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())

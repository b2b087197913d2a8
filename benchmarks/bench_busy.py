"""The CPU backend on a machine whose cores are busy: milliseconds of a call by threads and by how OpenMP waits.

    python benchmarks/bench_busy.py [--threads 1 2 4] [--busy 0 2] [--rounds N] [--json FILE]

Busy loops (one process each) take the cores while a fresh process runs the calls: OpenMP reads its variables when it is
loaded. Settings take turns, ``--rounds`` times, so that what else runs on the machine meets all of them; a figure is
the median over the rounds of each round's median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
}
"""How a thread of libgomp waits for work: environment variables that it reads when it is loaded."""

OPENMP_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY")
SECONDS, LEAST = 0.4, 3


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """That many processes that do nothing but take a core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def calls() -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    import torch

    import kda_core

    torch.manual_seed(0)

    def inputs(B: int, T: int, H: int, K: int) -> dict[str, torch.Tensor]:
        q, k, v = (torch.randn(B, T, H, K) for _ in range(3))
        g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, K))
        return {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v, "g": g, "beta": torch.rand(B, T, H)}

    def forward(x: dict[str, torch.Tensor]) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                kda_core.chunk_kda(**x, backend="cpu")

        return run

    def training(x: dict[str, torch.Tensor]) -> Callable[[], object]:
        leaves = {name: t.requires_grad_() for name, t in x.items()}
        grad = torch.randn_like(x["v"])

        def run() -> None:
            o, _ = kda_core.chunk_kda(**leaves, backend="cpu")
            torch.autograd.grad(o, list(leaves.values()), grad)

        return run

    def decoding(x: dict[str, torch.Tensor]) -> Callable[[], object]:
        N, _, H, K = x["q"].shape
        pool, slots = torch.randn(2 * N, H, K, K), torch.arange(0, 2 * N, 2)

        def run() -> None:
            with torch.no_grad():
                kda_core.fused_recurrent_kda(**x, initial_state=pool, ssm_state_indices=slots, backend="cpu")

        return run

    return {
        "forward [1, 512, 8, 128]": forward(inputs(1, 512, 8, 128)),
        "forward [2, 64, 4, 32]": forward(inputs(2, 64, 4, 32)),
        "training [1, 512, 8, 128]": training(inputs(1, 512, 8, 128)),
        "training [2, 64, 4, 32]": training(inputs(2, 64, 4, 32)),
        "decoding step [8, 1, 32, 128]": decoding(inputs(8, 1, 32, 128)),
        "decoding step [1, 1, 4, 64]": decoding(inputs(1, 1, 4, 64)),
    }


def measure(threads: int) -> dict[str, float]:
    """Median milliseconds of every call in this process."""
    import torch

    torch.set_num_threads(threads)
    found = {}
    for name, call in calls().items():
        call()
        times: list[float] = []
        end = time.perf_counter() + SECONDS
        while len(times) < LEAST or time.perf_counter() < end:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        found[name] = statistics.median(times)
    return found


def measured_elsewhere(threads: int, setting: str) -> dict[str, float]:
    """The same in a fresh process with a setting of OpenMP."""
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP_VARIABLES}
    command = [sys.executable, __file__, "--child", str(threads)]
    child = subprocess.run(command, env=environment | SETTINGS[setting], capture_output=True, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, os.cpu_count() or 1], help="busy loops")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child)))
        return
    rows = [(b, s, t) for b in options.busy for s in options.settings for t in options.threads]
    found: dict[tuple, list[dict[str, float]]] = {row: [] for row in rows}
    for _ in range(options.rounds):
        for busy, setting, threads in rows:
            with busy_loops(busy):
                found[busy, setting, threads].append(measured_elsewhere(threads, setting))
    names = list(next(iter(found.values()))[0])
    print(f"| busy loops | threads | OpenMP | {' | '.join(names)} |")
    print("|" + "---|" * (3 + len(names)))
    medians = []
    for (busy, setting, threads), rounds in found.items():
        values = {name: statistics.median(r[name] for r in rounds) for name in names}
        medians.append({"busy": busy, "threads": threads, "openmp": setting, "ms": values, "rounds": rounds})
        print(f"| {busy} | {threads} | {setting} | {' | '.join(f'{values[n]:.2f}' for n in names)} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": medians}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""CPU backend beside the other CPU implementations of KDA, in one run: time, share of sgemm, peak memory.

    python benchmarks/bench_cpu.py [--quick] [--threads N] [--json FILE]

Compared: ``fla.ops.kda.naive`` (chunk and recurrent) and the torch fallback of transformers' kimi_linear (the
``bench`` extra installs both). Within a case the implementations take turns, so that a busy machine slows all of
them; times are medians, ratios are ratios of medians. A decoding step runs ten times in a row before the other's turn,
as a loop of steps does, and the first of them is not counted. Peak memory is the growth of the resident set during one
call in a fresh process, after a small call that loads what is loaded lazily.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import kda_core

OURS = "kda_core"
FALLBACK = "transformers fallback"
NAIVE_CHUNK = "fla naive_chunk_kda"
NAIVE_RECURRENT = "fla naive_recurrent_kda"
K = V = 128
CHUNK = 64
STRETCH = 10
"""Decoding steps in a row."""


@dataclass
class Case:
    """One row of the report."""

    name: str
    times_ms: dict[str, float]
    note: str = ""
    targets: dict[str, float] = field(default_factory=dict)

    def ratio(self, other: str) -> float:
        """How many times ``other`` is slower than we are."""
        return self.times_ms[other] / self.times_ms[OURS]


def make_inputs(B: int, T: int, H: int) -> dict[str, Tensor]:
    """Unit keys, decays of a log-sigmoid gate, beta in [0, 1]; float32."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, K) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, K))
    return {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v, "g": g, "beta": torch.rand(B, T, H)}


def chunk_implementations() -> dict[str, Callable[..., Tensor]]:
    """Functions of (q, k, v, g, beta) that return o."""
    found: dict[str, Callable[..., Tensor]] = {OURS: lambda **x: kda_core.chunk_kda(**x, backend="cpu")[0]}
    others = _others()
    if FALLBACK in others:
        fallback = others[FALLBACK][0]
        found[FALLBACK] = lambda q, k, v, g, beta: fallback(q, k, v, g, beta)[0]
    for name in (NAIVE_CHUNK, NAIVE_RECURRENT):
        if name in others:
            found[name] = lambda f=others[name][0], **x: f(**x)[0]
    return found


def _others() -> dict[str, tuple[Callable, ...]]:
    found: dict[str, tuple[Callable, ...]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda

            found[NAIVE_CHUNK], found[NAIVE_RECURRENT] = (naive_chunk_kda,), (naive_recurrent_kda,)
        except ImportError as error:
            print(f"fla is left out: {error}", file=sys.stderr)
        try:
            from transformers.models.kimi_linear import modeling_kimi_linear as model

            # With fla installed the names stand for its GPU kernels; beneath lies the torch code.
            found[FALLBACK] = (
                inspect.unwrap(model.chunk_kimi_delta_attention),
                inspect.unwrap(model.recurrent_kimi_delta_attention),
            )
        except ImportError as error:
            print(f"transformers is left out: {error}", file=sys.stderr)
        logging.disable(logging.NOTSET)
    return found


def take_turns(
    functions: dict[str, Callable[[], object]], seconds: float, least: int, stretch: int = 1
) -> dict[str, float]:
    """Median milliseconds of each function; rounds go on for about ``seconds``, and each runs ``least`` times.

    Args:
        stretch: calls in a row of each function in a round, of which the first is not counted where there are several:
            what runs in a loop finds the cache as itself left it, not as another implementation did.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    start = time.perf_counter()
    while True:
        for name, function in functions.items():
            # A slow one need not hold up the count of a fast one.
            repeats = 3 if name == OURS and stretch == 1 else stretch
            for i in range(repeats):
                before = time.perf_counter()
                function()
                if i or stretch == 1:
                    times[name].append(time.perf_counter() - before)
        if time.perf_counter() - start > seconds and min(map(len, times.values())) >= least:
            return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def forward_flops(T: int, H: int) -> float:
    """Multiplications and additions of the products of the chunk form, in a whole forward."""
    levels = 2 * CHUNK * (CHUNK - 1) * K
    inverse = sum(2 * 2 * b**3 * (CHUNK // (2 * b)) for b in (1 << i for i in range(CHUNK.bit_length() - 1)))
    scan = 2 * CHUNK * (3 * K * V + 2 * CHUNK * V)
    return (levels + inverse + scan) * H * T / CHUNK


def sgemm_flops(seconds: float) -> float:
    """Multiplications and additions a second of a large float32 matrix product."""
    n = 2048
    a, b = torch.randn(n, n), torch.randn(n, n)
    return 2 * n**3 / (1e-3 * take_turns({"sgemm": lambda: a @ b}, seconds, 5)["sgemm"])


def bench_forward(T: int, H: int, options: argparse.Namespace) -> Case:
    inputs = make_inputs(1, T, H)
    functions = {name: (lambda f=f: f(**inputs)) for name, f in chunk_implementations().items()}
    with torch.inference_mode():
        outputs = {name: function() for name, function in functions.items()}
        times = take_turns(functions, options.seconds, options.least)
        sgemm = sgemm_flops(options.seconds / 4)
    flops = forward_flops(T, H) / (1e-3 * times[OURS])
    return Case(
        f"forward [1, {T}, {H}, {K}]",
        times,
        f"{flops / 1e9:.0f} GFLOP/s, {flops / sgemm:.0%} of sgemm's {sgemm / 1e9:.0f}; {_agreement(outputs)}",
        {"best of the others": 3.0, FALLBACK: 20.0} if T == 2048 else {},
    )


def bench_training(T: int, H: int, options: argparse.Namespace) -> Case:
    inputs = {name: x.requires_grad_() for name, x in make_inputs(1, T, H).items()}
    grad = torch.randn(1, T, H, V)
    outputs: dict[str, Tensor] = {}

    def train(name: str, f: Callable[..., Tensor]) -> None:
        f(**inputs).backward(grad)
        outputs[name] = torch.cat([x.grad.flatten() for x in inputs.values()])
        for x in inputs.values():
            x.grad = None

    functions = {
        name: (lambda name=name, f=f: train(name, f))
        for name, f in chunk_implementations().items()
        if name in (OURS, FALLBACK)
    }
    times = take_turns(functions, options.seconds, options.least)
    return Case(f"forward + backward [1, {T}, {H}, {K}]", times, _agreement(outputs), {FALLBACK: 10.0})


def bench_decode(N: int, H: int, options: argparse.Namespace) -> list[Case]:
    inputs = make_inputs(N, 1, H)
    state = torch.randn(N, H, K, V)
    pool, slots = torch.randn(2 * N, H, K, V), torch.arange(0, 2 * N, 2)
    others = _others()
    functions: dict[str, Callable[[], object]] = {
        OURS: lambda: kda_core.fused_recurrent_kda(
            **inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, backend="cpu"
        )
    }
    if FALLBACK in others:
        step = others[FALLBACK][1]
        functions[FALLBACK] = lambda: step(
            *inputs.values(), initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
    paged = {**functions}
    paged[OURS] = lambda: kda_core.fused_recurrent_kda(
        **inputs, initial_state=pool, ssm_state_indices=slots, use_qk_l2norm_in_kernel=True, backend="cpu"
    )
    moved = 2 * state.numel() * state.element_size()
    cases = []
    with torch.inference_mode():
        for name, candidates in (("state in and out", functions), ("paged pool, in place", paged)):
            times = take_turns(candidates, options.seconds / 2, 5 * options.least, STRETCH)
            note = f"{moved / (1e-3 * times[OURS]) / 1e9:.0f} GB/s of state read and written"
            targets = {FALLBACK: 3.0} if N == 8 else {}
            cases.append(Case(f"decode N = {N}, H = {H}, {name}", times, note, targets))
    return cases


def _agreement(outputs: dict[str, Tensor]) -> str:
    """How far the others are from us, relative."""
    ours = outputs[OURS].double()
    far = [((x.double() - ours).norm() / ours.norm()).item() for name, x in outputs.items() if name != OURS]
    return f"others agree to {max(far):.0e}" if far else "nothing to compare with"


def peak_memory(T: int, H: int, options: argparse.Namespace) -> dict[str, float]:
    """MiB by which one forward grows a fresh process, by implementation."""
    found = {}
    for name in chunk_implementations():
        command = [sys.executable, __file__, "--peak-of", name, str(T), str(H), "--threads", str(options.threads)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        if child.returncode != 0:
            raise RuntimeError(f"measuring {name} failed:\n{child.stderr}")
        found[name] = float(child.stdout.splitlines()[-1])
    return found


def print_peak(name: str, T: int, H: int) -> None:
    """In a process of its own: print the MiB that one forward adds to the resident set."""
    run = chunk_implementations()[name]
    with torch.inference_mode():
        run(**make_inputs(1, CHUNK, H))
        inputs = make_inputs(1, T, H)
        # 5 resets the peak (proc(5)); what importing left behind must not hide the call's.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_kib("VmRSS")
        o = run(**inputs)
        print((_status_kib("VmHWM") - before) / 1024)
        del o


def _status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")


def _verdict(case: Case) -> str:
    words = []
    for other, target in case.targets.items():
        names = [n for n in case.times_ms if n != OURS] if other == "best of the others" else [other]
        names = [n for n in names if n in case.times_ms]
        if names:
            ratio = min(case.ratio(n) for n in names)
            words.append(f"{ratio:.1f}× {other} (target {target:.0f}×{'' if ratio >= target else ', MISSED'})")
    return "; ".join(words)


def report(cases: list[Case], memory: dict[str, float], shape: str) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    names = [OURS, FALLBACK, NAIVE_CHUNK, NAIVE_RECURRENT]
    table = Table("case, float32", *names, "", title=f"median ms (× ours); {torch.get_num_threads()} threads")
    for case in cases:
        cells = [
            "–"
            if n not in case.times_ms
            else f"{case.times_ms[n]:.2f}" + ("" if n == OURS else f" ({case.ratio(n):.1f}×)")
            for n in names
        ]
        table.add_row(case.name, *cells, "\n".join(filter(None, (_verdict(case), case.note))))
    console.print(table)
    table = Table(
        "implementation", "peak MiB above the inputs", "bytes a token and head", "× ours", title=f"forward {shape}"
    )
    T, H = json.loads(shape)[1:3]
    for name, mib in memory.items():
        table.add_row(name, f"{mib:.0f}", f"{mib * 2**20 / (T * H):.0f}", f"{mib / memory[OURS]:.1f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few repetitions only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write everything to this file as well")
    parser.add_argument("--peak-of", nargs=3, metavar=("NAME", "T", "H"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        name, T, H = options.peak_of
        print_peak(name, int(T), int(H))
        return
    options.seconds, options.least = (1.0, 3) if options.quick else (8.0, 5)
    cases = [bench_forward(512, 8, options), bench_forward(2048, 8, options), bench_training(512, 8, options)]
    cases += [case for N in (1, 8) for case in bench_decode(N, 32, options)]
    T, H = 4096, 8
    memory = peak_memory(T, H, options)
    report(cases, memory, f"[1, {T}, {H}, {K}]")
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        machine |= {"threads": options.threads, "isa": torch.backends.cpu.get_cpu_capability()}
        content = {**machine, "cases": [asdict(c) for c in cases], "peak_mib": memory}
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

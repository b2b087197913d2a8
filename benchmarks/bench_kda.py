"""``chunk_kda`` beside fla's, in one run: milliseconds, peak memory, distance from the memory floor.

    python benchmarks/bench_kda.py [--device cuda] [--modes MODE ...] [--shapes B,T,H,K ...] [--quick]
                                   [--profile] [--json FILE] [--plot FILE]

Modes:
    inference  forward with everything in the operator (q/k norm, bounded gate, sigmoid of beta, fp32 states in and out)
    forward    forward of a training step: q/k norm in the operator, decays given, inputs that need gradients
    training   the same and its backward
    kept       the same with ``disable_recompute=True``: memory for speed

Implementations take turns on the same tensors, with the cache flushed before every call; times are medians (with the
10th and 90th percentile in the JSON), ratios are ratios of medians. Peak memory is that of the device during a call,
inputs included. The floor is the bytes of the inputs and results over what a large copy moves in the same run. The
last column says how far the results of the two lie apart.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import kda_core
from kda_core.testing import cases

OURS = "kda_core"
FLA = "fla"
LOWER_BOUND = -5.0
MODES = ("inference", "forward", "training", "kept")
CACHE = 256 * 2**20
"""More than any cache holds."""

Run = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Shape:
    """B, T, H, K (= V) and the lengths of packed sequences (empty: B sequences of T tokens)."""

    B: int
    T: int
    H: int
    K: int
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        packed = f" packed in {len(self.lengths)}" if self.lengths else ""
        return f"{self.B}, {self.T}, {self.H}, {self.K}{packed}"


RAGGED = cases.named("8k ragged").lengths

INFERENCE = (
    Shape(1, 8192, 96, 128),
    Shape(1, 8192, 96, 128, RAGGED),
    Shape(1, 8192, 64, 128),
    Shape(1, 512, 64, 128),
    Shape(1, 1024, 64, 128),
    Shape(2, 8192, 64, 128),
    Shape(1, 8192, 32, 128),
    Shape(1, 131072, 32, 128),
    Shape(8, 1024, 32, 128),
    Shape(1, 65536, 8, 128),
)
TRAINING = (
    Shape(1, 8192, 96, 128),
    Shape(1, 8192, 96, 128, RAGGED),
    Shape(2, 16384, 16, 128),
    Shape(4, 2048, 16, 128),
    Shape(4, 4096, 64, 128),
    Shape(8, 2048, 32, 256),
    Shape(8, 1024, 8, 64),
    Shape(1, 65536, 8, 128),
)
SMALL = (Shape(1, 256, 4, 64), Shape(1, 300, 2, 64, (100, 1, 199)))


@dataclass
class Row:
    """One line of the table.

    Attributes:
        ms: milliseconds of every timed call, by implementation.
        peak: bytes, by implementation. floor: milliseconds that moving inputs and results takes.
        apart: largest relative difference of a result between the implementations.
        kernels: milliseconds of each of our kernels, from the profiler.
    """

    mode: str
    shape: Shape
    ms: dict[str, list[float]]
    peak: dict[str, int]
    floor: float
    apart: float | None = None
    kernels: dict[str, float] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.ms[name])

    @property
    def speedup(self) -> float | None:
        return self.median(FLA) / self.median(OURS) if FLA in self.ms else None

    def as_dict(self) -> dict:
        """For the JSON."""
        percentiles = {n: statistics.quantiles(x, n=10) if len(x) > 1 else x for n, x in self.ms.items()}
        times = {n: {"median": self.median(n), "p10": p[0], "p90": p[-1]} for n, p in percentiles.items()}
        return asdict(self) | {"ms": times, "speedup": self.speedup}


class Work:
    """The tensors of a shape and the calls of a mode on them."""

    def __init__(self, mode: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        B, T, H, K = shape.B, shape.T, shape.H, shape.K
        torch.manual_seed(0)
        self.mode, N = mode, len(shape.lengths) or B
        q, k, v, g = (torch.randn(B, T, H, K, device=device, dtype=dtype) for _ in range(4))
        beta = torch.randn(B, T, H, device=device, dtype=dtype)
        self.tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
        self.options: dict[str, object] = {"use_qk_l2norm_in_kernel": True, "safe_gate": True}
        if mode == "inference":
            state = torch.randn(N, H, K, K, device=device)
            self.tensors |= {"g": g, "beta": beta, "initial_state": state}
            self.tensors |= {"A_log": torch.rand(H, device=device), "dt_bias": torch.randn(H * K, device=device)}
            self.options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
            self.options |= {"lower_bound": LOWER_BOUND, "output_final_state": True}
        else:
            self.tensors |= {"g": LOWER_BOUND * g.sigmoid(), "beta": beta.sigmoid()}
            self.options["disable_recompute"] = mode == "kept"
            self.grad_o = torch.randn_like(v)
            self.leaves = [self.tensors[n].requires_grad_() for n in ("q", "k", "v", "g", "beta")]
        if shape.lengths:
            self.tensors["cu_seqlens"] = torch.tensor([0, *shape.lengths], device=device).cumsum(0)

    @property
    def bytes(self) -> int:
        """Bytes of what has to be read and written."""
        rows = sum(self.tensors[n].nbytes for n in ("q", "k", "v", "g", "beta"))
        out = self.tensors["v"].nbytes
        if self.mode == "inference":
            return rows + out + 2 * self.tensors["initial_state"].nbytes
        return rows + out if self.mode == "forward" else rows + out + (rows + out + rows)

    def run(self, function: Callable) -> Run:
        """A call of the mode; returns the results."""
        if self.mode == "inference":

            def inference() -> Sequence[Tensor]:
                with torch.inference_mode():
                    return function(**self.tensors, **self.options)

            return inference

        def forward() -> Sequence[Tensor]:
            return (function(**self.tensors, **self.options)[0],)

        def both() -> Sequence[Tensor]:
            (o,) = forward()
            return (o.detach(), *torch.autograd.grad(o, self.leaves, self.grad_o))

        return forward if self.mode == "forward" else both


def fla_function() -> Callable | None:
    """fla's ``chunk_kda``, if it is installed."""
    try:
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        print(f"fla is left out: {error}", file=sys.stderr)
        return None
    return chunk_kda


def timed(runs: dict[str, Run], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every call, by turns, for about ``seconds`` altogether."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    if device.type != "cuda":
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not times[OURS]:
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                times[name].append(1e3 * (time.perf_counter() - start))
        return times
    flush = torch.empty(CACHE // 8, dtype=torch.int64, device=device)

    def turn() -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = {}
        for name, run in runs.items():
            events[name] = start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            flush.zero_()
            start.record()
            run()
            end.record()
        return events

    turn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    turn()
    torch.cuda.synchronize()
    turns = max(5, min(100, int(seconds / (time.perf_counter() - start))))
    for events in [turn() for _ in range(turns)]:
        for name, (start, end) in events.items():
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def peak(run: Run, device: torch.device) -> int:
    """Most bytes that tensors take on the device at any time of a call."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def kernels(run: Run, calls: int = 3) -> dict[str, float]:
    """Milliseconds a call of every kernel, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found = {e.key: e.self_device_time_total / calls / 1e3 for e in profile.key_averages()}
    return dict(sorted(((n, ms) for n, ms in found.items() if ms > 0.002), key=lambda item: -item[1]))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.ones((2**31 if device.type == "cuda" else 2**27) // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    run = {OURS: lambda: (target.copy_(source),)}
    return 2 * source.nbytes / (1e-3 * statistics.median(timed(run, device, 0.3)[OURS]))


def apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Largest relative difference in norm of a result."""
    pairs = [(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True)]
    return max(((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs)


def measure(mode: str, shape: Shape, fla: Callable | None, copy: float, options: argparse.Namespace) -> Row:
    """One row."""
    device = options.device
    gpu = device.type == "cuda"
    work = Work(mode, shape, device, torch.bfloat16 if gpu else torch.float32)
    runs = {OURS: work.run(kda_core.chunk_kda)}
    difference = None
    if fla is not None:
        runs[FLA] = work.run(fla)
        difference = apart(runs[OURS](), runs[FLA]())
    times = timed(runs, device, options.seconds)
    memory = {name: peak(run, device) for name, run in runs.items()} if gpu else {}
    split = kernels(runs[OURS]) if gpu and options.profile else {}
    return Row(mode, shape, times, memory, 1e3 * work.bytes / copy, difference, split)


def report(rows: list[Row], title: str) -> None:
    """Print the table and, when they were asked for, the kernels."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 130)
    columns = ["mode", "B, T, H, K", f"{OURS} ms", "fla ms", "fla / ours", "floor ms", "GiB", "fla GiB", "ours / fla"]
    table = Table(*columns, "apart", title=title)
    for row in rows:
        sizes = {name: f"{size / 2**30:.2f}" for name, size in row.peak.items()}
        versus = FLA in row.ms
        table.add_row(
            row.mode,
            str(row.shape),
            f"{row.median(OURS):.3f}",
            f"{row.median(FLA):.3f}" if versus else "–",
            f"{row.speedup:.2f}" if versus else "–",
            f"{row.floor:.3f}",
            sizes.get(OURS, "–"),
            sizes.get(FLA, "–"),
            f"{row.peak[OURS] / row.peak[FLA]:.2f}" if versus else "–",
            f"{row.apart:.0e}" if versus else "–",
        )
    console.print(table)
    for row in rows:
        if row.kernels:
            split = ", ".join(f"{name[:24]} {ms:.3f}" for name, ms in row.kernels.items())
            console.print(f"{row.mode} {row.shape}: {split}", highlight=False)


def plot(rows: list[Row], file: Path) -> None:
    """How many times faster than fla, one panel a mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.speedup is not None] or rows
    modes = list(dict.fromkeys(row.mode for row in rows))
    figure, panels = pyplot.subplots(1, len(modes), figsize=(4.5 * len(modes), 4), squeeze=False)
    for panel, mode in zip(panels[0], modes, strict=True):
        chosen = [row for row in rows if row.mode == mode][::-1]
        labels = [str(row.shape) for row in chosen]
        panel.barh(labels, [row.speedup or 1.0 for row in chosen], color="tab:blue")
        panel.axvline(1.0, color="gray", linewidth=0.8)
        panel.set(title=mode, xlabel="times faster than fla")
        panel.tick_params(axis="y", labelsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def versions(device: torch.device) -> dict[str, str]:
    """What the figures depend on."""
    found = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    found |= {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "kda_core": kda_core.__version__}
    for name in ("triton", "flash-linear-attention"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def parse() -> argparse.Namespace:
    def shape(text: str) -> Shape:
        return Shape(*(int(n) for n in text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, help="default: cuda when there is one, else cpu")
    parser.add_argument("--backend", help="default: nvidia for cuda, else the device's own name")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--shapes", nargs="+", type=shape, metavar="B,T,H,K", help="instead of each mode's own")
    parser.add_argument("--seconds", type=float, help="of timing, for each row")
    parser.add_argument("--no-fla", action="store_true")
    parser.add_argument("--profile", action="store_true", help="also print the time of each of our kernels")
    parser.add_argument("--quick", action="store_true", help="small shapes, few repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios")
    options = parser.parse_args()
    options.device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.backend = options.backend or ("nvidia" if options.device.type == "cuda" else options.device.type)
    options.quick = options.quick or options.device.type == "cpu"
    options.seconds = options.seconds or (0.1 if options.quick else 0.4)
    return options


def main() -> None:
    options = parse()
    copy = copy_bandwidth(options.device)
    environment = versions(options.device)
    title = f"{', '.join(f'{n} {v}' for n, v in environment.items())}; a copy moves {copy / 1e9:.0f} GB/s"
    fla = None if options.no_fla or options.device.type != "cuda" else fla_function()
    own = {mode: INFERENCE if mode == "inference" else TRAINING for mode in options.modes}
    todo = [(mode, s) for mode in own for s in options.shapes or (SMALL if options.quick else own[mode])]
    rows: list[Row] = []
    try:
        with kda_core.use_backend(options.backend):
            for mode, shape in todo:
                rows.append(measure(mode, shape, fla, copy, options))
                found = ", ".join(f"{name} {rows[-1].median(name):.3f} ms" for name in rows[-1].ms)
                print(f"{mode} {shape}: {found}", file=sys.stderr, flush=True)
                if options.json:  # after every row: fla's autotuner takes minutes, and a run may be stopped
                    content = environment | {"copy": copy, "rows": [row.as_dict() for row in rows]}
                    options.json.write_text(json.dumps(content, indent=2) + "\n")
    finally:
        if rows:
            report(rows, title)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()

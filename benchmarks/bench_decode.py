"""Decoding beside other implementations, in one run: microseconds a step, share of the device's copy bandwidth.

    python benchmarks/bench_decode.py [--device cuda] [--quick] [--threads N] [--json FILE] [--plot FILE]

A step is one token for each of N sequences whose states lie in a pool, with everything in the operator (q/k norm, the
bounded gate, sigmoid of beta), as a server calls it. On a GPU it is compared with fla's ``fused_recurrent_kda_fwd``
advancing the same pool in place; each implementation is captured in a CUDA graph of several steps that go round the
pool's slots, so that no state is found in the cache, and the graphs are replayed by turns. On a CPU the other side is
the torch fallback of transformers' kimi_linear, which takes dense states and no gate, so that both get those.

Bandwidth counts every state read once and written once, and the rows of q, k, v, g, beta and o. It is divided by that
of a large copy on the same device, and by that of a copy of as many states as the step advances, timed like the step
and by turns with it: what a launch costs at least is in both. Times are medians, ratios are ratios of medians.

The second table is prefill of short sequences: ``fused_recurrent_kda`` beside ``chunk_kda``, same pool.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

import kda_core

OURS = "kda_core"
COPY = "copy"
"""The copy of N states that is timed beside the implementations."""
K = V = 128
LOWER_BOUND = -5.0
COLD = 4
"""A round of steps goes over at least this many times what a cache of 64 MiB holds."""
CACHE = 64 * 2**20
FEWEST_STEPS = 8
"""Steps of a graph at least: what a replay costs to start is then shared."""

Step = Callable[[Tensor], object]
"""A step over the slots that it is given."""


@dataclass
class Row:
    """One line of a table: the same work done by several implementations.

    Attributes:
        N, T: sequences and tokens of each.
        state: dtype of the pool. layout: "K first" or "V first".
        us: median microseconds of a call, by implementation.
        bytes: what a call moves at least. states: those of them that are states, read and written.
    """

    N: int
    T: int
    state: str
    layout: str
    us: dict[str, float]
    bytes: int
    states: int

    def bandwidth(self) -> float:
        """Bytes a second of ours."""
        return self.bytes / (1e-6 * self.us[OURS])

    def share(self) -> float:
        """Bandwidth of ours over that of a copy of the same states."""
        return self.bandwidth() * 1e-6 * self.us[COPY] / self.states

    def ratio(self, other: str) -> float:
        """How many times slower ``other`` is."""
        return self.us[other] / self.us[OURS]


class Work:
    """The inputs of N sequences of T tokens, and a pool of states.

    Args:
        gate: raw gate inputs for the operator; else the decay and beta themselves.
    """

    def __init__(self, N: int, T: int, H: int, pool: Tensor, v_first: bool, gate: bool, dtype: torch.dtype) -> None:
        device = pool.device
        torch.manual_seed(0)
        self.N, self.T, self.pool, self.v_first = N, T, pool, v_first
        q, k, v, g = (torch.randn(N, T, H, K, device=device) for _ in range(4))
        beta = torch.randn(N, T, H, device=device)
        self.options = {"use_qk_l2norm_in_kernel": True}
        self.tensors = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
        if gate:
            self.tensors |= {"g": g.to(dtype), "beta": beta.to(dtype)}
            self.tensors |= {"A_log": torch.rand(H, device=device), "dt_bias": torch.randn(H, K, device=device)}
            self.options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
            self.options["lower_bound"] = LOWER_BOUND
        else:
            self.tensors |= {"g": LOWER_BOUND * torch.sigmoid(g), "beta": torch.sigmoid(beta)}
        self.out = torch.empty_like(self.tensors["v"])

    def row(self, state: str, layout: str, us: dict[str, float]) -> Row:
        """A line of a table: states are moved both ways, rows once."""
        states = 2 * self.N * self.pool[0].nbytes
        rows = sum(self.tensors[n].nbytes for n in ("q", "k", "v", "g", "beta")) + self.out.nbytes
        return Row(self.N, self.T, state, layout, us, states + rows, states)

    def slots(self) -> Iterator[Tensor]:
        """Indices for call after call, going round the pool in no order of memory."""
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(self.pool.shape[0], generator=generator).to(torch.int32).to(self.pool.device)
        rounds = self.pool.shape[0] // self.N
        while True:
            for i in range(rounds):
                yield order[i * self.N : (i + 1) * self.N].contiguous()

    def ours(self, function: Callable) -> Step:
        """A public function of kda_core on the pool, served by whatever ``use_backend`` names."""
        options = self.options | {"state_v_first": self.v_first, "out": self.out, "initial_state": self.pool}
        return lambda slots: function(**self.tensors, **options, ssm_state_indices=slots)

    def copy(self, target: Tensor) -> Step:
        """A copy of N states after the other from the pool to ``target``, by an elementwise kernel.

        In a CUDA graph a memcpy may be left to a copy engine, which is slower.
        """
        places = itertools.cycle(range(0, self.pool.shape[0] - self.N + 1, self.N))

        def run(slots: Tensor) -> object:
            first = next(places)
            return torch.abs(self.pool[first : first + self.N], out=target[first : first + self.N])

        return run

    def fla(self) -> Step | None:
        """fla's kernel on the pool."""
        forward = _fla_forward()
        if forward is None:
            return None
        options = self.options | {"state_v_first": self.v_first, "out": self.out, "initial_state": self.pool}
        return lambda slots: forward(
            **self.tensors, **options, scale=K**-0.5, inplace_final_state=True, ssm_state_indices=slots
        )

    def fallback(self) -> Step | None:
        """The torch code of transformers, on N neighbouring states; it goes round the pool as well."""
        step = _transformers_step()
        if step is None or self.v_first or self.pool.dtype != torch.float32:
            return None
        inputs = [self.tensors[n] for n in ("q", "k", "v", "g", "beta")]
        places = self.pool.shape[0] - self.N + 1

        def run(slots: Tensor) -> object:
            first = int(slots[0]) % places
            states = self.pool[first : first + self.N]
            return step(*inputs, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True)

        return run


def _fla_forward() -> Callable | None:
    try:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except ImportError as error:
        print(f"fla is left out: {error}", file=sys.stderr)
        return None
    return fused_recurrent_kda_fwd


def _transformers_step() -> Callable | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            from transformers.models.kimi_linear import modeling_kimi_linear as model
        except ImportError as error:
            print(f"transformers is left out: {error}", file=sys.stderr)
            return None
        finally:
            logging.disable(logging.NOTSET)
    # With fla installed the name stands for its GPU kernel; beneath lies the torch code.
    return inspect.unwrap(model.recurrent_kimi_delta_attention)


def captured(step: Step, work: Work) -> tuple[Callable[[], None], int]:
    """A CUDA graph of several calls, and how many."""
    moved = work.N * work.pool[0].nbytes
    calls = max(FEWEST_STEPS, min(-(-COLD * CACHE // moved), work.pool.shape[0] // work.N))
    slots = work.slots()
    indices = [next(slots) for _ in range(calls)]
    step(indices[0])
    # The capture runs on another stream, which does not wait for the inputs.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in indices:
            step(i)
    return graph.replay, calls


def time_on_gpu(steps: dict[str, Step], work: Work, rounds: int) -> dict[str, float]:
    """Median microseconds of a call, graphs replayed by turns."""
    graphs = {name: captured(step, work) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 2):
        for name, (replay, calls) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(1e3 * start.elapsed_time(end) / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def time_on_cpu(steps: dict[str, Step], work: Work, rounds: int) -> dict[str, float]:
    """Median microseconds of a call, by turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    slots = work.slots()
    for turn in range(rounds + 2):
        for name, step in steps.items():
            indices = next(slots)
            start = time.perf_counter()
            step(indices)
            if turn >= 2:
                times[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes a second, read and written, of a large copy: the faster of a memcpy and an elementwise kernel."""
    size = (2 * 2**30 if device.type == "cuda" else 256 * 2**20) // 4
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    times = []
    for copy in (lambda: target.copy_(source), lambda: torch.abs(source, out=target)):
        found = []
        for _ in range(rounds + 2):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            copy()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        times.append(statistics.median(found[2:]))
    return 2 * source.nbytes / min(times)


@torch.inference_mode()
def measure(options: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Rows of the decoding table and of the prefill table."""
    device, H = options.device, options.heads
    gpu = device.type == "cuda"
    timed = time_on_gpu if gpu else time_on_cpu
    decoding, prefill = [], []
    for dtype in (torch.float32, torch.bfloat16):
        slots = max(*options.sizes, COLD * CACHE // (H * K * V * dtype.itemsize))
        # A random walk of the states would overflow bfloat16; steps with unit keys and decays keep them small.
        pool = torch.empty(slots, H, K, V, device=device, dtype=dtype).normal_()
        target = torch.empty_like(pool)
        for v_first in (False, True):
            label = (str(dtype).removeprefix("torch."), "V first" if v_first else "K first")
            for N in options.sizes:
                work = Work(N, 1, H, pool, v_first, gate=gpu, dtype=torch.bfloat16 if gpu else torch.float32)
                steps = {OURS: work.ours(kda_core.fused_recurrent_kda)}
                other = work.fla() if gpu else work.fallback()
                if other is not None:
                    steps["fla" if gpu else "transformers"] = other
                steps[COPY] = work.copy(target)
                decoding.append(work.row(*label, timed(steps, work, options.rounds)))
        for N in options.prefill_sizes if dtype == torch.float32 else ():
            for T in options.lengths:
                work = Work(N, T, H, pool, False, gate=True, dtype=torch.bfloat16 if gpu else torch.float32)
                steps = {OURS: work.ours(kda_core.fused_recurrent_kda), "chunk_kda": work.ours(_chunk)}
                prefill.append(work.row("float32", "K first", timed(steps, work, options.rounds)))
        del pool, target
    return decoding, prefill


def _chunk(**arguments: object) -> object:
    return kda_core.chunk_kda(**arguments)  # type: ignore[arg-type]


def report(decoding: list[Row], prefill: list[Row], copy: float, title: str) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    others = list(dict.fromkeys(name for row in decoding for name in row.us if name != OURS))
    columns = [f"{name} µs" for name in (OURS, *others)]
    table = Table("pool", "layout", "N", *columns, "GB/s", "of a large copy", "of this copy", title=title)
    for row in decoding:
        cells = [f"{row.us[n]:.1f} ({row.ratio(n):.2f}×)" if n in row.us else "–" for n in others]
        speed = row.bandwidth()
        table.add_row(
            row.state,
            row.layout,
            str(row.N),
            f"{row.us[OURS]:.1f}",
            *cells,
            f"{speed / 1e9:.0f}",
            f"{speed / copy:.1%}",
            f"{row.share():.1%}",
        )
    console.print(table)
    table = Table("N", "T", "fused_recurrent_kda µs", "chunk_kda µs", title="prefill of short sequences, float32 pool")
    for row in prefill:
        table.add_row(
            str(row.N), str(row.T), f"{row.us[OURS]:.1f}", f"{row.us['chunk_kda']:.1f} ({row.ratio('chunk_kda'):.2f}×)"
        )
    console.print(table)


def versions() -> dict[str, str]:
    """Versions of what was measured, as far as it is installed."""
    found = {"cuda": str(torch.version.cuda)}
    for name in ("kda-core", "kda-core-nvidia", "torch", "triton", "fla-core", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def plot(decoding: list[Row], copy: float, file: Path) -> None:
    """Share of the copy bandwidth over N, one panel a pool dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    states = list(dict.fromkeys(row.state for row in decoding))
    figure, panels = pyplot.subplots(1, len(states), figsize=(5 * len(states), 4), sharey=True, squeeze=False)
    for panel, state in zip(panels[0], states, strict=True):
        for layout in dict.fromkeys(row.layout for row in decoding):
            rows = [row for row in decoding if row.state == state and row.layout == layout]
            for name in rows[0].us:
                share = [100 * row.bytes / (1e-6 * row.us[name]) / copy for row in rows]
                line = "-" if name == OURS else "--"
                panel.plot([row.N for row in rows], share, line, marker="o", label=f"{name}, {layout}")
        sizes = sorted({row.N for row in decoding})
        panel.set(title=f"{state} pool", xlabel="sequences N", xscale="log")
        panel.set_xticks(sizes, [str(N) for N in sizes])
        panel.set_xticks([], minor=True)
        panel.axhline(100, color="gray", linewidth=0.5)
        panel.legend(fontsize="small")
    panels[0][0].set_ylabel("bandwidth, % of a copy")
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, help="default: cuda when there is one, else cpu")
    parser.add_argument("--backend", help="default: nvidia for cuda, else the device's own name")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="default: 1 to 512; on a CPU 1 to 16")
    parser.add_argument("--prefill-sizes", type=int, nargs="*", metavar="N", help="default: 1 8 64; on a CPU 1 8")
    parser.add_argument("--lengths", type=int, nargs="*", metavar="T", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, on a CPU")
    parser.add_argument("--quick", action="store_true", help="few sizes, few repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the share of the copy bandwidth")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = options.device.type == "cuda"
    options.backend = options.backend or ("nvidia" if gpu else options.device.type)
    options.rounds = 5 if options.quick else 15
    if options.sizes is None:
        largest = (6 if options.quick else 9) if gpu else (3 if options.quick else 4)
        options.sizes = [2**i for i in range(largest + 1)]
    if options.prefill_sizes is None:
        options.prefill_sizes = [1, 8, 64] if gpu else [1, 8]
    if options.quick:
        options.lengths = options.lengths[::2]
    return options


def main() -> None:
    options = parse()
    copy = copy_bandwidth(options.device, options.rounds)
    with kda_core.use_backend(options.backend):
        decoding, prefill = measure(options)
    name = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "cpu"
    title = f"one step, H = {options.heads}, K = V = {K}, {name}; a copy moves {copy / 1e9:.0f} GB/s"
    report(decoding, prefill, copy, title)
    if options.plot:
        plot(decoding, copy, options.plot)
    if options.json:
        content = {"device": name, "copy": copy, "versions": versions()}
        content |= {"decoding": [asdict(r) for r in decoding], "prefill": [asdict(r) for r in prefill]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

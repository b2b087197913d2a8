"""Time one sequence over several devices, beside one device on its share of the tokens, and beside fla.

    torchrun --nproc-per-node 2 benchmarks/parallel.py --json parallel.json
    torchrun --nproc-per-node 2 benchmarks/parallel.py --device cpu --shapes 256x2x16

A row is printed as soon as it is measured; a shape is T x heads x K (= V), with T over all ranks. Inputs are raw
projections of a layer, 16-bit, with the softplus gate. "ideal" is one device on T / W tokens, without the others;
"heads" is a rank's share of the heads on all tokens, for which nothing is sent. Efficiency is ideal / measured.
Times are medians of rounds; of a round the slowest rank counts, with its host. "sent" is what a rank passes to the
collectives of a call, "peak" the largest memory of a rank in a call, its inputs included.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from measuring import Parser, Rows, capture, elapsed
from torch import Tensor

import kda_core
from kda_core._cli import version_of
from kda_core.distributed import ContextParallel, build_cp_context

SHAPES = {"cuda": ("32768x32x128", "131072x32x128", "32768x8x128", "262144x8x128"), "cpu": ("256x4x16", "512x2x16")}
ROWS = ("q", "k", "v", "g", "beta")
OPTIONS = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
GRID = 4096  # Rows of a cell, at most; of fewer tokens an eighth, so that up to eight ranks have the same bits
HOST_ROWS = 64  # Rows a rank of the calls that are bound by the host
Function = Callable[..., Any]


class Ranks:
    """This process among the others, and what they print and measure together."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device, self.rounds, self.end = options.device, options.rounds, time.monotonic() + options.seconds
        versions = {"fla": version_of("flash-linear-attention")}
        self.rows = None if self.rank else Rows(options, versions, ranks=self.size)

    def add(self, text: str, **row: Any) -> None:
        """Print a row on the first rank and write the file."""
        if self.rows is not None:
            self.rows.add({"suite": "parallel", "case": f"{row['mode']} {row['way']}", **row}, text)

    def ideal(self, shape: str, mode: str) -> float | None:
        """Milliseconds of one device on its share, where they are known."""
        rows = [] if self.rows is None else self.rows.rows
        found = (row["ms"] for row in rows if (row.get("shape"), row["case"]) == (shape, f"{mode} ideal"))
        return next(found, None)

    def worst(self, value: float) -> float:
        """The largest of all ranks' values."""
        found = torch.tensor([value], dtype=torch.float64 if self.device.type == "cpu" else torch.float32)
        found = found.to(self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def has_time(self, seconds: float) -> bool:
        return self.worst(float(time.monotonic() + seconds > self.end)) == 0

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize()

    def forget_peak(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """The most bytes that a rank's tensors have taken since; 0 on CPUs."""
        return self.worst(0.0 if self.device.type == "cpu" else float(torch.cuda.max_memory_allocated()))

    def milliseconds(self, run: Callable[[], Any]) -> float:
        """Median over the rounds of the slowest rank's time; each round begins behind a barrier."""
        times = []
        for i in range(self.rounds + 2):
            self.worst(0.0)
            self.synchronize()
            if self.device.type == "cpu":
                began = time.perf_counter()
                run()
                took = 1e3 * (time.perf_counter() - began)
            else:
                took = elapsed(run)
            if i >= 2:
                times.append(self.worst(took))
        return statistics.median(times)

    def host(self, run: Callable[[], Any], calls: int = 50) -> float:
        """Milliseconds a call of many in a row, which wait for the device at their end alone."""
        for _ in range(5):
            run()
        self.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        self.synchronize()
        return self.worst(1e3 * (time.perf_counter() - began) / calls)


@contextlib.contextmanager
def reported(ranks: Ranks, name: str) -> Iterator[None]:
    """An error is a row of every rank, and the run goes on with the next one."""
    try:
        yield
    # Anything that a peer or a device raises; where one rank alone fails the others end by the group's timeout.
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print(f"{name}: failed on rank {ranks.rank}: {text}", flush=True)


def draw(T: int, heads: int, K: int, ranks: Ranks, seed: int) -> dict[str, Tensor]:
    dtype = torch.float32 if ranks.device.type == "cpu" else torch.bfloat16
    generator = torch.Generator(device=ranks.device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=ranks.device)

    found = {n: normal(1, T, heads, K) for n in ("q", "k", "v")} | {"g": normal(1, T, heads, K) / 2 - 3}
    found = {n: t.to(dtype) for n, t in (found | {"beta": normal(1, T, heads)}).items()}
    return found | {"A_log": 0.3 * normal(heads), "dt_bias": 0.3 * normal(heads * K) - 1}


def training(function: Function, tensors: dict[str, Tensor], grad: Tensor, **more: Any) -> list[Tensor]:
    """A forward and a backward; the output and the gradients."""
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    o = function(**leaves, **OPTIONS, **more)[0]
    o.backward(grad)
    return [o.detach(), *(t.grad for t in leaves.values())]


def prefill(function: Function, tensors: dict[str, Tensor], grad: Tensor, **more: Any) -> list[Tensor]:
    with torch.no_grad():
        return [function(**tensors, **OPTIONS, **more)[0]]


MODES = {"training": training, "prefill": prefill}


def own_contexts(T: int) -> dict[str, ContextParallel]:
    """Contexts of each layout, and of cells, whose bits are those of any number of ranks."""
    cells = build_cp_context(tokens=T, deterministic_degree=True, grid=min(GRID, T // 8))
    layouts = {"kda_core": "contiguous", "zigzag": "zigzag"}
    return {n: build_cp_context(tokens=T, layout=x) for n, x in layouts.items()} | {"cells": cells}


def ways_of(T: int, ranks: Ranks, peers: bool, alone: str) -> dict[str, tuple[Function, dict[str, Any]]]:
    """By name: ours without a context, which is called ``alone``, and with each; or fla's with its own."""
    if not peers:
        contexts = {alone: {}} | {n: {"cp_context": c} for n, c in own_contexts(T).items()}
        return {n: (kda_core.chunk_kda, more) for n, more in contexts.items()}
    from fla.ops.cp import build_cp_context as fla_context
    from fla.ops.kda import chunk_kda as fla_kda

    bounds = torch.tensor([0, T], dtype=torch.int32)
    context = fla_context(bounds.to(ranks.device), group=dist.group.WORLD, cu_seqlens_cpu=bounds)
    return {"fla": (fla_kda, {"cp_context": context})}


def sent(run: Function, tensors: dict[str, Tensor], **more: Any) -> int:
    """Bytes that a rank passes to a call's collectives."""
    if "cp_context" not in more:
        return 0
    given = {n: t.detach().requires_grad_(run is training) for n, t in tensors.items()}
    return sum(t.nbytes for t in kda_core.explain(**given, **OPTIONS, **more).transfers)


def measure_shape(T: int, heads: int, K: int, ranks: Ranks, peers: bool, whole: bool = False) -> None:
    """The share of one rank by itself, all ranks together, and one on all tokens; of ``peers`` the second alone."""
    name = f"T={T} heads={heads} K={K}"
    ways = ways_of(T, ranks, peers, "ideal")
    if not peers and heads % ranks.size == 0:
        ways["heads"] = (kda_core.chunk_kda, {})
    if whole:
        ways["whole"] = (kda_core.chunk_kda, {})
    for mode, run in MODES.items():
        for way, (function, more) in ways.items():
            if not ranks.has_time(5):
                return
            with reported(ranks, f"{name} {mode} {way}"):
                sizes = {"heads": (T, heads // ranks.size), "whole": (T, heads)}.get(way, (T // ranks.size, heads))
                tensors = draw(*sizes, K, ranks, ranks.rank)
                grad = torch.randn_like(tensors["v"])
                ranks.forget_peak()
                took = ranks.milliseconds(lambda f=function, m=more, r=run, t=tensors, g=grad: r(f, t, g, **m))
                share = (ranks.ideal(name, mode) or took) / took
                nbytes, peak = 0 if peers else sent(run, tensors, **more), ranks.peak()
                text = f"{name} {mode:8} {way:8} {took:8.3f} ms  {100 * share:3.0f}% of ideal"
                text += f", peak {peak / 2**30:.2f} GiB, sent {nbytes / 2**20:.1f} MiB"
                ranks.add(text, shape=name, mode=mode, way=way, ms=took, efficiency=share, peak=peak, sent=nbytes)


def measure_exchange(heads: int, K: int, ranks: Ranks) -> None:
    """The collective by itself: every rank's M and b of one fragment to all."""
    own = torch.zeros(heads, K, 2 * K, device=ranks.device)
    every = own.new_empty(ranks.size * heads, K, 2 * K)
    took = ranks.milliseconds(lambda: dist.all_gather_into_tensor(every, own))
    text = f"all_gather of {own.nbytes / 2**20:.1f} MiB, heads={heads}: {took:.3f} ms"
    ranks.add(text, shape=f"heads={heads} K={K}", mode="exchange", way="all_gather", ms=took, sent=own.nbytes)


def digest(t: Tensor, c: ContextParallel | None) -> int:
    """A number of the bits of all ranks' rows, or of the sum of all ranks' tensors, for comparing numbers of ranks."""
    if c is None:
        t = t.clone()
        dist.all_reduce(t)
        places = torch.arange(t.numel(), device=t.device)
    else:
        rows = torch.cat([torch.arange(a, b, device=t.device) for a, b in c.ranges or ()])
        width = t[0, 0].numel()
        places = (rows[:, None] * width + torch.arange(width, device=t.device)).flatten()
    bits = t.contiguous().view(torch.int16 if t.dtype.itemsize == 2 else torch.int32).flatten().long()
    found = (bits * (places % 65521 + 1)).sum()
    if c is not None:
        dist.all_reduce(found)
    return int(found)


def measure_errors(T: int, heads: int, K: int, ranks: Ranks) -> None:
    """How far the ranks' results are from one device's, and whether they repeat, eager and compiled."""
    # Without Inductor: what may be moved from the backward to the forward, AOTAutograd has moved before it.
    compiled = torch.compile(kda_core.chunk_kda, backend="aot_eager", fullgraph=True)
    tensors = draw(T, heads, K, ranks, 0)
    grad = torch.randn(tensors["v"].shape, generator=torch.Generator().manual_seed(1)).to(tensors["v"])
    names = ("o", *tensors)
    whole = dict(zip(names, training(kda_core.chunk_kda, tensors, grad), strict=True))
    for layout, c in own_contexts(T).items():
        with reported(ranks, f"errors {layout}"):
            local = {n: c.local(t) if n in ROWS else t for n, t in tensors.items()}
            runs = [kda_core.chunk_kda, kda_core.chunk_kda, compiled]
            found, *again = (training(function, local, c.local(grad), cp_context=c) for function in runs)
            same = [all(torch.equal(a, b) for a, b in zip(found, other, strict=True)) for other in again]
            errors, bits = {}, 0
            for n, t in zip(names, found, strict=True):
                is_local, expected = n in ("o", *ROWS), whole[n]
                bits += digest(t, c if is_local else None)
                if is_local:
                    expected = c.local(expected)
                else:
                    dist.all_reduce(t := t.clone())
                difference = (t.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
                errors[n] = ranks.worst(float(difference))
            row = {"repeats": same[0], "compiled": same[1], "bits": f"{bits & 0xFFFFFFFF:08x}"}
            text = " ".join(f"{n} {x:.1e}" for n, x in errors.items()) + f"; {row}"
            text = f"errors beside one, T={T} heads={heads} {layout}: {text}"
            ranks.add(text, shape=f"T={T} heads={heads} K={K}", mode="errors", way=layout, errors=errors, **row)


def measure_host(heads: int, K: int, ranks: Ranks, peers: bool) -> None:
    """Calls of few rows, which wait for the host."""
    T = HOST_ROWS * ranks.size
    tensors = draw(HOST_ROWS, heads, K, ranks, 0)
    grad = torch.randn_like(tensors["v"])
    if not peers:
        began = time.perf_counter()
        for _ in range(10):
            build_cp_context(tokens=T)
        made = 1e2 * (time.perf_counter() - began)
        ranks.add(f"host: a context {made:.3f} ms", mode="host", way="context", ms=made)
    ways = ways_of(T, ranks, peers, "plain")
    for mode, run in MODES.items():
        for way, (function, more) in ways.items():
            with reported(ranks, f"host {mode} {way}"):
                took = ranks.host(lambda f=function, m=more, run=run: run(f, tensors, grad, **m))
                ranks.add(f"host: {mode:8} {way:8} {took:.3f} ms a call", mode=f"host {mode}", way=way, ms=took)


def measure_graph(T: int, heads: int, K: int, ranks: Ranks) -> None:
    """A call captured in a CUDA graph with its collectives: bits and time of replays, new lengths included."""
    bounds = [0, T // 3, T]
    c = build_cp_context(bounds, fragments=2)
    tensors = {n: c.local(t).clone() if n in ROWS else t for n, t in draw(T, heads, K, ranks, 0).items()}
    grad = torch.randn_like(tensors["v"])
    for mode, run in MODES.items():
        with reported(ranks, f"graph {mode}"):
            step = functools.partial(run, kda_core.chunk_kda, tensors, grad, cp_context=c)
            c.refresh(bounds)
            for _ in range(3):
                step()
            replay = capture(step, ranks.device, capture_error_mode="thread_local")
            same = []
            for other in (bounds, [0, T // 5, T]):
                c.refresh(other)
                replayed = [t.clone() for t in replay()]
                same.append(all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True)))
            took, eager = ranks.milliseconds(replay), ranks.milliseconds(step)
            text = f"graph {mode:8} T={T} heads={heads}: replay {took:.3f} ms, eager {eager:.3f} ms, same bits {same}"
            ranks.add(text, mode=f"graph {mode}", way="kda_core", ms=took, eager=eager, same=same)
            del replay


def shape(text: str) -> tuple[int, int, int]:
    sizes = tuple(int(n) for n in text.split("x"))
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected T x heads x K, e.g. 32768x32x128, got {text!r}")
    return sizes


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__file__, __doc__)
    parser.add_argument("--shapes", type=shape, nargs="+", metavar="TxHxK", help="T over all ranks")
    parser.add_argument("--whole", type=int, default=262144, metavar="T", help="most tokens of a call on one device")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=280, help="rows that would begin later are left out")
    parser.add_argument("--peers", choices=("auto", "none"), default="auto", help="time fla where it is installed")
    options = parser.parse(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node W")
    if options.backend:
        os.environ["KDA_BACKEND"] = options.backend
    kind = options.device.type
    if kind == "cuda":
        options.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(options.device)
        dist.init_process_group("nccl", device_id=options.device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    ranks = Ranks(options)
    shapes = options.shapes or [shape(text) for text in SHAPES[kind]]
    for heads in {heads for _, heads, _ in shapes}:
        measure_exchange(heads, shapes[0][2], ranks)
    for T, heads, K in shapes:
        measure_shape(T, heads, K, ranks, False, T <= options.whole)
    if ranks.has_time(30):
        measure_errors(shapes[0][0], *shapes[0][1:], ranks)
    measure_host(8, shapes[0][2], ranks, False)
    if kind == "cuda" and ranks.has_time(15):
        measure_graph(8192 * ranks.size, 8, shapes[0][2], ranks)
    # Last: fla compiles and tunes its kernels for minutes.
    if options.peers == "auto" and kind == "cuda" and importlib.util.find_spec("fla") is not None:
        for T, heads, K in shapes:
            measure_shape(T, heads, K, ranks, True)
        if ranks.has_time(10):
            measure_host(8, shapes[0][2], ranks, True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

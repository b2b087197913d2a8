"""Suite ``decode``: microseconds of a decoding step over a pool of states, and prefill of short sequences.

A step is one token for each of N sequences whose states lie in a pool, as in a server. On a GPU the operator computes
norms, bounded gate and sigmoid of beta, and fla's ``fused_recurrent_kda_fwd`` advances the same pool in place. Each
implementation is captured in a CUDA graph of several steps, each on other slots so that no state is in the cache, and
the graphs are replayed by turns. On a CPU the peer is the torch fallback of transformers; it takes dense states, decays
and beta, so ours gets decays and beta too, and each runs several steps in a row.

Bandwidth counts each state read once and written once, and the rows of q, k, v, g, beta and o. A copy of as many states
is timed beside the steps. Prefill compares ``fused_recurrent_kda`` with ``chunk_kda`` on the same pool.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core.bench import regimes, timing
from kda_core.bench.peers import OURS, Transformers
from kda_core.bench.session import Row, Session, Task, failure

COPY = "copy"
"""The copy of N states that is timed beside the implementations."""
CHUNK = "chunk_kda"
CACHE = 64 * 2**20
COLD = 4
"""A round of steps reads at least this many times CACHE bytes of states."""
FEWEST_STEPS = 8
"""Least number of steps in a graph: they share the cost of starting a replay."""
STRETCH = 10
"""Steps in a row on a CPU."""

Step = Callable[[Tensor], object]
"""A step over the slots that it is given."""


@dataclass(frozen=True)
class Shape:
    """N sequences of T tokens, H heads, K = V channels; states of a dtype, V first or K first, in a pool."""

    N: int
    T: int
    H: int
    K: int
    state: torch.dtype
    v_first: bool

    @property
    def label(self) -> str:
        """For progress and messages."""
        layout = "V first" if self.v_first else "K first"
        return f"{self.N},{self.T},{self.H},{self.K} {str(self.state).removeprefix('torch.')} pool, {layout}"


def shapes_of(session: Session) -> list[Shape]:
    """The rows, steps first."""
    options, gpu = session.options, session.gpu
    largest = (6 if options.quick else 9) if gpu else (1 if options.quick else 4)
    sizes = options.sizes or [2**i for i in range(largest + 1)]
    heads, K = options.heads or (4 if options.quick else 32), 32 if options.quick else 128
    dtypes = (torch.float32, torch.bfloat16)
    found = [Shape(N, 1, heads, K, x, v) for x in dtypes for v in (False, True) for N in sizes]
    if not gpu and options.sizes is None and options.heads is None:
        # The step of a small model, where the operator's own microseconds count.
        found += [Shape(2, 1, 4, 64, torch.float32, False)]
    lengths = (2, 8, 32) if options.quick or not gpu else (2, 4, 8, 16, 32, 64)
    return found + [Shape(N, T, heads, K, torch.float32, False) for N in ((1, 8, 64) if gpu else (1,)) for T in lengths]


def tasks(session: Session) -> list[Task]:
    """One task a row."""
    return [Task(f"decode {shape.label}", functools.partial(measure, shape, session)) for shape in shapes_of(session)]


@functools.lru_cache(maxsize=1)
def _pool(slots: int, H: int, K: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A pool and as much memory to copy to; rows of one dtype share it."""
    pool = torch.empty(slots, H, K, K, device=device, dtype=dtype).normal_()
    return pool, torch.empty_like(pool)


class Work:
    """The inputs of a shape, and its steps."""

    def __init__(self, shape: Shape, session: Session) -> None:
        self.shape, device = shape, session.device
        cold = 1 if session.options.quick else COLD * CACHE // (shape.H * shape.K**2 * shape.state.itemsize)
        self.pool, self.target = _pool(max(shape.N, cold), shape.H, shape.K, shape.state, device)
        dtype = torch.bfloat16 if session.gpu else torch.float32
        size = (shape.N, shape.T, shape.H, shape.K)
        torch.manual_seed(0)
        q, k, v = (torch.randn(size, device=device, dtype=dtype) for _ in range(3))
        beta = torch.randn(size[:3], device=device, dtype=dtype)
        raw = regimes.draw("bounded", "random", size, dtype, device)
        self.options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
        self.tensors = {"q": q, "k": k, "v": v, "g": raw.g, "beta": beta}
        if session.gpu:
            self.tensors |= {"A_log": raw.A_log, "dt_bias": raw.dt_bias}
            self.options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
            self.options["lower_bound"] = raw.lower_bound
        else:
            self.tensors |= {"g": raw.log_decay(), "beta": beta.sigmoid()}
        self.out = torch.empty_like(v)

    def bytes(self) -> tuple[int, int]:
        """Least bytes that a call moves, and how many of them are states."""
        states = 2 * self.shape.N * self.pool[0].nbytes
        return states + sum(self.tensors[n].nbytes for n in ("q", "k", "v", "g", "beta")) + self.out.nbytes, states

    def slots(self) -> Iterator[Tensor]:
        """Slots for successive calls, shuffled over the whole pool."""
        N, generator = self.shape.N, torch.Generator().manual_seed(1)
        order = torch.randperm(self.pool.shape[0], generator=generator).to(torch.int32).to(self.pool.device)
        while True:
            for i in range(self.pool.shape[0] // N):
                yield order[i * N : (i + 1) * N].contiguous()

    def ours(self, function: Callable, backend: str | None) -> Step:
        """A public function of kda_core on the pool."""
        options = self.options | {"state_v_first": self.shape.v_first, "out": self.out, "initial_state": self.pool}
        return lambda slots: function(**self.tensors, **options, ssm_state_indices=slots, backend=backend)

    def copy(self) -> Step:
        """Successive copies of N states by an elementwise kernel; in a graph a memcpy may run on a copy engine."""
        N = self.shape.N
        places = itertools.cycle(range(0, self.pool.shape[0] - N + 1, N))

        def run(slots: Tensor) -> object:
            first = next(places)
            return torch.abs(self.pool[first : first + N], out=self.target[first : first + N])

        return run

    def fla(self) -> Step:
        """fla's kernel on the pool."""
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        options = self.options | {"state_v_first": self.shape.v_first, "out": self.out, "initial_state": self.pool}
        options |= {"scale": self.shape.K**-0.5, "inplace_final_state": True}
        return lambda slots: fused_recurrent_kda_fwd(**self.tensors, **options, ssm_state_indices=slots)

    def fallback(self) -> Step:
        """The torch code of transformers on N neighbouring states, others in each step."""
        model = importlib.import_module(Transformers.module)
        # With fla installed the name is a wrapper of its GPU kernel; unwrapped it is the torch code.
        step = inspect.unwrap(model.recurrent_kimi_delta_attention)
        inputs = [self.tensors[n] for n in ("q", "k", "v", "g", "beta")]
        places = self.pool.shape[0] - self.shape.N + 1

        def run(slots: Tensor) -> object:
            first = int(slots[0]) % places
            states = self.pool[first : first + self.shape.N]
            return step(*inputs, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True)

        return run


def _steps(work: Work, session: Session) -> tuple[dict[str, Step], dict[str, str]]:
    """The implementations that are timed, and the reasons why others are not."""
    shape, backend = work.shape, session.options.backend
    steps = {OURS: work.ours(kda_core.fused_recurrent_kda, backend)}
    if shape.T > 1:
        return steps | {CHUNK: work.ours(kda_core.chunk_kda, backend)}, {}
    names = {peer.name for peer in session.peers}
    left_out: dict[str, str] = {}
    makers: dict[str, Callable[[], Step]] = {"fla": work.fla, "transformers": work.fallback}
    for name, make in makers.items():
        if name not in names:
            continue
        if name == "transformers" and (shape.v_first or shape.state != torch.float32):
            left_out[name] = "it takes float32 states, K first, only"
            continue
        try:
            step = make()
            step(next(work.slots()))
            steps[name] = step
        # Any library may fail in any way, and its failure is a row of the table.
        except Exception as error:
            left_out[name] = failure(error)
    return steps | {COPY: work.copy()}, left_out


def measure(shape: Shape, session: Session) -> Row:
    """One row."""
    row: Row = {
        "suite": "decode",
        "shape": shape.label,
        "sizes": {n: getattr(shape, n) for n in ("N", "T", "H", "K")},
        "state": str(shape.state).removeprefix("torch."),
        "layout": "V first" if shape.v_first else "K first",
    }
    try:
        with torch.inference_mode():
            work = Work(shape, session)
            row["bytes"], row["state_bytes"] = work.bytes()
            steps, row["left_out"] = _steps(work, session)
            times = (_time_on_gpu if session.gpu else _time_on_cpu)(steps, work, session)
        row["implementations"] = {name: {"ms": timing.summary(ms)} for name, ms in times.items()}
    # Go on with the next shape.
    except Exception as error:
        row["failed"] = failure(error)
    return row


def _captured(step: Step, work: Work, device: torch.device) -> tuple[Callable[[], object], int]:
    """A CUDA graph of several steps, and how many."""
    moved = work.shape.N * work.pool[0].nbytes
    calls = max(FEWEST_STEPS, min(-(-COLD * CACHE // moved), work.pool.shape[0] // work.shape.N))
    slots = work.slots()
    indices = [next(slots) for _ in range(calls)]
    step(indices[0])
    return timing.capture(lambda: [step(i) for i in indices], device), calls


def _time_on_gpu(steps: dict[str, Step], work: Work, session: Session) -> dict[str, list[float]]:
    """Milliseconds of a step, graphs replayed by turns."""
    graphs = {name: _captured(step, work, session.device) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(2 + (5 if session.options.quick else 15)):
        for name, (replay, calls) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) / calls)
    return times


def _time_on_cpu(steps: dict[str, Step], work: Work, session: Session) -> dict[str, list[float]]:
    slots = work.slots()
    runs = {name: lambda step=step: step(next(slots)) for name, step in steps.items()}
    seconds = 0.01 if session.options.quick else 0.5
    return timing.take_turns(runs, session.device, seconds, STRETCH if work.shape.T == 1 else 1)


def bandwidth(row: Row, name: str = OURS) -> float:
    """Bytes a second."""
    return row["bytes"] / (1e-3 * row["implementations"][name]["ms"]["median"])


def share_of_copy(row: Row) -> float:
    """Our bandwidth over that of a copy of the same states."""
    return bandwidth(row) * 1e-3 * row["implementations"][COPY]["ms"]["median"] / row["state_bytes"]


def ratio(row: Row, name: str) -> float:
    """How many times slower another one is."""
    medians = [row["implementations"][n]["ms"]["median"] for n in (name, OURS)]
    return medians[0] / medians[1]


def tables(rows: Sequence[Row], content: dict[str, Any]) -> list[Any]:
    """Steps, and prefill."""
    from rich.table import Table

    steps = [row for row in rows if row["sizes"]["T"] == 1]
    others = list(dict.fromkeys(n for row in steps for n in row.get("implementations", {}) if n != OURS))
    columns = [f"{name} µs" for name in (OURS, *others)]
    table = Table("pool", "layout", "N", "H", "K", *columns, "GB/s", "of a large copy", "of this copy")
    table.title, table.title_justify = "decode: one token a sequence", "left"
    for row in steps:
        found, sizes = row.get("implementations", {}), [str(row["sizes"][n]) for n in ("N", "H", "K")]
        if OURS not in found:
            table.add_row(row["state"], row["layout"], *sizes, "fails")
            continue
        cells = [f"{_us(row, n):.1f} ({ratio(row, n):.2f}×)" if n in found else "–" for n in others]
        speed = bandwidth(row)
        shares = (f"{speed / 1e9:.1f}", f"{speed / content['copy_bytes_per_second']:.1%}", f"{share_of_copy(row):.1%}")
        table.add_row(row["state"], row["layout"], *sizes, f"{_us(row, OURS):.1f}", *cells, *shares)
    prefill = Table("N", "T", "fused_recurrent_kda µs", "chunk_kda µs", title_justify="left")
    prefill.title = "decode: prefill of short sequences, float32 pool"
    for row in rows:
        if row["sizes"]["T"] > 1 and CHUNK in row.get("implementations", {}):
            chunk = f"{_us(row, CHUNK):.1f} ({ratio(row, CHUNK):.2f}×)"
            prefill.add_row(str(row["sizes"]["N"]), str(row["sizes"]["T"]), f"{_us(row, OURS):.1f}", chunk)
    return [table, prefill] if prefill.row_count else [table]


def _us(row: Row, name: str) -> float:
    return 1e3 * row["implementations"][name]["ms"]["median"]

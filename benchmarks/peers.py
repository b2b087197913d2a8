"""The implementations that are compared, and the rows of ``training.py`` and ``inference.py``.

All get the same tensors and take turns, one call each. By default the operator computes everything: the gate from raw
input, norms of q and k, sigmoid of beta. A row has for each implementation the time with the host, the time replayed
from a CUDA graph, peak memory with the inputs, and relative errors against the float64 oracle on some heads and tokens;
beside them the floor, the time of a copy of inputs and results. On a CPU it has times and errors.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import itertools
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import measuring
import torch
from inputs import DECAYS, SYNTAX, Part, bytes_held, bytes_moved, draw, log_decay, parse_shape
from measuring import OURS, ChildFailed, Parser, Row, Rows, capture, median, number, summary
from torch import Tensor

import kda_core
from kda_core import reference
from kda_core._bench import DTYPES, GATES, Function, Run, reason, runner, take_turns
from kda_core._cli import version_of
from kda_core.testing.inputs import Call

NAIVE, KIMI_LINEAR = "fla.ops.kda.naive", "transformers.models.kimi_linear.modeling_kimi_linear"
SHORTEST_KERNEL = 0.002  # Milliseconds below which a kernel is not listed


def fla_chunk_kda() -> Function:
    """fla's ``chunk_kda``, which takes the same arguments."""
    # With FlashKDA installed fla would pass calls on to it.
    os.environ.setdefault("FLA_FLASH_KDA", "0")
    from fla.ops.kda import chunk_kda

    return chunk_kda


def imported(module: str, name: str) -> Function:
    # With fla installed transformers wraps fla's GPU kernels; unwrapped they are its own torch code.
    return inspect.unwrap(getattr(importlib.import_module(module), name))


def torch_code(function: Callable[..., tuple[Tensor, Tensor | None]]) -> Function:
    """``chunk_kda`` by torch code that takes dense states, decays and beta: gate, norms and sigmoid run before it."""

    def chunk_kda(*, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **given: Any) -> tuple:
        if "cu_seqlens" in given or v.shape[2] != q.shape[2]:
            raise ValueError("it takes no packed sequences and no grouped values")
        q, k = (reference.l2norm(x.float()).to(x.dtype) for x in (q, k))
        if given.get("use_gate_in_kernel"):
            g = log_decay(g, given["A_log"], given["dt_bias"], given["lower_bound"])
            beta = beta.sigmoid()
        state = given.get("initial_state")
        state = state.mT if state is not None and given.get("state_v_first") else state
        o, final = function(q, k, v, g, beta, initial_state=state, output_final_state=state is not None)
        return o.to(v.dtype), final.mT if final is not None and given.get("state_v_first") else final

    return chunk_kda


PEERS: dict[str, tuple[str, str, Callable[[], Function]]] = {
    "fla": ("cuda", "fla", fla_chunk_kda),
    "transformers": ("cpu", "transformers", lambda: torch_code(imported(KIMI_LINEAR, "chunk_kimi_delta_attention"))),
    "naive_chunk": ("cpu", "fla", lambda: torch_code(imported(NAIVE, "naive_chunk_kda"))),
    "naive_recurrent": ("cpu", "fla", lambda: torch_code(imported(NAIVE, "naive_recurrent_kda"))),
}
"""By name: the device that it is timed on, its library, and what loads it."""
DISTRIBUTIONS = {"fla": "fla-core", "transformers": "transformers"}


def add_peers(parser: Parser, default: tuple[str, ...] = tuple(PEERS)) -> None:
    names = f"none or some of {', '.join(PEERS)}"
    parser.add_argument("--peers", nargs="+", choices=(*PEERS, "none"), metavar="NAME", help=names)
    parser.set_defaults(default_peers=default)


def load_peers(parser: Parser, options: Namespace) -> tuple[dict[str, Function], dict[str, str]]:
    """The peers that run on the device, and their versions; exits where one that was asked for does not."""
    asked = [name for name in options.peers or options.default_peers if name != "none"]
    functions, versions = {}, {}
    for name in asked:
        device, library, load = PEERS[name]
        try:
            if device != options.device.type:
                raise RuntimeError(f"it is timed on {device} only")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                functions[name] = load()
            versions[library] = version_of(DISTRIBUTIONS[library]) or "unknown"
        # A library may fail in any way while it looks for its compiler or device.
        except Exception as error:
            if options.peers:
                parser.error(f"--peers: {name}: {reason(error)}")
            if device == options.device.type:
                print(f"without {name}: {reason(error)}", file=sys.stderr)
    return functions, versions


def main(
    mode: str, program: str, text: str, shapes: dict[str, tuple[str, ...]], peers: tuple[str, ...],
    arguments: list[str] | None = None,
) -> int:  # fmt: skip
    """Measure "training" or "inference"; ``program``, ``text``: its file and docstring."""
    parser = Parser(program, text)
    add_peers(parser, peers)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="SHAPE", help=SYNTAX)
    parser.add_argument("--gates", nargs="+", choices=GATES, help="default: bounded softplus; on a CPU bounded")
    parser.add_argument("--decays", nargs="+", choices=DECAYS, help="default: random slow; on a CPU random")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16; on a CPU float32")
    parser.add_argument("--seconds", type=measuring.positive, help="time for a row; default: 0.4; on a CPU 2")
    parser.add_argument("--no-errors", action="store_true", help="do not compare with the float64 oracle")
    parser.add_argument("--profile", action="store_true", help="on a GPU, list our kernels and their times, too")
    parser.add_argument("--warm", type=measuring.count, metavar="JOBS", help="compile in that many processes first")
    parser.add_argument("--part", help="INDEX/COUNT of the shapes whose calls one process of --warm runs once")
    options = parser.parse(arguments)
    gpu, device = options.device.type == "cuda", options.device
    cases = options.shapes or [parse_shape(shape) for shape in shapes[device.type]]
    dtype = options.dtype or ("bfloat16" if gpu else "float32")
    gates = options.gates or (("bounded", "softplus") if gpu else ("bounded",))
    decays = options.decays or (("random", "slow") if gpu else ("random",))
    functions, versions = load_peers(parser, options)
    functions = {OURS: functools.partial(kda_core.chunk_kda, backend=options.backend)} | functions
    if options.part:
        index, count = map(int, options.part.split("/"))
        # No kernel depends on the decays' values.
        for case, gate in itertools.product(cases[index::count], gates):
            call = draw(case, mode, gate, decays[0], DTYPES[dtype], device)[0]
            first_runs({name: runner(f, call) for name, f in functions.items()})
            del call
            free(device)
        return 0
    if options.warm:
        warm(min(options.warm, len(cases)), [program, *(sys.argv[1:] if arguments is None else arguments)])
    copy = measuring.copy_bandwidth(device)
    rows = Rows(options, versions, copy_bytes_per_second=copy)
    print("ms with the host, times ours, ms replayed from a graph, peak memory; errors of o, of the worst")
    for case, gate, decay in itertools.product(cases, gates, decays):
        sizes = {n: getattr(case, n) for n in ("B", "T", "H", "K", "N")}
        sizes |= {"HV": case.HV or case.H, "V": case.V or case.K}
        row = {"suite": mode, "shape": case.name, "sizes": sizes, "gate": gate, "decay": decay, "dtype": dtype}
        try:
            call, row["mean_log_decay"] = draw(case, mode, gate, decay, DTYPES[dtype], device)
            row["floor_ms"] = 1e3 * bytes_moved(call) / copy
            row |= measured(call, functions, options)
        # Go on with the next row; most failures are out of memory.
        except Exception as error:
            row["failed"] = reason(error)
        call = None
        free(device)
        rows.add(row, *lines(row))
    return rows.status


def first_runs(given: Mapping[str, Run], ours: Collection[str] = (OURS,)) -> tuple[dict[str, Run], dict[str, str]]:
    """The calls that run, each after its first run, and why others do not. A failure of ``ours`` is raised."""
    runs, left_out = {}, {}
    for name, run in given.items():
        try:
            run()
            runs[name] = run
        # Any library may fail in any way, and its failure is a line of the table.
        except Exception as error:
            if name in ours:
                raise
            left_out[name] = reason(error)
    return runs, left_out


def measured(call: Call, functions: dict[str, Function], options: Namespace, profiled: Profiled | None = None) -> Row:
    """Times, memory and errors of a call by implementation; ``profiled``: by default ``kernels``."""
    device = options.device
    gpu = device.type == "cuda"
    runs, left_out = first_runs({name: runner(f, call) for name, f in functions.items()})
    found = timed(runs, device, options.seconds or (0.4 if gpu else 2.0))
    if gpu:
        for own in found.values():
            own["peak_bytes"] += bytes_held(call)
        if options.profile:
            found[OURS]["kernels_ms"] = (profiled or kernels)(runs[OURS], device)
    if not options.no_errors:
        part = Part(call)
        for name, run in runs.items():
            found[name]["errors"] = part.errors(run)
    return {"left_out": left_out, "implementations": found}


def timed(runs: Mapping[str, Run], device: torch.device, seconds: float) -> dict[str, dict[str, Any]]:
    """By implementation: times, and on a GPU times of replays and the bytes that a call allocates."""
    found: dict[str, dict[str, Any]] = {n: {"ms": summary(ms)} for n, ms in take_turns(runs, device, seconds).items()}
    if device.type == "cpu":
        return found
    for name, run in runs.items():
        found[name]["peak_bytes"] = growth(run, device)
    replays = {}
    # Last: a capture that fails may leave the device unusable.
    for name, run in runs.items():
        try:
            replays[name] = capture(run, device)
        # A call that cannot be captured has its time with the host.
        except Exception as error:
            found[name]["not_captured"] = reason(error)
    for name, ms in take_turns(replays, device, seconds / 2).items() if replays else ():
        found[name]["device_ms"] = summary(ms)
    return found


def growth(run: Run, device: torch.device) -> int:
    """Peak bytes that a call allocates on a GPU, above the tensors that exist before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


Profiled = Callable[[Run, torch.device], dict[str, float]]  # Milliseconds of every kernel of a call


def kernels(run: Run, device: torch.device, calls: int = 3) -> dict[str, float]:
    """Milliseconds a call of every kernel, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            run()
        torch.cuda.synchronize(device)
    found = {e.key: e.self_device_time_total / calls / 1e3 for e in profile.key_averages()}
    return dict(sorted(((n, ms) for n, ms in found.items() if ms > SHORTEST_KERNEL), key=lambda item: -item[1]))


def free(device: torch.device) -> None:
    """Give a row's memory back: cycles of frames and exceptions may hold tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def lines(row: Row) -> list[str]:
    """A row in words, one line an implementation, in 100 columns."""
    mean = f" (mean {row['mean_log_decay']:.2g})" if "mean_log_decay" in row else ""
    floor = f", floor {number(row['floor_ms'])} ms" if "floor_ms" in row else ""
    found = [f"{row['shape']}, {row['gate']}, {row['decay']} decays{mean}{floor}"]
    for name, part in row.get("implementations", {}).items():
        ms, ours, replayed = median(row, name) or 0.0, median(row, OURS) or 0.0, median(row, name, "device_ms")
        text = f"  {name:12} {number(ms):>8} ms {'' if name == OURS else f'{ms / ours:.2f}×':>7}"
        text += f" {number(replayed):>8} replayed" if replayed else ""
        text += f" {part['peak_bytes'] / 2**30:6.2f} GiB" if "peak_bytes" in part else ""
        errors = {n: float(x) for n, x in part.get("errors", {}).items()}
        # NaN is the worst.
        worst = max((n for n in errors if n != "o"), key=lambda n: (errors[n] != errors[n], errors[n]), default="o")
        text += "".join(f"  {n} {errors[n]:.1e}" for n in dict.fromkeys(("o", worst)) if errors)
        found.append(text)
        found += [f"    {ms:8.3f} ms {kernel[:80]}" for kernel, ms in part.get("kernels_ms", {}).items()]
    return found


def warm(jobs: int, line: list[str]) -> None:
    """Run the calls of every shape once, in processes that share the shapes; later runs find their kernels on disk.

    fla's autotuners compile dozens of configurations of every kernel, minutes a shape. Their choices are kept on disk,
    too; with FLA_CACHE_RESULTS=0 in the environment the timed process chooses again, without other processes beside it.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def part(index: int) -> None:
        try:
            measuring.child(measuring.PROGRAM, *line, "--part", f"{index}/{jobs}", environment=environment)
        except ChildFailed as error:
            print(f"compiling, process {index}: {error}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as executor:
        list(executor.map(part, range(jobs)))
    print(f"compiled in {jobs} processes", file=sys.stderr, flush=True)

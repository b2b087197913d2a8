"""Suites ``training``, ``inference``, ``forward`` and ``kept``: time, memory and errors of ``chunk_kda`` beside peers.

By default the operator computes everything: the gate from raw input in the dtype of q, norms of q and k, sigmoid of
beta, float32 states in and out (inference), gradients of A_log and dt_bias (training). ``--gate given`` passes decays
and beta instead.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from kda_core.bench import exactness, shapes, timing
from kda_core.bench.peers import CHUNK, OURS, Peer
from kda_core.bench.session import Row, Session, Task, failure
from kda_core.bench.workload import MODES, Call, Problem, Work

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def problems(mode: str, session: Session) -> list[Problem]:
    """The rows of a mode, in the order of the table."""
    options = session.options
    dtype = DTYPES[options.dtype or ("bfloat16" if session.gpu else "float32")]
    gate_dtype = DTYPES[options.gate_dtype] if options.gate_dtype else dtype
    training = mode != "inference"
    if training and any(shape.pool for shape in options.shapes or ()):
        raise ValueError(f"shapes: a pool is read and advanced in inference only, got one for {mode}")
    chosen = options.shapes or shapes.named(options.set, training, session.gpu)
    return [
        Problem(mode, shape, gate, decay, dtype, gate_dtype)
        for shape in chosen
        for gate in options.gate
        for decay in options.decay
    ]


def tasks(mode: str, session: Session) -> list[Task]:
    """One task a row."""
    return [Task(problem.label, partial(measure, problem, session)) for problem in problems(mode, session)]


def measure(problem: Problem, session: Session) -> Row:
    """One row. A peer that fails is left out with its message; our own failure is in the row as "failed"."""
    row = _header(problem)
    try:
        work = Work(problem, session.device)
        row |= {"mean_log_decay": work.mean_decay, "channel_log_decays": list(work.channel_decays)}
        row |= {"options": work.options, "floor_ms": 1e3 * work.bytes / session.copy}
        calls, row["left_out"] = _calls(work, session.implementations)
        found = _times_of_all_or_ours(calls, work, session, row["left_out"])
        errors = _add_errors(calls, work, row) if session.options.errors else {}
        for name, part in found.items():
            part |= {"errors": errors[name]} if name in errors else {}
            part |= {"note": note} if (note := _note(name, problem, session)) else {}
        if problem.mode == "inference" and not session.gpu and OURS in found:
            rate = _flops(problem) / (1e-3 * found[OURS]["ms"]["median"])
            found[OURS]["of_matmul"] = rate / session.matmul_rate
        row["implementations"] = found
        if OURS not in found:
            row["failed"] = row["left_out"].pop(OURS)
    # Go on with the next shape (failures are often out of memory).
    except Exception as error:
        row["failed"] = failure(error)
    _free(session)
    return row


def _flops(problem: Problem) -> float:
    """Multiplications and additions of the products of the chunk form, in a whole forward."""
    shape = problem.shape
    levels = 2 * CHUNK * (CHUNK - 1) * shape.K
    inverse = sum(2 * 2 * b**3 * (CHUNK // (2 * b)) for b in (1 << i for i in range(CHUNK.bit_length() - 1)))
    scan = 2 * CHUNK * (3 * shape.K * shape.V + 2 * CHUNK * shape.V)
    return (levels + inverse + scan) * shape.HV * shape.B * shape.T / CHUNK


def _header(problem: Problem) -> Row:
    shape = problem.shape
    sizes = {n: getattr(shape, n) for n in ("B", "T", "H", "HV", "K", "V", "N", "pool")}
    return {
        "suite": problem.mode,
        "what": MODES[problem.mode],
        "shape": str(shape),
        "sizes": sizes,
        "gate": problem.gate,
        "decay": problem.decay,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "gate_dtype": str(problem.gate_dtype).removeprefix("torch."),
    }


def _note(name: str, problem: Problem, session: Session) -> str:
    return next(p for p in session.implementations if p.name == name).note(problem)


def _calls(work: Work, implementations: Iterable[Peer]) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls that run (each has run once), and the reasons why others do not."""
    calls, left_out = {}, {}
    for peer in implementations:
        if reason := peer.refuses(work.problem):
            left_out[peer.name] = reason
            continue
        try:
            call = peer.prepare(work)
            call()
            timing.synchronize(work.device)
            calls[peer.name] = call
        # Any library may fail in any way, and its failure is a row of the table.
        except Exception as error:
            left_out[peer.name] = failure(error)
    return calls, left_out


def _add_errors(calls: dict[str, Call], work: Work, row: Row) -> dict[str, dict[str, float]]:
    """Errors by implementation and result; adds to the row the part compared, or why nothing was."""
    try:
        part = exactness.slice_of(work)
        oracle = exactness.expected(work, part)
        found = {n: exactness.errors(exactness.results_on_slice(c, work, part), oracle) for n, c in calls.items()}
    # Keep the times if the oracle runs out of memory.
    except Exception as error:
        row["errors_failed"] = failure(error)
        return {}
    row["errors_of"] = str(part)
    return found


def _times_of_all_or_ours(
    calls: dict[str, Call], work: Work, session: Session, left_out: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """``_times``; if that fails, the peers are removed from ``calls`` and ours is timed alone."""
    try:
        return _times(calls, work, session)
    # A peer that ran once may still fail later, or with the memory of a graph.
    except Exception as error:
        if calls.keys() <= {OURS}:
            raise
        for name in [name for name in calls if name != OURS]:
            del calls[name]
            left_out[name] = f"failed while it was timed, or beside one that did: {failure(error)}"
    _free(session)
    return _times(calls, work, session)


def _times(calls: dict[str, Call], work: Work, session: Session) -> dict[str, dict[str, Any]]:
    """Times of all calls by turns, with host time and, on a GPU, without it; peak memory."""
    device, options = session.device, session.options
    times = timing.take_turns(calls, device, session.seconds) if calls else {}
    found: dict[str, dict[str, Any]] = {name: {"ms": timing.summary(ms)} for name, ms in times.items()}
    if not session.gpu:
        return found
    for name, call in calls.items():
        found[name]["peak_bytes"] = work.held_bytes + timing.growth(call, device)
    if options.graph:
        _add_device_times(calls, found, session)
    if options.profile:
        for name, call in calls.items():
            found[name]["kernels_ms"] = timing.kernels(call, device)
    return found


def _add_device_times(calls: dict[str, Call], found: dict[str, dict[str, Any]], session: Session) -> None:
    """Add "device_ms": replayed from a graph, or the sum of the kernels where a call cannot be captured."""
    replays = {}
    for name, call in calls.items():
        try:
            replays[name] = timing.capture(call, session.device)
        # A call that cannot be captured is still valid: sum its kernels instead.
        except Exception as error:
            timing.synchronize(session.device)
            total = sum(timing.kernels(call, session.device).values())
            found[name]["device_ms"] = {"median": total, "how": "sum of kernels", "why": failure(error)}
    if replays:
        for name, ms in timing.take_turns(replays, session.device, session.seconds / 2).items():
            found[name]["device_ms"] = timing.summary(ms) | {"how": "graph"}


def _free(session: Session) -> None:
    # Cycles of frames and exceptions may hold a row's tensors; small rows may wait.
    if not session.options.quick:
        gc.collect()
    if session.gpu:
        torch.cuda.empty_cache()


def warm(mode: str, session: Session) -> None:
    """Run every peer of every row once, so that its kernels are compiled."""
    for problem in problems(mode, session):
        _calls(Work(problem, session.device), session.implementations)
        _free(session)

"""Small calls that take every kernel and configuration of a GPU backend; a program for compute-sanitizer.

    compute-sanitizer --tool memcheck python tools/sanitized_calls.py --backend nvidia
    compute-sanitizer --tool racecheck python tools/sanitized_calls.py --backend amd --foreign-device

The conformance kit's subject makes every call: it compares results with the float64 oracle within their budgets, checks
that inputs and the memory around them stay, and makes most calls three times with the same bits, which covers repeated
launches. It needs no pytest. The exit status is 1 if a call is wrong. ``--part 2/5`` makes every fifth call from the
second on, so parts can run in parallel. ``--last-first`` reverses the order: of two tools in parallel each then finds
half of the kernels compiled.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import noted
import torch

from kda_core.capabilities import FOREIGN_VARIABLE
from kda_core.testing import gate
from kda_core.testing.cases import BF16, FP16, FP32, Case
from kda_core.testing.subject import Mismatch, Refused, Subject
from kda_core.testing.targets import find_target

DECODING = "fused_recurrent_kda"
FEW, MANY = 2, 150
"""Heads that leave most of a chip idle; more than a chip has multiprocessors."""

BOUNDARIES = (0, 1, 33, 70, 0, 32)

Check = Callable[[Subject], object]


def _checked(case: Case) -> Check:
    return lambda subject: subject.check(case.call())


def _in_pool(case: Case) -> Check:
    """The case on a pool with an unused slot after every used one; the second sequence is skipped."""

    def check(subject: Subject) -> object:
        call = case.call()
        slots = torch.tensor([2 * n + 1 for n in range(len(call.lengths()))], dtype=torch.int32)
        slots[1] = -1
        return subject.check(call.in_pool(slots, 2 * len(slots) + 1))

    return check


def _drafts(case: Case) -> Check:
    """The case with a slot for every token, from the last accepted one."""

    def check(subject: Subject) -> object:
        slots = torch.arange(case.N * case.T, dtype=torch.int32).view(case.N, case.T).flip(0)
        accepted = torch.arange(case.N) % case.T + 1
        return subject.check(case.call().in_pool(slots, case.N * case.T + 1, accepted))

    return check


def _through_descriptors(case: Case) -> Check:
    """The case; on NVIDIA also its gradients through descriptors, which otherwise only very large calls use."""

    def check(subject: Subject) -> object:
        if subject.name == "nvidia":
            _compare_descriptors(case, subject.device)
        return subject.check(case.call())

    return check


def _compare_descriptors(case: Case, device: torch.device) -> None:
    """Raise ``Mismatch`` if a gradient's bits differ between descriptors and pointers."""
    from kda_core_nvidia.choose import choose_backward
    from kda_core_nvidia.plans.backward import plan_backward
    from kda_core_nvidia.run import chip, run_plan

    from kda_core.triton_lib.plan import metadata

    request = case.call().request()
    tensors = {n: x.to(device) for n, x in vars(request).items() if isinstance(x, torch.Tensor)}
    needed = frozenset({"q", "k", "v", "g", "beta"})
    request = replace(request, **tensors, grad_o=tensors["v"], needs_grad=needed)
    r = metadata(request)
    plans = [plan_backward(r, choose_backward(r, chip(device), many=many)) for many in (0, 2**31)]
    (first, second) = (run_plan(plan, request) for plan in plans)
    wrong = [n for n, x in first.items() if not torch.equal(x, second[n])]
    if wrong:
        raise Mismatch(f"descriptors give other gradients of {', '.join(wrong)} than pointers")


def _chunked() -> Iterator[tuple[Case, Callable[[Case], Check]]]:
    common: dict[str, Any] = {"state": FP32, "l2norm": True, "beta": "sigmoid"}
    for dtype, size, heads in itertools.product((BF16, FP16, FP32), (64, 128, 256), (FEW, MANY)):
        for kind in ("softplus", "lower bound"):
            fields = common | {"T": 33 if heads == MANY else 100, "H": heads, "K": size, "dtype": dtype}
            # The oracle of 150 heads with 256 channels takes a minute backward.
            backward = heads == FEW or size < 256
            case = Case(name=f"{dtype} {size} {heads} {kind}", gate=kind, backward=backward, **fields)
            yield case.having(gate_dtype=dtype), _checked
    # Everything packed, grouped values, states V first or bfloat16, slices of wider tensors.
    strided = frozenset(["q", "k", "v", "g", "beta", "initial_state", "grad_o"])
    for dtype, size, v_first in itertools.product((BF16, FP16, FP32), (64, 128, 256), (False, True)):
        packed = common | {"T": 140, "lengths": BOUNDARIES, "HV": 4, "K": size, "dtype": dtype, "strided": strided}
        state = BF16 if v_first else FP32
        case = Case(name=f"packed {dtype} {size} {v_first}", **(packed | {"state": state}))
        case = case.having(options={"state_v_first": v_first})
        yield case.having(backward=True, options={"disable_recompute": v_first}), _checked
        pooled = case.having(name=f"pool {dtype} {size} {v_first}", options={"return_intermediate_states": True})
        yield pooled, _in_pool
    for K, V in ((1, 3), (20, 16), (100, 60), (128, 64), (128, 256), (200, 64), (256, 128)):
        for dtype in (BF16, FP32):
            case = Case(name=f"K {K} V {V} {dtype}", B=2, T=70, HV=4, K=K, V=V, dtype=dtype, state=FP32, backward=True)
            yield case, _checked
    for decay in ("none", "isolated", "slow", -8.0, -1e30):
        for dtype in (BF16, FP16):
            case = Case(name=f"decay {decay} {dtype}", T=70, K=128, dtype=dtype, decay=decay, state=FP32, backward=True)
            yield case, _checked
    for safe in (False, True):
        fields = {"T": 130, "K": 128, "decay": "bounded", "backward": True}
        for dtype in (BF16, FP16, FP32):
            case = Case(name=f"bounded {safe} {dtype}", dtype=dtype, **fields).having(options={"safe_gate": safe})
            yield case, _checked
    for size, lengths in itertools.product((64, 128, 256), ((), BOUNDARIES)):
        case = Case(name=f"descriptors {size} {lengths}", T=140, lengths=lengths, HV=4, K=size, dtype=BF16, state=FP32)
        yield case.having(backward=True), _through_descriptors
    # As many heads as NVIDIA's prepare for Hopper takes; decays that keep and that pass the range of its factors.
    for kind, decay, gate_dtype in (("lower bound", "mild", BF16), ("softplus", "mild", BF16), ("given", -20.0, FP32)):
        fields = common | {"T": 140, "lengths": BOUNDARIES, "H": 20, "K": 128, "dtype": BF16, "gate_dtype": gate_dtype}
        case = Case(name=f"20 heads {kind}", gate=kind, decay=decay, rate=100.0, backward=True, **fields)
        yield case, _checked
        yield case.having(name=f"20 heads {kind}, everything", options={"disable_recompute": True}), _checked
        yield case.having(name=f"20 heads {kind}, pool", backward=False), _in_pool
    # Whole sequences, whose backward has kernels for many rows, and sequences that are cut into segments.
    for T, size, dtype in ((4100, 128, BF16), (4100, 128, FP16), (1030, 256, BF16), (1030, 256, FP16)):
        case = Case(name=f"rows {T} {size} {dtype}", B=2, T=T, K=size, H=1, dtype=dtype, state=FP32, backward=True)
        yield case, _checked
    for size, dtype in ((64, BF16), (128, BF16), (128, FP16), (256, BF16)):
        case = Case(name=f"long {size} {dtype}", T=8300, H=1, K=size, dtype=dtype, decay="slow", state=FP32)
        yield case.having(backward=True), _checked


def _decoding() -> Iterator[tuple[Case, Callable[[Case], Check]]]:
    model: dict[str, Any] = {"op": DECODING, "l2norm": True, "beta": "sigmoid", "K": 128, "HV": 4}
    for v_first, state, dtype in itertools.product((False, True), (FP32, BF16), (BF16, FP32)):
        fields = model | {"state": state, "dtype": dtype, "gate_dtype": dtype, "options": {"state_v_first": v_first}}
        name = f"{v_first} {state} {dtype}"
        for N in (2, 20, 140):
            yield Case(name=f"step {N} {name}", B=N, T=1, gate="softplus", **fields), _in_pool
        yield Case(name=f"new states {name}", B=3, T=1, **fields), _checked
        yield Case(name=f"no states {name}", B=3, T=1, **(fields | {"state": None})), _checked
        yield Case(name=f"draft {name}", B=3, T=4, gate="lower bound", **fields), _drafts
        yield Case(name=f"tokens {name}", B=3, T=7, gate="lower bound", **fields), _checked
        yield Case(name=f"prompt {name}", B=2, T=50, gate="lower bound", **fields), _in_pool
        yield Case(name=f"prompts {name}", T=136, lengths=BOUNDARIES, gate="softplus", **fields), _checked
    # Enough states that NVIDIA's step stores them in parts.
    large = {"op": DECODING, "K": 128, "H": 32, "B": 256, "T": 1, "dtype": BF16, "state": BF16}
    yield Case(name="many states", **large), _in_pool
    for K, V in ((20, 16), (60, 36), (64, 64), (256, 64), (256, 256)):
        for T in (1, 5, 40):
            case = Case(name=f"decoding {T} {K} {V}", op=DECODING, B=2, T=T, K=K, V=V, dtype=BF16, state=FP32)
            yield case, _checked
    yield Case(name="decoding float16", op=DECODING, B=2, T=40, K=128, dtype=FP16, state=FP32), _checked
    case = Case(name="decoding gradients", op=DECODING, T=140, lengths=BOUNDARIES, K=64, state=FP32, backward=True)
    yield case, _checked


def _gates() -> Iterator[tuple[str, Check]]:
    for dtype, bound in itertools.product((BF16, FP16, FP32), (None, -5.0)):
        arguments = gate.arguments((2, 40, 4, 128), dtype)

        def check(subject: Subject, arguments: dict = arguments, bound: float | None = bound) -> None:
            gate.check(subject, arguments, bound)
            gate.check(subject, arguments, bound, backward=True)

        yield f"kda_gate {dtype} {bound}", check


def checks() -> list[tuple[str, Check]]:
    """(name, check) of every call."""
    cases = [(case.name, make(case)) for case, make in (*_chunked(), *_decoding())]
    return [*cases, *_gates()]


def _outcome(subject: Subject, check: Check) -> tuple[str, str]:
    """The outcome of a call, in pytest's words, with its message."""
    try:
        check(subject)
    except Refused as refusal:
        # A call may be refused by declared features and limits; every other call must be served.
        rejected = refusal.status == "rejected"
        return ("failed", f"WRONG: {refusal}") if rejected else ("skipped", str(refusal))
    except Mismatch as mismatch:
        return "failed", f"WRONG: {mismatch}"
    return "passed", "right"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--foreign-device", action="store_true", help="run it on a device that it is not made for")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th call, from the I-th")
    parser.add_argument("--last-first", action="store_true", help="make the calls in reverse order")
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no call after so many seconds")
    parser.add_argument("--notes", type=Path, help="note every call there, and leave out those noted as right")
    chosen = parser.parse_args()
    if chosen.foreign_device:
        os.environ[FOREIGN_VARIABLE] = chosen.backend
    subject = Subject(find_target(chosen.backend, foreign=chosen.foreign_device))
    first, step = (int(n) for n in chosen.part.split("/"))
    wanted = [(name, check) for name, check in checks()[first - 1 :: step] if chosen.only in name]
    if chosen.last_first:
        wanted.reverse()
    notes = noted.read(chosen.notes) if chosen.notes else []
    before = noted.done(notes)
    if chosen.notes and not notes:
        noted.write(chosen.notes, {"collected": len(wanted)})
    begin, done, wrong = time.perf_counter(), 0, 0
    for name, check in wanted:
        if name in before:
            done += 1
            continue
        if time.perf_counter() - begin > chosen.seconds:
            break
        start = time.perf_counter()
        outcome, message = _outcome(subject, check)
        wrong += outcome == "failed"
        done += 1
        if chosen.notes:
            noted.write(chosen.notes, {"test": name, "outcome": outcome, "message": message})
        print(f"{time.perf_counter() - start:6.1f} s  {name}: {message}", flush=True)
    print(f"{chosen.backend} on {subject.device}: {done} of {len(wanted)} checks done, {wrong} wrong")
    return 0 if wanted and not wrong and done == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())

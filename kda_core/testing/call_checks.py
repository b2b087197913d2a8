"""Checks one call of a running program against the float64 reference (``kda_core.checked_calls``); needs no pytest.

Before the backend runs, the check looks for inputs that are not finite and copies the reference's inputs to the CPU.
Afterwards it looks for results that are not finite, compares results within the kit's budget (``budgets``), and
compares memory that the call must not write with its state before the call.
"""

from __future__ import annotations

import inspect
import os
import random
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

import kda_core
from kda_core import _checks
from kda_core._loaded import Backend, CheckSettings
from kda_core.errors import CheckFailed, CheckWarning, ContractViolation
from kda_core.request import DATA, AnyRequest, BackwardResult, ForwardResult, GateRequest, Request
from kda_core.testing import budgets, finite, references
from kda_core.testing.budgets import Budget
from kda_core.testing.call_samples import OPTIONS, Kept, Sample, Slots, kept_states, on_cpu
from kda_core.testing.inputs import Call

Result = TypeVar("Result")

INPUTS = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu"),
    *("ssm_state_indices", "num_accepted_tokens", "has_initial_state", "final_state_indices", "checkpoint_indices"),
    *("final_state_pool", "parents", "grad_o", "grad_final_state", "grad_output"),
)
DEFAULTS = {f.name: f.default for f in fields(Request)}
SUMS_OVER_TOKENS = ("dA_log", "ddt_bias")  # Gradients that every token of every sequence adds to
_choice = random.Random(0)
_comparing = threading.Lock()
"""References and budgets are cached for all threads, and set the number of torch's threads."""
_dumped: list[CheckSettings] = []


def run_checked(
    backend: Backend, hook: str, caller: Callable[..., Any], request: AnyRequest, settings: CheckSettings
) -> Any:
    """Call a backend's hook and check its results.

    Raises:
        CheckFailed: unless the settings say to warn.
        ValueError: index tensors on a device hold values that are refused on the CPU.
    """
    if left_unchecked(backend, request):
        return caller(request=request)
    if isinstance(request, GateRequest) and not request.g.numel():
        return caller(request=request)
    with torch.no_grad():
        kind: Any = _GateCheck if isinstance(request, GateRequest) else _CallCheck
        check = kind(backend, request, hook.endswith("_backward"), settings)
        before = check.problems_before()
        if before:
            check.report(before, None)
    result = caller(request=request)
    if not isinstance(result, (ForwardResult, BackwardResult, Tensor)):
        return result  # the router says what a hook must return
    with torch.no_grad():
        # Inputs that are not finite make results that are not finite: report them once.
        problems = [] if before else check.problems_after(result)
        if problems:
            check.report(problems, result)
    return result


def is_captured(device: torch.device) -> bool:
    """Whether a graph is being captured; values cannot be read then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def left_unchecked(
    backend: Backend, request: AnyRequest, is_captured: Callable[[torch.device], bool] = is_captured
) -> bool:
    """Whether a call cannot be checked because it is captured; it warns then."""
    if captured := is_captured(request.device):
        message = f"{request.op} on {backend.info.name!r} was not checked: the stream is being captured into a graph"
        warnings.warn(message, CheckWarning, stacklevel=3)
    return captured


def on_fresh_thread(compute: Callable[[], Result]) -> Result:
    """Compute on a thread where autograd records and no torch mode is on, unlike the thread inside an operator."""
    with _comparing, ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(compute).result()


def _renew_lock() -> None:
    """A forked child needs a new lock: the thread that held the parent's does not exist there."""
    global _comparing
    _comparing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def bit_sum(t: Tensor, by_slot: bool = False) -> Tensor:
    """The sum of a tensor's bits, taken as integers; with ``by_slot`` one for each index of the first axis."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = t.detach().view(kinds[t.element_size()])
    return bits.sum(dim=tuple(range(1, t.dim())) if by_slot else None, dtype=torch.int64)


class _Check:
    """The check of one call: inputs before it, results and untouched memory after it.

    A subclass has ``problems_before``, which also copies what the reference needs to the CPU; ``problems_after``,
    which compares the results; ``compared``, the part that is compared; and ``options``, by their public names.
    """

    def __init__(self, backend: Backend, request: Any, is_backward: bool, settings: CheckSettings) -> None:
        self.backend, self.request, self.settings = backend, request, settings
        self.direction = "backward" if is_backward else "forward"
        self.tensors = {n: t for n in INPUTS if (t := getattr(request, n, None)) is not None}
        self.before: dict[str, Tensor] = {}

    def remember_inputs(self, written: frozenset[str]) -> None:
        """Keep a sum of the bits of every input that the call must not write."""
        self.before = {n: bit_sum(t) for n, t in self.tensors.items() if n not in written and t.numel()}

    def modified_inputs(self) -> list[str]:
        """Inputs whose bits have changed."""
        return [
            f"{name}: the backend modified it; only a pool and out may be written"
            for name, old in self.before.items()
            if not torch.equal(bit_sum(self.tensors[name]), old)
        ]

    def misshapen(self, result: Any) -> list[str]:
        """A sentence about a result that breaks the contract by its shape, dtype or device."""
        try:
            if self.direction == "backward":
                self.backend.check_gradients(self.request, result, None)
            else:
                self.backend.check_forward(self.request, result)
        except ContractViolation as error:
            # It begins with the backend's name, which the report has.
            return [str(error).partition(" returned ")[2]]
        return []

    def compare(
        self, got: dict[str, Tensor], expected: dict[str, tuple[Tensor, torch.dtype, Budget]], dtype: torch.dtype,
        place: Callable[[str, tuple[int, ...]], str],
    ) -> list[str]:  # fmt: skip
        """Results of ``got`` outside their budgets, a sentence each."""
        slack = self.backend.info.slack
        found = (budgets.compare(n, t, *expected[n], place, slack, dtype)[2] for n, t in got.items())
        return list(filter(None, found))

    def report(self, problems: list[str], result: Any) -> None:
        """Raise or warn, and write the call to a file if that is asked for."""
        r, name = self.request, self.backend.info.name
        message = f"{r.op}, {self.direction}, on backend {name!r}:\n  " + "\n  ".join(problems)
        message += f"\ncompared: {self.compared()}\narguments:\n  " + "\n  ".join(self.arguments())
        dump = self.settings.dump
        if dump is not None and self.settings not in _dumped:
            _dumped.append(self.settings)
            # Each process of a distributed run has its own first failure.
            dump = dump.replace("{pid}", str(os.getpid()))
            try:
                torch.save(self.as_saved(problems, result), dump)
                message += f"\nsaved in {dump}"
            except (OSError, RuntimeError) as error:  # still report the call
                message += f"\ncould not be saved in {dump}: {error}"
        if self.settings.warn:
            warnings.warn(message, CheckWarning, stacklevel=4)
            return
        failure = CheckFailed(message)
        failure.op, failure.backend, failure.direction = r.op, name, self.direction
        failure.problems = tuple(problems)
        raise failure

    def saved_tensors(self) -> dict[str, Tensor]:
        """The call's tensors as they were before it."""
        return {n: t for n, t in self.tensors.items() if not n.startswith("grad_")}

    def results(self, result: Any) -> dict[str, Tensor]:
        """The backend's results, by name."""
        if self.direction == "backward":
            return {f"d{n}": t for n, t in result.grads.items() if n in self.request.needs_grad}
        if isinstance(result, Tensor):
            return {"gate": result}
        found = {"o": result.o, "final_state": result.final_state, "h": result.h}
        return {n: t for n, t in found.items() if t is not None}

    def arguments(self) -> list[str]:
        """A line for each argument."""
        lines = []
        for name, t in self.tensors.items():
            line = f"{name}: {list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
            line += "" if t.is_contiguous() else f", strides {t.stride()}"
            # Only the slots of a pool that the call uses are part of the call.
            values = self.saved_tensors().get(name, t)
            if values.numel():
                low, high = (x.item() for x in values.detach().aminmax())
                line += f", {low:.4g} to {high:.4g}"
            lines.append(line)
        return [*lines, ", ".join(f"{n}={v!r}" for n, v in self.options().items() if v != DEFAULTS.get(n))]

    def as_saved(self, problems: list[str], result: Any) -> dict[str, Any]:
        """Everything that is needed to repeat the call, for ``torch.save``: CPU tensors, numbers and strings."""

        def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()}

        r, op = self.request, self.request.op
        accepted = inspect.signature(getattr(kda_core, op)).parameters
        return {
            "op": op, "backend": self.backend.info.name, "direction": self.direction, "problems": list(problems),
            "tensors": copied({n: t for n, t in self.saved_tensors().items() if n in accepted}),
            "options": {n: v for n, v in self.options().items() if n in accepted},
            "grads": copied({n: t for n, t in self.tensors.items() if n.startswith("grad_")}),
            "needs_grad": sorted(r.needs_grad), "results": {} if result is None else copied(self.results(result)),
            "versions": {"kda_core": kda_core.__version__, "torch": str(torch.__version__)},
        }  # fmt: skip


class _CallCheck(_Check):
    """One call of ``chunk_kda`` or ``fused_recurrent_kda``."""

    request: Request

    def __init__(self, backend: Backend, request: Request, is_backward: bool, settings: CheckSettings) -> None:
        super().__init__(backend, request, is_backward, settings)
        self.indexed = on_cpu(request)
        _checks.check_values(self.indexed)
        has_pool = request.inplace_final_state and request.initial_state is not None
        self.slots = Slots(self.indexed) if has_pool else None
        self.sample = Sample(self.indexed, self.slots, settings.elements, _choice)
        self.rows = finite.live_rows(self.indexed, None if self.slots is None else self.slots.skipped)
        self.pools_before: dict[str, Tensor] = {}

    def compared(self) -> str:
        return str(self.sample)

    def options(self) -> dict[str, Any]:
        return {n: getattr(self.request, n) for n in OPTIONS}

    def saved_tensors(self) -> dict[str, Tensor]:
        if self.slots is None:
            return super().saved_tensors()
        return super().saved_tensors() | Sample(self.indexed, self.slots, 2**62, random.Random(0)).pool()

    def problems_before(self) -> list[str]:
        r, slots = self.request, self.slots
        problems = []
        for name, t in self.tensors.items():
            if name in (*DATA, "grad_o"):
                problems += finite.faults_of_rows(name, t, self.rows, r)
            elif name in ("A_log", "dt_bias", "grad_final_state") or (name == "initial_state" and slots is None):
                problems += finite.faults(name, t)
        if slots is not None:
            read = [i for i, slot in enumerate(slots.used) if slot in slots.read]
            problems += finite.faults("initial_state", slots.states[read], [slots.used[i] for i in read])
            self.pools_before = {n: bit_sum(getattr(r, n), by_slot=True) for n in self._slots_written()}
        self.remember_inputs(frozenset(filter(None, [r.written_states])))
        self.call = self.sample.call()
        return problems

    def problems_after(self, result: Any) -> list[str]:
        problems = self.modified_inputs() + self._touched_slots()
        if wrong := self.misshapen(result):
            return problems + wrong
        results = self.results(result)
        for name, t in results.items():
            if name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
                problems += finite.faults_of_rows(name, t, self.rows, self.request)
                problems += finite.padding_faults(name, t, self.rows)
            else:
                problems += finite.faults(name, t)
        for name, written in self._slots_written().items():
            what = "final_state" if name == self.request.written_states else name
            problems += finite.faults(what, getattr(self.request, name)[sorted(written)], sorted(written))
        if not self.sample.sequences:
            return problems
        call, got = self.call, self._sampled(results)
        if self.direction == "backward":
            call = replace(call, grads=self._gradients())
        return problems + on_fresh_thread(lambda: self._off(call, got))

    def _off(self, call: Call, got: dict[str, Tensor]) -> list[str]:
        exact, allowed = references.results(call), budgets.budgets(call, self.request.device)
        dtypes = budgets.result_dtypes(call.request())
        expected = {n: (exact[n], dtypes[n], allowed[n]) for n in got}
        problems = self.compare(got, expected, self.request.q.dtype, self.sample.place)
        if self.slots is None:
            return problems
        for kept in kept_states(self.request, self.sample, self.call, self.settings.elements, _choice):
            problems += [f"{kept.name}: {problem}" for problem in self._kept_off(kept)]
        return problems

    def _kept_off(self, kept: Kept) -> list[str]:
        """Sentences about checkpoints, or states that records replay, outside the budget of final states."""

        def place(name: str, where: tuple[int, ...]) -> str:
            return f"{kept.places[where[0]]}, head {self.sample.value_heads.start + where[1]}"

        exact = references.results(kept.call)["final_state"]
        expected = exact, kept.dtype, budgets.budgets(kept.call, self.request.device)["final_state"]
        return self.compare({"final_state": kept.states}, {"final_state": expected}, kept.dtype, place)

    def _gradients(self) -> dict[str, Tensor]:
        """The gradients that the sample's backward starts from."""
        r, sample = self.request, self.sample
        found = {} if r.grad_o is None else {"o": sample.tokens_of("o", r.grad_o)}
        if r.grad_final_state is not None and sample.tokens is None:
            found["final_state"] = sample.states_of(r.grad_final_state)
        return found

    def _sampled(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """The results that the sample determines, cut to the sample."""
        sample, found = self.sample, {}
        complete = sample.tokens is None
        for name, t in results.items():
            if self.direction == "backward" and not complete and name != "dq":
                continue
            if name in SUMS_OVER_TOKENS:
                if sample.whole:
                    found[name] = t.detach()[sample.value_heads].cpu()
            elif name in ("final_state", "dinitial_state"):
                if complete:
                    found[name] = sample.states_of(t)
            elif name == "h":
                found[name] = sample.chunk_states_of(t)
            else:
                found[name] = sample.tokens_of(name, t)
        if self.request.written_states and self.slots is not None and complete:
            pool = getattr(self.request, self.request.written_states)
            written = torch.tensor(sample.written_slots(), dtype=torch.long, device=pool.device)
            found["final_state"] = pool[written][:, sample.value_heads].cpu()
        return found

    def _slots_written(self) -> dict[str, set[int]]:
        """The slots that the call may write, by the name of their pool."""
        found: dict[str, set[int]] = {}
        r, slots = self.request, self.slots
        if slots is not None:
            for name, written in ((r.written_states, slots.written()), (r.checkpoint_states, slots.checkpoints())):
                if name is not None:
                    found[name] = found.get(name, set()) | written
        return found

    def _touched_slots(self) -> list[str]:
        """Slots of the pools that changed though the call does not write them."""
        found = []
        for name, allowed in self._slots_written().items() if self.pools_before else ():
            changed = (bit_sum(getattr(self.request, name), by_slot=True) != self.pools_before[name]).nonzero()
            wrong = sorted({*changed[:, 0].tolist()} - allowed)
            many = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            if wrong:
                found.append(f"{name}: slot {wrong[0]}{many} changed, which this call must not write")
        return found


class _GateCheck(_Check):
    """One call of ``kda_gate``."""

    request: GateRequest

    def __init__(self, backend: Backend, request: GateRequest, is_backward: bool, settings: CheckSettings) -> None:
        super().__init__(backend, request, is_backward, settings)
        HV, K = request.g.shape[-2:]
        rows = max(request.g[..., 0, 0].numel(), 1)
        allowed = max(settings.elements // 8, 1)
        heads = max(1, min(HV, allowed // (rows * K)))
        first = _choice.randrange(HV - heads + 1)
        self.heads = slice(first, first + heads)
        few = max(1, min(rows, allowed // (heads * K)))
        start = _choice.randrange(rows - few + 1)
        self.rows = slice(start, start + few)
        self.whole = few == rows

    def compared(self) -> str:
        if self.whole and self.heads == slice(0, self.request.g.shape[-2]):
            return "all of it"
        return f"tokens {self.rows.start} to {self.rows.stop - 1}, heads {self.heads.start} to {self.heads.stop - 1}"

    def options(self) -> dict[str, Any]:
        return {"lower_bound": self.request.lower_bound}

    def _rows_of(self, t: Tensor) -> Tensor:
        """[1, tokens, heads, K] of a tensor [..., HV, K]."""
        flat = t.detach().reshape(1, -1, *self.request.g.shape[-2:])
        return flat[:, self.rows, self.heads].to("cpu", copy=True)

    def problems_before(self) -> list[str]:
        self.remember_inputs(frozenset())
        shared = {n: self.tensors[n].detach()[self.heads] for n in ("A_log", "dt_bias") if n in self.tensors}
        self.sampled = {"g": self._rows_of(self.request.g)} | {n: t.to("cpu", copy=True) for n, t in shared.items()}
        return [problem for n, t in self.tensors.items() for problem in finite.faults(n, t, nan_only=n == "g")]

    def problems_after(self, result: Any) -> list[str]:
        # The reference has no finite number for the limit that an infinite input stands for.
        limits = bool(self.sampled["g"].isinf().any())
        if problems := self.modified_inputs() + self.misshapen(result):
            return problems
        results = self.results(result)
        for name, t in results.items():
            problems += finite.faults(name, t, nan_only=limits or bool(self.request.g.isinf().any()))
        if limits or not self.sampled["g"].numel():
            return problems
        got = {n: self._rows_of(t) for n, t in results.items() if n in ("gate", "dg")}
        if self.whole:
            got |= {n: t.detach()[self.heads].cpu() for n, t in results.items() if n in SUMS_OVER_TOKENS}
        grad = self.request.grad_output
        cotangent = None if grad is None else self._rows_of(grad)
        return problems + on_fresh_thread(lambda: self._off(got, cotangent))

    def _off(self, got: dict[str, Tensor], cotangent: Tensor | None) -> list[str]:
        from kda_core.testing.gate import expectations

        r = self.request
        with references.single_threaded():
            expected = expectations(self.sampled, r.lower_bound, r.output_dtype, cotangent)
        return self.compare(got, expected, r.g.dtype, self._place)

    def _place(self, name: str, where: tuple[int, ...]) -> str:
        if name in SUMS_OVER_TOKENS:
            return f"head {self.heads.start + where[0]}"
        index = torch.unravel_index(torch.tensor(self.rows.start + where[1]), self.request.g.shape[:-2] or (1,))
        return f"token {[int(i) for i in index]}, head {self.heads.start + where[2]}"

"""The backend under test: makes calls on it and checks all that must hold for every call. Needs no pytest.

A call that the backend does not declare is made too: it must be refused with the declared reason, and raises
``Refused``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kda_core._plugins import registry
from kda_core.capabilities import BackendInfo, Feature
from kda_core.errors import ContractViolation, UnsupportedCall
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import Request, chunks_of
from kda_core.testing import budgets, interpreter, references
from kda_core.testing.axes import DTYPES, axes
from kda_core.testing.budgets import Budget, Error
from kda_core.testing.call_samples import whole
from kda_core.testing.cases import Case
from kda_core.testing.inputs import Call, guards, placed, poisoned, same_bits, slice_is_strided
from kda_core.testing.nearby import Build, nearest, turned_down
from kda_core.testing.targets import Target

INTERPRETER_LEAVES_OUT = (
    "Triton's interpreter multiplies bfloat16 operands wrongly, and truncates where it should round to bfloat16; this "
    "version could not be corrected"
)

INTERPRETER_DRAWS_FEWER = 4
"""In the interpreter a test draws this many times fewer random calls than on a device, but at least two."""

INTERPRETER_MOST_CHUNKS = 50
"""Chunks of all sequences and heads in one call; each takes the interpreter a tenth of a second, forward."""

INTERPRETER_LEAVES_LONG_CALLS_OUT = (
    f"Triton's interpreter takes too long over more than {INTERPRETER_MOST_CHUNKS} chunks of all sequences and heads"
)

CALLS = 3  # How often a small call is made on a device
MOST_BYTES_OF_REPEATED_CALLS = 2**24


class Refused(Exception):
    """The backend does not serve the call.

    It is "refused" by declared features and limits, "rejected" by ``kda_core_reject``, or "left out": the interpreter
    cannot run it.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status


class Mismatch(AssertionError):
    """A result, or memory after a call, breaks the contract."""


Results = dict[str, Tensor]  # Results of a call on the CPU, by name ("o", "final_state", "h", "pool", "dq", ...)


@dataclass
class Record:
    """The record of one call, for the report."""

    backend: str
    axes: dict[str, list[str]]  # its values along each axis (``axes.axes``)
    dtype: str  # of q, k and v
    features: list[str]  # names of those that it needs
    name: str  # of its case
    status: str = "served"  # or that of ``Refused``, with its reasons
    reasons: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)  # of its results, as shares of their budgets

    def turned_down(self, status: str, *reasons: str) -> Refused:
        """Note that the call was not served; returns the exception that says so."""
        self.status, self.reasons = status, list(reasons)
        return Refused(status, "; ".join(reasons))

    def refused(self, error: UnsupportedCall, declared: list[str]) -> Refused:
        """Note that the backend refused the call; returns the exception that says so, or raises ``Mismatch``."""
        missing = [reason for reason in declared if reason not in str(error)]
        if missing:
            raise Mismatch(f"refused without the declared reason {missing[0]!r}: {error}") from error
        return self.turned_down("refused", *declared) if declared else self.turned_down("rejected", str(error))

    def note(self, output: str, error: Error, budget: Budget, slack: float = 1.0) -> None:
        """Note the error of a result."""
        entry = {"output": output, "input_dtype": self.dtype, "case": self.name, "slack": slack}
        entry |= {"frobenius": error.frobenius, "worst_row": error.worst_row, "share": error.share(budget)}
        self.errors.append(entry | {"budget_frobenius": budget.frobenius, "budget_worst_row": budget.worst_row})


def _is_strided(call: Call) -> bool:
    """Whether an input is passed that is not contiguous."""
    return any(slice_is_strided(tuple(call.tensors[n].shape)) for n in call.strided & {"q", "k", "v", "g", "beta"})


def refusal_of(action: Callable[[], object]) -> Refused | None:
    """Run an action; returns the refusal that it raises, or None."""
    try:
        action()
    except Refused as refusal:
        return refusal
    return None


def expect_kind(
    name: str, t: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, strided: bool = False
) -> None:
    """``strided``: it may have any strides."""
    if tuple(t.shape) != tuple(shape) or t.dtype != dtype or t.device != device:
        got = f"{list(t.shape)} {t.dtype} on {t.device}"
        raise Mismatch(f"{name}: expected {list(shape)} {dtype} on {device}, got {got}")
    if not strided and not t.is_contiguous():
        raise Mismatch(f"{name}: expected a contiguous tensor, got strides {t.stride()}")


def undeclared(info: BackendInfo, r: Request, features: Collection[Feature] | None = None) -> list[str]:
    """The reasons for which declared capabilities refuse a request; ``features``: that it needs, unless its own."""
    c = info.capabilities
    reasons = [c.refusal(f) for f in sorted(r.features if features is None else features, key=lambda f: f.name)]
    found = [reason for reason in reasons if reason is not None]
    if r.q.dtype not in c.dtypes:
        found.append(f"does not take {DTYPES[r.q.dtype]}")
    for symbol, size, limit in (("K", r.K, c.max_head_dim_k), ("V", r.V, c.max_head_dim_v)):
        if limit is not None and size > limit:
            found.append(f"takes head dimensions {symbol} up to {limit}")
    return found


class Subject:
    """A backend under test on a device; ``about``: the features that the test is about."""

    def __init__(self, target: Target, about: Collection[Feature] = ()) -> None:
        self.target, self.about = target, frozenset(about)
        self.info = registry.named(target.backend).info
        self.records: list[Record] = []  # one for every call made so far
        self.wrong_in_bfloat16 = target.interpreted and not interpreter.bfloat16_is_right()

    @property
    def name(self) -> str:
        return self.target.backend

    @property
    def device(self) -> torch.device:
        return self.target.device

    def declares(self, *features: Feature) -> bool:
        """Whether the backend declares all of these features."""
        return set(features) <= self.info.capabilities.features

    @property
    def is_complete(self) -> bool:
        """Whether the backend declares every feature of the oracle; then it may reject no combination."""
        return self.declares(*registry.named("reference").info.capabilities.features)

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether q, k and v may have this dtype here."""
        return dtype in self.info.capabilities.dtypes and not (self.wrong_in_bfloat16 and dtype == torch.bfloat16)

    def repeats(self, count: int) -> int:
        """How often a test repeats a call: once in the interpreter, whose programs run one after another."""
        return 1 if self.target.interpreted else count

    def draws(self, count: int) -> int:
        """How many calls, or sequences, a test draws: fewer in the interpreter, which is thousands of times slower."""
        if not self.target.interpreted:
            return count
        return min(count, max(2, -(-count // INTERPRETER_DRAWS_FEWER)))

    def run(self, call: Call, wrt: Collection[str] = DIFFERENTIABLE) -> Results:
        """Make the call on copies of its tensors in poisoned memory, with everything but the numbers checked.

        Checked: a call outside the declared capabilities is refused with the declared reasons; inputs (and the
        memory round everything) stay as they are, bit for bit; slots of a pool that the call does not write stay too;
        results have the shapes, dtypes and device of the contract; optional results are there exactly when asked for;
        rows of no sequence are zero; sequences without tokens pass their states on; made again, small calls have the
        same bits on devices. ``wrt``: the arguments whose gradient a call with gradients asks for.

        Raises:
            Refused: the backend does not serve the call.
            Mismatch: it breaks the contract.
        """
        request = call.request()
        features = sorted(f.name for f in self._features(request, call))
        placement = {"inputs": ["strided" if _is_strided(call) else "contiguous"]}
        placement |= {"out": ["given" if call.given_out else "fresh"]}
        record = Record(self.name, axes(request) | placement, DTYPES[request.q.dtype], features, call.name)
        self.records.append(record)
        reasons = self._refusals(request, call)
        if self.target.interpreted and not reasons:
            stored = [d for n, d in budgets.result_dtypes(request).items() if call.grads or not n.startswith("d")]
            if self.wrong_in_bfloat16 and torch.bfloat16 in stored:
                raise record.turned_down("left out", INTERPRETER_LEAVES_OUT)
            if (request.B * request.T // request.chunk_size + request.N) * request.HV > INTERPRETER_MOST_CHUNKS:
                raise record.turned_down("left out", INTERPRETER_LEAVES_LONG_CALLS_OUT)
        results = self._made(call, wrt, request, record, reasons)
        for _ in range(self.calls(call) - 1):
            again = self._made(call, wrt, request, record, reasons)
            other = [n for n, x in results.items() if not same_bits(x, again[n])]
            if other:
                raise Mismatch(f"{', '.join(other)}: other bits when the call was made again")
        return results

    def calls(self, call: Call) -> int:
        """How often ``run`` makes a call: repeated calls show errors of state that a backend keeps between calls.

        Once on the CPU, where calls are slow, and once with large tensors.
        """
        small = sum(t.numel() * t.element_size() for t in call.tensors.values()) <= MOST_BYTES_OF_REPEATED_CALLS
        return CALLS if small and self.device.type != "cpu" else 1

    def _made(self, call: Call, wrt: Collection[str], request: Request, record: Record, reasons: list[str]) -> Results:
        """Make the call once on new copies of its tensors, with the checks of ``run``."""
        tensors = {n: placed(t, self._device_of(n), n in call.strided) for n, t in call.tensors.items()}
        if call.given_out:
            tensors["out"] = poisoned(request.v.shape, request.q.dtype, self.device, "out" in call.strided)
        before = {n: guards(t).clone() for n, t in tensors.items()}
        try:
            results = self._answered(call, request, tensors, wrt)
        except UnsupportedCall as error:
            self.expect_untouched(before, tensors)
            raise record.refused(error, reasons) from None
        except ContractViolation as error:
            raise Mismatch(str(error)) from None
        if reasons:
            raise Mismatch(f"served a call that it does not declare: {'; '.join(reasons)}")
        written = frozenset(request.written) & tensors.keys()
        self.expect_untouched(before, tensors, written)
        for name in written:
            self._expect_rest_untouched(call, name, before[name], tensors[name])
        if wrong := call.faults(results):
            raise Mismatch("; ".join(wrong))
        return results

    def check(self, call: Call | Case, build: Build = Case.call, about: Collection[Feature] = ()) -> Results:
        """Make the call and compare every result with the oracle, within the budgets; raises as ``run`` does.

        Args:
            call: a call; or a case: where the backend refuses its call, the nearest case that it serves is checked too,
                if it declares what the test is about.
            build: makes the call of a case.
            about: features that the nearest case must still need, beside those of the test.
        """
        case, call = (call, build(call)) if isinstance(call, Case) else (None, call)
        try:
            results = self.run(call)
        except Refused as refusal:
            found = None if case is None or refusal.status == "left out" else self._nearest(case, build, about)
            if found is None:
                raise
            case, build = found
            results = self.run(call := build(case))
        self.compare(call, results)
        return results

    def near(self, case: Case, build: Build = Case.call, about: Collection[Feature] = ()) -> Case:
        """The case, or the nearest one that the backend serves, for tests that are not about dtypes or dimensions.

        ``build`` and ``about`` as for ``check``.
        """
        found = None if self._serves(build(case), ()) else self._nearest(case, build, about)
        return case if found is None else found[0]

    def _nearest(self, case: Case, build: Build, about: Collection[Feature]) -> tuple[Case, Build] | None:
        call = build(case)
        request = call.request()
        wanted = self.about | set(about)
        # A complete backend must serve the case itself.
        if not self.declares(*wanted) or (self.is_complete and not self._refusals(request, call)):
            return None
        wanted &= self._features(request, call)
        return nearest(self.info, case, build, lambda other: self._serves(other, wanted))

    def _serves(self, call: Call, wanted: Collection[Feature]) -> bool:
        """Whether the call needs all of these features and the backend says that it serves it."""
        request = call.request()
        if not self._features(request, call).issuperset(wanted) or self._refusals(request, call):
            return False
        return turned_down(self.name, call, self.device) is None

    def compare(self, call: Call, results: Results) -> None:
        """Compare results with the oracle's; a ``Mismatch`` names those outside of their budgets and declared slack."""
        expected, compared = references.results(call), self._comparison(call)
        # Written slots of a pool are compared as final states, all others bit for bit.
        names = [n for n in results if n not in ("pool", "checkpoints", "records")]
        if wrong := list(filter(None, (compared(n, results[n], expected[n]) for n in names))):
            raise Mismatch(f"{call.op} of {call.name!r} on {self.name!r}:\n  " + "\n  ".join(wrong))

    def expect(self, call: Call, name: str, got: Tensor, expected: Tensor, what: str) -> None:
        """Compare a tensor with an expected one, within the budget that output ``name`` of ``call`` has."""
        if wrong := self._comparison(call)(name, got, expected.double()):
            raise Mismatch(f"{what}, {call.name!r}: {wrong}")

    def _comparison(self, call: Call) -> Callable[[str, Tensor, Tensor], str]:
        """A function of an output's name, a result and the expected one: a sentence if it is outside its budget."""
        r, allowed = call.request(), budgets.budgets(call, self.device)
        dtypes = budgets.result_dtypes(r)

        def place(*where: Any) -> str:
            return whole(r).place(*where)

        def compared(name: str, got: Tensor, expected: Tensor) -> str:
            slack, budget = self.info.slack, allowed[name]
            error, factor, wrong = budgets.compare(name, got, expected, dtypes[name], budget, place, slack, r.q.dtype)
            if self.records:
                self.records[-1].note(name, error, budget, factor)
            return wrong

        return compared

    def _features(self, r: Request, call: Call) -> set[Feature]:
        own = {Feature.STRIDED_INPUT: _is_strided(call), Feature.OUT: call.given_out}
        # A call's own tensors may be expanded; the kit passes contiguous copies by default.
        return set(r.features) - {Feature.STRIDED_INPUT} | {feature for feature, is_used in own.items() if is_used}

    def _refusals(self, r: Request, call: Call) -> list[str]:
        return undeclared(self.info, r, self._features(r, call))

    def on_device(self, call: Call) -> dict[str, Tensor]:
        """Copies of the call's tensors where the backend takes them, for calls that are made by hand."""
        return {n: t.to(self._device_of(n), copy=True) for n, t in call.tensors.items()}

    def _device_of(self, name: str) -> torch.device:
        return torch.device("cpu") if name == "cu_seqlens_cpu" else self.device

    def _answered(self, call: Call, r: Request, tensors: dict[str, Tensor], wrt: Collection[str]) -> Results:
        if call.grads:
            return self._differentiated(call, r, tensors, wrt)
        with torch.no_grad():
            answer = call(tensors, self.name)
        results = self._named(call, r, answer)
        if call.given_out and results["o"].data_ptr() != tensors["out"].data_ptr():
            raise Mismatch("o is not the buffer that was passed as out")
        if call.has_pool:
            pool = tensors[r.written_states or "initial_state"]
            if "final_state" in results and results["final_state"].data_ptr() != pool.data_ptr():
                raise Mismatch("final_state is not the pool that was advanced in place")
            results["pool"] = pool
            if "records" in tensors:
                results["records"] = tensors["records"]
            if "checkpoint_indices" in call.tensors:
                kept = tensors[r.checkpoint_states or "checkpoint_pool"]
                results["checkpoints"] = kept[call.checkpoint_slots()]
        moved = {n: t.to("cpu", copy=True) for n, t in results.items()}
        if call.has_pool:
            moved["final_state"] = moved["pool"][call.written_slots()]
        return moved

    def _named(self, call: Call, r: Request, answer: tuple) -> Results:
        """The results by name, their presence, shapes, dtypes and device checked."""
        expected = {"o": (tuple(r.v.shape), r.q.dtype)}
        if r.output_final_state:
            state = r.state_shape if r.written_states is None else tuple(getattr(r, r.written_states).shape)
            expected["final_state"] = (state, r.final_dtype)
        if r.return_intermediate_states:
            expected["h"] = ((r.B, chunks_of(r), *r.state_shape[1:]), r.h_dtype)
        names = ("o", "final_state", "h") if r.return_intermediate_states else ("o", "final_state")
        if not isinstance(answer, tuple) or len(answer) != len(names):
            raise Mismatch(f"returned {answer!r}, expected a tuple of {', '.join(names)}")
        results = {n: t for n, t in zip(names, answer, strict=True) if t is not None}
        if results.keys() != expected.keys():
            raise Mismatch(f"returned {', '.join(results)}, expected {', '.join(expected)}")
        for name, (shape, dtype) in expected.items():
            written = {"o": call.given_out, "final_state": call.has_pool}.get(name, False)
            expect_kind(name, results[name], shape, dtype, self.device, written)
        return results

    def _differentiated(self, call: Call, r: Request, tensors: dict[str, Tensor], wrt: Collection[str]) -> Results:
        names = [n for n in DIFFERENTIABLE if n in tensors and n in wrt]
        for n in names:
            tensors[n].requires_grad_()
        outputs = self._named(call, r, call(tensors, self.name))
        given = {n: placed(g, self.device, f"grad_{n}" in call.strided) for n, g in call.grads.items()}
        before = {n: guards(t).clone() for n, t in given.items()}
        found = torch.autograd.grad(
            [outputs[n] for n in given], [tensors[n] for n in names], list(given.values()), allow_unused=True
        )
        self.expect_untouched(before, given)
        results = {n: t.detach().to("cpu", copy=True) for n, t in outputs.items()}
        for n, grad in zip(names, found, strict=True):
            like = tensors[n].requires_grad_(False)
            if grad is None:
                raise Mismatch(f"d{n}: expected a gradient, got None")
            expect_kind(f"d{n}", grad, like.shape, like.dtype, like.device)
            # dt_bias is [HV, K] in requests.
            results[f"d{n}"] = grad.to("cpu", copy=True).reshape(getattr(r, n).shape)
        return results

    def expect_untouched(
        self, before: dict[str, Tensor], now: dict[str, Tensor], written: Collection[str] = ()
    ) -> None:
        for name, old in before.items():
            if name not in written and not torch.equal(guards(now[name]), old):
                raise Mismatch(f"{name} was modified, or memory round it was")

    def _expect_rest_untouched(self, call: Call, name: str, before: Tensor, t: Tensor) -> None:
        """All of a pool, of records and of ``out``'s surroundings that the call does not write stays as it was."""
        restored = guards(t).clone()
        layout = (t.shape, t.stride(), t.storage_offset())
        view, old_view = (x.view(t.dtype).as_strided(*layout) for x in (restored, before))
        if name == "out":
            written: Any = slice(None)
        else:
            rows = call.computed_rows() if name == "records" else torch.tensor(call.slots_of(name), dtype=torch.long)
            written = rows.to(t.device)
        view[written] = old_view[written]
        if not torch.equal(restored, before):
            raise Mismatch(f"{name}: memory was written that this call must not touch")

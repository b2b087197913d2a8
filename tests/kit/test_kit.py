"""The conformance kit itself: inputs, cases, what the subject finds, and what the suite covers."""

from __future__ import annotations

import ast
import contextlib
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toys import Toy, installed

from kda_core._plugins import registry
from kda_core.capabilities import Feature
from kda_core.testing import gate, interpreter, suite
from kda_core.testing.axes import AXES, axes
from kda_core.testing.budgets import measure
from kda_core.testing.cases import BF16, CASES, Case, named, select
from kda_core.testing.inputs import GUARD, guards, placed, poisoned, same_bits
from kda_core.testing.subject import Mismatch, Refused, Subject
from kda_core.testing.targets import Target

SUITE = Path(suite.__file__).parent
HERE = Path(__file__).parent
CPU = torch.device("cpu")

# Lines of docs/notes/failures.md that are about how kernels are launched and configured, not about results: each
# backend's own tests hold them.
LAUNCH_MACHINERY = {18, 30}
FAILURES = HERE.parents[1] / "docs" / "notes" / "failures.md"


def modules() -> list[ast.Module]:
    return [ast.parse(file.read_text()) for file in sorted(SUITE.glob("test_*.py"))]


def suite_tests() -> list[ast.FunctionDef]:
    return [f for m in modules() for f in m.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")]


# Inputs


def test_placed_tensor_lies_in_poison():
    t = torch.arange(6.0).reshape(2, 3)
    for strided in (False, True):
        there = placed(t, CPU, strided)
        assert torch.equal(there, t)
        assert there.is_contiguous() is not strided
        buffer = guards(there).view(t.dtype)
        assert buffer[:GUARD].isnan().all()
        assert buffer[-GUARD:].isnan().all()
        assert int(buffer.isnan().logical_not().sum()) == t.numel()
    assert poisoned((2, 3), BF16, CPU).isnan().all()


def test_same_bits_knows_nan_and_signs():
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([float("nan"), -0.0]))


@pytest.mark.parametrize("shape", [(0, 2, 1), (3, 2, 1), (1, 1)])
def test_same_bits_takes_any_stride_of_an_axis_of_one(shape: tuple[int, ...]):
    """Slots that a call did not write, rows of one channel: torch sees no bytes of some that it calls contiguous."""
    x = torch.ones(shape, dtype=torch.bfloat16).as_strided(shape, (*torch.empty(shape).stride()[:-1], 0))
    assert x.is_contiguous()
    assert same_bits(x, torch.ones(shape, dtype=torch.bfloat16))
    assert same_bits(x, -x) == (x.numel() == 0)


# Cases


@pytest.mark.parametrize(("off", "allowed"), [(2.0**-22, True), (2.0**-19, False)])
def test_gate_budget_knows_how_exact_functions_are(off: float, allowed: bool):
    """A row eight times as large as its head's others, of an exp that is off there by two units in the last place."""
    tensors = gate.arguments(A_log=False)
    tensors["g"] += 15.0
    cotangent = torch.ones_like(tensors["g"])
    expected, _, budget = gate.expectations(tensors, -5.0, torch.float32, cotangent)["dg"]
    summed = {"g": tensors["g"] + tensors["dt_bias"].view(tensors["g"].shape[-2:])}
    got = gate.expectations(summed, -5.0, torch.float32, cotangent)["dg"][0]
    share = 2 * torch.rand(got.shape, generator=torch.Generator().manual_seed(0)) - 1
    row = measure("dg", got, expected, torch.float32).where
    share[row] = (got - expected)[row].sign().float()
    got += off * share * got.abs()
    assert (measure("dg", got, expected, torch.float32).share(budget) <= 1) == allowed


def test_cases_have_names_of_their_own():
    assert len({c.name for c in CASES}) == len(CASES)


def test_cases_are_the_same_every_time():
    for case in select("verify"):
        assert case.call().digest() == case.call().digest()


@pytest.mark.parametrize("case", select("-slow"), ids=lambda c: c.name)
def test_case_is_a_right_call(case: Case):
    """Every case is one that the oracle serves, and its axes are known to the report."""
    call = case.call()
    for axis, values in axes(call.request()).items():
        assert set(values) <= set(AXES[axis]), axis
    Subject(Target("reference", CPU)).run(call.forward_only())


def test_a_few_fast_cases_run_the_backward():
    fast = select("backward", "-slow")
    assert 3 <= len(fast) <= 12
    needed = {Feature.VARLEN, Feature.GVA, Feature.SOFTPLUS_GATE}
    assert needed <= frozenset().union(*(c.call().request().features for c in fast))
    assert any(not c.lengths for c in fast)


# Subject: what it finds


@pytest.fixture
def altered_subject(altered):
    """Subject of the reference backend whose forward results are altered."""

    def alter(change) -> Subject:
        altered(change, "kda_core_chunk_forward")
        return Subject(Target("reference", CPU))

    return alter


def _write(t: Tensor, value: float) -> None:
    t.view(-1)[0] = value


FAULTS = {
    "modified": lambda r, y: (_write(r.v, 3.0), y)[1],
    "final_state: expected": lambda r, y: replace(y, final_state=y.final_state.double()),
    "returned": lambda r, y: replace(y, final_state=None),
    "o: expected": lambda r, y: replace(y, o=y.o[..., :-1]),
    "worst row": lambda r, y: replace(y, o=1.1 * y.o),
    "relative error inf": lambda r, y: replace(y, o=y.o * float("nan")),
}


@pytest.mark.parametrize("message", FAULTS)
def test_subject_finds(altered_subject, message: str):
    subject = altered_subject(FAULTS[message])
    with pytest.raises(Mismatch, match=message):
        subject.check(named("past a chunk").call())


def test_a_mismatch_says_where_with_four_digits(altered_subject):
    def one_row(r, y):
        y.o[0, 20, 1] = 1 / 3
        return y

    case = Case(name="where", T=30, K=16, lengths=(4, 0, 26))
    with pytest.raises(
        Mismatch, match=r"at token 16 of sequence 2 \(row 20\), head 1: got \[0\.3333, 0\.3333, 0\.3333\]"
    ):
        altered_subject(one_row).check(case)


def test_subject_finds_writes_round_a_tensor(altered_subject):
    def write_behind(r, y):
        r.g.as_strided((1,), (1,), r.g.storage_offset() + r.g.numel()).fill_(0)
        return y

    with pytest.raises(Mismatch, match="memory round it"):
        altered_subject(write_behind).check(named("past a chunk").call())


@pytest.mark.parametrize("times", [2, 3])
def test_subject_finds_bits_that_differ_when_a_call_is_made_again(altered_subject, times: int):
    """On devices every small call is made three times: what is kept of the first ones serves the last."""
    count = []

    def third(r, y):
        count.append(0)
        return replace(y, o=y.o.nextafter(torch.full_like(y.o, 9.0))) if len(count) % 3 == 0 else y

    class Repeating(Subject):
        def calls(self, call):
            return times

    altered_subject(third)
    found = pytest.raises(Mismatch, match="o: other bits when the call was made again")
    with found if times == 3 else contextlib.nullcontext():
        Repeating(Target("reference", CPU)).run(named("past a chunk").call())
    assert len(count) == times


def test_small_calls_are_repeated_on_devices():
    call = named("past a chunk").call()
    large = call.having(dt_bias=torch.zeros(1).expand(2**23))
    for device, times in ((CPU, 1), (torch.device("cuda"), 3)):
        subject = Subject(Target("reference", device))
        assert (subject.calls(call), subject.calls(large)) == (times, 1)


def test_subject_demands_the_declared_reason():
    with installed(Toy("small", closed={Feature.OUT: "no buffer"})):
        subject = Subject(Target("small", CPU))
        with pytest.raises(Refused, match="no buffer"):
            subject.run(replace(named("below a chunk").call(), given_out=True))
    assert subject.records[-1].status == "refused"


def test_interpreter_leaves_bfloat16_out_where_it_is_wrong():
    """Visibly: as a record with its reason, never on a device."""
    subject = Subject(Target("reference", CPU, interpreted=True))
    assert subject.wrong_in_bfloat16 is not interpreter.bfloat16_is_right()
    subject.wrong_in_bfloat16 = False
    assert subject.takes(BF16)
    subject.run(named("bfloat16").call())
    subject.wrong_in_bfloat16 = True
    with pytest.raises(Refused, match="left out"):
        subject.run(named("bfloat16").call())
    assert subject.records[-1].status == "left out"
    subject.run(named("past a chunk").call())
    assert not subject.takes(BF16)
    assert Subject(Target("reference", CPU)).takes(BF16)


def _random_calls(subject: Subject, name: str, part: int) -> list:
    """The calls that a part of the random test checks, none of which is made."""
    from kda_core.testing.suite import test_random

    made: list = []
    subject.check = lambda case, build: made.append(build(case))
    test_random.test_random(subject, name, part)
    return made


def test_random_calls_are_the_same_for_every_backend():
    """And every version of Python; parts and tests draw calls of their own."""
    from kda_core.testing.suite import test_random

    one, other = (Subject(Target(name, CPU)) for name in ("reference", "cpu"))
    first = [call.digest() for call in _random_calls(one, "forward", 1)]
    assert len(set(first)) == len(first) == 6
    assert first == [call.digest() for call in _random_calls(other, "forward", 1)]
    kinds = [test_random.kind(random.Random(f"forward {part} 0"), "chunk_kda") for part in range(5)]
    assert [(case.K, case.V) for case in kinds] == [(1, 1), (3, 3), (16, 3), (3, 3), (33, 1)]
    assert not set(first) & {call.digest() for call in _random_calls(one, "forward", 2)}
    assert not set(first) & {call.digest() for call in _random_calls(one, "forward, thorough", 1)}


def test_random_calls_of_one_kind_are_compiled_once():
    """They differ in lengths and values, and agree in all that a kernel may be compiled for."""
    calls = _random_calls(Subject(Target("reference", CPU)), "forward, thorough", 0)
    kinds = [
        (
            {name: (t.dtype, t.shape[2:] if name in "qkvg" else t.dim()) for name, t in call.tensors.items()},
            {name: value for name, value in call.options.items() if name != "scale"},
            call.strided,
        )
        for call in calls
    ]
    assert len(calls) == 12
    assert [kinds.index(kind) for kind in kinds] == [0, 1] * 6
    assert len({call.tensors["v"].shape for call in calls}) > 6


def test_random_calls_vary_in_everything():
    """Each of these occurs among the thorough calls; a condition that never held would leave an axis out in silence."""
    calls = [c for part in range(30) for c in _random_calls(Subject(Target("cpu", CPU)), "backward, thorough", part)]
    assert len(calls) == 300
    shares = {
        "equal q and k": sum(torch.equal(c.tensors["q"], c.tensors["k"]) for c in calls),
        "rows of zeros": sum(not c.tensors["q"].any(-1).all() for c in calls),
        "large values": sum(c.tensors["v"].abs().max() > 20 for c in calls if c.tensors["v"].numel()),
        "small states": sum(
            c.tensors["initial_state"].abs().max() < 0.3 for c in calls if "initial_state" in c.tensors
        ),
        "packed": sum("cu_seqlens" in c.tensors for c in calls),
        "empty sequences": sum(0 in c.lengths() for c in calls),
        "K = V": sum(c.tensors["q"].shape[-1] == c.tensors["v"].shape[-1] for c in calls),
        "grouped values": sum(c.tensors["q"].shape[2] != c.tensors["v"].shape[2] for c in calls),
        "a scale": sum("scale" in c.options for c in calls),
        "no A_log": sum("use_gate_in_kernel" in c.options and "A_log" not in c.tensors for c in calls),
    }
    assert all(n >= 5 for n in shares.values()), shares


@pytest.mark.parametrize(
    "error", [RuntimeError("a kernel"), Mismatch("an input was changed"), Refused("rejected", "no")], ids=repr
)
def test_a_random_call_that_fails_fails_its_test(error):
    """Not only results beyond their budgets: a crash, a broken promise, a refusal of what was declared."""
    from kda_core.testing.suite import test_random

    def failing(case, build):
        raise error

    subject = Subject(Target("reference", CPU, interpreted=True))
    subject.check = failing
    with pytest.raises((RuntimeError, AssertionError)):
        test_random.test_random(subject, "forward", 0)


def test_interpreter_does_less():
    """One repeat, fewer random calls, no long calls (a record says so); a device does everything."""
    subject, device = (Subject(Target("reference", CPU, interpreted=i)) for i in (True, False))
    assert (subject.repeats(30), device.repeats(30)) == (1, 30)
    assert [(subject.draws(n), device.draws(n)) for n in (25, 3, 1)] == [(7, 25), (2, 3), (1, 1)]
    with pytest.raises(Refused, match="takes too long"):
        subject.run(Case(name="long", T=8192, K=1).call())
    assert subject.records[-1].status == "left out"
    subject.run(Case(name="three steps", op="fused_recurrent_kda", B=4, T=3, K=4).call())


# The suite


def test_suite_tests_have_names_of_their_own_and_docstrings():
    tests = suite_tests()
    names = [t.name for t in tests]
    assert len(set(names)) == len(names)
    assert [t.name for t in tests if not ast.get_docstring(t)] == []


def test_suite_is_bound_to_this_repository():
    bound = set(re.findall(r"suite\.(\w+) import", (HERE / "test_kda.py").read_text()))
    assert bound == {file.stem for file in SUITE.glob("test_*.py")}


def test_suite_and_kit_name_no_vendor():
    for file in [*SUITE.glob("*.py"), *SUITE.parent.glob("*.py")]:
        words = set(re.findall(r"[a-z]+", file.read_text().lower()))
        assert not words & {"nvidia", "amd", "rocm", "hopper", "blackwell", "cdna"}, file.name


def test_every_line_of_the_failures_has_a_test():
    """The number of each line of docs/notes/failures.md is in a test's docstring."""
    lines = {int(n) for n in re.findall(r"^\| (\d+) \|", FAILURES.read_text(), flags=re.MULTILINE)}
    cited = set()
    for test in suite_tests():
        for numbers in re.findall(r"FAILURES ([\d, ]+)", ast.get_docstring(test)):
            cited |= {int(n) for n in re.findall(r"\d+", numbers)}
    module_docs = " ".join(ast.get_docstring(m) for m in modules())
    cited |= {int(n) for n in re.findall(r"FAILURES (\d+)", module_docs)}
    assert lines - cited == LAUNCH_MACHINERY
    assert cited <= lines


def test_the_table_of_reports_is_true():
    """Its tests exist, and its backends are those that declare the features that each requires."""
    tests = {test.name: test for test in suite_tests()}
    rows = re.findall(r"^\| \[.*\) \| .* \| (`.*`) \| ([a-z, ]+) \|$", FAILURES.read_text(), flags=re.MULTILINE)
    assert len(rows) == 6
    infos = {b.info.name: b.info for b in registry.backends if b.info.name in ("cpu", "nvidia", "amd")}
    for names, backends in rows:
        for name in re.findall(r"`(\w+)`", names):
            decorators = " ".join(map(ast.unparse, tests[name].decorator_list))
            required = {Feature[f] for f in re.findall(r"Feature\.(\w+)", decorators)}
            assert required
            declaring = {n for n, info in infos.items() if required <= info.capabilities.features}
            assert declaring == {*backends.split(", ")} & infos.keys(), name


def test_every_feature_is_required_by_a_test():
    source = " ".join(file.read_text() for file in SUITE.glob("*.py"))
    assert [f.name for f in Feature if f"Feature.{f.name}" not in source] == []


def test_page_for_vendors_names_every_feature_and_module():
    """The steps of docs/write_a_backend.md lead to all of the contract."""
    page = (HERE.parents[1] / "docs" / "write_a_backend.md").read_text()
    rows = re.findall(r"^\| \d\. [^|]+\| ([^|]+) \| ([^|]+) \|$", page, flags=re.MULTILINE)
    declared = {name for features, _ in rows for name in features.split(", ")}
    assert declared == {f.name for f in Feature}
    tested = {name for _, modules_of_step in rows for name in modules_of_step.split(", ")}
    assert tested == {file.stem for file in SUITE.glob("test_*.py")}

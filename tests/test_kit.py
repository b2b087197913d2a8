"""The conformance kit itself: budgets that a plausible bug exceeds, and the plugin's behaviour."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kda_core.capabilities import Feature, Slack
from kda_core.testing import budgets, references, rounding, suite
from kda_core.testing.axes import AXES, axes
from kda_core.testing.cases import BF16, CASES, FP16, FP32, Case, named, select
from kda_core.testing.inputs import GUARD, guards, placed, poisoned, same_bits
from kda_core.testing.plugin import INTERPRETER_VARIABLE, MODE_VARIABLE
from kda_core.testing.subject import Mismatch, Refused, Subject, Target

SUITE = Path(suite.__file__).parent
TESTS = Path(__file__).parent
CPU = torch.device("cpu")

# Lines of FAILURES.md that are about how kernels are launched and configured, not about results: each backend's own
# tests hold them.
LAUNCH_MACHINERY = {13, 17, 18, 30}


def modules() -> list[ast.Module]:
    return [ast.parse(file.read_text()) for file in sorted(SUITE.glob("test_*.py"))]


def suite_tests() -> list[ast.FunctionDef]:
    return [f for m in modules() for f in m.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")]


# Budgets


def exact(call) -> dict[str, Tensor]:
    noise = rounding.Noise(0.0, 0.0, random.Random(0))
    grads = {n: t.double() for n, t in call.grads.items()}
    request = rounding.in_float64(call.request())
    return {
        n: t[0] for n, t in rounding.sample(request, noise, 1, grads, dict.fromkeys(budgets.HEAD_AXIS, 0.0)).items()
    }


@pytest.mark.parametrize(
    "case", select("backward", "-slow") + select("packed", "-slow", "-backward"), ids=lambda c: c.name
)
def test_rounding_model_without_noise_is_the_oracle(case: Case):
    """The computation that budgets are measured on is KDA, gradients included."""
    call = case.call()
    expected = references.results(call)
    for name, got in exact(call).items():
        if name in expected:
            error = budgets.measure(name, got, expected[name], torch.float64)
            assert error.frobenius < 1e-11, name
            assert error.worst_row < 1e-10, name


@pytest.mark.parametrize(("dtype", "unit"), [(BF16, 2**-8), (FP16, 2**-11), (FP32, 2**-24)])
def test_budget_follows_the_dtype(dtype: torch.dtype, unit: float):
    """A budget is a few roundoffs of the dtype: neither less than one, nor so many that a bug could hide."""
    found = budgets.budgets(Case(name="scale of budgets", T=130, K=64, dtype=dtype, state=FP32, backward=True).call())
    for name in ("o", "final_state", "dq", "dk", "dv"):
        assert unit < found[name].frobenius < 24 * unit, name
        assert found[name].frobenius <= found[name].worst_row < 200 * unit, name


def test_budget_is_the_same_in_every_run():
    call = named("plain").call()
    first = budgets.budgets(call)
    budgets._cache.clear()
    assert budgets.budgets(call) == first


def test_budget_grows_with_what_the_inputs_do_to_errors():
    plain = budgets.budgets(Case(name="random keys", T=70, beta=1.0, decay="none").call())["o"]
    parallel = budgets.budgets(Case(name="parallel", T=70, beta=1.0, decay="none", keys="nearly parallel").call())["o"]
    assert parallel.frobenius > 1.5 * plain.frobenius


def test_no_environment_variable_in_budgets():
    for module in (budgets, rounding, references):
        assert not re.search(r"os\.|getenv", Path(module.__file__).read_text())


PLAUSIBLE_BUGS = {
    "scale off by 2%": lambda o: 1.02 * o,
    "one row missing": lambda o: torch.cat([o[:, :-1], torch.zeros_like(o[:, -1:])], 1),
    "one row from its neighbour": lambda o: torch.cat([o[:, 1:2], o[:, 1:]], 1),
    "heads swapped": lambda o: o.flip(2),
    "one element lost": lambda o: o.index_put(
        (torch.tensor(0), torch.tensor(9), torch.tensor(1), torch.tensor(3)), torch.tensor(0.0, dtype=o.dtype)
    ),
    "not a number": lambda o: o.index_put(
        (torch.tensor(0), torch.tensor(9)), torch.tensor(float("nan"), dtype=o.dtype)
    ),
}


@pytest.mark.parametrize("bug", PLAUSIBLE_BUGS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_plausible_bug_exceeds_the_budget(bug: str, dtype: torch.dtype):
    call = Case(name="bugs", T=130, K=64, dtype=dtype).call()
    expected = references.results(call)["o"]
    error = budgets.measure("o", PLAUSIBLE_BUGS[bug](expected), expected, dtype)
    assert error.share(budgets.budgets(call)["o"]) > 1


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_correct_result_rounded_is_within_the_budget(dtype: torch.dtype):
    call = Case(name="rounded", T=130, K=64, dtype=dtype).call()
    expected = references.results(call)["o"]
    assert budgets.measure("o", expected.to(dtype), expected, dtype).share(budgets.budgets(call)["o"]) < 0.6


def test_wrong_row_of_a_long_sequence_cannot_hide():
    """A row that is 10% off among 2,000 is invisible in the norm of the whole."""
    call = Case(name="long", T=2000, H=1, K=16, dtype=BF16).call()
    expected = references.results(call)["o"]
    wrong = expected.clone()
    wrong[0, 1000] *= 1.1
    error = budgets.measure("o", wrong, expected, BF16)
    budget = budgets.budgets(call)["o"]
    assert error.frobenius < budget.frobenius
    assert error.worst_row > budget.worst_row
    assert error.where == (0, 1000, 0)


def test_short_products_exceed_the_budget_of_float32():
    """Operands of ten bits (tf32) are no float32 result; they need a declared slack."""
    call = Case(name="short products", T=70, K=64).call()
    tf32 = {n: _cut(call.tensors[n]) for n in ("q", "k", "v")}
    got, expected = references.results(call.having(**tf32))["o"], references.results(call)["o"]
    assert budgets.measure("o", got, expected, FP32).share(budgets.budgets(call)["o"]) > 20


def _cut(t: Tensor) -> Tensor:
    return (t.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def test_slack_applies_by_output_and_dtype():
    slack = (Slack("o", BF16, 2.0, "why"), Slack("*", None, 1.5, "why"))
    assert budgets.slack_of(slack, "o", BF16).factor == 2.0
    assert budgets.slack_of(slack, "o", FP32).factor == 1.5
    assert budgets.slack_of(slack[:1], "dq", BF16) is None


def test_piecewise_gradients_are_the_whole_ones(monkeypatch):
    """Long sequences: the oracle's gradient is put together from pieces."""
    for case in (named("gradients"), named("gradients packed, grouped values, softplus gate")):
        call = case.call()
        whole = references.results(call)
        request = rounding.in_float64(call.request())
        monkeypatch.setattr(
            references, "MAX_GRAPH_BYTES", 20 * references._KEPT_STATES * 8 * request.HV * request.K * request.V
        )
        pieces = references._piecewise_backward(request, {n: g.double() for n, g in call.grads.items()})
        for name, expected in whole.items():
            torch.testing.assert_close(pieces[name], expected, rtol=1e-11, atol=1e-12, msg=name)


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


# Cases


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
    assert 3 <= len(fast) <= 10
    needed = {Feature.VARLEN, Feature.GVA, Feature.SOFTPLUS_GATE}
    assert needed <= frozenset().union(*(c.call().request().features for c in fast))
    assert any(not c.lengths for c in fast)


# Subject: what it finds


class Wrapped:
    """Alters what the reference backend returns, through a hook wrapper."""

    def __init__(self, change):
        from kda_core.hookspecs import hookimpl

        def kda_core_chunk_forward(request):
            return change(request, (yield))

        self.kda_core_chunk_forward = hookimpl(wrapper=True)(kda_core_chunk_forward)


@pytest.fixture
def altered():
    """Subject of the reference backend whose forward results are altered."""
    from kda_core.plugins import registry

    added = []

    def alter(change) -> Subject:
        added.append(Wrapped(change))
        registry.add_wrapper(added[-1])
        return Subject(Target("reference", CPU))

    yield alter
    for plugin in added:
        registry.remove_wrapper(plugin)


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
def test_subject_finds(altered, message: str):
    subject = altered(FAULTS[message])
    with pytest.raises(Mismatch, match=message):
        subject.check(named("past a chunk").call())


def test_subject_finds_writes_round_a_tensor(altered):
    def write_behind(r, y):
        r.g.as_strided((1,), (1,), r.g.storage_offset() + r.g.numel()).fill_(0)
        return y

    with pytest.raises(Mismatch, match="memory round it"):
        altered(write_behind).check(named("past a chunk").call())


def test_subject_demands_the_declared_reason():
    subject = Subject(Target("reference", CPU))
    with pytest.raises(Refused, match="the oracle runs on one device"):
        subject.run(named("past a chunk").call().having(cp_context=object()))
    assert subject.records[-1].status == "refused"


def test_interpreter_leaves_bfloat16_out():
    """Visibly: as a record with its reason, never on a device."""
    subject = Subject(Target("reference", CPU, interpreted=True))
    with pytest.raises(Refused, match="left out"):
        subject.run(named("bfloat16").call())
    assert subject.records[-1].status == "left out"
    subject.run(named("past a chunk").call())
    assert not subject.takes(BF16)
    assert Subject(Target("reference", CPU)).takes(BF16)


# The suite


def test_suite_tests_have_names_of_their_own_and_docstrings():
    tests = suite_tests()
    names = [t.name for t in tests]
    assert len(set(names)) == len(names)
    assert [t.name for t in tests if not ast.get_docstring(t)] == []


def test_suite_is_bound_to_this_repository():
    bound = set(re.findall(r"suite\.(\w+) import", (TESTS / "test_kda.py").read_text()))
    assert bound == {file.stem for file in SUITE.glob("test_*.py")}


def test_suite_and_kit_name_no_vendor():
    for file in [*SUITE.glob("*.py"), *SUITE.parent.glob("*.py")]:
        words = set(re.findall(r"[a-z]+", file.read_text().lower()))
        assert not words & {"nvidia", "amd", "rocm", "hopper", "blackwell", "cdna"}, file.name


def test_every_line_of_the_failures_has_a_test():
    """FAILURES.md has 31 lines; the number of each is in a test's docstring."""
    cited = set()
    for test in suite_tests():
        for numbers in re.findall(r"FAILURES ([\d, ]+)", ast.get_docstring(test)):
            cited |= {int(n) for n in re.findall(r"\d+", numbers)}
    module_docs = " ".join(ast.get_docstring(m) for m in modules())
    cited |= {int(n) for n in re.findall(r"FAILURES (\d+)", module_docs)}
    assert set(range(1, 32)) - cited == LAUNCH_MACHINERY


def test_every_feature_is_required_by_a_test():
    source = " ".join(file.read_text() for file in SUITE.glob("*.py"))
    assert [f.name for f in Feature if f"Feature.{f.name}" not in source] == []


# The plugin, in runs of pytest within this one

TINY = """
from kda_core.capabilities import Feature
from kda_core.testing.cases import named
from kda_core.testing.marks import requires, slow

def test_forward(kda):
    kda.check(named("past a chunk").call())

@slow
def test_long(kda):
    kda.check(named("one chunk").call())

@requires(Feature.CONTEXT_PARALLEL)
def test_never_asked(kda):
    pass

def test_of_no_backend():
    pass
"""


@pytest.fixture
def pytest_in(tmp_path, monkeypatch):
    """Runs pytest with the plugin on a small test module; returns exit status and output."""
    (tmp_path / "test_tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    alone = ("-p", "kda_core.testing.plugin", "-p", "no:cacheprovider", "--import-mode=importlib", "--capture=no")

    def run(*arguments: str, mode: str = "fast") -> tuple[int, str]:
        monkeypatch.setenv(MODE_VARIABLE, mode)
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = pytest.main([*alone, *arguments])
        return int(status), output.getvalue()

    return run


def test_plugin_reports(pytest_in, tmp_path):
    """A named backend: header, summary, JSON; a test that never asked for what it requires fails."""
    status, text = pytest_in("--backend=reference", "--kda-report=report.json", "test_tiny.py")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "backend reference" in text
    assert "2 passed" in text
    assert "does not declare CONTEXT_PARALLEL" in text
    assert "1 deselected" in text
    report = json.loads((tmp_path / "report.json").read_text())
    (backend,) = report["backends"]
    assert backend["backend"] == "reference"
    assert backend["coverage"]["length"]["past a chunk"]["state"] == "covered"
    assert backend["coverage"]["layout"]["packed"]["state"] == "not covered"
    assert {e["output"] for e in backend["worst"]} == {"o", "final_state"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend=nowhere",), "backend 'nowhere' is not installed"),
        (("--backend=reference", "--backend=nowhere"), "backend 'nowhere' is not installed"),
    ],
    ids=["alone", "beside another"],
)
def test_plugin_refuses_a_backend_that_cannot_run(pytest_in, arguments, message: str):
    status, text = pytest_in(*arguments, "test_tiny.py")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert message in text


def test_plugin_fails_when_nothing_ran(pytest_in):
    """An explicit run in which no test of the kit ran has not shown anything."""
    status, text = pytest_in("--backend=reference", "test_tiny.py", "-k", "no_backend")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "no test of the conformance kit was executed" in text


@pytest.mark.parametrize(
    ("mode", "arguments", "passed"),
    [("fast", (), 1), ("slow", (), 1), ("all", (), 2), ("fast", ("-m", "slow"), 1)],
)
def test_plugin_tiers(pytest_in, mode: str, arguments: tuple[str, ...], passed: int):
    status, text = pytest_in("--backend=reference", "test_tiny.py", "-k", "forward or long", *arguments, mode=mode)
    assert status == pytest.ExitCode.OK, text
    assert f"{passed} passed" in text


def test_plugin_refuses_an_unknown_tier(pytest_in):
    status, text = pytest_in("test_tiny.py", mode="quick")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert MODE_VARIABLE in text


def test_plugin_without_names_takes_every_backend_but_the_oracle(pytest_in):
    status, text = pytest_in("test_tiny.py", "-k", "forward")
    assert status == pytest.ExitCode.OK, text
    assert "backend cpu" in text
    assert "backend reference" not in text


def test_plugin_interprets_only_before_triton_is_there(pytest_in, monkeypatch):
    monkeypatch.delenv(INTERPRETER_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "triton", object())
    status, text = pytest_in("--interpret", "--backend=reference", "test_tiny.py")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert f"set {INTERPRETER_VARIABLE}=1" in text


def test_plugin_interprets(pytest_in, monkeypatch):
    """With the interpreter switched on, a backend of the CPU alone is tested as ever."""
    monkeypatch.setenv(INTERPRETER_VARIABLE, "1")
    status, text = pytest_in("--interpret", "--backend=reference", "test_tiny.py", "-k", "forward")
    assert status == pytest.ExitCode.OK, text


def test_plugin_runs_the_installed_suite(pytest_in):
    """From any folder: ``--pyargs kda_core.testing.suite``."""
    status, text = pytest_in("--pyargs", "kda_core.testing.suite", "--backend=reference", "-k", "test_beta_at_its_ends")
    assert status == pytest.ExitCode.OK, text
    assert "2 passed" in text

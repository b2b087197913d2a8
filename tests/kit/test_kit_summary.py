"""The kit's summary of failures, the order of its tests, and tiers that collect nothing."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import mutants
import pytest
from installed import need_package

from kda_core._plugins import registry
from kda_core.testing import suite, tiers
from kda_core.testing.failures import Failures, Outcome
from kda_core.testing.report import BackendReport

CASES = """
import pytest
from kda_core.testing.cases import BF16, FP16, FP32, Case

LAYOUTS = {"dense": {"T": 9}, "packed": {"T": 9, "lengths": (4, 1, 4)}}

@pytest.mark.parametrize("V", [4, 8, 16])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("final_state", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case(kda, layout, final_state, dtype, V):
    kda.check(Case(name=f"{layout} {V}", K=8, V=V, dtype=dtype, final_state=final_state, **LAYOUTS[layout]))
"""

TIERS = {
    "test_fast.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_slow.py": "import pytest\n@pytest.mark.slow\ndef test_long(): pass\n",
}


@pytest.fixture(autouse=True)
def files(tmp_path):
    """The tests that ``run_inner`` finds."""
    (tmp_path / "test_cases.py").write_text(CASES)
    for name, text in TIERS.items():
        (tmp_path / name).write_text(text)


# Properties that failures share


@pytest.mark.parametrize(
    ("mutant", "involved"),
    [
        (mutants.LeakedNeighbour, {"VARLEN"}),
        pytest.param(mutants.TransposedState, {"FINAL_STATE", "head dimensions: K = V"}, marks=pytest.mark.end_to_end),
    ],
)
def test_summary_names_what_failures_share(run_inner, registered, tmp_path, mutant, involved: set):
    name = registered(mutant())
    status, text = run_inner(f"--backend={name}", "--kda-report=report.json", "--tb=no", "test_cases.py")
    assert status == pytest.ExitCode.TESTS_FAILED
    (backend,) = json.loads((tmp_path / "report.json").read_text())["backends"]
    failures = backend["failures"]
    assert failures["count"] == backend["outcomes"]["failed"] > 1
    shared = {v["value"] for v in failures["involve"] if v["failed"] == failures["count"]}
    assert involved <= shared, failures
    assert not {v for v in shared if v.startswith("dtype")}
    for value in involved:
        assert f"all {failures['count']} failures involve {value} (" in text
    assert f"the first, simplest tests first: {failures['tests'][0]}" in text
    assert f"run it again: {failures['rerun']}" in text
    assert "relative error" in text[text.index("the first, simplest") : text.index("run it again")]


def test_summary_gives_a_command_that_runs_the_first_failure(run_inner, registered, tmp_path):
    name = registered(mutants.LeakedNeighbour())
    arguments = (f"--backend={name}", "--kda-report=report.json", "--tb=no")
    suite_module = f"{suite.__name__}.test_packing"
    run_inner(*arguments, "--pyargs", suite_module, "-k", "with and empty and sequences")
    (backend,) = json.loads((tmp_path / "report.json").read_text())["backends"]
    command = shlex.split(backend["failures"]["rerun"])
    assert command[:3] == ["pytest", "-p", "kda_core.testing.plugin"]
    assert command[4] == f"{suite_module}::test_packed[{name}-packed with empty sequences]"
    status, text = run_inner(*command[3:], "--tb=no")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "1 failed" in text


def test_summary_says_nothing_of_failures_where_there_are_none(run_inner, tmp_path):
    status, text = run_inner("--backend=cpu", "--kda-report=report.json", "test_cases.py", "-k", "packed and True")
    assert status == pytest.ExitCode.OK
    assert "involve" not in text
    (backend,) = json.loads((tmp_path / "report.json").read_text())["backends"]
    nothing = {"count": 0, "tests": [], "functions": [], "involve": [], "rerun": None}
    assert backend["failures"] == nothing


def _outcomes(failed: list[set[str]], passed: list[set[str]]) -> list[Outcome]:
    ended = [(values, True) for values in failed] + [(values, False) for values in passed]
    return [Outcome(f"test_{i}", i, bad, frozenset(values)) for i, (values, bad) in enumerate(ended)]


def test_a_value_that_every_test_has_explains_nothing():
    failures = Failures("mychip", _outcomes([{"CHUNK", "GVA"}] * 3, [{"CHUNK"}] * 20))
    assert [v["value"] for v in failures.involve()] == ["GVA"]


def test_a_value_is_named_where_most_tests_fail():
    """19 of 45 failed: all of them with K = V, and no other test with it did much better."""
    failed = [{"FINAL_STATE", "head dimensions: K = V"}] * 19
    passed = [{"head dimensions: K = V"}] * 14 + [{"FINAL_STATE", "UNEQUAL_HEAD_DIMS", "head dimensions: K != V"}] * 12
    failures = Failures("mychip", _outcomes(failed, passed))
    assert [v["value"] for v in failures.involve()] == ["FINAL_STATE", "head dimensions: K = V"]


def test_a_value_of_few_failures_is_not_named():
    failures = Failures("mychip", _outcomes([{"VARLEN"}] * 8 + [{"GVA"}], [{"CHUNK"}] * 20))
    assert [v["value"] for v in failures.involve()] == ["VARLEN"]
    assert "8 of 9 failures involve VARLEN" in "\n".join(failures.lines())


def _of_functions(*tests: tuple[str, bool, set[str]]) -> Failures:
    return Failures("mychip", [Outcome(t, i, bad, frozenset(values)) for i, (t, bad, values) in enumerate(tests)])


def test_a_function_comes_before_what_its_calls_have_in_common():
    """Four failures of one test, all with K = 20, say nothing of odd head dimensions elsewhere."""
    infinite = "kda_core.testing.suite.test_extremes::test_infinite_gate_input"
    tests = [(f"{infinite}[mychip-{i}]", i < 4, {"ODD_HEAD_DIMS", "GATE"}) for i in range(6)]
    failures = _of_functions(*tests, *((f"test_{i}", False, {"CHUNK"}) for i in range(40)))
    assert not failures.involve()
    text = "\n".join(failures.lines())
    assert text.startswith("  4 failed:\n    all 4 in test_extremes::test_infinite_gate_input (2 tests of it passed)\n")
    assert "ODD_HEAD_DIMS" not in text


def test_within_one_function_its_other_calls_tell():
    tests = [(f"test_a[{i}]", i < 3, {"VARLEN" if i < 4 else "GVA", "CHUNK"}) for i in range(12)]
    failures = _of_functions(*tests, *((f"test_{i}", False, {"VARLEN"}) for i in range(40)))
    assert [(v["value"], v["passed"]) for v in failures.involve()] == [("VARLEN", 1)]


def test_many_failures_of_one_function_are_one_piece_of_evidence():
    odd = [(f"test_odd[{i}]", True, {"ODD_HEAD_DIMS"}) for i in range(8)]
    others = [(f"test_{i}", True, {"VARLEN"}) for i in range(4)]
    failures = _of_functions(*odd, *others, *((f"test_p{i}", False, {"CHUNK"}) for i in range(40)))
    assert "ODD_HEAD_DIMS" not in [v["value"] for v in failures.involve()]
    assert failures.functions()[0] == {"function": "test_odd", "failed": 8, "passed": 0}


def test_slow_and_interpreted_failures_are_run_again_as_such():
    first = Outcome("kda_core.testing.suite.test_packing::test_a[b c]", 3, True, frozenset(), slow=True)
    second = Outcome("tests/test_b.py::test_b", 1, True, frozenset())
    command = Failures("mychip", [first], ("--interpret",)).rerun()
    assert command.endswith("'kda_core.testing.suite.test_packing::test_a[b c]' --backend=mychip --interpret -m slow")
    assert Failures("mychip", [first, second]).failed[0] is second


# The order of tests


def test_order_knows_every_module_of_the_suite():
    assert sorted(tiers.MODULES) == sorted(file.stem for file in Path(suite.__file__).parent.glob("test_*.py"))


@pytest.mark.parametrize(
    "names",
    [("test_bound.py",), pytest.param(("--pyargs", suite.__name__), marks=pytest.mark.end_to_end)],
    ids=["bound", "installed"],
)
def test_simple_tests_come_first_wherever_the_suite_is_bound(run_inner, tmp_path, names: tuple[str, ...]):
    """Alphabetically, and in a file of imports, the random tests would come before those of the states."""
    modules = ["test_random", "test_state", "test_forward"]
    imports = [f"from {suite.__name__}.{name} import *" for name in modules]
    (tmp_path / "test_bound.py").write_text("\n".join(imports))
    _, text = run_inner("-q", "--collect-only", "--backend=cpu", *names)
    tests = [line.rpartition("::")[2].partition("[")[0] for line in text.splitlines() if "::" in line]
    assert tests[0] == "test_forward"
    assert tests.index("test_state") < tests.index("test_random")
    assert tests[-1].startswith("test_random")


# Tiers


@pytest.mark.parametrize(
    ("mode", "arguments", "sentence"),
    [
        ("slow", ("test_fast.py",), "no tests in tier slow of test_fast.py: it has 2 tests, all fast"),
        ("fast", ("-m", "slow", "test_fast.py"), "no tests in tier slow of test_fast.py: it has 2 tests, all fast"),
        ("fast", ("test_slow.py",), "no tests in tier fast of test_slow.py: it has 1 test, all slow"),
        ("slow", ("test_fast.py::test_one",), "no tests in tier slow of test_fast.py::test_one: it has 1 test"),
        ("slow", ("--pyargs", f"{suite.__name__}.test_gates"), f"no tests in tier slow of {suite.__name__}.test_gates"),
    ],
    ids=["variable", "mark", "fast", "one test", "package"],
)
def test_tier_without_tests_fails(run_inner, mode: str, arguments: tuple, sentence: str):
    status, text = run_inner(*arguments, mode=mode)
    assert status == pytest.ExitCode.TESTS_FAILED, text
    assert sentence in text


@pytest.mark.parametrize(
    ("mode", "arguments"),
    [
        ("fast", ("test_fast.py",)),
        ("slow", ("test_slow.py",)),
        ("all", ("test_slow.py",)),
        ("all", ("test_fast.py",)),
        ("slow", ("test_fast.py", "test_slow.py")),  # files are often named by a pattern
        ("fast", ("-m", "not slow", "test_fast.py")),
        ("slow", ("--ignore=test_cases.py", ".")),
    ],
    ids=str,
)
def test_tier_with_tests_passes(run_inner, mode: str, arguments: tuple):
    status, text = run_inner(*arguments, mode=mode)
    assert status == pytest.ExitCode.OK, text
    assert "no tests in tier" not in text


@pytest.mark.slow
def test_workers_tell_of_a_tier_without_tests(run_inner):
    need_package("xdist", "pytest-xdist")
    status, text = run_inner("-n", "2", "test_fast.py", mode="slow")
    assert status == pytest.ExitCode.TESTS_FAILED, text
    assert "no tests in tier slow of test_fast.py" in text


def test_a_report_has_no_reasons_where_there_are_none():
    report = BackendReport(registry.named("reference").info, "cpu")
    record = {"status": "served", "axes": {}, "features": [], "reasons": [], "errors": []}
    report.add("passed", [record, record | {"status": "refused", "reasons": ["too long"]}])
    list(report.lines())
    assert report.as_json()["reasons"] == {"refused": {"too long": 1}}

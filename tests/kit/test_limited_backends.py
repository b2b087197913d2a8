"""The kit on backends that serve little (``limited_backends/``): green for what they declare, red for faults in it."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing import budgets, references, verify
from kda_core.testing.cases import BF16, FP32, Case
from kda_core.testing.subject import Refused, Subject
from kda_core.testing.targets import Target
from kda_core.testing.tiers import MODE_VARIABLE

MODULES = ("forward_only", "inference_only", "decoding_only")
FOLDER = Path(__file__).parent / "limited_backends"
CPU = torch.device("cpu")

# The comparisons with the oracle that the kit must have made: served calls, at least, by axis and value.
SERVED = {
    "forward_only": {
        "function": {"chunk_kda": 150, "fused_recurrent_kda": 80, "kda_gate": 10},
        "layout": {"packed": 40},
    },
    "inference_only": {"function": {"chunk_kda": 60}, "dtype": {"bfloat16": 60}, "length": {"past a chunk": 20}},
    "decoding_only": {
        "function": {"fused_recurrent_kda": 80},
        "initial state": {"bfloat16 pool": 40, "slot for every token": 8},
        "heads": {"grouped values": 10},
    },
}
NEVER_SERVED = {
    "forward_only": {"direction": ["backward"]},
    "inference_only": {
        "function": ["fused_recurrent_kda", "kda_gate"],
        "direction": ["backward"],
        "layout": ["packed"],
        "dtype": ["float16", "float32"],
        "final state": ["yes"],
    },
    "decoding_only": {"function": ["chunk_kda", "kda_gate"], "dtype": ["float32"], "gate": ["softplus"]},
}


def transposed(r, result):
    """Rows in the order of heads, then tokens."""
    result.o.copy_(result.o.transpose(1, 2).reshape(result.o.shape))
    return result


def last_channel_missing(r, result):
    """A tile that ends one channel early."""
    result.o[..., -1] = 0
    return result


def first_token_twice(r, result):
    """The first row of the output is written to the second as well."""
    result.o[:, 1:2] = result.o[:, :1]
    return result


def one_slot_late(r, result):
    """States are written to the slots of the next request."""
    if r.inplace_final_state and r.ssm_state_indices is not None and r.N > 1:
        slots = r.ssm_state_indices.reshape(r.N, -1)[:, 0].long()
        if (slots >= 0).all():
            r.initial_state[slots] = r.initial_state[slots].roll(1, 0)
    return result


def state_transposed(r, result):
    """A square final state comes out V first."""
    if result.final_state is None or r.K != r.V:
        return result
    return replace(result, final_state=result.final_state.mT.contiguous())


FAULTS = [
    ("inference_only", transposed, "test_forward"),
    ("inference_only", last_channel_missing, "test_forward"),
    ("inference_only", first_token_twice, "test_forward"),
    ("decoding_only", one_slot_late, "test_paged_pool"),
    ("decoding_only", last_channel_missing, "test_paged_pool::test_draft"),
    ("forward_only", state_transposed, "test_state"),
]


@pytest.fixture
def limited(registered):
    """Registers the backend of a module of the folder, for one test; answers its name."""
    return lambda module: registered(importlib.import_module(f"limited_backends.{module}"))


def run_kit_here(module: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the kit's module on registered backends, in this process."""
    output = io.StringIO()
    # The last one collects garbage several times at the end of a run, from all that the outer run holds.
    left_out = ("-p", "no:cacheprovider", "-p", "no:unraisableexception")
    options = ("-p", "kda_core.testing.plugin", *left_out, "-q", "--tb=short")
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = pytest.main([*options, *arguments, "--pyargs", f"kda_core.testing.suite.{module}"])
    return int(status), output.getvalue()


# The kit


@pytest.mark.end_to_end
@pytest.mark.parametrize("module", MODULES)
def test_whole_kit(tmp_path, module: str):
    """No failure; what is declared is compared with the oracle, what is not is refused."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")} | {MODE_VARIABLE: "fast"}
    command = [sys.executable, FOLDER / "run_kit.py", module, "-q", "--tb=short", "--kda-report=report.json"]
    child = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == pytest.ExitCode.OK, child.stdout[-4000:] + child.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"] == []
    (backend,) = report["backends"]
    assert "failed" not in backend["outcomes"]
    coverage = backend["coverage"]
    for axis, values in SERVED[module].items():
        for value, least in values.items():
            assert coverage[axis][value].get("served", 0) >= least, f"{axis}: {value}"
    for axis, values in NEVER_SERVED[module].items():
        for value in values:
            assert coverage[axis][value]["state"] == "refused", f"{axis}: {value}"


@pytest.mark.end_to_end
def test_kit_refuses_and_serves_as_declared(limited):
    """The kit's module on refusals, on all of them."""
    backends = [f"--backend={limited(module)}" for module in MODULES]
    status, text = run_kit_here("test_rejections", *backends)
    assert status == pytest.ExitCode.OK, text[-3000:]


# The rest of FAULTS is tried with the end-to-end tests.
@pytest.mark.parametrize(
    ("module", "fault", "tests"),
    [
        pytest.param(*fault, id=f"{fault[0]}-{fault[1].__name__}", marks=[pytest.mark.end_to_end] if i else [])
        for i, fault in enumerate(FAULTS)
    ],
)
def test_kit_finds_a_fault(limited, altered, module: str, fault, tests: str):
    """Green means something: the same backends with a fault in what they serve."""
    name = limited(module)
    altered(fault, "kda_core_chunk_forward", "kda_core_recurrent_forward")
    status, text = run_kit_here(tests, f"--backend={name}", "-x")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "Mismatch" in text


# The nearest case


def subject_of(name: str) -> Subject:
    return Subject(Target(name, CPU))


def test_nearest_case_is_the_case_where_that_is_served(limited):
    case = Case(name="as it is", T=5, V=20, dtype=FP32, state=FP32)
    assert subject_of("reference").near(case) is case
    assert subject_of(limited("forward_only")).near(case) is case


def test_nearest_case_of_one_shape(limited):
    """A dtype and dimensions that are served, no states, no groups; tokens and values stay."""
    case = Case(name="far away", T=5, HV=4, K=20, V=36, state=BF16, gate="softplus", l2norm=True)
    near = subject_of(limited("inference_only")).near(case)
    assert (near.dtype, near.K, near.V, near.HV, near.T) == (BF16, 128, 128, 2, 5)
    assert (near.state, near.final_state, near.gate, near.l2norm) == (None, False, "given", False)


def test_refused_call_and_the_nearest_one_are_both_recorded(limited):
    subject = subject_of(limited("inference_only"))
    subject.check(Case(name="recorded", T=5))
    refused, served = subject.records
    assert (refused.status, served.status) == ("refused", "served")
    assert "does not take float32" in refused.reasons
    assert served.name == "recorded, nearby"
    assert served.errors


def test_no_other_case_shows_what_a_test_is_about(limited):
    """A test of packed sequences says nothing of a backend that serves dense ones alone: it ends as refused."""
    name = limited("inference_only")
    with pytest.raises(Refused, match="packed sequences"):
        Subject(Target(name, CPU), [Feature.VARLEN]).check(Case(name="about packing", T=5, lengths=(2, 3)))
    with pytest.raises(Refused, match="packed sequences"):
        subject_of(name).check(Case(name="about packing", T=5, lengths=(2, 3)), about={Feature.VARLEN})


def test_nearest_case_lies_in_a_pool_where_nothing_else_is_served(limited):
    subject = subject_of(limited("decoding_only"))
    subject.check(Case(name="long prompt", op="fused_recurrent_kda", B=2, T=40, K=16, state=FP32))
    (axes,) = [record.axes for record in subject.records if record.status == "served"]
    assert axes["initial state"] == ["bfloat16 pool"]
    assert axes["length"] == ["below a chunk"]


# verify


@pytest.mark.end_to_end
@pytest.mark.parametrize("module", ["inference_only", "decoding_only"])
def test_verify_of_a_limited_backend(limited, module: str):
    """Something is compared, everything else is refused, nothing fails; drafts are served where they are declared."""
    rows = [row for part in verify.by_case(limited(module), CPU) for row in part]
    assert {row.verdict for row in rows} <= {"passed", "refused", "untested"}
    passed = {row.case for row in rows if row.verdict == "passed"}
    assert len(passed) >= 5
    assert any(case.startswith("draft, some accepted") for case in passed) == (module == "decoding_only")
    assert any("does not take float32" in row.note for row in rows)


def test_a_complete_backend_has_no_nearest_case(limited, altered):
    """It turns nothing down by its own word: such a call stands as a failure of the tests that look for it."""
    case = Case(name="turned down", T=5, K=16)
    altered(lambda request, reason: "K = 32 only" if request.K == 16 else reason, "kda_core_reject")
    for name, complete in (("reference", True), (limited("forward_only"), False)):
        subject = subject_of(name)
        assert subject.is_complete is complete
        if complete:
            with pytest.raises(Refused, match=r"rejected: .* K = 32 only"):
                subject.check(case)
            assert subject.near(case) is case
        else:
            subject.check(case)
            assert [record.status for record in subject.records] == ["rejected", "served"]


def test_states_of_a_draft_may_be_rounded_once_each(limited):
    """Exact but for the rounding to bfloat16 after every token, which the samples of last states alone do not know."""
    subject = subject_of(limited("decoding_only"))
    case = Case(name="y0", op="fused_recurrent_kda", T=8, H=1, K=16, V=1, dtype=BF16, state=BF16)
    call = case.call().in_pool(torch.arange(8, dtype=torch.int32).view(1, 8), 9)
    found, expected = subject.check(call)["final_state"], references.results(call)["final_state"]
    error = budgets.measure("final_state", found, expected, BF16)
    assert error.share(budgets.budgets(call)["final_state"]) <= 1
    assert error.share(budgets.budgets(call.without_pool())["final_state"]) > 1

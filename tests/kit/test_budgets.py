"""The kit's budgets: derived from rounding, and exceeded by a plausible bug."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kda_core import platforms
from kda_core.capabilities import Slack
from kda_core.testing import budgets, references, rounding
from kda_core.testing.cases import BF16, FP16, FP32, FP64, Case, named, select


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


@pytest.mark.parametrize("short", [FP32, BF16], ids=str)
def test_float64_call_with_shorter_tensors(short: torch.dtype):
    """Gates and states may be shorter than q: their results are rounded once, and no other budget grows by that."""
    case = Case(name="float64 beside shorter", T=70, dtype=FP64, gate_dtype=short, state=short, backward=True)
    call = case.call()
    expected, found = references.results(call), budgets.budgets(call)
    for name, dtype in budgets.result_dtypes(call.request()).items():
        if name == "h":  # not asked for
            continue
        error = budgets.measure(name, expected[name].to(dtype), expected[name], dtype)
        assert error.share(found[name]) < 0.6, name
        assert found[name].frobenius < 6 * rounding.unit_roundoff(dtype) * (8 if dtype == FP64 else 1), name


def test_gradients_below_what_float16_holds_in_full_are_within_the_budget():
    """With decays of e⁻⁸ in every channel all gradients of g are below 6e-5, where float16 has few digits."""
    case = Case(name="random 33", T=15, lengths=(10, 5), H=3, HV=9, K=20, V=1, dtype=FP16, gate_dtype=FP16, decay=-8.0)
    call = case.having(beta="sigmoid", final_state=False, backward=True).call()
    expected = references.results(call)["dg"]
    share = budgets.measure("dg", expected.half(), expected, FP16).share(budgets.budgets(call)["dg"])
    assert 0.3 < share < 0.6


def test_gradients_of_decays_allow_for_states_that_kernels_keep_between_chunks():
    """Where nearly nothing decays and little is written they are products of the first state and the last gradient."""
    case = Case(name="kept", K=32, V=1, dtype=BF16, gate="lower bound", dt_bias=True, beta=0.01, state=BF16)
    calls = [case.having(T=T, final_state=True, backward=True).call() for T in (32, 33)]
    one_chunk, two = (budgets.budgets(call.having(g=call.tensors["g"] - 9)) for call in calls)
    assert two["ddt_bias"].frobenius > 4 * one_chunk["ddt_bias"].frobenius
    assert two["ddt_bias"].frobenius < 4 * rounding.unit_roundoff(BF16)


def test_states_of_a_pool_are_measured_where_they_are_advanced():
    """A state that a call leaves alone (no token, skipped) is no measure of the rest: here such states are far larger.

    One row of the others is much larger than the rest of them. An exactly rounded one exceeded the budget.
    """
    case = Case(name="budget of a pool", T=80, lengths=(0, 40, 40), K=32, dtype=BF16, state=BF16)
    call = case.having(options={"state_v_first": True}).call()
    call.tensors["initial_state"][0] *= 1000
    call.tensors["v"][..., 3] *= 100
    call = call.in_pool(torch.tensor([3, 1, 2], dtype=torch.int32), 5)
    expected = references.results(call)["final_state"]
    rounded = budgets.measure("final_state", expected.to(BF16), expected, BF16)
    assert 0 < rounded.share(budgets.budgets(call)["final_state"]) < 1


def test_sequences_without_tokens_have_no_intermediate_states():
    """An empty h has a budget, too: no call is left that the kit cannot check."""
    case = Case(name="no tokens", T=1, lengths=(0, 0), K=8, state=FP32)
    call = case.having(options={"return_intermediate_states": True}).call()
    expected = references.results(call)["h"]
    assert expected.shape[:2] == (1, 0)
    budget = budgets.budgets(call)["h"]
    assert budgets.measure("h", torch.zeros_like(expected), expected, FP32).share(budget) <= 1


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


def test_flushed_subnormals_count_only_where_the_platform_flushes_them():
    """v near 6e-5, float16: products that take its small numbers for zero are right on such a device and nowhere else.

    The budget of bfloat16, whose subnormals are below 1e-38, and budgets on the CPU stay as they are.
    """
    gpu, tiny = torch.device("cuda"), torch.finfo(FP16).smallest_normal
    call = Case(name="small values", T=70, dtype=FP16).call()
    call = call.having(v=call.tensors["v"] * tiny)
    v = call.tensors["v"]
    got, expected = (references.results(c)["o"] for c in (call.having(v=v.where(v.abs() >= tiny, 0)), call))
    error = budgets.measure("o", got, expected, FP16)
    plain = budgets.budgets(call, gpu)
    assert error.share(plain["o"]) > 2
    assert error.share(budgets.budgets(call, gpu, platforms.flushed_below(gpu, FP16, True))["o"]) < 1
    assert budgets.budgets(call) == plain
    in_bfloat16 = Case(name="small values, bfloat16", T=70, dtype=BF16).call()
    below = platforms.flushed_below(gpu, BF16, True)
    assert budgets.budgets(in_bfloat16, gpu, below) == budgets.budgets(in_bfloat16)
    assert platforms.flushed_below(torch.device("cpu"), FP16, True) == platforms.flushed_below(gpu, FP32, True) == 0


def _cut(t: Tensor) -> Tensor:
    return (t.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def test_slack_applies_by_output_and_dtype():
    slack = (Slack("o", BF16, 2.0, "why"), Slack("*", None, 1.5, "why"))
    assert budgets.slack_of(slack, "o", BF16).factor == 2.0
    assert budgets.slack_of(slack, "o", FP32).factor == 1.5
    assert budgets.slack_of(slack[:1], "dq", BF16) is None


def test_piecewise_gradients_are_the_whole_ones():
    """Long sequences: the oracle's gradient is put together from pieces."""
    for case in (named("gradients"), named("gradients packed, grouped values, softplus gate")):
        call = case.call()
        whole = references.results(call)
        request = rounding.in_float64(call.request())
        most = 20 * references._KEPT_STATES * 8 * request.HV * request.K * request.V
        pieces = references._backward(request, call.grads, most)
        for name, expected in whole.items():
            torch.testing.assert_close(pieces[name], expected, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", ["g", "beta"])
def test_long_decodes_notice_a_rounded_gate(name: str) -> None:
    """FAILURES 23: g or beta rounded to bfloat16 on the way ends outside."""
    call = Case(name="decode drift", op="fused_recurrent_kda", T=2_000, K=16, decay="slow", state=FP32).call()
    rounded = replace(call, tensors=call.tensors | {name: call.tensors[name].bfloat16().float()})
    got, expected = (references.results(c)["final_state"] for c in (rounded, call))
    error = budgets.measure("final_state", got, expected, FP32)
    assert error.share(budgets.budgets(call)["final_state"]) > 1

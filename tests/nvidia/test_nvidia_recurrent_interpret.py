"""The NVIDIA kernel of fused_recurrent_kda in Triton's interpreter, against the oracle: what the kit leaves out there.

The kit's own suites run in the interpreter too; here are what only a device without checks of values meets, layouts,
sizes, packings and inputs that the kit lacks there, and branches of its own.
Triton reads TRITON_INTERPRET when it is imported, so all checks run in one process of their own, this file as a
script, which reports on each.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import installed
import interpreted
import pytest
import torch
from torch import Tensor

import kda_core
from kda_core.request import Request

pytestmark = pytest.mark.end_to_end

installed.need_backend("nvidia")
installed.need_package("triton")

H, HV, K, V = 2, 4, 20, 12
GROUP = {"H": 1, "HV": 2}
"""Fewer heads, for prompts: a program takes the interpreter much longer. Two groups of heads are in the kit's."""
GATES = {
    "given": {},
    "softplus": {"use_gate_in_kernel": True},
    "bounded": {"use_gate_in_kernel": True, "lower_bound": -5.0},
}
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def inputs(N: int, T: int, gate: str = "given", K: int = K, V: int = V, H: int = H, HV: int = HV) -> dict:
    """Arguments of a call, rows of q, k, v, g and beta cut out of one wide projection."""
    torch.manual_seed(0)
    widths = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": (HV, K), "beta": (HV,)}
    sizes = [torch.Size(w).numel() for w in widths.values()]
    parts = torch.randn(N, T, sum(sizes) + 3)[..., 1:-2].split(sizes, dim=-1)
    call = {n: x.unflatten(-1, w) for (n, w), x in zip(widths.items(), parts, strict=True)}
    call |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    if gate == "given":
        call["g"] = -call["g"].abs()
    else:
        call |= GATES[gate] | {"A_log": torch.rand(HV), "dt_bias": torch.randn(HV * K)}
    return call


def packed(call: dict, bounds: list[int], dtype: torch.dtype = torch.int32) -> dict:
    """The call with its sequences one behind the other, cut anew."""
    rows = {n: call[n].flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}
    return call | rows | {"cu_seqlens": torch.tensor(bounds, dtype=dtype)}


def pool(slots: int, v_first: bool = False, HV: int = HV) -> Tensor:
    """States with gaps between slots and between heads."""
    shape = (V, K) if v_first else (K, V)
    return torch.randn(slots, 2 * HV, *shape)[:, ::2]


def same(call: dict, run: Callable[..., Any] = kda_core.fused_recurrent_kda) -> tuple[Tensor, Tensor | None]:
    """Make the call on both sides, each with states and a buffer of its own, and compare all that they wrote."""
    before = {n: x.clone() for n, x in call.items() if isinstance(x, Tensor)}
    results = []
    for name in ("nvidia", "reference"):
        own = {n: call[n].clone() for n in ("initial_state",) if n in call}
        own |= {"out": torch.full_like(call["out"], float("nan"))} if "out" in call else {}
        o, state = run(**call | own, backend=name)
        results.append((o, state, own.get("initial_state")))
    for got, expected in zip(*results, strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    for n, x in before.items():
        torch.testing.assert_close(call[n], x, rtol=0, atol=0, equal_nan=True, msg=f"{n} was modified")
    return results[0][0], results[0][2]


@check
def large_heads() -> None:
    """Head dimensions above 128, where blocks are narrower, and of one channel."""
    for k, v in ((130, 5), (1, 1), (16, 70)):
        call = inputs(1, 2, K=k, V=v) | {"output_final_state": True}
        same(call)
        same(call | {"state_v_first": True})


@check
def block_table_columns() -> None:
    """Indices that are a column of a wide table; skipped rows; the slots around stay, bit for bit."""
    table = torch.full((4, 5), 7, dtype=torch.int32)
    table[:, 0] = torch.tensor([3, -1, 1, -5])
    states = pool(6)
    states[[0, 2, 4, 5]] = float("nan")
    call = inputs(4, 1, "bounded") | {"initial_state": states, "ssm_state_indices": table[:, 0]}
    o, _ = same(call | {"out": torch.empty(4, 1, HV, V)})
    assert not o[[1, 3]].any()
    o, _ = same(call | {"pad_slot_id": 3})
    assert not o[[0, 1, 3]].any()
    far = 2**40
    o, _ = same(call | {"ssm_state_indices": torch.tensor([3, far, 1, -5]), "pad_slot_id": far})
    assert not o[[1, 3]].any()
    same(call | {"scale": 1, "lower_bound": -3})  # integers, which must not be compiled as such


@check
def packed_with_empty_sequences_and_a_tail() -> None:
    """Empty sequences pass their state through, bit for bit; rows behind the last boundary are zero."""
    for dtype in (torch.int32, torch.int64):
        call = packed(inputs(1, 30, "softplus"), [0, 0, 3, 3, 5], dtype)
        o, _ = same(call | {"out": torch.empty(1, 30, V, HV).transpose(-1, -2)})
        assert not o[0, 5:].any()
        states = pool(4)
        call |= {"initial_state": states, "output_final_state": True}
        _, final = kda_core.fused_recurrent_kda(**call, backend="nvidia")
        assert torch.equal(final[[0, 2]], states[[0, 2]])
        for rows in (3, 12):
            nothing = packed(inputs(1, rows), [0])
            o, _ = kda_core.fused_recurrent_kda(**nothing, backend="nvidia")
            assert not o.any()


@check
def values_that_a_device_cannot_refuse() -> None:
    """Counts out of range are clamped; tokens past the table keep no state. (The core refuses both on the CPU.)"""
    from kda_core_nvidia.calls import CALLS

    def run(indices: Tensor, accepted: Tensor | None, T: int) -> tuple[Tensor, Tensor, Tensor]:
        x = {n: inputs(2, T)[n] for n in ("q", "k", "v", "g", "beta")}
        states = pool(6)
        before = states.clone()
        if T > indices.shape[1]:
            x = {n: t.flatten(0, 1)[None] for n, t in x.items()}
            x["cu_seqlens"] = torch.tensor([0, T, 2 * T])
        request = Request(
            op="fused_recurrent_kda", **x, scale=1.0, initial_state=states, ssm_state_indices=indices,
            num_accepted_tokens=accepted, inplace_final_state=True,
        )  # fmt: skip
        return CALLS.recurrent_forward(request).o, states, before

    table = torch.tensor([[0, 1], [2, 3]])
    for wrong, right in (([0, 9], [1, 2]), ([-3, 1], [1, 1])):
        got, expected = run(table, torch.tensor(wrong), 2), run(table, torch.tensor(right), 2)
        assert all(map(torch.equal, got, expected))
    # The table is a window of a wider one: reading past it would find slots 4 and 5.
    wide = torch.tensor([[0, 1, 4, 4], [2, 3, 5, 5]])
    _, states, before = run(wide[:, :2], None, 4)
    assert torch.equal(states[4:], before[4:])
    assert not torch.equal(states[1], before[1])


@check
def prompts() -> None:
    """More than eight tokens: a strided output, both layouts of states, heads of any size."""
    for v_first in (False, True):
        states = pool(5, v_first, HV=2)
        call = inputs(3, 17, "bounded", **GROUP) | {"initial_state": states, "state_v_first": v_first, "scale": 0.3}
        same(call | {"ssm_state_indices": torch.tensor([4, 0, 2]), "out": torch.empty(3, 17, V, 2).transpose(-1, -2)})
    for k, v in ((130, 5), (1, 1), (16, 70)):
        same(inputs(1, 10, K=k, V=v, **GROUP) | {"output_final_state": True})


@check
def prompts_with_hard_inputs() -> None:
    """Decays that forget everything beside mild ones, next to none, rows of zeros and of very different sizes."""
    call = inputs(1, 40, **GROUP) | {"initial_state": pool(1, HV=2), "output_final_state": True}
    g = call["g"].clone()
    g[:, 7::9] = -1e30
    g[:, 3::5, :, 0] = -1e4
    g[:, 11, :, 1:3] = -float("inf")
    same(call | {"g": g})
    same(call | {"g": torch.full_like(g, -1e-7)})
    sizes = torch.logspace(-12, 12, 40)[None, :, None, None]
    same(call | {"q": call["q"] * sizes, "k": call["k"] * sizes.flip(1)})
    same(call | {"v": torch.zeros_like(call["v"]), "q": torch.zeros_like(call["q"])})


@check
def prompts_with_bounded_decays() -> None:
    """All decays at the bound or none, in any order: exponents reach both ends of what one reference leaves."""
    call = inputs(1, 40, "bounded", **GROUP) | {"initial_state": pool(1, HV=2), "output_final_state": True}
    rows = torch.arange(40)[None, :, None, None]
    end = torch.full_like(call["g"], 1e4)
    for g in (end, -end, torch.where(rows % 2 == 0, end, -end), torch.where(rows % 16 < 12, end, -end)):
        same(call | {"g": g})
    # Each channel its own pattern, and infinite inputs.
    g = torch.where(torch.rand(call["g"].shape) < 0.5, end, -end)
    g[:, 5::7] = float("inf")
    g[:, 6::7] = -float("inf")
    same(call | {"g": g})
    # Strong decays up to the middle of a block, and weak ones behind them.
    same(call | {"g": torch.where(rows % 16 < 8, end, torch.full_like(end, -6.0)), "A_log": torch.zeros(2)})
    for bound in (-4.9, -5.1, -60.0):
        same(call | {"g": call["g"] * 30, "lower_bound": bound})
    for missing in ("A_log", "dt_bias"):
        same({n: x for n, x in call.items() if n != missing})
    same(inputs(1, 17, "bounded", K=130, V=5, **GROUP) | {"output_final_state": True})
    sizes = torch.logspace(-12, 12, 40)[None, :, None, None]
    same(call | {"q": call["q"] * sizes, "k": call["k"] * sizes.flip(1)})


@check
def prompts_packed() -> None:
    """Long sequences among short and empty ones, skipped ones, a tail; bounds in both integer types."""
    bounds = [0, 0, 9, 17, 17, 18, 42, 43, 59]
    rows = inputs(1, 66, "softplus", **GROUP)
    o, _ = same(packed(rows, bounds) | {"out": torch.empty(1, 66, 2, V)})
    assert not o[0, 59:].any()
    same(packed(rows, bounds, torch.int64) | {"initial_state": pool(8, HV=2), "output_final_state": True})
    slots = torch.tensor([3, 0, -1, 5, 9, -7, 4, 1])
    states = pool(11, HV=2)
    states[[2, 6, 7, 8, 10]] = float("nan")
    rows = inputs(1, 66, "bounded", **GROUP)
    call = packed(rows, bounds) | {"initial_state": states, "ssm_state_indices": slots}
    o, _ = same(call | {"out": torch.empty(1, 66, 2, V), "pad_slot_id": 1})
    assert not o[0, 9:17].any()
    assert not o[0, 18:42].any()
    assert not o[0, 43:].any()


@check
def prompts_one_behind_the_other() -> None:
    """Few long sequences are expected among many short ones; a program takes more than one where there are more."""
    lengths = torch.tensor([20, 0, 0, 9, 1, 17, 0, 0, 3, 12, 0, 0])
    bounds = [0, *lengths.cumsum(0).tolist()]
    states, slots = pool(13, HV=2), torch.arange(12)
    slots[5] = -1
    call = packed(inputs(1, bounds[-1] + 2, "bounded", **GROUP), bounds)
    same(call | {"output_final_state": True}, run=on_a_small_chip)
    pooled = {"initial_state": states, "ssm_state_indices": slots, "pad_slot_id": 9}
    same(call | pooled, run=on_a_small_chip)


def on_a_small_chip(backend: str, **call: Any) -> tuple[Tensor, Tensor | None]:
    """The call as a chip with one multiprocessor would have it; the oracle's as it is."""
    if backend != "nvidia":
        return kda_core.fused_recurrent_kda(**call, backend=backend)
    from kda_core_nvidia.calls import plan_of
    from kda_core_nvidia.choose import INTERPRETED
    from plan_runs import run_on_nvidia as run_plan

    request = planned_request(**call)
    plan = plan_of(request, replace(INTERPRETED, multiprocessors=1))
    (last,) = (x for x in plan.launches if x.name == "blocks_recurrence")
    assert last.constants["STEP"] == 1
    made = run_plan(plan, request)
    return made["o"], None if request.inplace_final_state else made["final_state"]


def planned_request(**call: Any) -> Request:
    """The request that a call makes."""
    if "ssm_state_indices" in call:
        call["inplace_final_state"] = True
    if "dt_bias" in call:
        call["dt_bias"] = call["dt_bias"].view(call["v"].shape[2], -1)
    return Request(op="fused_recurrent_kda", scale=call["q"].shape[-1] ** -0.5, **call)


@check
def prompts_among_hundreds() -> None:
    """More sequences than a program looks at at once, long ones on both sides of where it begins anew."""
    lengths = torch.zeros(520, dtype=torch.int64)
    lengths[[0, 3, 100, 255, 256, 511, 512, 519]] = torch.tensor([17, 1, 9, 20, 10, 8, 16, 9])
    bounds = [0, *lengths.cumsum(0).tolist()]
    same(packed(inputs(1, bounds[-1] + 3, H=1, HV=1), bounds) | {"output_final_state": True})


@check
def launches() -> None:
    """One kernel for a step, a draft and a short sequence; two for a prompt; three where packed ones may be either."""
    from kda_core_nvidia.calls import plan_of
    from kda_core_nvidia.choose import CHIPS

    names = ("recurrent", "blocks_prepare", "blocks_recurrence")

    def of(call: dict) -> tuple[str, ...]:
        return plan_of(planned_request(**call), CHIPS[90]).kernels

    call = packed(inputs(1, 4, "softplus", **GROUP), [0, 2, 3]) | {"initial_state": pool(3, HV=2)}
    assert of(call | {"ssm_state_indices": torch.tensor([2, -1])}) == names[:1]
    assert of(inputs(2, 8, **GROUP)) == names[:1]
    assert of(inputs(2, 9, **GROUP)) == names[1:]
    assert of(packed(inputs(1, 9, **GROUP), [0, 3, 8])) == names
    draft = {"initial_state": pool(30, HV=2), "ssm_state_indices": torch.arange(20).view(2, 10)}
    assert of(inputs(2, 10, **GROUP) | draft) == names[:1]
    one = {"initial_state": pool(3, HV=2), "ssm_state_indices": torch.tensor([[2], [0]])}
    assert of(inputs(2, 9, **GROUP) | one) == names[1:]
    assert of(inputs(2, 9, **GROUP) | one | {"num_accepted_tokens": torch.tensor([1, 1])}) == names[:1]


@check
def decay_keeps_its_digits() -> None:
    """d − 1 is right to a few units in its last place from −1e-12 to −1e3, where d would round to 1 and beyond."""
    global tl, decay_minus_one  # a kernel sees no names of the function round it
    import triton
    import triton.language as tl

    from kda_core.triton_lib.factor import decay_minus_one

    @triton.jit
    def kernel(x, y, SIZE: tl.constexpr):
        o = tl.arange(0, SIZE)
        tl.store(y + o, decay_minus_one(tl.load(x + o)))

    x = -torch.logspace(-12, 3, 1024)
    y = torch.empty_like(x)
    kernel[(1,)](x, y, SIZE=1024)
    expected = torch.expm1(x.double() * torch.tensor(2.0, dtype=torch.float64).log())
    assert ((y - expected) / expected).abs().max() < 4 * torch.finfo(torch.float32).eps


def main() -> None:
    torch.set_num_threads(1)
    failures = {}
    for name, function in CHECKS.items():
        try:
            function()
            failures[name] = ""
        except Exception:  # reported, check by check, to the process that asked
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """The error, by check; "" where there is none."""
    return interpreted.printed(__file__)


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(failures: dict[str, str], name: str) -> None:
    assert not failures[name], failures[name]


if __name__ == "__main__":
    main()

"""Plans run through triton's public interface, and the plans that calls find; kernels are stand-ins, without triton."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from plan_runs import run_plan

from kda_core.request import GateRequest, Request
from kda_core.triton_lib.calls import Calls
from kda_core.triton_lib.frame import names
from kda_core.triton_lib.plan import Builder, Copy, Launch, Plan, Sum, layout, matrix_tile, metadata
from kda_core.triton_lib.run import PublicPlan, compile_options

CPU = torch.device("cpu")


def kernel_of(function: Any) -> Any:
    """A stand-in for a jitted kernel: launching it calls the function with the values of its parameters."""

    class Kernel:
        fn, __name__ = function, function.__name__
        arg_names = tuple(function.__code__.co_varnames[: function.__code__.co_argcount])

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            def launch(*arguments: Any, enable_fp_fusion: bool, num_warps: int, **constants: Any) -> None:
                assert (grid, enable_fp_fusion, num_warps) == ((2, 1, 1), True, 4)
                function(*arguments, **constants)

            return launch

    return Kernel()


@kernel_of
def scaled(x, y, scale, ADD: constexpr):  # noqa: F821
    y.copy_(x * scale + ADD)


def plan_of_parts(x: torch.Tensor) -> Plan:
    """z = the sum over rows of (2 x + 1)ᵀ, in steps whose scratch ends early."""
    b = Builder()
    own = layout("x", x)
    y, z = b.scratch("y", (3, 4), torch.float32), b.result("z", (3,), torch.float32)
    b.pick(scaled, 2, 4, {"x": own.cut(0, slice(1, 4)), "y": y, "scale": 2.0, "ADD": 1, "other": 5})
    t = b.scratch("t", (4, 3), torch.float32)
    b.step(Copy(t, y.mT))
    b.free(y)
    b.step(Sum(z, t, (0,)))
    return b.plan({"x": own}, {"z": z, "given": own, "none": None})


def test_a_plan_runs_publicly():
    """Parts of inputs, transposed parts, steps of torch, results that are inputs or None."""
    x = torch.randn(5, 4)
    run = PublicPlan(plan_of_parts(x), ("x",), CPU)
    for _ in range(2):
        x = torch.randn(5, 4)
        made = run([x])
        torch.testing.assert_close(made["z"], (2 * x[1:4] + 1).sum(1))
        assert made["given"] is x
        assert made["none"] is None


def test_scratch_ends_with_its_epoch_and_a_plan_holds_no_tensor():
    alive: list[Any] = []

    @kernel_of
    def noted(x, y):
        alive.append([r() is not None for r in seen])
        seen.extend(map(weakref.ref, (x, y)))

    seen: list[Any] = []
    b = Builder(small=0)
    x, y, z = (b.scratch(n, (4,), torch.float32) for n in "xyz")
    b.pick(noted, 2, 4, {"x": x, "y": y})
    b.free(x)
    b.pick(noted, 2, 4, {"x": y, "y": z})
    run = PublicPlan(b.plan({}, {}), (), CPU)
    run([])
    assert alive == [[], [False, True]]
    assert not any(r() is not None for r in seen)


def test_a_tile_is_described_by_the_backend():
    x = torch.randn(4, 8)
    tile = matrix_tile(layout("x", x), 2, 8)
    found = []
    b = Builder()
    b.pick(kernel_of(lambda x: found.append(x)), 2, 4, {"x": tile})
    PublicPlan(b.plan({"x": tile.base}, {}), ("x",), CPU, descriptor=lambda tile, base: (tile, base))([x])
    assert found[0][0] is tile
    assert found[0][1] is x


def test_a_launch_of_no_programs_is_left_out_and_a_missing_name_raises():
    b = Builder()
    b.pick(scaled, 0, 4, {})
    assert b.plan({}, {}).steps == ()
    with pytest.raises(TypeError, match=r"missing \['scale'\]"):
        b.pick(scaled, 2, 4, {"x": None, "y": None, "ADD": 1})


def request(**more: Any) -> Request:
    x = torch.randn(1, 4, 2, 16)
    return Request(op="chunk_kda", **({"q": x, "k": x, "v": x, "g": x, "beta": x[..., 0], "scale": 1.0} | more))


def test_run_plan_finds_its_inputs():
    r = request()
    b, m = Builder(), metadata(r)
    o = b.result("o", r.q.shape, r.q.dtype)
    b.pick(kernel_of(lambda q, o, scale: o.copy_(q * scale)), 2, 4, names(m) | {"o": o, "scale": 3.0})
    assert torch.equal(run_plan(b.plan({"q": m.q}, {"o": o}), r)["o"], 3 * r.q)


class Planned:
    """Calls whose plans copy an input, and what they were planned for."""

    def __init__(self, most: int = 1024) -> None:
        self.planned: list[Any] = []
        self.calls = Calls(self.plan_of, lambda device: device.type, most=most)

    def plan_of(self, r: Any, chip: str, misaligned: frozenset[str]) -> Plan:
        self.planned.append((r, chip, misaligned))
        b, m = Builder(), metadata(r, misaligned)
        source = m.g if r.op == "kda_gate" else m.q
        made = b.result("made", source.shape, source.dtype)
        b.step(Copy(made, source))
        results = {"g": made} if r.needs_grad else {"log_decay": made} if r.op == "kda_gate" else {"o": made}
        return b.plan(
            {source.source: source}, results | ({} if r.op == "kda_gate" else {"final_state": None, "h": None})
        )


def with_memo(r: Any, memo: dict[Any, Any]) -> Any:
    vars(r)["memo"] = memo
    return r


def test_a_plan_is_made_once_for_the_calls_of_a_memo():
    p, memo = Planned(), {}
    for _ in range(3):
        r = with_memo(request(), memo)
        assert torch.equal(p.calls.chunk_forward(r).o, r.q)
    assert [(chip, misaligned) for _, chip, misaligned in p.planned] == [("cpu", frozenset())]
    p.calls.chunk_forward(request())
    assert len(p.planned) == 2, "without a memo"


def test_what_a_plan_follows_from_beside_the_signature():
    """Addresses, the sign of a scale of 0, the layout of a gradient, which of them are asked for."""
    p, memo = Planned(), {}
    crooked = torch.randn(129)[1:].view(1, 4, 2, 16)
    x = torch.randn(1, 4, 2, 16)
    forwards = [{}, {"q": crooked}, {"scale": 0.0}, {"scale": -0.0}]
    gradients = [{"grad_o": x}, {"grad_o": x.mT.contiguous().mT}, {"grad_final_state": x}]
    needs = {"needs_grad": frozenset("q")}
    for _ in range(2):
        for more in forwards:
            p.calls.chunk_forward(with_memo(request(**more), memo))
        for more in [*gradients, gradients[0] | {"needs_grad": frozenset({"q", "initial_state"})}]:
            p.calls.chunk_backward(with_memo(request(**(needs | more)), memo))
    assert len(p.planned) == len(forwards) + len(gradients) + 1
    assert [m for _, _, m in p.planned if m] == [frozenset({"q"})]


def test_a_gates_backward_has_a_plan_of_its_own():
    p, memo = Planned(), {}
    g = torch.randn(4, 2, 16)
    for _ in range(2):
        p.calls.gate_forward(with_memo(GateRequest(g=g), memo))
        for needs in ("g", "g A_log"):
            more = {"grad_output": g, "needs_grad": frozenset(needs.split())}
            assert torch.equal(p.calls.gate_backward(with_memo(GateRequest(g=g, **more), memo)).grads["g"], g)
    assert len(p.planned) == 3


def test_plans_that_are_kept_stay_bounded():
    p, memos = Planned(most=2), [{} for _ in range(5)]
    for memo in memos:
        p.calls.chunk_forward(with_memo(request(), memo))
    assert [len(memo) for memo in memos] == [0, 0, 0, 1, 1]


def test_launches_state_fusion_unless_they_say_otherwise():
    def options(**constants: Any) -> dict[str, Any]:
        return compile_options(Launch(kernel_of(lambda: None), (1, 1, 1), {}, constants, 4))

    assert options() == {"enable_fp_fusion": True, "num_warps": 4}
    assert options(enable_fp_fusion=False)["enable_fp_fusion"] is False

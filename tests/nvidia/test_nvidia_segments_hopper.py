"""One long sequence of few heads, cut into segments that the kernels for Hopper join; needs an sm_90 GPU."""

from __future__ import annotations

from typing import Any

import installed
import pytest
import torch

import kda_core

installed.need_backend("nvidia")

from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.run import chip

from kda_core.request import Request

pytestmark = pytest.mark.platform("nvidia_hopper")

DEVICE = "cuda"
EVEN, ODD = 4096, 4130
"""Rows of segments of one length, a batch, and of others, which are packed."""

INPUTS = ("q", "k", "v", "g", "beta", "initial_state")


def decays(kind: str, T: int, HV: int) -> torch.Tensor:
    g = -torch.rand(1, T, HV, 128, device=DEVICE)
    if kind == "slow":
        return g * torch.logspace(-3, 0, 128, device=DEVICE)
    if kind == "strong":
        return 5 * g
    if kind == "none":
        return 0 * g
    # Half of the channels forget in the middle of the sequence; then one row resets every channel.
    g *= 0.01
    g[:, T // 3 : T // 2, :, ::2] = -3
    g[:, 2 * T // 3] = -1000
    return g


KINDS = ("slow", "strong", "none", "mixed")


def call(kind: str, T: int = EVEN, H: int = 2, HV: int = 2, **more: Any) -> dict[str, Any]:
    torch.manual_seed(T + len(kind))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    return {
        "q": normal(1, T, H, 128).bfloat16(), "k": normal(1, T, H, 128).bfloat16(),
        "v": normal(1, T, HV, 128).bfloat16(), "g": decays(kind, T, HV), "beta": normal(1, T, HV).sigmoid(),
        "initial_state": normal(1, HV, 128, 128), "use_qk_l2norm_in_kernel": True, "output_final_state": True, **more,
    }  # fmt: skip


def upstream(x: torch.Tensor) -> torch.Tensor:
    """A gradient of ``x`` that every dtype and device holds the same."""
    return torch.arange(x.numel(), dtype=torch.float64).cos().bfloat16().view(x.shape).to(x)


def trained(arguments: dict[str, Any], backend: str = "nvidia", **more: Any) -> dict[str, torch.Tensor]:
    """Output, final state and all gradients."""
    if backend == "reference":
        doubled = {n: arguments[n].double() for n in INPUTS}
        arguments = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in (arguments | doubled).items()}
    leaves = {n: arguments[n].detach().requires_grad_() for n in INPUTS if arguments[n] is not None}
    o, state = kda_core.chunk_kda(**(arguments | leaves | {"backend": backend} | more))
    grads = torch.autograd.grad([o, state], list(leaves.values()), [upstream(o), upstream(state)])
    return {"o": o.detach(), "final_state": state.detach()} | {f"d{n}": x for n, x in zip(leaves, grads, strict=True)}


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.cpu().double() - exact).norm() / exact.norm())


def kernels(arguments: dict[str, Any]) -> tuple[str, ...]:
    r = Request(op="chunk_kda", scale=1.0, **arguments)
    return plan_of(r, chip(r.device)).kernels


@pytest.mark.parametrize("T", [EVEN, ODD])
@pytest.mark.parametrize("kind", KINDS)
def test_as_exact_as_a_sequence_that_is_not_cut(kind: str, T: int):
    """10%: M and b of a segment are rounded once more. ``disable_recompute`` leaves a sequence whole."""
    arguments = call(kind, T)
    assert kernels(arguments)[1:3] == ("transitions_hopper", "join_hopper")
    exact = trained(arguments, "reference")
    whole, cut = trained(arguments, disable_recompute=True), trained(arguments)
    for name, right in exact.items():
        assert error(cut[name], right) <= 1.1 * error(whole[name], right) + 2e-4, name


@pytest.mark.parametrize("kind", ["slow", "strong"])
@pytest.mark.parametrize(("T", "H"), [(8192, 15), (16500, 16)])
def test_many_heads_in_four_segments(T: int, H: int, kind: str):
    """Prefills of a quarter of the chip; the reference and a training forward that is not cut stand beside."""
    arguments = call(kind, T, H, H)
    assert kernels(arguments)[1:3] == ("transitions_hopper", "join_hopper")
    one = {n: x[:, :1] if n == "initial_state" else x[:, :, :1] for n, x in arguments.items() if n in INPUTS}
    whole = trained(arguments, disable_recompute=True)
    with torch.no_grad():
        o, state = kda_core.chunk_kda(**arguments)
        doubled = {n: x.double().cpu() for n, x in one.items()}
        exact, last = kda_core.chunk_kda(**(arguments | doubled), backend="reference")
    assert error(o[:, :, :1], exact) <= 1.1 * error(whole["o"][:, :, :1], exact) + 2e-4
    assert error(state[:, :1], last) <= 1.1 * error(whole["final_state"][:, :1], last) + 2e-4


@pytest.mark.parametrize("T", [EVEN, ODD])
@pytest.mark.parametrize("kind", KINDS)
def test_repeats_bitwise(kind: str, T: int):
    arguments = call(kind, T, H=1, HV=8)
    first = trained(arguments)
    for _ in range(5):
        for name, x in trained(arguments).items():
            assert torch.equal(first[name], x), name


@pytest.mark.parametrize("kind", ["slow", "mixed"])
def test_the_states_that_a_forward_saves_are_those_that_a_backward_would_make(kind: str):
    """The backward of ``fused_recurrent_kda`` has nothing that a forward saved."""
    arguments = call(kind, ODD)
    kept = trained(arguments)
    leaves = {n: arguments[n].detach().requires_grad_() for n in INPUTS}
    o, state = kda_core.fused_recurrent_kda(**(arguments | leaves), backend="nvidia")
    made = torch.autograd.grad([o, state], list(leaves.values()), [upstream(o), upstream(state)])
    for name, x in zip(leaves, made, strict=True):
        assert torch.equal(kept[f"d{name}"], x), name


def test_what_is_forgotten_leaves_nothing():
    """A segment of strong decays starts anew: of enormous states before it not one bit is left."""
    arguments = call("strong", HV=2)
    first = trained(arguments)
    other = trained(arguments | {"initial_state": 1e30 * arguments["initial_state"]})
    assert torch.equal(first["final_state"], other["final_state"])
    assert torch.equal(first["o"][:, EVEN // 2 :], other["o"][:, EVEN // 2 :])


@pytest.mark.parametrize("name", ["v", "grad_o"])
def test_bits_do_not_depend_on_strides(name: str):
    """Rows that bulk copies cannot take are copied."""
    arguments = call("slow", ODD)
    right = trained(arguments)
    if name == "v":
        v = torch.zeros(1, ODD, 2, 129, device=DEVICE, dtype=torch.bfloat16)[..., 1:].copy_(arguments["v"])
        for n, x in trained(arguments | {"v": v}).items():
            assert torch.equal(right[n], x), n
        return
    leaves = {n: arguments[n].detach().requires_grad_() for n in INPUTS}
    o, state = kda_core.chunk_kda(**(arguments | leaves), backend="nvidia")
    wide = torch.zeros(1, ODD, 2, 129, device=DEVICE, dtype=torch.bfloat16)[..., 1:].copy_(upstream(o))
    grads = torch.autograd.grad([o, state], list(leaves.values()), [wide, upstream(state)])
    for n, x in zip(leaves, grads, strict=True):
        assert torch.equal(right[f"d{n}"], x), n


@pytest.mark.parametrize("T", [EVEN, ODD])
def test_layouts_of_states(T: int):
    """V first or K first, and none: zeros."""
    arguments = call("slow", T)
    right = trained(arguments)
    state = arguments["initial_state"]
    turned = trained(arguments | {"initial_state": state.mT.contiguous(), "state_v_first": True})
    assert torch.equal(right["o"], turned["o"])
    assert torch.equal(right["final_state"], turned["final_state"].mT)
    with torch.no_grad():
        zeros, none = (kda_core.chunk_kda(**(arguments | {"initial_state": x})) for x in (0 * state, None))
    assert all(torch.equal(a, b) for a, b in zip(zeros, none, strict=True))


def test_a_captured_call():
    arguments = call("mixed", EVEN)
    with torch.no_grad():
        right = kda_core.chunk_kda(**arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = kda_core.chunk_kda(**arguments)
        for _ in range(3):
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))

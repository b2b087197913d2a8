"""A call that repeats an earlier one is not bound and checked again; one that differs in anything is."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import kda_core
from kda_core._plugins import registry
from kda_core.hookspecs import hookimpl

OPTIONS = {
    "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
    "lower_bound": -5.0, "output_final_state": True,
}  # fmt: skip
N, T, H, K = 2, 3, 2, 8


def arguments(flat: bool = True, grad: bool = False) -> dict:
    torch.manual_seed(0)
    tensors = {n: torch.randn(N, T, H, K) for n in ("q", "k", "v", "g")}
    tensors |= {
        "beta": torch.randn(N, T, H),
        "A_log": torch.randn(H),
        "dt_bias": torch.randn(H * K if flat else (H, K)),
    }
    tensors["initial_state"] = torch.randn(N, H, K, K)
    return {**{n: t.requires_grad_() if grad else t for n, t in tensors.items()}, **OPTIONS}


@pytest.fixture
def repeats():
    """The calls that were taken for repeated ones."""
    found = []

    def follow(frame, event, argument):
        name = (Path(frame.f_code.co_filename).stem, frame.f_code.co_name) if event == "call" else None
        if name == ("_autograd", "repeat") or (
            name == ("_autograd", "request") and frame.f_back.f_code.co_name == "call"
        ):
            found.append(name)

    registry._forget_choices()
    before = sys.getprofile()
    sys.setprofile(follow)
    yield found
    sys.setprofile(before)
    registry._forget_choices()


def warm(op: str, given: dict) -> tuple:
    for _ in range(2):
        results = getattr(kda_core, op)(**given)
    return results


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_a_third_call_is_repeated_and_reads_its_own_tensors(op, repeats):
    given = arguments()
    warm(op, given)
    assert not repeats
    other = {n: t + 0.25 if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    found = getattr(kda_core, op)(**other)
    assert repeats
    registry._forget_choices()
    for a, b in zip(found, getattr(kda_core, op)(**other), strict=True):
        assert torch.equal(a, b)


def other_options() -> dict:
    negative = torch.randn(N, T, H, K, dtype=torch.cfloat).conj().imag
    own = torch.randn(N, T, H, K).as_subclass(type("Own", (torch.Tensor,), {}))
    return {
        "another number": {"lower_bound": -4.0}, "an integer": {"lower_bound": -5}, "absent": {"initial_state": None},
        "NumPy's": {"lower_bound": np.float64(-5)}, "a flag": {"output_final_state": False},
        "NumPy's flag": {"output_final_state": np.True_}, "a scale": {"scale": 1.0}, "no tensor": {"k": 1.0},
        "a backend": {"backend": "reference"}, "another dtype": {"beta": torch.randn(N, T, H).double()},
        "out": {"out": torch.empty(N, T, H, K)}, "strides": {"v": torch.randn(N, H, T, K).transpose(1, 2)},
        "a gradient": {"dt_bias": torch.randn(H * K, requires_grad=True)},
        "a bias by heads": {"dt_bias": torch.randn(H, K)}, "a negative view": {"g": negative}, "a subclass": {"v": own},
        "meta": {"k": torch.randn(N, T, H, K, device="meta")},
    }  # fmt: skip


@pytest.mark.parametrize("what", other_options())
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_a_call_that_differs_is_not_repeated(op, what, repeats):
    given = arguments()
    warm(op, given)
    given |= other_options()[what]

    def answer():
        try:
            o, state = getattr(kda_core, op)(**given)
            return o.detach().clone(), None if state is None else state.detach().clone(), o.requires_grad
        except (ValueError, TypeError, RuntimeError) as error:
            return type(error), str(error)

    found = answer()
    assert not repeats
    if what in ("a negative view", "a subclass", "meta", "NumPy's", "NumPy's flag"):
        for _ in range(3):
            answer()
        assert not repeats
    registry._forget_choices()
    for a, b in zip(found, answer(), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_modes_and_transforms_see_the_operator(repeats):
    given = arguments()
    warm("chunk_kda", given)
    with Watching() as mode:
        kda_core.chunk_kda(**given)
    assert "chunk_kda.default" in mode.names
    rows = torch.stack([given["q"]] * 2)
    mapped = torch.func.vmap(lambda q: kda_core.chunk_kda(**given | {"q": q})[0])(rows)
    assert mapped.shape == (2, N, T, H, K)
    with forward_ad.dual_level():
        dual = given | {"v": forward_ad.make_dual(given["v"], torch.ones_like(given["v"]))}
        with pytest.raises(RuntimeError, match="forward"):
            kda_core.chunk_kda(**dual)
    assert not repeats


def test_another_backend_and_a_wrapper_are_seen(monkeypatch, repeats):
    given = arguments()
    warm("chunk_kda", given)
    seen = []

    class Spy:
        @hookimpl(wrapper=True)
        def kda_core_chunk_forward(self, request):
            seen.append(request.op)
            return (yield)

    spy = Spy()
    registry.add_wrapper(spy)
    try:
        warm("chunk_kda", given)
        kda_core.chunk_kda(**given)
        assert seen == ["chunk_kda"] * 3
    finally:
        registry.remove_wrapper(spy)
    warm("chunk_kda", given)
    repeats.clear()
    with kda_core.use_backend("reference"):
        kda_core.chunk_kda(**given)
    monkeypatch.setenv("KDA_BACKEND", "reference")
    kda_core.chunk_kda(**given)
    assert not repeats


def test_values_are_checked_in_every_call(repeats):
    given = arguments()
    given = {
        n: t[:1].flatten(0, 1)[None] if isinstance(t, torch.Tensor) and t.dim() > 2 and n != "initial_state" else t
        for n, t in given.items()
    }
    bounds = torch.tensor([0, 1, 3])
    given["cu_seqlens"] = bounds
    warm("chunk_kda", given)
    kda_core.chunk_kda(**given)
    assert repeats
    bounds[1] = 4
    with pytest.raises(ValueError, match="cu_seqlens"):
        kda_core.chunk_kda(**given)


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_gradients_of_a_repeated_call_have_the_shapes_of_its_arguments(op, repeats):
    """And the same bits as those of a first call, for a flat bias, which the request has by heads."""

    def gradients(flat):
        given = arguments(flat, grad=True)
        leaves = [t for t in given.values() if isinstance(t, torch.Tensor)]
        o, state = getattr(kda_core, op)(**given)
        return torch.autograd.grad((o.sum() + state.square().sum()), leaves)

    for flat in (True, False):
        registry._forget_choices()
        first = gradients(flat)
        gradients(flat)
        repeats.clear()
        again = gradients(flat)
        assert repeats
        assert [g.shape for g in again] == [g.shape for g in first]
        assert all(map(torch.equal, first, again))


def test_hooks_of_saved_tensors_may_return_others(repeats):
    given = arguments(grad=True)
    leaves = [t for t in given.values() if isinstance(t, torch.Tensor)]
    expected = torch.autograd.grad(warm("chunk_kda", given)[0].sum(), leaves, allow_unused=True)

    def spread(t):
        return torch.stack([t, t], -1)[..., 0]

    with torch.autograd.graph.saved_tensors_hooks(spread, lambda t: t):
        o = kda_core.chunk_kda(**given)[0]
    assert repeats
    found = torch.autograd.grad(o.sum(), leaves, allow_unused=True)
    assert all(a is b if a is None else torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, found, strict=True))


def test_calls_of_several_kinds_in_turn_are_all_repeated(repeats):
    """Also those of one signature: a flat bias and one by heads."""
    kinds = [
        arguments(flat, grad) | {"output_final_state": state}
        for flat in (False, True)
        for grad, state in ((False, False), (True, True))
    ]
    for _ in range(3):
        for given in kinds:
            kda_core.chunk_kda(**given)
    assert len(repeats) >= len(kinds)
    repeats.clear()
    for given in kinds:
        kda_core.chunk_kda(**given)
    assert len(repeats) == len(kinds)


def test_a_repeated_call_saves_what_a_first_one_saves(repeats):
    """Under activation checkpointing the first call is made again, and is then a repeated one."""

    def step():
        given = arguments(grad=True)
        more = {n: t for n, t in given.items() if n not in ("q", "dt_bias")}
        own = given["q"], given["dt_bias"]
        o = checkpoint(lambda q, b: kda_core.chunk_kda(q=q, dt_bias=b, **more)[0], *own, use_reentrant=False)
        return torch.autograd.grad(o.sum(), own)

    first = step()
    assert all(map(torch.equal, first, step()))
    assert repeats


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_the_gradient_mode_is_part_of_a_call(op, repeats):
    """Parameters require gradients in every mode."""
    given = arguments(grad=True)
    for before, after in ((torch.no_grad, torch.enable_grad), (torch.enable_grad, torch.no_grad)):
        registry._forget_choices()
        with before():
            warm(op, given)
            assert getattr(kda_core, op)(**given)[0].requires_grad == torch.is_grad_enabled()
        assert repeats
        with after():
            for _ in range(3):
                assert getattr(kda_core, op)(**given)[0].requires_grad == torch.is_grad_enabled()


@pytest.mark.parametrize("grad", [False, True])
def test_no_tensor_outlives_its_call(grad, repeats):
    given = arguments(grad=grad)
    warm("chunk_kda", given)
    kda_core.chunk_kda(**given)
    assert repeats
    left = [weakref.ref(t) for t in given.values() if isinstance(t, torch.Tensor)]
    given.clear()
    gc.collect()
    assert [t for t in left if t() is not None] == []


def test_two_parameters_of_the_same_given_shape_are_told_apart():
    """For K = 1 either may come as [1, 1, HV, 1]; the request has both in shapes of its own."""
    torch.manual_seed(0)
    g, rate, bias = torch.randn(2, 3, 4, 1), torch.randn(4), torch.randn(4, 1)
    leaves = [t.requires_grad_() for t in (g, rate, bias)]
    for _ in range(2):
        for of_rate, of_bias in ((rate, bias), (rate, bias[None, None]), (rate[None, None, :, None], bias)):
            found = torch.autograd.grad(kda_core.kda_gate(g, of_rate, of_bias).square().sum(), leaves)
            exact = -rate.exp()[:, None] * torch.nn.functional.softplus(g + bias)
            torch.testing.assert_close(found, torch.autograd.grad(exact.square().sum(), leaves))

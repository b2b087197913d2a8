"""Eager calls: when they go past the operators, and that wrapped tensors reach no backend."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
import torch.utils.checkpoint
from op_calls import OPS, make, run
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Watcher

import kda_core

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_eager_calls_bypass_the_operator_layer_where_nothing_looks_at_operators(grad: bool):
    def rows(mode):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            with mode:
                o = run(make(grad=grad))[0]
            if grad:
                o.sum().backward()
            with mode:
                kda_core.kda_gate(make(grad=grad)["g"], lower_bound=-5.0)
        names = {e.name for e in profile.events() if e.name.startswith(("kda_core::", "GeneratedBackwardFor_kda_core"))}
        # A backend's own row says its name and the shape behind that of the operator.
        return {name for name in names if " (" not in name}

    # The autograd functions of eager calls are called as the operators are; torch generates others for those.
    functions = {"kda_core::chunk_kda", "kda_core::chunk_kdaBackward", "kda_core::kda_gate"} if grad else set()
    assert rows(nullcontext()) == functions
    chunk, gate = (f"GeneratedBackwardFor_kda_core_{op}_default" for op in ("chunk_kda", "kda_gate"))
    generated = {"kda_core::chunk_kda_backward", chunk, f"{chunk}Backward", gate} if grad else set()
    assert rows(Passing()) == {"kda_core::chunk_kda", "kda_core::kda_gate"} | generated


class Deferred(torch.Tensor):
    """Stands for a tensor that is still on its way, like what collectives answer: it has no memory of its own."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        return function(*args, **kwargs)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_a_wrapped_tensor_reaches_no_backend(op: str, name: str):
    """Whichever argument it is, in calls that have been seen, too: what it wraps does."""
    arguments = make(5)
    expected = run(arguments, op)
    with Watcher() as requests:
        for _ in range(2):
            results = run(arguments | {name: Deferred(arguments[name])}, op)
            assert type(getattr(requests[-1], name)) is torch.Tensor
            assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("name", ["g", "A_log", "dt_bias"])
def test_a_wrapped_tensor_reaches_no_gate(name: str):
    arguments = {n: t for n, t in make(5).items() if n in ("g", "A_log", "dt_bias")}
    expected = kda_core.kda_gate(**arguments)
    with Watcher() as requests:
        result = kda_core.kda_gate(**arguments | {name: Deferred(arguments[name])})
    assert type(getattr(requests[-1], name)) is torch.Tensor
    assert torch.equal(result, expected)


class Late(torch.autograd.Function):
    """The identity, whose gradient is on its way."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return Deferred(grad)


@pytest.mark.parametrize("late", [(True, False), (False, True)], ids=["o", "final state"])
def test_a_wrapped_gradient_reaches_no_backend(late):
    arguments = make(5, grad=True)
    expected = torch.autograd.grad([x.sum() for x in run(arguments)], list(arguments.values()))
    with Watcher() as requests:
        outputs = [Late.apply(x) if wrapped else x for x, wrapped in zip(run(arguments), late, strict=True)]
        grads = torch.autograd.grad([x.sum() for x in outputs], list(arguments.values()))
    assert type(requests[-1].grad_o) is type(requests[-1].grad_final_state) is torch.Tensor
    assert all(map(torch.equal, grads, expected))


def test_a_memo_is_not_that_of_tensors_that_came_back_with_other_strides():
    """Hooks of saved tensors offload slices of a projection, and bring contiguous tensors back."""
    arguments = make(5)
    qk = torch.cat([arguments["q"], arguments["k"]], -1)
    arguments["q"], arguments["k"] = (x.detach().requires_grad_() for x in qk.chunk(2, -1))
    with Watcher() as requests:
        run(arguments)[0].sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
            o = run(arguments)[0]
        o.sum().backward()
    (own, sliced), (offloaded, contiguous) = ((r.memo, r.q.stride()) for r in requests if r.needs_grad)
    assert sliced != contiguous
    assert own is not None
    assert offloaded is None


def test_a_gate_has_one_memo_forward_and_backward():
    """As long as its tensors come back with the strides that they had."""
    g = torch.randn(5, 2, 32)[..., ::2].requires_grad_()
    A_log = torch.zeros(2, requires_grad=True)
    with Watcher() as requests:
        kda_core.kda_gate(g, A_log).sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
            log_decay = kda_core.kda_gate(g, A_log)
        log_decay.sum().backward()
    forward, backward, again, offloaded = (r.memo for r in requests)
    assert forward is backward is again
    assert forward is not None
    assert offloaded is None

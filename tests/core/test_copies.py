"""Public objects survive pickle and copies, as those who send them between processes expect."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, is_dataclass
from types import MappingProxyType

import pytest
import torch
from packaging.specifiers import SpecifierSet
from toys import Watcher

import kda_core
from kda_core import _explain, errors
from kda_core._plugins import registry
from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature, Slack, Unavailable
from kda_core.request import BackwardResult, ForwardResult, GateRequest, Request, TensorSpec

WAYS = {
    **{
        f"pickle {protocol}": lambda x, protocol=protocol: pickle.loads(pickle.dumps(x, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def inputs():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 5, 2, 4, generator=generator)
    return {"q": q, "k": q + 1, "v": q + 2, "g": -q.abs(), "beta": q[..., 0].sigmoid()}


def capabilities(closed):
    return Capabilities(frozenset({Feature.CHUNK}), frozenset({torch.float32}), 64, None, closed)


OBJECTS = {
    "explanation": lambda: kda_core.explain(**inputs()),
    "verdict": lambda: kda_core.explain(**inputs(), backend="reference").verdicts[0],
    **{f"ledger entry {n}": lambda n=n: kda_core.backends()[n] for n in range(2)},
    "identity card": lambda: kda_core.backends()[0].info,
    "capabilities": lambda: capabilities({Feature.OUT: "no room"}),
    "capabilities of a proxy": lambda: capabilities(MappingProxyType({Feature.OUT: "no room"})),
    "card with slack": lambda: BackendInfo(
        "mine", "1", SpecifierSet("~=1.0"), ("cpu",), None, capabilities({}), (Slack("o", torch.half, 2.0, "why"),)
    ),
    "available": lambda: Available("a detail"),
    "unavailable": lambda: Unavailable("a reason"),
    "spec": lambda: TensorSpec((2, 3), torch.bfloat16),
    **{f"feature {f.name}": lambda f=f: f for f in Feature},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_says_something_is_equal_to_its_copy(name):
    original = OBJECTS[name]()
    for way, copied in WAYS.items():
        found = copied(original)
        assert type(found) is type(original), way
        assert found == original, way


@pytest.mark.parametrize("way", WAYS)
def test_an_explanation_reads_the_same(way):
    original = kda_core.explain(**inputs())
    assert str(WAYS[way](original)) == str(original)


@pytest.mark.parametrize("name", [n for n in dir(errors) if isinstance(getattr(errors, n), type)])
def test_errors_keep_their_message(name):
    original = getattr(errors, name)("backend 'x': a reason")
    for way, copied in WAYS.items():
        found = copied(original)
        assert type(found) is type(original), way
        assert str(found) == "backend 'x': a reason", way
        assert found.args == original.args, way


@pytest.mark.parametrize("way", WAYS)
def test_an_error_that_was_raised_keeps_its_message(way):
    with pytest.raises(kda_core.UnsupportedCall) as caught:
        _explain.plan(**inputs(), backend="reference")
    assert str(WAYS[way](caught.value)) == str(caught.value)
    with pytest.raises(kda_core.BackendNotFound) as missing:
        registry.named("nope")
    assert str(WAYS[way](missing.value)) == str(missing.value)


def assert_same(found, original):
    assert type(found) is type(original)
    for name in (f.name for f in fields(original)):
        one, other = getattr(found, name), getattr(original, name)
        assert type(one) is type(other), name
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other), name
        elif is_dataclass(other):
            assert_same(one, other)
        elif name != "grads":
            assert one == other, name


@pytest.mark.parametrize("way", WAYS)
def test_a_request_is_copied_without_what_calls_share(way):
    """Its memo belongs to the router and to backends, and holds functions and memory."""
    with Watcher() as requests, torch.no_grad():
        for _ in range(2):
            kda_core.chunk_kda(**inputs(), scale=0.3)
    request = requests[-1]
    assert request.memo
    assert request.features
    found = WAYS[way](request)
    assert found.memo is None
    assert request.memo, "the original keeps its own"
    assert found.features == request.features
    vars(request)["memo"] = None
    assert_same(found, request)
    assert found.q is request.q if way == "copy" else found.q is not request.q


@pytest.mark.parametrize("way", WAYS)
def test_a_gates_request_of_a_call_is_copied(way):
    raw = torch.randn(3, 2, 4)
    with Watcher() as requests:
        for _ in range(3):
            kda_core.kda_gate(raw, lower_bound=-2.5)
    assert len(requests) == 3
    for request in requests:
        assert torch.equal(WAYS[way](request).g, raw)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: Request(op="chunk_kda", **inputs(), scale=1.0, needs_grad=frozenset({"q"}), saved=(torch.ones(2),)),
        lambda: GateRequest(g=torch.ones(2, 3), lower_bound=-1.0),
        lambda: ForwardResult(torch.ones(2), None, torch.zeros(3), (torch.ones(1),)),
        lambda: BackwardResult({"q": torch.ones(2)}),
    ],
    ids=["request", "gate request", "forward result", "backward result"],
)
def test_requests_and_results_are_copied(make, way):
    original = make()
    vars_before = {f.name for f in fields(original)}
    found = WAYS[way](original)
    assert {f.name for f in fields(found)} == vars_before
    for name in vars_before - {"saved", "grads"}:
        one, other = getattr(found, name), getattr(original, name)
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other, name
    if "saved" in vars_before:
        assert [t.tolist() for t in found.saved] == [t.tolist() for t in original.saved]
    if "grads" in vars_before:
        assert {n: t.tolist() for n, t in found.grads.items()} == {n: t.tolist() for n, t in original.grads.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [n for n in kda_core.__all__ if callable(getattr(kda_core, n))])
def test_functions_and_classes_are_themselves(name, way):
    assert WAYS[way](getattr(kda_core, name)) is getattr(kda_core, name)


class Layer(torch.nn.Module):
    """Holds the function that it calls, as layers do that choose between kernels."""

    def __init__(self):
        super().__init__()
        self.kernel = kda_core.chunk_kda
        self.options = {"use_qk_l2norm_in_kernel": True}
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, q, **others):
        return self.kernel(q * self.weight, **others, **self.options)[0]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "copy"])
def test_a_module_that_holds_the_function_is_copied_after_a_call(way):
    layer = Layer()
    expected = layer(**inputs())
    expected.sum().backward()
    found = WAYS[way](layer)
    assert found.kernel is kda_core.chunk_kda
    assert torch.equal(found(**inputs()), expected)
    assert found.weight is not layer.weight

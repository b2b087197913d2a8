"""Results of hooks are compared with the call once for each signature, whether calls are checked or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toys import Toy, inputs, installed

import kda_core
from kda_core.capabilities import FEATURES_1_0
from kda_core.hookspecs import hookimpl
from kda_core.reference import ReferenceBackend
from kda_core.request import BackwardResult


class Altered(Toy):
    """The oracle, with one result replaced by what ``alter`` makes of it."""

    def __init__(self, hook, alter):
        super().__init__("altered", 9000, FEATURES_1_0)
        self.hook, self.alter, self.oracle = hook, alter, ReferenceBackend()

    def answer(self, hook, request):
        found = getattr(self.oracle, hook)(request=request)
        return self.alter(found) if hook == self.hook else found

    @hookimpl
    def kda_core_chunk_forward(self, request):
        return self.answer("kda_core_chunk_forward", request)

    @hookimpl
    def kda_core_recurrent_forward(self, request):
        return self.answer("kda_core_recurrent_forward", request)

    @hookimpl
    def kda_core_gate_forward(self, request):
        return self.answer("kda_core_gate_forward", request)

    @hookimpl
    def kda_core_chunk_backward(self, request):
        return self.answer("kda_core_chunk_backward", request)

    @hookimpl
    def kda_core_recurrent_backward(self, request):
        return self.answer("kda_core_recurrent_backward", request)

    @hookimpl
    def kda_core_gate_backward(self, request):
        return self.answer("kda_core_gate_backward", request)


def with_result(**changes):
    return lambda result: replace(result, **{n: change(getattr(result, n)) for n, change in changes.items()})


def with_gradient(name, change):
    return lambda result: BackwardResult({**result.grads, name: change(result.grads[name])})


def absent(t):
    return None


FORWARD = {
    "no o": (with_result(o=absent), "o: expected [1, 3, 2, 4] float32 on cpu, got None"),
    "o of another shape": (
        with_result(o=lambda t: t[:, :1]),
        "o: expected [1, 3, 2, 4] float32 on cpu, got [1, 1, 2, 4] float32 on cpu",
    ),
    "o of another dtype": (
        with_result(o=torch.Tensor.double),
        "o: expected [1, 3, 2, 4] float32 on cpu, got [1, 3, 2, 4] float64 on cpu",
    ),
    "o elsewhere": (
        with_result(o=lambda t: t.to("meta")),
        "o: expected [1, 3, 2, 4] float32 on cpu, got [1, 3, 2, 4] float32 on meta",
    ),
    "no final state": (with_result(final_state=absent), "final_state: expected [1, 2, 4, 4] float32 on cpu, got None"),
    "final state of another dtype": (
        with_result(final_state=torch.Tensor.bfloat16),
        "final_state: expected [1, 2, 4, 4] float32 on cpu, got [1, 2, 4, 4] bfloat16 on cpu",
    ),
}


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("what", FORWARD)
def test_a_wrong_result_of_a_forward_is_refused_by_name(op, what):
    alter, expected = FORWARD[what]
    hook = "kda_core_chunk_forward" if op == "chunk_kda" else "kda_core_recurrent_forward"
    with installed(Altered(hook, alter)):
        for _ in range(2):  # the second call has the first one's signature
            with pytest.raises(kda_core.ContractViolation) as caught:
                getattr(kda_core, op)(*inputs(), output_final_state=True)
            assert str(caught.value) == f"backend 'altered' returned {expected}"
        q, *rest = inputs()
        with pytest.raises(kda_core.ContractViolation, match="backend 'altered' returned"):
            getattr(kda_core, op)(q.requires_grad_(), *rest, output_final_state=True)


@pytest.mark.parametrize(
    ("alter", "options", "expected"),
    [
        (
            with_result(h=absent),
            {"return_intermediate_states": True},
            "h: expected [1, 1, 2, 4, 4] float32 on cpu, got None",
        ),
        (
            with_result(h=lambda t: t[:, :0]),
            {"return_intermediate_states": True},
            "h: expected [1, 1, 2, 4, 4] float32 on cpu, got [1, 0, 2, 4, 4] float32 on cpu",
        ),
        (
            with_result(h=lambda t: t[:, :1]),
            {"return_intermediate_states": True, "cu_seqlens": torch.tensor([0, 1, 1, 3])},
            "h: expected [1, 2, 2, 4, 4] float32 on cpu, got [1, 1, 2, 4, 4] float32 on cpu",
        ),
        (
            with_result(final_state=lambda t: torch.zeros(1)),
            {},
            "final_state: expected None, because the call asks for none, got [1] float32 on cpu",
        ),
        (
            with_result(h=lambda t: torch.zeros(1)),
            {},
            "h: expected None, because the call asks for none, got [1] float32 on cpu",
        ),
        (
            with_result(o=torch.clone),
            {"out": torch.zeros(1, 3, 2, 4)},
            "another tensor as o, expected the call's out",
        ),
    ],
)
def test_results_are_there_exactly_when_a_call_asks_for_them(alter, options, expected):
    with installed(Altered("kda_core_chunk_forward", alter)), pytest.raises(kda_core.ContractViolation) as caught:
        kda_core.chunk_kda(*inputs(), **options)
    assert str(caught.value) == f"backend 'altered' returned {expected}"


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("beta", lambda t: t[..., None], "dbeta: expected [1, 3, 2] float32 on cpu, got [1, 3, 2, 1] float32 on cpu"),
        ("q", torch.Tensor.bfloat16, "dq: expected [1, 3, 2, 4] float32 on cpu, got [1, 3, 2, 4] bfloat16 on cpu"),
        ("g", absent, "dg: expected [1, 3, 2, 4] float32 on cpu, got None"),
    ],
)
def test_a_wrong_gradient_is_refused_by_name(op, name, change, expected):
    hook = "kda_core_chunk_backward" if op == "chunk_kda" else "kda_core_recurrent_backward"
    with installed(Altered(hook, with_gradient(name, change))):
        for _ in range(2):
            leaves = [t.clone().requires_grad_() for t in inputs()]
            o, _ = getattr(kda_core, op)(*leaves)
            with pytest.raises(kda_core.ContractViolation) as caught:
                o.sum().backward()
            assert str(caught.value) == f"backend 'altered' returned {expected}"


def test_wrong_results_of_the_gate_are_refused_by_name():
    g, A_log = torch.zeros(3, 2, 4), torch.zeros(2)
    decay = "log_decay: expected [3, 2, 4] float32 on cpu"
    for alter, got in (
        (lambda t: t[0], "[2, 4] float32 on cpu"),
        (torch.Tensor.double, "[3, 2, 4] float64 on cpu"),
        (list, "["),
    ):
        with installed(Altered("kda_core_gate_forward", alter)), pytest.raises(kda_core.ContractViolation) as caught:
            kda_core.kda_gate(g, A_log)
        assert str(caught.value).startswith(f"backend 'altered' returned {decay}, got {got}")
    toy = Altered("kda_core_gate_backward", with_gradient("A_log", lambda t: t[:1]))
    with installed(toy), pytest.raises(kda_core.ContractViolation) as caught:
        kda_core.kda_gate(g, A_log.clone().requires_grad_()).sum().backward()
    assert str(caught.value) == "backend 'altered' returned dA_log: expected [2] float32 on cpu, got [1] float32 on cpu"


def test_results_are_compared_once_for_each_signature():
    """The comparison costs as much as the rest of the router, so a repeated call must not pay it."""
    seen = []

    class Watched(torch.Tensor):
        """Notes that its shape is looked at outside of hooks."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function == torch.Tensor.shape.__get__:
                seen.append(1)
            return super().__torch_function__(function, types, args, kwargs)

    def watched(result):
        return replace(result, o=result.o.as_subclass(Watched))

    with installed(Altered("kda_core_chunk_forward", watched)), torch.no_grad():
        counts = []
        for T in (3, 3, 4, 3, 4):
            kda_core.chunk_kda(*inputs(T))
            counts.append(len(seen))
    assert counts == [1, 1, 2, 2, 2]

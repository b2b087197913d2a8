"""``kda_core.supports``: the kept answers are those that a fresh router gives, and cost little."""

from __future__ import annotations

import itertools
import sys
import weakref

import pytest
import torch
from toys import Toy, installed, no_wheels

import kda_core
from kda_core._plugins import registry

H, K = 2, 8


def call(**changes) -> dict:
    """Keyword arguments of a call of one token; None takes one out."""
    q, k, v = (torch.zeros(2, 1, H, K) for _ in range(3))
    found = {"q": q, "k": k, "v": v, "g": torch.zeros(2, 1, H, K), "beta": torch.zeros(2, 1, H)} | changes
    return {name: value for name, value in found.items() if value is not Ellipsis}


def negative(t: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(t)


def variants() -> dict[str, dict]:
    """Calls that differ in one thing that the answer may depend on."""
    x, wide = torch.zeros(2, 1, H, K), torch.zeros(2, 1, H, 2 * K)
    pool, slots = torch.zeros(5, H, K, K), torch.tensor([0, 1], dtype=torch.int32)
    nested = torch.nested.nested_tensor([torch.zeros(1, H, K)] * 2)
    return {
        "plain": call(),
        "again": call(),
        "other order": dict(reversed(call().items())),
        "half": call(q=x.half()),
        "all half": call(**{n: x.half() for n in "qkv"}),
        "double": call(**{n: x.double() for n in "qkv"}),
        "integers": call(q=x.int()),
        "strided": call(g=wide[..., ::2]),
        "wrong shape": call(k=wide),
        "grouped": call(v=torch.zeros(2, 1, 4, K)),
        "requires a gradient": call(q=x.clone().requires_grad_()),
        "a parameter": call(q=torch.nn.Parameter(x)),
        "meta": call(**{n: t.to("meta") for n, t in call().items()}),
        "one on meta": call(k=x.to("meta")),
        "negative": call(q=negative(x)),
        "nested q": call(q=nested),
        "nested g": call(g=nested),
        "sparse": call(q=x.to_sparse()),
        "no tensor": call(q=3),
        "no g": call(g=...),
        "g is None": call(g=None),
        "A_log": call(A_log=torch.zeros(H), use_gate_in_kernel=True),
        "A_log is None": call(A_log=None, use_gate_in_kernel=True),
        "flag of 1": call(output_final_state=1),
        "flag": call(output_final_state=True),
        "chunk size": call(chunk_size=64),
        "chunk size, a float": call(chunk_size=64.0),
        "other chunk size": call(chunk_size=32),
        "wrong chunk size": call(chunk_size=16),
        "bound": call(lower_bound=-5.0),
        "bound is NaN": call(lower_bound=float("nan")),
        "bound is a tensor": call(lower_bound=torch.tensor(-5.0)),
        "scale is a list": call(scale=[1.0]),
        "unknown name": call(color="red"),
        "dtype of states": call(return_intermediate_states=True, intermediate_states_dtype=torch.float16),
        "other dtype of states": call(return_intermediate_states=True, intermediate_states_dtype=torch.int32),
        "state": call(initial_state=torch.zeros(2, H, K, K)),
        "pool": call(initial_state=pool, ssm_state_indices=slots),
        "long indices": call(initial_state=pool, ssm_state_indices=slots.long()),
        "indices of a column": call(initial_state=pool, ssm_state_indices=torch.zeros(2, 3, dtype=torch.int32)[:, 0]),
        "named": call(backend="reference"),
        "named None": call(backend=None),
    }


def fresh(op: str, *args, **kwargs) -> tuple[bool, str]:
    """The answer of a router that keeps nothing."""
    registry._forget_choices()
    return kda_core.supports(op, *args, **kwargs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_an_answer_that_is_kept_is_that_of_a_fresh_router(op):
    """Each question is asked behind each other one, so that any confusion of two shows."""
    calls = variants()
    expected = {name: fresh(op, **kwargs) for name, kwargs in calls.items()}
    assert len({answer[1] for answer in expected.values()}) > 8
    for first, second in itertools.product(calls, repeat=2):
        registry._asked.clear()
        for name in (first, second, first):
            assert kda_core.supports(op, **calls[name]) == expected[name], (first, second)


def test_positions_modes_and_wanted_backends_are_told_apart(monkeypatch):
    with installed(Toy("fussy", reject="not today")):
        arguments = tuple(call().values())
        assert kda_core.supports("chunk_kda", *arguments, backend="reference") == (True, "")
        assert kda_core.supports("chunk_kda", *arguments[:4], beta=arguments[4], backend="reference") == (True, "")
        assert not kda_core.supports("chunk_kda", *arguments[:4], backend="reference")[0]
        assert not kda_core.supports("chunk_kda", *arguments, arguments[0], backend="reference")[0]
        with kda_core.use_backend("reference"):
            assert kda_core.supports("chunk_kda", *arguments) == (True, "")
            assert kda_core.supports("fused_recurrent_kda", *arguments) == (True, "")
        with kda_core.use_backend("fussy"):
            assert "not today" in kda_core.supports("chunk_kda", *arguments)[1]
        monkeypatch.setenv("KDA_BACKEND", "reference")
        assert kda_core.supports("chunk_kda", *arguments) == (True, "")
        monkeypatch.setenv("KDA_BACKEND", "fussy")
        assert "not today" in kda_core.supports("chunk_kda", *arguments)[1]


def test_whether_gradients_are_computed_is_told_apart():
    """A pool is not differentiable."""
    arguments = call(initial_state=torch.zeros(2, H, K, K), inplace_final_state=True, backend="reference")
    arguments["q"].requires_grad_()
    for _ in range(2):
        assert "gradient" in kda_core.supports("fused_recurrent_kda", **arguments)[1]
        with torch.no_grad():
            assert kda_core.supports("fused_recurrent_kda", **arguments) == (True, "")


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_second_question_makes_no_request(dtype):
    options = {"backend": "reference", "return_intermediate_states": True, "intermediate_states_dtype": dtype}
    arguments = call(**options)
    kda_core.supports("chunk_kda", **arguments)
    if not registry._asked:
        pytest.skip("this torch has no comparison of metadata")
    functions = []

    def note(frame, event, argument):
        if event == "call":
            functions.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        kda_core.supports("chunk_kda", **call(**options))
    finally:
        sys.setprofile(None)
    begin = functions.index("supports")
    assert len(functions) - begin <= 6, functions[begin:]


def test_no_tensor_is_kept():
    arguments = call(backend="reference")
    kda_core.supports("chunk_kda", **arguments)
    kept = [weakref.ref(t) for t in arguments.values() if isinstance(t, torch.Tensor)]
    del arguments
    assert not any(ref() is not None for ref in kept)


def test_the_values_of_index_tensors_are_not_read():
    """The first answer of a refused question is the refusal, whatever the slots are."""
    pool = torch.zeros(2, H, K, K)
    arguments = call(initial_state=pool, ssm_state_indices=torch.tensor([7, 7], dtype=torch.int32))
    with no_wheels():
        for _ in range(2):
            answer = kda_core.supports("fused_recurrent_kda", **arguments)
            assert answer[1].startswith("fused_recurrent_kda: no backend can serve this call")
        with pytest.raises(ValueError, match="ssm_state_indices"):
            kda_core.explain(**arguments, op="fused_recurrent_kda")

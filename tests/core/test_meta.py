"""Tensors on device="meta": results like those of a real call, without values, without a backend."""

from __future__ import annotations

import pytest
import torch
from example_arguments import drawn
from toys import Toy, installed, no_wheels

import kda_core
from kda_core._explain import plan
from kda_core._plugins import registry
from kda_core.capabilities import Feature
from kda_core.errors import BackendNotFound, UnsupportedCall

B, T, H, HV, K, V = 2, 70, 2, 4, 8, 6
OPS = ("chunk_kda", "fused_recurrent_kda")


def data(dtype=torch.float32, B=B, T=T):
    return drawn(B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=dtype)


def states(N=B, dtype=torch.float32, v_first=False):
    return torch.zeros(N, HV, V, K, dtype=dtype) if v_first else torch.zeros(N, HV, K, V, dtype=dtype)


GATED = {
    "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
    "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV * K),
}  # fmt: skip
CU_SEQLENS = torch.tensor([0, 30, 30, 66])
PACKED = {"cu_seqlens": CU_SEQLENS, "cu_seqlens_cpu": CU_SEQLENS}
SLOTS = torch.tensor([5, -1], dtype=torch.int32)
DRAFTS = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)

CALLS = {
    "plain": ("chunk_kda", data(), {}),
    "bf16": ("chunk_kda", data(torch.bfloat16), {"output_final_state": True}),
    "fp64": ("chunk_kda", data(torch.float64), {"output_final_state": True}),
    "all in the operator": ("chunk_kda", data(), {**GATED, "output_final_state": True}),
    "bf16 states, V first": (
        "chunk_kda",
        data(),
        {
            "initial_state": states(dtype=torch.bfloat16, v_first=True),
            "output_final_state": True,
            "state_v_first": True,
            "return_intermediate_states": True,
        },
    ),
    "chunks of 32": ("chunk_kda", data(), {"return_intermediate_states": True, "chunk_size": 32}),
    "no tokens": ("chunk_kda", data(T=0), {"return_intermediate_states": True, "output_final_state": True}),
    "packed": ("chunk_kda", data(B=1), {**PACKED, "initial_state": states(3), "output_final_state": True}),
    "packed, h": ("chunk_kda", data(B=1), {**PACKED, "return_intermediate_states": True}),
    "strided": ("chunk_kda", {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in data().items()}, {}),
    "out": ("chunk_kda", data(), {"out": torch.empty(T, B, HV, V).transpose(0, 1)}),
    "pool": ("chunk_kda", data(), {"initial_state": states(7), "ssm_state_indices": SLOTS, "output_final_state": True}),
    "recurrent": ("fused_recurrent_kda", data(T=3), {"output_final_state": True}),
    "in place": (
        "fused_recurrent_kda",
        data(T=1),
        {"initial_state": states(), "inplace_final_state": True, "output_final_state": True},
    ),
    "drafts": (
        "fused_recurrent_kda",
        data(T=3),
        {"initial_state": states(7), "ssm_state_indices": DRAFTS, "num_accepted_tokens": torch.tensor([1, 3])},
    ),
}


def on_meta(values):
    """Everything on meta, except the copy of the boundaries that must be on the CPU."""
    return {n: t.to("meta") if isinstance(t, torch.Tensor) and n != "cu_seqlens_cpu" else t for n, t in values.items()}


def described(results):
    return [None if t is None else (t.shape, t.dtype, t.stride(), t.requires_grad) for t in results]


def call(name: str, grad: bool):
    """The real call and its copy on meta: for each the results, the inputs and the options."""
    op, arguments, options = CALLS[name]
    arguments = {n: t.clone(memory_format=torch.preserve_format).requires_grad_(grad) for n, t in arguments.items()}
    meta = {n: t.detach().requires_grad_(grad) for n, t in on_meta(arguments).items()}
    pairs = (arguments, options), (meta, on_meta(options))
    return [(getattr(kda_core, op)(**inputs, **more), inputs, more) for inputs, more in pairs]


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_a_real_call(name: str):
    (expected, _, _), (found, _, options) = call(name, grad=False)
    assert described(found) == described(expected)
    assert all(t is None or t.device.type == "meta" for t in found)
    if "out" in options:
        assert found[0] is options["out"]
    if options.get("inplace_final_state") or "ssm_state_indices" in options:
        assert found[1] is None or found[1] is options["initial_state"]


WITHOUT_GRADIENT = {"out", "ssm_state_indices", "inplace_final_state", "return_intermediate_states"}


@pytest.mark.parametrize("name", [n for n, (_, _, options) in CALLS.items() if WITHOUT_GRADIENT.isdisjoint(options)])
def test_gradients_are_those_of_a_real_call(name: str):
    grads = []
    real, meta = call(name, grad=True)
    assert described(meta[0]) == described(real[0])
    for results, inputs, _ in (real, meta):
        sum(t.sum() for t in results if t is not None).backward()
        grads.append(described(t.grad for t in inputs.values()))
    assert grads[0] == grads[1]
    assert None not in grads[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_gate(dtype: torch.dtype):
    g, A_log = torch.zeros(3, HV, K, dtype=dtype).mT.contiguous().mT, torch.zeros(HV)
    expected = kda_core.kda_gate(g, A_log.requires_grad_())
    meta = g.to("meta").requires_grad_(), A_log.detach().to("meta").requires_grad_()
    found = kda_core.kda_gate(*meta)
    assert described([found]) == described([expected])
    found.sum().backward()
    assert [t.grad.shape for t in meta] == [g.shape, A_log.shape]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"beta": torch.zeros(B, T, 1)}, ValueError, "beta: expected shape"),
        ({"g": torch.zeros(B, T, HV, K, dtype=torch.int32)}, TypeError, "g: expected dtype"),
        ({"scale": "1"}, TypeError, "scale: expected a number"),
        ({"A_log": torch.zeros(HV)}, ValueError, "A_log: expected use_gate_in_kernel=True"),
        ({"cu_seqlens": CU_SEQLENS}, ValueError, "q: expected B = 1 with cu_seqlens"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict, error: type, message: str):
    with pytest.raises(error, match=f"^{message}"):
        kda_core.chunk_kda(**on_meta(data() | changes))


def test_a_tensor_with_values_beside_meta_tensors_is_refused():
    arguments = on_meta(data()) | {"v": data()["v"]}
    with pytest.raises(ValueError, match=r"^v: expected a tensor on meta, where q is, got one on cpu"):
        kda_core.chunk_kda(**arguments)


def test_the_number_of_packed_chunks_needs_boundaries_with_values():
    with pytest.raises(ValueError, match=r"^cu_seqlens_cpu: expected a copy of cu_seqlens on the CPU"):
        kda_core.chunk_kda(**on_meta(data(B=1) | {"cu_seqlens": CU_SEQLENS}), return_intermediate_states=True)
    wrong = on_meta({"cu_seqlens": CU_SEQLENS}) | {"cu_seqlens_cpu": CU_SEQLENS.flip(0)}
    with pytest.raises(ValueError, match=r"^cu_seqlens_cpu: expected to start at 0"):
        kda_core.chunk_kda(**on_meta(data(B=1)), **wrong)


@pytest.mark.parametrize("written", ["out", "ssm_state_indices", "return_intermediate_states"])
def test_what_has_no_gradient_is_refused(written: str):
    options = {
        "out": {"out": torch.empty(B, T, HV, V)},
        "ssm_state_indices": {"initial_state": states(7), "ssm_state_indices": SLOTS},
        "return_intermediate_states": {"return_intermediate_states": True},
    }[written]
    arguments = {n: t.requires_grad_() for n, t in on_meta(data()).items()}
    with pytest.raises(ValueError, match=f"^{written}: expected no gradient to be needed"):
        kda_core.chunk_kda(**arguments, **on_meta(options))


@pytest.mark.parametrize("op", OPS)
def test_double_backward_says_that_there_is_none(op: str):
    arguments = {n: t.requires_grad_() for n, t in on_meta(data()).items()}
    o, _ = getattr(kda_core, op)(**arguments)
    (grad,) = torch.autograd.grad(o.sum(), arguments["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=f"{op}: double backward is not supported"):
        grad.sum().backward()


def test_no_backend_need_be_installed():
    arguments = {n: t.requires_grad_() for n, t in on_meta(data()).items()}
    with no_wheels():
        with pytest.raises(UnsupportedCall):
            kda_core.chunk_kda(**data())
        kda_core.chunk_kda(**arguments)[0].sum().backward()
        assert kda_core.kda_gate(arguments["g"], lower_bound=-5.0).shape == arguments["g"].shape
    assert arguments["q"].grad.shape == arguments["q"].shape


def test_a_named_backend_is_held_to_what_it_declares_but_not_to_its_device():
    meta = on_meta(data())
    assert kda_core.chunk_kda(**meta, backend="reference")[0].shape == (B, T, HV, V)
    with pytest.raises(BackendNotFound, match="'meta' is not installed"):
        kda_core.chunk_kda(**meta, backend="meta")
    refused = r"chunk_kda: backend 'toy' cannot serve this call: does not serve .*too short"
    with installed(Toy("toy", closed={Feature.CHUNK_32: "too short"})), pytest.raises(UnsupportedCall, match=refused):
        kda_core.chunk_kda(**meta, backend="toy", chunk_size=32)


def test_an_environment_that_names_a_missing_backend_is_an_error(monkeypatch):
    monkeypatch.setenv("KDA_BACKEND", "nowhere")
    with pytest.raises(BackendNotFound, match="nowhere"):
        kda_core.chunk_kda(**on_meta(data()))


def test_explain():
    meta = on_meta(data())
    found = kda_core.explain(**meta)
    verdicts = {v.backend: v for v in found.verdicts}
    assert found.chosen == "meta"
    assert "nothing is computed" in verdicts["meta"].reason
    assert verdicts["reference"].status == "unavailable"
    named = kda_core.explain(**meta, backend="reference")
    assert named.chosen == "meta"
    assert {v.backend: v.status for v in named.verdicts}["reference"] == "accepted"
    refused = kda_core.explain(**meta, backend="reference", cp_context=object())
    assert refused.chosen is None
    assert {v.backend: v.status for v in refused.verdicts}["reference"] == "refused"
    assert "meta" not in {e.name for e in registry.ledger}


def test_no_backend_makes_a_plan():
    with pytest.raises(UnsupportedCall, match="'meta' makes no plans"):
        plan(**on_meta(data()))


@pytest.mark.parametrize("op", OPS)
def test_the_operators_themselves(op: str):
    meta = on_meta(data())
    operator = getattr(torch.ops.kda_core, op)
    o, *_ = operator(*meta.values())
    assert (o.shape, o.device.type) == ((B, T, HV, V), "meta")
    packed = on_meta(data(B=1)) | {"cu_seqlens": CU_SEQLENS.to("meta"), "cu_seqlens_cpu": CU_SEQLENS}
    h = operator(**packed, return_intermediate_states=True)[2]
    assert h.shape == (1, 2, HV, K, V)


def test_a_compiled_step():
    arguments = {n: t.requires_grad_() for n, t in on_meta(data()).items()}
    compiled = torch.compile(lambda a: kda_core.chunk_kda(**a)[0], backend="aot_eager", fullgraph=True)
    o = compiled(arguments)
    o.sum().backward()
    assert (o.shape, o.device.type) == ((B, T, HV, V), "meta")
    assert all(t.grad.shape == t.shape for t in arguments.values())

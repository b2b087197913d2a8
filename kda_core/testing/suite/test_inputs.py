"""FAILURES 21: inputs are never modified, which every test checks for its own calls; results are tensors of their own.

Inputs that were changed in place, and those that are not finite, are seen.
"""

from __future__ import annotations

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.request import DATA
from kda_core.testing import references
from kda_core.testing.cases import BF16, BOUNDED, FP32, PLAIN, Case
from kda_core.testing.inputs import indices, same_bits
from kda_core.testing.marks import either_function, requires

ALL = Case(name="unchanged", T=100, HV=6, state=FP32, lengths=(40, 60), **BOUNDED | {"gate": "softplus"})


@requires(Feature.CHUNK, Feature.INITIAL_STATE, Feature.FINAL_STATE)
@pytest.mark.parametrize("T", [1, 0])
def test_results_alias_nothing(kda, T: int):
    """Results are tensors of their own: writing to them, and other calls, change no input and no other result."""
    call = Case(name="aliases", T=T, state=torch.float32).call()
    kda.run(call)
    tensors = kda.on_device(call)
    with torch.no_grad():
        o, state = call(tensors, kda.name)
        before = {n: t.clone() for n, t in tensors.items()} | {"o": o.clone(), "state": state.clone()}
        call(tensors | {"v": -tensors["v"]}, kda.name)
    assert all(map(same_bits, (o, state), (before["o"], before["state"])))
    state.fill_(float("nan"))
    assert same_bits(o, before["o"])
    o.fill_(float("nan"))
    assert all(same_bits(t, before[n]) for n, t in tensors.items())


GATED = (
    Feature.GVA, Feature.SOFTPLUS_GATE, Feature.QK_L2NORM, Feature.NEG_EIGVAL, Feature.BETA_SIGMOID,
    Feature.INITIAL_STATE,
)  # fmt: skip


@pytest.mark.parametrize(
    "op",
    [
        pytest.param("chunk_kda", marks=requires(Feature.CHUNK, Feature.VARLEN, *GATED)),
        pytest.param("fused_recurrent_kda", marks=requires(Feature.RECURRENT, Feature.PAGED_STATE, *GATED)),
    ],
)
def test_inputs_changed_in_place(kda, op: str):
    """The same call again after each input was changed in place: what is kept by address would be old."""
    step = ALL.having(name="changed step", op=op, B=3, T=1, lengths=())
    call = ALL.call() if op == "chunk_kda" else step.call().in_pool(indices(4, 0, 2), 5)
    kda.run(call)
    tensors = kda.on_device(call)
    tensors |= {n: torch.ones_like(t) for n, t in tensors.items() if n == "initial_state"}
    with torch.no_grad():
        call(tensors, kda.name)
        for name, t in tensors.items():
            turned = t.flip(1 if t.dim() > 1 and t.shape[0] == 1 else 0)
            t.copy_(turned[0] - turned if name.startswith("cu_seqlens") else turned)
        others = {n: t.clone() for n, t in tensors.items()}
        again, expected = call(tensors, kda.name), call(others, kda.name)
    assert all(same_bits(a, b) for a, b in zip(again, expected, strict=True) if a is not None)


@requires(Feature.CHUNK, Feature.BACKWARD, Feature.RECURRENT, Feature.RECURRENT_BACKWARD)
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_device_that_is_not_current(kda, op: str):
    """Tensors on another device than the current one: the same bits from there, and the current device stays."""
    devices = torch.get_device_module(kda.device.type)
    if devices.device_count() < 2:
        pytest.skip(f"needs two devices of type {kda.device.type}")
    call = ALL.call() if op == "chunk_kda" else ALL.call().slice_tokens(0, 100).decoding()
    current = devices.current_device()

    def run(device: torch.device) -> list[torch.Tensor]:
        tensors = {n: t if n == "cu_seqlens_cpu" else t.to(device) for n, t in call.tensors.items()}
        inputs = {n: tensors[n].requires_grad_() for n in DATA}
        o, state, *_ = call(tensors | inputs, kda.name)
        return [o, state, *torch.autograd.grad([o, state], list(inputs.values()), [o.detach(), state.detach()])]

    here = run(torch.device(kda.device.type, current))
    there = run(torch.device(kda.device.type, (current + 1) % devices.device_count()))
    assert all(x.device.index != current for x in there)
    assert all(same_bits(a, b.to(a.device)) for a, b in zip(here, there, strict=True))
    assert devices.current_device() == current


NAN_GATES = {
    "softplus": {"gate": "softplus"},
    "lower bound": {"gate": "lower bound"},
    "far bound": {"gate": "lower bound", "options": {"lower_bound": -300.0}},
    "given": {},
    "promised": {"decay": "bounded", "options": {"safe_gate": True, "lower_bound": -5.0}},
}


@requires(Feature.INITIAL_STATE, Feature.LOWER_BOUND_GATE, Feature.SAFE_GATE, *GATED)
@either_function
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("gate", NAN_GATES)
def test_nan_is_seen(kda, op: str, gate: str, dtype: torch.dtype):
    """A NaN in an input makes every row NaN that depends on it, and none of another head or batch entry."""
    fields = PLAIN[dtype] | NAN_GATES[gate]
    if dtype == BF16:
        fields |= {"K": 128}  # heads of models, for which a device may have kernels of its own
    T = 20 if op == "chunk_kda" else 3
    call = Case(name=f"NaN, {gate}", op=op, B=2, T=T, H=2, HV=4, l2norm=True, beta="sigmoid", **fields).call()
    n, t, h, c = 1, T // 2, 2, 5
    places = {
        "q": (n, t, h // 2, c), "k": (n, t, h // 2, c), "v": (n, t, h, c), "g": (n, t, h, c), "beta": (n, t, h),
        "initial_state": (n, h, c, c), "A_log": (h,), "dt_bias": (h * call.tensors["k"].shape[-1] + c,),
    }  # fmt: skip
    for name in places.keys() & call.tensors.keys():
        x = call.tensors[name].clone()
        x[places[name]] = torch.nan
        o = kda.run(call.having(**{name: x}))["o"]
        first = 0 if name in ("initial_state", "A_log", "dt_bias") else t
        last = t + 1 if name == "q" else None
        columns = slice(c, c + 1) if name in ("v", "initial_state") else slice(None)
        assert o[n, first:last, h, columns].isnan().all(), name
        others = torch.ones(o.shape[:3], dtype=torch.bool)
        others[n if name not in ("A_log", "dt_bias") else slice(None), :, 2:] = False
        if name not in ("q", "k"):
            others[:, :, 3] = True
        assert o[others.to(o.device)].isfinite().all(), name


@requires(Feature.CHUNK, Feature.BACKWARD, Feature.STATE_GRADIENT, Feature.LOWER_BOUND_GATE, *GATED)
@pytest.mark.parametrize("gate", ["softplus", "lower bound"])
def test_nan_is_seen_in_gradients(kda, gate: str):
    """Gradients are NaN where the oracle's are: trainers find a step that broke by that."""
    fields = PLAIN[BF16] | NAN_GATES[gate] | {"K": 128, "backward": True}
    call = Case(name=f"NaN in gradients, {gate}", B=2, T=20, H=2, HV=4, l2norm=True, beta="sigmoid", **fields).call()
    for name in ("g", "beta", "A_log", "dt_bias"):
        x = call.tensors[name].clone()
        x.view(-1)[x.numel() // 2] = torch.nan
        broken = call.having(**{name: x})
        found = kda.run(broken)
        for of, expected in references.results(broken).items():
            assert not (expected.isnan() & found[of].cpu().isfinite()).any(), (name, of)

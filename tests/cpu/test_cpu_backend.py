"""The CPU backend's own parts: scratch memory, saved tensors, decay gradients, dtypes, the tensors that it writes."""

from __future__ import annotations

from dataclasses import replace

import installed
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import kda_core
from kda_core import reference
from kda_core.capabilities import Available, Feature, Unavailable
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import GateRequest
from kda_core.testing.cases import Case
from kda_core.testing.subject import Subject
from kda_core.testing.targets import Target

installed.need_backend("cpu")

from cpu_requests import (
    CHUNK,
    LAYOUTS,
    PACKING,
    RECURRENT,
    cut_chunks,
    forward,
    gradients,
    make_request,
    relative_error,
)
from kda_core_cpu import choose, gate, plugin


@pytest.mark.parametrize("op", [CHUNK, RECURRENT])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_agrees_with_the_oracle_to_rounding(op, layout):
    options = {"return_intermediate_states": True} if op == CHUNK else {}
    r = make_request(op, dtype=torch.float64, **LAYOUTS[layout], **options)
    expected = reference.forward(r)
    result, found, backward = gradients(r)
    assert relative_error(result.o, expected.o) < 1e-14
    assert relative_error(result.final_state, expected.final_state) < 1e-14
    if result.h is not None:
        assert result.h.shape == expected.h.shape
        assert relative_error(result.h, expected.h) < 1e-14
    for name, grad in reference.backward(backward).grads.items():
        assert relative_error(found[name], grad) < 1e-14, name
        assert found[name].is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize("op", [CHUNK, RECURRENT])
def test_saved_tensors_are_as_announced(op, layout, disable_recompute):
    r = make_request(op, **LAYOUTS[layout], disable_recompute=disable_recompute, save_for_backward=True)
    announced = [(tuple(spec.shape), spec.dtype) for spec in plugin.kda_core_saved_spec(r)]
    assert announced == [(tuple(x.shape), x.dtype) for x in forward(r).saved]


@pytest.mark.parametrize("packed", [False, True])
def test_saved_spec_is_symbolic_in_length(packed):
    shapes = ShapeEnv()
    r = make_request(cu=PACKING if packed else None, disable_recompute=True, save_for_backward=True)
    sizes = [DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC]
    fake = FakeTensorMode(shape_env=shapes)
    q = fake.from_tensor(r.q, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    specs = plugin.kda_core_saved_spec(replace(r, q=q))
    assert all(isinstance(spec.shape[1], torch.SymInt) for spec in specs)
    assert not shapes.guards


def _peak_bytes(call):
    """Most bytes of tensors that were alive at once while ``call`` ran."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        call()
    live = peak = 0
    for event in sorted(profile.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("packed", [False, True])
def test_scratch_memory_does_not_grow_with_length(packed):
    run, back = cut_chunks(chunks=2)

    def scratch(T):
        r = make_request(T=T, K=16, V=16, cu=[0, T // 3, T] if packed else None)
        o = r.v.numel() * r.v.element_size()
        _, grads, backward = gradients(r)
        made = sum(x.numel() * x.element_size() for x in grads.values())
        return _peak_bytes(lambda: run(r)) - o, _peak_bytes(lambda: back(backward)) - made

    short, long = scratch(192), scratch(768)
    assert short[0] > 0
    assert long[0] <= 1.05 * short[0]
    assert long[1] <= 1.05 * short[1]


@pytest.mark.parametrize(("grad_o", "grad_final_state"), [(True, False), (False, True), (False, False)])
def test_missing_output_gradients_are_zero(grad_o, grad_final_state):
    r = make_request(cu=PACKING, dtype=torch.float64)
    _, found, backward = gradients(r, grad_o=grad_o, grad_final_state=grad_final_state)
    for name, grad in reference.backward(backward).grads.items():
        assert (found[name] - grad).abs().max() <= 1e-13 * max(1.0, grad.abs().max().item()), name


INFINITE = float("inf")


@pytest.mark.parametrize("gamma", [-1e-4, -8.0, -100.0, -3000.0, -1e30, -INFINITE])
@pytest.mark.parametrize("share", [1.0, 0.02])
def test_decay_gradients_for_any_decay(gamma, share):
    """fp32 gradients stay at fp32 rounding of the oracle's, also where decays cut all ties."""
    r = make_request(in_kernel=False, K=16, V=16)
    cut = torch.rand(r.g.shape, generator=torch.Generator().manual_seed(3)) < share
    r = replace(r, g=torch.where(cut, torch.tensor(gamma), -0.01 * torch.rand_like(r.g)))
    result, found, backward = gradients(r)
    expected = reference.forward(r)
    assert relative_error(result.o, expected.o) < 1e-6
    assert relative_error(result.final_state, expected.final_state) < 1e-6
    for name, grad in reference.backward(backward).grads.items():
        assert relative_error(found[name], grad) < 2e-6, name
    assert not found["g"][cut].any() or gamma > -1000


def test_gate_gradients_at_the_magnitudes_of_real_models():
    """exp(A_log) = 201 and |γ| to 2,600: what dA_log sums is γ·dγ, so dγ must vanish where it is truly zero."""
    r = make_request(T=150, K=16, V=16)
    r = replace(r, A_log=torch.full_like(r.A_log, 201.0).log(), g=4 * r.g)
    _, found, backward = gradients(r)
    for name, grad in reference.backward(backward).grads.items():
        assert relative_error(found[name], grad) < 3e-6, name


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("A_log", [-200.0, 80.0, 200.0])
def test_gate_never_gives_nan(lower_bound, A_log):
    g = torch.tensor([-INFINITE, -200.0, -1.0, 0.0, 1.0, 200.0]).view(6, 1, 1)
    r = GateRequest(g=g, A_log=torch.tensor([A_log]), lower_bound=lower_bound)
    gamma = gate.gate_forward(r)
    finite = g.isfinite()
    assert not gamma.isnan()[finite].any()
    assert (gamma <= 0)[finite].all()
    back = replace(r, grad_output=torch.zeros_like(g), needs_grad=frozenset({"g", "A_log"}))
    grads = gate.gate_backward(replace(back, g=g[finite].view(-1, 1, 1), grad_output=torch.zeros(5, 1, 1))).grads
    assert not any(x.any() or x.isnan().any() for x in grads.values())


@pytest.mark.parametrize("layout", [{"B": 5, "T": 1}, {"cu": [0, 1, 2, 3], "T": 5}])
@pytest.mark.parametrize("in_kernel", [False, True])
@pytest.mark.parametrize(("K", "V"), [(12, 10), (128, 96)])
def test_a_step_reads_rows_where_they_lie_and_writes_none_of_them(layout, in_kernel, K, V):
    """Rows that lie as the arithmetic wants them are not copied; what comes of them is what comes of copies."""
    r = make_request(RECURRENT, **layout, HV=2, K=K, V=V, in_kernel=in_kernel)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    before = {name: getattr(r, name).clone() for name in names}
    found = forward(r)
    assert all(torch.equal(getattr(r, name), x) for name, x in before.items())
    scattered = {name: x.repeat_interleave(2, -1)[..., ::2] for name, x in before.items()}
    out = torch.full((*r.v.shape[:-1], 2 * V), float("nan"))[..., ::2]
    copied = forward(replace(r, **scattered, out=out))
    assert torch.equal(copied.o, found.o)
    assert torch.equal(copied.final_state, found.final_state)


def test_a_bf16_pool_is_rounded_once_however_long_the_call():
    pool = torch.randn(3, 2, 12, 10).bfloat16()
    options = {"inplace_final_state": True, "ssm_state_indices": torch.tensor([2])}
    half = make_request(RECURRENT, T=150, initial_state=pool.clone(), **options)
    full = make_request(RECURRENT, T=150, initial_state=pool.float(), **options)
    assert torch.equal(forward(half).o, forward(full).o)
    assert torch.equal(half.initial_state, full.initial_state.bfloat16())


@pytest.mark.parametrize("op", [CHUNK, RECURRENT])
@pytest.mark.parametrize("T", [1, 3, 70])
@pytest.mark.parametrize("v_first", [False, True])
def test_a_strided_pool_is_advanced_where_it_lies(op, T, v_first):
    """Gaps between slots, heads, rows and columns; NaN in every slot and gap that the call does not own."""
    N, HV, K, V = 3, 2, 12, 10
    last = (V, K) if v_first else (K, V)
    memory = torch.full((6, HV + 1, last[0] + 2, 2 * last[1]), float("nan"))
    pool = memory[:, :HV, : last[0], ::2]
    slots = torch.tensor([[4, 9], [-1, 9], [1, 9]])[:, 0]
    used = slots[slots >= 0]
    pool[used] = torch.randn(len(used), HV, *last)
    options = {"initial_state": pool, "inplace_final_state": True, "ssm_state_indices": slots}
    r = make_request(op, B=N, T=T, HV=HV, state_v_first=v_first, **options)
    expected = replace(r, initial_state=pool.clone())
    o = reference.forward(expected).o
    untouched = memory.clone()
    result = forward(r)
    assert relative_error(result.o, o) < 1e-6
    assert relative_error(pool[used], expected.initial_state[used]) < 1e-6
    untouched[:, :HV, : last[0], ::2][used] = pool[used]
    assert torch.equal(untouched.nan_to_num(7.0), memory.nan_to_num(7.0))


def test_float64_states_and_half_inputs():
    """Half inputs compute in float32; only the output is rounded."""
    r = make_request(dtype=torch.bfloat16, T=80)
    exact = reference.oracle(r)
    result = forward(r)
    assert result.final_state.dtype == torch.float32
    assert relative_error(result.final_state, exact.final_state) < 1e-6
    assert relative_error(result.o, exact.o.bfloat16()) < 1e-3


def test_autocast_and_grad_mode_do_not_reach_the_arithmetic():
    r = make_request(T=70)
    expected = forward(r)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        r.q.requires_grad_()
        result = forward(r)
    assert torch.equal(result.o, expected.o)
    assert not result.o.requires_grad


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("op", [CHUNK, RECURRENT])
@pytest.mark.parametrize("layout", [{"B": 2, "T": 40}, {"B": 2, "T": 1}, {"cu": [0, 5, 5, 40], "T": 44}])
def test_the_default_device_is_not_where_the_tensors_are(op, layout, backend):
    r = make_request(op, **layout)
    inputs = {name: getattr(r, name) for name in DIFFERENTIABLE}
    own = {**inputs, "cu_seqlens": r.cu_seqlens, "output_final_state": True, "use_gate_in_kernel": True}
    function, pool = getattr(kda_core, op), torch.randn(5, 2, 12, 10)
    slots = torch.tensor([3, -1, 0])[: r.N]

    def run():
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        o, state = function(**(own | leaves), backend=backend)
        grads = torch.autograd.grad(o.sum() + state.sum(), list(leaves.values()))
        states = pool.clone()
        paged, _ = function(**own | {"initial_state": states, "ssm_state_indices": slots}, backend=backend)
        gate = kda_core.kda_gate(r.g, r.A_log, r.dt_bias, backend=backend)
        return [o, state, *grads, paged, states, gate]

    expected = run()
    with torch.device("meta"):
        found = run()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_call_after_one_in_inference_mode_can_be_differentiated():
    def run():
        r = make_request(RECURRENT, B=3, T=1, H=3, K=128, V=64)
        x = {name: getattr(r, name) for name in ("q", "k", "v", "g", "beta")}
        x["q"].requires_grad_(not torch.is_inference_mode_enabled())
        return x["q"], kda_core.fused_recurrent_kda(**x, backend="cpu")[0]

    with torch.inference_mode():
        _, expected = run()
    q, o = run()
    assert torch.equal(o, expected)
    assert torch.autograd.grad(o.sum(), q)[0].isfinite().all()


@pytest.mark.parametrize(("H", "lengths"), [(33, None), (65, [0, 1, 1, 2, 3])], ids=["dense", "packed"])
def test_step_with_a_table_of_slots_in_blocks_of_heads(H, lengths):
    """A state of few heads was written to all of them where a step takes its heads in blocks."""
    torch.manual_seed(0)
    K, V, slots = 256, 256, torch.tensor([[1, 2], [4, 3], [-1, 0], [5, 6]])
    assert 1 < choose.group_lanes(K, V, step=True) < H
    tokens = (4, 1) if lengths is None else (1, 3)
    slots = slots if lengths is None else slots[[0, 2, 1, 3]]
    q, k, v, g = (torch.randn(*tokens, H, size) for size in (K, K, V, K))
    call = {"q": q, "k": F.normalize(k, dim=-1), "v": v, "g": -g.abs(), "beta": torch.rand(*tokens, H)}
    call |= {"ssm_state_indices": slots, "cu_seqlens": None if lengths is None else torch.tensor(lengths)}
    pools = torch.randn(7, H, K, V).expand(2, -1, -1, -1, -1).clone()
    found, expected = (
        kda_core.fused_recurrent_kda(**call, initial_state=pool, backend=backend)[0]
        for pool, backend in zip(pools, ("cpu", "reference"), strict=True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*pools, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("value", [3e38, -3e38, float("inf"), -float("inf")])
def test_gate_of_what_overflows_where_the_rate_vanishes(value, lower_bound):
    """0 times infinity is no number; a rate of 0 makes it 0."""
    g = torch.full((1, 1, 2), value, requires_grad=True)
    A_log = torch.full((1,), -110.0, requires_grad=True)
    decay = kda_core.kda_gate(g, A_log, torch.full((1, 2), value), lower_bound, backend="cpu")
    expected = 0.0 if lower_bound is None else lower_bound / 2
    assert decay.flatten().tolist() == [expected, expected]
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(decay.sum(), (g, A_log)))


@pytest.mark.parametrize("op", [CHUNK, RECURRENT])
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_float64_with_shorter_gates_and_states(op, gate_dtype, state):
    """All arithmetic is in float64, and what is stored in a shorter dtype is rounded once."""
    case = Case(name="float64 beside shorter", op=op, T=70, K=24, V=20, gate="softplus", beta="sigmoid", l2norm=True)
    case = case.having(dtype=torch.float64, gate_dtype=gate_dtype, state=state, backward=True, lengths=(40, 1, 29))
    Subject(Target("cpu", torch.device("cpu"))).check(case.call())


def test_what_the_backend_declares():
    info = plugin.kda_core_backend()
    assert set(Feature) - info.capabilities.features == {Feature.CONTEXT_PARALLEL}
    assert "cp_context" in info.capabilities.refusal(Feature.CONTEXT_PARALLEL)
    assert isinstance(plugin.kda_core_availability(torch.device("cpu")), Available)
    assert isinstance(plugin.kda_core_availability(torch.device("meta")), Unavailable)

"""The torch.library operators: opcheck, fake tensors, autocast, checkpointing, autograd."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
import torch.utils.checkpoint
from op_calls import HV, OPS, OPTIONS, K, V, gradients, make, of_g, run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from toys import Watcher

import kda_core
from kda_core import _schemas
from kda_core.reference import DIFFERENTIABLE

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def operator_arguments(op, backend, inplace=False, **changes):
    arguments = make(5, grad=not inplace)
    values = {
        **arguments, "dt_bias": arguments["dt_bias"].detach().reshape(HV, K).requires_grad_(not inplace), "scale": 0.5,
        **OPTIONS, "backend": backend, **changes,
    }  # fmt: skip
    if not inplace:
        values["save_for_backward"] = True
    elif "pool" not in values:
        values["initial_state"], values["pool"] = None, values["initial_state"]
    row = _schemas.OPERATORS[op]
    return tuple((row.writing if inplace else row.functional).bind((), values).values())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("op", OPS)
def test_opcheck_of_the_functional_operators(op, backend):
    torch.library.opcheck(getattr(torch.ops.kda_core, op).default, operator_arguments(op, backend))


@pytest.mark.end_to_end
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("op", OPS)
def test_opcheck_of_the_inplace_operators(op, backend):
    arguments = operator_arguments(op, backend, inplace=True, out=torch.empty(2, 5, HV, V))
    torch.library.opcheck(getattr(torch.ops.kda_core, f"{op}_").default, arguments)


@pytest.mark.end_to_end
@pytest.mark.parametrize("op", OPS)
def test_opcheck_of_out_beside_states_that_are_only_read(op):
    out = torch.empty(2, 5, HV, V)
    arguments = operator_arguments(op, "cpu", inplace=True, out=out, pool=None)
    torch.library.opcheck(getattr(torch.ops.kda_core, f"{op}_").default, arguments)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_opcheck_of_the_gate(backend):
    arguments = make(5, grad=True)
    args = (arguments["g"], arguments["A_log"], arguments["dt_bias"].detach().reshape(HV, K), None, backend, True)
    torch.library.opcheck(torch.ops.kda_core.kda_gate.default, args)


def test_fake_tensors_have_the_real_shapes_and_dtypes():
    options = {"return_intermediate_states": True, "state_v_first": True}
    arguments = make(130, dtype=torch.bfloat16)
    arguments["initial_state"] = arguments["initial_state"].mT.contiguous().bfloat16()
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) for n, t in arguments.items()}
        fake = run(fakes, **options)
    for found, expected in zip(fake, run(arguments, **options), strict=True):
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_wrong_shapes_are_refused_for_fake_tensors_too():
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) for n, t in make().items()}
        with pytest.raises(ValueError, match=r"^beta: expected shape"):
            run(fakes | {"beta": fakes["beta"][..., :1]})


def test_autocast_leaves_the_inputs_dtypes_alone():
    arguments = make(dtype=torch.bfloat16, grad=True)
    plain = gradients(run, arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = run(arguments)
        assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
        cast = gradients(run, arguments)
    for found, expected in zip(cast, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_inference_mode():
    with torch.inference_mode():
        found = run(make())
        pool = make()["initial_state"]
        run(make() | {"initial_state": pool}, "fused_recurrent_kda", inplace_final_state=True)
    for a, b in zip(found, run(make()), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(pool, run(make(), "fused_recurrent_kda")[1], rtol=0, atol=0)


def test_checkpointing_recomputes_the_same_gradients():
    def checkpointed(arguments):
        return torch.utils.checkpoint.checkpoint(run, arguments, use_reentrant=False)

    for found, expected in zip(gradients(checkpointed, make(grad=True)), gradients(run, make(grad=True)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_only_the_gradients_that_are_needed_are_asked_for():
    with Watcher() as requests:
        for name in DIFFERENTIABLE:
            arguments = make(5)
            arguments[name].requires_grad_()
            run(arguments)[0].sum().backward()
            run(arguments)[1].sum().backward()
    asked = [(r.needs_grad, r.grad_o is None, r.grad_final_state is None) for r in requests if r.needs_grad]
    expected = [(frozenset({n}), o, s) for n in DIFFERENTIABLE for o, s in ((False, True), (True, False))]
    # q does not reach the final state: its gradient is asked for all the same, and is zero.
    assert asked == expected


def test_an_output_that_is_not_used_has_no_gradient_of_its_own():
    arguments = make(5, grad=True)
    o, state = run(arguments)
    assert o.requires_grad
    assert state.requires_grad
    (o.sum() * 0 + state.sum()).backward()
    assert all(torch.isfinite(t.grad).all() for t in arguments.values())


@pytest.mark.parametrize("op", [*OPS, "kda_gate"])
def test_batched_gradients_of_eager_calls_are_refused(op):
    """Not handed to a backend, which cannot read them."""
    g = make(3)["g"].requires_grad_()
    o = of_g(op)(g)
    with pytest.raises(RuntimeError, match=rf"{op}: batched gradients .* are not supported; use torch.func"):
        torch.autograd.grad(o, g, torch.ones(2, *o.shape, dtype=o.dtype), is_grads_batched=True)


def test_writes_to_a_pool_are_seen_by_autograd():
    pool = torch.zeros(2, HV, K, V)
    weight = torch.ones(2, HV, K, V, requires_grad=True)
    product = (weight * pool).sum()
    with torch.no_grad():
        run(make(3) | {"initial_state": pool}, "fused_recurrent_kda", inplace_final_state=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_gate_is_the_gate_of_the_call(lower_bound):
    arguments = make(9)
    A_log, dt_bias = arguments.pop("A_log"), arguments.pop("dt_bias")
    decay = kda_core.kda_gate(arguments["g"], A_log, dt_bias, lower_bound)
    assert decay.dtype == torch.float32
    outside, _ = kda_core.chunk_kda(**(arguments | {"g": decay}))
    inside, _ = kda_core.chunk_kda(
        **arguments, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, use_gate_in_kernel=True
    )
    torch.testing.assert_close(inside, outside)
    with torch.no_grad():
        x = arguments["g"].double() + dt_bias.double().reshape(HV, K)
        rate = A_log.double().exp()[:, None]
        expected = -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    torch.testing.assert_close(decay.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.end_to_end
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gates_gradients(lower_bound, compiled):
    function = torch.compile(kda_core.kda_gate, fullgraph=True, backend="aot_eager") if compiled else kda_core.kda_gate
    arguments = make(3, grad=True)
    values = [arguments[n].detach().double().requires_grad_() for n in ("g", "A_log", "dt_bias")]
    assert torch.autograd.gradcheck(lambda *a: function(*a, lower_bound), values)
    found = torch.autograd.grad(
        function(*(arguments[n] for n in ("g", "A_log", "dt_bias")), lower_bound).sum(), arguments["g"]
    )
    assert found[0].dtype == torch.float32


def gradcheck_inputs(T, H, HV, K, V):
    shapes = {
        "q": (1, T, H, K), "k": (1, T, H, K), "v": (1, T, HV, V), "g": (1, T, HV, K), "beta": (1, T, HV),
        "A_log": (HV,), "dt_bias": (HV, K), "initial_state": (1, HV, K, V),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    return {
        n: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for n, shape in shapes.items()
    }


# The full Jacobian of a tiny call, and random projections of one that crosses chunks.
@pytest.mark.parametrize(("sizes", "fast"), [((3, 1, 2, 3, 2), False), ((70, 2, 4, 8, 6), True)])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("op", OPS)
def test_gradcheck_of_every_differentiable_input(op, lower_bound, sizes, fast):
    inputs = gradcheck_inputs(*sizes)

    def function(*values):
        return run(dict(zip(inputs, values, strict=True)), op, lower_bound=lower_bound)

    assert torch.autograd.gradcheck(function, tuple(inputs.values()), fast_mode=fast)

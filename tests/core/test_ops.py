"""The torch.library operators: compile, export, fake tensors, autocast, checkpointing, autograd."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import kda_core
from kda_core import schemas
from kda_core.hookspecs import hookimpl
from kda_core.plugins import registry
from kda_core.reference import DIFFERENTIABLE

HV, K, V = 4, 8, 6
OPS = ("chunk_kda", "fused_recurrent_kda")


def make(T=70, B=2, H=2, dtype=torch.float32, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    arguments = {
        "q": normal(B, T, H, K).to(dtype),
        "k": normal(B, T, H, K).to(dtype),
        "v": normal(B, T, HV, V).to(dtype),
        "g": normal(B, T, HV, K),
        "beta": normal(B, T, HV),
        "A_log": normal(HV),
        "dt_bias": normal(HV * K),
        "initial_state": normal(B, HV, K, V),
    }
    if grad:
        for t in arguments.values():
            t.requires_grad_()
    return arguments


OPTIONS = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}


def run(arguments, op="chunk_kda", **options):
    return getattr(kda_core, op)(**arguments, **OPTIONS, **options)


def gradients(function, arguments):
    o, state = function(arguments)
    loss = (o * torch.linspace(-1, 1, o.shape[-1])).sum() + (state * state).sum()
    return [o, state, *torch.autograd.grad(loss, list(arguments.values()))]


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path, monkeypatch):
    # Graphs on disk from earlier versions of this checkout, whose number has not changed, must not serve here.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("op", OPS)
def test_compiled_forward_and_backward_equal_eager(op):
    eager = gradients(lambda a: run(a, op), make(grad=True))
    compiled = torch.compile(lambda a: run(a, op), fullgraph=True, backend="aot_eager")
    for found, expected in zip(gradients(compiled, make(grad=True)), eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.end_to_end
def test_inductor_compiles_forward_and_backward():
    eager = gradients(run, make(grad=True))
    compiled = torch.compile(run, fullgraph=True)
    for found, expected in zip(gradients(compiled, make(grad=True)), eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_dynamic_lengths_compile_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
    for T in (70, 3, 64, 129):
        for found, expected in zip(
            gradients(compiled, make(T, grad=True)), gradients(run, make(T, grad=True)), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert counter.frame_count == 1


def test_dynamic_packed_lengths_compile_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
    # The first number of sequences differs from every head count, or the compiler takes the two for one symbol.
    for cuts in ([0, 5, 9, 9, 20, 30, 31, 40, 50, 60, 70], [0, 60, 61, 65], [0, 0, 33], [0, 7, 50, 50, 77, 80]):
        arguments = make(cuts[-1], B=1)
        arguments["initial_state"] = torch.randn(len(cuts) - 1, HV, K, V)
        arguments["cu_seqlens"] = torch.tensor(cuts)
        for found, expected in zip(compiled(arguments), run(arguments), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert counter.frame_count == 1


def test_compiled_intermediate_states_of_packed_sequences_have_a_dynamic_size():
    def states(arguments):
        return run(arguments, return_intermediate_states=True)[2] * 2

    arguments = make(100, B=1) | {
        "initial_state": torch.randn(3, HV, K, V),
        "cu_seqlens": torch.tensor([0, 65, 65, 100]),
    }
    # The default of later versions of torch; 2.7 asks for it.
    dynamic = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with torch.no_grad(), dynamic:
        found = torch.compile(states, fullgraph=True, backend="aot_eager")(arguments)
        torch.testing.assert_close(found, states(arguments), rtol=0, atol=0)
    assert found.shape == (1, 3, HV, K, V)


@pytest.mark.end_to_end
def test_compiled_decoding_advances_the_pool_in_place():
    def step(arguments, pool, indices, out):
        arguments = {**arguments, "initial_state": pool}
        return run(arguments, "fused_recurrent_kda", ssm_state_indices=indices, out=out)

    arguments, indices = make(1), torch.tensor([5, -1], dtype=torch.int32)
    pools = [torch.randn(7, HV, K, V, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    outs = [torch.full((2, 1, HV, V), float("nan")) for _ in range(2)]
    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True)
        for function, pool, out in zip((step, compiled), pools, outs, strict=True):
            o, state = function(arguments, pool, indices, out)
            assert o.data_ptr() == out.data_ptr()
            assert state.data_ptr() == pool.data_ptr()
    torch.testing.assert_close(pools[1], pools[0], rtol=0, atol=0)
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=0)


def test_a_compiled_graph_keeps_the_backend_it_was_traced_with():
    arguments = make(9)
    with kda_core.use_backend("reference"), torch.no_grad():
        compiled = torch.compile(lambda a: run(a)[0], fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(arguments), run(arguments)[0], rtol=0, atol=0)


def test_a_compiled_graph_names_the_versions_of_the_backends():
    """Graphs on disk are found by what is in them; what a backend saves for its backward changes with its version."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compile(run, fullgraph=True, backend=keep)(make(3))
    (call,) = [n for n in graphs[0].graph.nodes if "kda_core" in str(n.target)]
    versions = [f"{b.info.name} {b.info.version}" for b in registry.backends]
    found = schemas.FUNCTIONAL["chunk_kda"].bind(call.args, call.kwargs)["backend"]
    assert found == "@" + ", ".join(versions)
    assert any(v.startswith("cpu ") for v in versions)


@pytest.mark.parametrize("strict", [False, True])
def test_export_holds_one_opaque_operator(strict):
    class Mixer(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return kda_core.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)

    arguments = make()
    q, k, v, g, beta = (arguments[n] for n in ("q", "k", "v", "g", "beta"))
    args = (q, k, v, -g.abs(), beta.sigmoid())
    T = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(Mixer(), args, dynamic_shapes=[{1: T}] * 5, strict=strict)
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert targets.count("kda_core.chunk_kda.default") == 1
    for found, expected in zip(program.module()(*args), Mixer()(*args), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def operator_arguments(op, backend, inplace=False, **changes):
    arguments = make(5, grad=not inplace)
    values = {
        **arguments,
        "dt_bias": arguments["dt_bias"].detach().reshape(HV, K).requires_grad_(not inplace),
        "scale": 0.5,
        **OPTIONS,
        "backend": backend,
        **changes,
    }
    if not inplace:
        values["save_for_backward"] = True
    elif "pool" not in values:
        values["initial_state"], values["pool"] = None, values["initial_state"]
    schema = (schemas.INPLACE if inplace else schemas.FUNCTIONAL)[op]
    return tuple(schema.bind((), values).values())


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


@pytest.mark.parametrize("op", OPS)
def test_compiled_call_with_out_leaves_its_states_alone(op):
    """They may be expanded, of inference mode, or part of somebody's graph."""

    def call(arguments, out):
        return run(arguments, op, out=out)[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    arguments = make()
    expanded = make()["initial_state"][:1].expand(2, HV, K, V)
    with torch.inference_mode():
        inference = make()["initial_state"].clone()
    for state in (expanded, inference, arguments["initial_state"]):
        version = None if state.is_inference() else state._version
        outs = torch.empty(2, 2, 70, HV, V)
        with torch.no_grad():
            for function, out in zip((call, compiled), outs, strict=True):
                assert function(arguments | {"initial_state": state}, out).data_ptr() == out.data_ptr()
        assert torch.equal(*outs)
        assert version is None or state._version == version


def test_the_deprecated_layout_name_compiles():
    def call(arguments):
        return run(arguments, transpose_state_layout=True)

    arguments = make() | {"initial_state": make()["initial_state"].mT.contiguous()}
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        expected = call(arguments)
    for x, y in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(arguments), expected, strict=True):
        assert torch.equal(x, y)


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


@pytest.mark.parametrize("op", OPS)
def test_double_backward_says_that_there_is_none(op):
    arguments = make(5, grad=True)
    (grad,) = torch.autograd.grad(run(arguments, op)[0].sum(), arguments["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=rf"{op}: double backward is not supported"):
        grad.sum().backward()


def test_only_the_gradients_that_are_needed_are_asked_for():
    asked = []

    class Watcher:
        @hookimpl(wrapper=True)
        def kda_core_chunk_backward(self, request):
            asked.append((request.needs_grad, request.grad_o is None, request.grad_final_state is None))
            return (yield)

    watcher = Watcher()
    registry.add_wrapper(watcher)
    try:
        for name in DIFFERENTIABLE:
            arguments = make(5)
            arguments[name].requires_grad_()
            run(arguments)[0].sum().backward()
            run(arguments)[1].sum().backward()
    finally:
        registry.remove_wrapper(watcher)
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


@contextmanager
def seen(*hooks: str):
    """The tensors that a hook of any backend is given, by name."""
    found: dict[str, torch.Tensor] = {}

    def watch(self, request):
        found.update((n, t) for n, t in vars(request).items() if isinstance(t, torch.Tensor))
        return (yield)

    methods = {hook: hookimpl(wrapper=True)(lambda self, request: (yield from watch(self, request))) for hook in hooks}
    watcher = type("Watcher", (), methods)()
    registry.add_wrapper(watcher)
    try:
        yield found
    finally:
        registry.remove_wrapper(watcher)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_a_wrapped_tensor_reaches_no_backend(op: str, name: str):
    """Whichever argument it is, in calls that have been seen, too: what it wraps does."""
    arguments = make(5)
    expected = run(arguments, op)
    with seen("kda_core_chunk_forward", "kda_core_recurrent_forward") as found:
        for _ in range(2):
            results = run(arguments | {name: Deferred(arguments[name])}, op)
            assert type(found[name]) is torch.Tensor
            assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("name", ["g", "A_log", "dt_bias"])
def test_a_wrapped_tensor_reaches_no_gate(name: str):
    arguments = {n: t for n, t in make(5).items() if n in ("g", "A_log", "dt_bias")}
    expected = kda_core.kda_gate(**arguments)
    with seen("kda_core_gate_forward") as found:
        result = kda_core.kda_gate(**arguments | {name: Deferred(arguments[name])})
    assert type(found[name]) is torch.Tensor
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
    with seen("kda_core_chunk_backward") as found:
        outputs = [Late.apply(x) if wrapped else x for x, wrapped in zip(run(arguments), late, strict=True)]
        grads = torch.autograd.grad([x.sum() for x in outputs], list(arguments.values()))
    assert type(found["grad_o"]) is type(found["grad_final_state"]) is torch.Tensor
    assert all(map(torch.equal, grads, expected))


def test_a_memo_is_not_that_of_tensors_that_came_back_with_other_strides():
    """Hooks of saved tensors offload slices of a projection, and bring contiguous tensors back."""
    memos = []

    class Watcher:
        @hookimpl(wrapper=True)
        def kda_core_chunk_backward(self, request):
            memos.append((request.memo, request.q.stride()))
            return (yield)

    arguments = make(5)
    qk = torch.cat([arguments["q"], arguments["k"]], -1)
    arguments["q"], arguments["k"] = (x.detach().requires_grad_() for x in qk.chunk(2, -1))
    registry.add_wrapper(watcher := Watcher())
    try:
        run(arguments)[0].sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
            o = run(arguments)[0]
        o.sum().backward()
    finally:
        registry.remove_wrapper(watcher)
    (own, sliced), (offloaded, contiguous) = memos
    assert sliced != contiguous
    assert own is not None
    assert offloaded is None


@pytest.mark.end_to_end
@pytest.mark.parametrize("op", [*OPS, "kda_gate"])
def test_eager_forward_and_compiled_backward(op: str):
    """Under compiled autograd backends stay opaque: no graph break, the same gradients."""
    torch._dynamo.reset()
    g = make(3)["g"].requires_grad_()
    (expected,) = torch.autograd.grad(of_g(op)(g).square().sum(), g)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        of_g(op)(g).square().sum().backward()
    assert torch.equal(g.grad, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_step_reads_its_slots_when_it_runs():
    """torch.jit.trace keeps what it does not see as constants."""
    arguments = {n: t for n, t in make(1).items() if n != "initial_state"}

    def step(pool, slots):
        more = {"initial_state": pool, "ssm_state_indices": slots, "scale": 0.3}
        return run(arguments | more, "fused_recurrent_kda")[0]

    traced = torch.jit.trace(step, (torch.zeros(6, HV, K, V), torch.tensor([1, 2])), check_trace=False)
    pool = torch.zeros(6, HV, K, V)
    traced(pool, torch.tensor([4, 0]))
    assert pool.flatten(1).any(1).nonzero().flatten().tolist() == [0, 4]


def of_g(op: str):
    """A public function of g alone."""
    if op == "kda_gate":
        return lambda g: kda_core.kda_gate(g, lower_bound=-5.0)
    return lambda g: run(make(3) | {"g": g}, op)[0]


@pytest.mark.parametrize("op", [*OPS, "kda_gate"])
def test_batched_gradients_of_eager_calls_are_refused(op):
    """Not handed to a backend, which cannot read them."""
    g = make(3)["g"].requires_grad_()
    o = of_g(op)(g)
    with pytest.raises(RuntimeError, match=f"{op}: batched gradients"):
        torch.autograd.grad(o, g, torch.ones(2, *o.shape, dtype=o.dtype), is_grads_batched=True)


def test_writes_to_a_pool_are_seen_by_autograd():
    pool = torch.zeros(2, HV, K, V)
    weight = torch.ones(2, HV, K, V, requires_grad=True)
    product = (weight * pool).sum()
    with torch.no_grad():
        run(make(3) | {"initial_state": pool}, "fused_recurrent_kda", inplace_final_state=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("op", [*OPS, "kda_gate"])
def test_forward_mode_differentiation_is_refused_not_ignored(op):
    def function(g):
        if op == "kda_gate":
            return kda_core.kda_gate(g, lower_bound=-5.0)
        return run(make(3) | {"g": g}, op)[0]

    g = make(3)["g"]
    with pytest.raises(RuntimeError, match=rf"{op}: forward-mode differentiation is not supported"):
        torch.func.jvp(function, (g,), (torch.ones_like(g),))


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
        "q": (1, T, H, K),
        "k": (1, T, H, K),
        "v": (1, T, HV, V),
        "g": (1, T, HV, K),
        "beta": (1, T, HV),
        "A_log": (HV,),
        "dt_bias": (HV, K),
        "initial_state": (1, HV, K, V),
    }
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

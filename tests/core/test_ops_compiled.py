"""The torch.library operators under torch.compile and torch.export."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
import torch.utils.checkpoint
from op_calls import HV, OPS, K, V, gradients, make, of_g, run

import kda_core
from kda_core import _schemas
from kda_core._plugins import registry

pytestmark = pytest.mark.usefixtures("fresh_compiler")


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
    found = _schemas.OPERATORS["chunk_kda"].functional.bind(call.args, call.kwargs)["backend"]
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


@pytest.mark.end_to_end
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_a_traced_call_has_the_default_scale(op):
    """Sizes are tensors while torch.jit.trace looks on, and a scale must be none."""
    arguments = make(1)
    names = ("q", "k", "v", "g", "beta")

    def call(*tensors):
        return getattr(kda_core, op)(*tensors)[0]

    given = tuple(arguments[n].detach() for n in names)
    assert torch.equal(torch.jit.trace(call, given)(*given), call(*given))

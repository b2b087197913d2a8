"""DTensors that are sharded by batch or heads make the whole call; everything else is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from whole_calls import RAW, inputs, normal, oracle, worst

import kda_core


@pytest.mark.parametrize(
    ("kinds", "how"),
    [
        *((kinds, "eager") for kinds in (["batch"], ["heads"], ["batch", "heads"], ["heads", "heads"])),
        # Gradients of parameters were summed over ranks that all had the whole.
        *((kinds, "eager") for kinds in (["nothing"], ["nothing", "batch"], ["heads", "nothing"])),
        pytest.param(["heads"], "compiled", marks=pytest.mark.end_to_end),
    ],
)
def test_shards_are_the_whole(ranks, kinds, how):
    tensors = inputs(20, 4, B=4, H=4, HV=8)
    grads = {"o": normal(4, 20, 8, 6), "final_state": normal(4, 8, 8, 6, seed=4)}
    expected = oracle(tensors, grads, None, {**RAW, "output_final_state": True})
    for found in ranks.run(2 ** len(kinds), "sharded_step", tensors, grads, kinds, RAW, how):
        error, name = worst(found, expected)
        assert error < 1e-12, name


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shards(mesh, placement=None, **changes):
    tensors = inputs(6, gate=False)
    tensors["g"] = -tensors["g"].abs()
    return {n: distribute_tensor(t, mesh, [changes.get(n, placement or Shard(2))]) for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: {**inputs(6, gate=False), "k": shards(m)["k"]}, TypeError, "k: expected a plain tensor, as q is,"),
        (lambda m: {**shards(m), "k": inputs(6)["k"]}, TypeError, "k: expected a DTensor, as q is, got Tensor"),
        (lambda m: shards(m, Shard(1)), ValueError, r"q: expected a DTensor sharded by batch, Shard\(0\), or by heads"),
        (lambda m: shards(m, k=Shard(0)), ValueError, "k: expected a DTensor with placements .*as those of q demand"),
        (lambda m: shards(m, beta=Replicate()), ValueError, "beta: expected a DTensor with placements"),
        (lambda m: {**shards(m), "cu_seqlens": torch.tensor([0, 6])}, ValueError, "cu_seqlens: expected None beside"),
        (lambda m: {**shards(m), "out": torch.zeros(1)}, ValueError, "out: expected None beside DTensors"),
        (lambda m: {**shards(m), "cp_context": object()}, ValueError, "cp_context: expected None beside DTensors"),
    ],
)  # fmt: skip
def test_everything_else_is_refused_by_name(mesh, call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        kda_core.chunk_kda(**call(mesh))


def test_a_flat_parameter_that_is_cut_within_a_head(ranks):
    """torch cannot view it by heads, and said so."""
    tensors = inputs(6, H=3, HV=3) | {"dt_bias": normal(3 * 8)}
    for ok, text in ranks.attempt(2, "sharded_step", tensors, {}, ["heads"], RAW, "eager"):
        assert not ok
        assert "ValueError: q: expected a size of dimension 2 that 2 ranks divide" in text
        ranks.broken = False  # nothing was sent


def test_the_recurrent_function_and_the_gate(mesh):
    tensors = shards(mesh)
    o, state = kda_core.fused_recurrent_kda(**tensors, output_final_state=True)
    whole = {n: t.full_tensor() for n, t in tensors.items()}
    expected, last = kda_core.fused_recurrent_kda(**whole, output_final_state=True)
    assert torch.equal(o.full_tensor(), expected)
    assert torch.equal(state.full_tensor(), last)
    assert state.placements == (Shard(1),)
    g = tensors["g"]
    decay = kda_core.kda_gate(g, lower_bound=-5.0)
    assert torch.equal(decay.full_tensor(), kda_core.kda_gate(whole["g"], lower_bound=-5.0))


def test_questions_are_about_the_shards(mesh):
    """The answer of ``supports``, and any about the gate, were taken for results, and failed as such."""
    tensors = shards(mesh)
    gate = {"g": tensors["g"], "lower_bound": -5.0}
    for op, arguments in (("chunk_kda", tensors), ("fused_recurrent_kda", tensors), ("kda_gate", gate)):
        assert kda_core.explain(**arguments, op=op, backend="cpu").chosen == "cpu"
        assert kda_core.supports(op, **arguments, backend="cpu") == (True, "")
    answer = kda_core.supports("chunk_kda", **shards(mesh, Shard(1)), backend="cpu")
    assert not answer[0]
    assert answer[1].startswith("q: expected a DTensor sharded by batch")


def test_parameters_of_tensor_parallelism_beside_local_rows(ranks):
    tensors = inputs(6)
    whole = oracle(tensors, {}, None, RAW)["o"]
    parts = ranks.run(2, "local_rows", tensors, RAW)
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.end_to_end
def test_one_compiled_function_for_shards_of_either_kind(ranks):
    """Placements were constants of the graph: heads, then batches raised InternalTorchDynamoError.

    Batches of several sizes follow: shapes of results are global ones.
    """
    options, calls = {"use_qk_l2norm_in_kernel": True}, []
    for B, dim in ((2, 2), (2, 0), (4, 0)):
        tensors = inputs(6, B=B, gate=False, seed=B)
        calls.append((tensors | {"g": -tensors["g"].abs()}, dim))
    for found in ranks.run(2, "sharded_one_after_another", calls, options):
        for (tensors, _), (shape, o, grad) in zip(calls, found, strict=True):
            expected = oracle(tensors, {"o": torch.ones_like(tensors["v"])}, None, options)
            assert shape == tuple(expected["o"].shape)
            assert worst({"o": o, "dq": grad}, expected)[0] < 1e-12

"""Steps under ``torch.compile`` and in a CUDA graph: of training, of drafts with records, and of a layer that decodes.
Plain calls on a pool are in ``test_paged_pool``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kda_core.capabilities import Feature
from kda_core.nn import kda_decode_step
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import DATA
from kda_core.testing.cases import BF16, BFLOAT16, FP32, PLAIN, SOFTPLUS, Case
from kda_core.testing.inputs import Call, indices, same_bits
from kda_core.testing.marks import requires
from kda_core.testing.subject import Subject


@requires(Feature.CHUNK, Feature.BACKWARD)
@pytest.mark.parametrize("lengths", [(), (50, 0, 1, 19)], ids=["dense", "packed"])
def test_compiled_training_step(kda, lengths: tuple[int, ...]):
    """Compiled in one graph, results and gradients are right; a backward that needs autograd's graph returns zeros."""
    dtype = FP32 if kda.takes(FP32) else BF16
    call = Case(name=f"compiled {lengths}", T=70, lengths=lengths, backward=True, **PLAIN[dtype]).call()
    kda.check(call)
    tensors = kda.on_device(call)
    names = [n for n in DIFFERENTIABLE if n in tensors]
    leaves = [tensors[n].requires_grad_() for n in names]
    torch.compiler.reset()  # forget code that other calls compiled
    forward = torch.compile(lambda given: call(given, kda.name)[:2], fullgraph=True, backend="aot_eager")
    o, final_state = forward(tensors)
    grads = torch.autograd.grad([o, final_state], leaves, [call.grads[n].to(kda.device) for n in ("o", "final_state")])
    found = {"o": o.detach(), "final_state": final_state.detach()}
    found |= {f"d{n}": grad.reshape(getattr(call.request(), n).shape) for n, grad in zip(names, grads, strict=True)}
    kda.compare(call, {n: t.cpu() for n, t in found.items()})


def _needs_graphs(kda: Subject) -> None:
    if kda.device.type != "cuda":
        pytest.skip(f"torch has no graphs for {kda.device.type}")


@requires(Feature.CHUNK, Feature.BACKWARD)
@pytest.mark.parametrize("lengths", [(), (50, 0, 1, 70)], ids=["dense", "packed"])
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_training_step_in_a_graph(kda, lengths: tuple[int, ...], recompute: bool):
    """FAILURES 13: replayed with other inputs, and other boundaries, a captured step does what a new one does."""
    _needs_graphs(kda)
    options = {"disable_recompute": not recompute}
    fields = {"HV": 6, "lengths": lengths, "backward": True, **PLAIN[BF16], **BFLOAT16, **SOFTPLUS}
    call = Case(name=f"step in a graph {lengths} {recompute}", T=121, options=options, **fields).call()
    kda.check(call)
    tensors = kda.on_device(call)
    leaves = [tensors[n].requires_grad_() for n in DIFFERENTIABLE if n in tensors]
    grads = [call.grads[n].to(kda.device) for n in ("o", "final_state")]

    def step() -> list[Tensor]:
        o, final_state = call(tensors, kda.name)[:2]
        return [o, final_state, *torch.autograd.grad([o, final_state], leaves, grads)]

    # A backend may record its second call and repeat it from the third on.
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for turn in range(3):
        with torch.no_grad():
            for t in (*leaves, *grads):
                t.copy_(t.flip(0).roll(1, -1) if t.shape[0] > 1 else t.roll(turn + 1, -1))
            if lengths:
                first = 30 + turn
                tensors["cu_seqlens"].copy_(torch.tensor([0, first, first + 9, first + 9, 121 - turn]))
        graph.replay()
        replayed = [t.clone() for t in captured]
        assert all(torch.isfinite(t).all() for t in replayed)
        for position, (ours, again) in enumerate(zip(replayed, step(), strict=True)):
            assert same_bits(ours.detach(), again.detach()), f"result {position}, replay {turn}"


SLOTS = ([4, 0, 2, 1], [1, -1, 5, 0], [-1, -1, -1, -1], [2, 4, 0, 3])  # Slots of four rows at each replay; -1 pads

COUNTS = ([0, 1, 2, 3], [3, 2, 0, 1], [1, 0, 3, 2], [3, 3, 3, 3])
"""Tokens of the draft before that each row commits, 0 to all."""


def _pool_call(kda: Subject, T: int) -> Call:
    """Four sequences of T tokens on a pool of six slots."""
    case = Case(name=f"captured, {T} tokens", op="fused_recurrent_kda", B=4, T=T, state=FP32, final_state=False)
    slots = indices(*SLOTS[0])
    return kda.near(case, lambda near: near.call().in_pool(slots, 6)).call().in_pool(slots, 6)


def _expect_replays(
    step: Callable[[], Tensor], written: list[Tensor], tables: list[tuple[Tensor, tuple]], rows: list[Tensor]
) -> None:
    """Replayed with other rows and tables, a captured step has the bits of a new one; neither waits for the device.

    Args:
        step: returns its output, and writes to ``written``.
        tables: integers on the device, and their contents at each replay.
    """
    before = [t.clone() for t in written]

    def results(run: Callable[[], Tensor]) -> list[Tensor]:
        for t, old in zip(written, before, strict=True):
            t.copy_(old)
        return [t.clone() for t in (run(), *written)]

    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        # A backend may record its second call and repeat it from the third on.
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = step()
        for turn in range(len(SLOTS)):
            for t in rows:
                t.copy_(t.roll(1, 0))
            for t, contents in tables:
                t.copy_(torch.tensor(contents[turn]))
            torch.cuda.set_sync_debug_mode("error")
            try:
                replayed, again = results(lambda: graph.replay() or captured), results(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert replayed[0].isfinite().all()
            for position, pair in enumerate(zip(replayed, again, strict=True)):
                assert same_bits(*pair), f"result {position}, replay {turn}"


@requires(Feature.RECURRENT, Feature.PAGED_STATE, Feature.NO_STATE_UPDATE, Feature.DRAFT_RECORDS)
def test_drafts_with_records_in_a_graph(kda):
    """FAILURES 13: a step begins with the commit of the one before; padding, and 0 to all tokens committed."""
    _needs_graphs(kda)
    call = _pool_call(kda, 3).recorded()
    earlier = kda.check(call)["records"].to(kda.device)
    tensors = kda.on_device(call)
    pool, slots, records = (tensors[n] for n in ("initial_state", "ssm_state_indices", "records"))
    pool.nan_to_num_(0.25)
    counts = torch.zeros_like(slots)
    given = tensors | {"commit": earlier, "num_committed": counts}
    rows = [earlier, *(tensors[n] for n in DATA)]
    tables = [(slots, SLOTS), (counts, COUNTS)]
    _expect_replays(lambda: call(given, kda.name)[0], [pool, records], tables, rows)


@requires(Feature.RECURRENT, Feature.PAGED_STATE)
def test_decoding_step_in_a_graph(kda):
    """FAILURES 13: ``kda_decode_step`` with padding rows."""
    _needs_graphs(kda)
    call = _pool_call(kda, 1)
    kda.check(call)
    q, k, v, g, beta = (call.tensors[n][:, 0].to(kda.device) for n in DATA)
    state, slots = (call.tensors[n].to(kda.device) for n in ("initial_state", "ssm_state_indices"))
    state.nan_to_num_(0.25)
    rows = {"mixed_qkv": torch.cat([x.flatten(1) for x in (q, k, v)], 1), "g": g, "beta": beta, "norm_gate": v}
    D = rows["mixed_qkv"].shape[1]
    conv_state, weights = q.new_ones(6, 3, D), {"conv_weight": q.new_ones(D, 4), "norm_weight": q.new_ones(v.shape[-1])}
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    given = {**rows, **weights, **dict.fromkeys(flags, False), "state_indices": slots, "backend": kda.name}
    step = partial(kda_decode_step, conv_state=conv_state, state=state, **given)
    _expect_replays(step, [state, conv_state], [(slots, SLOTS)], list(rows.values()))

"""A training step captured in a CUDA graph.
Calls on a pool, as a server captures them, are in ``test_paged_pool``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kda_core.capabilities import Feature
from kda_core.reference import DIFFERENTIABLE
from kda_core.testing.cases import BF16, BFLOAT16, PLAIN, SOFTPLUS, Case
from kda_core.testing.inputs import same_bits
from kda_core.testing.marks import requires


@requires(Feature.CHUNK, Feature.BACKWARD)
@pytest.mark.parametrize("lengths", [(), (50, 0, 1, 70)], ids=["dense", "packed"])
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_training_step_in_a_graph(kda, lengths: tuple[int, ...], recompute: bool):
    """FAILURES 13: replayed with other inputs, and other boundaries, a captured step does what a new one does."""
    if kda.device.type != "cuda":
        pytest.skip(f"torch has no graphs for {kda.device.type}")
    options = {"disable_recompute": not recompute}
    shape = {"HV": 6, **PLAIN[BF16], **BFLOAT16, **SOFTPLUS}
    name = f"step in a graph {lengths} {recompute}"
    call = Case(name=name, T=121, lengths=lengths, backward=True, options=options, **shape).call()
    kda.check(call)
    tensors = {n: t.to(kda.device) for n, t in call.tensors.items() if n != "cu_seqlens_cpu"}
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

"""``kda_decode_step`` on a GPU: beside three calls, and in a CUDA graph. The kit has the rest."""

from __future__ import annotations

from typing import Any

import installed
import pytest
import torch

import kda_core
from kda_core.nn import gated_rms_norm, kda_decode_step, short_convolution
from kda_core.testing.layer_steps import step

installed.need_backend("nvidia")

pytestmark = pytest.mark.platform("nvidia")

POOLS = ("state", "conv_state")


def on_gpu(call: dict[str, Any]) -> dict[str, Any]:
    return {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in call.items()}


def test_the_bits_of_three_calls():
    call = on_gpu(step("one token"))
    state, conv_state, slots = call["state"].clone(), call["conv_state"].clone(), torch.arange(3, device="cuda")
    found = kda_decode_step(**call, state_indices=slots, backend="nvidia")
    y, conv_state[:3] = short_convolution(
        call["mixed_qkv"][:, None], call["conv_weight"], call["conv_bias"], conv_state[:3], output_final_state=True
    )
    q, k, v = (t.unflatten(-1, (2, -1)) for t in y.split(64, -1))
    o, _ = kda_core.fused_recurrent_kda(
        q, k, v, call["g"][:, None], call["beta"][:, None], call["A_log"], call["dt_bias"], initial_state=state,
        ssm_state_indices=slots, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    o = gated_rms_norm(o, call["norm_gate"][:, None], call["norm_weight"], call["norm_eps"])
    torch.testing.assert_close(found, o[:, 0], rtol=1e-6, atol=1e-6)
    assert torch.equal(call["state"], state)
    assert torch.equal(call["conv_state"], conv_state)


@pytest.mark.parametrize("name", ["slots", "drafts"])
def test_replayed_on_other_slots(name: str):
    """A graph reads the slots that the indices hold by then; a skipped row writes nothing."""
    call = on_gpu(step(name))
    kept = {n: call[n].clone() for n in POOLS}
    kda_decode_step(**call, backend="nvidia")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = kda_decode_step(**call, backend="nvidia")
    indices = call["state_indices"].flip(0)
    indices[1] = -1
    for n in POOLS:
        call[n].copy_(kept[n])
    call["state_indices"].copy_(indices)
    graph.replay()
    eager = call | {n: t.clone() for n, t in kept.items()}
    assert torch.equal(kda_decode_step(**eager, backend="nvidia"), o)
    assert not o[1].any()
    assert all(torch.equal(eager[n], call[n]) for n in POOLS)

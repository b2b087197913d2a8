"""A training step under ``torch.compile``: the operator runs where autograd records nothing.

A backward that relies on autograd finds no graph there and returns zeros without an error.
"""

from __future__ import annotations

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.reference import DIFFERENTIABLE
from kda_core.testing.cases import BF16, FP32, PLAIN, Case
from kda_core.testing.marks import requires


@requires(Feature.CHUNK, Feature.BACKWARD)
@pytest.mark.parametrize("lengths", [(), (50, 0, 1, 19)], ids=["dense", "packed"])
def test_compiled_training_step(kda, lengths: tuple[int, ...]):
    """Compiled in one graph, results and gradients are right."""
    dtype = FP32 if kda.takes(FP32) else BF16
    call = Case(name=f"compiled {lengths}", T=70, lengths=lengths, backward=True, **PLAIN[dtype]).call()
    kda.check(call)
    tensors = {n: t if n == "cu_seqlens_cpu" else t.to(kda.device) for n, t in call.tensors.items()}
    names = [n for n in DIFFERENTIABLE if n in tensors]
    leaves = [tensors[n].requires_grad_() for n in names]

    def forward(arguments: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return call(arguments, kda.name)[:2]

    torch.compiler.reset()  # forget code that other calls compiled
    o, final_state = torch.compile(forward, fullgraph=True, backend="aot_eager")(tensors)
    grads = torch.autograd.grad([o, final_state], leaves, [call.grads[n].to(kda.device) for n in ("o", "final_state")])
    found = {"o": o.detach(), "final_state": final_state.detach()}
    found |= {f"d{n}": grad.reshape(call.request_shape(n)) for n, grad in zip(names, grads, strict=True)}
    kda.compare(call, {n: t.cpu() for n, t in found.items()})

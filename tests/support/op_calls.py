"""Calls with every option in the kernel, for tests of the operators."""

from __future__ import annotations

import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
import torch.utils.checkpoint

import kda_core
from kda_core.testing.cases import SOFTPLUS, Case

HV, K, V = 4, 8, 6
OPS = ("chunk_kda", "fused_recurrent_kda")


def make(T=70, B=2, H=2, dtype=torch.float32, grad=False):
    case = Case(name="made 0", B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=dtype, state=torch.float32, **SOFTPLUS)
    return {name: t.requires_grad_() if grad else t for name, t in case.call().tensors.items()}


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


def of_g(op: str):
    """A public function of g alone."""
    if op == "kda_gate":
        return lambda g: kda_core.kda_gate(g, lower_bound=-5.0)
    return lambda g: run(make(3) | {"g": g}, op)[0]

"""Requests to the CPU backend's hooks, without the router."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import torch
from kda_core_cpu import chunk_backward, chunk_forward, plugin

from kda_core.reference import DIFFERENTIABLE
from kda_core.testing.cases import SOFTPLUS, Case

PACKING = [0, 5, 5, 6, 70, 134, 199]
CHUNK, RECURRENT = "chunk_kda", "fused_recurrent_kda"


def make_request(
    op=CHUNK, B=1, T=None, H=2, HV=0, K=12, V=10, dtype=torch.float32, cu=None, in_kernel=True, state=True, **options
):
    """A request with everything in the kernel, or with pre-computed gates; packed when ``cu`` is given."""
    wide = torch.promote_types(dtype, torch.float32)
    case = Case(
        name="request", op=op, B=B, T=T or (199 if cu is None else cu[-1]), H=H, HV=HV, K=K, V=V, dtype=dtype,
        gate_dtype=dtype, lengths=tuple(b - a for a, b in itertools.pairwise(cu or ())), index_dtype=torch.int64,
        state=wide if state else None, final_state=not options.get("inplace_final_state", False),
        options={"state_v_first": options.get("state_v_first", False)}, **(SOFTPLUS if in_kernel else {}),
    )  # fmt: skip
    call, saves = case.call(), options.pop("save_for_backward", False)
    parameters = {name: call.tensors[name].to(wide) for name in ("A_log", "dt_bias") if in_kernel}
    return replace(call.having(**parameters | options).request(), save_for_backward=saves)


def hooks(op):
    name = "chunk" if op == CHUNK else "recurrent"
    return getattr(plugin, f"kda_core_{name}_forward"), getattr(plugin, f"kda_core_{name}_backward")


def forward(r):
    return hooks(r.op)[0](r)


def cut_chunks(**cut):
    """The forward and the backward of ``chunk_kda`` with work cut otherwise than by default."""
    return partial(chunk_forward.chunk_forward, **cut), partial(chunk_backward.chunk_backward, **cut)


def gradients(r, names=None, grad_o=True, grad_final_state=True, functions=None):
    """(forward result, gradients by name) for fixed output gradients, by ``functions`` or the hooks."""
    generator = torch.Generator().manual_seed(2)
    run, back = functions or hooks(r.op)
    result = run(replace(r, save_for_backward=True))
    do = torch.randn(result.o.shape, generator=generator).to(result.o.dtype)
    dS = torch.randn(r.state_shape, generator=generator).to(r.state_dtype)
    backward = replace(
        r, saved=result.saved, grad_o=do if grad_o else None, grad_final_state=dS if grad_final_state else None,
        needs_grad=frozenset(names or (n for n in DIFFERENTIABLE if getattr(r, n) is not None)),
    )  # fmt: skip
    return result, back(backward).grads, backward


def relative_error(x, expected):
    return ((x.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def assert_equal(x, expected):
    assert x.keys() == expected.keys()
    for name in x:
        assert torch.equal(x[name], expected[name]), name


LAYOUTS = {
    "dense": {"B": 3, "T": 70, "HV": 4},
    "packed": {"cu": PACKING, "HV": 4},
    "one sequence": {"cu": [0, 150], "T": 160},
    "v first": {"B": 2, "T": 33, "state_v_first": True, "chunk_size": 32},
}

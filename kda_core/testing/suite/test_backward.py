"""Gradients of chunk_kda against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.reference import DIFFERENTIABLE
from kda_core.testing.cases import BF16, BFLOAT16, FP16, FP32, PLAIN, SOFTPLUS, Case, select
from kda_core.testing.inputs import Call, same_bits
from kda_core.testing.marks import each, requires

GATED = Case(name="gated gradients", T=20, H=1, HV=6, state=None, final_state=False, backward=True, **SOFTPLUS)

CASES = [
    # Some backends have kernels of their own for many heads of 128 in whole chunks, and for the widest heads.
    Case(name="gradients of 20 heads", T=128, H=20, K=128, state=FP32, backward=True, **BFLOAT16),
    Case(name="gradients K 256", T=67, H=1, HV=2, K=256, lengths=(1, 66), state=FP32, backward=True, **BFLOAT16),
    Case(name="gradients of 64 chunks and a token", T=4097, H=1, state=FP32, backward=True),
    Case(name="gradients without recompute", T=70, final_state=False, backward=True)
    .having(options={"disable_recompute": True}),
    Case(name="strided gradients", T=70, state=FP32, backward=True)
    .having(strided=frozenset({*DIFFERENTIABLE[:5], "initial_state", "grad_o", "grad_final_state"})),
    *(
        GATED.having(name=f"bounded gradients {A_log} {dt_bias}", gate="lower bound", A_log=A_log, dt_bias=dt_bias)
        .having(options={"lower_bound": -3.0})
        for A_log, dt_bias in ((True, False), (False, True), (False, False))
    ),
    # No token, or no sequence.
    *(
        Case(name=f"gradients of {B} x {T} tokens {l2norm}", B=B, T=T, l2norm=l2norm, state=FP32, backward=True)
        for B, T in ((2, 0), (0, 5), (0, 0))
        for l2norm in (False, True)
    ),
    # Below a chunk both states are the caller's: the decay's gradient is that of a whole state, before any rounding.
    Case(name="gradients of a token float16", T=1, K=64, dtype=FP16, state=FP32, backward=True),
    Case(name="gradients of a token bfloat16", T=1, K=128, dtype=BF16, state=FP32, backward=True),
    # Nothing decays, so dg is exactly zero; a sum of cancelling 16-bit parts is not.
    *(
        Case(name=f"gradients of lone tokens {name}", T=3, K=64, lengths=(1, 1, 0, 1), decay="slow", dtype=dtype)
        .having(backward=True)
        for name, dtype in (("bfloat16", BF16), ("float16", FP16))
    ),
    Case(name="gradients of few tokens", T=20, K=64, decay="slow", dtype=FP16, state=BF16, backward=True),
    Case(name="gradients of few tokens V first", T=20, K=64, V=20, decay="slow", dtype=FP16, state=FP32, backward=True)
    .having(options={"state_v_first": True}),
    Case(name="gradients of short sequences", T=78, K=64, lengths=(0, 1, 33, 0, 12, 32), dtype=FP16, state=FP32)
    .having(backward=True),
    Case(name="gradients of short sequences bfloat16", T=80, lengths=(1, 33, 0, 12, 32), backward=True, **PLAIN[BF16]),
]  # fmt: skip


@each([*select("backward"), *CASES])
def test_backward(kda, case: Case):
    """Outputs and every gradient are within their budgets."""
    kda.check(case)


@requires(Feature.CHUNK, Feature.BACKWARD)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("decay", ["slow", -8.0])
def test_backward_of_small_rows(kda, dtype: torch.dtype, decay: str | float):
    """Queries and values a hundred times smaller: dg's summands are subnormal in float16."""
    case = Case(name=f"small rows {decay}", T=70, decay=decay, backward=True, **PLAIN[dtype])
    case = case.having(state=None, final_state=False)

    def build(case: Case) -> Call:
        call = case.call()
        return replace(call, tensors=call.tensors | {n: 0.01 * call.tensors[n] for n in ("q", "v")})

    kda.check(case, build)


@requires(Feature.CHUNK, Feature.BACKWARD, Feature.STATE_GRADIENT)
@pytest.mark.parametrize("output", ["o", "final_state"])
def test_backward_from_one_output(kda, output: str):
    """The gradient of one output alone."""
    call = Case(name="gradient of one output", T=70, state=None, backward=True).call()
    kda.check(replace(call, grads={output: call.grads[output]}))


@requires(Feature.CHUNK, Feature.BACKWARD)
@pytest.mark.parametrize(
    "name", [*DIFFERENTIABLE[:7], pytest.param("initial_state", marks=requires(Feature.STATE_GRADIENT))]
)
def test_backward_of_one_input(kda, name: str):
    """The gradient of one input alone equals its gradient among all."""
    call = GATED.having(state=FP32 if name == "initial_state" else None).call()
    kda.compare(call, kda.run(call, wrt=(name,)))


@requires(Feature.CHUNK, Feature.BACKWARD, Feature.STRIDED_INPUT)
def test_backward_of_offloaded_tensors(kda):
    """Hooks of saved tensors may bring slices back contiguous (activation offloading), in some layers only."""
    case = Case(name="offloaded", T=70, strided=frozenset("qkv"), backward=True, **PLAIN[FP16])
    call = kda.near(case).call()
    expected = kda.check(call)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
            offloaded = kda.check(call)
        again = kda.run(call)
        for name in (f"d{n}" for n in DIFFERENTIABLE[:5]):
            assert same_bits(again[name], expected[name]), f"{name} changed after a step with offloaded tensors"
            # Other strides may take other kernels.
            kda.expect(call, name, offloaded[name], expected[name].double(), "offloaded")


@requires(Feature.CHUNK, Feature.BACKWARD)
@pytest.mark.parametrize("size", [500.0, 2000.0, 3900.0])
def test_backward_of_large_queries_float16(kda, size: float):
    """Elements of q far from 1, without a norm, where a chunk decays by a few powers of two."""
    call = Case(name="large queries", T=40, decay=-0.25, backward=True, **PLAIN[FP16]).call()
    q = call.tensors["q"].float()
    q = (q * (size / q.abs().amax(-1, keepdim=True))).to(FP16)
    grads = {n: (1e-3 * t.float()).to(t.dtype) for n, t in call.grads.items()}
    kda.check(replace(call.having(q=q), grads=grads))

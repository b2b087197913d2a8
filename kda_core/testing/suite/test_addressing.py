"""Strides, poisoned surroundings, large offsets, large grids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kda_core
from kda_core.capabilities import Feature
from kda_core.testing.cases import BF16, FP16, FP32, SOFTPLUS, Case
from kda_core.testing.inputs import indices
from kda_core.testing.marks import each, requires, slow

INPUTS = ("q", "k", "v", "g", "beta")
GRADIENTS = requires(Feature.BACKWARD)
R = "fused_recurrent_kda"

CASES = [
    *(Case(name=f"strided {names}", B=2, T=70, strided=frozenset(names.split())) for names in ("q", "k v", "g beta")),
    Case(name="strided inputs", B=2, T=70, strided=frozenset(INPUTS)),
    Case(name="strided arguments", T=70, HV=6, lengths=(30, 40), state=FP32, **SOFTPLUS)
    .having(strided=frozenset({"initial_state", "A_log", "dt_bias", "cu_seqlens"})),
    Case(name="strided out", B=2, T=70, given_out=True, strided=frozenset({"out"})),
    *(Case(name=f"inside {K} {V}", B=2, T=70, K=K, V=V, state=FP32) for K, V in ((60, 36), (17, 33), (100, 50))),
]  # fmt: skip
MANY = [
    # B H = 65,568 is past a narrow grid axis.
    Case(name="many programs", B=683, T=2),
    Case(name="many steps", op=R, B=683, T=1),
    Case(name="gradients of many programs", B=683, T=2, backward=True),
    Case(name="gradients of many sequences", T=1366, lengths=(2,) * 683, backward=True),
    Case(name="gradients of many steps", op=R, B=683, T=1, backward=True),
]


@each([*CASES, *(case.having(H=96, K=16, tags=frozenset({"slow"})) for case in MANY)])
def test_addresses(kda, case: Case):
    """FAILURES 9, 10, 16, 24, 26: slices of wider tensors, dimensions that are no power of two, with NaN round them."""
    kda.check(case)


@requires(Feature.CHUNK, Feature.STRIDED_INPUT)
def test_transposed_inputs(kda):
    """Heads or channels before tokens in memory, a state of the other layout, an input expanded over the batch."""
    call = Case(name="transposed", B=2, T=70, state=FP32).call()
    tensors = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in call.tensors.items()}
    tensors["q"] = call.tensors["q"].transpose(1, 3).contiguous().transpose(1, 3)
    tensors["initial_state"] = call.tensors["initial_state"].mT.contiguous().mT
    tensors["k"] = call.tensors["k"][:1].expand(2, -1, -1, -1)
    on_device = {n: t.to(kda.device) for n, t in tensors.items()}
    on_device["k"] = tensors["k"][:1].contiguous().to(kda.device).expand(2, -1, -1, -1)
    same = replace(call, tensors={n: t.contiguous() for n, t in tensors.items()})
    # The plain call first: a refusal ends the test there.
    kda.check(replace(same, strided=frozenset(INPUTS)))
    with torch.no_grad():
        o, state = call(on_device, kda.name)
    kda.compare(same, {"o": o.cpu(), "final_state": state.cpu()})


@slow
@requires(Feature.RECURRENT, Feature.PAGED_STATE)
def test_pool_offsets_past_31_bits(kda):
    """FAILURES 15: a pool whose last slot begins more than 2**31 elements behind its first."""
    call = Case(name="far slot", op=R, B=2, T=1, H=1, K=16, state=FP32).call()
    call = call.in_pool(indices(32, 0), 33)
    kda.check(call)
    tensors = kda.on_device(call)
    pool = tensors["initial_state"] = _spread(tensors["initial_state"].transpose(0, 1), 2**31 // 31).transpose(0, 1)
    with torch.no_grad():
        o, _ = call(tensors, kda.name)
    kda.compare(call, {"o": o.cpu(), "final_state": pool[[32, 0]].cpu()})


@slow
@requires(Feature.CHUNK, Feature.STRIDED_INPUT)
@pytest.mark.parametrize(
    ("name", "backward"),
    [*((n, False) for n in INPUTS), *(pytest.param(n, True, marks=GRADIENTS) for n in (*INPUTS, "grad_o"))],
)
@pytest.mark.parametrize("axis", [1, 2], ids=["tokens", "heads"])
def test_offsets_past_31_bits(kda, axis: int, name: str, backward: bool):
    """FAILURES 15: tokens that lie far apart, and heads that lie ahead of them."""
    fields = {"dtype": FP16, "gate_dtype": FP16} if axis == 2 and kda.takes(FP16) else {}
    case = Case(name=f"far apart {axis}", T=40, H=1 + axis, K=16, final_state=False, backward=backward, **fields)
    call = case.call()
    kda.check(replace(call, strided=frozenset({*INPUTS, "grad_o"})))
    tensors = kda.on_device(call) | {f"grad_{n}": t.to(kda.device) for n, t in call.grads.items()}
    # The last of the tokens, or of the heads, begins more than 2**31 elements behind the first.
    stride = 2**31 // 32 if axis == 1 else 2**30 + 16
    tensors[name] = _spread(tensors[name].transpose(1, axis), stride).transpose(1, axis)
    grad = tensors.pop("grad_o", None)
    leaves = [tensors[n].requires_grad_(backward) for n in INPUTS]
    o, _ = call(tensors, kda.name)
    found = {"o": o.detach()}
    if backward:
        found |= zip([f"d{n}" for n in INPUTS], torch.autograd.grad(o, leaves, grad), strict=True)
    kda.compare(call, {n: t.cpu() for n, t in found.items()})


@slow
@requires(Feature.CHUNK, Feature.BACKWARD, Feature.QK_L2NORM)
def test_more_than_31_bits_of_elements(kda):
    """FAILURES 15: inputs, results and intermediate tensors of more than 2**31 elements, compared head by head."""
    if kda.device.type == "cpu":
        pytest.skip("too much work for a CPU")
    kda.check(Case(name="many elements", T=70, K=64, dtype=BF16, l2norm=True, backward=True, final_state=False).call())
    B, T, H, K = 1, 65536, 544, 64
    assert B * T * H * K > 2**31

    def run(q, k, v, g, beta, grad) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
        o, _ = kda_core.chunk_kda(*leaves, use_qk_l2norm_in_kernel=True, backend=kda.name)
        return o.detach(), *torch.autograd.grad(o, leaves, grad)

    try:
        q, k, v, grad = (torch.randn(B, T, H, K, dtype=BF16, device=kda.device) for _ in range(4))
        g = torch.randn(B, T, H, K, dtype=BF16, device=kda.device).sigmoid_().neg_()
        beta = torch.rand(B, T, H, dtype=BF16, device=kda.device)
        whole = run(q, k, v, g, beta, grad)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory for that many elements: {error}")
    for h in (0, H // 2, H - 1):
        alone = run(*(t[:, :, h : h + 1].contiguous() for t in (q, k, v, g, beta, grad)))
        for n, all_heads, one in zip(("o", *INPUTS), whole, alone, strict=True):
            difference = (all_heads[:, :, h : h + 1].float() - one.float()).norm() / one.float().norm()
            assert difference < 2**-7, f"head {h} of {n if n == 'o' else 'd' + n}: relative difference {difference:.1e}"


def _spread(t: torch.Tensor, stride: int) -> torch.Tensor:
    """A copy of t [B, T, ...] whose neighbouring tokens lie ``stride`` elements apart."""
    B, T = t.shape[:2]
    rest = t[0, 0].numel()
    try:
        buffer = torch.empty((T - 1) * stride + B * rest, dtype=t.dtype, device=t.device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        pytest.skip(f"not enough memory for a tensor that is spread out: {error}")
    strides = torch.empty(t.shape[2:]).stride()
    view = buffer.as_strided(t.shape, (rest, stride, *strides))
    return view.copy_(t)

"""Results are the same bits at every call, and compiled code does not depend on lengths."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing.cases import BF16, FP32, SOFTPLUS, Case
from kda_core.testing.inputs import Call, same_bits
from kda_core.testing.marks import each, requires
from kda_core.testing.subject import Subject

REPEATED = [
    Case(name="repeated", B=2, T=130, H=3),
    Case(name="repeated step", op="fused_recurrent_kda", B=4, T=1, state=FP32),
    # Reductions over tokens and over groups of heads are among the results.
    Case(name="repeated gradients", B=2, T=70, HV=6, final_state=False, backward=True, **SOFTPLUS),
]
AT_LENGTH = [
    Case(name=f"repeated at length {dtype} {C}", T=4096, H=2, K=64, dtype=dtype, options={"chunk_size": C})
    for dtype in (FP32, BF16)
    for C in (64, 32)
] + [
    # Gradients of many chunks, at the head dimensions of models.
    Case(name=f"repeated gradients at length {dtype} {K}", T=700, H=2, K=K, dtype=dtype, gate_dtype=dtype)
    .having(state=FP32, backward=True, **SOFTPLUS)
    for dtype in (FP32, BF16)
    for K in (128, 256)
]  # fmt: skip


@each([*REPEATED, *(case.having(tags=frozenset({"slow"})) for case in AT_LENGTH)])
def test_repeats(kda, case: Case):
    """FAILURES 2, 19: 50 calls of long sequences, 30 of others: every tensor is the same bits."""
    call = kda.near(case).call()
    first = kda.check(call)
    for _ in range(kda.repeats(50 if case.T == 4096 else 30)):
        again = kda.run(call)
        for name, t in first.items():
            assert same_bits(t, again[name]), f"{name} differs from one run to the next"
        del kda.records[1:]


@requires(Feature.CHUNK, Feature.BACKWARD)
def test_backward_twice_of_one_forward(kda):
    """Two backwards of one graph have the same bits: the first must not change the saved tensors."""
    call = Case(name="one graph", T=70, final_state=False, backward=True).call()
    kda.run(call)
    leaves = {n: t.requires_grad_() for n, t in kda.on_device(call).items()}
    o, _ = call(leaves, kda.name)
    grad = call.grads["o"].to(kda.device)
    first, second = (torch.autograd.grad(o, list(leaves.values()), grad, retain_graph=True) for _ in range(2))
    assert all(map(same_bits, first, second))


@requires(Feature.CHUNK, Feature.BACKWARD)
@pytest.mark.parametrize("saving", [False, pytest.param(True, marks=requires(Feature.DISABLE_RECOMPUTE))])
def test_two_forwards_before_their_backwards(kda, saving: bool):
    """Layers of one shape: the second leaves what the first saved for its backward, and its gradients, as they are."""
    options = {"disable_recompute": True} if saving else {}
    call = Case(name="two layers", T=70, final_state=False, backward=True, options=options).call()
    kda.run(call)
    grad = call.grads["o"].to(kda.device)
    first = kda.on_device(call)
    layers = [{n: t.requires_grad_() for n, t in x.items()} for x in (first, {n: t.flip(1) for n, t in first.items()})]

    def gradients(o: torch.Tensor, leaves: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(o, list(leaves.values()), grad)

    alone = [[t.clone() for t in gradients(call(leaves, kda.name)[0], leaves)] for leaves in layers]
    outputs = [call(leaves, kda.name)[0] for leaves in layers]
    found = [gradients(o, leaves) for o, leaves in zip(outputs, layers, strict=True)]
    for here, expected in zip(found, alone, strict=True):
        for name, a, b in zip(first, here, expected, strict=True):
            assert same_bits(a, b), f"d{name} differs where another layer's forward lies between"


@requires(Feature.CHUNK)
def test_compiled_code_does_not_depend_on_length(kda):
    """FAILURES 20: 100 random lengths: nothing is compiled after the first few."""
    whole = Case(name="lengths", T=400, final_state=False).call()
    generator = torch.Generator().manual_seed(0)
    # Lengths that a compiler may treat as special: 1, multiples of 16, and neither; below and past a chunk.
    first = [whole.slice_tokens(0, T) for T in (1, 7, 16, 48, 63, 64, 65, 128, 300, 384)]
    lengths = torch.randint(1, 400, (100,), generator=generator).tolist()
    _expect_compiled_once(kda, first, (whole.slice_tokens(0, T) for T in lengths))


@requires(Feature.CHUNK, Feature.BACKWARD, Feature.VARLEN)
def test_compiled_code_does_not_depend_on_packing(kda):
    """FAILURES 35: 100 random packings, forward and backward: nothing is compiled after the first few."""
    case = Case(name="packings", final_state=False, backward=True)
    generator = torch.Generator().manual_seed(0)
    first = ((400,), (1, 399), (64, 128, 16), (3, 0, 64, 65, 100), tuple(range(20)))
    counts = torch.randint(1, 12, (100,), generator=generator).tolist()
    others = (tuple(torch.randint(0, 100, (N,), generator=generator).tolist()) for N in counts)
    calls = [(case.having(T=sum(x), lengths=x).call() for x in packings) for packings in (first, others)]
    _expect_compiled_once(kda, *calls)


def _expect_compiled_once(kda: Subject, first: Iterable[Call], others: Iterable[Call]) -> None:
    """Nothing is compiled for the other calls, once the first ones were made."""
    if kda.target.interpreted:
        pytest.skip("the interpreter compiles nothing")
    for call in first:
        kda.run(call)
    with _compilations() as compiled:
        for call in others:
            kda.run(call)
            del kda.records[1:]
    assert not compiled, f"compiled again: {compiled}"


@contextmanager
def _compilations() -> Iterator[list[str]]:
    """The names of what Triton compiles within the block; a backend that did not import it compiles nothing."""
    names: list[str] = []
    if "triton" not in sys.modules:
        yield names
        return
    knobs = pytest.importorskip("triton.knobs", reason="compilations are counted through triton.knobs, of Triton 3.4")
    before = knobs.runtime.jit_post_compile_hook

    def note(*args, **kwargs) -> None:
        names.append(str(kwargs.get("repr", kwargs.get("fn"))))
        if before is not None:
            before(*args, **kwargs)

    with patch.object(knobs.runtime, "jit_post_compile_hook", note):
        yield names

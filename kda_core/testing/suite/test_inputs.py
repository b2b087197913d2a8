"""Inputs are never modified, with every option at work. (Every other test checks it for its own calls, too.)"""

from __future__ import annotations

import torch

import kda_core
from kda_core.capabilities import Feature
from kda_core.testing.cases import Case
from kda_core.testing.inputs import same_bits
from kda_core.testing.marks import requires

ALL = Case(
    name="unchanged",
    T=100,
    HV=4,
    gate="softplus",
    l2norm=True,
    beta="negative eigenvalues",
    state=torch.float32,
    lengths=(40, 60),
)


@requires(Feature.CHUNK)
def test_inputs_unchanged(kda):
    """FAILURES 21: the forward leaves all inputs as they were, bit for bit."""
    kda.run(ALL.call())
    kda.run(Case(name="unchanged, plain", T=64).call())


@requires(Feature.CHUNK, Feature.BACKWARD)
def test_inputs_unchanged_by_the_backward(kda):
    """FAILURES 21: so does the backward, and it leaves the outputs' gradients as they were."""
    kda.run(ALL.having(backward=True).call())


@requires(Feature.RECURRENT)
def test_inputs_unchanged_by_a_step(kda):
    """FAILURES 21: so does a decoding step that is not asked to work in place."""
    kda.run(ALL.call().slice_tokens(0, 100).decoding())


@requires(Feature.CHUNK, Feature.INITIAL_STATE, Feature.FINAL_STATE)
def test_results_alias_nothing(kda):
    """Results are tensors of their own: writing to them changes no input and no other result."""
    call = Case(name="aliases", T=1, state=torch.float32).call()
    kda.run(call)
    tensors = {n: t.to(kda.device) for n, t in call.tensors.items()}
    with torch.no_grad():
        o, state = kda_core.chunk_kda(**tensors, **call.options, backend=kda.name)
    before = {n: t.clone() for n, t in tensors.items()} | {"o": o.clone()}
    state.fill_(float("nan"))
    assert same_bits(o, before["o"])
    o.fill_(float("nan"))
    assert all(same_bits(t, before[n]) for n, t in tensors.items())

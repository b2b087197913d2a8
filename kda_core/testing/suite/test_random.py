"""Random calls: shapes, packing, strides and options drawn together, against the oracle.

Every name has parts, which can run in parallel. A part draws a few kinds of calls, and several calls of each kind. A
kind fixes all that a backend may compile for (dtypes, head dimensions, heads, arguments, options), because compiling
takes most of the time on a device; lengths and values differ from call to call.

Draws are the same for every backend and every version of every package: Python's own generator makes them, seeded by
the names of the draw, part, kind and call. Failing calls are not shrunk: they are small, and a device would have to
compile every smaller one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing.cases import BF16, FP16, FP32, Case
from kda_core.testing.inputs import Call
from kda_core.testing.marks import requires, slow
from kda_core.testing.nearby import Build
from kda_core.testing.subject import refusal_of

DIMENSIONS = (1, 3, 8, 16, 20, 33, 64, 128)
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65)
"""Lengths at the edges of tiles and chunks; half of all sequences have one of them."""


CHUNK, RECURRENT, POOLED = {"op": "chunk_kda"}, {"op": "fused_recurrent_kda"}, {"pooled": True}

RANDOM: dict[str, tuple[tuple[Feature, ...], tuple[int, int], dict[str, Any]]] = {
    # name: what it is about, how many kinds of calls a part draws and how many calls of each, fields of ``drawn``
    "forward": ((Feature.CHUNK,), (1, 6), CHUNK | {"max_tokens": 100}),
    "backward": ((Feature.CHUNK, Feature.BACKWARD), (1, 4), CHUNK | {"max_tokens": 70, "backward": True}),
    "recurrent": ((Feature.RECURRENT,), (1, 6), RECURRENT | {"max_tokens": 12}),
    # In place, with intermediate states or without.
    "pool": ((Feature.CHUNK, Feature.PAGED_STATE), (1, 6), CHUNK | {"max_tokens": 100} | POOLED),
    # Drafts are among them.
    "recurrent pool": ((Feature.RECURRENT, Feature.PAGED_STATE), (1, 6), RECURRENT | {"max_tokens": 12} | POOLED),
    "forward, thorough": ((Feature.CHUNK,), (2, 6), CHUNK | {"max_tokens": 300}),
    "backward, thorough": ((Feature.CHUNK, Feature.BACKWARD), (2, 5), CHUNK | {"max_tokens": 150, "backward": True}),
}


def _parts() -> Iterator[Any]:
    """The name and number of every part; thorough ones are slow tests."""
    for name, (features, _, _) in RANDOM.items():
        is_slow = name.endswith("thorough")
        marks = [requires(*features), *([slow] if is_slow else [])]
        yield from (pytest.param(name, part, marks=marks) for part in range(30 if is_slow else 5))


def _often(rng: random.Random, share: float) -> bool:
    return rng.random() < share


def kind(rng: random.Random, op: str, backward: bool = False, pooled: bool = False) -> Case:
    """A kind of calls of ``op``: everything that a backend may compile for."""
    K, H = rng.choice(DIMENSIONS), rng.randint(1, 3)
    dtype = rng.choice([FP32, FP32, BF16, FP16])
    gate = rng.choice(["given", "softplus", "lower bound"])
    options = {"state_v_first": _often(rng, 0.5)}
    bounded = gate == "lower bound"
    decay = "mild"
    if op == "chunk_kda":
        options |= {"chunk_size": rng.choice([64, 32]), "disable_recompute": _often(rng, 0.5)}
        if gate == "given" and _often(rng, 0.3):
            bounded, decay = True, "bounded"
        if bounded:
            options["safe_gate"] = _often(rng, 0.7)
        if pooled:
            options["return_intermediate_states"] = _often(rng, 0.5)
    return Case(
        name="", op=op, H=H, HV=H * rng.randint(1, 3), K=K, V=K if _often(rng, 0.4) else rng.choice(DIMENSIONS),
        dtype=dtype, gate_dtype=rng.choice([FP32, dtype]),
        lengths=(1,) if _often(rng, 0.5) else (), index_dtype=rng.choice([torch.int32, torch.int64]),
        # float16 underflows between a backward's kernels at faster decays (here and in ``_of_kind``).
        gate=gate, rate=2.0 if backward and dtype == FP16 else 16.0, decay=decay,
        A_log=gate != "lower bound" or _often(rng, 0.7), dt_bias=_often(rng, 0.5),  # softplus needs A_log
        beta=rng.choice(["given", "sigmoid", "negative eigenvalues"]), l2norm=_often(rng, 0.5),
        state=rng.choice([FP32, BF16] if pooled else [None, FP32, BF16]), final_state=_often(rng, 0.5),
        strided=frozenset(n for n in ("q", "k", "v", "g", "beta", "initial_state") if _often(rng, 0.25)),
        backward=backward, options=options,
    )  # fmt: skip


def _length(rng: random.Random, most: int) -> int:
    edges = [n for n in LENGTHS if n <= most]
    return rng.choice(edges) if _often(rng, 0.5) else rng.randint(1, most)


def _of_kind(rng: random.Random, of: Case, name: str, max_tokens: int) -> Case:
    """A case of that kind: lengths and distributions of its values."""
    lengths: tuple[int, ...] = ()
    if of.lengths:
        lengths = tuple(0 if _often(rng, 0.2) else _length(rng, max_tokens // 2) for _ in range(rng.randint(1, 5)))
    decays = ["mild", "slow", "none", "bounded", "isolated", -0.5, -8.0, -8.0 if of.dtype == FP16 else -30.0]
    return of.having(
        name=name,
        B=1 if lengths else rng.randint(1, 3),
        # Rows behind the last sequence, too.
        T=max(sum(lengths) + rng.randint(0, 3), 1) if lengths else _length(rng, max_tokens),
        lengths=lengths,
        decay=rng.choice([-0.5, "bounded"] if of.decay == "bounded" else decays),
        beta=rng.choice(["given", "given", 1.0, 0.01]) if of.beta == "given" else of.beta,
        keys=rng.choice(["random", "random", "equal", "nearly parallel"]),
        options=rng.choice([{}, {"scale": 1.0}, {"scale": 0.3}]),
    )


def _with_other_values(rng: random.Random, call: Call, case: Case) -> Call:
    """The call with values that no case has."""
    tensors = dict(call.tensors)
    if _often(rng, 0.2):
        tensors["q"] = tensors["k"].clone()
    if _often(rng, 0.2):
        # Rows of zeros, whose norm is zero.
        for name in ("q", "k"):
            rows = tensors[name].clone()  # equal keys share memory
            rows[:, rng.randint(0, 2) :: 3] = 0
            tensors[name] = rows
    if _often(rng, 0.3):
        # Channels that forget at rates of their own, down to a ten-thousandth.
        channel = torch.linspace(0, 1, case.K)
        raw = case.gate != "given"
        tensors["g"] = (tensors["g"] - 6 * channel if raw else tensors["g"] * 10 ** (-4 * channel)).to(case.gate_dtype)
    if case.beta in ("sigmoid", "negative eigenvalues"):
        # Large logits, where 1 - sigmoid has no digits.
        tensors["beta"] = (tensors["beta"] + rng.choice([0.0, 0.0, -4.0, 4.0, 8.0])).to(case.gate_dtype)
    # Gradients are products of several of these and would overflow float16.
    factors = [2.0, 0.1] if FP16 in (case.dtype, case.gate_dtype) else [1000.0, 0.001]
    grads = dict(call.grads)
    for values in (tensors, grads):
        for name in ("v", "initial_state", "o", "final_state"):
            if name in values and _often(rng, 0.25):
                values[name] = values[name] * rng.choice(factors)
    return replace(call, tensors=tensors, grads=grads)


def _pooled(rng: random.Random, call: Call, case: Case) -> Call:
    """The call on slots of a pool, some of its sequences skipped; drafts of several tokens among such calls."""
    lengths = call.lengths()
    # A slot for every token, where the sequences are equally long.
    drafts = case.op == "fused_recurrent_kda" and len(set(lengths)) == 1 and lengths[0] > 1 and _often(rng, 0.5)
    width = lengths[0] if drafts else 1
    pool = len(lengths) * width + 2
    slots = rng.sample(range(pool), len(lengths) * width)
    table = torch.tensor(slots, dtype=case.index_dtype).view(len(lengths), width)
    pad = rng.choice([-1, pool + 3])
    for n in range(len(lengths)):
        if _often(rng, 0.25):
            table[n] = rng.choice([-1, -7, pad])
    accepted = torch.tensor([rng.randint(1, width) for _ in lengths]) if drafts else None
    call = call.having(pad_slot_id=pad)
    call = call.in_pool(table if drafts or _often(rng, 0.5) else table[:, 0], pool, accepted)
    return replace(call, given_out=_often(rng, 0.5))


def drawn(
    name: str, part: int, of: int, number: int, *, max_tokens: int, pooled: bool = False, **kinds: Any
) -> tuple[Case, Build]:
    """Call ``number`` of kind ``of`` in part ``part`` of ``name``: its case, and what makes its call."""
    case = kind(random.Random(f"{name} {part} {of}"), pooled=pooled, **kinds)
    rng = random.Random(f"{name} {part} {of} {number}")
    case = _of_kind(rng, case, f"random {name} {part}.{of}.{number}", max_tokens)
    state = rng.getstate()

    def build(case: Case) -> Call:
        rng.setstate(state)
        call = _with_other_values(rng, case.call(), case)
        return _pooled(rng, call, case) if pooled else call

    return case, build


@pytest.mark.parametrize(("name", "part"), [*_parts()])
def test_random(kda, name: str, part: int):
    """The calls that a part draws: the first of every kind, then the second of every kind, ...

    A backend refuses calls that it does not declare; ``run`` compares the reasons. It may reject combinations of
    declared features, unless it declares every feature.
    """
    _, (kinds, calls), fields = RANDOM[name]
    numbers = [(of, number) for number in range(calls) for of in range(kinds)]
    for of, number in numbers[: kda.draws(len(numbers))]:
        case, build = drawn(name, part, of, number, **fields)
        refusal = refusal_of(partial(kda.check, case, build))
        assert refusal is None or refusal.status != "rejected" or not kda.is_complete, f"{case.name}: {refusal}"

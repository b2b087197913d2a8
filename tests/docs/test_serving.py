"""docs/serving.md is true: its code serves random traffic over one pool as if every sequence had run alone."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_core
from kda_core.testing.layer_steps import expected, step
from kda_core.testing.references import single_threaded

GUIDE = Path(__file__).parents[2] / "docs" / "serving.md"
H, HV, K, V = 1, 2, 8, 4
SLOTS, GRAPH_SIZE = 9, 4
BANK = 4096
"""Tokens that sequences take their inputs from."""

PER_TOKEN = ("q", "k", "v", "g", "beta")


@pytest.fixture(autouse=True)
def _on_the_cpu_backend() -> Iterator[None]:
    """An interpreter of GPU kernels, if one runs in this process, would serve CPU tensors first."""
    with kda_core.use_backend("cpu"):
        yield


@pytest.fixture(scope="module")
def guide() -> SimpleNamespace:
    """The names that the guide's code defines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), flags=re.M | re.S)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, GUIDE.name, "exec"), namespace)
    return SimpleNamespace(**namespace)


@dataclass
class Sequence:
    """A request: its tokens are a stretch of the bank.

    Attributes:
        first: where the stretch begins. prompt: tokens to be prefilled. total: tokens in all.
        done: tokens computed so far. slot: of the pool. outputs: what came out, piece by piece.
    """

    first: int
    prompt: int
    total: int
    slot: int
    done: int = 0
    outputs: list[Tensor] = field(default_factory=list)

    def rows(self, count: int) -> list[int]:
        """Positions in the bank of the next tokens."""
        return list(range(self.first + self.done, self.first + self.done + count))

    def take(self, o: Tensor) -> None:
        """Record the outputs [tokens, HV, V] of the next tokens."""
        self.outputs.append(o)
        self.done += len(o)


class Traffic:
    """A server under random load.

    Args:
        guide: the guide's code.
        seed: of the load.
    """

    def __init__(self, guide: SimpleNamespace, seed: int) -> None:
        self.guide, self.random = guide, random.Random(seed)
        torch.manual_seed(seed)
        self.bank = {"q": torch.randn(BANK, H, K), "k": torch.randn(BANK, H, K), "v": torch.randn(BANK, HV, V)}
        self.bank |= {"g": torch.randn(BANK, HV, K), "beta": torch.randn(BANK, HV)}
        self.gate = {"A_log": torch.rand(HV), "dt_bias": torch.randn(HV, K)}
        self.pool = guide.StatePool(SLOTS, HV, K, V)
        self.pool.states.fill_(float("nan"))
        self.running: list[Sequence] = []
        self.finished: list[Sequence] = []

    def inputs(self, rows: list[int], padding: int = 0) -> dict[str, Tensor]:
        """Bank rows, then rows of NaN: [rows + padding, ...]."""
        index = torch.tensor(rows, dtype=torch.long)
        x = {n: t[index] for n, t in self.bank.items()}
        if padding:
            x = {n: torch.cat([t, torch.full((padding, *t.shape[1:]), float("nan"))]) for n, t in x.items()}
        return x

    def step(self) -> None:
        """Admit who came, compute the next tokens of everyone, let go who is done."""
        while self.pool.free and self.random.random() < 0.2:
            prompt = self.random.choice((1, 2, self.random.randint(3, 40)))
            total = prompt + self.random.randint(0, 30)
            first = self.random.randrange(BANK - total)
            self.running.append(Sequence(first, prompt, total, self.pool.take()))
        waiting = [s for s in self.running if s.done < s.prompt]
        decoding = [s for s in self.running if s.done >= s.prompt]
        # One packed call for the whole batch, or prefill and decoding by themselves.
        if waiting and self.random.random() < 0.5:
            self.prefill(waiting + decoding)
        else:
            if waiting:
                self.prefill(waiting)
            if decoding:
                self.decode(decoding)
        for s in [s for s in self.running if s.done == s.total]:
            self.running.remove(s)
            self.pool.give_back(s.slot)
            self.finished.append(s)

    def prefill(self, batch: list[Sequence]) -> None:
        """Whole prompts or pieces of them, in a buffer that may be longer than its tokens."""
        lengths = [self.random.randint(1, max(1, s.prompt - s.done)) for s in batch]
        rows = [row for s, n in zip(batch, lengths, strict=True) for row in s.rows(n)]
        x = self.inputs(rows, padding=self.random.choice((0, 5)))
        x = {n: t[None] for n, t in x.items()}
        o = self.guide.prefill(self.pool, x | self.gate, lengths, [s.slot for s in batch])[0]
        assert not o[len(rows) :].any()
        for s, piece in zip(batch, o[: len(rows)].split(lengths), strict=True):
            s.take(piece)

    def decode(self, batch: list[Sequence]) -> None:
        """One token each, in a batch padded to a multiple of a graph's size."""
        padding = -len(batch) % GRAPH_SIZE
        x = self.inputs([s.rows(1)[0] for s in batch], padding)
        x = {n: t[:, None] for n, t in x.items()}
        slots = torch.tensor([s.slot for s in batch] + [self.guide.PADDING] * padding, dtype=torch.int32)
        o = self.guide.decode(self.pool, x | self.gate, slots)
        assert not o[len(batch) :].any()
        for s, row in zip(batch, o, strict=False):
            s.take(row)

    def alone(self, s: Sequence) -> Tensor:
        """The outputs of a sequence that nobody shares a call with, token by token from a zero state."""
        x = {n: t[None, s.first : s.first + s.total] for n, t in self.bank.items()}
        o, _ = kda_core.fused_recurrent_kda(**x, **self.gate, **self.guide.OPTIONS)
        return o[0]


def serve(guide: SimpleNamespace, steps: int) -> Traffic:
    traffic = Traffic(guide, seed=steps)
    with torch.inference_mode(), single_threaded():
        for _ in range(steps):
            traffic.step()
        for s in traffic.finished:
            torch.testing.assert_close(torch.cat(s.outputs), traffic.alone(s), rtol=1e-4, atol=1e-5)
    return traffic


def test_continuous_batching_equals_each_sequence_alone(guide: SimpleNamespace) -> None:
    traffic = serve(guide, 1000)
    assert len(traffic.finished) > 10 * SLOTS  # every slot was used again and again


@pytest.mark.slow
def test_continuous_batching_for_ten_thousand_steps(guide: SimpleNamespace) -> None:
    serve(guide, 10_000)


def test_verified_drafts_equal_the_accepted_tokens_alone(guide: SimpleNamespace) -> None:
    """Drafts of 1 + S tokens of which some are rejected: outputs of the kept ones are those of a plain run."""
    torch.manual_seed(0)
    choose, N, S, rounds = random.Random(0), 3, 3, 20
    traffic = Traffic(guide, seed=0)
    pool = guide.StatePool(N * (1 + S), HV, K, V)
    slots = torch.randperm(len(pool.states)).to(torch.int32).view(N, 1 + S)
    position, kept, accepted = [0] * N, [[] for _ in range(N)], None
    starts = [choose.randrange(BANK - rounds * (1 + S)) for _ in range(N)]
    for _ in range(rounds):
        rows, lengths = [], []
        for n in range(N):
            good = choose.randint(1, 1 + S)
            begin = starts[n] + position[n]
            # The drafted tokens behind the good ones are others than those that follow.
            rows += [*range(begin, begin + good), *(choose.randrange(BANK) for _ in range(1 + S - good))]
            lengths.append(good)
        x = {n: t.unflatten(0, (N, 1 + S)) for n, t in traffic.inputs(rows).items()}
        o = guide.verify(pool, x | traffic.gate, slots, accepted)
        for n, good in enumerate(lengths):
            kept[n].append(o[n, :good])
            position[n] += good
        accepted = torch.tensor(lengths, dtype=torch.int32)
    for n in range(N):
        expected = traffic.alone(Sequence(starts[n], 0, position[n], 0))
        torch.testing.assert_close(torch.cat(kept[n]), expected, rtol=1e-4, atol=1e-5)


def test_drafts_without_states_leave_the_state_of_the_accepted_tokens(guide: SimpleNamespace) -> None:
    torch.manual_seed(0)
    N, T = 3, 4
    traffic = Traffic(guide, seed=0)
    pool, tables = guide.StatePool(N, HV, K, V), guide.StatePool(N * T + N, HV, K, V)
    rows = [n * 10 + t for n in range(N) for t in range(T)]
    x = {n: t.unflatten(0, (N, T)) for n, t in traffic.inputs(rows).items()} | traffic.gate
    pool.states.normal_()
    tables.states[:N] = pool.states
    own, accepted = torch.arange(N, dtype=torch.int32), torch.tensor([0, 2, T])
    records = kda_core.empty_records(N, T, HV, K, V)
    o = guide.verify_and_commit(pool, x, own, records, lambda o: accepted)
    kept = torch.arange(N, N + N * T, dtype=torch.int32).view(N, T)
    expected, _ = kda_core.fused_recurrent_kda(
        **x, **guide.OPTIONS, initial_state=tables.states, ssm_state_indices=own, final_state_indices=kept
    )
    assert torch.equal(o, expected)
    before, again = tables.states[:N].clone(), torch.empty_like(records)
    kept_pool, pool.states = pool.states, before
    guide.verify_after_commit(pool, x, own, records, accepted, again)
    assert torch.equal(pool.states, kept_pool)
    for n, count in enumerate(accepted.tolist()):
        assert torch.equal(pool.states[n], tables.states[N + n * T + count - 1 if count else n])


def test_a_tree_s_path_is_committed(guide: SimpleNamespace) -> None:
    traffic = Traffic(guide, seed=2)
    pool = guide.StatePool(2, HV, K, V)
    x = {n: t.unflatten(0, (2, 4)) for n, t in traffic.inputs(list(range(8))).items()} | traffic.gate
    pool.states.normal_()
    before = pool.states.clone()
    parents, slots = torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, 2]]), torch.arange(2, dtype=torch.int32)
    path, counts = torch.tensor([[0, 2, 3], [1, 2, 3]]), torch.tensor([3, 2])
    o = guide.verify_tree(pool, x, parents, slots, kda_core.empty_records(2, 4, HV, K, V), lambda o: (path, counts))
    for n, count in enumerate(counts.tolist()):
        tokens = path[n, :count]
        own = {name: x[name][n : n + 1, tokens] for name in PER_TOKEN} | traffic.gate
        expected, state = kda_core.fused_recurrent_kda(
            **own, **guide.OPTIONS, initial_state=before[n : n + 1], output_final_state=True
        )
        torch.testing.assert_close(o[n, tokens], expected[0])
        torch.testing.assert_close(pool.states[n], state[0])


def test_the_packed_form_of_a_step_is_the_same_call(guide: SimpleNamespace) -> None:
    traffic = Traffic(guide, seed=1)
    traffic.pool.states.normal_()
    before = traffic.pool.states.clone()
    slots = torch.tensor([4, 2, 7])
    x = traffic.inputs([0, 1, 2])
    dense = guide.decode(traffic.pool, {n: t[:, None] for n, t in x.items()} | traffic.gate, slots)
    packed, _ = kda_core.fused_recurrent_kda(
        **{n: t[None] for n, t in x.items()}, **traffic.gate, **guide.OPTIONS, initial_state=before,
        ssm_state_indices=slots, cu_seqlens=torch.arange(4),
    )  # fmt: skip
    torch.testing.assert_close(packed[0], dense[:, 0])
    torch.testing.assert_close(before, traffic.pool.states)


def test_a_layer_s_step_in_one_call(guide: SimpleNamespace) -> None:
    call = step("slots")
    o, state, conv_state = expected(call)
    pool = guide.StatePool(*call["state"].shape)
    pool.states = call["state"]
    x = {n: call[n] for n in ("mixed_qkv", "g", "beta", "norm_gate")}
    names = ("conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight", "norm_eps")
    found = guide.layer_step(pool, call["conv_state"], x, {n: call[n] for n in names}, call["state_indices"])
    torch.testing.assert_close(found, o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool.states, state, rtol=1e-5, atol=1e-5)
    assert torch.equal(call["conv_state"], conv_state)


def test_drafts_of_a_layer_advance_by_accepted_tokens(guide: SimpleNamespace) -> None:
    """A draft of which two tokens are accepted, and the next one: states as behind these two alone."""
    call, names = step("slots", T=3), ("mixed_qkv", "g", "beta", "norm_gate")
    x, weights = ({n: t for n, t in call.items() if (n in names) == given} for given in (True, False))
    slots, state, conv = (weights.pop(n) for n in ("state_indices", "state", "conv_state"))
    _, *right = expected(call | {n: t[:, :2] for n, t in x.items()})
    records = [kda_core.empty_records(3, 3, 2, 32, 32) for _ in range(2)]
    pool = SimpleNamespace(states=state)
    guide.layer_draft(pool, conv, x, weights, slots, records[0])
    committed = records[0], torch.tensor([2, 2, 2]), x["mixed_qkv"]
    guide.layer_draft(pool, conv, x, weights, slots, records[1], *committed)
    torch.testing.assert_close(state, right[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(conv, right[1])


def test_our_names_in_the_table_exist() -> None:
    text = GUIDE.read_text(encoding="utf-8").split("## The names that vLLM and SGLang use")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|")[0] for line in text.splitlines() if line.startswith("| ")][1:]
    arguments = set(kda_core.fused_recurrent_kda.__annotations__) | set(kda_core.chunk_kda.__annotations__)
    known = arguments | set(kda_core.__all__)
    for cell in cells:
        for name in re.findall(r"`(\w+)(?:=\w+)?`", cell):
            assert name in known, name

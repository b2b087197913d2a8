"""The simulated server: whatever comes, every request gets the bytes that it gets alone, and no slot is lost."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
import serve
import torch
from byte_lm import ByteLM, ModelConfig
from hypothesis import given, settings
from hypothesis import strategies as st

TINY = ModelConfig(dim=16, layers=2, heads=2, head_dim=8, mlp_dim=16)
TEXT = bytes(random.Random(0).choices(b"abc", k=600))
"""Few letters, so that prompts begin alike and drafts repeat."""


@cache
def model() -> ByteLM:
    torch.manual_seed(3)
    return ByteLM(TINY).eval()


@cache
def right(prompt: tuple[int, ...]) -> list[int]:
    longest = serve.Request(list(prompt), 0, 0)
    longest.written = [0] * 40
    return serve.alone(model(), longest)[0]


def knowing(r: serve.Request, count: int, rng: random.Random) -> list[int]:
    """The right bytes, then a wrong one or none: every number of accepted drafts comes."""
    following = right(tuple(r.prompt))[len(r.written) :][:count]
    kept = rng.randrange(count + 1)
    return [*following[:kept], *((b + 1) % 256 for b in following[kept:])]


def served(
    requests: list[serve.Request], slots: int, batch: int, drafts: int, piece: int, kind: type = serve.Server
) -> dict:
    server = kind(model(), slots, batch, drafts, piece, random.Random(1), knowing)
    return serve.serve(model(), requests, server) | serve.compare(model(), requests)


REQUESTS = st.lists(
    st.builds(
        lambda start, size, length, arrival, cancelled: serve.Request(
            list(TEXT[start : start + size]), length, arrival, cancelled
        ),
        st.sampled_from([0, 0, 0, 7]), st.sampled_from([1, 63, 64, 65, 129, 200]), st.integers(1, 9),
        st.integers(0, 12), st.none() | st.integers(0, 20),
    ),
    min_size=1, max_size=7,
).map(lambda found: sorted(found, key=lambda r: r.arrival))  # fmt: skip


@pytest.mark.end_to_end
@settings(max_examples=25, deadline=None)
@given(
    requests=REQUESTS, slots=st.integers(1, 16), batch=st.integers(1, 5), drafts=st.integers(0, 3),
    piece=st.sampled_from([64, 128, 200]),
)  # fmt: skip
def test_every_request_gets_its_bytes(requests, slots, batch, drafts, piece):
    found = served(requests, slots, batch, drafts, piece)
    assert (found["mismatched"], found["leaked_slots"]) == (0, 0)


def test_everything_happens():
    """Cache hits, every number of accepted tokens, and requests that stop with accepted tokens still in records."""
    counts, stopped = set(), set()

    class Watched(serve.Server):
        def _stop(self, r):
            if r.accepted:
                cancelled = r.cancelled is not None and r.cancelled <= self.now
                stopped.add("cancelled" if cancelled else "preempted" if len(r.written) < r.length else "ended")
            super()._stop(r)

        def _decode(self, requests):
            counts.update(r.accepted for r in requests)
            super()._decode(requests)

    requests = [serve.Request(list(TEXT[:200]), 30, i // 2, 12 if i == 1 else None) for i in range(8)]
    found = served(requests, 4, 3, 2, 64, Watched)
    assert (found["mismatched"], found["leaked_slots"]) == (0, 0)
    assert found["admitted"] >= 8
    assert found["hit_rate"] == round(found["cache_hits"] / found["admitted"], 3) > 0
    assert 0 < found["accepted_drafts"] < found["drafted"]
    assert counts == {0, 1, 2, 3}
    assert stopped == {"cancelled", "preempted", "ended"}


FAULTS = {
    "one more": lambda accepted, T: min(accepted + 1, T) if accepted else 0,
    "stale": lambda accepted, T: min(accepted, 1),
    "another's": lambda accepted, T: accepted or T,
    "prefix": lambda accepted, T: accepted,
}
"""One accepted token too many, the first one always, records of another request, a prefix that is a block too long."""


@pytest.mark.end_to_end
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_server_is_found(fault: str):
    class Layers(serve.Layers):
        def verify(self, tokens, slots, accepted):
            return super().verify(tokens, slots, [FAULTS[fault](a, len(tokens[0])) for a in accepted])

    class Slots(serve.Slots):
        def find(self, keys):
            blocks, slot = super().find(keys)
            return (blocks - 1 if fault == "prefix" and blocks > 1 else blocks), slot

    class Wrong(serve.Server):
        def __init__(self, model, slots, batch, drafts, *others):
            super().__init__(model, slots, batch, drafts, *others)
            self.layers, self.slots = Layers(model, slots, batch, 1 + drafts), Slots(slots)

    requests = [serve.Request(list(TEXT[:200]), 20, 4 * i) for i in range(4)]
    assert served(requests, 40, 4, 2, 256, Wrong)["mismatched"] > 0


def test_command_line(tmp_path):
    file = tmp_path / "served.json"
    assert serve.main(["--requests", "4", "--train", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    names = (
        "mismatched",
        "leaked_slots",
        "cache_hits",
        "preempted",
        "accepted_drafts",
        "tokens_per_second",
        "hit_rate",
    )
    assert set(names) <= found.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "-1"], "argument --requests: expected 1 to 1048576, got -1"),
        (["--requests", "some"], "argument --requests: invalid number value: 'some'"),
        (["--piece", "63"], "argument --piece: expected 64 to 1048576, got 63"),
        (["--train", "-1"], "argument --train: expected 0 to 1048576, got -1"),
        (["--slots", "9" * 20], "argument --slots: expected 1 to 1048576, got 99999999999999999999"),
        (["--batch", "1048576", "--drafts", "1048576"], "memory"),
        (["--seed", "9" * 20], "Overflow"),
        (["--device", "meta"], "meta"),
        (["--device", "nowhere"], "Expected one of cpu"),
        (["--json", "/nowhere/served.json"], "No such file or directory: '/nowhere/served.json'"),
        (["--json", "/"], "Is a directory: '/'"),
        (["--plot", "/nowhere/served.png"], "No such file or directory: '/nowhere/served.png'"),
        (["--plot", "served.what"], "--plot: expected a .png, .pdf or .svg file, got served.what"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line(arguments: list[str], message: str, capsys):
    """It comes before the training."""
    with pytest.raises(SystemExit) as ended:
        serve.main(arguments)
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert (ended.value.code, output.out) == (2, "")
    assert line.startswith("serve.py: ")
    assert message in line

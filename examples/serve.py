"""A simulated server over one pool of states a layer: continuous batching, a prefix cache, drafts, preemption.

    python examples/serve.py --requests 40 --seed 0 --json served.json

Requests for pieces of a text, many with common beginnings, arrive at a byte-level model that has read this text for
some steps. Some are cancelled. Every request's bytes are compared with those of the model alone, greedy and in float32.
The JSON has ``mismatched``, ``leaked_slots``, ``hit_rate``, ``tokens_per_second`` and other counts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import torch
from byte_lm import ByteLM, ModelConfig
from rich.progress import Progress, track
from torch import Tensor
from training import Parser, Text, Trainer, TrainingConfig, number, python_help_text

from kda_core import chunk_kda, empty_records
from kda_core.nn import KimiDeltaAttention, gated_rms_norm, kda_decode_step, short_convolution

BLOCK = 64  # Tokens of a block of the prefix cache: the chunk of ``chunk_kda``
MOST = 2**20  # that an option takes

TIE = 1e-4  # Logits that are closer than this may change places when they are computed in another batch


Rows = list[list[int]]


class Slots:
    """The slots of all layers' pools: given, given back, and held by the prefix cache until somebody needs them."""

    def __init__(self, count: int) -> None:
        self.count, self.free = count, list(range(count))
        self.cache: OrderedDict[int, int] = OrderedDict()
        self.pinned: dict[int, int] = {}

    def take(self) -> int | None:
        """A slot, or None: the cached state goes first that nobody has used for the longest time."""
        unused = [key for key, slot in self.cache.items() if not self.pinned.get(slot)]
        if self.free or not unused:
            return self.free.pop() if self.free else None
        return self.cache.pop(unused[0])

    def give_back(self, slot: int) -> None:
        assert slot not in self.free, f"slot {slot} is given back twice"
        self.free.append(slot)

    def find(self, keys: list[int]) -> tuple[int, int | None]:
        """The longest cached prefix: its number of blocks, and its slot, pinned until ``unpin``."""
        for blocks in range(len(keys), 0, -1):
            slot = self.cache.get(keys[blocks - 1])
            if slot is not None:
                self.cache.move_to_end(keys[blocks - 1])
                self.pinned[slot] = self.pinned.get(slot, 0) + 1
                return blocks, slot
        return 0, None

    def unpin(self, slot: int | None) -> None:
        if slot is not None:
            self.pinned[slot] -= 1

    def leaked(self) -> int:
        """Slots that neither are free nor hold a cached state."""
        return self.count - len(self.free) - len(self.cache)


@dataclass(eq=False)
class Request:
    """A prompt to be continued."""

    prompt: list[int]
    length: int  # bytes to write
    arrival: int  # the step at which it comes
    cancelled: int | None = None  # the step at which it is taken back
    written: list[int] = field(default_factory=list)
    slot: int = -1  # of the pools; this and the row are anything while it waits
    row: int = -1  # of the batch
    read: int = 0  # tokens that the state knows
    prefix: int | None = None  # a cached slot that its first piece reads
    accepted: int = 0  # tokens of the last draft that are kept and not in the state yet; 0 before the first draft
    waited: int = 0  # steps without a slot and a row
    tokens: list[int] = field(default_factory=list)  # the prompt, and what was written before it was preempted

    def keys(self) -> list[int]:
        """Hashes of the prefixes of whole blocks; the last token is never cached, whose output is needed."""
        ends = range(BLOCK, len(self.tokens), BLOCK)
        return list(accumulate((hash(tuple(self.tokens[e - BLOCK : e])) for e in ends), lambda a, b: hash((a, b))))


class Layers:
    """The model over pools: [slots, ...] of each layer, shared by prompts and drafts.

    A draft of T tokens leaves no state, but records and the convolution's inputs in its row [T, ...] of the batch; two
    buffers of records take turns.
    """

    def __init__(self, model: ByteLM, slots: int, batch: int, T: int) -> None:
        self.model, mixers = model, [block.mixer for block in model.blocks]
        device = model.head.weight.device
        nan = partial(torch.full, fill_value=torch.nan, device=device)
        sizes = [(m.num_v_heads, m.head_k_dim, m.head_v_dim, 2 * m.key_dim + m.value_dim) for m in mixers]
        self.states = [nan((slots, HV, V, K)) for HV, K, V, _ in sizes]
        self.conv = [nan((slots, mixers[0].conv_size - 1, D)) for *_, D in sizes]
        self.drafted = [nan((batch, T, D)) for *_, D in sizes]
        self.earlier, self.records = (
            [empty_records(batch, T, *heads, device=device) for *heads, _ in sizes] for _ in range(2)
        )

    def prefill(self, tokens: Rows, read: list[int | None], write: list[int], table: Rows) -> Tensor:
        """Logits [N, 256] behind pieces of prompts; ``table``: slots for the states behind each of their blocks."""
        device = self.model.head.weight.device
        bounds = torch.tensor([0, *accumulate(map(len, tokens))], dtype=torch.int32)
        old = torch.tensor([slot is not None for slot in read], device=device)
        first, own = (torch.tensor([s or 0 for s in x], device=device) for x in (read, write))
        starts = enumerate(bounds[:-1].tolist())
        marks = [(s + (j + 1) * BLOCK, slot) for n, s in starts for j, slot in enumerate(table[n]) if slot >= 0]
        kept = torch.tensor(table, dtype=torch.int32, device=device)
        x = self.model.embedding(torch.tensor([[t for piece in tokens for t in piece]], device=device))
        for i, block in enumerate(self.model.blocks):
            m, conv = block.mixer, self.conv[i]
            mixed, g, beta, gate = projected(m, block.mixer_norm(x))
            before = torch.where(old[:, None, None], conv[first], 0)
            y, last = short_convolution(mixed, filters(m), None, before, True, cu_seqlens=bounds.to(device))
            conv[own] = last
            for end, slot in marks:
                conv[slot] = mixed[0, end - conv.shape[1] : end]
            o, _ = chunk_kda(
                **recurrence(m, y, g, beta), initial_state=self.states[i], ssm_state_indices=first,
                cu_seqlens=bounds.to(device), cu_seqlens_cpu=bounds, has_initial_state=old, final_state_indices=own,
                checkpoint_indices=kept, checkpoint_every=BLOCK,
            )  # fmt: skip
            o = gated_rms_norm(o, gate, m.o_norm.weight, m.norm_eps)
            x = x + m.o_proj(o.flatten(2))
            x = x + block.mlp(block.mlp_norm(x))
        return self.model.head(self.model.norm(x[0, bounds[1:] - 1]))

    def verify(self, tokens: Rows, slots: list[int], accepted: list[int]) -> Tensor:
        """Logits [batch, T, 256] behind the last byte and each draft of a row, T = 1 + drafts.

        First the states advance by the accepted tokens of the row's draft before, 0 to T. A row of slot -1 is padding.
        """
        device = self.model.head.weight.device
        own, counts = (torch.tensor(x, device=device) for x in (slots, accepted))
        self.earlier, self.records = self.records, self.earlier
        x = self.model.embedding(torch.tensor(tokens, device=device))
        for i, block in enumerate(self.model.blocks):
            m = block.mixer
            mixed, g, beta, gate = projected(m, block.mixer_norm(x))
            o = kda_decode_step(
                mixed, g, beta, self.conv[i], filters(m), self.states[i], None, m.A_log, m.dt_bias, gate,
                m.o_norm.weight, own, norm_eps=m.norm_eps, state_v_first=True, records=self.records[i],
                commit=self.earlier[i], num_committed=counts, commit_inputs=self.drafted[i],
            )  # fmt: skip
            self.drafted[i] = mixed
            x = x + m.o_proj(o.flatten(2))
            x = x + block.mlp(block.mlp_norm(x))
        return self.model.head(self.model.norm(x))


def projected(m: KimiDeltaAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the convolution, g, beta and the norm's gate of a layer."""
    g, gate = (p(x).unflatten(-1, (m.num_v_heads, -1)) for p in (m.f_proj, m.g_proj))
    return torch.cat([m.q_proj(x), m.k_proj(x), m.v_proj(x)], -1), g, m.b_proj(x), gate


def recurrence(m: KimiDeltaAttention, y: Tensor, g: Tensor, beta: Tensor) -> dict[str, Any]:
    """Arguments of the operator behind the convolution's result y."""
    q, k, v = y.split([m.key_dim, m.key_dim, m.value_dim], -1)
    heads = {"q": q.unflatten(-1, (m.num_heads, -1)), "k": k.unflatten(-1, (m.num_heads, -1))}
    heads |= {"v": v.unflatten(-1, (m.num_v_heads, -1)), "g": g, "beta": beta, "A_log": m.A_log, "dt_bias": m.dt_bias}
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first")
    return heads | dict.fromkeys(flags, True)


def filters(m: KimiDeltaAttention) -> Tensor:
    return torch.cat([m.q_conv1d.weight, m.k_conv1d.weight, m.v_conv1d.weight])


Drafter = Callable[[Request, int, random.Random], list[int]]  # So many bytes that may follow those of a request


class Server:
    """Steps of a batch: pieces of prompts first, then a draft of every request whose prompt is read."""

    def __init__(
        self, model: ByteLM, slots: int, batch: int, drafts: int, piece: int, rng: random.Random, drafter: Drafter
    ) -> None:
        self.drafter, self.batch, self.rows = drafter, batch, list(range(batch))
        self.layers, self.slots = Layers(model, slots, batch, 1 + drafts), Slots(slots)
        self.drafts, self.piece, self.rng, self.now = drafts, piece, rng, 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.done: list[Request] = []
        names = "admitted", "cache_hits", "preempted", "cancelled", "accepted_drafts", "drafted", "steps"
        self.counts = dict.fromkeys(names, 0)
        self.seconds: list[float] = []

    def step(self) -> None:
        begun = time.perf_counter()
        self._cancel()
        self._admit()
        self._prefill([r for r in self.running if r.read < len(r.tokens)])
        self._decode([r for r in self.running if r.read >= len(r.tokens) and len(r.written) < r.length])
        for r in [r for r in self.running if len(r.written) >= r.length]:
            self._stop(r)
            del r.written[r.length :]
            self.done.append(r)
        self.now += 1
        self.counts["steps"] += 1
        self.seconds.append(time.perf_counter() - begun)

    def _stop(self, r: Request) -> None:
        self.running.remove(r)
        self.slots.unpin(r.prefix)
        self.slots.give_back(r.slot)
        self.rows.append(r.row)
        r.prefix = None

    def _cancel(self) -> None:
        for r in [r for r in self.waiting + self.running if r.cancelled is not None and r.cancelled <= self.now]:
            self.counts["cancelled"] += 1
            if r in self.running:
                self._stop(r)
            else:
                self.waiting.remove(r)
            self.done.append(r)

    def _admit(self) -> None:
        while self.waiting:
            r = self.waiting[0]
            slot = self.slots.take() if self.rows else None
            if slot is None:
                r.waited += 1
                if r.waited > 8 and self.running:
                    # The one that came last reads again what it has read and written.
                    r.waited, last = 0, self.running[-1]
                    self._stop(last)
                    self.waiting.append(last)
                    self.counts["preempted"] += 1
                    continue
                return
            self.waiting.pop(0)
            # The row may hold records of a request that was cancelled or preempted: of these 0 are accepted.
            r.slot, r.row, r.waited, r.accepted = slot, self.rows.pop(), 0, 0
            r.tokens = r.prompt + r.written
            blocks, r.prefix = self.slots.find(r.keys())
            r.read = blocks * BLOCK
            self.counts["admitted"] += 1
            self.counts["cache_hits"] += blocks > 0
            self.running.append(r)

    def _prefill(self, requests: list[Request]) -> None:
        pieces: list[tuple[Request, int]] = []
        left = self.piece
        for r in requests:
            count = min(len(r.tokens) - r.read, left)
            if r.read + count < len(r.tokens):
                count -= count % BLOCK  # the next piece begins at a block's edge
            if count:
                pieces.append((r, count))
                left -= count
        if not pieces:
            return
        width = max(1, max(count // BLOCK for _, count in pieces))
        table, cached = [[-1] * width for _ in pieces], {}
        for row, (r, count) in zip(table, pieces, strict=True):
            for j, key in enumerate(r.keys()[r.read // BLOCK : (r.read + count) // BLOCK]):
                if key not in self.slots.cache.keys() | cached and (found := self.slots.take()) is not None:
                    row[j] = cached[key] = found
        own = [r.slot for r, _ in pieces]
        # From a cached slot, from its own, or from zero.
        read = [r.slot if r.prefix is None and r.read else r.prefix for r, _ in pieces]
        logits = self.layers.prefill([r.tokens[r.read : r.read + n] for r, n in pieces], read, own, table)
        self.slots.cache.update(cached)
        for (r, count), row in zip(pieces, logits, strict=True):
            self.slots.unpin(r.prefix)
            r.prefix, r.read = None, r.read + count
            if r.read == len(r.tokens):
                r.written.append(int(row.argmax()))

    def _decode(self, requests: list[Request]) -> None:
        if not requests:
            return
        tokens, slots, accepted = [[0] * (1 + self.drafts)] * self.batch, [-1] * self.batch, [0] * self.batch
        for r in requests:
            tokens[r.row] = [r.written[-1], *self.drafter(r, self.drafts, self.rng)]
            slots[r.row], accepted[r.row] = r.slot, r.accepted
        found = self.layers.verify(tokens, slots, accepted).argmax(-1).tolist()
        for r in requests:
            draft, best = tokens[r.row][1:], found[r.row]
            kept = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(draft, best, strict=False))))
            r.written += best[: kept + 1]
            r.accepted = kept + 1
            self.counts["accepted_drafts"] += kept
            self.counts["drafted"] += len(draft)


def from_before(r: Request, count: int, rng: random.Random) -> list[int]:
    """The bytes that followed the last two when these came before, else random ones."""
    seen = r.prompt + r.written
    for i in range(len(seen) - 3, 0, -1):
        if seen[i - 1 : i + 1] == seen[-2:]:
            found = seen[i + 1 : i + 1 + count]
            return found + [0] * (count - len(found))
    return at_random(r, count, rng)


def at_random(r: Request, count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


DRAFTERS: dict[str, Drafter] = {"ngram": from_before, "random": at_random}


def random_requests(count: int, text: bytes, rng: random.Random) -> list[Request]:
    """Requests with prompts of 1 to 300 bytes of the text, half of them behind one of three common beginnings."""

    def piece(length: int) -> list[int]:
        start = rng.randrange(len(text) - length)
        return list(text[start : start + length])

    beginnings = [piece(rng.choice((64, 130, 200))) for _ in range(3)]
    found = []
    for i in range(count):
        prompt = piece(rng.choice((1, 5, 40, 100)))
        if rng.random() < 0.5:
            prompt = rng.choice(beginnings) + prompt
        arrival = rng.randrange(2 * i + 1)
        cancelled = arrival + rng.randrange(1, 20) if rng.random() < 0.1 else None
        found.append(Request(prompt, rng.randrange(1, 40), arrival, cancelled))
    return sorted(found, key=lambda r: r.arrival)


@torch.inference_mode()
def alone(model: ByteLM, r: Request) -> tuple[list[int], list[float]]:
    """The bytes that the model writes for the request's prompt alone, and how far each is ahead of the second."""
    caches, tokens, written, ahead = model.new_caches(), r.prompt, [], []
    for _ in range(len(r.written)):
        logits = model(torch.tensor([tokens], device=model.head.weight.device), caches)[0, -1]
        first, second = logits.topk(2).values.tolist()
        tokens = [int(logits.argmax())]
        written += tokens
        ahead.append(first - second)
    return written, ahead


def compare(model: ByteLM, requests: list[Request]) -> dict[str, int]:
    """Requests whose bytes differ from the model's alone; from a tie on they may."""
    found = {"mismatched": 0, "ties": 0}
    for r in requests:
        written, ahead = alone(model, r)
        differ = [i for i, (a, b) in enumerate(zip(r.written, written, strict=True)) if a != b]
        if differ:
            found["ties" if ahead[differ[0]] < TIE else "mismatched"] += 1
    return found


@torch.inference_mode()
def serve(model: ByteLM, requests: list[Request], server: Server, show: bool = False) -> dict[str, Any]:
    """Serve all requests; the figures."""
    begun, coming = time.perf_counter(), list(requests)
    with Progress(disable=not show) as progress:
        task = progress.add_task("requests", total=len(requests))
        while coming or server.waiting or server.running:
            while coming and coming[0].arrival <= server.now:
                server.waiting.append(coming.pop(0))
            server.step()
            progress.update(task, completed=len(server.done))
    seconds, counts = time.perf_counter() - begun, server.counts
    written, hit_rate = sum(len(r.written) for r in requests), counts["cache_hits"] / max(1, counts["admitted"])
    figures = {"requests": len(requests), "tokens": written, "leaked_slots": server.slots.leaked(), **counts}
    return figures | {"hit_rate": round(hit_rate, 3), "tokens_per_second": round(written / seconds, 1)}


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The options, ``device`` as a torch.device; exits where nothing could be served or written."""
    parser = Parser("serve.py", __doc__)
    parser.add_argument("--requests", type=number(1, MOST), default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=number(1, MOST), default=48, help="of each layer's pool")
    parser.add_argument("--batch", type=number(1, MOST), default=12, help="requests that run at a time")
    parser.add_argument("--drafts", type=number(0, MOST), default=3, help="tokens drafted a step")
    parser.add_argument("--drafter", choices=DRAFTERS, default="ngram")
    parser.add_argument("--train", type=number(0, MOST), default=60, help="steps of the model, before it serves")
    parser.add_argument("--piece", type=number(BLOCK, MOST), default=256, help="tokens of prompts a step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="write a histogram of the steps' latencies to this file")
    options = parser.parse_args(arguments)
    if options.plot and options.plot.suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--plot: expected a .png, .pdf or .svg file, got {options.plot}")
    try:
        torch.manual_seed(options.seed)
        options.device = torch.ones(1, device=options.device).nonzero().device  # one that has values
        if options.plot:
            import_module("matplotlib")
        for file in filter(None, (options.json, options.plot)):
            file.open("a").close()  # before the minutes of work
    except (OSError, ValueError, RuntimeError, AssertionError, ImportError) as error:
        parser.error(str(error).split("\n")[0])
    return options


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    rng = random.Random(options.seed)
    text, config = python_help_text(), TrainingConfig(steps=options.train, seed=options.seed)
    model = ByteLM(ModelConfig())
    trainer = Trainer(model, config, Text.of(text, config.context), options.device)
    sizes = options.slots, options.batch, options.drafts, options.piece
    try:  # before the minutes of work, too
        server = Server(model, *sizes, rng, DRAFTERS[options.drafter])
    except (RuntimeError, MemoryError) as error:
        Parser("serve.py", "").error(str(error).split("\n")[0] or "out of memory")
    for _ in track(trainer.train(), "training", config.steps):
        pass
    model.eval()
    requests = random_requests(options.requests, text, rng)
    figures = serve(model, requests, server, show=True) | compare(model, requests)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures))
    if options.plot:
        from matplotlib import pyplot

        pyplot.hist([1000 * s for s in server.seconds], bins=40)
        pyplot.gca().set(xlabel="milliseconds of a step", ylabel="steps")
        pyplot.savefig(options.plot)
    return 1 if figures["mismatched"] or figures["leaked_slots"] else 0


if __name__ == "__main__":
    sys.exit(main())

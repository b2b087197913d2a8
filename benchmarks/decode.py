"""Time a decoding step over a pool of states, and prefill of short prompts, beside other implementations.

    python benchmarks/decode.py --json decode.json

A step is one token for each of N sequences whose states lie in a pool, as in a server. On a GPU the operator computes
norms, bounded gate and sigmoid of beta, and fla's ``fused_recurrent_kda_fwd`` advances the same pool in place. Each
implementation is captured in a CUDA graph of several steps, each on other slots so that no state is in the cache, and
the graphs are replayed by turns. On a CPU the peer is the torch fallback of transformers; it takes dense states, decays
and beta, so ours gets decays and beta too, and each runs ten steps in a row.

The bytes of a step are each state read once and written once, and the rows of q, k, v, g, beta and o. Prefill
compares ``fused_recurrent_kda`` with ``chunk_kda`` on the same pool, float32 and K first. ``--layer`` times
``kda_decode_step`` beside the recurrence alone and fla's kernels of a layer.
"""

from __future__ import annotations

import itertools
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import measuring
import torch
from inputs import draw_gate, log_decay
from measuring import OURS, Parser, Row, Rows, capture, copy_bandwidth, count, median, number, positive, summary
from peers import KIMI_LINEAR, add_peers, first_runs, imported, load_peers
from torch import Tensor

import kda_core
from kda_core._bench import Function, reason, take_turns
from kda_core.nn import kda_decode_step

CHUNK = "chunk_kda"
COLD = 256 * 2**20  # Bytes of states that a round of steps reads at least: several caches
FEWEST_STEPS, STRETCH = 8, 10
"""Steps in a graph at least: they share the cost of starting a replay. Steps in a row on a CPU."""
TURNS = 15
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = ("K first", "V first")

Step = Callable[[Tensor], object]  # A step over the slots that it is given


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__file__, __doc__)
    add_peers(parser, ("fla", "transformers"))
    parser.add_argument("--states", nargs="+", choices=DTYPES, default=DTYPES, help="dtypes of the pool; default: all")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="default: both")
    parser.add_argument("--sizes", type=count, nargs="+", metavar="N", help="sequences; default: 1, 2, 4, ... 512")
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--channels", type=count, default=128, help="K = V")
    parser.add_argument("--prompts", type=int, nargs="*", metavar="T", help="tokens of a prompt; default: 2, 4, ... 64")
    parser.add_argument("--drafts", type=count, nargs="*", metavar="T", help="only drafts of T tokens, and trees")
    parser.add_argument("--layer", action="store_true", help="only a layer's steps between its projections")
    parser.add_argument("--cold", type=count, default=COLD, metavar="BYTES", help="least size of a pool")
    parser.add_argument("--seconds", type=positive, default=0.5, help="for each row, on a CPU; default: 0.5")
    options = parser.parse(arguments)
    gpu = options.device.type == "cuda"
    functions, versions = load_peers(parser, options)
    copy = copy_bandwidth(options.device)
    rows = Rows(options, versions, copy_bytes_per_second=copy)
    sizes = options.sizes or [2**i for i in range(10 if gpu else 5)]
    prompts = ((2, 4, 8, 16, 32, 64) if gpu else (2, 8, 32)) if options.prompts is None else options.prompts
    axes = (options.drafts or [1], options.states, options.layouts, sizes)
    kinds = [(N, T, state, layout) for T, state, layout, N in itertools.product(*axes)]
    if not (options.drafts or options.layer):
        kinds += [(N, T, "float32", "K first") for N in sizes if N in (1, 8, 64) for T in prompts]
    for kind in kinds:
        row = measure(*kind, list(functions), options)
        rows.add(row, line(row, copy))
    return rows.status


@lru_cache(maxsize=1)
def make_pool(slots: int, H: int, K: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool of states; rows of one dtype share it."""
    return torch.empty(slots, H, K, K, device=device, dtype=dtype).normal_()


class Work:
    """The inputs of a row, and its steps: those of the token's call, and a pool of states [slots, H, K, K]."""

    def __init__(self, N: int, T: int, state: str, layout: str, options: Namespace) -> None:
        self.N, self.v_first, self.backend, device = N, layout == "V first", options.backend, options.device
        H, K, dtype = options.heads, options.channels, torch.bfloat16 if device.type == "cuda" else torch.float32
        self.drafts, self.layer = bool(options.drafts), options.layer
        slots = max(N * (T if self.drafts else 1), options.cold // (H * K**2 * DTYPES[state].itemsize))
        self.pool = make_pool(slots, H, K, DTYPES[state], device)
        torch.manual_seed(0)
        q, k, v = (torch.randn(N, T, H, K, device=device, dtype=dtype) for _ in range(3))
        beta = torch.randn(N, T, H, device=device, dtype=dtype)
        gate = draw_gate("bounded", "random", (N, T, H, K), dtype, device)
        self.tensors = {"q": q, "k": k, "v": v, "g": gate["g"], "beta": beta}
        self.options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
        if device.type == "cuda":
            self.options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
            self.options |= {n: gate[n] for n in ("A_log", "dt_bias", "lower_bound")}
        else:
            self.tensors |= {"g": log_decay(**gate), "beta": beta.sigmoid()}
        self.out = torch.empty_like(v)

    def slots(self) -> Iterator[Tensor]:
        """Slots for successive calls, shuffled over the whole pool: [N], or for drafts [N, T]."""
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(len(self.pool), generator=generator).to(torch.int32).to(self.pool.device)
        shape = (self.N, self.out.shape[1]) if self.drafts else (self.N,)
        size = math.prod(shape)
        for i in itertools.cycle(range(len(self.pool) // size)):
            yield order[i * size : (i + 1) * size].view(shape).contiguous()

    def steps(self, T: int, peers: list[str]) -> Iterator[tuple[str, Step]]:
        """The implementations that are timed."""
        given = self.tensors | self.options
        given |= {"state_v_first": self.v_first, "out": self.out, "initial_state": self.pool}
        ours = given | {"backend": self.backend}
        theirs = self.theirs(given) if "fla" in peers else None
        if self.drafts or self.layer:
            yield from self.draft_steps(ours, T, theirs) if self.drafts else self.layer_steps(ours, theirs)
            return
        yield OURS, lambda slots: kda_core.fused_recurrent_kda(**ours, ssm_state_indices=slots)
        if T > 1:
            yield CHUNK, lambda slots: kda_core.chunk_kda(**ours, ssm_state_indices=slots)
            return
        if theirs is not None:
            yield "fla", lambda slots: theirs(ssm_state_indices=slots)
        if "transformers" in peers and not self.v_first and self.pool.dtype == torch.float32:
            function = imported(KIMI_LINEAR, "recurrent_kimi_delta_attention")
            last = len(self.pool) - self.N + 1

            def fallback(slots: Tensor) -> object:
                # It takes dense states: neighbours, others in each step.
                states = self.pool[int(slots[0]) % last :][: self.N]
                options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
                return function(*self.tensors.values(), initial_state=states, **options)

            yield "transformers", fallback

    def theirs(self, given: dict[str, Any]) -> Function:
        """fla's kernel with the inputs, in the pool."""
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        return partial(fused_recurrent_kda_fwd, **given, scale=self.pool.shape[-1] ** -0.5, inplace_final_state=True)

    def layer_steps(self, given: dict[str, Any], theirs: Function | None) -> Iterator[tuple[str, Step]]:
        """Convolution of 4 taps, recurrence and gated norm in one call; the recurrence alone; fla's kernels."""
        N, slots, (H, K) = self.N, len(self.pool), self.pool.shape[1:3]
        like = self.tensors["q"]
        mixed, gate = like.new_empty(N, 3 * H * K).normal_(), like.new_empty(N, H, K).normal_()
        taps, weight = like.new_empty(3 * H * K, 4).normal_(), torch.ones(K, device=like.device)
        inputs = like.new_zeros(slots, 3, 3 * H * K)
        options = dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), False) | self.options
        step = partial(
            kda_decode_step, mixed, self.tensors["g"][:, 0], self.tensors["beta"][:, 0], inputs, taps, self.pool,
            norm_gate=gate, norm_weight=weight, out=self.out[:, 0], backend=self.backend, state_v_first=self.v_first,
            **options,
        )  # fmt: skip
        yield OURS, lambda slots: step(state_indices=slots)
        yield "recurrence alone", lambda slots: kda_core.fused_recurrent_kda(**given, ssm_state_indices=slots)
        if theirs is not None:
            from fla.modules.causal_conv1d.ops import causal_conv1d_update
            from fla.modules.norm.fused_norm_gate import rms_norm_gated

            # Its layer has a convolution for each of q, k and v, and their states have no slots: each step has its own.
            rows, own_taps = [x.contiguous() for x in mixed.split(H * K, 1)], taps.split(H * K)
            caches = itertools.cycle(like.new_zeros(3, slots, H * K, 4).split(N, 1)[: slots // N])

            def kernels(slots: Tensor) -> object:
                found = zip(rows, next(caches), own_taps, strict=True)
                q, k, v = (causal_conv1d_update(x, c, weight=w, activation="silu")[0] for x, c, w in found)
                q, k, v = (x.view(N, 1, H, K) for x in (q, k, v))
                o, _ = theirs(q=q, k=k, v=v, ssm_state_indices=slots)
                return rms_norm_gated(o[:, 0], gate, weight, None, "sigmoid")

            yield "fla", kernels

    def draft_steps(self, given: dict[str, Any], T: int, theirs: Function | None) -> Iterator[tuple[str, Step]]:
        """Drafts of T tokens: a slot for every token, records, records behind a commit of some tokens, and a tree."""
        call, device, N = kda_core.fused_recurrent_kda, self.pool.device, self.N
        records, earlier = (kda_core.empty_records(N, T, *self.pool.shape[1:], device=device) for _ in range(2))
        earlier.normal_().mul_(1e-3)
        yield OURS, lambda slots: call(**given, ssm_state_indices=slots)
        if theirs is not None:
            first = torch.ones(N, dtype=torch.int32, device=device)
            yield "fla", lambda slots: theirs(ssm_state_indices=slots, num_accepted_tokens=first)
        yield "records", lambda slots: call(**given, ssm_state_indices=slots[:, 0], records=records)
        for tokens in sorted({0, 1, T - 1, T}):
            counts = torch.full((N,), tokens, device=device)
            more = {"records": records, "commit": earlier, "num_committed": counts}
            yield f"commit of {tokens}", lambda slots, more=more: call(**given, ssm_state_indices=slots[:, 0], **more)
        # Two tokens at every depth, depth first: every second token begins a branch.
        parents = torch.tensor([t - 1 - t % 2 if t else -1 for t in range(T)], device=device).expand(N, T).contiguous()
        more = {"records": records, "parents": parents}
        yield "tree", lambda slots: call(**given, ssm_state_indices=slots[:, 0], **more)


def measure(N: int, T: int, state: str, layout: str, peers: list[str], options: Namespace) -> Row:
    """A row: N sequences of T tokens, states of a dtype in a layout."""
    H, K = options.heads, options.channels
    shape = f"{N},{T},{H},{K} {state} pool, {layout}"
    row: Row = {"suite": "decode", "shape": shape, "sizes": {"N": N, "T": T, "H": H, "K": K}}
    row |= {"state": state, "layout": layout}
    try:
        with torch.inference_mode():
            work = Work(N, T, state, layout, options)
            row["state_bytes"] = 2 * N * work.pool[0].nbytes
            row["bytes"] = row["state_bytes"] + sum(t.nbytes for t in work.tensors.values()) + work.out.nbytes
            steps = dict(work.steps(T, peers))
            firsts = {name: partial(step, next(work.slots())) for name, step in steps.items()}
            runs, row["left_out"] = first_runs(firsts, (OURS, CHUNK))
            steps = {name: steps[name] for name in runs}
            gpu = options.device.type == "cuda"
            times = times_on_gpu(steps, work) if gpu else times_on_cpu(steps, work, T, options.seconds)
        row["implementations"] = {name: {"ms": summary(ms)} for name, ms in times.items()}
    # Go on with the next row.
    except Exception as error:
        row["failed"] = reason(error)
    return row


def times_on_gpu(steps: dict[str, Step], work: Work) -> dict[str, list[float]]:
    """Milliseconds of a step, graphs replayed by turns."""
    device, graphs, kept = work.pool.device, {}, []
    calls = max(FEWEST_STEPS, min(-(-COLD // (work.N * work.pool[0].nbytes)), len(work.pool) // work.N))
    for name, step in steps.items():
        indices = list(itertools.islice(work.slots(), calls))
        kept.append(indices)  # graphs read them where they lie
        step(indices[0])
        graphs[name] = capture(lambda step=step, indices=indices: [step(i) for i in indices], device)
    times = measuring.by_turns({name: partial(measuring.elapsed, replay) for name, replay in graphs.items()}, TURNS)
    return {name: [ms / calls for ms in found] for name, found in times.items()}


def times_on_cpu(steps: dict[str, Step], work: Work, T: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of a step, several in a row as in a loop."""
    slots, stretch = work.slots(), STRETCH if T == 1 else 1
    runs = {name: lambda step=step: [step(next(slots)) for _ in range(stretch)] for name, step in steps.items()}
    times = take_turns(runs, work.pool.device, seconds)
    return {name: [ms / stretch for ms in found] for name, found in times.items()}


def line(row: Row, copy: float) -> str:
    sizes, ours = row["sizes"], median(row, OURS)
    text = f"{row['state']:8} {row['layout']} N {sizes['N']:3} T {sizes['T']:2}"
    for name in row.get("implementations", {}):
        ms = median(row, name) or 0.0
        text += f"  {name} {number(1e3 * ms)} µs" + (f" ({ms / ours:.2f}×)" if ours and name != OURS else "")
    return text + (f", {row['bytes'] / (1e-3 * ours) / copy:.0%} of a copy" if ours and sizes["T"] == 1 else "")


if __name__ == "__main__":
    sys.exit(main())

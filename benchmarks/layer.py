"""Time ``kda_core.nn.KimiDeltaAttention`` beside fla's layer (on a GPU) or transformers' (on a CPU), in turns.

    python benchmarks/layer.py --json layer.json

A size is B,T,hidden,heads,head dimension. Each gets a row for a forward without gradients and one for a training step,
which computes the gradients of the input and of all parameters. All layers have the same weights. On a GPU a row also
has the time replayed from a CUDA graph, the peak memory with weights and input, and the share of each part's kernels.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from measuring import OURS, Parser, Row, Rows, capture, count, number, positive, summary
from torch import Tensor, nn

from kda_core._bench import DTYPES, Run, reason, take_turns
from kda_core._cli import version_of
from kda_core.nn import KimiDeltaAttention, to_transformers

SIZES = {"cuda": ("1,8192,2048,16,128", "1,8192,4096,32,128", "16,512,2048,16,128"), "cpu": ("1,512,512,8,64",)}
PARTS = {
    "convolutions": r"conv",
    "norms": r"norm_(forward|backward)|norm_gated|layer_norm",
    "products": r"gemm|nvjet|cutlass|splitk|cublas",
    "torch's elementwise kernels": r"at::|Memcpy|Memset",
    "the operator": "",
}
"""Patterns of the names of kernels, tried in this order; the last takes the rest."""


def size(text: str) -> tuple[int, ...]:
    """B, T, hidden, heads and head dimension, for argparse."""
    found = tuple(count(part) for part in text.split(","))
    if len(found) != 5:
        raise ValueError(text)
    return found


def fla_layer(ours: KimiDeltaAttention) -> Callable[[Tensor], Tensor]:
    """fla's layer with the same weights."""
    from fla.layers.kda import KimiDeltaAttention as Theirs

    names = ("hidden_size", "head_dim", "num_heads", "lower_bound", "safe_gate")
    theirs = Theirs(**{name: getattr(ours, name) for name in names}).to(ours.q_proj.weight)
    theirs.load_state_dict(ours.state_dict())
    return lambda x: theirs(x)[0]


def transformers_layer(ours: KimiDeltaAttention) -> Callable[[Tensor], Tensor]:
    """transformers' layer with the same weights and its own torch code."""
    from peers import KIMI_LINEAR, imported
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    if ours.lower_bound is not None:
        raise ValueError("it has no bounded gate: give --gate softplus")
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        setattr(modeling, name, imported(KIMI_LINEAR, name))
    config = KimiLinearConfig(
        hidden_size=ours.hidden_size, linear_num_heads=ours.num_heads, linear_head_dim=ours.head_dim,
        num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=ours.o_norm.eps,
    )  # fmt: skip
    theirs = modeling.KimiLinearDeltaAttention(config, 0).to(ours.q_proj.weight)
    theirs.load_state_dict(to_transformers(ours.state_dict()))
    return theirs


PEERS = {"cuda": ("fla", "fla-core", fla_layer), "cpu": ("transformers", "transformers", transformers_layer)}


def runs_of(layer: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Run]:
    """A forward, and a training step."""
    owner: Any = layer if isinstance(layer, nn.Module) else layer.__closure__[0].cell_contents
    leaves = [x.detach().requires_grad_(), *owner.parameters()]
    grad = torch.ones_like(x)

    @torch.no_grad()
    def forward() -> Tensor:
        return layer(x)

    return {"forward": forward, "training step": lambda: torch.autograd.grad(layer(leaves[0]), leaves, grad)}


def measured_on_gpu(run: Run, device: torch.device) -> dict[str, Any]:
    """Milliseconds replayed, peak bytes, and each part's share of the kernels' time."""
    run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    found: dict[str, Any] = {"peak_bytes": torch.cuda.max_memory_allocated(device)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    times = dict.fromkeys(PARTS, 0.0)
    for event in profile.key_averages():
        part = next(name for name, pattern in PARTS.items() if re.search(pattern, event.key))
        times[part] += event.device_time_total
    found["shares"] = {name: time / sum(times.values()) for name, time in times.items()}
    replay = capture(run, device)
    found["graph_ms"] = summary(take_turns({OURS: replay}, device, 0.3)[OURS])
    return found


def row_of(mode: str, shape: tuple[int, ...], layers: dict[str, Any], x: Tensor, seconds: float) -> Row:
    """One row: a forward or a step of all layers."""
    runs = {name: runs_of(layer, x)[mode] for name, layer in layers.items()}
    times = take_turns(runs, x.device, seconds)
    found = {name: {"ms": summary(ms)} for name, ms in times.items()}
    if x.device.type == "cuda":
        found = {name: own | measured_on_gpu(runs[name], x.device) for name, own in found.items()}
    return {"suite": "layer", "shape": ",".join(map(str, shape)), "case": mode, "implementations": found}


def lines_of(row: Row) -> list[str]:
    """The row as a person reads it."""
    lines = [f"{row['shape']}, {row['case']}"]
    for name, own in row["implementations"].items():
        line = f"  {name:12} {number(own['ms']['median'])} ms"
        if "graph_ms" in own:
            line += f", {number(own['graph_ms']['median'])} ms replayed, {own['peak_bytes'] / 2**30:.2f} GiB"
            line += "; " + ", ".join(f"{part} {share:.0%}" for part, share in own["shares"].items() if share >= 0.005)
        lines.append(line)
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Measure every size."""
    parser = Parser(__file__, __doc__)
    parser.add_argument("--sizes", nargs="+", type=size, help="B,T,hidden,heads,head dimension")
    parser.add_argument("--gate", choices=("bounded", "softplus"), default="softplus")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--seconds", type=positive, default=3.0, help="for each row")
    parser.add_argument("--no-peer", action="store_true", help="time kda_core alone")
    options = parser.parse(arguments)
    kind = options.device.type
    name, distribution, load = PEERS[kind]
    dtype = DTYPES[options.dtype or ("bfloat16" if kind == "cuda" else "float32")]
    rows = Rows(options, {} if options.no_peer else {name: version_of(distribution) or "none"})
    bounded = {"lower_bound": -5.0, "safe_gate": True} if options.gate == "bounded" else {}
    for shape in options.sizes or map(size, SIZES[kind]):
        B, T, hidden, heads, K = shape
        torch.manual_seed(0)
        ours = KimiDeltaAttention(
            hidden, head_dim=K, num_heads=heads, backend=options.backend, device=options.device, dtype=dtype, **bounded
        )
        nn.init.zeros_(ours.g_proj[1].bias)
        layers: dict[str, Any] = {OURS: ours}
        left_out = {}
        if not options.no_peer:
            try:
                layers[name] = load(ours)
            # Another library may fail in any way, which is no failure of ours.
            except Exception as error:
                left_out[name] = reason(error)
        x = torch.randn(B, T, hidden, device=options.device, dtype=dtype)
        for mode in ("forward", "training step"):
            row = row_of(mode, shape, layers, x, options.seconds) | {"gate": options.gate, "left_out": left_out}
            rows.add(row, *lines_of(row))
    return rows.status


if __name__ == "__main__":
    sys.exit(main())

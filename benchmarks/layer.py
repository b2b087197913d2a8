"""Time ``kda_core.nn.KimiDeltaAttention`` beside fla's layer (on a GPU) or transformers' (on a CPU), in turns.

    python benchmarks/layer.py --json layer.json

A size is B,T,hidden,heads,head dimension. Each gets a row for a forward without gradients and one for a training step,
which computes the gradients of the input and of all parameters. All layers have the same weights. Where the adapter for
fla is installed, fla's layer is also timed with it. On a GPU a row also has the host's time until a call returns, the
time replayed from a CUDA graph, the bytes that a call allocates at its peak, and the share of each part's kernels.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import peers
import torch
from measuring import OURS, Parser, Row, Rows, count, number, positive, summary
from torch import Tensor, nn

from kda_core._bench import DTYPES, Run, reason
from kda_core._cli import version_of
from kda_core.nn import KimiDeltaAttention, to_transformers

SIZES = {"cuda": ("1,8192,2048,16,128", "1,8192,4096,32,128", "16,512,2048,16,128"), "cpu": ("1,512,512,8,64",)}
PARTS = {
    "torch's elementwise kernels": r"at::|Memcpy|Memset",
    "convolutions": r"conv",
    "norms": r"(^|_)norm_(forward|backward)|layer_norm",
    "products": r"gemm|nvjet|cutlass|splitk|cublas",
    "the operator": "",
}
"""Patterns of the names of kernels, tried in this order; the last takes the rest."""
HOST_CALLS = 20


def size(text: str) -> tuple[int, ...]:
    """B, T, hidden, heads and head dimension, for argparse."""
    found = tuple(count(part) for part in text.split(","))
    if len(found) != 5:
        raise ValueError(text)
    return found


def fla_layer(ours: KimiDeltaAttention) -> nn.Module:
    from fla.layers.kda import KimiDeltaAttention as Theirs

    names = ("hidden_size", "head_dim", "num_heads", "lower_bound", "safe_gate")
    theirs = Theirs(**{name: getattr(ours, name) for name in names})
    given = ours.state_dict()
    # A_log and dt_bias stay float32.
    for name, parameter in theirs.named_parameters():
        parameter.data = parameter.data.to(given[name])
    theirs.load_state_dict(given)
    return theirs


def transformers_layer(ours: KimiDeltaAttention) -> nn.Module:
    """transformers' layer with the same weights and its own torch code."""
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    if ours.lower_bound is not None:
        raise ValueError("it has no bounded gate: give --gate softplus")
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        setattr(modeling, name, peers.imported(peers.KIMI_LINEAR, name))
    config = KimiLinearConfig(
        hidden_size=ours.hidden_size, linear_num_heads=ours.num_heads, linear_head_dim=ours.head_dim,
        num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=ours.o_norm.eps,
    )  # fmt: skip
    theirs = modeling.KimiLinearDeltaAttention(config, 0).to(ours.q_proj.weight)
    theirs.load_state_dict(to_transformers(ours.state_dict()))
    return theirs


PEERS = {"cuda": ("fla", "fla-core", fla_layer), "cpu": ("transformers", "transformers", transformers_layer)}


def runs_of(layer: nn.Module, x: Tensor) -> dict[str, Run]:
    leaves = [x.detach().requires_grad_(), *layer.parameters()]
    grad = torch.ones_like(x)

    def output(x: Tensor) -> Tensor:
        found = layer(x)
        # fla's layer returns a tuple.
        return found if isinstance(found, Tensor) else found[0]

    @torch.no_grad()
    def forward() -> Tensor:
        return output(x)

    return {"forward": forward, "training step": lambda: torch.autograd.grad(output(leaves[0]), leaves, grad)}


def without_and_with_the_adapter(runs: Mapping[str, Run]) -> dict[str, dict[str, Run]]:
    """fla's layer on its own kernels, and on kda_core by ``kda_core_fla``: fla reads the variable at every call."""

    def switched(run: Run, value: str) -> Run:
        def call() -> object:
            os.environ["KDA_FLA"] = value
            return run()

        return call

    if find_spec("kda_core_fla") is None:
        return {"fla": dict(runs)}
    import kda_core_fla

    os.environ["KDA_FLA"] = "1"
    kda_core_fla.install()
    ways = {"fla": "0", "fla, adapter": "1"}
    return {name: {mode: switched(run, value) for mode, run in runs.items()} for name, value in ways.items()}


def shares(kernels: Mapping[str, float]) -> dict[str, float]:
    """Each part's share of the kernels' time, given by name."""
    found = dict.fromkeys(PARTS, 0.0)
    for kernel, ms in kernels.items():
        found[next(part for part, pattern in PARTS.items() if re.search(pattern, kernel))] += ms
    whole = sum(found.values())
    return {part: ms / whole for part, ms in found.items()}


def host_times(run: Run, device: torch.device) -> list[float]:
    """Milliseconds until a call returns, on a device that has nothing to do."""
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize(device)
    return times


def measured(
    runs: Mapping[str, Run], device: torch.device, seconds: float, profiled: peers.Profiled = peers.kernels
) -> dict[str, dict[str, Any]]:
    """By implementation: times, and on a GPU memory and shares of the kernels that ``profiled`` times."""
    found: dict[str, dict[str, Any]] = {name: {} for name in runs}
    for name, run in runs.items() if device.type == "cuda" else ():
        host, kernels = host_times(run, device), profiled(run, device)
        found[name] = {"host_ms": summary(host), "shares": shares(kernels)}
    return {name: found[name] | own for name, own in peers.timed(runs, device, seconds).items()}


def lines_of(row: Row) -> list[str]:
    lines = [f"{row['shape']}, {row['case']}"]
    for name, own in row["implementations"].items():
        line = f"  {name:12} {number(own['ms']['median'])} ms"
        line += f", {number(own['device_ms']['median'])} ms replayed" if "device_ms" in own else ""
        if "shares" in own:
            line += f", {number(own['host_ms']['median'])} ms of host, {own['peak_bytes'] / 2**30:.2f} GiB; "
            line += ", ".join(f"{part} {share:.0%}" for part, share in own["shares"].items() if share >= 0.005)
        lines.append(line)
    return lines


def main(arguments: list[str] | None = None) -> int:
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
        x = torch.randn(B, T, hidden, device=options.device, dtype=dtype)
        runs, left_out = {OURS: runs_of(ours, x)}, {}
        if not options.no_peer:
            try:
                found = runs_of(load(ours), x)
                runs |= without_and_with_the_adapter(found) if name == "fla" else {name: found}
            # Another library may fail in any way, which is no failure of ours.
            except Exception as error:
                left_out[name] = reason(error)
        for mode in ("forward", "training step"):
            row: Row = {"suite": "layer", "shape": ",".join(map(str, shape)), "case": mode, "gate": options.gate}
            chosen, why = peers.first_runs({layer: own[mode] for layer, own in runs.items()})
            row |= {"implementations": measured(chosen, options.device, options.seconds), "left_out": left_out | why}
            rows.add(row, *lines_of(row))
    return rows.status


if __name__ == "__main__":
    sys.exit(main())

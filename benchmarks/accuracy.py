"""Relative errors of ``chunk_kda`` against the float64 oracle: every output and gradient, beside fla 0.6 if installed.

    python benchmarks/accuracy.py [--backend nvidia] [--device cuda] [--one-config] [--only CASE] [--draws N]
                                  [--json FILE] [--write docs/accuracy.md]

Both get the same inputs and the same gradients of o and of the final state. The error of a result x is |x - r| / |r|
with the oracle's r, computed in float64 from the inputs as they were rounded. ``--one-config`` takes the first
configuration of each of fla's autotuning lists, whose choice changes tiles and not precisions, and spares minutes.
``--draws`` takes the root mean square of the errors over so many draws of a case's inputs: one draw's errors move by a
tenth, and those of dA_log, one number a head, by more.
Below the table stands whatever is larger than the other's, with the standard error of its ratio over the draws.
``--write`` puts both between the markers of a Markdown file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core import reference
from kda_core.reference import DIFFERENTIABLE
from kda_core.testing.cases import BF16, FP16, FP32, Case
from kda_core.testing.inputs import Call

OURS, FLA = "kda_core", "fla"
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
WORSE = 1.1
"""More than this times the other's error counts as worse: two right kernels round differently."""

_ALL = {"l2norm": True, "beta": "sigmoid", "state": FP32, "backward": True, "index_dtype": torch.int64}
_PACKED = (1, 63, 200, 0, 248)
CASES = [
    Case(name="given decay", B=2, T=512, H=4, K=128, dtype=BF16, state=FP32, backward=True),
    Case(name="given decay, safe_gate", T=512, H=4, K=128, dtype=BF16, decay="bounded", options={"safe_gate": True})
    .having(state=FP32, backward=True),
    Case(name="slow decay", T=512, H=4, K=128, dtype=BF16, decay="slow", state=FP32, backward=True),
    Case(name="lower-bound gate", T=512, H=4, K=128, dtype=BF16, gate_dtype=BF16, gate="lower bound", **_ALL)
    .having(options={"safe_gate": True}),
    Case(name="softplus gate", T=512, H=4, K=128, dtype=BF16, gate_dtype=BF16, gate="softplus", **_ALL),
    Case(name="real model's gate", T=512, H=4, K=128, dtype=BF16, gate_dtype=BF16, gate="softplus", rate=201.0, **_ALL),
    Case(name="packed, grouped values", T=512, H=2, HV=4, K=128, dtype=BF16, lengths=_PACKED, gate="softplus", **_ALL),
    Case(name="equal keys, beta 1, no decay", T=512, H=4, K=128, dtype=BF16, keys="equal", decay="none", beta=1.0)
    .having(state=FP32, backward=True),
    Case(name="K = V = 64", T=512, H=4, K=64, dtype=BF16, state=FP32, backward=True),
    Case(name="K = V = 256", T=512, H=2, K=256, dtype=BF16, state=FP32, backward=True),
    Case(name="given decay, float16", T=512, H=4, K=128, dtype=FP16, state=FP32, backward=True),
    Case(name="packed softplus gate, float16", T=512, H=4, K=128, dtype=FP16, lengths=_PACKED, gate="softplus", **_ALL),
    Case(name="given decay, float32", T=512, H=4, K=64, dtype=FP32, state=FP32, backward=True),
    Case(name="packed softplus gate, float32", T=512, H=4, K=64, dtype=FP32, lengths=_PACKED, gate="softplus", **_ALL),
]  # fmt: skip
_SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}

Function = Callable[..., tuple]


def oracle(call: Call, device: torch.device) -> dict[str, Tensor]:
    """Results and gradients in float64."""
    there = {n: t.to(device) for n, t in call.tensors.items()}
    request = replace(call, tensors=there).request()
    leaves = {n: getattr(request, n).double().requires_grad_() for n in DIFFERENTIABLE if n in there}
    found = reference.oracle(request, inputs=leaves)
    outputs = {"o": found.o, "final_state": found.final_state}
    grads = [call.grads[n].to(device).double() for n in outputs]
    return _named(outputs, torch.autograd.grad(list(outputs.values()), list(leaves.values()), grads), leaves)


def results(function: Function, call: Call, device: torch.device) -> dict[str, Tensor]:
    """The same of an implementation."""
    there = {n: t.to(device) for n, t in call.tensors.items()}
    leaves = {n: there[n].requires_grad_() for n in DIFFERENTIABLE if n in there}
    o, final_state = function(**there, **call.options)[:2]
    outputs = {"o": o, "final_state": final_state}
    grads = [call.grads[n].to(device) for n in outputs]
    return _named(outputs, torch.autograd.grad(list(outputs.values()), list(leaves.values()), grads), leaves)


def _named(outputs: dict[str, Tensor], found: Sequence[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = {f"d{n}": g for n, g in zip(leaves, found, strict=True)}
    return {n: t.detach() for n, t in (outputs | gradients).items()}


def errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """|x - r| / |r| of every result."""
    return {n: ((got[n].double().reshape(r.shape) - r).norm() / r.norm()).item() for n, r in expected.items()}


def fla_chunk_kda(one_config: bool) -> Function | None:
    """fla's function, or None without it."""
    try:
        metadata.version("flash-linear-attention")
    except metadata.PackageNotFoundError:
        return None
    if one_config:
        from triton.runtime.autotuner import Autotuner

        tune = Autotuner.__init__

        def first_only(self, fn, arg_names, configs, *arguments, **options):
            tune(self, fn, arg_names, configs[:1], *arguments, **options)

        Autotuner.__init__ = first_only
    from fla.ops.kda import chunk_kda

    return chunk_kda


def compare(case: Case, functions: dict[str, Function], device: torch.device, draws: int = 1) -> dict[str, Any]:
    """Errors of one case by implementation; an implementation that fails has its message in their place."""
    found: dict[str, Any] = {name: [] for name in functions}
    for draw in range(draws):
        # The name is the seed.
        call = case.having(name=f"{case.name}, draw {draw}" if draw else case.name).call()
        expected = oracle(call, device)
        for name, function in functions.items():
            if isinstance(found[name], str):
                continue
            try:
                found[name].append(errors(results(function, call, device), expected))
            except Exception as error:  # another library's failure is a result, too
                if name == OURS:
                    raise
                found[name] = f"{type(error).__name__}: {error}"[:200]
    means = {name: x if isinstance(x, str) else _root_mean_square(x) for name, x in found.items()}
    return {"case": case.name, "dtype": _SHORT[case.dtype], "errors": means, "draws": found}


def _root_mean_square(draws: list[dict[str, float]]) -> dict[str, float]:
    return {n: math.sqrt(sum(d[n] ** 2 for d in draws) / len(draws)) for n in draws[0]}


def _cell(row: dict[str, Any], name: str, output: str) -> str:
    found = row["errors"][name]
    if isinstance(found, str):
        return "fails"
    if output not in found:
        return ""
    text = f"{found[output]:.1e}"
    other = row["errors"].get(FLA)
    worse = name == OURS and isinstance(other, dict) and not found[output] <= WORSE * other.get(output, math.inf)
    return f"**{text}**" if worse else text


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, one line a case and implementation; ours in bold where it is the worse."""
    outputs = list(dict.fromkeys(o for r in rows for e in r["errors"].values() if isinstance(e, dict) for o in e))
    lines = ["| case | dtype | | " + " | ".join(outputs) + " |", "|---|---|---|" + "---|" * len(outputs)]
    for row in rows:
        for i, name in enumerate(row["errors"]):
            what = f"{row['case']} | {row['dtype']}" if i == 0 else " | "
            lines.append(f"| {what} | {name} | " + " | ".join(_cell(row, name, o) for o in outputs) + " |")
    return "\n".join(lines)


def larger(rows: list[dict[str, Any]]) -> str:
    """Where our error is larger than the other's: how much, also draw by draw, and how sure that is."""
    lines = []
    for row in rows:
        ours, theirs = (row["errors"].get(name) for name in (OURS, FLA))
        if not isinstance(ours, dict) or not isinstance(theirs, dict):
            continue
        for output in (o for o in ours if ours[o] > theirs[o]):
            pairs = zip(row["draws"][OURS], row["draws"][FLA], strict=True)
            logs = [math.log(a[output] / b[output]) for a, b in pairs]
            ratio = f"{math.exp(statistics.mean(logs)):.3f}"
            if len(logs) > 1:
                ratio += f" ± {statistics.stdev(logs) / math.sqrt(len(logs)):.3f}"
            means = f"{ours[output] / theirs[output]:.3f}"
            lines.append(f"| {row['case']} | {row['dtype']} | {output} | {means} | {ratio} |")
    if not lines:
        return ""
    head = "| ours is the larger in | dtype | | root mean squares | geometric mean of the draws, standard error |"
    return "\n".join([head, "|---|---|---|---|---|", *lines])


def where(device: torch.device) -> str:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = []
    for package in ("torch", "triton", "flash-linear-attention"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return f"{name}; {', '.join(versions)}"


def write(path: Path, text: str) -> None:
    """Put ``text`` between the markers of a file."""
    before, rest = path.read_text().split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", default="nvidia")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one-config", action="store_true", help="spare fla's autotuning")
    parser.add_argument("--only", default="", help="only the case of this name")
    parser.add_argument("--draws", type=int, default=1, help="draws of every case's inputs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", help="print what runs wrote with --json, rather than measure")
    parser.add_argument("--write", type=Path, help="a Markdown file with markers")
    chosen = parser.parse_args(arguments)
    if chosen.read:
        parts = [json.loads(path.read_text()) for path in chosen.read]
        order = [case.name for case in CASES]
        rows = sorted((row for part in parts for row in part["rows"]), key=lambda row: order.index(row["case"]))
        measured = parts[0] | {"rows": rows}
    else:
        device = torch.device(chosen.device)
        ours = lambda **options: kda_core.chunk_kda(**options, backend=chosen.backend)  # noqa: E731
        functions = {OURS: ours}
        if device.type == "cuda" and (theirs := fla_chunk_kda(chosen.one_config)) is not None:
            functions[FLA] = theirs
        rows = []
        for case in CASES:
            if chosen.only in (case.name, ""):
                rows.append(compare(case, functions, device, chosen.draws))
                print(*table(rows[-1:]).splitlines()[2:], sep="\n", flush=True)
        measured = {"where": where(device), "backend": chosen.backend, "draws": chosen.draws, "rows": rows}
    draws = f"; root mean square of {n} draws" if (n := measured.get("draws", 1)) > 1 else ""
    tables = [table(measured["rows"]), larger(measured["rows"])]
    text = "\n\n".join([f"{measured['where']}; backend `{measured['backend']}`{draws}.", *filter(None, tables)])
    print(text)
    if chosen.json:
        chosen.json.write_text(json.dumps(measured, indent=1))
    if chosen.write:
        write(chosen.write, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

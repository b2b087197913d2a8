"""Relative errors of every output and gradient of ``chunk_kda`` against the float64 oracle, beside fla.

    python benchmarks/accuracy.py --one-config --draws 24 --json docs/data/accuracy.json
    python benchmarks/accuracy.py --by-length --draws 4 --device cpu --json docs/data/errors_by_length.json

Every implementation gets the same inputs, those of the conformance kit's cases, and the same gradients of o and of the
final state. The error of a result x is |x - r| / |r| with the oracle's r, computed in float64 from the rounded inputs.
With ``--draws`` it is the root mean square over that many draws of the inputs: errors vary by a tenth between draws,
those of dA_log by more. With ``--one-config`` a peer's autotuners take their first configuration, which saves minutes
and changes tiles, not precision.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from inputs import errors, oracle
from measuring import OURS, Parser, Row, Rows, count
from peers import add_peers, load_peers

import kda_core
from kda_core._bench import Function, on_device, reason, runner
from kda_core.testing.cases import BF16, FP16, FP32, Case

_ALL: dict[str, Any] = {"l2norm": True, "beta": "sigmoid", "state": FP32, "backward": True, "index_dtype": torch.int64}
_PACKED = (1, 63, 200, 0, 248)
TABLE = [
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
NAMES = {FP32: "float32", FP16: "float16", BF16: "bfloat16"}
BY_LENGTH = [
    Case(name=f"{T} tokens, {decay} decay, {name}", T=T, K=64, dtype=dtype, decay=decay, state=FP32, backward=True)
    for decay in ("mild", "slow")
    for dtype, name in NAMES.items()
    for T in (16, 64, 256, 1024, 4096)
]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__file__, __doc__)
    add_peers(parser, ("fla",))
    parser.add_argument("--by-length", action="store_true", help="cases of 16 to 4096 tokens in place of the table's")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose names contain this")
    parser.add_argument("--draws", type=count, default=1, help="draws of every case's inputs; default: 1")
    parser.add_argument("--one-config", action="store_true", help="spare the peers' autotuning")
    options = parser.parse(arguments)
    cases = [case for case in (BY_LENGTH if options.by_length else TABLE) if options.only in case.name]
    if not cases:
        parser.error(f"--only: expected a part of the name of a case, got {options.only!r}")
    if options.one_config:
        take_first_configurations()
    functions, versions = load_peers(parser, options)
    functions = {OURS: functools.partial(kda_core.chunk_kda, backend=options.backend)} | functions
    rows = Rows(options, versions)
    for case in cases:
        row = measure(case, functions, options.device, options.draws)
        rows.add(row | {"by_length": options.by_length}, *lines(row))
    return rows.status


def take_first_configurations() -> None:
    """Give every Triton autotuner that is defined from now on one configuration; call before a peer is imported."""
    from triton.runtime.autotuner import Autotuner

    tune = Autotuner.__init__

    def first_only(self: Any, fn: Any, arg_names: Any, configs: Any, *arguments: Any, **options: Any) -> None:
        tune(self, fn, arg_names, configs[:1], *arguments, **options)

    Autotuner.__init__ = first_only


def measure(case: Case, functions: Mapping[str, Function], device: torch.device, draws: int) -> Row:
    """Errors of one case by implementation; a peer that fails has its message among ``left_out``."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in functions}
    left_out: dict[str, str] = {}
    for draw in range(draws):
        # The name is the seed.
        call = on_device(case.having(name=f"{case.name}, draw {draw}" if draw else case.name).call(), device)
        expected = oracle(call)
        for name in functions.keys() - left_out.keys():
            try:
                found[name].append(errors(runner(functions[name], call)(), expected))
            # Any library may fail in any way, and its failure is a line of the table.
            except Exception as error:
                left_out[name] = reason(error)
    implementations = {n: {"errors": root_mean_square(x), "draws": x} for n, x in found.items() if n not in left_out}
    row: Row = {"suite": "accuracy", "case": case.name, "dtype": NAMES[case.dtype]}
    row |= {"sizes": {n: getattr(case, n) for n in ("B", "T", "H", "K")}}
    row |= {"implementations": implementations, "left_out": left_out}
    return row | ({"failed": left_out.pop(OURS)} if OURS in left_out else {})


def root_mean_square(draws: list[dict[str, Any]]) -> dict[str, float | str]:
    """Root mean square over the draws, by output; a number that JSON lacks is spelled."""
    found = {n: math.sqrt(sum(float(d[n]) ** 2 for d in draws) / len(draws)) for n in draws[0]}
    return {n: size if math.isfinite(size) else str(size) for n, size in found.items()}


def lines(row: Row) -> list[str]:
    """A row in words, its outputs in two lines of 100 columns."""
    found = [f"{row['case']} ({row['dtype']})"]
    for name, part in row["implementations"].items():
        cells = [f"{n} {float(x):.1e}" for n, x in part["errors"].items()]
        found += [f"  {name:9} {'  '.join(cells[:5])}", *([f"  {'':9} {'  '.join(cells[5:])}"] if cells[5:] else [])]
    return found


if __name__ == "__main__":
    sys.exit(main())

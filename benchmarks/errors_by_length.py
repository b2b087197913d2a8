"""Relative errors of ``chunk_kda`` against the float64 oracle, by sequence length and dtype.

    python benchmarks/errors_by_length.py [--backend cpu] [--device cpu] [--lengths T ...] [--draws N] [--json FILE]

The error of a result x is |x - r| / |r|; r is computed in float64, one token at a time, from the inputs as they were
rounded. Each figure is the root mean square over ``--draws`` draws of the inputs. The oracle keeps a state for every
token, so that 4,096 tokens need about 2 GiB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from pathlib import Path

import torch
from accuracy import errors, oracle, results, where

import kda_core
from kda_core.testing.cases import BF16, FP16, FP32, Case

DTYPES = {"float32": FP32, "float16": FP16, "bfloat16": BF16}
DECAYS = ("mild", "slow")
LENGTHS = (16, 64, 256, 1024, 4096)


def measure(T: int, dtype: str, decay: str, draws: int, options: argparse.Namespace) -> dict[str, float]:
    """Root mean square errors of every result, by name."""
    device = torch.device(options.device)
    found: list[dict[str, float]] = []
    for draw in range(draws):
        # The name is the seed.
        case = Case(name=f"T {T}, draw {draw}", T=T, H=2, K=64, dtype=DTYPES[dtype], state=FP32, backward=True)
        call = case.having(decay=decay).call()
        got = results(lambda **o: kda_core.chunk_kda(**o, backend=options.backend), call, device)
        found.append(errors(got, oracle(call, device)))
    return {name: math.sqrt(sum(f[name] ** 2 for f in found) / draws) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="T")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    options = parser.parse_args()
    content = {
        "where": where(torch.device(options.device)),
        "date": datetime.date.today().isoformat(),
        "backend": options.backend,
        "draws": options.draws,
        "rows": [],
    }
    for decay in DECAYS:
        for dtype in DTYPES:
            for T in options.lengths:
                found = measure(T, dtype, decay, options.draws, options)
                content["rows"].append({"decay": decay, "dtype": dtype, "T": T, "errors": found})
                line = "  ".join(f"{name} {error:.1e}" for name, error in found.items())
                print(f"{decay} decay, {dtype}, T = {T}: {line}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Time the first call of a process with an empty Triton cache, and count later compilations.

    python benchmarks/first_call.py --shapes 1,2048,16,128

Every row is a fresh process: one runs the forward, another forward and backward. The second goes on with ``--calls``
training steps of random T and as many with random packings of up to ten sequences, and counts the kernels that each
compiled. The clock starts after torch is imported and the device is started. A backend without Triton compiles nothing.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from inputs import parse_shape
from measuring import PROGRAM, ChildFailed, Parser, Row, Rows, child, count

import kda_core
from kda_core._bench import on_device, runner
from kda_core.testing.cases import BF16

CACHE = "TRITON_CACHE_DIR"
CALLS = {"forward": False, "forward and backward": True}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__file__, __doc__)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[parse_shape("1,2048,16,128")], help="B,T,H,K")
    parser.add_argument("--calls", type=count, default=100, help="steps after the first call; default: 100")
    parser.add_argument("--child", choices=CALLS, help="make this call of the first shape, in this process")
    options = parser.parse(arguments)
    if any(case.lengths or case.HV or case.V for case in options.shapes):
        parser.error("--shapes: expected B,T,H,K alone")
    if options.child:
        print(json.dumps(first_and_later_calls(options)))
        return 0
    rows = Rows(options)
    backend = ["--backend", options.backend] if options.backend else []
    for case, (name, backward) in itertools.product(options.shapes, CALLS.items()):
        row: Row = {"suite": "first-call", "shape": case.name, "backward": backward, "calls": options.calls}
        line = [__file__, "--device", str(options.device), *backend, "--shapes", case.name]
        line += ["--calls", str(options.calls), "--child", name]
        text = f"{case.name}, {name}"
        with tempfile.TemporaryDirectory() as cache:
            try:
                row |= json.loads(child(PROGRAM, *line, environment=os.environ | {CACHE: cache}))
                text += f": {row['seconds']:.1f} s, {row['kernels']} kernels"
            except ChildFailed as error:
                row["failed"] = str(error)
        if "later_random_T" in row:
            text += f"; {options.calls} steps each: {row['later_random_T']} by other lengths, "
            text += f"{row['later_random_packings']} by packings"
        rows.add(row, text)
    return rows.status


def first_and_later_calls(options: Namespace) -> dict[str, float]:
    """Seconds and kernels of this process's first call, and kernels of later ones."""
    device, (case, *_) = options.device, options.shapes
    backward = CALLS[options.child]
    sizes = {"dtype": BF16, "gate_dtype": BF16, "decay": "bounded", "final_state": False, "backward": backward}

    def step(T: int, lengths: tuple[int, ...] = ()) -> Any:
        drawn = case.having(**sizes, T=T, lengths=lengths, index_dtype=torch.int64, l2norm=True).call()
        return runner(functools.partial(kda_core.chunk_kda, backend=options.backend), on_device(drawn, device))

    first = step(case.T)
    torch.ones(1, device=device).sum().item()
    start = time.perf_counter()
    first()
    torch.ones(1, device=device).sum().item()  # waits for the device
    found: dict[str, float] = {"seconds": time.perf_counter() - start, "kernels": compiled()}
    if not backward:
        return found
    draw, before = random.Random(0), compiled()
    for _ in range(options.calls):
        step(draw.randint(1, 2 * case.T))()
    found["later_random_T"], before = compiled() - before, compiled()
    case = case.having(B=1)
    for _ in range(options.calls):
        lengths = tuple(draw.randint(1, max(1, case.T // 4)) for _ in range(draw.randint(1, 10)))
        step(sum(lengths), lengths)()
    return found | {"later_random_packings": compiled() - before}


def compiled() -> int:
    """Kernels in the cache of this process."""
    # Every kernel has one such file, Triton's and Gluon's alike.
    return len(list(Path(os.environ[CACHE]).rglob("__grp__*.json")))


if __name__ == "__main__":
    sys.exit(main())

"""What the tests of the benchmark share: a tiny problem, and a session on the CPU without peers."""

from __future__ import annotations

import torch

from kda_core.bench import command, session, shapes
from kda_core.bench.workload import Problem

CPU = torch.device("cpu")
FP32 = torch.float32
TINY = shapes.Shape(1, 12, 2, 8)
PNG = b"\x89PNG"


def problem(mode="inference", shape=TINY, gate="bounded", decay="random") -> Problem:
    return Problem(mode, shape, gate, decay, FP32, FP32)


def opened(*arguments: str) -> session.Session:
    options = command.make_parser().parse_args(["--quick", "--device", "cpu", "--peers", "none", *arguments])
    found = session.open_session(options)
    command.fill_defaults(options, found.gpu)
    return found

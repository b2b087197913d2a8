"""What the first calls of a process cost while nothing is compiled, and what later ones compile.

    python benchmarks/bench_first_call.py [--device cuda] [--backend NAME] [--shape B,T,H,K] [--calls N]

Every line is a fresh process with an empty Triton cache: the forward alone, then forward and backward. The second one
goes on: as many training steps as ``--calls`` says with random T, as many again with random packings of up to ten
sequences, and counts the kernels that either compiled. It imports torch and starts the device before it looks at the
clock. A backend without Triton compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import kda_core

CACHE = "TRITON_CACHE_DIR"


def compiled() -> int:
    """Kernels in the cache of this process."""
    # One such file lists the stages of a kernel, whatever they are: Gluon's begin later than Triton's.
    return len(list(Path(os.environ[CACHE]).rglob("__grp__*.json")))


def inputs(shape: Sequence[int], options: argparse.Namespace) -> list[Tensor]:
    """q, k, v, g and beta."""
    B, T, H, K = shape
    kind = {"device": options.device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(B, T, H, K, **kind, requires_grad=True) for _ in range(3))
    g = (-5 * torch.rand(B, T, H, K, **kind)).requires_grad_()
    return [q, k, v, g, torch.rand(B, T, H, **kind, requires_grad=True)]


def step(tensors: list[Tensor], options: argparse.Namespace, cu_seqlens: Tensor | None = None) -> None:
    """A call, and its backward where that is asked for."""
    common = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": cu_seqlens, "backend": options.backend}
    with torch.set_grad_enabled(options.backward):
        o, _ = kda_core.chunk_kda(*tensors, **common)
    if options.backward:
        torch.autograd.grad(o, tensors, torch.ones_like(o))


def later(options: argparse.Namespace) -> dict[str, int]:
    """Kernels that other lengths compile after the first call."""
    B, T, H, K = options.shape
    draw = random.Random(0)
    found = {}
    before = compiled()
    for _ in range(options.calls):
        step(inputs((B, draw.randint(1, 2 * T), H, K), options), options)
    found["random T"] = compiled() - before
    before = compiled()
    for _ in range(options.calls):
        lengths = [draw.randint(1, T // 4) for _ in range(draw.randint(1, 10))]
        cu_seqlens = torch.tensor([0, *lengths], device=options.device).cumsum(0)
        step(inputs((1, sum(lengths), H, K), options), options, cu_seqlens)
    found["random packings"] = compiled() - before
    return found


def child(options: argparse.Namespace) -> None:
    """The process whose first call is timed: prints what it found as JSON."""
    torch.ones(1, device=options.device).sum().item()
    tensors = inputs(options.shape, options)
    start = time.perf_counter()
    step(tensors, options)
    torch.ones(1, device=options.device).sum().item()  # waits for the device
    found: dict[str, float] = {"seconds": time.perf_counter() - start, "kernels": compiled()}
    if options.backward:
        found |= later(options)
    print(json.dumps(found))


def fresh(options: argparse.Namespace, backward: bool) -> dict[str, float]:
    """What a process of its own finds, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        shape = ",".join(map(str, options.shape))
        line = [sys.executable, __file__, "--child", "--device", str(options.device), "--shape", shape]
        line += ["--calls", str(options.calls)]
        line += ["--backend", options.backend] if options.backend else []
        line += ["--backward"] if backward else []
        done = subprocess.run(line, env=os.environ | {CACHE: cache}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    def shape(text: str) -> tuple[int, ...]:
        return tuple(int(n) for n in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, help="default: cuda when there is one, else cpu")
    parser.add_argument("--backend", help="default: whoever serves the device")
    parser.add_argument("--shape", type=shape, default=(1, 2048, 16, 128), metavar="B,T,H,K")
    parser.add_argument("--calls", type=int, default=100, help="with random T, and with random packings")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backward", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.child:
        child(options)
        return
    print(f"{options.backend or 'default'} on {options.device}, {options.shape}, torch {torch.__version__}")
    for backward in (False, True):
        found = fresh(options, backward)
        name = "forward and backward" if backward else "forward"
        print(f"{name}: {found.pop('seconds'):.1f} s for {found.pop('kernels'):.0f} kernels", flush=True)
        for kind, count in found.items():
            print(f"  {options.calls} steps with {kind} afterwards compiled {count:.0f}", flush=True)


if __name__ == "__main__":
    main()

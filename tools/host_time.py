"""Time that the host takes for repeated calls, in microseconds, on a GPU.

    python tools/host_time.py --backend nvidia

Calls go through the public functions and nothing waits for the device within a measurement, so that the number is the
host's time as long as the device keeps up: shapes are small. The best of many short runs is printed. To compare two
commits, run the tool at both in one session.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import kda_core

CALLS, RUNS = 100, 30
H, K = 4, 128


def arguments(B: int, T: int, H: int) -> dict[str, Any]:
    """A layer's activations, everything else in the kernel."""
    q, k, v, g = (torch.randn(B, T, H, K, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": q[..., 0].contiguous(),
        "A_log": torch.rand(H, device="cuda"),
        "dt_bias": torch.randn(H * K, device="cuda"),
        "lower_bound": -5.0,
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }


def best(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    found = float("inf")
    for _ in range(RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found = min(found, (time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return 1e6 * found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", required=True)
    backend = parser.parse_args().backend
    call = arguments(1, 64, H)
    step = arguments(8, 1, 32)
    step["initial_state"] = torch.zeros(8, 32, K, K, device="cuda")
    step["ssm_state_indices"] = torch.arange(8, device="cuda", dtype=torch.int32)
    with torch.no_grad():
        print(f"forward   {best(lambda: kda_core.chunk_kda(**call, backend=backend)):6.1f} µs")
        print(f"decoding  {best(lambda: kda_core.fused_recurrent_kda(**step, backend=backend)):6.1f} µs")
        # A length that no call had before: its plan has to be made.
        lengths = iter(range(65, 10**6))
        longer = arguments(1, 8192, H)

        def fresh() -> None:
            T = next(lengths)
            rows = {n: longer[n][:, :T] for n in ("q", "k", "v", "g", "beta")}
            kda_core.chunk_kda(**(longer | rows), backend=backend)

        print(f"forward of a new length {best(fresh):6.1f} µs")
    names = ("q", "k", "v", "g", "beta")
    leaves = {n: call[n].detach().requires_grad_() for n in names}
    o, _ = kda_core.chunk_kda(**(call | leaves), backend=backend)
    grad, wanted = torch.ones_like(o), list(leaves.values())
    print(f"backward  {best(lambda: torch.autograd.grad(o, wanted, grad, retain_graph=True)):6.1f} µs")


if __name__ == "__main__":
    main()

"""Development check of the NVIDIA backward on a GPU: hard cases against the fp64 oracle, then times beside fla.

    PYTHONPATH=.:backends/nvidia:backends/cpu python benchmarks/dev_nvidia_backward.py [--no-check] [--no-fla]

Times are of the backward alone (with each kernel's share) and, where the forward is there, of forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch
import triton
from kda_core_nvidia.chunk_backward import chunk_backward

from kda_core import reference
from kda_core.request import Request

SHAPES = [
    (1, 8192, 96, 128),
    (2, 16384, 16, 128),
    (4, 2048, 16, 128),
    (4, 4096, 64, 128),
    (8, 2048, 32, 256),
    (8, 1024, 8, 64),
]


def decays(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Natural-log decays, from mild to isolated ones of -1e30."""
    x = torch.rand(shape, device="cuda")
    return {
        "mild": lambda: torch.nn.functional.logsigmoid(4 * x - 2),
        "bounded": lambda: -5 * x,
        "steep": lambda: -1000 * x,
        "isolated": lambda: torch.where(torch.rand_like(x) < 0.1, -1e30, -x),
        "none": lambda: torch.zeros_like(x),
        "every": lambda: -(10 ** (8 * x - 5)),
    }[kind]()


def request(
    B, T, H, K, HV=None, V=None, dtype=torch.bfloat16, decay="mild", cu=None, equal_keys=False, state=False,
    gate=False, **options,
) -> Request:  # fmt: skip
    HV, V, N = HV or H, V or K, B if cu is None else len(cu) - 1
    randn = lambda *s: torch.randn(s, device="cuda").to(dtype)  # noqa: E731
    q, k, v, grad_o = randn(B, T, H, K), randn(B, T, H, K), randn(B, T, HV, V), randn(B, T, HV, V)
    k = k[:, :1].expand_as(k).contiguous() if equal_keys else k
    beta = torch.ones(B, T, HV, device="cuda") if equal_keys else torch.rand(B, T, HV, device="cuda")
    extra = {"A_log": torch.rand(HV, device="cuda"), "dt_bias": torch.randn(HV, K, device="cuda")} if gate else {}
    if state:
        extra |= {n: torch.randn(N, HV, K, V, device="cuda") for n in ("initial_state", "grad_final_state")}
    if cu is not None:
        extra["cu_seqlens"] = torch.tensor(cu, device="cuda", dtype=torch.int32)
    wanted = {"q", "k", "v", "g", "beta", *extra} & set(reference.DIFFERENTIABLE)
    return Request(
        op="chunk_kda", q=q, k=k, v=v, g=randn(B, T, HV, K) if gate else decays(decay, (B, T, HV, K)).to(dtype),
        beta=beta.to(dtype), scale=K**-0.5, grad_o=grad_o, needs_grad=frozenset(wanted), output_final_state=state,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=gate, **extra, **options,
    )  # fmt: skip


def check() -> None:
    """Relative errors of all gradients, and whether a second run gives the same bits."""
    small = {"B": 1, "T": 200, "H": 2, "K": 128, "state": True}
    cases = {kind: small | {"decay": kind} for kind in ("mild", "bounded", "steep", "isolated", "none", "every")}
    cases |= {
        "equal keys": small | {"decay": "none", "equal_keys": True},
        "grouped": small | {"B": 2, "HV": 6, "V": 64},
        "odd": small | {"K": 60, "V": 100},
        "256": small | {"K": 256},
        "64": small | {"K": 64},
        "softplus": small | {"gate": True, "use_beta_sigmoid_in_kernel": True},
        "lower bound": small | {"gate": True, "lower_bound": -5.0},
        "packed": small | {"T": 300, "cu": [0, 0, 1, 2, 130, 130, 290]},
        "float16": small | {"dtype": torch.float16},
        "float32": small | {"dtype": torch.float32},
    }
    for name, arguments in cases.items():
        torch.manual_seed(0)
        r = request(**arguments)
        got, again = chunk_backward(r).grads, chunk_backward(r).grads
        ref = reference.backward(r).grads
        parts = []
        for key in sorted(r.needs_grad):
            a, b = got[key].double(), ref[key].double()
            parts.append(f"{key} {((a - b).norm() / b.norm().clamp_min(1e-30)).item():.1e}")
        same = all(torch.equal(got[key], again[key]) for key in got)
        print(f"{name:12s}", *parts, "" if same else "NOT REPEATABLE", flush=True)


def shares(r: Request, runs: int = 5) -> str:
    """Milliseconds of every kernel of the backward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            chunk_backward(r)
        torch.cuda.synchronize()
    times = {e.key.removesuffix("_kernel"): e.self_device_time_total / runs / 1e3 for e in profile.key_averages()}
    return " ".join(f"{k[:10]} {v:.2f}" for k, v in sorted(times.items(), key=lambda x: -x[1])[:6] if v > 0.003)


def milliseconds(run) -> float:
    return statistics.median(triton.testing.do_bench(run, warmup=50, rep=200, return_mode="all"))


def peak(run) -> float:
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def fla_run(r: Request):
    """Forward and backward of fla on the same tensors."""
    from fla.ops.kda import chunk_kda

    leaves = [x.detach().clone().requires_grad_() for x in (r.q, r.k, r.v, r.g, r.beta)]

    def run():
        o, _ = chunk_kda(
            *leaves, scale=r.scale, use_qk_l2norm_in_kernel=True, safe_gate=True, lower_bound=-5.0,
        )  # fmt: skip
        return torch.autograd.grad(o, leaves, r.grad_o)

    return run


def bench(with_fla: bool) -> None:
    from kda_core_nvidia.chunk_forward import chunk_forward

    rows = []
    for shape in SHAPES:
        r = request(*shape, decay="bounded", safe_gate=True, lower_bound=-5.0)
        forward = replace(r, grad_o=None, needs_grad=frozenset(), save_for_backward=True)

        def both(r=r, forward=forward):
            out = chunk_forward(forward)
            return out, chunk_backward(replace(r, saved=out.saved))

        back = milliseconds(lambda r=r: chunk_backward(r))
        row = f"{shape!s:22s} backward {back:7.3f}  both {milliseconds(both):7.3f} ms {peak(both):5.2f} GiB"
        if with_fla:
            run = fla_run(r)
            row += f"  fla {milliseconds(run):7.3f} ms {peak(run):5.2f} GiB"
        rows.append(f"{row} | {shares(r)}")
        print(rows[-1], flush=True)
        del r, forward
    print("\n".join(["", *rows]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-fla", action="store_true")
    options = parser.parse_args()
    if not options.no_check:
        check()
    bench(with_fla=not options.no_fla)

"""Check and time the AMD backend's kernels as plain Triton on another vendor's GPU.

``python benchmarks/dev_amd_foreign.py``: small cases against the float64 oracle, forward and backward, with three runs
compared bitwise; then median times beside fla's Triton kernels when that is installed. About a minute, most of it
compilation. Speed here says nothing about an AMD chip; no slower than fla's plain Triton is what is asked.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import replace

os.environ["KDA_FOREIGN_DEVICE"] = "amd"

import torch
import triton
from kda_core_amd.chunk_backward import chunk_backward
from kda_core_amd.chunk_forward import chunk_forward
from kda_core_amd.recurrent import recurrent_forward

from kda_core import reference
from kda_core.request import Request
from kda_core.testing.cases import BF16, FP16, FP32, Case

DEVICE = torch.device("cuda")
BUDGET_SECONDS = 60.0
ALL_IN = {"dtype": BF16, "gate_dtype": BF16, "l2norm": True, "beta": "sigmoid", "state": FP32, "backward": True}

CASES = (
    Case(name="bf16 bounded", T=300, K=128, gate="lower bound", **ALL_IN),
    Case(name="bf16 softplus, packed, GVA", T=200, K=128, HV=4, lengths=(1, 0, 130, 60), gate="softplus", **ALL_IN),
    Case(name="bf16 isolated decays", T=130, K=64, dtype=BF16, decay="isolated", state=FP32, backward=True),
    Case(name="fp16 K 60 V 100", T=130, K=60, V=100, dtype=FP16, state=FP32, backward=True),
    Case(name="fp32 equal keys", T=130, K=64, decay="none", keys="equal", beta=1.0, l2norm=True, state=FP32),
    Case(name="bf16 K 256", T=70, H=1, K=256, dtype=BF16, state=FP32),
    Case(name="tokens", op="fused_recurrent_kda", B=4, T=3, K=128, **(ALL_IN | {"backward": False})),
)

SHAPES = ((1, 8192, 96), (1, 8192, 32), (8, 1024, 32))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return ((got.cpu().double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def on_device(request: Request) -> Request:
    return replace(request, **{n: x.to(DEVICE) for n, x in vars(request).items() if isinstance(x, torch.Tensor)})


def check(case: Case) -> str:
    """One line: relative errors, and whether three runs are the same bits."""
    call = case.call()
    request = call.request()
    forward = chunk_forward if call.op == "chunk_kda" else recurrent_forward
    started = time.perf_counter()
    runs = [forward(on_device(request)) for _ in range(3)]
    oracle = reference.oracle(request)
    state = runs[0].final_state
    errors = {"o": relative(runs[0].o, oracle.o), "state": relative(state, oracle.final_state)}
    same = all(torch.equal(run.o, runs[0].o) and torch.equal(run.final_state, state) for run in runs)
    if case.backward:
        names = frozenset(n for n in reference.DIFFERENTIABLE if getattr(request, n) is not None)
        asked = replace(
            request, grad_o=call.grads["o"], grad_final_state=call.grads.get("final_state"), needs_grad=names
        )
        found = [chunk_backward(on_device(asked)).grads for _ in range(3)]
        wide = {n: getattr(asked, n).double() for n in (*names, "grad_o")}
        expected = reference.ReferenceBackend().kda_core_chunk_backward(replace(asked, **wide)).grads
        errors |= {f"d{n}": relative(found[0][n], expected[n]) for n in sorted(names)}
        same &= all(torch.equal(x[n], found[0][n]) for x in found for n in names)
    listed = "  ".join(f"{n} {e:.1e}" for n, e in errors.items())
    return f"{case.name:28} {'same bits' if same else 'DIFFERS'}  {time.perf_counter() - started:4.1f} s  {listed}"


def inputs(B: int, T: int, H: int, D: int = 128) -> Request:
    g = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=DEVICE).to(dtype)

    q, k, v, raw = (normal(B, T, H, D) for _ in range(4))
    return Request(
        op="chunk_kda",
        q=q,
        k=k,
        v=v,
        g=raw,
        beta=normal(B, T, H),
        scale=D**-0.5,
        A_log=normal(H, dtype=FP32),
        dt_bias=normal(H, D, dtype=FP32),
        lower_bound=-5.0,
        initial_state=normal(B, H, D, D, dtype=FP32),
        output_final_state=True,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
    )


def median(call) -> float:
    return triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median")


def of_fla(r: Request):
    """The same forward by fla, or None without it."""
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return None
    names = ("q", "k", "v", "g", "beta", "scale", "A_log", "lower_bound", "initial_state", "output_final_state")
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
    arguments = {n: getattr(r, n) for n in (*names, *flags)} | {"dt_bias": r.dt_bias.reshape(-1)}

    def call():
        with torch.no_grad():
            return chunk_kda(**arguments)

    return call


def timings(started: float) -> None:
    print(f"\n{'B, T, H':>16} {'forward':>9} {'fla':>9} {'backward':>9}  ms")
    for B, T, H in SHAPES:
        if time.perf_counter() - started > BUDGET_SECONDS:
            print("time is up")
            return
        r = inputs(B, T, H)
        grads = replace(
            r,
            grad_o=torch.randn_like(r.v),
            grad_final_state=torch.randn_like(r.initial_state),
            needs_grad=frozenset({"q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"}),
        )
        own, fla, theirs = median(lambda r=r: chunk_forward(r)), of_fla(r), float("nan")
        if fla is not None and time.perf_counter() - started < BUDGET_SECONDS:
            try:
                theirs = median(fla)
            # Whatever another library raises on this machine must not end the table.
            except Exception as error:
                print(f"fla: {type(error).__name__}: {str(error)[:100]}")
        backward = median(lambda r=grads: chunk_backward(r))
        print(f"{f'{B}, {T}, {H}':>16} {own:9.3f} {theirs:9.3f} {backward:9.3f}", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for case in CASES:
        try:
            print(check(case), flush=True)
        # One broken case must not cost the rest of the table.
        except Exception as error:
            print(f"{case.name:28} FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)
    timings(started)


if __name__ == "__main__":
    main()

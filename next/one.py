"""A training step, (1, 8192, HEADS or 96, 128): argv bounded|softplus slow|random [profile name]."""
import hashlib
import os
import sys

import torch

import kda_core

gate, kind = sys.argv[1:3]
torch.manual_seed(0)
B, T, H, K = 1, 8192, int(os.environ.get("HEADS", "96")), 128


def r(*s):
    return torch.randn(*s, device="cuda", dtype=torch.bfloat16)


strong = kind == "random"
t = {
    "q": r(B, T, H, K), "k": r(B, T, H, K), "v": r(B, T, H, K), "g": r(B, T, H, K), "beta": r(B, T, H),
    "A_log": torch.rand(H, device="cuda") * (1 if strong else 0.1),
    "dt_bias": torch.rand(H * K, device="cuda") - (0 if strong else 2.5),
}  # fmt: skip
t = {n: x.requires_grad_() for n, x in t.items()}
how = {"safe_gate": True, "lower_bound": -5.0} if gate == "bounded" else {}
how |= {n: True for n in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")}


def step():
    for x in t.values():
        x.grad = None
    o, _ = kda_core.chunk_kda(**t, **how)
    o.backward(torch.ones_like(o))


step()
step()
torch.cuda.synchronize()
if len(sys.argv) > 3:
    first = {n: x.grad.clone() for n, x in t.items()}
    bits = {n: hashlib.md5(x.float().cpu().numpy().tobytes()).hexdigest()[:4] for n, x in first.items()}
    from torch.profiler import ProfilerActivity, profile

    same = True
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(5):
            step()
            same &= all(torch.equal(x.grad, first[n]) for n, x in t.items())
        torch.cuda.synchronize()
    us = {n: sum(e.self_device_time_total for e in p.key_averages() if n in e.key) / 5 for n in
          ("gradients_hopper", "recurrences", "prepare", "recurrence_hopper")}  # fmt: skip
    finite = all(x.isfinite().all().item() for x in first.values())
    print(f"{sys.argv[3]:8s} {gate} {kind:7s}", *(f"{n} {v:.0f}" for n, v in us.items()), "same" if same else "DIFFERS",
          "" if finite else "NOT FINITE", " ".join(bits.values()), flush=True)  # fmt: skip

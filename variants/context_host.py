"""Host time of a context's call over the plain call's; torchrun --nproc-per-node 2. 64 rows a rank, 8 heads."""
import gc, os, time, torch, torch.distributed as dist
import kda_core
from kda_core.distributed import build_cp_context
cuda = torch.cuda.is_available()
rank = int(os.environ["RANK"])
if cuda: torch.cuda.set_device(rank)
dist.init_process_group("nccl" if cuda else "gloo")
D = torch.device("cuda", rank) if cuda else torch.device("cpu")
torch.autograd.set_multithreading_enabled(False)
R, H, K = 64, 8, (128 if cuda else 32)
O = dict(use_gate_in_kernel=True, lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
torch.manual_seed(rank)
n = lambda *s: torch.randn(*s, device=D)
x = {m: n(1, R, H, K).to(torch.bfloat16 if cuda else torch.float32) for m in "qkvg"} | {"beta": n(1, R, H).to(torch.bfloat16 if cuda else torch.float32), "A_log": n(H) * .3, "dt_bias": n(H * K) * .3 - 1}
do = torch.randn_like(x["v"])
sync = torch.cuda.synchronize if cuda else (lambda: None)
cu = torch.tensor([0, 40, 90, 2 * R], device=D)
own = torch.tensor([0, 40, R] if rank == 0 else [0, 26, R], device=D)
S = lambda m: n(m, H, K, K)
kinds = {
  "dense": (dict(cp_context=build_cp_context(tokens=2 * R)), {}),
  "dense, states": (dict(cp_context=build_cp_context(tokens=2 * R), initial_state=S(1), output_final_state=True), dict(initial_state=S(1), output_final_state=True)),
  "packed": (dict(cp_context=build_cp_context(cu)), dict(cu_seqlens=own)),
  "packed, states": (dict(cp_context=build_cp_context(cu), initial_state=S(3), output_final_state=True), dict(cu_seqlens=own, initial_state=S(2), output_final_state=True)),
}
def p10(ts): return sorted(ts)[len(ts) // 10]
N = 300 if cuda else 40
def measure(more):
    pre, fwd, bwd = [], [], []
    leaves = {m: t.detach().requires_grad_() for m, t in x.items()}
    for i in range(N + 20):
        sync(); t = time.perf_counter()
        with torch.no_grad(): kda_core.chunk_kda(**x, **O, **more)
        pre.append(time.perf_counter() - t)
        sync(); t = time.perf_counter()
        o = kda_core.chunk_kda(**leaves, **O, **more)[0]
        fwd.append(time.perf_counter() - t)
        sync(); t = time.perf_counter()
        torch.autograd.grad(o, list(leaves.values()), do)
        bwd.append(time.perf_counter() - t)
    return [1e3 * p10(ts[20:]) for ts in (pre, fwd, bwd)]
gc.disable()
for name, (c, p) in kinds.items():
    for r in range(2):
        plain = measure(p); dist.barrier(); ctx = measure(c); dist.barrier()
        out = [None, None]
        dist.all_gather_object(out, (plain, ctx))
        if rank == 0 and r == 1:
            over = [[b - a for a, b in zip(*o)] for o in out]
            q = min((0, 1), key=lambda i: sum(out[i][1]))
            f = lambda v: " ".join(f"{y:.3f}" for y in v)
            print(f"{name:16} plain {f(out[q][0])}  ctx {f(out[q][1])}  over {f(over[q])}  (other process {f(over[1-q])})", flush=True)
dist.destroy_process_group()

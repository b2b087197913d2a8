"""Ours beside the Hopper kernels of cudnn-frontend 1.32, launched bare. argv: [warm I N]"""
import os, sys, time, statistics, subprocess
import torch
sys.path.insert(0, os.environ["CUD"])
sys.path.insert(0, os.environ["TREE"] + "/benchmarks")
import kda_core
from cudnn.linear_attention.hopper import cuda_host, cuda_bwd_host

INF = []
TRAIN = [(1,8192,96),(1,8192,32),(2,16384,16),(4,4096,64),(1,8192,8),(1,2048,12)]
D = "cuda"

def draw(B, T, H, kind, K=128):
    torch.manual_seed(0)
    n = lambda *s: torch.randn(*s, device=D)
    A = torch.rand(H, device=D)
    if kind == "strong":
        g, dt = n(B, T, H, K), torch.rand(H, K, device=D)
    else:
        mean = torch.exp(torch.empty(H, K, device=D).uniform_(-6.9, -0.69))  # 0.001 .. 0.5
        dt = torch.logit(mean / 5) / A.exp()[:, None]
        g = n(B, T, H, K) * 0.5 / A.exp()[None, None, :, None]
    return dict(q=n(B, T, H, K).bfloat16(), k=n(B, T, H, K).bfloat16(), v=n(B, T, H, K).bfloat16(), g=g.bfloat16(), beta=n(B, T, H).bfloat16(), A_log=A, dt_bias=dt)

RAW = dict(use_gate_in_kernel=True, lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True, state_v_first=True, backend="nvidia")
GIVEN = dict(safe_gate=True, output_final_state=True, state_v_first=True, backend="nvidia")

def packed(B, T):
    return B > 4 and T < 1024

def ours_inf(x, B, T):
    H, K = x["q"].shape[2:]
    S = torch.zeros(B, H, K, K, device=D)
    y, more = x, {}
    if packed(B, T):
        y = {n: (t.reshape(1, B * T, *t.shape[2:]) if n not in ("A_log", "dt_bias") else t) for n, t in x.items()}
        more = dict(cu_seqlens=torch.arange(0, B * T + 1, T, device=D))
    def run():
        with torch.no_grad():
            return kda_core.chunk_kda(**y, initial_state=S, **RAW, **more)
    return run

class Cud:
    def __init__(self, x, B, T, given):
        q = x["q"]; H, K = q.shape[2:]
        self.B, self.T, self.H = B, T, H
        f = lambda t: t.reshape(-1, *t.shape[2:]).contiguous()
        self.x = {n: f(x[n]) for n in ("q", "k", "v")}
        self.x |= {n: f(x[n]).float() for n in ("g", "beta")}
        self.A, self.dt = x.get("A_log", self.x["q"]), x.get("dt_bias", self.x["q"])
        self.given = given
        self.cu = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=D)
        self.S = torch.zeros(B, H, K, K, device=D); self.F = torch.empty_like(self.S)
        self.o = torch.empty_like(self.x["v"])
        if given:
            self.dF = torch.zeros_like(self.S); self.dS = torch.empty_like(self.S)
            self.do = torch.randn_like(self.x["v"])
            self.d = {n: torch.empty_like(t) for n, t in self.x.items()}
            self.ws = torch.empty(cuda_bwd_host.workspace_bytes(B * T, H, B), dtype=torch.uint8, device=D)
    def forward(self):
        p = lambda t: t.data_ptr()
        fl = 0 if self.given else 7
        cuda_host.launch(0, torch.cuda.current_stream().cuda_stream, *(p(self.x[n]) for n in ("q", "k", "v", "g", "beta")), p(self.cu), p(self.S), p(self.o), p(self.F), self.B * self.T, self.B, self.H, a_log=p(self.A), dt_bias=p(self.dt), gate_lower_bound=-5.0, flags=fl)
    def step(self):
        self.forward()
        p = lambda t: t.data_ptr()
        cuda_bwd_host.launch(0, torch.cuda.current_stream().cuda_stream, p(self.ws), p(self.do), *(p(self.x[n]) for n in ("q", "k", "v", "g", "beta")), p(self.cu), p(self.S), p(self.dF), *(p(self.d[n]) for n in ("q", "k", "v", "g", "beta")), p(self.dS), self.B * self.T, self.H, self.B)

def given_of(x):
    l2 = lambda t: (t.float() * (t.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16()
    g = -5.0 * torch.sigmoid(x["A_log"].exp()[:, None] * (x["g"].float() + x["dt_bias"]))
    return dict(q=l2(x["q"]), k=l2(x["k"]), v=x["v"], g=g, beta=x["beta"].float().sigmoid())

def ours_step(x, kw, B):
    H, K = x["q"].shape[2:]
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    S = torch.zeros(B, H, K, K, device=D)
    do = torch.randn_like(x["v"])
    def run():
        o, _ = kda_core.chunk_kda(**leaves, initial_state=S, **kw)
        return torch.autograd.grad(o, list(leaves.values()), do)
    return run

flush = torch.empty(64 * 2**20, device=D)
def timed(f, n=15):
    f(); torch.cuda.synchronize()
    ts = []
    for _ in range(n):
        flush.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); f(); b.record(); torch.cuda.synchronize()
        ts.append(a.elapsed_time(b))
    return statistics.median(ts)
def replay(f):
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(4): f()
    torch.cuda.current_stream().wait_stream(s); torch.cuda.synchronize()
    gr = torch.cuda.CUDAGraph()
    with torch.cuda.graph(gr): f()
    return timed(gr.replay)

def cases():
    yield from (("inf", *s) for s in INF)
    yield from (("train", *s) for s in TRAIN)

def one(kind, B, T, H, regime, warm=False):
    x = draw(B, T, H, regime)
    if kind == "inf":
        f, c = ours_inf(x, B, T), Cud(x, B, T, False)
        o, _ = f(); c.forward(); torch.cuda.synchronize()
        if warm: return
        far = float((o.reshape(-1).float() - c.o.reshape(-1).float()).norm() / o.float().norm())
        a, h, b = replay(f), timed(f), replay(c.forward)
        print(f"prefill {B},{T},{H} {regime:6} ours {a:.4f} (host {h:.4f})  cudnn {b:.4f}  ratio {b/a:.2f}  differ {far:.1e}", flush=True)
    else:
        y = given_of(x)
        f, g, c = ours_step(x, RAW, B), ours_step(y, GIVEN, B), Cud(y, B, T, True)
        f(); d = g(); c.step(); torch.cuda.synchronize()
        if warm: return
        c.do.copy_(torch.randn_like(c.do))
        a, e, h, b = replay(f), replay(g), timed(f), replay(c.step)
        print(f"step {B},{T},{H} {regime:6} ours raw {a:.4f} (host {h:.4f}) given {e:.4f}  cudnn {b:.4f}  ratio raw {b/a:.2f} given {b/e:.2f}", flush=True)
    del x

if __name__ == "__main__":
    t0 = time.time()
    if len(sys.argv) > 1:
        i, n = int(sys.argv[2]), int(sys.argv[3])
        for j, c in enumerate(cases()):
            if j % n == i: one(*c, "slow", warm=True); one(*c, "strong", warm=True)
        sys.exit()
    ps = [subprocess.Popen([sys.executable, __file__, "warm", str(i), "10"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for i in range(10)]
    for i, p in enumerate(ps):
        err = p.communicate()[1].decode()
        if p.returncode: print("warm", i, p.returncode, err[-600:], flush=True)
    print(torch.cuda.get_device_name(), f"warm {time.time()-t0:.0f} s", flush=True)
    for c in cases():
        for r in ("strong", "slow"):
            try: one(*c, r)
            except Exception as e: print(c, r, repr(e)[:300], flush=True)
            torch.cuda.empty_cache()
    print(f"done {time.time()-t0:.0f} s", flush=True)

"""argv: [worker NAMES...]  Bits of every variant beside ``recurrent``; times, by turns, cold."""
import sys, time, statistics, subprocess, importlib, itertools, os
import torch
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import dv_list
import kda_core_nvidia.plans.recurrent as P
from dataclasses import replace
from kda_core_nvidia.choose import choose_recurrent
from kda_core_nvidia.choose.recurrent import recurrent_config
from kda_core_nvidia.run import chip, run_plan
from kda_core import empty_records
from kda_core.request import Request
from kda_core.triton_lib.plan import metadata
DEV, D = "cuda", 128
BF, F = torch.bfloat16, torch.float32
KINDS = [(False, BF), (True, BF), (False, F), (True, F)]
T0 = time.time()

def plan_for(request, name):
    """``None``: ``recurrent`` itself."""
    mis = frozenset(n for n, x in vars(request).items() if isinstance(x, torch.Tensor) and x.data_ptr() & 15)
    r = metadata(request, mis); ch = choose_recurrent(r, chip(request.device))
    if name is None:
        ch = replace(ch, draft=None, short=recurrent_config(r.N * r.HV, r.K, r.V, r.state_v_first, r.state_dtype))
        return P.plan_recurrent(r, ch)
    regs, warps = dv_list.V[name]
    assert ch.draft is not None
    if regs: ch = replace(ch, draft=replace(ch.draft, registers=regs))
    old = P.recurrent_draft, P.DRAFT_WARPS
    P.recurrent_draft, P.DRAFT_WARPS = importlib.import_module("dv_" + name).recurrent_draft, warps
    try: return P.plan_recurrent(r, ch)
    finally: P.recurrent_draft, P.DRAFT_WARPS = old

def small(N, T, vf, st, dtype, gate, seed):
    torch.manual_seed(seed); H, HV = 2, 4
    w = {"q": (H, D), "k": (H, D), "v": (HV, D), "g": (HV, D), "beta": (HV,)}
    sizes = [torch.Size(x).numel() for x in w.values()]
    parts = torch.randn(N, T, sum(sizes) + 44, device=DEV).to(dtype)[..., 16:-28].split(sizes, dim=-1)
    c = {n: x.unflatten(-1, y) for (n, y), x in zip(w.items(), parts)}
    if gate == "given": c["g"] = -c["g"].abs()
    else:
        c |= dict(use_gate_in_kernel=True, A_log=torch.rand(HV, device=DEV), dt_bias=torch.randn(HV, D, device=DEV))
        if gate == "bounded": c["lower_bound"] = -5.0
    slots = torch.randperm(N + 2, device=DEV)
    if N > 1: slots[1] = -1
    pool = torch.randn(N + 2, 2 * HV, D, D, device=DEV).to(st)[:, ::2]
    e = empty_records(N, T, HV, D, D, device=DEV).normal_()
    e[..., D:2 * D] = torch.rand(N, T, HV, D, device=DEV) * 1.5 - 0.5
    c |= dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=vf, initial_state=pool, ssm_state_indices=slots[:N])
    return c, dict(commit=e, num_committed=torch.arange(N, device=DEV) % (T + 2))

def once(c, name):
    pool = c["initial_state"]; own = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype, device=DEV).copy_(pool)
    rec = torch.full_like(empty_records(*c["v"].shape[:3], D, D, device=DEV), 7.0)
    req = Request(op="fused_recurrent_kda", **(c | dict(scale=D ** -0.5, inplace_final_state=True, update_state=False, initial_state=own, records=rec)))
    return [run_plan(plan_for(req, name), req)["o"], rec, own]

REF = "dv_ref"
FULL = ("v0", "esml", "esmlr")
F32 = ("v0", "e1", "e2", "em", "el", "esml", "esmlu")

def kinds_of(name):
    return [k for k in KINDS if k[1] is BF or name in F32]

def calls_of(name):
    for vf, st in kinds_of(name):
        tag = f"{'V' if vf else 'K'}{str(st)[6:]}"
        for gate, dtype, N, com in [("bounded", BF, 6, True)] + [x for x in (("bounded", BF, 6, False), ("given", F, 6, True), ("bounded", BF, 130, True)) if name in FULL and st is BF]:
            c, more = small(N, 4, vf, st, dtype, gate, N)
            yield f"{tag}_{gate}_{str(dtype)[6:]}_{N}_{com}", c | (more if com else {})

def bits(name):
    bad, n = [], 0
    for tag, call in calls_of(name):
        found = [x.cpu().contiguous() for x in once(call, name)]
        f = f"{REF}/{tag}.pt"
        if name == "v0":
            torch.save(found, f + ".tmp"); os.rename(f + ".tmp", f); n += 1; continue
        while not os.path.exists(f):
            time.sleep(0.2)
            if time.time() - T0 > 90: return f"bits {name}: no reference {tag}"
        n += 1
        same = [bool((x.view(torch.uint8) == y.view(torch.uint8)).all()) for x, y in zip(torch.load(f), found)]
        if not all(same): bad.append((tag, same, [float((x.float() - y.float()).abs().max()) for x, y in zip(torch.load(f), found)]))
    return f"bits {name}: {n} calls " + ("written" if name == "v0" else "ALL EQUAL" if not bad else f"{len(bad)} DIFFER {bad[:2]}")

def timing(vf, st, name, N=64, T=4, H=32, count=4, calls=8, state={}):
    key = (vf, st, N)
    if state.get("key") != key:
        state.clear(); torch.manual_seed(0)
        pool = torch.empty(max(calls * N, 64), H, D, D, device=DEV, dtype=st).normal_()
        t = {n: torch.randn(N, T, H, D, device=DEV, dtype=BF) for n in "qkvg"} | {"beta": torch.randn(N, T, H, device=DEV, dtype=BF)}
        rec, ear = (empty_records(N, T, H, D, D, device=DEV) for _ in range(2)); ear.normal_().mul_(1e-3)
        order = torch.randperm(len(pool), device=DEV).to(torch.int32)
        state.update(key=key, pool=pool, t=t, rec=rec, ear=ear, order=order, A=torch.rand(H, device=DEV), dt=torch.rand(H, D, device=DEV), out=torch.empty(N, T, H, D, device=DEV, dtype=BF))
    s = state; reqs = []
    counts = None if count is None else torch.full((N,), count, device=DEV)
    for i in range(calls):
        m = {} if count is None else dict(commit=s["ear"], num_committed=counts)
        reqs.append(Request(op="fused_recurrent_kda", **s["t"], A_log=s["A"], dt_bias=s["dt"], lower_bound=-5.0, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=vf, initial_state=s["pool"], ssm_state_indices=s["order"][i * N:(i + 1) * N], out=s["out"], records=s["rec"], scale=D ** -0.5, inplace_final_state=True, update_state=False, **m))
    plan = plan_for(reqs[0], name)
    def go():
        for r in reqs: run_plan(plan, r)
    go(); torch.cuda.synchronize()
    st_ = torch.cuda.Stream(); st_.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(st_): go()
    torch.cuda.current_stream().wait_stream(st_); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): go()
    return g, counts, calls

def elapsed(g, calls):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); g.replay(); b.record(); torch.cuda.synchronize(); return 1e3 * a.elapsed_time(b) / calls

if __name__ == "__main__":
    names = list(dv_list.V)
    if sys.argv[1:2] == ["worker"]:
        for n in sys.argv[2:]:
            try:
                print(bits(n), flush=True)
                for vf, st in kinds_of(n): timing(vf, st, n)
            except Exception as e: print("worker", n, repr(e)[-300:], flush=True)
        sys.exit()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    os.makedirs(REF, exist_ok=True)
    ps = [subprocess.Popen([sys.executable, __file__, "worker", n], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for n in names]
    for n, p in zip(names, ps):
        out, err = p.communicate()
        print(out.strip() or f"{n} rc {p.returncode} {err[-300:]}", flush=True)
    print(f"compiled {time.time()-T0:.0f} s", flush=True)
    x = torch.empty(67108864 // 2 * 2, dtype=BF, device=DEV); y = torch.empty_like(x)
    for _ in range(3): y.copy_(x)
    ev = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    ev[0].record(); [y.copy_(x) for _ in range(10)]; ev[1].record(); torch.cuda.synchronize()
    print(f"copy {2*x.nbytes*10/ev[0].elapsed_time(ev[1])/1e9:.2f} TB/s", flush=True)
    del x, y
    table = {}
    for vf, st in KINDS:
        graphs = {}
        for n in names:
            if (vf, st) not in kinds_of(n): continue
            try: graphs[n] = timing(vf, st, n)
            except Exception as e: print("time", n, repr(e)[-200:], flush=True)
        ts = {n: [] for n in graphs}
        for turn in range(25):
            for n, (g, _, calls) in graphs.items(): ts[n].append(elapsed(g, calls))
        table[vf, st] = {n: (statistics.median(v[5:]), min(v[5:])) for n, v in ts.items()}
        # slope: the same graphs with other counts
        if st is BF:
            for c in (0, 1, 2):
                for n in ("v0", "esml"):
                    if n in graphs:
                        graphs[n][1].fill_(c); v = [elapsed(graphs[n][0], graphs[n][2]) for _ in range(12)]
                        print(f"{'V' if vf else 'K'} first {str(st)[6:]} {n} commit of {c}: {statistics.median(v[3:]):.1f}", flush=True)
        graphs.clear(); torch.cuda.empty_cache()
        print(f"{'V' if vf else 'K'} first {str(st)[6:]}: done {time.time()-T0:.0f} s", flush=True)
    print("median (least) us;", *(f"{'V' if vf else 'K'} {str(st)[6:]}" for vf, st in table))
    for n in names:
        print(f"{n:8}", *(f"{table[k][n][0]:7.1f} ({table[k][n][1]:6.1f})" if n in table[k] else "      -        " for k in table), flush=True)

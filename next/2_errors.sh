# 90 s. Every gradient of calls in pairs beside float64: this tree / gradients_hopper / Triton's kernel; bits for 1, 3,
# 7 and all programs. Softplus and strong decays first.
export PYTHONPATH=.gpu/dist:.:backends/nvidia:backends/cpu
cat > /tmp/errors.py <<'P'
import sys, types, time
try: import pytest
except ImportError:
    class M:
        def __getattr__(self, n): return M()
        def __call__(self, *a, **k): return a[0] if a and callable(a[0]) else M()
    sys.modules["pytest"] = M()
m = types.ModuleType("installed"); m.need_backend = m.need_package = lambda *a, **k: None
sys.modules["installed"] = m
sys.path.insert(0, "tests/nvidia")
import torch
torch.set_num_threads(4)
import test_nvidia_gradients_hopper as t
import kda_core_nvidia.choose.backward as b
new = b.gradients_persistent; old = lambda r: b.decays_bounded(r) and new(r)
names = [n for n in t.CASES if n.startswith("pairs,") and ("softplus" in n or "given" in n)][int(sys.argv[1])::int(sys.argv[2])]
for name in names:
    sq = {}; same = True; D = 4
    for d in range(D):
        c = t.case(name, d); r = t.request_of(c); e = t.exact_gradients(c)
        found = [t.gradients(r)]
        b.gradients_persistent = old; found.append(t.gradients(r)); b.gradients_persistent = new
        found.append(t.gradients(r, hopper=False))
        for p in (1, 3, 7, 0, 0):
            again = t.gradients(r, programs=p)
            same &= all(torch.equal(again[n], found[0][n]) for n in again)
        for n in e:
            x = sq.setdefault(n, [0., 0., 0.])
            for i, f in enumerate(found): x[i] += t.error(f[n], e[n]) ** 2 / D
    print(f"{name:28s} same {same} " + " ".join(f"{n} " + "/".join(f"{v**.5*1e3:.2f}" for v in x) for n, x in sq.items()), flush=True)
P
for i in 0 1 2; do timeout 85 python3 /tmp/errors.py $i 3 2>&1 | grep -v Warn & done; wait

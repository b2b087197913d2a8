# 80 s. Where warps of gradients_hopper_persistent wait, by instruction (ncu), and what the instruction caches miss.
export PYTHONPATH=.gpu/dist:.:backends/nvidia:backends/cpu
cat > /tmp/sass.py <<'P'
import csv, sys, collections
rows = list(csv.reader(l for l in open(sys.argv[1]) if l.startswith('"'))); B = int(sys.argv[2])
at = next(i for i, r in enumerate(rows) if "Source" in r); head = rows[at]
src = head.index("Source"); tot = next(i for i, h in enumerate(head) if h.startswith("Warp Stall Sampling (All"))
st = [i for i, h in enumerate(head) if h.startswith("stall_") and "not" not in h.lower()]
num = lambda x: int(float(x.replace(",", ""))) if x.strip() else 0
rows = [r for r in rows[at + 1:] if len(r) == len(head)]
whole = sum(num(r[tot]) for r in rows) or 1
count = lambda c: collections.Counter({head[i][6:]: sum(num(r[i]) for r in c) for i in st})
print("samples", whole, "instructions", len(rows), [(k, f"{v/whole*100:.1f}%") for k, v in count(rows).most_common(10)])
for b in range(0, len(rows), B):
    c = rows[b:b + B]; s = sum(num(r[tot]) for r in c)
    if s < whole * .003: continue
    top = max(c, key=lambda r: num(r[tot]))
    print(b, f"{s/whole*100:4.1f}%", " ".join(f"{k} {v/whole*100:.1f}" for k, v in count(c).most_common(3)), "| top", c.index(top) + b, f"{num(top[tot])/whole*100:.1f}", top[src].strip()[:30])
P
V=${1:-own}
for g in bounded softplus; do PYTHONPATH=.variants/$V:$PYTHONPATH python3 next/one.py $g slow & done; wait
for g in bounded softplus; do
PYTHONPATH=.variants/$V:$PYTHONPATH ncu --kernel-name gradients_hopper_persistent --launch-count 1 --launch-skip 1 --section SourceCounters --csv --page source python3 next/one.py $g slow > /tmp/$g.csv 2>/tmp/$g.err
echo "== $V $g"; python3 /tmp/sass.py /tmp/$g.csv 80 | cut -c1-110
PYTHONPATH=.variants/$V:$PYTHONPATH ncu --kernel-name gradients_hopper_persistent --launch-count 1 --launch-skip 1 --metrics "regex:sm__icc.*sum$,regex:gcc__.*sum$,regex:sm__inst_executed$" --csv --page raw python3 next/one.py $g slow 2>/dev/null | tail -n 3 | cut -c1-1500
done

import json, sys, os
names = sys.argv[1:]
base = json.load(open(f"/tmp/short_{names[0]}.json"))
for n in names:
    p = f"/tmp/short_{n}.json"
    if not os.path.exists(p): print(n, "MISSING"); continue
    r = json.load(open(p))
    print(f"{n:22s}", "; ".join(f"{w} {x['us'][0]:.0f}({x['us'][1]:.0f}){'' if x['same'] else ' UNSTABLE'}{'' if w not in base or x['bits']==base[w]['bits'] else ' DIFF'}" for w, x in r.items()))
    for w, x in r.items():
        if "kernels" in x: print("    ", w, x["kernels"])

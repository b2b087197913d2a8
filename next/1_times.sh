# 90 s. Kernels of each variant in turns, and the bits: bounded must be the same in all.
export PYTHONPATH=.gpu/dist:.:backends/nvidia:backends/cpu
V=$(ls .variants)
for v in $V; do for g in bounded softplus; do PYTHONPATH=.variants/$v:$PYTHONPATH python3 next/one.py $g slow >/dev/null 2>/tmp/err_$v$g & done; done; wait
tail -qn 1 /tmp/err_*
for turn in 1 2; do for v in $V; do for g in "bounded random" "softplus slow" "softplus random"; do
PYTHONPATH=.variants/$v:$PYTHONPATH timeout 30 python3 next/one.py $g $v 2>/dev/null || echo "$v $g FAILED"; done; done; done

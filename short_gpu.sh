# For the next GPU session; not for the tree. From the repository root on the GPU machine, after
#   mkdir base_nvidia && git archive main backends/nvidia/kda_core_nvidia | tar x --strip-components=2 -C base_nvidia
# Call 1: bash short_gpu.sh tests   (names of what fails are printed last; compiling takes nearly all of its time)
# Call 2: bash short_gpu.sh bench   (main beside this branch; "DIFF": other bits than main's, "UNSTABLE": five runs differ)
P=.gpu/dist:.:backends/nvidia:backends/cpu; B=.gpu/dist:.:base_nvidia:backends/cpu
if [ "$1" = tests ]; then
  PYTHONPATH=$P timeout ${LIMIT:-240} python3 -m pytest -q -n 14 --backend=nvidia -rf --tb=short \
    tests/nvidia/test_nvidia_prepare_hopper.py tests/nvidia/test_nvidia_hopper.py -k "short or chunk or own or slots" > /tmp/short_tests.log 2>&1
  grep -E "^E  |^FAILED|passed|failed" /tmp/short_tests.log | tail -n 60
  exit
fi
nvidia-smi --query-gpu=name,clocks.sm --format=csv
rm -f /tmp/short.lock /tmp/short.go /tmp/short_*.json
A="256x32;256x32 vf;256x32 soft;256x16;128x64;100mix;200x32+8192;64x128"
W=
go() { # name, path, shapes to compile
  n=$1; export TRITON_CACHE_DIR=/tmp/tc_$n PYTHONPATH=$2
  SHAPES="$A" timeout ${LIMIT:-88} python3 short_bench.py $n > /tmp/short_$n.log 2>&1 &
  IFS=";"; for c in $3; do timeout 60 python3 short_bench.py $n "$c" > "/tmp/shortc_${n}_$c.log" 2>&1 & W="$W;$!"; done; unset IFS
}
C="256x32;256x32 vf;256x32 soft;128x64;100mix;200x32+8192;64x128"
export PROF=1
go base $B "$C"
go new $P "$C"
IFS=";"; for w in $W; do [ "$w" ] && wait $w; done; unset IFS
touch /tmp/short.go
wait
cat /tmp/shortc_*.log | grep compiled
for f in /tmp/short*_*.log; do grep -H -i "error" "$f" | tail -n 2; done
tail -n 1 -q /tmp/short_base.log /tmp/short_new.log
python3 short_table.py base new

# At home, before the calls: the backend of each commit beside the tree, so that one call times them all.
#   main: before; inside: strong decays inside the kernel; order: the same, phases reordered; own: reordered, strong
#   decays in a launch of their own (this branch).
set -e
rm -rf .variants
for pair in "$@"; do
    name=${pair%%=*} commit=${pair#*=}
    mkdir -p .variants/$name
    git archive $commit backends/nvidia/kda_core_nvidia | tar x -C .variants/$name --strip-components=2
done
ls .variants

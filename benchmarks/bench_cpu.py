"""``kda bench --device cpu``: the CPU backend beside the other implementations for CPUs."""

import sys

from kda_core.bench.command import main

if __name__ == "__main__":
    sys.exit(main(["--device", "cpu", *sys.argv[1:]]))

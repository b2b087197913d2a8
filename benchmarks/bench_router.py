"""``kda bench router``: what kda_core adds to a call and to ``import torch``."""

import sys

from kda_core.bench.command import main

if __name__ == "__main__":
    sys.exit(main(["router", *sys.argv[1:]]))

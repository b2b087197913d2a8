"""``python -m kda_core.bench``: the same as ``kda bench``, without the extra ``cli``."""

import sys

from kda_core.bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Time a training step, forward and every gradient of ``chunk_kda``, beside other implementations.

    python benchmarks/training.py --peers fla --warm 8 --json training.json

See ``peers.py`` for what a row has, and ``inputs.py`` for gates and decays.
"""

from __future__ import annotations

import sys
from functools import partial

import peers

SHAPES = {
    "cuda": ("1,8192,96,128", "1,8192,32,128", "2,16384,16,128", "1,8192,8,128", "1,2048,12,128"),
    "cpu": ("1,512,8,128", "1,512,8,64"),
}


main = partial(peers.main, "training", __file__, __doc__, SHAPES, ("fla", "transformers"))


if __name__ == "__main__":
    sys.exit(main())

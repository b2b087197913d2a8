"""Time a forward of ``chunk_kda`` with float32 states, V first, in and out, beside other implementations.

    python benchmarks/inference.py --peers fla --warm 8 --json inference.json

See ``peers.py`` for what a row has, and ``inputs.py`` for gates and decays.
"""

from __future__ import annotations

import sys
from functools import partial

import peers

SHAPES = {
    "cuda": (
        "1,8192,96,128", "1,8192,32,128", "1,8192,4,128", "1,2048,12,128", "1,512,64,128", "8,1024,32,128",
        "1,8192,32,128:packed=16x512",
    ),
    "cpu": ("1,512,8,128", "1,2048,8,128", "1,2048,8,64", "8,64,4,64"),
}  # fmt: skip


main = partial(peers.main, "inference", __file__, __doc__, SHAPES, tuple(peers.PEERS))


if __name__ == "__main__":
    sys.exit(main())

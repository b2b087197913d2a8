"""How far one forward on a CPU raises the resident set of a fresh process, by implementation; on Linux.

    python benchmarks/memory.py --shapes 1,4096,8,128

A small call before it loads everything that is loaded lazily. On a GPU the programs that measure time also measure
memory.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from inputs import draw, parse_shape
from measuring import OURS, PROGRAM, ChildFailed, Parser, Row, Rows, child
from peers import PEERS, add_peers, load_peers

import kda_core
from kda_core._bench import runner

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__file__, __doc__)
    add_peers(parser)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[parse_shape("1,4096,8,128")])
    parser.add_argument(
        "--child", choices=(OURS, *PEERS), help="print the bytes of this implementation, in this process"
    )
    options = parser.parse(arguments)
    if options.device.type != "cpu" or not RESET.exists():
        parser.error("--device: memory is measured on CPUs under Linux")
    if options.child:
        function = functools.partial(kda_core.chunk_kda, backend=options.backend)
        print(grown(options.shapes[0], PEERS[options.child][2]() if options.child != OURS else function))
        return 0
    functions, versions = load_peers(parser, options)
    rows = Rows(options, versions)
    backend = ["--backend", options.backend] if options.backend else []
    for case in options.shapes:
        sizes, left_out, each = {}, {}, case.B * case.T * (case.HV or case.H)
        for name in (OURS, *functions):
            try:
                line = (__file__, "--device", "cpu", *backend, "--shapes", case.name, "--child", name)
                sizes[name] = int(child(PROGRAM, *line))
            except ChildFailed as error:
                left_out[name] = str(error)
        row: Row = {"suite": "memory", "shape": case.name, "left_out": left_out}
        row["implementations"] = {name: {"grown_bytes": size} for name, size in sizes.items()}
        row |= {"failed": left_out.pop(OURS)} if OURS in left_out else {}
        lines = (f"  {n:15} {x / 2**20:7.0f} MiB {x / each:7.0f} bytes a token and head" for n, x in sizes.items())
        rows.add(row, f"{case.name}: a forward's memory beside its inputs", *lines)
    return rows.status


def grown(case, function) -> int:
    """Bytes that one forward adds to the resident set of this process."""
    device = torch.device("cpu")
    # A multiple of every chunk's length.
    small = case.having(T=64, lengths=(64,) if case.lengths else ())
    for part in (small, case):
        call, _ = draw(part, "inference", "given", "random", torch.float32, device)
        run = runner(function, call)
        if part is small:
            run()
    # 5 resets the peak (proc(5)), which importing may have raised above the call's.
    RESET.write_text("5")
    before = status("VmRSS")
    kept = run()
    found = status("VmHWM") - before
    del kept
    return found


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    return next(1024 * int(x.split()[1]) for x in STATUS.read_text().splitlines() if x.startswith(name + ":"))


if __name__ == "__main__":
    sys.exit(main())

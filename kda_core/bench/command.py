"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kda_core.bench import regimes, shapes
from kda_core.errors import KdaError

INSTALL = 'pip install "kda-core[bench]"'
EXIT_FAILED = 1
EXIT_BAD_ARGUMENTS = 2
WIDTH = 150
"""Columns of the tables where the output is no terminal."""

DEFAULTS: dict[str, Any] = {
    "set": "headline",
    "gate": ("bounded", "softplus"),
    "decay": ("random", "slow"),
    "errors": True,
    "profile": False,
    "warm": False,
    "warm_only": False,
    "jobs": None,
    "retune": False,
    "compile": False,
    "sizes": None,
    "heads": None,
    "calls": None,
    "batches": None,
    "processes": None,
    "call_limit_us": None,
    "import_limit_ms": None,
    "only": "",
    "draws": 1,
    "one_config": False,
    "markdown": None,
}
"""Defaults of options that only some suites read. The parser's own default is None: the user gave no value."""

ON_A_CPU = {"gate": ("bounded",), "decay": ("random",)}
QUICK = {"set": "quick", "gate": ("bounded",), "decay": ("random",)}
"""Other defaults on a CPU, where a row takes seconds, and with --quick."""


def main(arguments: Sequence[str]) -> int:
    """Measure, or show earlier measurements.
    Returns:
        0; 1 when a row failed or a limit was exceeded; 2 for bad arguments or when the extra ``bench`` is missing.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    # Fail before an hour of measuring, not after it.
    for module in ("rich", *(["matplotlib"] if options.plot else [])):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != module:
                raise
            print(f"The benchmark needs {module}: {INSTALL}", file=sys.stderr)
            return EXIT_BAD_ARGUMENTS
    from kda_core.bench import run

    try:
        return run.run(options)
    except (ValueError, KdaError) as error:
        print(f"kda bench: {error}", file=sys.stderr)
        return EXIT_BAD_ARGUMENTS


def several(known: Sequence[str]) -> Any:
    """Parse words separated by commas; "all" means every one."""

    def read(text: str) -> tuple[str, ...]:
        words = tuple(known) if text == "all" else tuple(text.split(","))
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)} or all, got {', '.join(unknown)}")
        return words

    return read


def _shape(text: str) -> shapes.Shape:
    try:
        return shapes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(kind: type) -> Any:
    def read(text: str) -> Any:
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
        return number

    read.__name__ = kind.__name__
    return read


def make_parser() -> argparse.ArgumentParser:
    """Every option of every suite."""
    parser = argparse.ArgumentParser(
        prog="kda bench",
        description="Time kda_core beside the other implementations of KDA that are installed.",
        epilog="Suites: see --list. Options of a suite are refused where none of the chosen suites reads them.",
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="default: training inference")
    parser.add_argument("--list", action="store_true", help="show suites, shapes and peers, and measure nothing")
    common = parser.add_argument_group("all suites")
    common.add_argument("--backend", help="kda_core's backend; default: the one that it chooses")
    common.add_argument("--device", help="default: cuda where there is one, else cpu")
    common.add_argument(
        "--peers", metavar="NAME,...", help="some of the peers, or none; default: all that are installed"
    )
    common.add_argument("--threads", type=_positive(int), help="of torch, on a CPU")
    common.add_argument("--quick", action="store_true", help="tiny shapes, few repetitions: only that it runs")
    common.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file, after every row")
    common.add_argument("--plot", type=Path, metavar="FILE", help="draw the times (PNG, SVG or PDF)")
    common.add_argument("--from", dest="read", type=Path, nargs="+", metavar="JSON", help="show these, measure nothing")
    _add_speed(parser)
    _add_decode(parser)
    _add_accuracy(parser)
    _add_router(parser)
    return parser


def _add_speed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training, inference, forward, kept")
    group.add_argument("--shapes", type=_shape, nargs="+", metavar="SHAPE", help=shapes.SYNTAX)
    group.add_argument("--set", choices=shapes.SETS, help="shapes that belong together; default: headline")
    group.add_argument(
        "--gate",
        type=several(regimes.GATES),
        help="given, bounded, softplus or all; default: bounded,softplus; CPU: bounded",
    )
    group.add_argument(
        "--decay",
        type=several(regimes.DECAYS),
        help="random, slow, initialised or all; default: random,slow; CPU: random",
    )
    group.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16; on a CPU float32"
    )
    group.add_argument("--gate-dtype", choices=("bfloat16", "float16", "float32"), help="of g and beta; default: of q")
    group.add_argument("--seconds", type=_positive(float), help="of timing, for each row")
    on = argparse.BooleanOptionalAction
    group.add_argument("--graph", action=on, default=None, help="replay calls from CUDA graphs, too (default)")
    group.add_argument("--errors", action=on, default=None, help="compare with the float64 oracle, too (default)")
    group.add_argument("--profile", action="store_true", default=None, help="also the time of every kernel")
    group.add_argument(
        "--warm", action="store_true", default=None, help="compile in parallel processes first: autotuners take minutes"
    )
    group.add_argument(
        "--warm-only", action="store_true", default=None, help="the same, and measure nothing: for a run that follows"
    )
    group.add_argument("--jobs", type=_positive(int), help="processes of --warm; default: one a core")
    group.add_argument(
        "--retune", action="store_true", default=None, help="with --warm: autotuners choose again in the timed process"
    )
    # --warm starts processes with this option: run every call once, report nothing.
    group.add_argument("--compile", action="store_true", default=None, help=argparse.SUPPRESS)


def _add_decode(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decode")
    group.add_argument("--sizes", type=_positive(int), nargs="+", metavar="N", help="sequences; default: 1, 2, 4, …")
    group.add_argument("--heads", type=_positive(int), help="default: 32")


def _add_accuracy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accuracy")
    group.add_argument("--only", metavar="TEXT", help="only the cases whose names contain this")
    group.add_argument("--draws", type=_positive(int), help="draws of every case's inputs; default: 1")
    group.add_argument("--one-config", action="store_true", default=None, help="spare the peers' autotuning")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables between this file's markers")


def _add_router(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("router, first-call")
    group.add_argument("--calls", type=_positive(int), help="a batch (200), or steps after the first call (100)")
    group.add_argument("--batches", type=_positive(int), help="of calls; default: 300")
    group.add_argument("--processes", type=_positive(int), help="fresh processes that time the import; default: 9")
    group.add_argument("--call-limit-us", type=_positive(float), help="exit 1 when the plainest call costs more")
    group.add_argument("--import-limit-ms", type=_positive(float), help="exit 1 when the import takes longer")


def written(options: argparse.Namespace) -> set[str]:
    """Names of the suites' own options that the user gave."""
    own = {*DEFAULTS, "shapes", "dtype", "gate_dtype", "graph", "seconds"}
    return {name for name in own if getattr(options, name) is not None}


def fill_defaults(options: argparse.Namespace, gpu: bool) -> None:
    """Fill in the defaults of options that the user did not give."""
    defaults = DEFAULTS | {"graph": gpu} | ({} if gpu else ON_A_CPU) | (QUICK if options.quick else {})
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)

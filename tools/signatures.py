"""Write what ``kda_core/options.py`` says of the arguments into the places where people and checkers read it.

    python tools/signatures.py            # write
    python tools/signatures.py --check    # change nothing; status 1, with the names, when a file is out of date

- ``kda_core/api.py``: overloads, parameters, the docstrings' arguments and the request of each call.
- ``kda_core/request.py``: the fields of ``Request``.
- ``docs/arguments.md``: the table.

Each is found by the lines that stand round it, which these functions name. ``kda_gate``, whose arguments have other
shapes, is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from kda_core import options
from kda_core.options import REQUIRED, Argument, Function
from kda_core.reference import DIFFERENTIABLE

ROOT = Path(__file__).parents[1]
WIDTH = 120
INTERMEDIATE = "return_intermediate_states"
PAIR, TRIPLE = "tuple[Tensor, Tensor | None]", "tuple[Tensor, Tensor | None, Tensor]"
OVERLOADS = (
    (f"{INTERMEDIATE}: Literal[False] = False", PAIR),
    (f"*, {INTERMEDIATE}: Literal[True]", TRIPLE),
    (f"{INTERMEDIATE}: bool = False", f"{PAIR} | {TRIPLE}"),
)

# Fields of a request that are not the argument of their name.
VALUES = {
    "scale": "default_scale(q) if scale is None else scale",
    "dt_bias": "dt_bias if dt_bias is None else _by_head(dt_bias, g)",
}
IN_PLACE = {
    "chunk_kda": "ssm_state_indices is not None",
    "fused_recurrent_kda": "inplace_final_state or ssm_state_indices is not None",
}


def parameter(a: Argument) -> str:
    """An argument as a signature has it."""
    return f"{a.name}: {a.type}" + ("" if a.default is REQUIRED else f" = {a.default!r}")


def parameters(function: Function) -> str:
    return "".join(f"    {parameter(a)},\n" for a in options.arguments_of(function))


def overloads() -> str:
    """The overloads of ``chunk_kda``, for type checkers."""
    found = []
    for intermediate, result in OVERLOADS:
        listed = [intermediate if a.name == INTERMEDIATE else parameter(a) for a in options.arguments_of("chunk_kda")]
        # Not through textwrap, which breaks at the spaces within a parameter.
        lines, line = [], "   "
        for text in listed:
            if len(line) + len(text) + 2 > WIDTH:
                lines.append(line)
                line = "   "
            line += f" {text},"
        found.append("\n".join(["@overload", "def chunk_kda(", *lines, line, f") -> {result}: ..."]))
    return "\n\n\n".join(found) + "\n"


def described(function: Function) -> str:
    """The arguments of a docstring."""
    lines = []
    for a in options.arguments_of(function):
        steps_alone = function == "fused_recurrent_kda" and "chunk_kda" not in a.functions
        text = a.meaning if function == "chunk_kda" or steps_alone else a.in_steps
        if text:
            # A plain space may begin a line; an expression in double backticks stays whole.
            held = re.sub(r"``[^`]*``", lambda found: found[0].replace(" ", "\0"), f"{a.name}: {text}")
            wrapped = textwrap.wrap(
                held, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False
            )
            lines += [line.replace("\0", " ") for line in wrapped]
    return "".join(f"{line}\n" for line in lines)


def request(function: Function) -> str:
    """The values of ``build_request``, by name."""
    taken = {a.name for a in options.arguments_of(function)}
    values = {"op": f'"{function}"'}
    for a in options.IN_REQUEST:
        values[a.name] = VALUES.get(a.name, a.name) if a.name in taken else repr(a.default)
    values["inplace_final_state"] = IN_PLACE[function]
    values["save_for_backward"] = f"_needs_gradient({', '.join((*DIFFERENTIABLE, 'out'))})"
    return "".join(f'            "{name}": {value},\n' for name, value in values.items())


def fields() -> str:
    """The fields of ``Request`` that are arguments."""
    found = []
    for a in options.IN_REQUEST:
        found.append(f"{a.name}: {a.type.removesuffix(' | None')}" if a.filled_in else parameter(a))
    return "".join(f"    {field}\n" for field in found)


def table() -> str:
    """Rows of the documentation's table."""
    rows = []
    for a in options.ARGUMENTS:
        taken = "".join("● | " if function in a.functions else "| " for function in get_args(Function))
        meaning = a.meaning.rstrip(".").replace("``", "`")
        if a.default not in (REQUIRED, None, False):
            meaning += f"; default {a.default}"
        rows.append(f"| `{a.name}` | {taken}{meaning} |")
    return "".join(f"{row}\n" for row in rows)


def _replaced(text: str, before: str, after: str, new: str) -> str:
    """``text`` with ``new`` between the first ``before`` and the next ``after``."""
    head, found, rest = text.partition(before)
    _, closed, tail = rest.partition(after)
    if not found or not closed:
        raise ValueError(f"expected {before!r} and, behind it, {after!r}; found no such lines")
    return head + found + new + closed + tail


def _api(text: str) -> str:
    text = _replaced(text, "# fmt: off\n", "# fmt: on\n", overloads())
    functions: tuple[Function, ...] = ("chunk_kda", "fused_recurrent_kda")
    # The overloads' definitions come first.
    head, mark, text = text.partition("# fmt: on\n")
    for function in functions:
        start = text.index(f"def {function}(\n")
        before, own = text[:start], text[start:]
        own = _replaced(own, f"def {function}(\n", ") -> ", parameters(function))
        own = _replaced(own, "    Args:\n", "\n    Returns:", described(function))
        own = _replaced(own, "build_request(\n        {\n", "        }\n", request(function))
        text = before + own
    return head + mark + text


def _request(text: str) -> str:
    return _replaced(text, "    op: Op\n", "    save_for_backward: bool = False\n", fields())


def _docs(text: str) -> str:
    return _replaced(text, "|---|:-:|:-:|:-:|---|\n", "\n## ", table())


WRITERS = {"kda_core/api.py": _api, "kda_core/request.py": _request, "docs/arguments.md": _docs}


def written() -> Iterator[tuple[Path, str, str]]:
    """Each file, what it holds, and what it should hold."""
    for name, write in WRITERS.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        yield path, text, write(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 when a file is out of date")
    given = parser.parse_args(arguments)
    stale = [(path, new) for path, old, new in written() if old != new]
    for path, new in stale:
        if not given.check:
            path.write_text(new, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'out of date' if given.check else 'written'}")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())

"""Find whether a change of sources changes what the chips run.

    python tools/compare_machine_code.py nvidia --out before.json
    python tools/compare_machine_code.py nvidia --against before.json

The tool compiles what a backend's ahead-of-time compiler does, without a GPU, and stores three hashes a kernel:

- ``text``: the assembler text (PTX or amdgcn) without comments, debug information, file names and the kernel's name.
  Directives for the linker are left out of amdgcn; registers, spills and local data share of its metadata are kept.
- ``body``: the same text without the list of parameters; registers of PTX are numbered by first appearance, and
  parameters carry no number or offset. It stays the same when only the signature changed.
- ``operations``: how often each instruction occurs. It stays the same when only the order or operands changed.

``--against`` prints every kernel that differs, with the closest hash that is equal, and exits with 1 if there is one.
A kernel or case that was renamed is found by its ``text`` or ``body``; that is no difference.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")

import triton
from triton.backends.compiler import GPUTarget

HASHES = ("text", "body", "operations")

_LINKER = (".globl", ".type", ".size", ".set", ".section", ".p2align", ".text", ".end_amdgpu", ".amdhsa_code_object")
_METADATA = re.compile(r"\.(?:agpr|sgpr|vgpr)_(?:spill_)?count:|\.(?:group|private)_segment_fixed_size:")


def text_of_ptx(ptx: str, kernel: str) -> list[str]:
    """The lines of PTX that say what runs."""
    lines, depth = [], 0
    for line in ptx.splitlines():
        line = line.split("//")[0].strip()
        if depth or line.startswith(".section"):
            # A section of debug information ends with its brace.
            depth = 1 if "}" not in line else 0
        elif line and not line.startswith((".loc", ".file", ".version")):
            lines.append(_anonymous(line, kernel))
    return lines


def text_of_amdgcn(assembly: str, kernel: str) -> list[str]:
    """The lines of amdgcn that say what runs, and the metadata that says what it takes."""
    code, _, metadata = assembly.partition(".amdgpu_metadata")
    lines = [line.split(";")[0].strip() for line in code.splitlines()]
    skipped = (".loc", ".file", ".cfi", *_LINKER)
    found = [_anonymous(line, kernel) for line in lines if line and not line.startswith(skipped)]
    return found + [line.strip() for line in metadata.splitlines() if _METADATA.search(line)]


def _anonymous(line: str, kernel: str) -> str:
    return re.sub(rf"(?<![A-Za-z0-9]){re.escape(kernel)}(?![A-Za-z0-9])", "KERNEL", re.sub(r"\s+", " ", line))


_PARAMETER = re.compile(r"KERNEL_param_\d+|KERNEL_\d+_param_\d+")
_PTX_REGISTER = re.compile(r"%(?:p|rs|r|rd|f|fd|rq|b|bd)\d+\b")


def body_of(lines: Iterable[str]) -> list[str]:
    """``lines`` without a trace of the parameters' order, and with PTX's registers numbered by first appearance."""
    numbers: dict[str, str] = {}

    def number(register: re.Match[str]) -> str:
        prefix = register[0].rstrip("0123456789")
        return numbers.setdefault(register[0], f"{prefix}{len(numbers)}")

    body = []
    for line in lines:
        if line.startswith((".param", ".reg ", ".amdhsa_kernarg_size", ".amdhsa_user_sgpr_kernarg_preload")):
            continue
        line = _PARAMETER.sub("P", line)
        if line.startswith("s_load"):
            line = re.sub(r"0x[0-9a-f]+$", "OFFSET", line)
        body.append(_PTX_REGISTER.sub(number, line))
    return body


def operations_of(lines: Iterable[str]) -> list[str]:
    """How often each operation occurs, in ``body_of``'s lines."""
    found = collections.Counter(re.sub(r"^@!?%p\d+ ", "", line).split(" ")[0] for line in lines)
    return [f"{operation} {count}" for operation, count in sorted(found.items())]


def hashes(text: Sequence[str]) -> dict[str, Any]:
    """The three hashes of a kernel's text, and how many lines it has."""
    body = body_of(text)
    parts = dict(zip(HASHES, (text, body, operations_of(body)), strict=True))
    found: dict[str, Any] = {n: hashlib.sha256("\n".join(part).encode()).hexdigest()[:16] for n, part in parts.items()}
    return found | {"lines": len(body)}


def _nvidia_jobs(arguments: argparse.Namespace) -> list[tuple[str, Callable[[], list[str]]]]:
    from kda_core_nvidia import aot

    def text(launch: Any) -> list[str]:
        source, options = aot.source(launch)
        compiled = triton.compile(source, target=GPUTarget("cuda", launch.arch, 32), options=options)
        return text_of_ptx(compiled.asm["ptx"], launch.kernel.__name__)

    architectures = [int(name.removeprefix("sm_")) for name in arguments.arch or ["sm_90"]]
    launches = [one for arch in architectures for one in aot.shipped(arch, arguments.only, arguments.quick)]
    return [(f"sm_{one.arch} {one.kernel.__name__}, {one.name}", lambda one=one: text(one)) for one in launches]


def _amd_jobs(arguments: argparse.Namespace) -> list[tuple[str, Callable[[], list[str]]]]:
    from kda_core_amd import aot

    def text(launch: Any, small: bool) -> list[str]:
        return text_of_amdgcn(aot.compiled(launch, small).asm["amdgcn"], launch.kernel.fn.__name__)

    targets = [aot.ARCHITECTURES[name] for name in arguments.arch or ["gfx942"]]
    launches = [one for target in targets for one in aot.shipped(target, arguments.only, arguments.quick)]
    return [
        (
            f"{one.target.name} {one.kernel.fn.__name__}, {one.name}" + ", 2 GiB" * (not small),
            lambda one=one, small=small: text(one, small),
        )
        for one in launches
        for small in ((True,) if arguments.quick else (True, False))
    ]


_JOBS: list[tuple[str, Callable[[], list[str]]]] = []
"""Launches that the workers compile; forked workers inherit them."""


def _job(index: int) -> tuple[str, dict[str, Any], list[str]]:
    name, text = _JOBS[index]
    lines = text()
    return name, hashes(lines), lines


def measured(jobs: int, texts: Path | None = None) -> dict[str, dict[str, Any]]:
    """Hashes of every job, by its name, with a number where a name comes again; text is written to ``texts``."""
    found: dict[str, dict[str, Any]] = {}
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for name, result, lines in pool.imap(_job, range(len(_JOBS))):
            again = next(n for n in range(1, len(_JOBS) + 1) if f"{name} #{n}" not in found)
            found[f"{name} #{again}"] = result
            if texts:
                texts.mkdir(parents=True, exist_ok=True)
                (texts / re.sub(r"\W+", "_", f"{name} {again}")).write_text("\n".join(lines) + "\n")
    return found


def differences(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """(what differs, what is only named otherwise or has another signature), a line each."""
    wrong, harmless = [], []
    gone = {name: before[name] for name in before if name not in after}
    for name, new in after.items():
        old = before.get(name)
        if old is None:
            same = (n for hash_ in HASHES[:2] for n, x in gone.items() if x[hash_] == new[hash_])
            earlier = next(same, None)
            if earlier is None:
                wrong.append(f"new: {name}")
            else:
                del gone[earlier]
                harmless.append(f"renamed: {earlier} -> {name}")
        elif old["body"] == new["body"]:
            harmless += [f"another signature: {name}"] * (old["text"] != new["text"])
        else:
            how = "operands or order differ" if old["operations"] == new["operations"] else "instructions differ"
            wrong.append(f"{how}: {name}, {old['lines']} -> {new['lines']} lines")
    return wrong + [f"gone: {name}" for name in gone], harmless


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, store, compare; answer the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=["nvidia", "amd"])
    parser.add_argument("--arch", nargs="+", default=[], help="sm_90, gfx942, …; default: the first of the two")
    parser.add_argument("--only", default="", help="only kernels whose name or case contains this")
    parser.add_argument("--quick", action="store_true", help="only the commonest configuration of every kernel")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compile so many at once")
    parser.add_argument("--out", type=Path, help="store the hashes in this file")
    parser.add_argument("--texts", type=Path, help="store each kernel's text in this folder, to read a difference")
    parser.add_argument("--against", type=Path, help="compare with the hashes in this file")
    chosen = parser.parse_args(arguments)
    if chosen.out and (chosen.out.is_dir() or not chosen.out.absolute().parent.is_dir()):
        parser.error(f"--out: expected a file in a folder that exists, got {chosen.out}")
    subset = {"triton": triton.__version__, "arch": chosen.arch, "only": chosen.only, "quick": chosen.quick}
    stored = json.loads(chosen.against.read_text()) if chosen.against else None
    if stored and stored["subset"] != subset:
        parser.error(f"{chosen.against} has {stored['subset']}, this is {subset}")
    _JOBS[:] = {"nvidia": _nvidia_jobs, "amd": _amd_jobs}[chosen.backend](chosen)
    kernels = measured(chosen.jobs, chosen.texts)
    print(f"triton {triton.__version__}, {len(kernels)} kernels")
    if chosen.out:
        chosen.out.write_text(json.dumps({"subset": subset, "kernels": kernels}, indent=1) + "\n")
    if not stored:
        return 0
    wrong, harmless = differences(stored["kernels"], kernels)
    print("\n".join([*harmless, *wrong, f"{len(wrong)} differ" if wrong else "the same machine code"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

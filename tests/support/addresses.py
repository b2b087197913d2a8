"""Proof that addresses are computed in 64 bits: intervals of every integer in a kernel's Triton IR.

Reads the text of TTIR or TTGIR (the latter after pointer canonicalisation and conversion to buffer instructions) once
from top to bottom. Each integer gets an interval from what is certain: constants, ranges, the width of arguments,
program ids and loads, the bounds of loops. Arithmetic that may leave its width's range taints its result, and so does
everything computed from it; so does a 32-bit value of unknown origin (carried by a loop, chosen by a branch). An offset
of an address that is tainted is an error: with some sizes and strides that fit their types it would wrap and be finite,
wrong memory.

64-bit arithmetic is taken not to wrap: it counts elements of tensors that exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_VALUE = r"%[\w$.-]+(?:#\d+)?"
_DEFINITION = re.compile(rf"^\s*(?P<names>{_VALUE}(?::\d+)?(?:\s*,\s*{_VALUE})*)\s*=\s*(?P<op>[\w.]+)(?P<rest>.*)$")
_LOOP = re.compile(rf"(?P<iv>{_VALUE})\s*=\s*(?P<low>{_VALUE})\s+to\s+(?P<high>{_VALUE})\s+step")
_CARRIED = re.compile(r"iter_args\((?P<pairs>[^)]*)\)\s*->\s*\((?P<types>.*?)\)\s*(?::|\{)")
_INTEGER = re.compile(r"(?:tensor<(?:\d+x)+|\b)i(1|8|16|32|64)\b")
_INDEXED = re.compile(rf"(?P<base>{_VALUE})\[(?P<offset>{_VALUE})\]")

_SAME = [
    "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "ttg.convert_layout", "tt.unsplat",
    "arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast",
]  # fmt: skip


def _limits(width: int) -> tuple[int, int]:
    return (0, 1) if width == 1 else (-(1 << (width - 1)), (1 << (width - 1)) - 1)


@dataclass(frozen=True)
class _Integer:
    """An interval, the width in bits, and how the value may be wrong ("" when it cannot)."""

    low: int
    high: int
    width: int
    taint: str = ""


@dataclass(frozen=True)
class Hazard:
    """An address whose offset may have wrapped.

    Attributes:
        line: the text of the address's operation.
        reason: the operation that may wrap.
    """

    line: str
    reason: str


def hazards(ir: str, buffers: Sequence[str] = (), buffer_loads: Sequence[str] = ()) -> list[Hazard]:
    """Every address in the text of a TTIR or TTGIR module whose offset may have wrapped at 32 bits.

    Args:
        buffers: beginnings of the names of a target's buffer instructions, whose offsets stand in brackets.
        buffer_loads: those of them that load.
    """
    return list(_Reader(buffers, buffer_loads).read(ir))


class _Reader:
    """One pass over a module. A name that is defined again (in a later region) replaces the earlier one."""

    def __init__(self, buffers: Sequence[str], buffer_loads: Sequence[str]) -> None:
        self.known: dict[str, _Integer] = {}
        self.buffers, self.loads = buffers, ("tt.load", "tt.get_num_programs", *buffer_loads)

    def read(self, ir: str) -> Iterator[Hazard]:
        for line in ir.splitlines():
            text = re.sub(r"\s*loc\(.*\)\s*$", "", line)
            if "tt.func" in text:
                self._arguments(line, r"(%[\w$.-]+): i(\d+)")
            elif re.match(r"\s*\^\w+\(", text):
                self._arguments(text, r"(%[\w$.-]+): (?:tensor<(?:\d+x)+)?i(\d+)", "carried from block to block")
            yield from self._address(text)
            self._define(text)

    def _arguments(self, text: str, pattern: str, taint: str = "") -> None:
        for name, width in re.findall(pattern, text):
            self._set(name, int(width), taint if int(width) <= 32 else "")

    def _set(self, name: str, width: int, taint: str = "") -> None:
        self.known[name] = _Integer(*_limits(width), width, taint)

    def _address(self, text: str) -> Iterator[Hazard]:
        offsets = []
        if "tt.addptr" in text:
            operands = re.findall(_VALUE, text.split("tt.addptr", 1)[1].split(":")[0])
            offsets.append(operands[1])
        elif any(op in text for op in self.buffers):
            offsets += [m["offset"] for m in _INDEXED.finditer(text)]
        for name in offsets:
            offset = self.known.get(name)
            if offset is None:
                yield Hazard(text.strip(), f"nothing is known of {name}")
            elif offset.taint:
                yield Hazard(text.strip(), offset.taint)

    def _define(self, text: str) -> None:
        m = _DEFINITION.match(text)
        if m is not None and "scf.for" not in m["op"]:
            self._operation(m["names"], m["op"], m["rest"], text.strip())
        if "scf.for" in text:
            self._loop(text)

    def _loop(self, text: str) -> None:
        m = _LOOP.search(text)
        if m is None:
            return
        low, high = (self.known.get(m[n]) for n in ("low", "high"))
        if low is not None and high is not None:
            self.known[m["iv"]] = _Integer(
                low.low, max(low.low, high.high - 1), max(low.width, high.width), low.taint or high.taint
            )
        carried = _CARRIED.search(text)
        if carried is None:
            return
        names = re.findall(rf"({_VALUE})\s*=", carried["pairs"])
        types = _split_types(carried["types"])
        results = _DEFINITION.match(text)
        if results is not None:
            stem = results["names"].split(":")[0]
            names += [f"{stem}#{i}" for i in range(len(types))] if len(types) > 1 else [stem]
            types *= 2
        for name, kind in zip(names, types, strict=False):
            self._unknown(name, kind, "carried by a loop")

    def _unknown(self, name: str, kind: str, why: str) -> None:
        found = _INTEGER.match(kind.strip())
        if found is not None:
            width = int(found[1])
            self._set(name, width, why if width == 32 else "")

    def _operation(self, names: str, op: str, rest: str, line: str) -> None:
        kind = rest.rsplit(":", 1)[-1] if ":" in rest else ""
        if " to " in kind:
            kind = kind.split(" to ")[-1]
        if "->" in kind:
            kind = kind.split("->")[-1]
        if op == "tt.load":  # its type is the address's
            kind = kind.replace("!tt.ptr<", "")
        found = _INTEGER.match(kind.strip().lstrip("("))
        if "," in names or re.search(r":\d+$", names):
            self._several(names, rest, op)
            return
        if found is None:
            return
        width = int(found[1])
        operands = [self.known[n] for n in re.findall(_VALUE, rest) if n in self.known]
        taint = next((o.taint for o in operands if o.taint), "")
        value = self._interval(op, rest, operands, width)
        if value is None:
            unknown = width == 32 and op not in self.loads
            self._set(names, width, taint or (f"unknown: {line}" if unknown else ""))
            return
        low, high = value
        least, most = _limits(width)
        if low < least or high > most:
            if width == 32:
                taint = taint or line
            low, high = least, most
        self.known[names] = _Integer(low, high, width, taint)

    def _several(self, names: str, rest: str, op: str) -> None:
        types = _split_types(rest.split("->")[-1].strip().strip("({")) if "->" in rest else []
        stem = names.split(":")[0]
        parts = names.split(",") if "," in names else [f"{stem}#{i}" for i in range(len(types))]
        for name, kind in zip(parts, types, strict=False):
            self._unknown(name.strip(), kind, f"a result of {op}")

    def _interval(self, op: str, rest: str, operands: list[_Integer], width: int) -> tuple[int, int] | None:
        """The exact interval of a result, before it is cut to its width; None when it is not known."""
        if op == "arith.constant":
            number = re.search(r"(?:dense<)?\s*(-?\d+|true|false)", rest)
            if number is None:
                return None
            value = {"true": 1, "false": 0}.get(number[1])
            value = int(number[1]) if value is None else value
            return value, value
        if op == "tt.make_range":
            end, start = (int(re.search(rf"{n} = (\d+)", rest)[1]) for n in ("end", "start"))
            return start, end - 1
        if op == "tt.get_program_id":
            return 0, _limits(32)[1]
        if op == "arith.cmpi":
            return 0, 1
        if op in _SAME and operands:
            return operands[0].low, operands[0].high
        if op == "arith.select" and len(operands) >= 2:
            a, b = operands[-2:]
            return min(a.low, b.low), max(a.high, b.high)
        if len(operands) != 2:
            return None
        a, b = operands
        if op == "arith.addi":
            return a.low + b.low, a.high + b.high
        if op == "arith.subi":
            return a.low - b.high, a.high - b.low
        if op == "arith.muli":
            corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
            return min(corners), max(corners)
        if op in ("arith.minsi", "arith.maxsi"):
            pick = min if op == "arith.minsi" else max
            return pick(a.low, b.low), pick(a.high, b.high)
        if op in ("arith.divsi", "arith.remsi") and b.low > 0:
            most = max(abs(a.low), abs(a.high))
            most = most // b.low if op == "arith.divsi" else min(most, b.high - 1)
            return (0 if a.low >= 0 else -most), (most if a.high > 0 else 0)
        if op in ("arith.divsi", "arith.remsi"):
            # A divisor of either sign: the magnitude does not grow.
            most = max(abs(a.low), abs(a.high))
            return -most, most if width == 32 else _limits(width)[1]
        if op == "arith.andi" and min(a.low, b.low) >= 0:
            return 0, min(a.high, b.high)
        if op in ("arith.ori", "arith.xori") and min(a.low, b.low) >= 0:
            return 0, (1 << max(a.high, b.high).bit_length()) - 1
        if op == "arith.shli" and a.low >= 0 and 0 <= b.low and b.high < width:
            return a.low << b.low, a.high << b.high
        if op in ("arith.shrsi", "arith.shrui") and a.low >= 0 and 0 <= b.low and b.high < width:
            return a.low >> b.high, a.high >> b.low
        return None


def _split_types(text: str) -> list[str]:
    """Types separated by commas outside of brackets."""
    parts, depth, current = [], 0, ""
    for c in text:
        depth += (c in "<({[") - (c in ">)}]")
        if c == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += c
    return [*parts, current] if current.strip() else parts

"""A check of sm_90 machine code: whether anything is computed from a copy of the stack pointer.

ptxas 12.8 (triton 3.6) has restored spilled descriptors of warp-group products from the stack pointer itself, R1, with
wrong results. It also moves that register where the upper half of a pair is not used: those copies are overwritten
before anything reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?P<operation>[A-Z][\w.]*)\s*(?P<operands>[^;]*);")
_PREDICATED = re.compile(r"/\*[0-9a-f]+\*/\s+@")
_COPY = re.compile(r"R2UR UR(\d+), R1 ")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_BLOCK = re.compile(r"(?P<kind>\w*)\[(?:[^\]]*\W)?UR(?P<first>\d+)\b")
_LEAVES = re.compile(r"BRA|BRX|EXIT|RET|CALL|BSYNC|BREAK|WARPSYNC\.COLLECTIVE|JMP|KILL")
_NO_RESULT = re.compile(r"UTMA|UBLK|USETMAXREG|USETP|UISETP|UCGABAR")


def _block_size(operation: str, kind: str, position: int) -> int:
    """How many registers an operand in brackets stands for; more than any, where it is not known."""
    if kind == "desc":
        return 2
    if kind == "gdesc":
        return 4
    loads = re.match(r"UTMALDG\.(\d)D", operation)
    if loads:
        # Where to, a barrier, coordinates; the address of a descriptor.
        return 2 + int(loads[1]) if position == 0 else 2
    return 1 if operation.startswith("SYNCS") else 8


def _read(operation: str, operands: str, plain: list[str]) -> Iterator[int]:
    """The uniform registers that an instruction reads; ``plain`` are its operands that are not in brackets."""
    for position, block in enumerate(_BLOCK.finditer(operands)):
        first = int(block["first"])
        yield from range(first, first + _block_size(operation, block["kind"], position))
    wide = "64" in operation or "WIDE" in operation
    for operand in plain:
        for register in _REGISTER.findall(operand):
            yield from range(int(register), int(register) + 1 + wide)


def uses_stack_pointer(code: str) -> bool:
    """Whether a copy of the stack pointer in a uniform register is read, other than to be copied.

    Args:
        code: what ``cuobjdump -sass`` prints. A copy that is still there at a branch counts as read.
    """
    lines = [line for line in code.splitlines() if _INSTRUCTION.search(line)]
    return any(_is_read(lines[i + 1 :], int(copy[1])) for i, line in enumerate(lines) if (copy := _COPY.search(line)))


def _is_read(lines: list[str], register: int) -> bool:
    copies = {register}
    for line in lines:
        found = _INSTRUCTION.search(line)
        operation, operands = found["operation"], found["operands"]
        if _LEAVES.match(operation):
            return True
        outside = [x.strip() for x in re.sub(r"\w*\[[^\]]*\]", "", operands).split(",")]
        writes = re.fullmatch(r"UR(\d+)", outside[0]) and not _NO_RESULT.match(operation)
        reads = set(_read(operation, operands, outside[1:] if writes else outside)) & copies
        if reads and operation != "UMOV":
            return True
        if writes:
            first = int(outside[0][2:])
            written = {first, first + 1} if "64" in operation or "WIDE" in operation else {first}
            if reads:
                copies |= written
            elif not _PREDICATED.search(line):
                copies -= written
        if not copies:
            return False
    return bool(copies)

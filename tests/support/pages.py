"""The pages of the documentation, and the code blocks in them.

tests/docs/test_docs.py runs a block unless the line above it is ``<!-- not run: the reason -->``. ``<!-- slow -->``
there leaves a block to the end-to-end tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

SHELLS = ("sh", "console")
RUN = ("python", "pycon", *SHELLS)
SHOWN = ("text", "toml")
"""Languages whose blocks hold nothing to run."""

_BLOCK = re.compile(
    r"^(?:<!-- (?:not run: (?P<reason>[^>]+)|(?P<slow>slow)) -->\n+)?```(?P<language>[\w-]*)\n(?P<text>.*?)^```$",
    flags=re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: path from the repository's root. line: where its text begins. language: of the fence.
        reason: why no test runs it; empty for a block that is run. slow: left to the end-to-end tests.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str
    slow: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(name: str) -> str:
    """The text of a page, by its path from the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, *languages: str) -> list[Block]:
    """The blocks of a page in these languages (in all of them, without one)."""
    text = read(name)
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        reason, slow = match["reason"] or "", match["slow"] is not None
        found.append(Block(name, line, match["language"], match["text"], reason, slow))
    return [block for block in found if not languages or block.language in languages]


def section(name: str, title: str) -> str:
    """The text below a heading of a page, up to the next one of its level."""
    return re.split(rf"^## {re.escape(title)}$", read(name), flags=re.M)[1].split("\n## ")[0]


def table_rows(text: str) -> list[list[str]]:
    """Cells of the rows below a table's header."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def one_line(name: str, adapter: str) -> str:
    """The line of code of a page that installs an adapter."""
    (line,) = set(re.findall(rf"`(import {adapter}; {adapter}\.install\(\))`", read(name)))
    return line

"""The Python of docs/debugging.md, docs/cpu.md and docs/limits.md runs, each block for itself."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", flags=re.M | re.S)
BLOCKS = [
    pytest.param(textwrap.dedent(found[2]), id=f"{page}-{i}")
    for page in ("debugging", "cpu", "limits")
    for i, found in enumerate(BLOCK.finditer((DOCS / f"{page}.md").read_text(encoding="utf-8")))
]


def test_there_are_blocks():
    assert len(BLOCKS) >= 8


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    exec(compile(block, "docs", "exec"), {})


@pytest.mark.parametrize("page", ["debugging", "cpu", "limits"])
def test_links_lead_to_pages_and_headings(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([\w./]+\.md)(?:#([\w-]+))?\)", text)
    for target, anchor in links:
        headings = re.findall(r"^#+ (.*)$", (DOCS / target).read_text(encoding="utf-8"), flags=re.M)
        anchors = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
        assert not anchor or anchor in anchors, (target, anchor)

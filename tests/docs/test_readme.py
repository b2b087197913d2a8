"""The README is short, and its tables agree with the code; tests/docs/test_docs.py runs the code of all pages."""

from __future__ import annotations

import re

import pages

import kda_core
from kda_core.capabilities import Feature

README = pages.read("README.md")
MOST_LINES = 200
FIRST_SCREEN = 40
"""Lines that a reader sees without scrolling."""


def test_it_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_the_first_screen_has_three_figures_and_a_plot():
    first = "\n".join(README.splitlines()[:FIRST_SCREEN])
    figures = first.partition("<!-- table: headline-figures -->")[2].partition("<!-- end of table -->")[0]
    assert len(re.findall(r"^- \*\*.*\d", figures, flags=re.M)) == 3
    assert re.search(r"!\[[^]]+\]\(docs/images/[\w.]+\)", first)


def test_the_example_has_at_most_fifteen_lines():
    (block,) = pages.blocks("README.md", "python")
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 15


def test_the_feature_table_agrees_with_what_the_backends_declare():
    text = pages.section("README.md", "What works where")
    heading, *_ = [line for line in text.splitlines() if line.startswith("|")]
    backends = [cell.strip() for cell in heading.strip("|").split("|")][2:]
    declared = {e.name: e.info.capabilities.features for e in kda_core.backends() if e.info is not None}
    listed = set()
    for _, names, *answers in pages.table_rows(text):
        features = {Feature[name] for name in re.findall(r"`(\w+)`", names)}
        listed |= features
        for backend, answer in zip(backends, answers, strict=True):
            if backend in declared:
                assert {"yes": features, "no": set()}[answer] == features & declared[backend], (backend, names)
    assert listed == set(Feature)

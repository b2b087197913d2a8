"""The README is short, and its tables agree with the code; tests/docs/test_docs.py runs the code of all pages."""

from __future__ import annotations

import re

import pages
import pytest
import torch
from packaging.requirements import Requirement

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


STACKS = {
    "fla": "kda_core_fla.install()",
    "transformers": "kda_core_transformers.install()",
    "vllm": "kda_core_vllm.install()",
    "sglang": "kda_core_sglang.install()",
    "torchtitan": "--override.imports kda_core_torchtitan.kimi_linear",
}
"""How the line of each stack ends; tests/integrations runs it, from the README and from the stack's page."""


def test_every_stack_has_one_line_that_its_page_begins_with():
    """All of them without scrolling."""
    first = "\n".join(README.splitlines()[:FIRST_SCREEN])
    rows = pages.table_rows(pages.section("README.md", "In your stack"))
    assert all(line in first for _, line in rows)
    found = {re.search(r"integrations/(\w+)\.md", name)[1]: line for name, line in rows[:-1]}
    assert found.keys() == STACKS.keys()
    for stack, line in found.items():
        assert line.removesuffix("`").endswith(STACKS[stack])
        assert pages.read(f"docs/integrations/{stack}.md").splitlines()[2] == line


def test_versions_of_stacks_are_those_that_adapters_admit_and_make_tests():
    """The README and a page name the oldest and the newest version of make integrations-test."""
    tested: dict[str, list[str]] = {}
    lists = re.findall(r"^\w*STACKS := (.*)", pages.read("Makefile"), re.M)
    for stack, version in re.findall(r"(\w+)-(\d[\d.]+)", " ".join(lists)):
        tested.setdefault(stack, []).append(version)
    assert tested.keys() == {*STACKS, "kernels"}
    rows = {stack: row for row, _ in pages.table_rows(pages.section("README.md", "In your stack")) for stack in STACKS
            if f"integrations/{stack}.md" in row}  # fmt: skip
    for stack in STACKS:
        needs = re.search(r'^dependencies = \["([^"]+)"', pages.read(f"integrations/{stack}/pyproject.toml"), re.M)[1]
        (versions,) = re.findall(r"^\| Versions \| (.*) \|$", pages.read(f"docs/integrations/{stack}.md"), re.M)
        for version in tested[stack]:
            assert Requirement(needs).specifier.contains(version)
            named = version if len(tested[stack]) == 1 else version.rpartition(".")[0]
            assert named in rows[stack]
            assert named in versions


@pytest.mark.parametrize("page", ["README.md", "docs/layer.md"])
def test_the_line_of_the_layer(page):
    (line,) = set(re.findall(r"`(from kda_core\.nn import KimiDeltaAttention; layer = .*?)`", pages.read(page)))
    names: dict = {}
    exec(line, names)
    assert names["layer"](torch.randn(2, 10, 256)).shape == (2, 10, 256)


def test_the_feature_table_agrees_with_what_the_backends_declare():
    text = pages.section("README.md", "Where each feature works")
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

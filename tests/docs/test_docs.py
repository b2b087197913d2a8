"""The documentation is true: its code runs, its tables are those of code and measurements, its paths exist."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import figures
import pages
import pytest
from environments import run
from installed import need_package
from pages import NAMES, ROOT, Block

import kda_core

FUNCTIONS = (kda_core.chunk_kda, kda_core.fused_recurrent_kda, kda_core.kda_gate)

NOT_RUN = {
    "CONTRIBUTING.md": 3, "README.md": 1, "docs/amd.md": 3, "docs/debugging.md": 1, "docs/index.md": 1,
    "docs/integrations/fla.md": 1, "docs/integrations/sglang.md": 1, "docs/integrations/torchtitan.md": 1,
    "docs/integrations/transformers.md": 1, "docs/integrations/vllm.md": 1, "docs/notes/amd.md": 3,
    "docs/notes/nvidia.md": 2, "docs/notes/performance.md": 1, "docs/nvidia.md": 4, "docs/performance.md": 2,
    "docs/quick_start.md": 1,
}  # fmt: skip
"""How many blocks of a page say that they are not run. One more is a decision, which a change of this table shows."""

RUN_BY = {"docs/write_a_backend.md": "tests/docs/test_outside_backend.py"}
"""Pages whose blocks are files of a wheel and commands about it: the test builds, installs and runs them."""

needs_the_cpu_backend = pytest.mark.skipif(
    importlib.util.find_spec("kda_core_cpu") is None, reason="kda-core-cpu is not installed: pip install ./backends/cpu"
)

PATH = re.compile(
    r"`((?:kda_core|backends|integrations|benchmarks|docs|examples|requirements|tests|tools|\.ci|\.github)/[\w./-]*)`"
)


def run_here(*languages: str) -> list[Block]:
    """The blocks that tests of this file run."""
    names = [name for name in NAMES if name not in RUN_BY]
    return [b for name in names for b in pages.blocks(name, *languages) if not b.reason]


def pages_with(*languages: str) -> list[str]:
    return list(dict.fromkeys(block.page for block in run_here(*languages)))


def run_python(name: str, slow: bool) -> None:
    """Run a page's Python blocks in one namespace; lines that begin with print( must print their comments."""
    try:
        device = kda_core.default_device()
    except kda_core.UnsupportedCall as error:
        pytest.skip(str(error))
    found = [block for block in run_here("python") if block.page == name and (slow or not block.slow)]
    printed = [line.split("  # ")[1] for b in found for line in b.text.splitlines() if line.startswith("print(")]
    output = io.StringIO()
    # An interpreter of GPU kernels, if one runs in this process, would serve CPU tensors first.
    chosen = kda_core.use_backend("cpu") if device.type == "cpu" else contextlib.nullcontext()
    namespace: dict = {"__name__": "page"}
    with chosen, contextlib.redirect_stdout(output):
        for block in found:
            # Blank lines before the text, so that a traceback has the page's line numbers.
            exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / name), "exec"), namespace)
    assert output.getvalue().splitlines() == printed


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_block_is_run_or_says_why():
    everything = [block for name in NAMES for block in pages.blocks(name)]
    for block in everything:
        assert block.language in (*pages.RUN, *pages.SHOWN), f"{block}: name the block's language"
    counted = Counter(block.page for block in everything if block.reason)
    assert dict(counted) == NOT_RUN
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_no_block_hides_from_the_tests(name: str):
    """Every fence and every mark is one that ``pages`` finds: an indented or misspelt one would be run by nobody."""
    text = pages.read(name)
    assert len(re.findall(r"^\s*(?:```|~~~)", text, flags=re.M)) == 2 * len(pages.blocks(name))
    marked = [block for block in pages.blocks(name) if block.reason or block.slow]
    assert len(re.findall(r"^\s*<!--\s*(?:not.run|slow)", text, flags=re.M | re.I)) == len(marked)


@pytest.mark.parametrize("name", pages_with("python"))
def test_python_runs_and_prints_what_it_says(name: str):
    run_python(name, slow=False)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", list(dict.fromkeys(b.page for b in run_here("python") if b.slow)))
def test_slow_python_runs(name: str):
    run_python(name, slow=True)


def test_the_quick_start_trains_decodes_and_serves():
    assert len(pages.blocks("docs/quick_start.md", "python")) == 3


@needs_the_cpu_backend
@pytest.mark.end_to_end
@pytest.mark.parametrize("name", pages_with("pycon"))
def test_sessions_answer_as_shown(name: str, tmp_path: Path):
    """In a process that sees no backend but the CPU's: what else is installed would lengthen the answers."""
    session = "\n\n".join(block.text for block in run_here("pycon") if block.page == name)
    (tmp_path / "session.txt").write_text(session, encoding="utf-8")
    program = """
import doctest, importlib.metadata as metadata, sys
found = metadata.entry_points()
seen = metadata.EntryPoints(e for group in found.groups for e in found.select(group=group) if e.name == "cpu")
metadata.entry_points = lambda **selection: seen.select(**selection) if selection else seen
sys.exit(doctest.testfile(sys.argv[1], module_relative=False, optionflags=doctest.ELLIPSIS, encoding="utf-8").failed)
"""
    environment = {n: value for n, value in os.environ.items() if n != "KDA_BACKEND"}
    run(sys.executable, "-c", program, tmp_path / "session.txt", cwd=tmp_path, env=environment, timeout=120)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Links to all that a checkout has but the core's own package, so that commands find the installed one."""
    for entry in ROOT.iterdir():
        if entry.name != "kda_core" and not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


@needs_the_cpu_backend
@pytest.mark.end_to_end
@pytest.mark.parametrize("block", run_here(*pages.SHELLS), ids=str)
def test_commands_run(block: Block, checkout: Path):
    environment = {n: value for n, value in os.environ.items() if not n.startswith(("KDA_", "PYTEST_"))}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    run("bash", "-euo", "pipefail", "-c", block.text, cwd=checkout, env=environment, timeout=300)


@pytest.mark.end_to_end
def test_the_smallest_backend_installs_from_its_two_files_and_serves(tmp_path: Path):
    page = "docs/smallest_backend.md"
    (module,), (project,) = pages.blocks(page, "python"), pages.blocks(page, "toml")
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "kda_mychip.py").write_text(module.text, encoding="utf-8")
    (source / "pyproject.toml").write_text(project.text, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-build-isolation", "--target", site, source], check=True)

    check = """
import sys; sys.path.insert(0, sys.argv[1])
import pytest, torch, kda_core
torch.manual_seed(0)
q, k = torch.randn(2, 1, 70, 2, 16)
v, g, beta = torch.randn(1, 70, 4, 8), -torch.rand(1, 70, 4, 16), torch.rand(1, 70, 4)
q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(2, dim=2) for x in (q, k))
o, _ = kda_core.chunk_kda(q, k, v, g, beta, backend="mychip")
expected, _ = kda_core.chunk_kda(q, k, v, g, beta, backend="reference")
torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
assert kda_core.explain(q, k, v, g, beta).chosen != "mychip"
for options in ({"output_final_state": True}, {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": True}):
    with pytest.raises(kda_core.UnsupportedCall, match="does not serve"):
        kda_core.chunk_kda(q, k, v, g, beta, backend="mychip", **options)
with pytest.raises(kda_core.UnsupportedCall, match="gradients"):
    kda_core.chunk_kda(q.requires_grad_(), k, v, g, beta, backend="mychip")
wide = torch.zeros(1, 3, 2, 300)
with pytest.raises(kda_core.UnsupportedCall, match="does not fit"):
    kda_core.chunk_kda(wide, wide, wide, wide, wide[..., 0], backend="mychip")
"""
    subprocess.run([sys.executable, "-c", check, site], check=True, cwd="/", timeout=120)

    (kit,) = re.findall(r"`(pytest [^`]*--backend=mychip)`", pages.read(page))
    command = [sys.executable, "-m", *shlex.split(kit.replace("testing.suite", "testing.suite.test_forward"))]
    environment = os.environ | {"PYTHONPATH": str(site)}
    shown = run(*command, "-p", "no:cacheprovider", cwd=tmp_path, env=environment, timeout=300)
    assert re.search(r"[1-9]\d* passed", shown)


def test_the_argument_table_lists_every_argument_of_every_function():
    table = {}
    text = pages.read("docs/arguments.md").split("\n## ")[0]
    for names, *taken, _ in pages.table_rows(text):
        for name in re.findall(r"`(\w+)`", names):
            table[name] = [cell == "●" for cell in taken]
    for i, function in enumerate(FUNCTIONS):
        listed = {name for name, taken in table.items() if taken[i]}
        assert listed == set(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_paths_and_make_targets_exist(name: str):
    text = pages.read(name)
    for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        target = (ROOT / name).parent.joinpath(path) if path else ROOT / name
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
    for path in PATH.findall(text):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_tables_and_plots_are_what_the_measurements_give():
    assert list(figures.stale()) == []


def test_every_table_stands_in_a_page():
    """A table that no page shows, or a slot that nothing fills, is a mistake."""
    shown = {match["name"] for name in NAMES for match in figures.SLOT.finditer(pages.read(name))}
    assert shown == set(figures.TABLES)
    for name in NAMES:
        text = pages.read(name)
        assert text.count("<!-- table: ") == len(figures.SLOT.findall(text)), name
    drawn = {image for name in NAMES for image in re.findall(r"images/(\w+)\.svg", pages.read(name))}
    assert drawn == set(figures.PLOTS)


@pytest.fixture
def copied(tmp_path: Path) -> ModuleType:
    """``figures`` of a copy of the checkout's pages, data and plots."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "README.md", tmp_path)
    spec = importlib.util.spec_from_file_location("figures_of_a_copy", tmp_path / "tools" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_changed_measurement_makes_pages_and_plots_stale(copied: ModuleType):
    content = copied.read("decode")
    content["rows"][0]["implementations"]["kda_core"]["ms"]["median"] *= 2
    (copied.DATA / "decode.json").write_text(json.dumps(content), encoding="utf-8")
    assert list(copied.stale()) == ["docs/performance.md"]
    content = copied.read("headline")
    (copied.DATA / "headline.json").write_text(json.dumps(content | {"more": 1}), encoding="utf-8")
    drawn = [f"docs/images/{name}.svg" for name in ("headline", "training", "inference")]
    assert list(copied.stale()) == ["docs/performance.md", *drawn]
    (copied.DATA / "headline.json").write_text(json.dumps(content | {"schema": 2}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"headline.json: expected schema 1, got 2"):
        list(copied.stale())


def test_figures_take_several_peers_and_leave_out_what_failed(tmp_path: Path):
    content = figures.read("given")
    row, *_ = content["rows"]
    more = copy.deepcopy(row)
    more["implementations"]["other"] = {"ms": {"median": 2 * more["implementations"]["kda_core"]["ms"]["median"]}}
    failed = {n: x for n, x in row.items() if n != "implementations"} | {"failed": "OutOfMemoryError"}
    (tmp_path / "given.json").write_text(json.dumps(content | {"rows": [more, failed]}), encoding="utf-8")
    header, _, line = figures.speed(str(tmp_path / "given"), "training").splitlines()
    assert "| kda_core ms | fla ms | other ms | fla / kda_core | other / kda_core |" in header
    assert "| 2.0× |" in line


@pytest.mark.end_to_end
def test_every_plot_is_drawn(copied: ModuleType):
    shutil.rmtree(copied.IMAGES)
    copied.IMAGES.mkdir()
    for name in copied.PLOTS:
        copied.draw(name)
    assert list(copied.stale()) == []


@pytest.mark.end_to_end
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path):
    need_package("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    run(*command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, timeout=300)
    loaded = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]+""")
    built = list((tmp_path / "site").rglob("*.html"))
    assert {"contributing.html", "changelog.html"} <= {page.name for page in built}
    assert len(built) >= len(list((ROOT / "docs").rglob("*.md")))
    assert {page.name: found for page in built if (found := loaded.findall(page.read_text(encoding="utf-8")))} == {}


def test_issue_forms_ask_for_kda_info():
    need_package("yaml", "pyyaml")
    import yaml

    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) >= 3
    for form in forms:
        body = yaml.safe_load(form.read_text(encoding="utf-8"))["body"]
        (asked,) = [item for item in body if item.get("id") == "info"]
        assert "kda info" in asked["attributes"]["label"], form.name
        assert asked["validations"] == {"required": True}, form.name

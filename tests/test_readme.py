"""The README is true: its code runs, its tables agree with the code, its paths and commands exist."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import kda_core
from kda_core.capabilities import Feature

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FUNCTIONS = (kda_core.chunk_kda, kda_core.fused_recurrent_kda, kda_core.kda_gate)


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return re.split(rf"^## {re.escape(title)}$", README, flags=re.M)[1].split("\n## ")[0]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def table_rows(text: str) -> list[list[str]]:
    """Cells of the rows below a table's header."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_quick_start_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture):
    blocks = code_blocks(section("Quick start"), "python")
    assert len(blocks) == 3
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    printed = [line.split("  # ")[1] for block in blocks for line in block.splitlines() if line.startswith("print(")]
    assert capsys.readouterr().out.splitlines() == printed


def test_the_session_about_errors_and_backends_answers_as_shown(tmp_path: Path):
    """In a process that sees no backend but the CPU's: what else is installed would lengthen the answers."""
    (session,) = code_blocks(section("Errors, and choosing a backend"), "pycon")
    (tmp_path / "session.txt").write_text(session, encoding="utf-8")
    run = """
import doctest, importlib.metadata as metadata, sys
found = metadata.entry_points()
seen = metadata.EntryPoints(e for group in found.groups for e in found.select(group=group) if e.name == "cpu")
metadata.entry_points = lambda **selection: seen.select(**selection) if selection else seen
sys.exit(doctest.testfile(sys.argv[1], module_relative=False, optionflags=doctest.ELLIPSIS, encoding="utf-8").failed)
"""
    environment = {name: value for name, value in os.environ.items() if name != "KDA_BACKEND"}
    command = [sys.executable, "-c", run, tmp_path / "session.txt"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("line", re.findall(r"^python -m kda_core [^#\n]*[^# \n]", README, flags=re.M))
def test_the_command_lines_run(line: str):
    command = shlex.split(line)
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plugin_installs_from_its_two_files_and_serves(tmp_path: Path):
    text = section("Adding a backend")
    (module,), (project,) = code_blocks(text, "python"), code_blocks(text, "toml")
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "kda_mychip.py").write_text(module, encoding="utf-8")
    (source / "pyproject.toml").write_text(project, encoding="utf-8")
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

    (kit,) = re.findall(r"`(pytest [^`]*--backend=mychip)`", text)
    command = [sys.executable, "-m", *shlex.split(kit.replace("testing.suite", "testing.suite.test_forward"))]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"[1-9]\d* passed", done.stdout)


def test_the_argument_table_lists_every_argument_of_every_function():
    table = {}
    for names, *taken, _ in table_rows(section("Arguments")):
        for name in re.findall(r"`(\w+)`", names):
            table[name] = [cell == "●" for cell in taken]
    for i, function in enumerate(FUNCTIONS):
        listed = {name for name, taken in table.items() if taken[i]}
        assert listed == set(inspect.signature(function).parameters)


def test_the_feature_table_agrees_with_what_the_backends_declare():
    heading, *_ = [line for line in section("What works where").splitlines() if line.startswith("|")]
    backends = [cell.strip() for cell in heading.strip("|").split("|")][2:]
    declared = {e.name: e.info.capabilities.features for e in kda_core.backends() if e.info is not None}
    listed = set()
    for _, names, *answers in table_rows(section("What works where")):
        features = {Feature[name] for name in re.findall(r"`(\w+)`", names)}
        listed |= features
        for backend, answer in zip(backends, answers, strict=True):
            if backend in declared:
                assert {"yes": features, "no": set()}[answer] == features & declared[backend], (backend, names)
    assert listed == set(Feature)


def test_paths_and_make_targets_exist():
    for names, _ in table_rows(section("Where is what")):
        for path in re.findall(r"`([^`]+)`", names):
            assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z]+)", README, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target

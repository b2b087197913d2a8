"""An outside backend, end to end: the example of docs/write_a_backend.md as a wheel, and the kit run on it.

The environment holds the core and the backend as wheels, the libraries of this environment, and no checkout.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import venv
from pathlib import Path

import pytest
from environments import ROOT, link_torch, pip

pytestmark = pytest.mark.end_to_end

PAGE = ROOT / "docs" / "write_a_backend.md"


def files_of_the_page() -> dict[str, str]:
    """The files that the page shows: blocks whose first line is a comment with a path."""
    blocks = re.findall(r"```\w+\n# (\S+\.\w+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return dict(blocks)


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Python of an environment with the core's wheel and the example's."""
    folder = tmp_path_factory.mktemp("outside")
    source = folder / "kda-mychip"
    for name, text in files_of_the_page().items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (source / "kda_mychip" / "__init__.py").touch()
    wheels = folder / "wheels"
    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", wheels, ROOT, source)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    executable = folder / "venv" / "bin" / "python"
    pip("--python", executable, "install", "--no-deps", "--no-index", "--no-compile", *wheels.glob("*.whl"))
    # Hypothesis parses every module that lies in a folder of another name.
    libraries = folder / "site-packages"
    link_torch(libraries)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{libraries}\n")
    return executable


def run_kit(python: Path, folder: Path, *arguments: str, modules: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit status and output of the kit, or of some of its modules."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "PYTEST_", "KDA_"))}
    command = [python, "-m", "pytest", "-p", "kda_core.testing.plugin", "-p", "no:cacheprovider"]
    suite = "kda_core.testing.suite"
    command += ["--pyargs", *([f"{suite}.{name}" for name in modules] or [suite]), *arguments]
    child = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return child.returncode, child.stdout + child.stderr


def test_kit_on_an_outside_backend(python: Path, tmp_path: Path):
    """Declared calls are right; others are refused with the reason."""
    status, text = run_kit(python, tmp_path, "--backend=mychip", "--kda-report=report.json", "-n", "2")
    assert status == pytest.ExitCode.OK, text[-4000:]
    assert "backend mychip 0.1.0 (contract ~=1.0) on cpu" in text
    (report,) = json.loads((tmp_path / "report.json").read_text())["backends"]
    assert report["outcomes"]["passed"] > 100
    assert report["coverage"]["dtype"]["bfloat16"]["state"] == "covered"
    assert report["coverage"]["layout"]["packed"]["state"] == "refused"
    assert report["coverage"]["direction"]["backward"]["state"] == "refused"
    assert any("train on another backend" in reason for reason in report["reasons"]["refused"])


def test_kit_on_its_first_backward(python: Path, tmp_path: Path):
    """The page's second part, appended to the module, with the features that it names."""
    (more,) = re.findall(r"```python\n# kda_mychip/plugin.py, continued\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (plugin,) = python.parents[1].glob("lib/python*/site-packages/kda_mychip/plugin.py")
    forward = plugin.read_text()
    closed = 'closed={Feature.BACKWARD: "train on another backend"},'
    assert closed in forward
    declared = forward.replace("Feature.CHUNK,", "Feature.CHUNK, Feature.BACKWARD, Feature.STATE_GRADIENT,")
    plugin.write_text(declared.replace(closed, "") + more)
    try:
        modules = ("test_backward", "test_graphs")
        status, text = run_kit(python, tmp_path, "--backend=mychip", modules=modules)
    finally:
        plugin.write_text(forward)
    assert status == pytest.ExitCode.OK, text[-4000:]
    assert re.search(r"direction +forward \d+, backward \d+", text)


@pytest.mark.slow
def test_kit_finds_a_fault_in_it(python: Path, tmp_path: Path):
    """The same wheel, once it forgets the scale."""
    (plugin,) = python.parents[1].glob("lib/python*/site-packages/kda_mychip/plugin.py")
    right = plugin.read_text()
    plugin.write_text(right.replace("request.scale * ", ""))
    try:
        status, text = run_kit(python, tmp_path, "--backend=mychip", "-x", "-k", "test_forward")
    finally:
        plugin.write_text(right)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "worst row" in text


@pytest.mark.slow
def test_backend_that_is_not_installed(python: Path, tmp_path: Path):
    status, text = run_kit(python, tmp_path, "--backend=yourchip")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "backend 'yourchip' is not installed (installed: mychip, reference)" in text

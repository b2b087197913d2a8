"""Every test file can be collected in an environment with the core and one backend: what it lacks, it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT, link_torch, pip

pytestmark = pytest.mark.end_to_end

BACKENDS = ("cpu", "nvidia", "amd")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of the core and of every backend."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT, *(ROOT / "backends" / name for name in BACKENDS)]
    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder, *sources)
    return folder


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This environment's libraries, without any kda_core."""
    # Hypothesis parses every module that lies in a folder of another name.
    folder = tmp_path_factory.mktemp("environment") / "site-packages"
    link_torch(folder)
    return folder


def collect(folder: Path, wheels: list[Path], libraries: Path) -> tuple[int, str]:
    """Collect every tier of tests/ where only these wheels are installed; the exit status and what pytest printed."""
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", folder, *wheels)
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "PYTEST_", "KDA_", "TRITON_"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder), str(libraries)]), "KDA_TEST_MODE": "all"}
    # -S: the wheels of this environment's site-packages must not be seen.
    command = [sys.executable, "-S", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", ROOT / "tests"]
    child = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return child.returncode, child.stdout + child.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_file_is_collected_with_one_backend(wheels: Path, libraries: Path, tmp_path: Path, backend: str):
    found = [next(wheels.glob("kda_core-*.whl")), next(wheels.glob(f"kda_core_{backend}-*.whl"))]
    status, text = collect(tmp_path, found, libraries)
    assert status == pytest.ExitCode.OK, text
    collected = set(re.findall(r"^(?:.*/)?(test_\w+\.py)::", text, flags=re.M))
    skipped = dict(re.findall(r"^SKIPPED \[\d+\] \S*?(test_\w+\.py):\d+: (.*)$", text, flags=re.M))
    assert collected | skipped.keys() == {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    missing = [name for name in BACKENDS if name != backend]
    for name in missing:
        # Files about one backend say which wheel they lack and how to install it.
        about = {path.name for path in (ROOT / "tests" / name).glob("test_*.py")}
        assert about <= skipped.keys()
        assert all(f"pip install ./backends/{name}" in skipped[file] for file in about)

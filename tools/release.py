"""Build and check everything that a release would upload; upload nothing.

    python tools/release.py [--torch torch==2.13.0] [--final]

In this order: the versions of all packages agree; sdists and, from these, wheels are built in ``build/release``; every
wheel holds what its package has in the checkout, and the licence; ``twine check --strict`` passes; the core and the
backends install together in a clean environment, then the adapters without their stacks, and ``kda verify`` compares
the CPU backend with the oracle. ``--final`` also asks for a clean working tree and a dated section of the version in
CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "release"
CLEAN = ROOT / "build" / "release-venv"
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"


class ReleaseError(Exception):
    """A reason not to release."""


def packages(root: Path = ROOT) -> dict[str, Path]:
    """Folder of every package's pyproject.toml, by the name of what it installs; the core first."""
    found = [path for kind in ("backends", "integrations") for path in sorted(root.glob(f"{kind}/*/pyproject.toml"))]
    return {"kda_core": root, **{f"kda_core_{path.parent.name}": path.parent for path in found}}


def version_of(folder: Path, package: str) -> str:
    """The version that a package states in its ``_version.py``, or in its ``__init__.py``."""
    files = (folder / package / name for name in ("_version.py", "__init__.py"))
    text = next(file for file in files if file.exists()).read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.M)
    if found is None:
        raise ReleaseError(f'{package}: expected a line __version__ = "..." in its __init__.py, found none')
    return found[1]


def common_version(root: Path = ROOT) -> str:
    """The version of all packages; they are released together."""
    versions = {package: version_of(folder, package) for package, folder in packages(root).items()}
    if len(set(versions.values())) != 1:
        raise ReleaseError(f"expected one version in all packages, got {versions}")
    return versions["kda_core"]


def check_final(version: str, changelog: str, changes: str) -> None:
    """Conditions that only the release itself must meet.

    Args:
        version: of all packages. changelog: text of CHANGELOG.md. changes: what ``git status --porcelain`` prints.

    Raises:
        ReleaseError: uncommitted changes, or no section ``## [version] - YYYY-MM-DD`` with entries.
    """
    if changes.strip():
        raise ReleaseError(f"expected a clean working tree, got:\n{changes.rstrip()}")
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$\n(.*?)(?=^## |\Z)"
    section = re.search(heading, changelog, flags=re.M | re.S)
    if section is None or not re.search(r"^- ", section[1], flags=re.M):
        raise ReleaseError(f"CHANGELOG.md: expected a section '## [{version}] - YYYY-MM-DD' with entries, found none")


def check_contents(wheel: Path, package: str, sources: Path) -> None:
    """Compare a wheel with its package in the checkout; a sdist that leaves files out makes such a wheel.

    Raises:
        ReleaseError: files of the package that are not in the wheel, files beside it that do not belong there, or a
            wheel without the licence, whose text every copy must have.
    """
    files = [path for path in (sources / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(sources).as_posix() for path in files}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    if found != expected:
        missing, beside = (sorted(names) or "nothing" for names in (expected - found, found - expected))
        raise ReleaseError(f"{wheel.name}: missing {missing}, unexpected {beside}")
    if licences != [(ROOT / "LICENSE").read_bytes()]:
        raise ReleaseError(f"{wheel.name}: expected the text of LICENSE, found {len(licences) or 'no'} other")


def run(*command: object, cwd: Path = ROOT) -> None:
    """Run a command that must succeed, without the caller's variables for Python and kda_core."""
    print("$", *command, flush=True)
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("KDA_", "PYTHONPATH"))}
    subprocess.run([str(part) for part in command], cwd=cwd, env=environment, check=True)


def build() -> list[Path]:
    """Build a sdist of every package, and a wheel from it; returns all files."""
    shutil.rmtree(OUT, ignore_errors=True)
    for folder in packages().values():
        run(sys.executable, "-I", "-m", "build", "--no-isolation", "--outdir", OUT, folder)
    return sorted(OUT.iterdir())


def installations(wheels: dict[str, Path], root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Arguments of pip that install wheels (by the name of what they install), in two runs.

    First the core and the backends with all that they need. Then the adapters without their stacks: vLLM and SGLang
    each need one version of torch, and not the same one.
    """
    adapters = {f"kda_core_{path.name}" for path in (root / "integrations").glob("*")}
    core, *backends = (str(wheel) for name, wheel in wheels.items() if name not in adapters)
    alone = [str(wheel) for name, wheel in wheels.items() if name in adapters]
    return [f"{core}[cli]", *backends], ["--no-deps", *alone]


def verify_installed(wheels: dict[str, Path], torch: str) -> None:
    """Install all wheels in a clean environment and compare the CPU backend with the oracle there."""
    shutil.rmtree(CLEAN, ignore_errors=True)
    run(sys.executable, "-I", "-m", "venv", CLEAN)
    pip = [CLEAN / "bin" / "python", "-I", "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-compile", "--constraint", CONSTRAINTS]
    # Install torch first and alone: a plain requirement of it may fetch another build, of several gigabytes.
    run(*install, torch)
    with_needs, alone = installations(wheels)
    run(*install, *with_needs)
    run(*pip, "check")
    run(*install, *alone)
    # Outside the checkout, whose kda_core would hide the wheel's.
    for command in ("info", "verify"):
        run(CLEAN / "bin" / "kda", command, cwd=CLEAN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--torch", default="torch", help="what to install as torch, for example a wheel")
    parser.add_argument("--final", action="store_true", help="also ask for a clean tree and a dated CHANGELOG section")
    options = parser.parse_args()
    try:
        version = common_version()
        if options.final:
            changes = subprocess.run(
                ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
            )
            check_final(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), changes.stdout)
        files = build()
        wheels = {name: next(OUT.glob(f"{name}-{version}-*.whl")) for name in packages()}
        for name, folder in packages().items():
            check_contents(wheels[name], name, folder)
        run(sys.executable, "-I", "-m", "twine", "check", "--strict", *files)
        verify_installed(wheels, options.torch)
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"not ready: {error}", file=sys.stderr)
        return 1
    print(f"\nkda_core {version}: {len(files)} files are ready; nothing was uploaded.")
    for file in files:
        print(f"  {hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``tools/release.py``: what it refuses. ``make release`` itself builds and installs everything."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import release


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with the core and one backend, both of version 1.2.3."""
    for folder, package in ((tmp_path, "kda_core"), (tmp_path / "backends" / "toy", "kda_core_toy")):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text('__version__ = "1.2.3"\n')
        (folder / "pyproject.toml").touch()
    return tmp_path


def test_this_checkout_has_one_version():
    backends, adapters = ("cpu", "nvidia", "amd"), ("fla", "transformers", "vllm", "sglang", "torchtitan")
    assert set(release.packages()) == {"kda_core", *(f"kda_core_{name}" for name in (*backends, *adapters))}
    assert release.common_version()


def test_versions_must_agree(tree: Path):
    assert release.common_version(tree) == "1.2.3"
    init = tree / "backends" / "toy" / "kda_core_toy" / "__init__.py"
    init.write_text('__version__ = "1.2.4"\n')
    with pytest.raises(release.ReleaseError, match=r"one version.*'kda_core': '1\.2\.3', 'kda_core_toy': '1\.2\.4'"):
        release.common_version(tree)
    init.write_text("")
    with pytest.raises(release.ReleaseError, match="kda_core_toy: expected a line __version__"):
        release.common_version(tree)


def test_a_wheel_must_hold_its_package_and_nothing_else(tree: Path):
    wheel = tree / "kda_core-1.2.3-py3-none-any.whl"
    licence = (release.ROOT / "LICENSE").read_text()

    def write(*names: str, licence: str | None = licence) -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in names:
                archive.writestr(name, "")
            if licence is not None:
                archive.writestr("kda_core-1.2.3.dist-info/licenses/LICENSE", licence)

    write("kda_core/__init__.py", "kda_core-1.2.3.dist-info/METADATA")
    release.check_contents(wheel, "kda_core", tree)
    write("kda_core/__init__.py", "tests/test_it.py")
    with pytest.raises(release.ReleaseError, match=r"missing nothing, unexpected \['tests/test_it.py'\]"):
        release.check_contents(wheel, "kda_core", tree)
    (tree / "kda_core" / "py.typed").touch()
    write("kda_core/__init__.py")
    with pytest.raises(release.ReleaseError, match=r"missing \['kda_core/py.typed'\]"):
        release.check_contents(wheel, "kda_core", tree)
    for text in (None, "another"):
        write("kda_core/__init__.py", "kda_core/py.typed", licence=text)
        with pytest.raises(release.ReleaseError, match="expected the text of LICENSE"):
            release.check_contents(wheel, "kda_core", tree)


def test_every_package_has_its_types():
    assert all((folder / package / "py.typed").is_file() for package, folder in release.packages().items())


def test_every_package_has_the_licence():
    """Its wheel takes the file from its own folder, as its sdist does."""
    texts = {(folder / "LICENSE").read_bytes() for folder in release.packages().values()}
    assert texts == {(release.ROOT / "LICENSE").read_bytes()}


def test_adapters_are_installed_without_their_stacks():
    """vLLM and SGLang need other versions of torch each: pip can install no environment with all of them."""
    with_needs, alone = release.installations({name: Path(name) for name in release.packages()})
    assert with_needs == ["kda_core[cli]", *(f"kda_core_{name}" for name in ("amd", "cpu", "nvidia"))]
    adapters = ("fla", "sglang", "torchtitan", "transformers", "vllm")
    assert alone == ["--no-deps", *(f"kda_core_{name}" for name in adapters)]


def test_a_release_needs_a_clean_tree_and_a_dated_section():
    dated = (
        "## [Unreleased]\n\n## [1.2.3] - 2026-01-31\n\n### Added\n\n- A thing.\n\n## [1.2.2] - 2026-01-01\n\n- Old.\n"
    )
    release.check_final("1.2.3", dated, "")
    with pytest.raises(release.ReleaseError, match=r"clean working tree, got:\n M README\.md"):
        release.check_final("1.2.3", dated, " M README.md\n")
    for changelog in (
        dated.replace("- A thing.\n", ""),
        dated.replace("2026-01-31", "unreleased"),
        "## [Unreleased]\n",
    ):
        with pytest.raises(release.ReleaseError, match=r"expected a section '## \[1\.2\.3\]"):
            release.check_final("1.2.3", changelog, "")

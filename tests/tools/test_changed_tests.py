"""``tools/changed_tests.py``: what a change reaches, in a little repository and in this one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import changed_tests
import pytest
from changed_tests import Checkout, changed_files, default_base, selected

FILES = {
    "pyproject.toml": "",
    "requirements/test.txt": "",
    "mkdocs.yml": "",
    "LICENSE": "",
    "docs/page.md": "",
    "kda_core/__init__.py": "from . import api\n",
    "kda_core/api.py": "from kda_core.plugins import registry\n",
    "kda_core/plugins.py": "registry = {}\n",
    "kda_core/lazy.py": "",
    "kda_core/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kda_core import lazy\n",
    "kda_core/testing/__init__.py": "",
    "kda_core/testing/plugin.py": "import pytest\n@pytest.fixture\ndef kda(): ...\n",
    "backends/cpu/pyproject.toml": '[project.entry-points."kda_core.backends.v1"]\ncpu = "kda_core_cpu.plugin"\n',
    "backends/cpu/kda_core_cpu/__init__.py": "",
    "backends/cpu/kda_core_cpu/plugin.py": "def forward():\n    from kda_core_cpu import kernels\n",
    "backends/cpu/kda_core_cpu/kernels.py": "",
    "backends/chip/pyproject.toml": '[project.entry-points."kda_core.backends.v1"]\nchip = "kda_core_chip.plugin"\n',
    "backends/chip/kda_core_chip/__init__.py": "",
    "backends/chip/kda_core_chip/plugin.py": "from .deep import kernels\n",
    "backends/chip/kda_core_chip/deep/__init__.py": "",
    "backends/chip/kda_core_chip/deep/kernels.py": "",
    "tools/program.py": "import helper_of_tools\n",
    "tools/helper_of_tools.py": "",
    "tests/conftest.py": 'pytest_plugins = ["kda_core.testing.plugin"]\n',
    "tests/support/shared.py": "import numbers\n",
    "tests/core/data/one.bin": "",
    "tests/core/test_call.py": "import kda_core\n",
    "tests/core/test_data.py": 'FILES = "data"\n',
    "tests/core/test_child.py": 'PROGRAM = "from kda_core.typed import x; print(x)"\n',
    "tests/core/test_kit.py": '"""Names kda_core and chip."""\ndef test_kit(kda): ...\n',
    "tests/chip/test_chip.py": "import installed\ninstalled.need_backend('chip')\n",
    "tests/tools/test_program.py": "import program\nfrom shared import x\n",
    "tests/tools/test_files.py": "from pathlib import Path\nFILES = Path().glob('*.py')\n",
    "tests/docs/test_pages.py": "pytestmark = pytest.mark.end_to_end\n",
}
EVERY = {Path(name).stem for name in FILES if Path(name).name.startswith("test_")}


def git(root: Path, *arguments: str) -> None:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("GIT_")}
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *arguments], cwd=root, env=environment, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one commit on main."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message=first")
    return tmp_path


def reached(root: Path, *changed: str) -> set[str]:
    """Names of the test files that these changes reach, without those that read every Python file."""
    return {test.stem for test in selected(Checkout(root, changed), changed)} - {"test_files"}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("tests/core/test_call.py", {"test_call"}),
        # Through packages' __init__.py, which an import runs.
        ("kda_core/api.py", {"test_call", "test_child", "test_kit"}),
        # In a string, and not only for a type checker.
        ("kda_core/typed.py", {"test_child"}),
        ("kda_core/lazy.py", set()),
        # By the name of a fixture.
        ("kda_core/testing/plugin.py", {"test_kit"}),
        # Inside functions, and whatever calls the default backend.
        ("backends/cpu/kda_core_cpu/kernels.py", {"test_call", "test_child", "test_kit"}),
        ("backends/chip/kda_core_chip/deep/kernels.py", {"test_chip"}),
        ("tools/helper_of_tools.py", {"test_program"}),
        ("tests/support/shared.py", {"test_program"}),
        ("tests/core/data/one.bin", {"test_data"}),
        ("docs/page.md", {"test_pages"}),
        ("mkdocs.yml", {"test_pages"}),
        ("LICENSE", set()),
    ],
)
def test_what_a_change_reaches(repository: Path, changed: str, tests: set[str]):
    assert reached(repository, changed) == tests


@pytest.mark.parametrize("changed", ["pyproject.toml", "tests/conftest.py", "requirements/test.txt", "unknown.bin"])
def test_what_reaches_every_test(repository: Path, changed: str):
    assert {test.stem for test in selected(Checkout(repository, [changed]), [changed])} == EVERY


def test_a_pattern_reads_new_files(repository: Path):
    (repository / "kda_core" / "new.py").touch()
    changed = changed_files(repository, "HEAD")
    assert changed == ["kda_core/new.py"]
    assert {test.stem for test in selected(Checkout(repository, changed), changed)} == {"test_files"}


def test_the_reason_is_the_way_to_the_change(repository: Path):
    changed = "backends/cpu/kda_core_cpu/kernels.py"
    reasons = selected(Checkout(repository), [changed])
    way = "kda_core/plugins.py -> backends/cpu/kda_core_cpu/plugin.py -> backends/cpu/kda_core_cpu/kernels.py"
    assert reasons[repository / "tests/core/test_call.py"] == f"kda_core/__init__.py -> kda_core/api.py -> {way}"
    reasons = selected(Checkout(repository), ["tests/core/test_call.py"])
    assert reasons[repository / "tests/core/test_call.py"] == "changed"


def test_a_change_is_committed_uncommitted_untracked_and_deleted(repository: Path):
    git(repository, "checkout", "--quiet", "-b", "branch")
    (repository / "kda_core" / "lazy.py").write_text("x = 1\n")
    git(repository, "commit", "--quiet", "--all", "--message=second")
    (repository / "kda_core" / "typed.py").unlink()
    (repository / "tools" / "program.py").write_text("x = 1\n")
    (repository / "tests" / "core" / "test_new.py").touch()
    changed = changed_files(repository, default_base(repository))
    assert changed == ["kda_core/lazy.py", "kda_core/typed.py", "tests/core/test_new.py", "tools/program.py"]
    # Who imports a deleted module must say so.
    assert reached(repository, *changed) == {"test_child", "test_new", "test_program"}


def test_on_main_the_last_commit_is_the_change_unless_something_is_uncommitted(repository: Path):
    (repository / "kda_core" / "lazy.py").write_text("x = 1\n")
    assert changed_files(repository, default_base(repository)) == ["kda_core/lazy.py"]
    git(repository, "commit", "--quiet", "--all", "--message=second")
    assert changed_files(repository, default_base(repository)) == ["kda_core/lazy.py"]


def test_fast_files_run_and_end_to_end_files_are_listed(repository: Path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(changed_tests, "subprocess", FakeRun(calls))
    (repository / "tools" / "program.py").write_text("x = 1\n")
    (repository / "docs" / "page.md").write_text("x\n")
    assert changed_tests.main(["--", "-x"], repository) == 0
    assert [call[1:] for call in calls] == [
        ["-m", "not end_to_end", "-x", "tests/tools/test_files.py", "tests/tools/test_program.py"]
    ]
    text = capsys.readouterr().out
    assert "2 changed files since" in text
    assert "they reach 3 of 8 test files" in text
    assert "tests/docs/test_pages.py: docs/page.md; end-to-end, not run" in text
    assert changed_tests.main(["--list"], repository) == 0
    assert len(calls) == 1


class FakeRun:
    """``subprocess`` that runs git and notes other commands."""

    CalledProcessError = subprocess.CalledProcessError

    def __init__(self, calls: list[list[str]]) -> None:
        self.calls = calls

    def run(self, command: list[str], **options):
        if command[0] == "git":
            return subprocess.run(command, **options)
        self.calls.append(command)
        return subprocess.CompletedProcess(command, 5)


@pytest.fixture(scope="module")
def here() -> Checkout:
    return Checkout(changed_tests.ROOT)


@pytest.mark.parametrize(
    ("changed", "among", "not_among"),
    [
        ("kda_core/checks.py", {"test_checks", "test_router", "test_cpu_backend"}, set()),
        ("benchmarks/inputs.py", {"test_benchmarks", "test_inputs"}, {"test_checks", "test_nvidia_aot"}),
        ("kda_core/triton_lib/decay.py", {"test_nvidia_aot", "test_amd_aot"}, {"test_checks", "test_benchmarks"}),
        ("backends/nvidia/kda_core_nvidia/aot.py", {"test_nvidia_aot"}, {"test_amd_interpret", "test_checks"}),
        ("backends/cpu/kda_core_cpu/levels.py", {"test_cpu_backend", "test_kda", "test_ops"}, set()),
        ("tests/support/toys.py", {"test_router", "test_contract"}, {"test_checks"}),
        ("tests/core/data/kda_gate.v1.pt2", {"test_exported"}, {"test_checks"}),
        ("tests/support/forks.py", {"test_forks"}, {"test_checks"}),
        ("docs/limits.md", {"test_docs", "test_limits"}, {"test_checks"}),
        ("Makefile", {"test_docs"}, {"test_checks"}),
    ],
)
def test_what_a_change_of_this_repository_reaches(here: Checkout, changed: str, among: set[str], not_among: set[str]):
    found = {test.stem for test in selected(here, [changed])}
    assert among <= found
    assert not not_among & found

"""``.ci/steps.sh``: a heavy step is skipped until one of its inputs changes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = ROOT / ".ci" / "steps.sh"
SCRIPT = """
set -euo pipefail
source .ci/steps.sh
compute() { echo "runs with $1"; }
heavy long "compute numbers" sources requirements.txt
report
"""
TOGETHER = """
set -euo pipefail
source .ci/steps.sh
found=()
for name in sources requirements.txt; do
    if due "$name" "compute $name" "$name"; then found+=("$name"); fi
done
echo "due: ${found[*]}"
passed "${found[@]}"
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def git(tree: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=tree, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the steps, two inputs and a file that is none."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(STEPS, tmp_path / ".ci")
    (tmp_path / "sources").mkdir()
    for name in ("sources/kernel.py", "requirements.txt", "README.md"):
        (tmp_path / name).write_text("first\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def run(tree: Path, script: str = SCRIPT, everything: str = "") -> str:
    found = subprocess.run(
        ["bash", "-c", script], cwd=tree, env={"PATH": "/usr/bin:/bin:/usr/local/bin", "EVERYTHING": everything},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return found.stdout


def ran(output: str) -> bool:
    assert ("runs with numbers" in output) != ("skipped, passed on 20" in output)
    return "runs with numbers" in output


def change(tree: Path, name: str) -> None:
    (tree / name).write_text("second\n")
    git(tree, "commit", "-qam", "second")


def test_a_step_is_skipped_while_its_inputs_are_the_same(tree: Path):
    assert ran(run(tree))
    assert not ran(run(tree))
    change(tree, "README.md")
    assert not ran(run(tree))
    assert ran(run(tree, everything="1"))


@pytest.mark.parametrize("name", ["sources/kernel.py", "requirements.txt"])
def test_a_change_of_an_input_makes_its_step_run(tree: Path, name: str):
    assert ran(run(tree))
    change(tree, name)
    assert ran(run(tree))
    assert not ran(run(tree))


def test_a_new_file_a_changed_function_and_a_changed_command_are_changes(tree: Path):
    assert ran(run(tree))
    (tree / "sources" / "new.py").write_text("")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "new")
    assert ran(run(tree))
    assert ran(run(tree, SCRIPT.replace('echo "', 'echo "again ')).replace("again ", ""))
    assert ran(run(tree, SCRIPT.replace("compute numbers", "compute numbers exactly")))


def test_what_is_not_committed_runs_and_is_not_recorded(tree: Path):
    assert ran(run(tree))
    (tree / "sources" / "kernel.py").write_text("not committed\n")
    assert ran(run(tree))
    assert ran(run(tree))
    git(tree, "checkout", "-q", "sources")
    assert not ran(run(tree))


def test_a_step_that_fails_is_not_recorded(tree: Path):
    failing = SCRIPT.replace('echo "runs with $1"', 'echo "runs with $1"; false')
    for _ in range(2):
        found = subprocess.run(["bash", "-c", failing], cwd=tree, capture_output=True, text=True, check=False)
        assert found.returncode != 0
        assert "runs with numbers" in found.stdout
    assert not (tree / ".ci" / "passed").exists()


def test_a_step_that_could_not_run_is_named_and_not_recorded(tree: Path):
    script = SCRIPT.replace('heavy long "compute numbers"', 'due long "compute numbers"').replace(
        "report", 'step "long"\nnot_run "nothing is reached"\nreport'
    )
    for _ in range(2):
        assert re.search(r"^ +\d+ s  long: DID NOT RUN, nothing is reached$", run(tree, script), re.MULTILINE)
    assert not (tree / ".ci" / "passed").exists()


def test_the_table_has_every_step(tree: Path):
    assert re.search(r"^ +\d+ s  long$", run(tree), re.MULTILINE)
    assert "skipped  long: passed on 20" in run(tree)


def test_steps_that_run_together_are_skipped_one_by_one(tree: Path):
    assert "due: sources requirements.txt\n" in run(tree, TOGETHER)
    assert "due: \n" in run(tree, TOGETHER)
    change(tree, "requirements.txt")
    assert "due: requirements.txt\n" in run(tree, TOGETHER)
    assert "due: \n" in run(tree, TOGETHER)


def test_what_changes_while_a_step_runs_is_not_recorded_as_its_input(tree: Path):
    late = "echo late > sources/kernel.py; git -c user.name=a -c user.email=a@b commit -qam late"
    assert ran(run(tree, SCRIPT.replace('echo "runs with $1"', f'echo "runs with $1"; {late}')))
    assert ran(run(tree))


def test_an_input_that_does_not_exist_is_an_error(tree: Path):
    """A list that a move has made wrong would let a step be skipped for ever."""
    git(tree, "mv", "requirements.txt", "needed.txt")
    git(tree, "commit", "-qm", "moved")
    found = subprocess.run(["bash", "-c", SCRIPT], cwd=tree, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "requirements.txt" in found.stderr
    assert "runs with" not in found.stdout


def test_every_room_of_tests_has_a_step():
    text = (ROOT / ".ci" / "run").read_text()
    always, lowest = (re.search(rf"^{name}=\((.*)\)$", text, re.MULTILINE)[1].split() for name in ("always", "LOWEST"))
    heavy = {f"tests/{name}" for name in re.findall(r"^room (\w+) ", text, re.MULTILINE)}
    (vendors,) = set(re.findall(r"^for vendor in (.*); do\n    room ", text, re.MULTILINE))
    heavy |= {f"tests/{vendor}" for vendor in vendors.split()} | {"tests/integrations"}
    rooms = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {*always, *heavy} == rooms
    assert not heavy & {*always}
    assert {*lowest} <= rooms


def test_the_adapters_step_depends_on_all_that_its_tests_read():
    """Otherwise a README with another line, which those tests run, would not be run."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"(\S*)\{([\w,]+)\}(\S*\.py)", lambda m: " ".join(m[1] + n + m[3] for n in m[2].split(",")), text)
    lists = dict(re.findall(r"^(\w+)=\(([^)]*)\)$", text, flags=re.M))
    named = re.search(r"^if due integrations integrated (.*); then$", text, flags=re.M)[1]
    inputs = re.sub(r'"\$\{(\w+)\[@\]\}"', lambda found: lists[found[1]], named).split()
    read = set()
    for file in (ROOT / "tests" / "integrations").glob("*.py"):
        code = file.read_text(encoding="utf-8")
        read |= set(re.findall(r'"([\w./-]+\.\w+)"', code))
        read |= {f"benchmarks/{name}.py" for name in re.findall(r"^import (\w+)$", code, flags=re.M)}
    read = {path for path in read if (ROOT / path).is_file()}
    assert {"README.md", "docs/integrations/fla.md", "benchmarks/layer.py"} <= read
    assert {path for path in read if not any(f"{path}/".startswith(f"{i}/") for i in inputs)} == set()

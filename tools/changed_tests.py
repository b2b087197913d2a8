"""Run the fast tests whose files a change can reach, and say which and why.

    python tools/changed_tests.py [--base REF] [--list] [-- OPTIONS OF PYTEST]

A change is what differs from ``--base``, committed or not, and files that git does not track yet. Without ``--base``
the change begins where the branch left ``origin/main`` or ``main``. On that branch itself it begins at HEAD, or at the
commit before if nothing is uncommitted.

A test file reaches the files that it imports, directly or through others; modules and files that it names in strings,
by a pattern or by their folder; the backends that it names; and the providers of its fixtures. A call that names no
backend reaches the CPU backend. Some files reach every test: ``pyproject.toml``, ``conftest.py``, ``requirements/``.
Pages and what belongs to their site reach ``tests/docs``. A change that no rule covers runs every test. End-to-end and
slow tests do not run; the tool lists files that have no others.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from import_graph import Graph, Source, files_by_name, mentioned, read, resolve

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = re.compile(r"pyproject\.toml|requirements/.*|(.*/)?conftest\.py")
"""Files that reach every test."""

NOTHING = re.compile(r"LICENSE|\.gitignore|\.github/.*|\.ci/.*|docs/notes/.*\.patch")
"""Files that reach a test only if it names them."""

SITE = re.compile(r".*\.md|docs/.*|mkdocs\.yml")
PAGES = "tests/docs"
"""Pages and what belongs to their site, and the folder of their tests."""

BY_DEFAULT = ("kda_core/plugins.py", "cpu")
"""The file that chooses a backend, and the backend that it chooses for tensors on the CPU."""

END_TO_END_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.end_to_end\b", flags=re.M)
"""How a file says that all its tests are end-to-end (tests/conftest.py)."""


def git(root: Path, *arguments: str) -> list[str]:
    """Lines that git prints.

    Raises:
        subprocess.CalledProcessError: git failed.
    """
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def default_base(root: Path) -> str:
    """The commit at which the change begins, as the module's docstring says."""
    head = git(root, "rev-parse", "HEAD")[0]
    for branch in ("origin/main", "main"):
        try:
            common = git(root, "merge-base", branch, "HEAD")[0]
        except subprocess.CalledProcessError:
            continue
        if common != head:
            return common
    return head if git(root, "status", "--porcelain") else "HEAD~"


def changed_files(root: Path, base: str) -> list[str]:
    """Paths from the root that differ from a commit, deleted and untracked ones included, sorted."""
    untracked = git(root, "ls-files", "--others", "--exclude-standard")
    return sorted({*git(root, "diff", "--name-only", "--no-renames", base), *untracked})


class Checkout:
    """The files of a checkout and what reaches what.

    Attributes:
        tests: the test files. graph: for every Python file the files that it reaches directly.
    """

    def __init__(self, root: Path, changed: Iterable[str] = ()) -> None:
        self.root = root
        listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard")
        # A deleted module is still known by its name.
        paths = sorted({root / name for name in (*listed, *changed)})
        self.python = [path for path in paths if path.suffix == ".py"]
        self.tests = [p for p in self.python if re.match(r"tests/(.*/)?test_\w+\.py", self.name(p)) and p.exists()]
        self.known = files_by_name(self.python)
        self.backends = dict(self._entry_points())
        self.sources = {path: read(path) for path in self.python}
        self.graph = {path: self._reached(path, source) for path, source in self.sources.items()}

    def name(self, path: Path) -> str:
        """A path from the root."""
        return path.relative_to(self.root).as_posix()

    def _entry_points(self) -> Iterator[tuple[str, set[Path]]]:
        for project in self.root.glob("backends/*/pyproject.toml"):
            for table in re.findall(r"^\[project\.entry-points\..*\]\n((?:.+\n)+)", project.read_text(), flags=re.M):
                for name, module in re.findall(r'^([\w-]+) = "([\w.]+)"', table, flags=re.M):
                    yield name, resolve(module, self.known)

    def _reached(self, path: Path, source: Source) -> set[Path]:
        found = {file for name in source.imported for file in resolve(name, self.known)}
        for text in source.strings:
            found |= mentioned(text, self.known)
            if self.name(path).startswith("tests/"):
                found |= self.backends.get(text, set())
        chooser, default = BY_DEFAULT
        if self.name(path) == chooser:
            found |= self.backends.get(default, set())
        if path in self.tests:
            found |= self._providers(source)
        return found - {path}

    def _providers(self, source: Source) -> set[Path]:
        """Plugins that conftest.py loads, and that give a fixture which a test takes."""
        loaded = [mentioned(text, self.known) for text in read(self.root / "tests" / "conftest.py").strings]
        given = [files for files in loaded if any(read(file).provided & source.arguments for file in files)]
        return set().union(*given)

    def readers(self, changed: str) -> set[Path]:
        """Python files with a string that ends with a file's name, matches it as a pattern, or is its folder's name."""
        *folders, name = changed.split("/")
        # A name without a suffix may be any word.
        ending = name if "." in name else changed
        said = re.compile(rf"(.*[^\w.-])?{re.escape(ending)}", flags=re.S)
        # A room of tests/ may be called like a backend; a package is reached by imports.
        deep = folders[2:] if folders[:1] == ["tests"] else [] if name.endswith(".py") else folders[1:]
        folder = set(deep[-1:])

        def reads(source: Source) -> bool:
            return any(
                text in folder or said.fullmatch(text) or ("*." in text and fnmatch(name, text.rpartition("/")[2]))
                for text in source.strings
            )

        return {file for file, source in self.sources.items() if reads(source)}

    def starts(self, changed: str) -> set[Path] | None:
        """The Python files where a change enters the graph; None: it reaches every test."""
        path = self.root / changed
        if EVERYTHING.fullmatch(changed):
            return None
        found = self.readers(changed)
        if path.suffix == ".py":
            return found | {path}
        if SITE.fullmatch(changed):
            found |= {test for test in self.tests if self.name(test).startswith(f"{PAGES}/")}
        return found if found or NOTHING.fullmatch(changed) else None


def chain(graph: Graph, test: Path, ends: set[Path]) -> list[Path] | None:
    """The shortest way from a test file to one of some files, both included; None where there is none."""
    before: dict[Path, Path | None] = {test: None}
    queue = deque([test])
    while queue:
        file = queue.popleft()
        if file in ends:
            way: list[Path] = []
            step: Path | None = file
            while step is not None:
                way.insert(0, step)
                step = before[step]
            return way
        for other in sorted(graph.get(file, ())):
            if other not in before:
                before[other] = file
                queue.append(other)
    return None


def selected(checkout: Checkout, changed: Iterable[str]) -> dict[Path, str]:
    """The test files that a change reaches, with the reason."""
    found: dict[Path, str] = {}
    for name in changed:
        ends = checkout.starts(name)
        for test in checkout.tests:
            if test in found:
                continue
            if ends is None:
                found[test] = f"{name} reaches every test"
            elif (way := chain(checkout.graph, test, ends)) is not None:
                steps = [checkout.name(step) for step in way[1:]]
                found[test] = " -> ".join(steps + [name] * (way[-1] != checkout.root / name)) or "changed"
    return found


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--base", help="the commit that the change is measured from")
    parser.add_argument("--list", action="store_true", help="say which tests would run, and run nothing")
    parser.add_argument("pytest", nargs="*", metavar="OPTION", help="options of pytest, after --")
    asked = parser.parse_args(arguments)
    base = asked.base or default_base(root)
    changed = changed_files(root, base)
    checkout = Checkout(root, changed)
    found = selected(checkout, changed)
    reach = f"they reach {len(found)} of {len(checkout.tests)} test files"
    print(f"{len(changed)} changed files since {base[:12]}; {reach}", flush=True)
    fast = []
    for test, reason in sorted(found.items()):
        left_out = END_TO_END_FILE.search(test.read_text(encoding="utf-8"))
        print(f"  {checkout.name(test)}: {reason}{'; end-to-end, not run' if left_out else ''}")
        fast += [] if left_out else [checkout.name(test)]
    if asked.list or not fast:
        return 0
    # The console script: "python -m pytest" would import kda_core from the checkout instead of the installed one.
    pytest = Path(sys.executable).with_name("pytest")
    status = subprocess.run([pytest, "-m", "not end_to_end", *asked.pytest, *fast], cwd=root, check=False).returncode
    return 0 if status == 5 else status  # 5: the files have no fast tests


if __name__ == "__main__":
    sys.exit(main())

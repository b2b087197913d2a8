"""Which Python files of a checkout import which others, read from their text.

A module is known by the names under which a file can import it: its dotted name below the first folder without an
``__init__.py``. Imports inside functions count, those under ``if TYPE_CHECKING`` do not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Graph = dict[Path, set[Path]]


def module_name(file: Path) -> str:
    """The name that imports a file: ``kda_core/api.py`` is "kda_core.api", ``tools/release.py`` is "release"."""
    parts = [] if file.name == "__init__.py" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


@dataclass
class Source:
    """The imports, strings and fixtures of one file.

    Attributes:
        imported: names of modules, or of a module and something in it.
        at_once: those of ``imported`` that importing the file imports.
        strings: constants, without docstrings.
        arguments: names of the arguments of test functions and fixtures.
        provided: names of fixtures that the file defines.
    """

    imported: set[str] = field(default_factory=set)
    at_once: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    arguments: set[str] = field(default_factory=set)
    provided: set[str] = field(default_factory=set)


def read(file: Path) -> Source:
    """Read a file; one that does not exist is empty."""
    found = Source()
    if file.exists():
        package = module_name(file)
        if file.name != "__init__.py":
            package = package.rpartition(".")[0]
        _visit(ast.parse(file.read_text(encoding="utf-8")), package, found, at_once=True)
    return found


def _visit(node: ast.AST, package: str, found: Source, at_once: bool) -> None:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.orelse:
            _visit(child, package, found, at_once)
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = set(_names(node, package))
        found.imported |= names
        found.at_once |= names if at_once else set()
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.strings.add(node.value)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        at_once = False
        found.arguments |= {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
        if any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list):
            found.provided.add(node.name)
    docstring = _docstring(node)
    for child in ast.iter_child_nodes(node):
        if child is not docstring:
            _visit(child, package, found, at_once)


def _docstring(node: ast.AST) -> ast.AST | None:
    documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    return node.body[0] if documented and ast.get_docstring(node, clean=False) is not None else None


def _names(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    parents = package.split(".") if package else []
    base = parents[: len(parents) - node.level + 1] if node.level else []
    origin = ".".join([*base, *([node.module] if node.module else [])])
    for alias in node.names:
        yield origin if alias.name == "*" else f"{origin}.{alias.name}"


def files_by_name(files: Collection[Path]) -> dict[str, set[Path]]:
    """Files by the module's name; plain scripts of several folders may share one."""
    found: dict[str, set[Path]] = {}
    for file in files:
        found.setdefault(module_name(file), set()).add(file)
    return found


def resolve(name: str, known: Mapping[str, Collection[Path]]) -> set[Path]:
    """The files that importing a name runs: the module's and those of the packages round it."""
    parts = name.split(".")
    return {file for end in range(1, len(parts) + 1) for file in known.get(".".join(parts[:end]), ())}


def mentioned(text: str, known: Mapping[str, Collection[Path]]) -> set[Path]:
    """The files of modules that a string names with their package: programs of child processes, names of plugins."""
    if "kda_core" not in text:
        return set()
    names = re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", text)
    return {file for name in names if name.partition(".")[0].startswith("kda_core") for file in resolve(name, known)}


def cycles(graph: Graph) -> list[list[Path]]:
    """Groups of files that reach each other, sorted (Tarjan's strongly connected components of two files and more)."""
    index: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    found = []

    def connect(file: Path) -> None:
        index[file] = low[file] = len(index)
        stack.append(file)
        for other in graph[file]:
            if other not in index:
                connect(other)
                low[file] = min(low[file], low[other])
            elif other in stack:
                low[file] = min(low[file], index[other])
        if low[file] == index[file]:
            group = [stack.pop()]
            while group[-1] != file:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for file in graph:
        if file not in index:
            connect(file)
    return sorted(found)

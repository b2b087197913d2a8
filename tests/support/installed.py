"""Packages that a test file needs beside the core and pytest: without them it is skipped, with a command to install.

A file calls these functions before it imports what it needs; a test calls one where only it needs something. A package
that is installed and does not import is an error, not a reason to skip.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

import pytest
from packaging.version import Version


def need_backend(name: str) -> None:
    """Skip the calling test file where the wheel of a first-party backend is not installed."""
    __tracebackhide__ = True  # pytest then names the file that is skipped
    if find_spec(f"kda_core_{name}") is None:
        wheels = "cpu" if name == "cpu" else f"cpu {name}"
        skip(f'kda-core-{name} is not installed: pip install ./backends/{name}, or make test BACKENDS="{wheels}"')


def need_package(module: str, distribution: str | None = None, at_least: str | None = None) -> None:
    """Skip the calling test file, or test, where a package is not installed.

    Args:
        module: the package's import name.
        distribution: its name on the package index, where that is another one.
        at_least: the lowest version that will do.
    """
    __tracebackhide__ = True
    distribution = distribution or module
    wanted = f"pip install '{distribution}{f'>={at_least}' if at_least else ''}'"
    if find_spec(module) is None:
        skip(f"{distribution} is not installed: {wanted}")
    if at_least is not None:
        found = metadata.version(distribution)
        if Version(found) < Version(at_least):
            skip(f"{distribution} {found} is installed: {wanted}")


def skip(reason: str) -> None:
    """Skip the file that is being imported."""
    __tracebackhide__ = True
    pytest.skip(reason, allow_module_level=True)

"""Backends that are registered by hand, and runs of pytest within this one."""

from __future__ import annotations

import contextlib
import io

import pytest
from toys import installed

from kda_core._plugins import registry
from kda_core.hookspecs import hookimpl
from kda_core.testing.plugin import MODE_VARIABLE


@pytest.fixture
def registered():
    """Registers backends for one test; answers the name of each."""
    with contextlib.ExitStack() as stack:
        yield lambda backend: stack.enter_context(installed(backend))


@pytest.fixture
def altered():
    """Alters what some hooks of every backend answer, for one test."""
    with contextlib.ExitStack() as stack:

        def alter(change, *hooks: str) -> None:
            def wrapper(self, request):
                return change(request, (yield))

            plugin = type("Alteration", (), {hook: hookimpl(wrapper=True)(wrapper) for hook in hooks})()
            registry.add_wrapper(plugin)
            stack.callback(registry.remove_wrapper, plugin)

        yield alter


@pytest.fixture
def run_inner(tmp_path, monkeypatch):
    """Runs pytest with the kit's plugin in an empty folder; returns exit status and output."""
    monkeypatch.chdir(tmp_path)
    # unraisableexception collects garbage when a run ends: seconds among the objects of the session around this one.
    left_out = ("-p", "no:cacheprovider", "-p", "no:unraisableexception")
    alone = ("-p", "kda_core.testing.plugin", *left_out, "--import-mode=importlib", "--capture=no")

    def run(*arguments: str, mode: str = "fast") -> tuple[int, str]:
        monkeypatch.setenv(MODE_VARIABLE, mode)
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = pytest.main([*alone, *arguments])
        return int(status), output.getvalue()

    return run

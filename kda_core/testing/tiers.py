"""The order of the kit's tests, and their tiers, with a warning where nothing that was named has a test in one."""

from __future__ import annotations

import os
import re

import pytest

from kda_core.testing import suite

MODE_VARIABLE = "KDA_TEST_MODE"
MODES = ("fast", "slow", "all")
HOW = {"fast": f"without -m slow and without {MODE_VARIABLE}", "slow": f"with -m slow or {MODE_VARIABLE}=slow"}


def mode() -> str:
    """The tier that the environment asks for."""
    return os.environ.get(MODE_VARIABLE, "fast")


def is_slow(item: pytest.Item) -> bool:
    """Whether an item belongs to the slow tier."""
    return item.get_closest_marker("slow") is not None


def tier(config: pytest.Config) -> str | None:
    """The tier that runs, "fast" or "slow"; None: both, or the choice of an ``-m`` expression."""
    expression = config.getoption("markexpr") or ""
    if re.fullmatch(r"\s*slow\s*", expression):
        return "slow"
    if re.search(r"\bslow\b", expression) or mode() == "all":
        return None
    return mode()


def empty_tiers(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """A sentence when there are tests, but none in the tier that runs; a shell pattern may name files of both.

    ``items``: all that were collected, before any is deselected.
    """
    chosen, count = tier(config), len(items)
    if chosen is None or not items or any(is_slow(item) == (chosen == "slow") for item in items):
        return []
    other, tests = "fast" if chosen == "slow" else "slow", "1 test" if count == 1 else f"{count} tests"
    names = " ".join(config.args)
    return [f"no tests in tier {chosen} of {names}: it has {tests}, all {other}; they run {HOW[other]}"]


MODULES = (
    "test_forward", "test_state", "test_backward", "test_packing", "test_gates", "test_options", "test_recurrent",
    "test_paged_pool", "test_pool_options", "test_records", "test_layer", "test_inputs",
    "test_addressing", "test_rejections", "test_determinism", "test_graphs", "test_context_parallel", "test_extremes",
    "test_random",
)  # fmt: skip
"""Modules of the suite, the simplest first."""

_PLACE = {f"{suite.__name__}.{name}": place for place, name in enumerate(MODULES)}


def module_of(item: pytest.Item) -> str:
    """The module that defines a test, wherever it was imported to; "" for an item that is no function."""
    module = getattr(getattr(item, "function", None), "__module__", "")
    # With --import-mode=importlib pytest 8.0 prefixes the package's name with folders.
    _, package, name = module.rpartition("kda_core.testing.suite.")
    return package + name


def simplest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Sort the kit's items among the places that they hold; other items keep theirs."""
    kit = (item for item in items if module_of(item) in _PLACE)
    following = iter(sorted(kit, key=lambda item: _PLACE[module_of(item)]))
    return [next(following) if module_of(item) in _PLACE else item for item in items]

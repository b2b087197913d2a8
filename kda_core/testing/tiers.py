"""The order of the kit's tests, and their tiers, with a warning for arguments that have no test in the chosen one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

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


class TierCount:
    """Counts the tests of each tier for every argument of the command line, before deselection."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.items: list[tuple[Path, str, bool]] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.items.append((item.path, item.nodeid, is_slow(item)))

    def empty(self) -> list[str]:
        """A sentence for each argument that has tests, but none in the tier that runs.

        Empty if another argument has some: a shell pattern often names several files.
        """
        chosen = tier(self.config)
        if chosen is None:
            return []
        found = []
        for name in self.config.args:
            own = [slow for path, nodeid, slow in self.items if _is_under(path, nodeid, name, self.config)]
            if any(slow == (chosen == "slow") for slow in own):
                return []
            if own:
                other = "fast" if chosen == "slow" else "slow"
                tests = "1 test" if len(own) == 1 else f"{len(own)} tests"
                found.append(f"no tests in tier {chosen} of {name}: it has {tests}, all {other}; they run {HOW[other]}")
        return found


def _is_under(path: Path, nodeid: str, name: str, config: pytest.Config) -> bool:
    """Whether a test was collected because of this argument."""
    file, *inside = name.split("::")
    place = config.invocation_params.dir / file
    places = [place] if place.exists() else list(_places_of_package(file))
    below = "::".join(inside).partition("[")[0]
    return any(path.is_relative_to(p.resolve()) for p in places) and f"::{below}" in f"::{nodeid.partition('::')[2]}"


def _places_of_package(name: str) -> Iterator[Path]:
    """The path of a package or module that ``--pyargs`` names."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # no such package, or not a package's name
        return
    if spec is not None:
        found = spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
        yield from map(Path, found)


MODULES = (
    "test_forward", "test_state", "test_backward", "test_packing", "test_beta", "test_gates", "test_options",
    "test_intermediate_states", "test_recurrent", "test_paged_pool", "test_spec_decode", "test_pool_options",
    "test_records", "test_trees", "test_layer", "test_inputs", "test_addressing", "test_rejections", "test_determinism",
    "test_compile", "test_graphs", "test_context_parallel", "test_extremes", "test_random",
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
    kit = sorted((item for item in items if module_of(item) in _PLACE), key=lambda item: _PLACE[module_of(item)])
    following = iter(kit)
    return [next(following) if module_of(item) in _PLACE else item for item in items]

"""The order of the kit's tests: basic properties first, random combinations last."""

from __future__ import annotations

import pytest

from kda_core.testing import suite

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

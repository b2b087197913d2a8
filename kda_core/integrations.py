"""Adapters that let other stacks (fla, transformers) call kda_core: which are installed, and whether they fit.

An adapter is a wheel with an entry point in the group ``kda_core.integrations``: its name is the stack's, its value the
module with ``install()`` and ``uninstall()``. The wheel's first requirement that is none of kda_core's own wheels names
the stack and its supported versions; pip reads it, and ``admit`` checks it again at run time. Nothing here imports a
stack or an adapter.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata

from kda_core.errors import UnsupportedStack

ENTRY_POINT_GROUP = "kda_core.integrations"


@dataclass(frozen=True)
class Integration:
    """An adapter wheel.

    Attributes:
        name: the stack's name, such as "fla".
        distribution: the wheel and its version.
        supports: the stack's distribution and the versions that the wheel was tested with.
        variable: the environment variable that switches the adapter off with the value 0.
        state: "ready", "switched off", "unsupported" (another version of the stack) or "not installed" (the stack).
        reason: why it is not ready and how to change that; empty when it is.
    """

    name: str
    distribution: str
    supports: str
    variable: str
    state: str
    reason: str


def integrations() -> tuple[Integration, ...]:
    """Every adapter wheel of this environment, by name."""
    found = metadata.entry_points(group=ENTRY_POINT_GROUP)
    return tuple(_integration(entry_point) for entry_point in sorted(found, key=lambda e: e.name))


def admit(name: str) -> bool:
    """Whether an adapter's ``install()`` may go on: False where its environment variable switches it off.

    Raises:
        UnsupportedStack: the stack is not installed, or in a version that the adapter was not tested with; or the
            adapter itself is not installed as a wheel, so that its versions are unknown.
    """
    for found in integrations():
        if found.name == name:
            if found.state in ("unsupported", "not installed"):
                raise UnsupportedStack(f"{name}: {found.reason}")
            return found.state == "ready"
    raise UnsupportedStack(f"{name}: no adapter is installed: pip install ./integrations/{name} in a checkout")


def expect_models(stack: str, models: Collection[str], served: Collection[str]) -> None:
    """Raise UnsupportedStack for a name among ``models`` that an adapter does not serve."""
    for name in models:
        if name not in served:
            raise UnsupportedStack(f"{stack}: model {name!r} is not served; take {', '.join(served)}")


def _integration(entry_point: metadata.EntryPoint) -> Integration:
    # Not at the top: the parser of requirements would be a tenth of what the import of kda_core takes.
    from packaging.requirements import Requirement

    dist = entry_point.dist
    assert dist is not None  # entry points of an environment have one
    name = entry_point.name
    needs = next(r for r in map(Requirement, dist.requires or ()) if not r.name.startswith("kda-core"))
    variable = f"KDA_{name.upper()}"
    state, reason = "ready", ""
    try:
        version = metadata.version(needs.name)
        if not needs.specifier.contains(version, prereleases=True):
            state, reason = "unsupported", f"{needs.name} {version} is installed; pip install '{needs}'"
    except metadata.PackageNotFoundError:
        state, reason = "not installed", f"{needs.name} is not installed; pip install '{needs}'"
    if os.environ.get(variable) == "0":
        state, reason = "switched off", f"unset {variable} to switch it on"
    return Integration(name, f"{dist.name} {dist.version}", str(needs), variable, state, reason)

"""Whether a wheel fits this core, and whether its plugin keeps the contract of ``hookspecs``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import metadata

import pluggy
from packaging.specifiers import SpecifierSet

from kda_core import hookspecs
from kda_core.capabilities import BackendInfo

CORE = "kda-core"


def found_entry_points() -> list[metadata.EntryPoint]:
    """Entry points of backends in a fixed order: those for this contract, and those for another major version of it.

    A wheel that has one for this contract is left out of the others: it serves several.
    """
    every = metadata.entry_points()
    own = list(every.select(group=hookspecs.ENTRY_POINT_GROUP))
    names = {entry_point.name for entry_point in own}
    for group in every.groups:
        if group.startswith(hookspecs.ENTRY_POINT_GROUPS) and group != hookspecs.ENTRY_POINT_GROUP:
            own += [entry_point for entry_point in every.select(group=group) if entry_point.name not in names]
    return sorted(own, key=lambda e: (e.name, e.group, e.value))


def mismatch(entry_point: metadata.EntryPoint, core_version: str) -> str | None:
    """Why a wheel and this core do not fit, as far as its metadata say; None to go on and import it.

    Imported first, a wheel for another core would fail with the first name that this one lacks.
    """
    if entry_point.group != hookspecs.ENTRY_POINT_GROUP:
        version = hookspecs.CONTRACT_VERSION
        return f"is for another plugin contract (entry-point group {entry_point.group}), this kda-core has {version}"
    for wanted in _wanted_cores(entry_point.dist):
        if not wanted.contains(core_version, prereleases=True):
            # Lower bounds first, as people write them.
            text = ",".join(sorted(map(str, wanted), reverse=True))
            return f"needs {CORE}{text}, this is {CORE} {core_version}"
    return None


def _wanted_cores(dist: metadata.Distribution | None) -> Iterator[SpecifierSet]:
    """Versions of the core that a distribution requires, without those of its extras."""
    # Not at the top: the parser of requirements would be a tenth of what the import of kda_core takes.
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for line in (dist.requires or ()) if dist is not None else ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            # Old installers wrote invalid lines; the import shows whether the wheel works.
            continue
        if canonicalize_name(requirement.name) == CORE and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            yield requirement.specifier


def read_info(manager: pluggy.PluginManager, plugin: object) -> BackendInfo | str:
    """The identity card, or the reason why there is none."""
    hook = getattr(plugin, "kda_core_backend", None)
    if hook is None or manager.parse_hookimpl_opts(plugin, "kda_core_backend") is None:
        return "missing hook kda_core_backend (is it decorated with kda_core.hookspecs.hookimpl?)"
    info = hook()
    if not isinstance(info, BackendInfo):
        return f"kda_core_backend returned {type(info).__name__}, expected BackendInfo"
    if not info.name or info.name != info.name.lower():
        return f"kda_core_backend: name {info.name!r} is not lower case"
    if not isinstance(info.contract, SpecifierSet):
        return f"kda_core_backend: contract is {type(info.contract).__name__}, expected SpecifierSet"
    return info


def contract_problem(manager: pluggy.PluginManager, plugin: object, info: BackendInfo) -> str | None:
    """The first problem of the plugin's hooks, or None."""
    needed = set(hookspecs.REQUIRED_HOOKS)
    for feature, hooks in hookspecs.HOOKS_OF_FEATURE.items():
        if feature in info.capabilities.features:
            needed.update(hooks)
    specified = {n for n in vars(hookspecs) if n.startswith("kda_core_")}
    implemented = {
        n for n in dir(plugin) if n.startswith("kda_core_") and manager.parse_hookimpl_opts(plugin, n) is not None
    }
    if missing := sorted(needed - implemented):
        return f"missing hooks: {', '.join(missing)}"
    if unknown := sorted(implemented - specified):
        return f"unknown hooks: {', '.join(unknown)}"
    for hook in sorted(implemented):
        wanted = list(inspect.signature(getattr(hookspecs, hook)).parameters)
        parameters = inspect.signature(getattr(plugin, hook)).parameters
        if [p for p in parameters if p != "self"] != wanted:
            return f"{hook} takes ({', '.join(parameters)}), expected ({', '.join(wanted)})"
        defaults = [p for p, v in parameters.items() if v.default is not inspect.Parameter.empty]
        if defaults:
            return f"{hook} declares a default for {', '.join(defaults)}, which would never be passed"
    return None

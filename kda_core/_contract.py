"""Whether a wheel fits this core, and whether its plugin keeps the contract of ``hookspecs``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from operator import attrgetter
from typing import Any

import pluggy
import torch
from packaging.specifiers import SpecifierSet

from kda_core import hookspecs
from kda_core._ledger import State, said_by
from kda_core.capabilities import BackendInfo, Capabilities, Feature, Slack

CORE = "kda-core"


def found_entry_points(every: Iterable[metadata.EntryPoint] | None = None) -> list[metadata.EntryPoint]:
    """Entry points of backends in a fixed order: those for this contract, and those for another major version of it.

    A wheel that has one for this contract is left out of the others: it serves several. ``every``: the entry points to
    look at; None: those that are installed.
    """
    if every is None:
        installed = metadata.entry_points()
        groups = [group for group in installed.groups if group.startswith(hookspecs.ENTRY_POINT_GROUPS)]
        every = [entry_point for group in groups for entry_point in installed.select(group=group)]
    own = [e for e in every if e.group == hookspecs.ENTRY_POINT_GROUP]
    names = {entry_point.name for entry_point in own}
    others = [e for e in every if e.group.startswith(hookspecs.ENTRY_POINT_GROUPS) and e.name not in names]
    return sorted(own + others, key=lambda e: (e.name, e.group, e.value))


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


def judge(manager: pluggy.PluginManager, plugin: object) -> tuple[State, str, BackendInfo | None]:
    """The state of a plugin by itself, the reason where it cannot be loaded, and its identity card."""
    try:
        info = _read_info(manager, plugin)
    except KeyboardInterrupt:
        raise
    # The hook is foreign code that may raise anything; the ledger keeps its reason.
    except BaseException as error:
        info = f"kda_core_backend failed: {said_by(error)}"
    if isinstance(info, str):
        return "broken", info, None
    version = hookspecs.CONTRACT_VERSION
    if not info.contract.contains(version, prereleases=True):
        return "incompatible", f"needs plugin contract {info.contract}, this kda-core has {version}", info
    problem = _problem(manager, plugin, info)
    return ("loaded", "", info) if problem is None else ("broken", problem, info)


def _read_info(manager: pluggy.PluginManager, plugin: object) -> BackendInfo | str:
    """The identity card, or the reason why there is none."""
    hook = getattr(plugin, "kda_core_backend", None)
    if hook is None or manager.parse_hookimpl_opts(plugin, "kda_core_backend") is None:
        return "missing hook kda_core_backend (is it decorated with kda_core.hookspecs.hookimpl?)"
    info = hook()
    if not isinstance(info, BackendInfo):
        return f"kda_core_backend returned {type(info).__name__}, expected BackendInfo"
    for field, (is_right, expected) in _CARD.items():
        value = attrgetter(field)(info)
        if not is_right(value):  # it would fail later in calls of every backend
            return f"kda_core_backend: {field}: expected {expected}, got {value!r}"
    return info


def _all_are(kind: type, values: Any, containers: Any) -> bool:
    return isinstance(values, containers) and all(isinstance(value, kind) for value in values)


def _is_size(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)


def _is_device_type(value: Any) -> bool:
    try:
        return isinstance(value, str) and torch.device(value).type == value
    except RuntimeError:
        return False


_LOWER_CASE = re.compile("[a-z0-9][a-z0-9._-]*")
_CARD: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (
        # meta tensors have a backend of that name; "@" separates a name from versions in compiled graphs.
        lambda x: isinstance(x, str) and bool(_LOWER_CASE.fullmatch(x)) and x != "meta",
        "a lower case name of letters, digits, '.', '_' and '-' other than 'meta'",
    ),
    "version": (lambda x: isinstance(x, str), "a string"),
    "contract": (lambda x: isinstance(x, SpecifierSet), "SpecifierSet"),
    "device_types": (
        lambda x: isinstance(x, tuple) and bool(x) and all(map(_is_device_type, x)),
        "a tuple of torch's device types",
    ),
    "priority": (lambda x: x is None or type(x) is int, "an int or None"),
    "slack": (lambda x: _all_are(Slack, x, tuple), "a tuple of Slack"),
    "summary": (lambda x: isinstance(x, str), "a string"),
    "foreign_device": (lambda x: isinstance(x, bool), "True or False"),
    "capabilities": (lambda x: isinstance(x, Capabilities), "Capabilities"),
    "capabilities.features": (lambda x: _all_are(Feature, x, (frozenset, set)), "a frozenset of Feature"),
    "capabilities.dtypes": (lambda x: _all_are(torch.dtype, x, (frozenset, set)), "a frozenset of torch.dtype"),
    "capabilities.max_head_dim_k": (_is_size, "a positive int or None"),
    "capabilities.max_head_dim_v": (_is_size, "a positive int or None"),
    "capabilities.closed": (
        lambda x: _all_are(Feature, x, dict) and _all_are(str, [*x.values()], list),
        "strings by Feature",
    ),
}
"""For every field of an identity card, whether a value is right, and in words what is."""


def _problem(manager: pluggy.PluginManager, plugin: object, info: BackendInfo) -> str | None:
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

"""Whether a plugin keeps the contract of ``hookspecs``: its identity card, and the hooks that its features need."""

from __future__ import annotations

import inspect

import pluggy
from packaging.specifiers import SpecifierSet

from kda_core import hookspecs
from kda_core.capabilities import BackendInfo


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
    """What is wrong with the plugin's hooks, or None."""
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

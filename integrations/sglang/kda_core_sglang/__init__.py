"""SGLang on kda_core: ``kda_core_sglang.install()``; ``uninstall()`` takes it back.

SGLang runs ``install`` itself in each of its processes, as a plugin of the group ``sglang.srt.plugins``; calling it is
needed only where plugins are switched off. It replaces the class of SGLang's Triton kernels by a subclass, by SGLang's
registry of hooks: the linear attention backend ``triton``, which is the default, makes objects of it.
``KDA_SGLANG=0`` switches it off.
"""

from __future__ import annotations

import sys

from kda_core.errors import UnsupportedStack
from kda_core.integrations import admit

__version__ = "0.1.0"

HOME = "sglang.srt.layers.attention.linear.kernels.kda_triton"
TARGET = f"{HOME}.TritonKDAKernel"


def install() -> bool:
    """Let the KDA layers of models that this process builds from now on call kda_core.

    Returns:
        Whether they do: False where ``KDA_SGLANG=0`` switches it off.

    Raises:
        UnsupportedStack: SGLang is missing, another version, or changed by another plugin; nothing has changed.
    """
    if not admit("sglang"):
        return False
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType, _current_plugin_source

    from kda_core_sglang.kernel import KdaCoreKernel

    if any(hook is KdaCoreKernel for _, hook, _ in HookRegistry._hooks.get(TARGET, ())):
        return True
    if TARGET in HookRegistry._patched:  # SGLang would leave it as it is
        raise UnsupportedStack(f"sglang: another plugin has replaced {TARGET}: install kda_core_sglang before it")
    HookRegistry.register(TARGET, KdaCoreKernel, HookType.REPLACE)
    if _current_plugin_source.get() is None:
        # SGLang applies hooks when it has run all plugins; this is none of its runs.
        HookRegistry.apply_hooks()
    return True


def uninstall() -> None:
    """Take the hook out and give every module SGLang's class back, which the registry has no way to do."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    kernel = sys.modules.get("kda_core_sglang.kernel")
    if kernel is None:
        return
    ours, stock = kernel.KdaCoreKernel, kernel.KdaCoreKernel.__base__
    HookRegistry._hooks[TARGET] = [hook for hook in HookRegistry._hooks.get(TARGET, ()) if hook[1] is not ours]
    HookRegistry._patched.discard(TARGET)
    # SGLang replaced every name of the class in every module.
    for module in [m for m in list(sys.modules.values()) if m is not kernel and hasattr(m, "__dict__")]:
        for name in [name for name, value in list(vars(module).items()) if value is ours]:
            setattr(module, name, stock)

"""vLLM on kda_core: ``kda_core_vllm.install()``; ``uninstall()`` takes it back.

vLLM runs ``install`` itself in each of its processes, as a plugin of the group ``vllm.general_plugins``; calling it is
needed only where plugins are switched off. It binds anew the functions of vLLM's own Triton kernels, which its models
call with ``--kda-prefill-backend triton --kda-decode-backend triton``. ``KDA_VLLM=0`` switches it off, and
``KDA_VLLM=kimi_k3,glm5next`` names the models.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from kda_core.errors import UnsupportedStack
from kda_core.integrations import admit

__version__ = "0.1.0"

MODELS = ("kimi_k3", "bailing_moe_v3", "glm5next")
"""Kimi-K3 and Kimi-Linear, Bailing (Ling), GLM-5."""

USUAL = MODELS[:2]
"""Models that are served when none is named: importing the kernels of glm5next imports the model, too."""

USERS = (
    "vllm.models.kimi_k3.amd.kda",
    "vllm.models.kimi_k3.amd.ops.kda_prefill",
    "vllm.models.glm5next.common.kda",
    "vllm.model_executor.models.bailing_moe_v3",
)
"""Modules that take the functions by name when they are imported; the others look for them at each call."""

_stock: dict[tuple[ModuleType, str], object] = {}


def install(*models: str) -> bool:
    """Let the models of this process with KDA layers call kda_core, models that are built already as well.

    Args:
        *models: names in ``MODELS``; those of ``KDA_VLLM``, or kimi_k3 and bailing_moe_v3, when left out.

    Returns:
        Whether they do: False where ``KDA_VLLM=0`` switches it off.

    Raises:
        UnsupportedStack: vLLM is missing, or another version, or there is no such model; nothing has changed.
    """
    if not admit("vllm"):
        return False
    models = models or tuple(filter(None, os.environ.get("KDA_VLLM", "").split(","))) or USUAL
    for name in models:
        if name not in MODELS:
            raise UnsupportedStack(f"vllm: model {name!r} is not served; take {', '.join(MODELS)}")
    from vllm.platforms import current_platform

    from kda_core_vllm.operators import FUNCTIONS

    vendor = "amd" if current_platform.is_rocm() else "nvidia"
    homes = [(importlib.import_module(FUNCTIONS[name][0].format(vendor=vendor)), FUNCTIONS[name][1]) for name in models]
    for home, functions in homes:
        for name, function in functions.items():
            stock = getattr(home, name)
            for module in (home, *filter(None, map(sys.modules.get, USERS))):
                if stock is not function and module.__dict__.get(name) is stock:
                    _stock[module, name] = stock
                    setattr(module, name, function)
    return True


def uninstall() -> None:
    """Give the modules back the functions that they had."""
    while _stock:
        (module, name), stock = _stock.popitem()
        setattr(module, name, stock)

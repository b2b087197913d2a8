"""flash-linear-attention on kda_core: ``kda_core_fla.install()``; ``uninstall()`` takes it back."""

import os
import sys

from kda_core.errors import UnsupportedStack
from kda_core.integrations import admit

__version__ = "0.1.0"


def install() -> bool:
    """Let every model of this process that runs on fla, built or to be built, use kda_core; False with ``KDA_FLA=0``.

    Raises UnsupportedStack, and changes nothing, where fla is missing, in another version, or closed to backends.
    """
    if not admit("fla"):
        return False
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise UnsupportedStack("fla: FLA_DISABLE_BACKEND_DISPATCH=1 closes its registries: start Python without it")
    from kda_core_fla.backend import REGISTRIES, KdaCore

    for registry in REGISTRIES:
        registry.register(KdaCore())
    return True


def uninstall() -> None:
    """Take kda_core out of fla's registries, which have no public way to do it."""
    for registry in getattr(sys.modules.get("kda_core_fla.backend"), "REGISTRIES", ()):
        registry._backends.pop("kda_core", None)

"""flash-linear-attention on kda_core: ``kda_core_fla.install()``; ``uninstall()`` takes it back.

fla's registries ask kda_core first, at every call and on every device. A call that it refuses goes on to fla, with the
reason in fla's log; on CPUs, where fla's kernels cannot run, its error comes through. ``KDA_FLA=0`` switches it off.
"""

import os
import sys

from kda_core.errors import UnsupportedStack
from kda_core.integrations import admit

__version__ = "0.1.0"


def install() -> bool:
    """Let every model of this process that runs on fla, built or to be built, use kda_core.

    Returns:
        Whether it is in use: False where ``KDA_FLA=0`` switches it off.

    Raises:
        UnsupportedStack: fla is missing, in another version, or closed to backends; nothing has changed.
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
    if backend := sys.modules.get("kda_core_fla.backend"):
        for registry in backend.REGISTRIES:
            registry._backends.pop("kda_core", None)

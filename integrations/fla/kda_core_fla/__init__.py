"""flash-linear-attention on kda_core: ``kda_core_fla.install()``; ``uninstall()`` takes it back.

fla asks its registries of backends at every call. kda_core stands before fla's own backends on every device. A call
that it refuses goes on to fla, with the reason in fla's log. On a CPU fla's Triton kernels cannot run: kda_core's own
error comes through instead, and plain torch serves what stands around the operator. ``KDA_FLA=0`` switches it off.
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
    from fla import backends

    from kda_core_fla import cpu, operators

    for entry_point in (operators.chunk_kda, "kda"):
        backends.register(entry_point)(operators.KdaCore)
    for entry_point, implementation in cpu.IMPLEMENTATIONS.items():
        backends.register(entry_point, backend=cpu.Torch)(implementation)
    return True


def uninstall() -> None:
    """Take kda_core out of fla's registries, which have no public way to do it."""
    if backends := sys.modules.get("fla.backends"):
        for registry in (*backends._function_registries.values(), *backends._operation_registries.values()):
            for name in ("kda_core", "kda_core_torch"):
                registry._backends.pop(name, None)

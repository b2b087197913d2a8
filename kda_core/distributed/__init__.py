"""One sequence over several devices, on ``torch.distributed``: ``chunk_kda(..., cp_context=build_cp_context(...))``.

``import kda_core`` imports nothing of this.
"""

from kda_core.distributed._context import ContextParallel, build_cp_context
from kda_core.distributed._halo import conv_halo
from kda_core.distributed._layout import layout_of_positions

__all__ = ["ContextParallel", "build_cp_context", "conv_halo", "layout_of_positions"]

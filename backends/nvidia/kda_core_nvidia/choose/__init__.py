"""Which kernels serve a call, with which configurations: every threshold and every table of this backend.

``choose_forward``, ``choose_backward`` and ``choose_recurrent`` are pure functions of a call's metadata
(``kda_core.triton_lib.plan.metadata``) and a ``Chip``. They need no GPU. Nothing is tuned at run time.
"""

from kda_core_nvidia.choose.backward import BackwardChoice, choose_backward
from kda_core_nvidia.choose.chip import CHIPS, INTERPRETED, SHARED_LIMIT, Chip
from kda_core_nvidia.choose.forward import ForwardChoice, choose_forward
from kda_core_nvidia.choose.recurrent import RecurrentChoice, choose_recurrent

__all__ = [
    "CHIPS", "INTERPRETED", "SHARED_LIMIT", "BackwardChoice", "Chip", "ForwardChoice", "RecurrentChoice",
    "choose_backward", "choose_forward", "choose_recurrent",
]  # fmt: skip

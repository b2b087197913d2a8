"""Kimi Delta Attention (KDA) as one operator library: one contract, one call, backends as plugin wheels."""

from kda_core import flops as _flops
from kda_core.api import backends, chunk_kda, explain, fused_recurrent_kda, kda_gate
from kda_core.errors import BackendNotFound, BrokenBackend, ContractViolation, KdaError, UnsupportedCall
from kda_core.plugins import default_device, use_backend

__version__ = "0.1.0"

_flops.count_when_imported()

__all__ = [
    "BackendNotFound",
    "BrokenBackend",
    "ContractViolation",
    "KdaError",
    "UnsupportedCall",
    "__version__",
    "backends",
    "chunk_kda",
    "default_device",
    "explain",
    "fused_recurrent_kda",
    "kda_gate",
    "use_backend",
]

"""Kimi Delta Attention (KDA) as one operator library: one contract, one call, backends as plugin wheels."""

from kda_core import _checked
from kda_core._checked import checked_calls
from kda_core._explain import default_device, explain, supports
from kda_core._plugins import use_backend
from kda_core._version import __version__
from kda_core.api import backends, chunk_kda, commit_kda, empty_records, fused_recurrent_kda, kda_gate
from kda_core.errors import (
    BackendNotFound,
    BrokenBackend,
    CheckFailed,
    CheckWarning,
    ContractViolation,
    KdaError,
    UnsupportedCall,
)

_checked.check_as_environment_says()

__all__ = [
    "BackendNotFound", "BrokenBackend", "CheckFailed", "CheckWarning", "ContractViolation", "KdaError",
    "UnsupportedCall", "__version__", "backends", "checked_calls", "chunk_kda", "commit_kda", "default_device",
    "empty_records", "explain", "fused_recurrent_kda", "kda_gate", "supports", "use_backend",
]  # fmt: skip

"""Kimi Delta Attention as a module, and the functions around the operator in it. ``import kda_core.nn`` to use it."""

from kda_core.nn._cache import KDACache
from kda_core.nn._convolution import short_convolution
from kda_core.nn._decode import kda_decode_step
from kda_core.nn._layer import KimiDeltaAttention
from kda_core.nn._norm import gated_rms_norm
from kda_core.nn._transformers import from_transformers, to_transformers

__all__ = [
    "KDACache", "KimiDeltaAttention", "from_transformers", "gated_rms_norm", "kda_decode_step", "short_convolution",
    "to_transformers",
]  # fmt: skip

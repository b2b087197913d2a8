"""Modules around the operator: the short convolution and the gated RMS norm of a KDA layer."""

from kda_core.nn._convolution import short_convolution
from kda_core.nn._norm import gated_rms_norm

__all__ = ["gated_rms_norm", "short_convolution"]

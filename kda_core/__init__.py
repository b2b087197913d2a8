"""Kimi Delta Attention as one operator library."""

__version__ = "0.1.0"

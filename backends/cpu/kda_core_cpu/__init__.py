"""CPU backend of kda_core: Kimi Delta Attention in vectorised torch."""

__version__ = "0.1.0"

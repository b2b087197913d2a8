"""AMD backend of kda_core: Kimi Delta Attention in Triton for ROCm, with 64-bit addressing."""

__version__ = "0.1.0"

"""NVIDIA backend of kda_core: Kimi Delta Attention in Triton with TensorDescriptor."""

__version__ = "0.1.0"

"""The environment variable of this backend, read once."""

from __future__ import annotations

from kda_core.capabilities import runs_on_foreign_device

NAME = "amd"

FOREIGN = runs_on_foreign_device(NAME)
"""For tests only: on another vendor's GPU the arithmetic and the addresses of these kernels, which are plain Triton,
can be checked at full size, and nothing about speed, registers or instructions of an AMD chip."""

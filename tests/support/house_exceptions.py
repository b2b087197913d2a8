"""Names that test_house.py lets pass. Delete what is not needed any more; the test says so. Add nothing."""

from __future__ import annotations

PATCHED = {
    "tests/nvidia/test_nvidia_run.py: kda_core_nvidia.run.MAX_ENCODED",
    "tests/nvidia/test_nvidia_run.py: kda_core_nvidia.run._entries",
    "tests/nvidia/test_nvidia_run.py: kda_core_nvidia.triton_private.VERSION",
    "tests/nvidia/test_nvidia_run.py: kda_core_nvidia.triton_private.current_stream",
    "tests/nvidia/test_nvidia_run.py: kda_core_nvidia.triton_private.launch",
}
"""Tests and the globals of our modules that they replace."""

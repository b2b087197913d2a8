"""The conformance kit's fast tier on one of the limited backends of this folder, in a process of its own.

``python tests/kit/limited_backends/run_kit.py MODULE [pytest's options]``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from kda_core._plugins import registry

sys.path.insert(0, str(Path(__file__).parents[1]))


def main(module: str, options: list[str]) -> int:
    """Register the backend and run the kit on it; answers pytest's exit status."""
    registry.load()
    torch.set_num_threads(1)
    backend = importlib.import_module(f"limited_backends.{module}")
    entry = registry.register(backend)
    if entry.state != "loaded":
        raise RuntimeError(f"{module}: {entry.state}: {entry.reason}")
    plugin = ["-p", "kda_core.testing.plugin", "-p", "no:cacheprovider", f"--backend={backend.INFO.name}"]
    return int(pytest.main([*plugin, *options, "--pyargs", "kda_core.testing.suite"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

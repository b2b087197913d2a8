"""The checkout, and how tests build wheels of it and environments without an index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pluggy
import torch

ROOT = Path(__file__).parents[2]


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr


def link_torch(folder: Path) -> None:
    """Links to everything that is installed beside torch, kda_core's own wheels and path files aside."""
    folder.mkdir()
    for site in {Path(module.__file__).parents[1] for module in (torch, pluggy)}:
        for entry in site.iterdir():
            if not entry.name.startswith(("kda_core", "kda_toy", "_kda_core")) and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)

"""The checkout, and how tests build wheels of it and environments without an index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pluggy
import torch

ROOT = Path(__file__).parents[2]


def run(*command: object, **options: Any) -> str:
    """The output of a command, which must succeed; ``options`` of ``subprocess.run``."""
    done = subprocess.run([*map(str, command)], capture_output=True, encoding="utf-8", check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: object) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


def link_torch(folder: Path) -> None:
    """Links to everything that is installed beside torch, kda_core's own wheels and path files aside."""
    folder.mkdir()
    for site in {Path(module.__file__).parents[1] for module in (torch, pluggy)}:
        for entry in site.iterdir():
            if not entry.name.startswith(("kda_core", "kda_toy", "_kda_core")) and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)

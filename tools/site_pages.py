"""Publishes pages of the repository's root on the site: a hook of mkdocs (mkdocs.yml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the root, with their places on the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages. Their links into docs/ become links among the site's pages."""
    for name, page in PAGES.items():
        text = Path(config.config_file_path).with_name(name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files

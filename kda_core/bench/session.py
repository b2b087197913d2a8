"""A run of the benchmark: its options, device, peers and rows, and the JSON file."""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import kda_core
from kda_core import cli
from kda_core.bench import peers, timing
from kda_core.bench.peers import Ours, Peer

SCHEMA = 1
"""Version of the JSON; raised when a field changes its meaning."""

Row = dict[str, Any]
"""One line of a table, ready for JSON; "suite" names its suite."""


@dataclass(frozen=True)
class Task:
    """A row that is still to be measured. ``run`` returns the row."""

    label: str
    run: Callable[[], Row]


@dataclass
class Session:
    """One run.

    Attributes:
        options: of the command line.
        device: the device that is timed.
        peers: those that can run. left_out: why the others cannot.
        rows: finished rows.
    """

    options: argparse.Namespace
    device: torch.device
    peers: list[Peer] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def gpu(self) -> bool:
        """Whether times are those of a GPU."""
        return timing.on_gpu(self.device)

    @property
    def seconds(self) -> float:
        """Seconds of timing a row."""
        return self.options.seconds or (0.01 if self.options.quick else 0.4 if self.gpu else 2.0)

    @property
    def implementations(self) -> list[Peer]:
        """Ours and the peers."""
        return [Ours(self.options.backend), *self.peers]

    @cached_property
    def copy(self) -> float:
        """Bytes a second of a large copy on the device."""
        return timing.copy_bandwidth(self.device, self.options.quick)

    @cached_property
    def matmul_rate(self) -> float:
        """Multiplications and additions a second of a large float32 matrix product on the device."""
        return timing.matmul_rate(self.device, self.options.quick)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Machine, versions and options that the figures depend on."""
        found: dict[str, Any] = {"device": cli.device_name(self.device), "date": datetime.date.today().isoformat()}
        found["backend"] = self.options.backend or _served_by(self.device)
        versions = {"kda_core": kda_core.__version__, "torch": torch.__version__, "triton": cli.version_of("triton")}
        versions |= {peer.name: peer.version() for peer in self.peers}
        return found | {"versions": {n: v for n, v in versions.items() if v is not None}}

    def content(self) -> dict[str, Any]:
        """The content of the JSON."""
        found = {
            "schema": SCHEMA,
            "environment": self.environment,
            "copy_bytes_per_second": self.copy,
            "left_out": self.left_out,
            "rows": self.rows,
        }
        return finite(found)

    def write(self, file: Path) -> None:
        """Write the JSON through a file beside it, so that a stopped run leaves a complete file."""
        beside = file.with_name(file.name + ".part")
        beside.write_text(json.dumps(self.content(), indent=1, allow_nan=False) + "\n")
        beside.replace(file)


def _served_by(device: torch.device) -> str:
    """The backend that a plain call on the device goes to; "none" when nothing serves it."""
    x = torch.zeros(1, 1, 1, 64, device=device)
    return kda_core.explain(x, x, x, x, x[..., 0]).chosen or "none"


def finite(data: Any) -> Any:
    """The same data with numbers that JSON lacks as the strings "nan" and "inf"."""
    if isinstance(data, dict):
        return {n: finite(x) for n, x in data.items()}
    if isinstance(data, list | tuple):
        return [finite(x) for x in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def read(files: list[Path]) -> dict[str, Any]:
    """The content of one or several files, the rows of all of them in order.

    Raises:
        ValueError: a file is not of this schema.
    """
    parts = []
    for file in files:
        content = json.loads(file.read_text())
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"from: expected JSON that kda bench wrote (schema {SCHEMA}), got {file}")
        parts.append(content)
    return parts[0] | {"rows": [row for part in parts for row in part["rows"]]}


def failure(error: Exception) -> str:
    """An exception in a line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: expected cpu or cuda, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, which this can time, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: torch sees no GPU, got {name!r}")
    return device


def open_session(options: argparse.Namespace, beside_peers: bool = True) -> Session:
    """A session on the device that the options name, with the peers that can run there.

    Args:
        beside_peers: whether any suite compares with peers; some take long to import.

    Raises:
        ValueError: an unknown peer or device, or options that the device cannot follow.
    """
    device = _device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    needs_gpu = [name for name in ("graph", "profile", "warm", "warm_only") if getattr(options, name)]
    if needs_gpu and not timing.on_gpu(device):
        raise ValueError(f"{', '.join('--' + n.replace('_', '-') for n in needs_gpu)}: needs a GPU, got {device}")
    names = None if options.peers is None else tuple(n for n in options.peers.split(",") if n not in ("", "none"))
    if names is not None and not beside_peers:
        raise ValueError("--peers: none of the suites stands beside peers")
    able, left_out = peers.chosen(names if beside_peers else (), device)
    return Session(options, device, able, left_out)

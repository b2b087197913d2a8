"""A GPU for tests on a machine without one."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch


class Gpu(str):
    """A device for torch, on the CPU, that the programs take for a GPU."""

    type, index = "cuda", None


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that pretends to be a GPU: events are 2.5 ms apart, and a call takes 200 bytes."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def elapsed_time(self, end):
            return 2.5

        def record(self):
            pass

        synchronize = record

    fakes = {
        "Event": Event,
        "Stream": lambda device: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),
        "graph": lambda graph, stream: contextlib.nullcontext(),
        "memory_allocated": lambda device: 100,
        "max_memory_allocated": lambda device: 300,
        **dict.fromkeys(("synchronize", "reset_peak_memory_stats", "empty_cache"), lambda *device: None),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return Gpu("cpu")

"""What is timed on a GPU, on a CPU that pretends: every step runs, and a call that cannot be captured is summed."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from bench_rows import CPU, opened, problem

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("kda_core_cpu")

from kda_core.bench import speed, speed_report, timing
from kda_core.bench.workload import Work


@pytest.fixture
def gpu(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 2.5

    @contextlib.contextmanager
    def graph(graph, stream):
        yield

    cuda = {
        "Event": Event,
        "Stream": lambda device: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),
        "graph": graph,
        "memory_allocated": lambda device: 100,
        "max_memory_allocated": lambda device: 300,
        **dict.fromkeys(("synchronize", "reset_peak_memory_stats", "empty_cache"), lambda *device: None),
    }
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(timing, "on_gpu", lambda device: True)
    monkeypatch.setattr(timing, "CACHE", 64)
    monkeypatch.setattr(timing, "kernels", lambda run, device: {"one": 1.5, "two": 0.25})


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_row(gpu, mode):
    found = opened("--profile", "--dtype", "float32")
    found.copy = 1e9
    row = speed.measure(problem(mode), found)
    ours = row["implementations"]["kda_core"]
    assert ours["ms"]["median"] == ours["device_ms"]["median"] == 2.5
    assert ours["device_ms"]["how"] == "graph"
    assert ours["kernels_ms"] == {"one": 1.5, "two": 0.25}
    remarks = [str(part) for part in speed_report.tables([row], {})]
    assert "1,12,2,8 bounded, random: one 1.500, two 0.250" in remarks
    assert ours["peak_bytes"] == Work(problem(mode), CPU).held_bytes + 200


def test_a_call_that_cannot_be_captured(gpu, monkeypatch):
    def refused(run, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "capture", refused)
    found = opened()
    found.copy = 1e9
    device_ms = speed.measure(problem(), found)["implementations"]["kda_core"]["device_ms"]
    assert device_ms == {"median": 1.75, "how": "sum of kernels", "why": device_ms["why"]}
    assert "not permitted" in device_ms["why"]

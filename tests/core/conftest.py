"""Fixtures that several files share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def fresh_compiler(tmp_path, monkeypatch):
    """Graphs on disk from earlier versions of this checkout, whose number has not changed, must not serve here."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_thread():
    """More only wait for each other at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

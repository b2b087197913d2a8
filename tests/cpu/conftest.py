"""Threads of the tests of the CPU backend."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def threads(request):
    """One thread, because a second only waits at these sizes; two where ``@pytest.mark.usefixtures("two_threads")``."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if "two_threads" in request.fixturenames else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads():
    """Asks ``threads`` for two."""

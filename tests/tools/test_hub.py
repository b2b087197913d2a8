"""The variants of the repository for the kernels library compute, each by itself: no GPU runs the library's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import installed
import pages
import pytest
from environments import run

installed.need_package("triton")

SCRIPT = """
import importlib.util, sys, torch

path = sys.argv[1]
spec = importlib.util.spec_from_file_location("_variant", path + "/__init__.py", submodule_search_locations=[path])
variant = sys.modules["_variant"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(variant)
torch.manual_seed(0)
q, k, v = (torch.randn(1, 70, 1, 32, requires_grad=True) for _ in range(3))
others = -torch.rand(1, 70, 1, 32), torch.rand(1, 70, 1)
results = {}
for backend in (variant.BACKEND, "reference"):
    o, _ = variant.chunk_kda(q, k, v, *others, backend=backend)
    results[backend] = (o, *torch.autograd.grad(o.sum(), (q, k, v)))
for own, expected in zip(*results.values()):
    assert (own - expected).norm() < 1e-5 * expected.norm()
print(variant.BACKEND)
"""


@pytest.mark.end_to_end
def test_every_variant_computes(tmp_path, monkeypatch):
    """Kernels for GPUs by triton's interpreter."""
    run(sys.executable, pages.ROOT / "integrations/hub/build.py", tmp_path, timeout=60)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    variants = sorted(Path(tmp_path, "build").iterdir())
    printed = [run(sys.executable, tmp_path / "script.py", path, timeout=300).strip() for path in variants]
    assert printed == ["cpu", "nvidia", "amd"]

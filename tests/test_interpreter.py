"""``kda_core.testing.interpreter``: the same results from Triton's interpreter, with less preparation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.end_to_end

CODE = """
import hashlib, json, sys
import torch
from triton.runtime import interpreter
from kda_core import chunk_kda
from kda_core.testing.interpreter import quicken

count = 0
scan = interpreter._patch_builtin
def counted(*args):
    global count
    count += 1
    return scan(*args)
interpreter._patch_builtin = counted
if sys.argv[1] == "quicken":
    assert quicken() and quicken()
found = {}
for backend in sys.argv[2:]:
    count = 0
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 20, 1, 16, requires_grad=True) for _ in range(4))
    o, _ = chunk_kda(q, k, v, -g.abs(), torch.rand(1, 20, 1), backend=backend, use_qk_l2norm_in_kernel=True)
    grads = torch.autograd.grad(o, (q, k, v, g), o.detach())
    bits = b"".join(t.detach().numpy().tobytes() for t in (o, *grads))
    found[backend] = [hashlib.sha256(bits).hexdigest(), count]
print(json.dumps(found))
"""
BACKENDS = ("nvidia", "amd")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, tuple[str, int]]]:
    """Digest of the results and number of preparations, by way ("plain", "quicken") and backend."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    backends = [name for name in BACKENDS if find_spec(f"kda_core_{name}") is not None]
    ways = {}
    for how in ("plain", "quicken"):
        command = [sys.executable, "-c", CODE, how, *backends]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        ways[how] = json.loads(done.stdout.splitlines()[-1])
    return ways


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("backend", BACKENDS)
def test_quickened_interpreter_gives_the_same_bits(found, backend: str):
    """The same results, and a fraction of the preparations: a few for every launch."""
    if find_spec(f"kda_core_{backend}") is None:
        pytest.skip(f"needs kda-core-{backend}")
    plain, preparations = found["plain"][backend]
    bits, fewer = found["quicken"][backend]
    assert bits == plain
    assert 0 < 10 * fewer < preparations


def test_without_triton_there_is_nothing_to_quicken():
    """A machine without triton: no error."""
    code = "import sys; sys.modules['triton'] = None; import kda_core.testing.interpreter as i; assert not i.quicken()"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

"""``kda_core.testing.interpreter``: Triton's interpreter with less preparation, and bfloat16 as devices have it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import installed
import interpreted
import pytest

pytestmark = pytest.mark.end_to_end

installed.need_package("triton")

CODE = """
import hashlib, json, sys
import torch
from triton.runtime import interpreter
from kda_core import chunk_kda
from kda_core.testing import interpreter as mended

# Backends of Triton kernels call it.
mended.improve = mended.quicken if sys.argv[1] == "quicken" else lambda: None
counts = {}
def count(owner, name):
    function = getattr(owner, name)
    def counted(*args):
        counts[name] = counts.get(name, 0) + 1
        return function(*args)
    setattr(owner, name, counted)
count(interpreter, "_patch_builtin")
count(interpreter.tl.core, "validate_block_shape")
if sys.argv[1] == "quicken":
    assert mended.quicken() and mended.quicken()
found = {}
for backend in sys.argv[2:]:
    counts.clear()
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 20, 1, 16, requires_grad=True) for _ in range(4))
    o, _ = chunk_kda(q, k, v, -g.abs(), torch.rand(1, 20, 1), backend=backend, use_qk_l2norm_in_kernel=True)
    grads = torch.autograd.grad(o, (q, k, v, g), o.detach())
    bits = b"".join(t.detach().numpy().tobytes() for t in (o, *grads))
    found[backend] = [hashlib.sha256(bits).hexdigest(), *counts.values()]
print(json.dumps(found))
"""
BACKENDS = ("nvidia", "amd")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, tuple[str, int, int]]]:
    """Digest of the results, preparations and types made, by way ("plain", "quicken") and backend."""
    backends = [name for name in BACKENDS if find_spec(f"kda_core_{name}") is not None]
    return {how: interpreted.printed("-c", CODE, how, *backends) for how in ("plain", "quicken")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_quickened_interpreter_gives_the_same_bits(found, backend: str):
    """The same results, and a fraction of the preparations, a few for every launch, and of the types."""
    installed.need_backend(backend)
    plain, *made = found["plain"][backend]
    bits, *fewer = found["quicken"][backend]
    assert bits == plain
    assert len(made) == len(fewer) == 2
    # Every backend has types of its own; those that the first one made need not be made again.
    assert all(10 * few < many for few, many in zip(fewer, made, strict=True))


def results() -> dict[str, bool]:
    """Which results are right, those with bfloat16 bit for bit, in a process where Triton interprets."""
    global tl  # a kernel sees no names of the function round it
    import torch
    import triton
    import triton.language as tl

    from kda_core.testing.interpreter import bfloat16_is_right, correct_arithmetic

    assert not bfloat16_is_right()
    assert correct_arithmetic()
    assert correct_arithmetic()
    assert bfloat16_is_right()

    @triton.jit
    def kernel(a, b, wide, product, converted, summed, negative, less, half, N: tl.constexpr):
        at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        x, y = tl.load(a + at), tl.load(b + at)
        tl.store(product + at, tl.dot(x, y))
        tl.store(converted + at, tl.load(wide + at).to(tl.bfloat16))
        tl.store(summed + at, x + y)
        tl.store(negative + at, -x)
        tl.store(less + at, (x < y).to(tl.int32))
        tl.store(half + at, x.to(tl.float16))

    @triton.jit
    def multiply(a, b, product, N: tl.constexpr):
        at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(product + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))

    torch.manual_seed(0)
    N = 16
    a, b = (torch.randn(N, N).bfloat16() for _ in range(2))
    wide = torch.randn(N, N) * 2.0 ** torch.randint(-140, 120, (N, N))
    wide.view(-1)[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])
    expected = {
        "product": a.float() @ b.float(), "converted": wide.bfloat16(), "summed": a + b, "negative": -a,
        "less": (a < b).int(), "half": a.half(),
    }  # fmt: skip
    got = {name: torch.empty_like(x) for name, x in expected.items()}
    kernel[(1,)](a, b, wide, *got.values(), N)
    # Two numbers whose product cancels all but the last bits of another: rounded terms would leave something else.
    x, y = torch.zeros(N, N), torch.zeros(N, N)
    x[0, :2], y[:2, 0] = torch.tensor([1 + 2.0**-23, -1.0]), torch.tensor([1 + 2.0**-23, 1 + 2.0**-22])
    cancelled = torch.empty(N, N)
    multiply[(1,)](x, y, cancelled, N)
    found = {"cancelled": cancelled[0, 0].item() == 2.0**-46}
    # The order in which a product is summed up is torch's.
    close = {name: torch.allclose(x.float(), expected[name].float(), 1e-6, 1e-6) for name, x in got.items()}
    same = {n: torch.equal(x.nan_to_num(7.0), expected[n].nan_to_num(7.0)) for n, x in got.items() if n != "product"}
    return found | close | same


def test_corrected_arithmetic_is_that_of_devices():
    """bfloat16: products of the numbers, not of their bits; conversions to nearest. float32: exact terms."""
    found = interpreted.printed(__file__)
    assert len(found) == 7
    assert [name for name, right in found.items() if not right] == []


def test_without_triton_there_is_nothing_to_change():
    """A machine without triton: no error."""
    code = "import sys; sys.modules['triton'] = None; import kda_core.testing.interpreter as i; "
    code += "assert not i.quicken() and not i.correct_arithmetic() and not i.bfloat16_is_right()"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


if __name__ == "__main__":
    print(json.dumps(results()))

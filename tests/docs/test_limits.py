"""docs/limits.md on rows that are not finite, on erased states, and of inductor's rounding under autocast."""

from __future__ import annotations

import pytest
import torch
from example_arguments import drawn
from torch.nn import functional as F

import kda_core

CHUNK, T, TOKEN = 64, 200, 100
INFERENCE_CHUNK = 32  # of the CPU backend, when nothing is saved for a backward
OPS = ("chunk_kda", "fused_recurrent_kda")
NAMES = ("q", "k", "v", "g", "beta")


def inputs(B=2, tokens=T, H=2, K=16, V=8):
    return drawn(B=B, T=tokens, H=H, K=K, V=V)


def run(op, x, **options):
    return getattr(kda_core, op)(**x, **options, backend="cpu")[0]


def spoiled(x, name, value):
    """The inputs with one element of token 100 of sequence 0, head 0, replaced."""
    changed = x | {name: x[name].clone()}
    changed[name][(0, TOKEN, 0, 3)[: x[name].dim()]] = value
    return changed


def rows(t):
    """[B, T, H] which rows hold anything that is not finite."""
    bad = ~t.isfinite()
    return bad.any(3) if t.dim() == 4 else bad


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_in_the_chunk_form_it_reaches_earlier_rows_of_its_chunk_and_no_others(name, value):
    x = inputs()
    clean, o = run("chunk_kda", x), run("chunk_kda", spoiled(x, name, value))
    bad = rows(o)
    first = TOKEN if name == "q" else TOKEN // INFERENCE_CHUNK * INFERENCE_CHUNK
    assert bad[0, TOKEN, 0]
    # A query is read by its own row alone; everything else goes through the chunk's triangular inverse and products.
    assert bad[0, :, 0].nonzero().min() == first
    untouched = torch.ones_like(bad)
    untouched[0, first:, 0] = False
    assert not bad[untouched].any()
    assert torch.equal(o[untouched], clean[untouched])


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_it_reaches_no_earlier_row(name):
    x = inputs()
    clean, o = run("fused_recurrent_kda", x), run("fused_recurrent_kda", spoiled(x, name, float("nan")))
    assert rows(o)[0, TOKEN, 0]
    assert torch.equal(o[0, :TOKEN], clean[0, :TOKEN])
    assert torch.equal(o[1], clean[1])
    assert torch.equal(o[:, :, 1], clean[:, :, 1])


def test_it_reaches_no_other_sequence_of_a_packed_batch():
    """Token 100 lies in the second of three sequences, one row behind the first."""
    x, cu_seqlens = inputs(B=1), torch.tensor([0, TOKEN, 150, T])
    clean, o = (run("chunk_kda", y, cu_seqlens=cu_seqlens) for y in (x, spoiled(x, "k", float("nan"))))
    assert rows(o)[0, TOKEN:150, 0].any()
    others = torch.cat([torch.arange(TOKEN), torch.arange(150, T)])
    assert torch.equal(o[:, others], clean[:, others])


def test_gradients_of_earlier_chunks_stay_finite():
    x = {name: t.requires_grad_() for name, t in spoiled(inputs(), "v", float("nan")).items()}
    o = run("chunk_kda", x)
    grads = torch.autograd.grad(o[:, :CHUNK].sum(), list(x.values()))
    for grad in grads:
        assert not rows(grad)[:, :CHUNK].any()
    # The rest gets a gradient of zero, and zero times NaN is NaN.
    assert rows(grads[0])[0, CHUNK:, 0].any()


@pytest.mark.parametrize("padding", [float("nan"), 1e30])
def test_right_padding_must_be_within_the_contract_unless_cu_seqlens_ends_before_it(padding):
    """80 tokens and 20 of padding, which begin within the second chunk."""
    x, short = inputs(B=1, tokens=100), {}
    for name, t in x.items():
        short[name] = t[:, :80]
        if name != "g":
            t[:, 80:] = padding
    clean = run("chunk_kda", short)
    dense = run("chunk_kda", x)[:, :80]
    assert not dense.isfinite().all()
    assert torch.equal(dense[:, :CHUNK], clean[:, :CHUNK])
    packed = run("chunk_kda", x, cu_seqlens=torch.tensor([0, 80]))
    assert torch.equal(packed[:, :80], clean)
    assert not packed[:, 80:].any()


def erased(op, size):
    """Errors of the final state after every direction was written anew, relative to the old state and to the new.

    One chunk writes along 16 orthonormal keys, twice each, with beta = 1 and no decay: nothing of the initial state
    is left. It is ``size`` times a unit normal.
    """
    K = V = 16
    generator = torch.Generator().manual_seed(1)
    keys = torch.linalg.qr(torch.randn(K, K, generator=generator))[0].T.repeat(2, 1).view(1, 2 * K, 1, K)
    v = torch.randn(1, 2 * K, 1, V, generator=generator)
    state = size * torch.randn(1, 1, K, V, generator=generator)
    given = {"q": keys, "k": keys, "v": v, "g": torch.zeros_like(keys), "beta": torch.ones(1, 2 * K, 1)}
    found = getattr(kda_core, op)(**given, initial_state=state, output_final_state=True, backend="cpu")[1]
    exact = {name: t.double() for name, t in given.items()}
    options = {"initial_state": state.double(), "output_final_state": True, "backend": "reference"}
    expected = getattr(kda_core, op)(**exact, **options)[1]
    error = (found - expected).norm()
    return (error / state.norm()).item(), (error / expected.norm()).item()


def test_errors_of_an_erased_state_are_relative_to_the_state_it_came_from():
    ulp = torch.finfo(torch.float32).eps
    for size in (1e2, 1e4, 1e6):
        of_old, of_new = erased("chunk_kda", size)
        assert of_old < 8 * ulp
        # 16 vectors of size 1 are left, whatever was there before: beside them the error is size times as large.
        assert 0.1 * size * ulp < of_new < 10 * size * ulp
        assert erased("fused_recurrent_kda", size)[1] < 8 * ulp


class Mixer(torch.nn.Module):
    """Projections whose activations have several roundings to bfloat16 under autocast."""

    def __init__(self, dim=32, H=2, K=16):
        super().__init__()
        self.H, self.K = H, K
        self.into = torch.nn.Linear(dim, H * (4 * K + 1), bias=False)
        self.back = torch.nn.Linear(H * K, dim, bias=False)

    def forward(self, x):
        B, tokens, _ = x.shape
        parts = self.into(x).view(B, tokens, self.H, -1).split([self.K] * 4 + [1], dim=-1)
        q, k, v = (F.silu(t) * 1.7 + t * t for t in parts[:3])
        beta = parts[4].squeeze(-1).sigmoid()
        o, _ = kda_core.chunk_kda(q, k, v, -F.softplus(parts[3]), beta, use_qk_l2norm_in_kernel=True)
        return self.back(o.flatten(2))


@pytest.mark.end_to_end
def test_inductor_rounds_as_eager_does_where_it_is_told_to():
    """Needs a C++ compiler. The difference is inductor's, before and behind the operator, which is the same call."""
    import torch._inductor.config as inductor

    torch.manual_seed(0)
    model, x = Mixer(), torch.randn(2, 70, 32)

    def trained(function):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = function(x)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]

    eager = trained(model)
    with inductor.patch(emulate_precision_casts=True, fx_graph_cache=False):
        assert all(map(torch.equal, trained(torch.compile(model, fullgraph=True)), eager))
    torch._dynamo.reset()
    with inductor.patch(emulate_precision_casts=False, fx_graph_cache=False):
        errors = [
            ((found - expected).norm() / expected.norm()).item()
            for found, expected in zip(trained(torch.compile(model, fullgraph=True)), eager, strict=True)
        ]
    torch._dynamo.reset()
    # A rounding to bfloat16 is 2 ** -9 at most; a few of them differ.
    assert all(0 < error < 4 * 2**-8 for error in errors)

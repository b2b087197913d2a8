"""transformers' Kimi Linear on kda_core: the same logits, gradients and text as on transformers' torch code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import installed
import pytest
import torch

installed.need_backend("cpu")
installed.need_package("transformers", at_least="5.18")

EXAMPLES = Path(__file__).parents[2] / "examples"

import kimi_linear
from transformers.models.kimi_linear import modeling_kimi_linear

pytestmark = [pytest.mark.end_to_end, pytest.mark.filterwarnings("ignore")]

TINY = {"hidden_size": 64, "linear_num_heads": 2, "linear_head_dim": 16, "intermediate_size": 64}


@pytest.fixture
def model():
    return kimi_linear.small_model(**TINY)


@pytest.fixture
def text():
    return torch.randint(3, 256, (2, 90), generator=torch.Generator().manual_seed(1))


def apart(a, b) -> float:
    return float((a - b).norm() / b.norm())


def test_training_steps_agree(model, text):
    """Logits and the gradient of every parameter."""
    with kimi_linear.on_torch():
        expected = kimi_linear.step(model, text)
    with kimi_linear.on_kda_core():
        actual = kimi_linear.step(model, text)
    assert expected[1].norm() > 0.1
    assert max(map(apart, actual, expected)) < 5e-6


def test_layers_call_kda_core(model, text, monkeypatch):
    """Every linear layer, one token at a time when it writes."""
    called = []
    for name in ("chunk_kda", "fused_recurrent_kda"):
        function = getattr(kimi_linear, name)
        monkeypatch.setattr(
            kimi_linear,
            name,
            lambda *args, name=name, function=function, **more: called.append(name) or function(*args, **more),
        )
    with kimi_linear.on_kda_core():
        kimi_linear.write(model, text, 5)
    assert called == ["chunk_kda"] * 3 + ["fused_recurrent_kda"] * 12


def test_text_is_the_same(model, text):
    """A prompt past a chunk, then tokens one at a time over the cache."""
    with kimi_linear.on_torch():
        expected = kimi_linear.write(model, text, 12)
    with kimi_linear.on_kda_core():
        assert torch.equal(kimi_linear.write(model, text, 12), expected)


def test_a_prompt_in_pieces(model, text):
    """Several tokens on top of a cache, then single ones, against all at once."""
    with kimi_linear.on_kda_core(), torch.no_grad():
        expected = model(text).logits
        cache, pieces = None, []
        for piece in text.split([70, 17, 1, 1, 1], dim=1):
            result = model(piece, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            pieces.append(result.logits)
    assert apart(torch.cat(pieces, dim=1), expected) < 5e-6


def test_bfloat16(model, text):
    """Tensors as a model in bfloat16 passes them: as far from float32 as on the torch code, which computes in it."""
    with kimi_linear.on_torch(), torch.no_grad():
        exact = model(text).logits
        model.bfloat16()
        expected = apart(model(text).logits.float(), exact)
    with kimi_linear.on_kda_core(), torch.no_grad():
        assert apart(model(text).logits.float(), exact) < 1.2 * expected < 0.1


def test_packed_documents_share_no_state():
    """Boundaries that transformers passes with packed documents (``cu_seq_lens_q``) reach the operator."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 50, 2, 16) for _ in range(3))
    more = {"g": -torch.rand(1, 50, 2, 16), "beta": torch.rand(1, 50, 2), "initial_state": None}
    more |= {"output_final_state": False, "use_qk_l2norm_in_kernel": True}
    o, _ = kimi_linear.chunk_kda(q, k, v, cu_seq_lens_q=torch.tensor([0, 20, 50], dtype=torch.int32), **more)
    parts = [x.split([20, 30], dim=1) for x in (q, k, v, more["g"], more["beta"])]
    for own, (a, b, c, g, beta) in zip(o.split([20, 30], dim=1), zip(*parts, strict=True), strict=True):
        alone, _ = kimi_linear.chunk_kda(a, b, c, **(more | {"g": g, "beta": beta}))
        torch.testing.assert_close(own, alone)


def test_what_was_there_comes_back():
    names = (kimi_linear.CHUNK, kimi_linear.STEP)
    before = [getattr(modeling_kimi_linear, name) for name in names]

    def fail():
        with kimi_linear.on_kda_core():
            assert modeling_kimi_linear.chunk_kimi_delta_attention is kimi_linear.chunk_kda
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert [getattr(modeling_kimi_linear, name) for name in names] == before


def test_command_line():
    command = [sys.executable, str(EXAMPLES / "kimi_linear.py"), "--tokens", "20", "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "kda_core" in result.stdout
    assert result.stdout.count("the same") == 2

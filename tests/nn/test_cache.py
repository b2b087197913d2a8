"""A layer's cache across modes of autograd, and cropped within its first call."""

from __future__ import annotations

import pytest
import torch

from kda_core.nn import KDACache, KimiDeltaAttention

KINDS = {
    "plain": {},
    "convolution's bias": {"conv_bias": True, "conv_size": 3},
    "no convolution": {"use_short_conv": False},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(hidden_size=24, head_dim=8, num_heads=2, **KINDS[request.param]).double()


def tokens(B: int, T: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(B, T, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("first", [torch.enable_grad, torch.inference_mode])
def test_a_step_in_another_mode(kind: KimiDeltaAttention, first):
    """Neither states of autograd's nor those of inference mode are advanced in place under no_grad."""
    x, cache = tokens(2, 11), KDACache()
    with first():
        kind(x[:, :9], cache=cache)
    state, kept = cache.state, cache.state.detach().clone()
    with torch.no_grad():
        actual = torch.cat([kind(x[:, t : t + 1], cache=cache) for t in (9, 10)], 1)
        torch.testing.assert_close(actual, kind(x)[:, 9:])
    assert torch.equal(kept, state)
    assert not cache.state.requires_grad


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_cache_of_each_sample_of_vmap(kind: KimiDeltaAttention, mode):
    def decoded(x: torch.Tensor) -> torch.Tensor:
        cache = KDACache()
        return torch.cat([kind(piece[None], cache=cache)[0] for piece in x.split([9, 1, 1])])

    x = tokens(3, 11)
    with mode():
        torch.testing.assert_close(torch.func.vmap(decoded)(x), kind(x))


@pytest.mark.parametrize("length", [0, 1, 2, 17])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_cropping_the_first_call(kind: KimiDeltaAttention, length: int, mode):
    """Outside of the mode in which the call was made: no gradient begins there."""
    x, cache = tokens(2, 30), KDACache(crop_calls=1)
    with mode():
        kind(torch.cat([x[:, :length], tokens(2, 3, seed=9)], 1), cache=cache)
    cache.crop(length)
    assert cache.state is None or not cache.state.requires_grad
    with mode():
        torch.testing.assert_close(kind(x[:, length:], cache=cache), kind(x)[:, length:])


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (None, "cache: expected one of 1 sequences, as in this call, got 3"),
        ([0, 1], "cache: expected one of 1 sequences, as in this call, got 3"),
        ([0, 1, 1, 9], "cu_seqlens: expected boundaries from 0 to at most T = 1"),
    ],
)
def test_a_refused_call_leaves_the_cache_alone(kind: KimiDeltaAttention, bounds: list[int] | None, text: str):
    """The convolution, which comes first, would write its state."""
    cache = KDACache()
    with torch.no_grad():
        kind(tokens(3, 5), cache=cache)
        kept = [None if t is None else t.clone() for t in (cache.state, cache.conv)]
        with pytest.raises(ValueError, match=text):
            kind(tokens(1, 1), cache=cache, cu_seqlens=None if bounds is None else torch.tensor(bounds))
    torch.testing.assert_close([cache.length, cache.state, cache.conv], [5, *kept], rtol=0, atol=0)


@pytest.mark.parametrize("other", [{"conv_size": 3}, {"num_heads": 3}])
def test_a_cache_of_another_layer_is_refused(other: dict):
    """Its rows would stand at other taps."""
    cache, x = KDACache(), tokens(2, 5)
    with torch.no_grad():
        KimiDeltaAttention(24, **{"head_dim": 8, "num_heads": 2} | other).double()(x, cache=cache)
        kept = cache.conv.clone()
        with pytest.raises(ValueError, match=r"cache: expected one of this layer, with conv \[N, 3, 48\], got"):
            KimiDeltaAttention(24, head_dim=8, num_heads=2).double()(x, cache=cache)
    assert torch.equal(cache.conv, kept)


@pytest.mark.parametrize("hooked", [False, True])
def test_padding_ahead_of_later_tokens(kind: KimiDeltaAttention, hooked: bool):
    """A second turn whose prompts are padded on the left: its first tokens follow the last of the turn before."""
    if hooked and kind.use_short_conv:
        kind.q_conv1d.register_forward_hook(lambda *_: None)
    x, cache = tokens(3, 14), KDACache(crop_calls=2)
    mask = torch.ones(3, 14, dtype=torch.bool)
    mask[0, 5:7] = mask[1, 5:9] = mask[2, 5:] = False  # three tokens follow, one, and none
    with torch.no_grad():
        for begin, end in ((0, 5), (5, 10), (9, 10), (10, 14)):
            cache.crop(begin)
            given = x[:, begin:end].masked_fill(~mask[:, begin:end, None], torch.nan)
            part = kind(given, mask[:, :end], cache)
            for row in range(3):
                found = part[row][mask[row, begin:end]]
                whole = kind(x[row, :end][mask[row, :end]][None])[0]
                torch.testing.assert_close(found, whole[len(whole) - len(found) :])

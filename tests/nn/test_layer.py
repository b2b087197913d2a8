"""KimiDeltaAttention: equal to fla's and transformers' layers, to itself in pieces, padded, packed and compiled."""

from __future__ import annotations

import copy
import inspect
import math
from itertools import pairwise

import installed
import numpy as np
import pytest
import torch
import toys
from layer_hooks import Hooked
from torch import nn
from torch.nn import functional as F

import kda_core
from kda_core.nn import KDACache, KimiDeltaAttention, from_transformers, to_transformers

SIZES = {"hidden_size": 24, "head_dim": 8, "num_heads": 2}
EVERYTHING = {
    "num_v_heads": 4, "expand_v": 2, "lower_bound": -5.0, "safe_gate": True, "conv_bias": True, "conv_size": 3,
    "allow_neg_eigval": True,
}  # fmt: skip
KINDS = {"plain": {}, "everything": EVERYTHING, "no convolution": {"use_short_conv": False}}


def layer(**options) -> KimiDeltaAttention:
    torch.manual_seed(0)
    made = KimiDeltaAttention(**(SIZES | {"dtype": torch.float64} | options))
    for parameter in (made.A_log, made.dt_bias):
        parameter.data = parameter.data.to(made.q_proj.weight.dtype)
    return made


def tokens(B: int, T: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(B, T, SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> KimiDeltaAttention:
    return layer(**KINDS[request.param])


def by_hand(m: KimiDeltaAttention, x: torch.Tensor) -> torch.Tensor:
    """The layer as fla's forward has it, of torch's modules and the operator in float64."""

    def convolved(name: str) -> torch.Tensor:
        rows = getattr(m, f"{name}_proj")(x)
        if m.use_short_conv:
            convolution = getattr(m, f"{name}_conv1d")
            rows = nn.Conv1d.forward(convolution, F.pad(rows.mT, (m.conv_size - 1, 0))).mT
        return F.silu(rows).unflatten(-1, (-1, m.head_v_dim if name == "v" else m.head_k_dim))

    g = kda_core.kda_gate(
        m.f_proj(x).unflatten(-1, (m.num_v_heads, -1)), m.A_log, m.dt_bias, m.lower_bound, backend="reference"
    )
    beta = m.b_proj(x).sigmoid() * (2 if m.allow_neg_eigval else 1)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in map(convolved, "qk"))
    o, _ = kda_core.chunk_kda(q, k, convolved("v"), g, beta, backend="reference")
    normed = nn.RMSNorm.forward(m.o_norm, o)
    return m.o_proj((normed * m.g_proj(x).unflatten(-1, o.shape[-2:]).sigmoid()).flatten(-2))


def test_the_layer_is_what_it_is_made_of(kind: KimiDeltaAttention):
    """Outputs and gradients."""
    x = tokens(2, 70)
    expected, actual = by_hand(kind, x), kind(x)
    torch.testing.assert_close(actual, expected)
    parameters = dict(kind.named_parameters())
    grad = tokens(2, 70, seed=2)
    found, wanted = (torch.autograd.grad(y, parameters.values(), grad) for y in (actual, expected))
    torch.testing.assert_close(dict(zip(parameters, found, strict=True)), dict(zip(parameters, wanted, strict=True)))


@pytest.mark.parametrize("frozen", [(), ("k_proj.weight", "q_conv1d.weight", "b_proj.weight", "g_proj.1.bias")])
@pytest.mark.parametrize("form", ["plain", "packed", "padded"])
def test_a_layer_on_a_backends_hooks(form: str, frozen: tuple[str, ...]):
    """Projections and convolutions are then one node of autograd."""
    m, x = layer(num_v_heads=4), tokens(1, 40).requires_grad_()
    for name in frozen:
        m.get_parameter(name).requires_grad_(False)
    leaves = [x, *(p for p in m.parameters() if p.requires_grad)]
    packed, padded = {"cu_seqlens": torch.tensor([0, 3, 40])}, {"attention_mask": torch.arange(40)[None] > 4}
    given = {"packed": packed, "padded": padded}.get(form, {})
    expected = m(x, **given)
    with toys.installed(toy := Hooked("hooked", priority=1, features=(), dtypes=(torch.float64,))):
        actual = m(x, **given)
        grads = torch.autograd.grad(actual.square().sum(), leaves)
    assert toy.calls == ("convolution", "norm", "norm backward", "convolution backward")
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), leaves))


def test_the_graph_of_a_step_is_small():
    """On a GPU the host limits a small layer: three nodes of our own and the leaves."""
    m = layer()
    with toys.installed(Hooked("hooked", priority=1, features=(), dtypes=(torch.float64,))):
        y = m(tokens(1, 40).requires_grad_())
    names, seen = [], [y.grad_fn]
    for node in seen:
        names.append(node.name())
        seen += [n for n, _ in node.next_functions if n is not None and n not in seen]
    leaves = {"torch::autograd::AccumulateGrad"}
    assert sorted({*names} - leaves) == [
        "NormedProductBackward", "_ProjectBackward", "kda_core::chunk_kdaBackward",
    ]  # fmt: skip
    assert len([name for name in names if name not in leaves]) == 3


def test_no_tokens_and_no_sequences(kind: KimiDeltaAttention):
    for B, T in ((2, 0), (0, 5)):
        cache = KDACache()
        y = kind(tokens(B, T))
        y.sum().backward()
        with torch.no_grad():
            assert y.shape == kind(tokens(B, T), cache=cache).shape == (B, T, SIZES["hidden_size"])
        assert cache.state.shape[0] == B


def test_pieces_equal_the_whole(kind: KimiDeltaAttention):
    x = tokens(2, 80)
    with torch.no_grad():
        expected, cache = kind(x), KDACache()
        pieces = (x[:, :66], x[:, 66:68], x[:, 68:72], *x[:, 72:].split(1, 1))
        actual = torch.cat([kind(piece, cache=cache) for piece in pieces], 1)
    torch.testing.assert_close(actual, expected)
    assert cache.length == 80


def test_a_single_token_advances_the_cache_in_place():
    m, cache = layer(), KDACache()
    with torch.no_grad():
        m(tokens(2, 9), cache=cache)
        kept = cache.state, cache.conv
        m(tokens(2, 1), cache=cache)
    assert (cache.state is kept[0], cache.conv is kept[1]) == (True, True)


def test_a_cache_differentiates():
    m, x, cache = layer(), tokens(1, 40), KDACache()
    grads = [torch.autograd.grad(torch.cat(y, 1).square().sum(), tuple(m.parameters())) for y in (
        [m(x)], [m(x[:, :20], cache=cache), m(x[:, 20:], cache=cache)])]  # fmt: skip
    torch.testing.assert_close(*grads)


def test_cropping_and_going_on(kind: KimiDeltaAttention):
    """Drafts that are not accepted, of the last call and of one before."""
    x, cache = tokens(2, 60), KDACache(crop_calls=3)
    with torch.no_grad():
        expected = kind(x)
        kind(x[:, :40], cache=cache)
        kind(x[:, 40:45], cache=cache)
        for length in (47, 44, 40):
            kind(tokens(2, 4, seed=length), cache=cache)
            kind(tokens(2, 1, seed=length), cache=cache)
            cache.crop(min(length, cache.length))
            assert cache.length == length
            if length > 45:
                cache.crop(45)
        actual = kind(x[:, 40:], cache=cache)
    torch.testing.assert_close(actual, expected[:, 40:])
    cache.crop(cache.length)
    for wrong in (cache.length + 1, 3):
        with pytest.raises(ValueError, match="length: expected"):
            cache.crop(wrong)


def test_reordering_sequences(kind: KimiDeltaAttention):
    x, index, cache = tokens(3, 20), torch.tensor([2, 0, 2, 1]), KDACache(crop_calls=1)
    with torch.no_grad():
        expected = kind(x[index])
        kind(x[:, :10], cache=cache)
        kind(x[:, 10:15], cache=cache)
        cache.reorder(index)
        torch.testing.assert_close(kind(x[index, 15:], cache=cache), expected[:, 15:])
        cache.crop(17)
        torch.testing.assert_close(kind(x[index, 17:], cache=cache), expected[:, 17:])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_padding_changes_nothing(kind: KimiDeltaAttention, side: str, dtype: torch.dtype):
    """Output, gradients, the state behind it, and the tokens that follow."""
    lengths, T = (50, 0, 2, 70), 70
    x, after = tokens(4, T), tokens(4, 1, seed=3)
    rows = torch.arange(T)
    mask = torch.stack([rows >= T - n if side == "left" else rows < n for n in lengths]).to(dtype)
    padded = x.where(mask[..., None].bool(), torch.nan)
    parameters = tuple(kind.parameters())
    y = kind(padded, mask)
    assert not y[mask == 0].any()
    found = torch.autograd.grad(y.square().sum(), parameters)
    alone = [kind(x[n : n + 1, mask[n].bool()]) for n in range(4) if lengths[n]]
    torch.testing.assert_close(torch.cat([a[0] for a in alone]), y[mask.bool()])
    torch.testing.assert_close(found, torch.autograd.grad(sum(a.square().sum() for a in alone), parameters))
    with torch.no_grad():
        cache = KDACache()
        kind(padded, mask, cache)
        # As generating programs have it: the mask covers the past as well.
        actual = kind(after, F.pad(mask, (0, 1), value=1), cache)
        for n in range(4):
            own = KDACache()
            if lengths[n]:
                kind(x[n : n + 1, mask[n].bool()], cache=own)
            torch.testing.assert_close(actual[n], kind(after[n : n + 1], cache=own)[0])


def test_packed_sequences_equal_separate_ones(kind: KimiDeltaAttention):
    x, bounds = tokens(1, 80), [0, 13, 13, 15, 80]
    cu_seqlens, cache = torch.tensor(bounds), KDACache()
    with torch.no_grad():
        actual = kind(x, cache=cache, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens)
        for n, (a, b) in enumerate(pairwise(bounds)):
            if a < b:
                own = KDACache()
                torch.testing.assert_close(actual[:, a:b], kind(x[:, a:b], cache=own))
                torch.testing.assert_close(cache.state[n], own.state[0])
        y = kind(tokens(4, 1), cache=cache)
    assert y.shape == (4, 1, SIZES["hidden_size"])


@pytest.mark.end_to_end
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_weights_of_fla(options: dict):
    """State dicts go both ways, and constructors take the same arguments."""
    installed.need_package("fla")
    from fla.layers.kda import KimiDeltaAttention as Theirs

    theirs, ours = Theirs(**(SIZES | options)), KimiDeltaAttention(**(SIZES | options))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    names = [n for n in inspect.signature(Theirs).parameters if n != "kwargs"]
    assert list(inspect.signature(KimiDeltaAttention).parameters)[: len(names)] == names
    defaults = {n: p.default for n, p in inspect.signature(Theirs).parameters.items() if n in names}
    assert defaults == {n: inspect.signature(KimiDeltaAttention).parameters[n].default for n in names}
    unlike = [n for n, p in ours.named_parameters() if vars(p) != vars(dict(theirs.named_parameters())[n])]
    assert unlike == []


@pytest.mark.end_to_end
def test_transformers_layer(monkeypatch: pytest.MonkeyPatch):
    """Weights go both ways, from the Hub's names as well, and the outputs are the same."""
    installed.need_package("transformers")
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
    config = KimiLinearConfig(
        hidden_size=24, linear_num_heads=2, linear_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"]
    )
    theirs = modeling.KimiLinearDeltaAttention(config, 0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = KimiDeltaAttention(**SIZES, norm_eps=config.rms_norm_eps)
    weights = theirs.state_dict()
    ours.load_state_dict(from_transformers(weights))
    torch.testing.assert_close(to_transformers(ours.state_dict()), weights, rtol=0, atol=0)
    hub = {name.removeprefix("forget_gate."): t for name, t in weights.items() if name != "conv1d.weight"}
    hub |= {f"{n}_conv1d.weight": t for n, t in zip("qkv", weights["conv1d.weight"].chunk(3), strict=True)}
    torch.testing.assert_close(from_transformers(hub), from_transformers(weights), rtol=0, atol=0)
    x = tokens(2, 70, dtype=torch.float32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: w.pop("g_proj.0.weight"), r"\['g_proj.0.weight'\]"),
        (lambda w: w.update(more=w["A_log"]), r"\['more'\]"),
        (lambda w: w["g_proj.1.bias"].fill_(1), "g_proj.1.bias is not 0"),
        (lambda w: w.update({"v_proj.weight": w["v_proj.weight"][:8]}), "v_proj"),
    ],
)
def test_weights_that_transformers_cannot_have(change, text: str):
    weights = {name: t.clone() for name, t in layer().state_dict().items()}
    weights["g_proj.1.bias"].zero_()
    assert from_transformers(to_transformers(weights)).keys() == weights.keys()
    change(weights)
    with pytest.raises(ValueError, match=text):
        to_transformers(weights)


def test_weights_that_transformers_does_not_have():
    weights = layer().state_dict()
    weights["g_proj.1.bias"].zero_()
    theirs = to_transformers(weights)
    with pytest.raises(ValueError, match=r"unknown names \['more'\]"):
        from_transformers(theirs | {"more": theirs["o_norm.weight"]})
    del theirs["g_a_proj.weight"]
    with pytest.raises(ValueError, match=r"g_a_proj\.weight is missing"):
        from_transformers(theirs)


def test_a_new_layer_forgets_as_fla_s_does():
    torch.manual_seed(0)
    m = KimiDeltaAttention(32, head_dim=64, num_heads=16)
    rates, steps = m.A_log.exp(), F.softplus(m.dt_bias)
    assert (1 <= rates.min(), rates.max() <= 16, rates.max() - rates.min() > 8) == (True,) * 3
    assert (0.00099 < steps.min(), steps.max() < 0.101) == (True, True)
    # Log-uniform: half of them lie below the geometric mean.
    assert abs((steps < math.sqrt(0.001 * 0.1)).float().mean() - 0.5) < 0.06
    assert not KimiDeltaAttention(**SIZES, safe_gate=True, lower_bound=-5.0).A_log.any()
    assert all(p._no_weight_decay for p in (m.A_log, m.dt_bias))


def test_half_precision():
    m, x = layer(dtype=torch.float32), tokens(2, 70, dtype=torch.float32)
    expected = m(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x)
    y.float().square().sum().backward()
    assert (y.dtype, m.q_proj.weight.grad.dtype) == (torch.bfloat16, torch.float32)
    halved = KimiDeltaAttention(**SIZES, dtype=torch.bfloat16)
    halved.load_state_dict(m.state_dict())
    assert (halved.A_log.dtype, halved.q_proj.weight.dtype) == (torch.float32, torch.bfloat16)
    for found in (y, halved(x.bfloat16())):
        # Some ten roundings in a row, of 2^-9 each.
        assert (found - expected).norm() < 10 * 2**-9 * expected.norm()


def test_meta_device():
    with torch.device("meta"):
        m, x, cache = KimiDeltaAttention(**SIZES), torch.empty(2, 30, SIZES["hidden_size"]), KDACache()
        m(x).sum().backward()
        with torch.no_grad():
            m(x, torch.ones(2, 30), cache)
            assert m(x[:, :1], cache=cache).shape == (2, 1, SIZES["hidden_size"])
    assert all(p.grad.shape == p.shape for p in m.parameters())
    assert (cache.state.shape, cache.conv.shape) == ((2, 2, 8, 8), (2, 3, 48))
    m.to_empty(device="cpu")
    for module in m.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert m(torch.ones(1, 3, SIZES["hidden_size"])).isfinite().all()


@pytest.mark.end_to_end
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_compiled_as_one_graph(options: dict):
    """A training step; with every option a mask, packed sequences, and tokens with a cache, too."""
    torch.compiler.reset()  # graphs of earlier tests count towards the limit of recompilations
    m, x = layer(**options), tokens(2, 70)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    parameters = tuple(m.parameters())
    expected, actual = m(x), compiled(x)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(y.square().sum(), parameters) for y in (actual, expected)]
    torch.testing.assert_close(*grads)
    if not options:
        return
    mask = torch.arange(70) >= torch.tensor([[20], [0]])
    cu_seqlens = torch.tensor([0, 30, 70])
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, mask), m(x, mask))
        packed = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens}
        torch.testing.assert_close(compiled(x[:1], **packed), m(x[:1], **packed))
        ours, theirs = KDACache(), KDACache()
        for piece in (x[:, :60], x[:, 60:61], x[:, 61:62]):
            torch.testing.assert_close(compiled(piece, cache=ours), m(piece, cache=theirs))


def test_an_output_gate_without_a_bias():
    """As in transformers' layer."""
    m, x = layer(), tokens(2, 9)
    torch.nn.init.zeros_(m.g_proj[1].bias)
    expected = m(x)
    plain = torch.nn.Linear(*m.g_proj[1].weight.shape[::-1], bias=False, dtype=x.dtype)
    plain.load_state_dict({"weight": m.g_proj[1].weight})
    m.g_proj[1] = plain
    torch.testing.assert_close(m(x), expected)


def test_projections_that_are_more_than_a_product():
    """Hooks, another forward, adapters in the place of a projection, and frozen weights."""
    m, x = layer(), tokens(1, 20)
    expected = m(x)
    seen = []
    m.q_proj.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    torch.testing.assert_close(m(x), expected)
    assert seen == [(20, 16)]
    replaced = layer()
    replaced.v_proj.forward = lambda x: 0 * F.linear(x, replaced.v_proj.weight)  # as accelerate does
    assert not torch.isclose(replaced(x), expected).any()
    adapted = copy.deepcopy(layer())
    adapted.k_proj = nn.Sequential(adapted.k_proj, nn.Identity())
    torch.testing.assert_close(adapted(x), expected)
    frozen = layer()
    frozen.k_proj.weight.requires_grad_(False)
    frozen.b_proj.weight.requires_grad_(False)
    frozen(x).sum().backward()
    without = {name for name, p in frozen.named_parameters() if p.grad is None}
    assert without == {"k_proj.weight", "b_proj.weight"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "parallel"}, "mode: expected 'chunk' or 'fused_recurrent'"),
        ({"num_v_heads": 3}, "num_v_heads: expected a multiple of num_heads = 2"),
        ({"expand_v": 1.3}, "expand_v: expected a whole number"),
        ({"expand_v": 0}, "expand_v: expected a whole number"),
        ({"expand_v": math.inf}, "expand_v: expected a whole number"),
        ({"num_heads": 0}, "num_heads: expected at least 1, got 0"),
        ({"conv_size": 1}, "conv_size: expected at least 2, got 1"),
        ({"safe_gate": True}, "safe_gate: needs lower_bound"),
        ({"norm_eps": -1.0}, "norm_eps: expected a finite number"),
    ],
)
def test_bad_sizes(options: dict, text: str):
    with pytest.raises(ValueError, match=text):
        KimiDeltaAttention(**(SIZES | options))


@pytest.mark.parametrize("name", ["hidden_size", "head_dim", "num_heads", "num_v_heads", "conv_size"])
def test_sizes_are_integers(name: str):
    KimiDeltaAttention(**(SIZES | {name: np.int64(4)}))
    for size in (4.0, "4", True):
        with pytest.raises(TypeError, match=f"{name}: expected an int, got {type(size).__name__}"):
            KimiDeltaAttention(**(SIZES | {name: size}))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"hidden_states": torch.ones(2, 5, 23)}, ValueError, r"hidden_states: expected \[B, T, 24\]"),
        ({"hidden_states": torch.ones(5, 24)}, ValueError, "hidden_states: expected 3 dimensions"),
        ({"hidden_states": 3}, TypeError, "hidden_states: expected a tensor"),
        ({"attention_mask": torch.ones(2, 4)}, ValueError, r"attention_mask: expected \[2, at least 5\]"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, ValueError, "attention_mask: expected"),
        ({"attention_mask": [1]}, TypeError, "attention_mask: expected a tensor"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 0], [1] * 5])}, ValueError, "got a mask with holes"),
        ({"attention_mask": torch.full((2, 5), -torch.inf)}, ValueError, "attention_mask: expected 0 and 1, got neg"),
        ({"attention_mask": torch.ones(2, 5), "cu_seqlens": torch.tensor([0, 5])}, ValueError, "attention_mask: does"),
        ({"cache": {}}, TypeError, "cache: expected a KDACache, got dict"),
        ({"cache": KDACache(1), "cu_seqlens": torch.tensor([0, 5])}, ValueError, "cache: crop_calls does not go"),
        ({"cu_seqlens_cpu": torch.tensor([0, 5])}, ValueError, "cu_seqlens_cpu: expected cu_seqlens beside it"),
        ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens: expected an int32 or int64 tensor, got list"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"cu_seqlens: expected \[N \+ 1\] with B = 1"),
    ],
)
def test_bad_arguments(arguments: dict, error: type, text: str):
    """A short call with a cache, without gradients, takes another function of the operator."""
    m = layer(dtype=torch.float32)
    given = {"hidden_states": torch.ones(2, 5, 24)} | arguments
    with pytest.raises(error, match=text):
        m(**given)
    with torch.no_grad(), pytest.raises(error, match=text):
        m(**{"cache": KDACache()} | given)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: KDACache(-1), ValueError, "crop_calls: expected a number of at least 0"),
        (lambda: KDACache("1"), TypeError, "crop_calls: expected an int"),
        (lambda: KDACache().crop(1.0), TypeError, "length: expected an int"),
        (lambda: KDACache().reorder([0]), TypeError, "index: expected a tensor"),
    ],
)
def test_bad_use_of_a_cache(call, error: type, text: str):
    with pytest.raises(error, match=text):
        call()

"""Hooks on a layer's short convolutions and norm, which no product calls: as on its projections, they run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize, prune

from kda_core.nn import KDACache, KimiDeltaAttention
from kda_core.nn._projections import is_bare

SUBMODULES = (
    *("q_proj", "k_proj", "v_proj", "f_proj", "f_proj.0", "b_proj", "g_proj", "g_proj.1"),
    *("q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "o_proj"),
)
KINDS = {"plain": {}, "bias": {"conv_bias": True, "num_v_heads": 4, "expand_v": 2}}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[KimiDeltaAttention, KimiDeltaAttention]:
    """Two layers of the same weights."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(24, head_dim=8, num_heads=2, **KINDS[request.param])
    return layer, copy.deepcopy(layer)


def watch(layer: nn.Module) -> list[str]:
    """The names of the submodules that hooks have seen."""
    seen: list[str] = []
    for name in SUBMODULES:
        layer.get_submodule(name).register_forward_hook(lambda module, args, result, name=name: seen.append(name))
    return seen


def outputs(layer: KimiDeltaAttention, how: str) -> list[Tensor]:
    x = torch.randn(2, 20, 24, generator=torch.Generator().manual_seed(1))
    if how == "mask":
        return [layer(x, attention_mask=torch.arange(20).expand(2, 20) >= torch.tensor([[3], [0]]))]
    if how == "packed":
        return [layer(x[:1], cu_seqlens=torch.tensor([0, 7, 7, 15]))]
    if how == "cache":
        cache = KDACache()
        with torch.no_grad():
            found = [layer(part, cache=cache) for part in x.split([17, 1, 1, 1], 1)]
        return [*found, cache.conv, cache.state]
    if how == "compiled":
        torch.compiler.reset()  # its guards do not look at hooks
        return [torch.compile(layer, backend="aot_eager", fullgraph=True)(x)]
    return [layer(x)]


@pytest.mark.parametrize(
    "how", ["dense", "mask", "packed", "cache", pytest.param("compiled", marks=pytest.mark.end_to_end)]
)
def test_hooks_run_and_change_nothing(pair: tuple[KimiDeltaAttention, KimiDeltaAttention], how: str):
    plain, hooked = pair
    seen = watch(hooked)
    # A compiled layer with hooks computes what the layer computes without either.
    expected, found = outputs(plain, "dense" if how == "compiled" else how), outputs(hooked, how)
    assert {*seen} == {*SUBMODULES}
    torch.testing.assert_close(found, expected)
    if how != "cache":
        for one, other in zip(*(torch.autograd.grad(o[0].sum(), [*m.parameters()])
                                for m, o in ((plain, expected), (hooked, found))), strict=True):  # fmt: skip
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("when", "how"),
    [(when, how) for when in ("forward_pre", "forward") for how in ("dense", "packed", "cache")]
    + [(when, how) for when in ("full_backward_pre", "full_backward") for how in ("dense", "packed")],
)
def test_hooks_on_every_module_run(pair: tuple[KimiDeltaAttention, KimiDeltaAttention], when: str, how: str):
    """Those of ``torch.nn.modules.module`` see what those of each submodule see."""
    plain, hooked = pair
    expected = outputs(plain, how)
    names = {hooked.get_submodule(name): name for name in SUBMODULES}
    seen: set[str] = set()
    handle = getattr(modules, f"register_module_{when}_hook")(lambda module, *_: seen.add(names.get(module, "")))
    try:
        found = outputs(hooked, how)
        if "backward" in when:
            found[0].sum().backward()
    finally:
        handle.remove()
    assert seen - {""} == {*SUBMODULES}
    torch.testing.assert_close(found, expected)


def test_a_hook_replaces_a_result():
    layer = KimiDeltaAttention(24, head_dim=8, num_heads=2)
    for name, change in (
        ("g_proj", lambda r: torch.full_like(r, -1e9)),
        ("o_norm", torch.zeros_like),
        ("v_conv1d", lambda r: (torch.zeros_like(r[0]), r[1])),
    ):
        handle = layer.get_submodule(name).register_forward_hook(lambda module, args, result, f=change: f(result))
        assert not layer(torch.randn(1, 5, 24)).any()
        handle.remove()
        assert layer(torch.randn(1, 5, 24)).all()


def test_weights_that_hooks_compute_are_computed_at_every_call():
    """``prune`` sets the weight in a hook before each call: a stale one belongs to a graph that has been freed."""
    layer = KimiDeltaAttention(24, head_dim=8, num_heads=2)
    for name in ("q_conv1d", "o_norm"):
        prune.l1_unstructured(layer.get_submodule(name), "weight", 0.5)
    for _ in range(2):
        layer(torch.randn(1, 5, 24)).sum().backward()
    assert (layer.q_conv1d.weight_orig.grad[layer.q_conv1d.weight_mask == 0] == 0).all()


def test_parametrised_weights(pair: tuple[KimiDeltaAttention, KimiDeltaAttention]):
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    plain, other = pair
    for name in ("k_conv1d", "o_norm"):
        parametrize.register_parametrization(other.get_submodule(name), "weight", Double())
        plain.get_submodule(name).weight.data *= 2
    torch.testing.assert_close(outputs(other, "cache"), outputs(plain, "cache"))


class Marked(nn.Linear):
    """A class of another framework, which asks for its own."""

    def more(self) -> int:
        return 1


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Frozen(nn.Linear):
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self._parameters["weight"].detach()


def test_a_subclass_that_changes_no_product_runs_as_fast():
    assert is_bare(nn.Linear(2, 2), nn.Linear)
    assert is_bare(Marked(2, 2), nn.Linear)
    assert not is_bare(Doubled(2, 2), nn.Linear)
    assert not is_bare(nn.Conv1d(2, 2, 1), nn.Linear)
    layer = Marked(2, 2)
    layer.__class__ = Frozen
    assert not is_bare(layer, nn.Linear)
    assert not is_bare(parametrize.register_parametrization(Marked(2, 2), "weight", nn.Tanh()), nn.Linear)


def test_a_layer_of_doubled_products_computes_them():
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(24, head_dim=8, num_heads=2), torch.randn(1, 9, 24)
    expected = layer(x)
    layer.o_proj.__class__ = Marked
    assert torch.equal(layer(x), expected)
    layer.o_proj.__class__ = Doubled
    torch.testing.assert_close(layer(x), 2 * expected)


@pytest.mark.parametrize("hooked", [False, True])
def test_the_norm_has_its_own_eps(pair: tuple[KimiDeltaAttention, KimiDeltaAttention], hooked: bool):
    """A layer that calls no norm read the number that it was made with."""
    before, changed = pair
    if hooked:
        watch(changed)
    x = torch.randn(2, 20, 24)
    changed.o_norm.eps = 3.0
    assert changed.norm_eps == 3.0
    assert not torch.isclose(changed(x), before(x)).any()


@pytest.mark.parametrize("how", ["dense", "cache"])
def test_a_bias_that_one_convolution_has_is_added(how: str):
    """Whatever the layer was made with."""
    torch.manual_seed(0)
    full = KimiDeltaAttention(24, head_dim=8, num_heads=2, conv_bias=True)
    for name in ("q_conv1d", "v_conv1d"):
        nn.init.zeros_(full.get_submodule(name).bias)
    bare = KimiDeltaAttention(24, head_dim=8, num_heads=2)
    bare.load_state_dict(full.state_dict(), strict=False)
    bare.k_conv1d.bias = nn.Parameter(full.k_conv1d.bias.detach().clone())
    partial = copy.deepcopy(full)
    partial.q_conv1d.bias = None
    for layer in (bare, partial):
        torch.testing.assert_close(outputs(layer, how), outputs(full, how))

"""Adapters of other stacks: found, refused and switched off by what the wheels' metadata say; no stack is imported."""

from __future__ import annotations

import sys

import pytest
import torch
from typer.testing import CliRunner

from kda_core import _commands
from kda_core.errors import UnsupportedStack
from kda_core.integrations import admit, advance_convolution, expect_models, gradients, integrations, named


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write a distribution's metadata where Python looks first."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def write(name: str, version: str, needs: tuple[str, ...] = (), entry_point: str = "") -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {n}" for n in needs),
        ]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        if entry_point:
            (folder / "entry_points.txt").write_text(f"[kda_core.integrations]\n{entry_point}\n")

    write("kda-core-stackery", "0.3", ("kda-core>=0.1", "stackery>=2,<3"), "stackery = no_such_module")
    return write


def found():
    (own,) = (i for i in integrations() if i.name == "stackery")
    return own


def info() -> str:
    return CliRunner().invoke(_commands.app, ["info"]).stdout


def test_a_fitting_stack(install):
    install("stackery", "2.5rc1")
    assert admit("stackery")
    assert (found().state, found().reason) == ("ready", "")
    assert (found().distribution, found().supports) == ("kda-core-stackery 0.3", "stackery<3,>=2")
    assert "stackery" in info()
    assert "no_such_module" not in sys.modules


@pytest.mark.parametrize(
    ("version", "state", "message"),
    [
        ("3.0", "unsupported", r"stackery: stackery 3.0 is installed; pip install 'stackery<3,>=2'"),
        (None, "not installed", r"stackery: stackery is not installed; pip install 'stackery<3,>=2'"),
    ],
)
def test_an_unfitting_stack_is_refused(install, version, state, message):
    if version:
        install("stackery", version)
    with pytest.raises(UnsupportedStack, match=message):
        admit("stackery")
    assert found().state == state
    assert state in info()


def test_switched_off(install, monkeypatch):
    install("stackery", "2.0")
    monkeypatch.setenv("KDA_STACKERY", "0")
    assert not admit("stackery")
    assert found().state == "switched off"
    assert "unset KDA_STACKERY to switch it on" in info()
    monkeypatch.setenv("KDA_STACKERY", "1")
    assert admit("stackery")


def test_an_adapter_that_is_no_wheel():
    with pytest.raises(UnsupportedStack, match=r"no adapter is installed: pip install \./integrations/nothere"):
        admit("nothere")


def test_models_that_are_not_served():
    expect_models("stackery", ("one",), ["one", "two"])
    with pytest.raises(UnsupportedStack, match=r"^stackery: model 'three' is not served; take one, two$"):
        expect_models("stackery", ("one", "three"), ["one", "two"])


def test_arguments_by_name():
    def stock(q, scale=2, *, mode="chunk", **hints):
        raise AssertionError("only its signature counts")

    assert named(stock)(1) == {"q": 1, "scale": 2, "mode": "chunk"}
    assert named(stock)(1, 3, hint=4) == {"q": 1, "scale": 3, "mode": "chunk", "hint": 4}


def test_gradients_of_a_function_without_a_backward():
    """Inputs and gradients may be None; nothing is left in the caller's tensors."""
    x, weight = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0])
    call = {"x": x, "weight": weight, "bias": None, "factor": 5}

    def function(x, weight, bias, factor):
        return factor * x * weight, x + weight, None

    with torch.no_grad():
        found = gradients(function, call, ("weight", "bias", "x"), (torch.ones(2), None, None))
        assert found[1] is None
        assert (found[0].tolist(), found[2].tolist()) == ([5.0, 10.0], [15.0, 20.0])
        (both,) = gradients(function, call, ["x", "absent"], (torch.ones(1, 2), torch.ones(2)))
        (alone,) = gradients(lambda **given: function(**given)[0], call, ["x"], [torch.ones(2)])
    assert (both.tolist(), alone.tolist()) == ([16.0, 21.0], [15.0, 20.0])
    assert (x.grad, weight.requires_grad) == (None, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_a_convolution_is_advanced_by_one_token(dtype, biased):
    x, before, weight = (torch.randn(2, 3, n, dtype=dtype) for n in (1, 4, 4))
    weight, bias, state = weight[0], torch.randn(3, dtype=dtype) if biased else None, before.clone()
    for silu in (True, False):
        state.copy_(before)
        y = advance_convolution(x, state, weight, bias, silu)
        assert torch.equal(state, torch.cat([before, x], -1)[..., 1:])
        expected = torch.einsum("bdw,dw->bd", state.double(), weight.double()) + (bias.double() if biased else 0)
        expected = (torch.nn.functional.silu(expected) if silu else expected)[..., None]
        assert y.dtype == dtype
        torch.testing.assert_close(y, expected.to(dtype))

"""The device that new tensors go to: the best one, or the best one of a backend that was named."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from toys import Toy, inputs, installed
from typer.testing import CliRunner

import kda_core
from kda_core import _commands
from kda_core._explain import best_device
from kda_core._plugins import Registry
from kda_core.capabilities import Available, Unavailable


def test_default_device_is_one_that_a_backend_serves():
    device = kda_core.default_device()
    assert any(device.type in e.info.device_types for e in kda_core.backends() if e.state == "loaded")
    q, k, v, g, beta = (t.to(device) for t in inputs())
    assert kda_core.explain(q, k, v, g, beta).chosen is not None


CPU, META = torch.device("cpu"), torch.device("meta")


def test_default_device_says_what_to_install():
    with pytest.raises(kda_core.UnsupportedCall, match=r"pip install \./backends/cpu in a checkout"):
        best_device([CPU], Registry(entry_points=()))


def test_default_device_says_that_a_backend_waits_to_be_named(monkeypatch):
    """On a GPU whose only backend serves by name it said "pip install kda-core-cpu", and nothing of that backend."""
    own = Registry(entry_points=())
    own.register(Toy("shy", None, device_types=("meta",)))
    with pytest.raises(
        kda_core.UnsupportedCall, match=r"shy on meta: it serves only calls that name it, e\.g\. with KDA_BACKEND=shy"
    ):
        best_device([META], own)
    monkeypatch.setenv("KDA_BACKEND", "shy")
    assert best_device([META], own) == META


def name_by_variable(name, monkeypatch):
    monkeypatch.setenv("KDA_BACKEND", name)
    return nullcontext()


def name_by_context(name, monkeypatch):
    """The block goes before the variable."""
    monkeypatch.setenv("KDA_BACKEND", "nowhere")
    return kda_core.use_backend(name)


@pytest.mark.parametrize("named", [name_by_variable, name_by_context])
def test_default_device_is_that_of_the_named_backend(named, monkeypatch):
    """It said "cpu" whatever was named."""
    far = Toy("far", device_types=("meta",), availability=Available("far away"))
    gone = Toy("gone", device_types=("xpu",), availability=Unavailable("its driver is not here"))
    shy = Toy("shy", None)
    with installed(far, gone, shy):
        with named("shy", monkeypatch):
            assert kda_core.default_device() == CPU, "one that serves only when it is named"
        with named("reference", monkeypatch):
            assert kda_core.default_device() == CPU
        with named("far", monkeypatch):
            assert kda_core.default_device() == META
        refusal = r"^backend 'gone' can serve no device of this machine: xpu: its driver is not here$"
        with named("gone", monkeypatch), pytest.raises(kda_core.UnsupportedCall, match=refusal):
            kda_core.default_device()


def test_default_device_of_a_backend_that_is_not_installed_says_how_to_install_it(monkeypatch):
    own = Registry(entry_points=())
    monkeypatch.setenv("KDA_BACKEND", "cpu")
    with pytest.raises(kda_core.BackendNotFound, match=r"pip install \./backends/cpu in a checkout"):
        best_device([CPU], own)
    own.register(Toy("toy", contract="~=0.9"))
    monkeypatch.setenv("KDA_BACKEND", "toy")
    with pytest.raises(kda_core.BrokenBackend, match="needs plugin contract"):
        best_device([CPU], own)


def command(*arguments: str) -> dict:
    return json.loads(CliRunner().invoke(_commands.app, [*arguments, "--json"]).stdout)


@pytest.mark.parametrize(
    ("name", "device", "reason"),
    [
        ("reference", "cpu", ""),
        ("gone", None, "backend 'gone' can serve no device of this machine: xpu: its driver is not here"),
        ("nowhere", None, "backend 'nowhere' is not installed"),
    ],
)
def test_info_shows_the_named_backends_default_device(name, device, reason, monkeypatch):
    gone = Toy("gone", device_types=("xpu",), availability=Unavailable("its driver is not here"))
    monkeypatch.setenv("KDA_BACKEND", name)
    with installed(gone):
        found = command("info")
    assert found["default_device"] == device
    assert found["default_device_reason"].startswith(reason)
    assert bool(found["default_device_reason"]) == bool(reason)


def test_explain_asks_about_a_device_of_the_backend_that_it_is_given(monkeypatch):
    """The option goes before the variable, for the device too."""
    gone = Toy("gone", device_types=("xpu",), availability=Unavailable("its driver is not here"))
    monkeypatch.setenv("KDA_BACKEND", "gone")
    with installed(gone), installed(Toy("far", device_types=("mtia",))):
        assert command("explain", "--backend", "far")["chosen"] == "far"
        assert command("explain", "--backend", "reference")["chosen"] == "reference"
        assert command("explain")["chosen"] is None

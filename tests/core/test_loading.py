"""Loading backends: contracts, hooks, identity cards, rivals, and imports that fail or are interrupted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toys import Toy

import kda_core
from kda_core._plugins import Registry
from kda_core.capabilities import Feature
from kda_core.hookspecs import ENTRY_POINT_GROUP, hookimpl


def describe(plugin):
    return Registry(entry_points=()).register(plugin)


def test_wheels_of_another_contract_are_incompatible():
    assert describe(Toy("old", contract="~=0.9")).state == "incompatible"
    assert "this kda-core has 1.2" in describe(Toy("new", contract=">=2")).reason
    assert describe(Toy("fine", contract=">=1.0.dev0")).state == "loaded"


def test_missing_unknown_and_defaulted_hooks_are_broken():
    class Missing:
        kda_core_backend = Toy.kda_core_backend
        name, priority, options, features = "m", 1, {}, frozenset({Feature.CHUNK})

    assert "missing hooks: kda_core_availability, kda_core_chunk_forward, kda_core_reject" in describe(Missing()).reason
    recurrent = describe(Toy("toy", features=(Feature.CHUNK, Feature.RECURRENT)))
    assert recurrent.reason == "missing hooks: kda_core_recurrent_forward"

    class Misspelt(Toy):
        @hookimpl
        def kda_core_chunk_foward(self, request):
            return None

    assert "unknown hooks: kda_core_chunk_foward" in describe(Misspelt("toy")).reason

    class Defaulted(Toy):
        @hookimpl
        def kda_core_reject(self, request=None):
            return None

    assert "declares a default for request" in describe(Defaulted("toy")).reason

    class Renamed(Toy):
        @hookimpl
        def kda_core_reject(self, call):
            return None

    assert "kda_core_reject takes (call), expected (request)" in describe(Renamed("toy")).reason

    class NotDecorated:
        def kda_core_backend(self):
            return Toy("toy").kda_core_backend()

    assert "missing hook kda_core_backend" in describe(NotDecorated()).reason


def test_two_plugins_with_one_name_serve_neither_in_any_order():
    for first, second in ((1.0, 2.0), (2.0, 1.0)):
        fresh = Registry(entry_points=())
        fresh.load()
        fresh.register(Toy("twin", value=first))
        assert fresh.register(Toy("twin", value=second)).state == "conflict"
        assert "twin" not in [b.info.name for b in fresh.backends]
        with pytest.raises(kda_core.BrokenBackend, match="claims the name 'twin' too"):
            fresh.named("twin")
        assert fresh.register(Toy("twin")).state == "conflict"


def test_bad_identity_cards_are_broken():
    class Loud(Toy):
        @hookimpl
        def kda_core_backend(self):
            raise OSError("no licence")

    assert describe(Loud("toy")).reason == "kda_core_backend failed: OSError: no licence"
    assert "expected a lower case name" in describe(Toy("Toy")).reason

    class Dict(Toy):
        @hookimpl
        def kda_core_backend(self):
            return {"name": "toy"}

    assert "returned dict, expected BackendInfo" in describe(Dict("toy")).reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", None), ("name", ""), ("name", "meta"), ("name", "a@b"), ("name", "a,b"), ("name", "a b"),
        ("version", 1.0), ("contract", "~=1.0"), ("device_types", "cpu"), ("device_types", ()),
        ("device_types", ("cpu:0",)), ("device_types", ("toaster",)), ("priority", "high"), ("priority", 1.5),
        ("priority", True), ("capabilities", None), ("capabilities.features", frozenset({"CHUNK"})),
        ("capabilities.dtypes", None), ("capabilities.dtypes", frozenset({"float32"})),
        ("capabilities.max_head_dim_k", "256"), ("capabilities.max_head_dim_v", 0),
        ("capabilities.closed", {"VARLEN": "reason"}), ("capabilities.closed", {Feature.VARLEN: None}), ("slack", None),
        ("slack", ("o",)), ("summary", None), ("foreign_device", 1),
    ],
)  # fmt: skip
def test_a_malformed_identity_card_is_recorded_and_harms_nobody_else(found, field, value):
    """Recorded as loaded, it failed in the choice of every call."""

    class Malformed(Toy):
        @hookimpl
        def kda_core_backend(self):
            info, (of, _, inner) = super().kda_core_backend(), field.partition(".")
            return replace(info, **{of: replace(getattr(info, of), **{inner: value}) if inner else value})

    found.import_by(lambda: Malformed("foreign"))
    assert {b.info.name for b in found.backends} == {"last", "toy", "reference"}
    (broken,) = (e for e in found.ledger if e.state != "loaded")
    assert (broken.name, broken.state) == ("foreign", "broken")
    assert broken.reason.startswith(f"kda_core_backend: {field}: expected ")
    assert broken.reason.endswith(f"got {value!r}")
    with pytest.raises(kda_core.BrokenBackend, match="'foreign'"):
        found.named("foreign")


class EntryPoint:
    """An entry point whose module does something when it is imported."""

    group, dist = ENTRY_POINT_GROUP, None

    def __init__(self, name, load=None):
        self.name, self.value, self.load = name, f"{name}.plugin", load


def interrupted():
    raise KeyboardInterrupt


@pytest.fixture
def found():
    """A registry of its own that finds an entry point, and what to set its import to."""
    # By name one comes before it and one after it.
    first, own, last = EntryPoint("a", lambda: Toy("toy")), EntryPoint("foreign"), EntryPoint("z", lambda: Toy("last"))
    fresh = Registry(entry_points=(last, own, first))
    fresh.import_by = lambda do: setattr(own, "load", do)
    return fresh


def test_an_interrupted_import_leaves_everything_to_the_next_call(found):
    """A second attempt met what the first had loaded, and took it for rivals."""
    found.import_by(interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            found.load()
    found.import_by(lambda: Toy("foreign"))
    assert [b.info.name for b in found.backends] == ["foreign", "last", "toy", "reference"]
    assert {e.state for e in found.ledger} == {"loaded"}


def test_what_was_registered_by_hand_survives_an_interrupted_import(found):
    found.register(Toy("own"))
    found.import_by(interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.load()
    found.import_by(lambda: Toy("foreign"))
    assert {b.info.name for b in found.backends} == {"foreign", "last", "own", "toy", "reference"}


@pytest.mark.parametrize("where", ["import", "hook"])
def test_a_wheel_that_asks_for_backends_while_it_is_loaded_harms_nobody_else(found, where):
    class Asking(Toy):
        @hookimpl
        def kda_core_backend(self):
            found.named("toy")

    found.import_by((lambda: found.backends) if where == "import" else (lambda: Asking("foreign")))
    assert {b.info.name for b in found.backends} == {"last", "toy", "reference"}
    (broken,) = (e for e in found.ledger if e.state != "loaded")
    assert broken.state == "broken"
    assert "asked for backends by one that is being loaded" in broken.reason


def test_an_error_that_cannot_be_printed_harms_nobody_else(found):
    class Mute(Exception):
        def __str__(self):
            return self.text

    def fail():
        raise Mute

    found.import_by(fail)
    assert {b.info.name for b in found.backends} == {"last", "toy", "reference"}
    assert [e.reason for e in found.ledger if e.state != "loaded"] == ["import failed: Mute"]


@pytest.mark.parametrize("error", [SystemExit("needs libfoo"), GeneratorExit("needs libfoo"), BaseException("needs")])
@pytest.mark.parametrize("where", ["import", "hook"])
def test_a_wheel_that_exits_when_it_is_loaded_harms_nobody_else(found, error, where):
    def fail(*_):
        raise error

    class Failing(Toy):
        kda_core_backend = hookimpl(fail)

    found.import_by(fail if where == "import" else lambda: Failing("foreign"))
    assert {b.info.name for b in found.backends} == {"last", "toy", "reference"}
    (broken,) = (e for e in found.ledger if e.state != "loaded")
    step = "import" if where == "import" else "kda_core_backend"
    assert (broken.name, broken.reason) == ("foreign", f"{step} failed: {type(error).__name__}: {error}")

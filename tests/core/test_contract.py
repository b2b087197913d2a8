"""The contract between a core and wheels that are older or newer: features, versions, entry-point groups."""

from __future__ import annotations

from importlib import metadata

import pytest
from interpreted import printed
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from toys import Toy

import kda_core
from kda_core import hookspecs
from kda_core._plugins import Registry
from kda_core.capabilities import Feature

FIRST_PARTY = ("cpu", "nvidia", "amd", "reference")

# The core of a later version, which has one more feature, beside the wheels of this one. Prints, for every backend,
# whether it declares the feature and what it answers to a call that needs it.
LATER = """
import importlib.machinery as machinery, json
kept = machinery.SourceFileLoader.get_data
NEEDED = b'''
of_today = Request._features
def of_tomorrow(r):
    yield from of_today(r)
    yield Feature.TELEPATHY
Request._features = of_tomorrow
'''
CHANGED = {
    "capabilities.": lambda text: text.replace(b'    CHUNK = "', b'    TELEPATHY = "telepathy"\\n    CHUNK = "', 1),
    "request.": lambda text: text + NEEDED,
}

def with_one_more(self, path):
    name = path.replace("\\\\", "/").rpartition("kda_core/")[2]
    if not name.startswith(tuple(folder + module for folder in ("", "__pycache__/") for module in CHANGED)):
        return kept(self, path)
    if not name.endswith(".py"):
        raise OSError("compiled from another source")
    return CHANGED[name[:-2]](kept(self, path))

machinery.SourceFileLoader.get_data = with_one_more
import torch, kda_core
from kda_core import capabilities
from kda_core._plugins import registry

later = capabilities.Feature["TELEPATHY"]
q = torch.zeros(1, 2, 1, 4)
answers = {}
for backend in registry.backends:
    backend.availability_of[q.device] = capabilities.Available()
    try:
        kda_core.chunk_kda(q, q, q, q, q[..., 0], backend=backend.info.name)
        answer = "served"
    except kda_core.UnsupportedCall as error:
        answer = str(error)
    answers[backend.info.name] = [later in backend.info.capabilities.features, answer]
print(json.dumps(answers))
"""


@pytest.mark.end_to_end
def test_a_feature_of_a_later_core_is_refused_by_every_wheel_of_today():
    """A wheel that declared whatever the enumeration holds would take the option and drop it."""
    answers = printed("-c", LATER)
    installed = {e.name for e in kda_core.backends() if e.state == "loaded"}
    assert {"reference", "cpu"} <= set(answers) >= installed & set(FIRST_PARTY)
    for name in set(answers) & set(FIRST_PARTY):
        declared, answer = answers[name]
        assert not declared, name
        assert answer == f"chunk_kda: backend {name!r} cannot serve this call: does not serve telepathy"


@pytest.mark.parametrize("name", FIRST_PARTY)
def test_every_feature_is_declared_or_closed_with_a_reason(name):
    info = {e.name: e.info for e in kda_core.backends()}.get(name)
    if info is None:
        pytest.skip(f"pip install ./backends/{name}")
    closed = {feature for feature, reason in info.capabilities.closed.items() if reason}
    assert info.capabilities.features.isdisjoint(closed)
    assert info.capabilities.features | closed == set(Feature)


class Distribution:
    """A wheel's metadata."""

    name, version = "kda-toy", "1.0"

    def __init__(self, *requires):
        self.requires = list(requires) or None


class EntryPoint:
    """An entry point of a wheel, whose module cannot be imported where the core is another one."""

    def __init__(self, *requires, group=hookspecs.ENTRY_POINT_GROUP, name="toy", load=None):
        self.name, self.value, self.group, self.dist = name, f"{name}.plugin", group, Distribution(*requires)
        self.imported = 0
        self.plugin = load

    def load(self):
        self.imported += 1
        if self.plugin is None:
            raise ImportError("cannot import name 'Tomorrow' from 'kda_core.capabilities'")
        return self.plugin


def ledger(*entry_points, core="0.1.3"):
    """The entry points that a core of some version finds, by name, and its registry."""
    fresh = Registry(entry_points=entry_points, core=core)
    return {e.name: e for e in fresh.ledger if e.name != "reference"}, fresh


@pytest.mark.parametrize(
    ("core", "requires", "needs"),
    [
        ("0.0.9", ("torch>=2.7", "kda-core<0.2,>=0.1"), ">=0.1,<0.2"),
        ("0.2.0", ("kda-core<0.2,>=0.1",), ">=0.1,<0.2"),
        ("0.2.0.dev1", ("kda_core >=0.3",), ">=0.3"),
        ("0.1.3", ("Kda.Core (>=0.1,!=0.1.3)",), "!=0.1.3,>=0.1"),
        ("0.1.3", ("kda-core>=0.1", 'kda-core<0.1.3; python_version >= "3"'), "<0.1.3"),
    ],
)
def test_a_wheel_for_another_core_is_not_imported_and_says_which_one_it_needs(core, requires, needs):
    """It would fail with a name that this core lacks: true, and no help to anybody."""
    entry_point = EntryPoint(*requires)
    (entry,), fresh = ledger(entry_point, core=core)[0].values(), ledger(entry_point, core=core)[1]
    assert (entry.name, entry.state, entry.distribution) == ("toy", "incompatible", "kda-toy 1.0")
    assert entry.reason.startswith("needs kda-core")
    assert SpecifierSet(entry.reason.split("kda-core", 1)[1].split(", this is")[0]) == SpecifierSet(needs)
    assert entry.reason.endswith(f", this is kda-core {core}")
    assert entry_point.imported == 0
    with pytest.raises(kda_core.BrokenBackend, match=r"backend 'toy' \(kda-toy 1.0\) is incompatible: needs kda-core"):
        fresh.named("toy")


def test_bounds_are_shown_as_people_write_them():
    found, _ = ledger(EntryPoint("kda-core<0.2,>=0.1"), core="0.0.9")
    assert found["toy"].reason == "needs kda-core>=0.1,<0.2, this is kda-core 0.0.9"


@pytest.mark.parametrize(
    "requires",
    [
        (), ("kda-core",), ("kda-core<0.2,>=0.1",), ("kda-core-cpu>=7", "torch>=99"), ('kda-core>=7; extra == "next"',),
        ('kda-core>=7; python_version < "3"',), ("this is no requirement",),
    ],
)  # fmt: skip
def test_a_wheel_that_fits_or_does_not_say_is_imported(requires):
    entry_point = EntryPoint(*requires, load=Toy("toy"))
    found, _ = ledger(entry_point)
    assert found["toy"].state == "loaded", found["toy"].reason
    assert entry_point.imported == 1


def test_a_release_candidate_of_the_core_takes_the_wheels_of_its_release():
    found, _ = ledger(EntryPoint("kda-core<0.2,>=0.1", load=Toy("toy")), core="0.1.4rc1")
    assert found["toy"].state == "loaded", found["toy"].reason


def test_a_wheel_of_another_major_contract_is_known_and_not_imported():
    """It is in another entry-point group; "not installed" would send its user in circles."""
    later = EntryPoint(group="kda_core.backends.v2")
    found, fresh = ledger(later, EntryPoint(group="kda_core.cooks.v1", name="cook"))
    assert set(found) == {"toy"}
    assert found["toy"].state == "incompatible"
    assert later.imported == 0
    with pytest.raises(kda_core.BrokenBackend, match=r"group kda_core.backends.v2\), this kda-core has 1\."):
        fresh.named("toy")


def test_a_wheel_for_two_major_contracts_serves():
    later = EntryPoint(group="kda_core.backends.v2")
    found, _ = ledger(later, EntryPoint(load=Toy("toy")))
    assert found["toy"].state == "loaded"
    assert later.imported == 0


@pytest.mark.parametrize("wheel", ["cpu", "nvidia", "amd"])
def test_the_wheels_and_the_core_name_each_others_versions(wheel):
    """The core's extra installs a wheel of its own minor version, and the wheel wants a core of that one."""
    if wheel not in {e.name for e in kda_core.backends() if e.distribution}:
        pytest.skip(f"pip install ./backends/{wheel}")
    major, minor = map(int, kda_core.__version__.split(".")[:2])
    expected = SpecifierSet(f">={major}.{minor},<{major}.{minor + 1}")
    own = [Requirement(line) for line in metadata.requires(f"kda-core-{wheel}") or ()]
    assert [r.specifier for r in own if r.name == "kda-core"] == [expected]
    extras = [Requirement(line) for line in metadata.requires("kda-core") or ()]
    named = [r for r in extras if r.marker is not None and r.marker.evaluate({"extra": wheel})]
    assert [(r.name, r.specifier) for r in named] == [(f"kda-core-{wheel}", expected)]
    assert expected.contains(metadata.version(f"kda-core-{wheel}"))
    info = next(e.info for e in kda_core.backends() if e.name == wheel)
    assert info.contract.contains(hookspecs.CONTRACT_VERSION)

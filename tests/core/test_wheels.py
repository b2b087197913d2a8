"""Real little wheels in an environment of their own: what one wheel does to the others.

The environment sees the torch of this one and nothing else of it; the core and the CPU backend are
installed there as wheels, too.
"""

from __future__ import annotations

import json
import os
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from environments import ROOT, link_torch, pip, run

pytestmark = pytest.mark.end_to_end

SOURCES = Path(__file__).parent / "wheels"
RIGHT = (SOURCES / "toy.py").read_text(encoding="utf-8")
HOOK = RIGHT[RIGHT.rindex("@hookimpl") :]


def toy(name: str, value: float = 3.0, priority: int = 30, contract: str = "~=1.0") -> str:
    """The source of a right backend."""
    return f"NAME, VALUE, PRIORITY, CONTRACT = {(name, value, priority, contract)!r}\n{RIGHT}"


TOYS = {
    # The first name of all and the lowest priority; the last name and the highest priority of those that are right.
    "attic": toy("attic", 1.0, 5),
    "zenith": toy("zenith", 2.0, 20),
    "twin_one": toy("twin"),
    "twin_two": toy("twin", 4.0),
    "raising": 'raise RuntimeError("the vendor\'s library is missing")\n',
    "outdated": toy("outdated", contract="~=2.0"),
    # It imports a name that this kda-core lacks.
    "early": "from kda_core.capabilities import Foresight\n",
    "successor": 'raise RuntimeError("imported by a core of another contract")\n',
    "hookless": toy("hookless").removesuffix(HOOK),
    # pluggy would never pass an argument with a default.
    "defaulted": toy("defaulted").replace("kda_core_reject(request)", "kda_core_reject(request=None)"),
    "misspelt": toy("misspelt") + "\n\n@hookimpl\ndef kda_core_save_spec(request):\n    return ()\n",
}
"""Sources of wheels by name."""

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "kda-toy-{title}"
version = "1.0"
dependencies = ["{core}"]

[project.entry-points."kda_core.backends.{group}"]
{backend} = "kda_toy_{name}"

[tool.hatch.build.targets.wheel]
only-include = ["kda_toy_{name}.py"]
"""


def write(name: str, folder: Path) -> Path:
    """Write a toy's sources; their folder."""
    place = folder / name
    place.mkdir(parents=True)
    (place / f"kda_toy_{name}.py").write_text(TOYS[name], encoding="utf-8")
    core, group = "kda-core>=99" if name == "early" else "kda-core", "v2" if name == "successor" else "v1"
    facts = {"title": name.replace("_", "-"), "core": core, "group": group, "backend": name.partition("_")[0]}
    (place / "pyproject.toml").write_text(PROJECT.format(name=name, **facts), encoding="utf-8")
    return place


BROKEN = {
    "raising": ("broken", "import failed: RuntimeError: the vendor's library is missing"),
    "outdated": ("incompatible", "needs plugin contract ~=2.0, this kda-core has 1."),
    "early": ("incompatible", "needs kda-core>=99, this is kda-core 0."),
    "successor": ("incompatible", "entry-point group kda_core.backends.v2), this kda-core has 1."),
    "hookless": ("broken", "missing hooks: kda_core_chunk_forward"),
    "defaulted": ("broken", "kda_core_reject declares a default for request"),
    "misspelt": ("broken", "unknown hooks: kda_core_save_spec"),
    "twin": ("conflict", "claims the name 'twin' too"),
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Every wheel, built from source; toys by the name of their folder."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT, ROOT / "backends" / "cpu", *(write(name, folder / "sources") for name in TOYS)]
    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder, *sources)
    return folder


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory):
    """Python of an environment with all wheels installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip("--python", python, "install", "--no-deps", "--no-index", "--no-compile", *wheels.glob("*.whl"))
    link_torch(folder / "torch")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{folder / 'torch'}\n")
    return python


def probe(python: Path, *first: Path) -> dict:
    """The findings of tests/core/wheels/probe.py, with some folders before the environment's own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KDA_"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, first))
    return json.loads(run(python, SOURCES / "probe.py", env=environment))


@pytest.fixture(scope="module")
def facts(environment):
    return probe(environment)


def test_the_core_under_test_is_the_wheel(facts, environment):
    assert Path(facts["core"]).is_relative_to(environment.parents[1])


def test_wheels_say_that_they_are_typed(wheels):
    """PEP 561; the other backends are built alike, and tests/core/test_typing.py looks at those that are installed."""
    for package in ("kda_core", "kda_core_cpu"):
        (wheel,) = wheels.glob(f"{package}-*.whl")
        assert f"{package}/py.typed" in ZipFile(wheel).namelist()


def test_every_wheel_is_in_the_ledger(facts):
    installed = {"kda-core-cpu", *(f"kda-toy-{name.replace('_', '-')}" for name in TOYS)}
    assert {title.split(" ")[0] for title in facts["backends"]} == {"reference", *installed}
    loaded = {name for name, state, _ in facts["backends"].values() if state == "loaded"}
    assert loaded == {"attic", "cpu", "reference", "zenith"}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_wheel_is_recorded_with_its_reason(facts, name):
    state, reason = BROKEN[name]
    found = [entry for entry in facts["backends"].values() if entry[0] == name]
    assert len(found) == (2 if name == "twin" else 1)
    for _, found_state, found_reason in found:
        assert found_state == state
        assert reason in found_reason


@pytest.mark.parametrize("way", ["named", "variable", "context"])
@pytest.mark.parametrize("name", sorted(BROKEN))
def test_naming_a_broken_wheel_raises_with_its_reason(facts, name, way):
    state, reason = BROKEN[name]
    assert facts[way][name].startswith("BrokenBackend: ")
    assert f"is {state}: " in facts[way][name]
    assert reason in facts[way][name]


@pytest.mark.parametrize("way", ["named", "variable", "context"])
def test_the_others_go_on(facts, way):
    served = {name: facts[way][name] for name in ("attic", "zenith", "cpu", "reference")}
    assert served == {"attic": 1.0, "zenith": 2.0, "cpu": 0.0, "reference": 0.0}


@pytest.mark.parametrize("way", ["named", "variable", "context"])
def test_an_unknown_name_says_what_is_installed_and_how_to_install_it(facts, way):
    assert facts[way]["amd"].startswith("BackendNotFound: ")
    assert "pip install ./backends/amd in a checkout" in facts[way]["amd"]
    assert "zenith, cpu, attic, reference" in facts[way]["amd"]


def test_a_named_backend_never_falls_back(facts):
    assert facts["no fall-back"].startswith("UnsupportedCall: ")
    assert "packed sequences" in facts["no fall-back"]


def test_priority_decides_among_those_that_accept(facts):
    """zenith before cpu before attic; zenith and attic serve no packed sequences."""
    assert facts["chosen"] == 2.0
    assert facts["packed"] == "cpu"


def test_wrappers_see_every_call_until_they_are_taken_out(facts):
    assert facts["watched"] == [["chunk_kda", value] for value in (2.0, 1.0, 0.0, 0.0)]


@pytest.mark.parametrize("first", [("twin_two", "attic"), ("twin_one", "zenith")])
def test_the_order_in_which_wheels_are_found_decides_nothing(facts, environment, wheels, tmp_path, first):
    """Wheels in a folder that Python searches first are found before all others."""
    found_first = [wheel for name in first for wheel in wheels.glob(f"kda_toy_{name}-*.whl")]
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", tmp_path, *found_first)
    assert probe(environment, tmp_path) == facts

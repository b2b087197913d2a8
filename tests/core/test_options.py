"""``kda_core.options``: what the table of arguments gives, and that what is written out from it is up to date."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

import kda_core
from kda_core import options
from kda_core.capabilities import Feature
from kda_core.request import Request

ROOT = Path(__file__).parents[2]
FUNCTIONS = ("chunk_kda", "fused_recurrent_kda", "kda_gate")
BY_NAME = {a.name: a for a in options.ARGUMENTS}


@pytest.fixture(scope="module")
def signatures():
    spec = importlib.util.spec_from_file_location("signatures", ROOT / "tools" / "signatures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_written_out_is_up_to_date(signatures):
    stale = [str(path) for path, old, new in signatures.written() if old != new]
    assert stale == [], "python tools/signatures.py"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kda_core/api.py", "    disable_recompute: bool = False,\n"),
        ("kda_core/api.py", '            "state_v_first": state_v_first,\n'),
        ("kda_core/api.py", "        A_log: [HV], log of the gate's rate; optional with ``lower_bound``.\n"),
        ("kda_core/request.py", "    pad_slot_id: int = -1\n"),
    ],
)
def test_a_line_that_is_missing_is_written_again(signatures, name: str, line: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert line in text
    assert signatures.WRITERS[name](text.replace(line, "")) == text


def test_a_file_without_the_lines_round_a_table_is_an_error(signatures):
    with pytest.raises(ValueError, match="found no such lines"):
        signatures.WRITERS["docs/arguments.md"]("# Arguments\n")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_functions_take_what_the_table_says(function):
    found = inspect.signature(getattr(kda_core, function)).parameters
    expected = options.arguments_of(function)
    assert list(found) == [a.name for a in expected]
    for a in expected:
        default = inspect.Parameter.empty if a.default is options.REQUIRED else a.default
        assert (found[a.name].annotation, found[a.name].default) == (a.type, default), a.name


def test_every_feature_is_needed_by_an_argument_or_by_shapes():
    from_arguments = {a.needs for a in options.ARGUMENTS} - {None}
    assert from_arguments >= {Feature.NEG_EIGVAL, Feature.OUT, Feature.VARLEN, Feature.CONTEXT_PARALLEL}
    for a in options.ARGUMENTS:
        assert a.needs is None or a.in_request, a.name


@pytest.mark.parametrize("name", [a.name for a in options.IN_REQUEST if a.is_flag and a.needs])
def test_a_flag_needs_its_feature(name: str):
    x = torch.zeros(1, 2, 1, 4)
    data = {"op": "chunk_kda", "scale": 1.0, "q": x, "k": x, "v": x, "g": x, "beta": x[..., 0].contiguous()}
    needed = BY_NAME[name].needs
    assert needed in Request(**data, **{name: True}).features
    assert needed not in Request(**data, **{name: False}).features


@pytest.mark.parametrize("name", [a.name for a in options.ARGUMENTS if a.beside])
def test_a_flag_without_the_one_that_it_needs_is_refused(name: str):
    x = -torch.rand(1, 2, 1, 4)
    data = {"q": x, "k": x, "v": x, "g": x, "beta": x[..., 0]}
    needed = BY_NAME[name].beside
    assert BY_NAME[needed].is_flag
    with pytest.raises(ValueError, match=f"{name}: expected {needed}=True beside it, got False"):
        kda_core.chunk_kda(**data, **{name: True})
    kda_core.chunk_kda(**data, **{name: True, needed: True})

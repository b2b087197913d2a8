"""``tools/compare_bits.py``: what it draws, and what it notices."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.request import GateRequest
from kda_core.testing.inputs import Call

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bits():
    spec = importlib.util.spec_from_file_location("compare_bits", ROOT / "tools" / "compare_bits.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def features_of(bits, drawn) -> frozenset[Feature]:
    tensors = {n: bits._laid_out(t, drawn.strided.get(n)) for n, t in drawn.tensors.items()}
    if drawn.function == "kda_gate":
        return GateRequest(**tensors, **drawn.options, save_for_backward=bool(drawn.grads)).features
    if drawn.out:
        tensors["out"] = tensors["v"]
    return Call(drawn.function, tensors, drawn.options, grads={n: tensors[n] for n in drawn.grads}).request().features


@pytest.mark.parametrize("family", ["interpreter", "cpu"])
def test_the_draw_needs_every_feature_and_dtype(bits, family: str):
    drawn = [bits.draw(number, family) for number in range(bits.CALLS)]
    needed = frozenset().union(*(features_of(bits, call) for call in drawn))
    assert needed == set(Feature) - {Feature.CONTEXT_PARALLEL}
    calls = [call for call in drawn if call.function != "kda_gate"]
    assert {call.tensors["q"].dtype for call in calls} == set(bits.DTYPES.values())
    assert any(call.by_function and call.grads for call in calls)


def test_a_call_does_not_depend_on_those_before_it(bits):
    one, again = bits.draw(7, "cpu"), bits.draw(7, "cpu")
    assert str(one) == str(again)
    assert bits.inputs_digest(one) == bits.inputs_digest(again)
    assert bits.inputs_digest(one) != bits.inputs_digest(bits.draw(8, "cpu"))


def test_digests_tell_bits_shapes_and_dtypes_apart(bits):
    zero = torch.zeros(4)
    others = [-zero, zero.view(2, 2), zero.double(), zero.to(torch.bfloat16), torch.zeros(0), torch.full((4,), 1e-45)]
    assert len({bits.digest(t) for t in (zero, *others)}) == 1 + len(others)
    assert bits.digest(torch.zeros(4, 2)[:, 0]) == bits.digest(zero)


def test_a_changed_result_is_noticed(bits, tmp_path: Path, capsys: pytest.CaptureFixture):
    before = tmp_path / "before.json"
    threads = torch.get_num_threads()
    try:
        assert bits.main(["--backend", "reference", "--calls", "6", "--out", str(before)]) == 0
        assert bits.main(["--backend", "reference", "--against", str(before)]) == 0
        content = json.loads(before.read_text())
        assert len(content["calls"]) == 6
        assert content["versions"]["torch"]
        content["calls"][2]["results"]["o"] = "0" * 24
        before.write_text(json.dumps(content))
        assert bits.main(["--backend", "reference", "--against", str(before)]) == 1
        before.write_text(json.dumps(content | {"seed": 0}))
        assert bits.main(["--backend", "reference", "--against", str(before)]) == 2
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr()
    assert "6 calls compared" in printed.out
    assert "2: o differ in chunk_kda" in printed.out
    assert "seed: expected" in printed.err

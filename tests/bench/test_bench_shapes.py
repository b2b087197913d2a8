"""The shapes of ``kda bench``, and their spelling."""

from __future__ import annotations

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("kda_core_cpu")

from kda_core.bench import shapes


@pytest.mark.parametrize(
    "text",
    [
        "1,8192,96,128",
        "1,64,2,32,16",
        "1,64,2,32:hv=4",
        "1,8192,32,128:packed=16x512:pool",
        "1,9,2,8:packed=3+5+1",
    ],
)
def test_round_trip(text):
    assert str(shapes.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1,2,3", "3 sizes"),
        ("1,2,3,x", "invalid literal"),
        ("1,-2,3,4", "sizes of 1 and more"),
        ("1,64,2,32:hv=3", "multiple of H = 2"),
        ("1,64,2,32:packed=3+5", "add up to T = 64"),
        ("2,8,2,32:packed=3+5", "expected B = 1"),
        ("1,64,2,32:pools", "'pools' is no word"),
        ("1,64,2,32:packed=2xx", "too many values"),
    ],
)
def test_refused(text, why):
    with pytest.raises(ValueError, match=why) as found:
        shapes.parse(text)
    assert text in str(found.value)


def test_every_set_has_valid_shapes():
    for name in (*shapes.SETS, "quick"):
        for training in (False, True):
            assert all(shapes.parse(str(shape)) == shape for shape in shapes.named(name, training, gpu=True))
            assert not training or not any(shape.pool for shape in shapes.named(name, training, gpu=True))
    assert shapes.named("headline", training=True, gpu=False) == shapes.CPU_TRAINING
    with pytest.raises(ValueError, match="set: expected headline on a CPU, got serving"):
        shapes.named("serving", training=False, gpu=False)

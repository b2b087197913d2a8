"""The rows that calls have in profilers: operator, backend and shape, forward and backward, eager and compiled."""

from __future__ import annotations

import sys

import pytest
import torch
from example_arguments import drawn
from torch.profiler import ProfilerActivity, profile

import kda_core
from kda_core import _loaded
from kda_core._plugins import registry

SHAPES = "(cpu) [1, 40, 2, 8], v [1, 40, 4, 16]"
CALLS = {"chunk_kda": SHAPES, "fused_recurrent_kda": SHAPES, "kda_gate": "(cpu) [1, 40, 4, 8]"}


def inputs(grad=True):
    return drawn(grad, T=40, HV=4, K=8, V=16)


def call(op, x, **options):
    if op == "kda_gate":
        return kda_core.kda_gate(x["g"], torch.zeros(4), backend="cpu")
    return getattr(kda_core, op)(**x, **options, backend="cpu")[0]


def rows_of(function):
    """Names of rows, with how often they came."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return {row.key: row.count for row in profiler.key_averages()}


@pytest.mark.parametrize("op", CALLS)
def test_eager_rows_name_operator_backend_and_shape(op):
    rows = rows_of(lambda: call(op, inputs()).sum().backward())
    expected = {f"kda_core::{op}", f"kda_core::{op}Backward"}
    expected |= {f"kda_core::{op} {CALLS[op]}", f"kda_core::{op}_backward {CALLS[op]}"}
    ours = {name: count for name, count in rows.items() if name.startswith("kda_core::")}
    assert ours == dict.fromkeys(expected, 1)
    assert not [name for name in rows if "_Call" in name or "GateCall" in name]


@pytest.mark.parametrize("op", CALLS)
def test_a_call_without_gradient_has_its_row(op):
    with torch.no_grad():
        rows = rows_of(lambda: call(op, inputs(grad=False)))
    assert {name for name in rows if "kda_core" in name} == {f"kda_core::{op} {CALLS[op]}"}


@pytest.mark.end_to_end
@pytest.mark.parametrize("op", CALLS)
def test_compiled_rows_have_the_same_names(op):
    compiled = torch.compile(lambda x: call(op, x), backend="aot_eager", fullgraph=True)
    compiled(inputs()).sum().backward()
    rows = rows_of(lambda: compiled(inputs()).sum().backward())
    expected = {f"kda_core::{op}", f"kda_core::{op}_backward"}
    expected |= {f"{name} {CALLS[op]}" for name in expected}
    assert {name for name in rows if name.startswith("kda_core::")} == expected


def test_the_row_contains_the_kernels_of_its_backend():
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        call("chunk_kda", inputs(grad=False))
    (row,) = [e for e in profiler.events() if e.name.startswith("kda_core::")]
    assert "aten::baddbmm_" in {child.name for child in row.cpu_children}


def test_equal_shapes_are_said_once_and_packed_sequences_counted():
    x = {name: t[..., :8].detach() if name == "v" else t.detach() for name, t in inputs().items()}
    x = {name: t.repeat(1, 1, 2, 1) if name in "qk" else t for name, t in x.items()}
    with torch.no_grad():
        rows = rows_of(lambda: call("chunk_kda", x, cu_seqlens=torch.tensor([0, 10, 10, 33])))
    assert "kda_core::chunk_kda (cpu) [1, 40, 4, 8], 3 sequences" in rows


def hooks_named():
    """The hooks whose rows are named while a call runs."""
    named = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code is _loaded.row_name.__code__:
            named.append(frame.f_locals["hook"])

    x = inputs(grad=False)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with torch.no_grad():
            call("chunk_kda", x)
    finally:
        sys.setprofile(before)
    return named


def test_nothing_is_named_while_no_profiler_runs():
    assert hooks_named() == []
    with profile(activities=[ProfilerActivity.CPU]):
        assert hooks_named() == ["kda_core_chunk_forward"]


@pytest.mark.skipif(not torch.profiler.itt.is_available(), reason="this build of torch has no ITT")
def test_tools_that_take_torchs_ranges_get_ours():
    """``emit_itt`` and ``emit_nvtx`` switch the same mark on."""
    with torch.autograd.profiler.emit_itt():
        assert hooks_named() == ["kda_core_chunk_forward"]


def test_every_hook_that_computes_has_a_row():
    hooks = {name for name in dir(registry.named("cpu").plugin) if name.endswith(("_forward", "_backward", "_commit"))}
    assert hooks >= _loaded.ROWS.keys()
    assert {name for name in hooks if name.startswith("kda_core_")} == _loaded.ROWS.keys()

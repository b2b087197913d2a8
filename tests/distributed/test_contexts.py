"""Contexts: what they refuse, that ranks agree, other lengths, fla's; and backends with hooks in halves."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from whole_calls import RAW, assert_close, inputs, normal, oracle

import kda_core
from kda_core.distributed import build_cp_context, conv_halo, layout_of_positions
from kda_core.distributed._layout import Layout, split


@pytest.mark.parametrize(
    ("bounds", "ranges", "message"),
    [
        ([0, 9], [[(0, 5)], [(4, 9)]], "rows 4 to 5 are on two ranks (rank 1 holds [(4, 9)])"),
        ([0, 9], [[(0, 4)], [(5, 9)]], "rows 4 to 5 are on no rank"),
        ([0, 9], [[(0, 4)], [(4, 8)]], "expected all 9 rows of cu_seqlens, got ranges that end at 8"),
        ([0, 9], [[(0, 9)], [(0, 9)]], "rows 0 to 9 are on two ranks"),
        ([0, 5], [[(4, 7), (0, 4)], [(7, 9)]], "at the end of a rank's rows, got [(4, 7), (0, 4)] on rank 0"),
        ([1, 5], [[(0, 5)], []], "cu_seqlens: expected boundaries from 0, not decreasing, got [1, 5]"),
        ([0, 5, 3], [[(0, 5)], []], "not decreasing, got [0, 5, 3]"),
    ],
)
def test_ranges_that_cannot_be_are_refused_with_the_ranges(bounds, ranges, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Layout(bounds, ranges, 0)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("rows", [16, 6])
def test_positions_tell_the_layout_and_where_documents_start(layout, rows):
    whole = torch.stack([torch.arange(2 * rows), torch.cat([torch.arange(5), torch.arange(2 * rows - 5)])])
    parts = [torch.cat([whole[:, a:b] for a, b in own], 1) for own in split(layout, 2 * rows, 2)]
    found, starts = layout_of_positions(torch.stack(parts))
    assert found == layout
    assert starts.nonzero().tolist() == [[0, 0], [1, 0], [1, 5]]


def test_positions_in_another_order_have_no_layout():
    shuffled = torch.arange(64).view(2, 8, 4)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(2, 2, 16).transpose(0, 1)
    assert layout_of_positions(shuffled)[0] is None
    assert layout_of_positions(torch.tensor([[[0, 2, 1]], [[3, 4, 5]]]))[0] is None  # zigzag would halve the rows


@pytest.fixture
def alone():
    """This process as a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_numpys_integers_are_taken_for_sizes(alone):
    assert build_cp_context(tokens=np.int64(4), batch=np.int32(2), conv1d_kernel_size=np.int64(3)).rows == 4


def test_a_context_does_not_keep_its_group_alive(alone):
    """A group's threads end with it: one that is left when Python ends may end the process with an abort."""
    group = dist.group.WORLD
    before = sys.getrefcount(group)
    context = build_cp_context(tokens=4)
    assert context.group is group
    assert sys.getrefcount(group) == before


def bits_of_a_step(context) -> list[torch.Tensor]:
    leaves = {n: t.float().requires_grad_() for n, t in inputs(70).items()}
    o, state = kda_core.chunk_kda(**leaves, **RAW, output_final_state=True, cp_context=context)
    (o.sum() + state.sum()).backward()
    return [o.detach(), state.detach(), *(t.grad for t in leaves.values())]


@pytest.mark.parametrize("more", [{}, {"deterministic_degree": True, "grid": 5}], ids=["", "cells"])
@pytest.mark.parametrize("mode", [torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16)])
def test_a_mode_changes_no_bit(alone, mode, more):
    """The context is made in it; with autocast the call and its backward are made in it, too."""
    arguments = {"tokens": 70, "layout": [[(35, 70), (20, 35), (0, 20)]], **more}
    expected = bits_of_a_step(build_cp_context(**arguments))
    with mode:
        context = build_cp_context(**arguments)
        found = bits_of_a_step(context) if isinstance(mode, torch.autocast) else None
    found = found or bits_of_a_step(context)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("rows", [9, 0])
def test_rows_of_another_16_bit_dtype_than_autocast(alone, rows):
    context = build_cp_context(tokens=rows, layout=[[(rows // 3, rows), (0, rows // 3)]], conv1d_kernel_size=3)
    x = normal(1, rows, 4).half().requires_grad_()

    def halo_and_gradient() -> list[torch.Tensor]:
        own = context.local(x)
        halo = conv_halo(own, context)
        return [own.detach(), halo.detach(), *torch.autograd.grad(halo, x, torch.ones_like(halo))]

    expected = halo_and_gradient()
    with torch.autocast("cpu", torch.bfloat16):
        found = halo_and_gradient()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "tokens: expected a number of rows"),
        ({"tokens": -1}, ValueError, "tokens: expected a number of at least 0, got -1"),
        ({"tokens": 4, "batch": 0}, ValueError, "batch: expected a number of at least 1, got 0"),
        ({"cu_seqlens": [0, 4], "batch": 2}, ValueError, "batch: expected 1 with cu_seqlens"),
        ({"tokens": 4, "layout": "ring"}, ValueError, "layout: expected contiguous, zigzag or ranges"),
        ({"tokens": 4, "layout": [[(0, 2)], [(2, 4)]]}, ValueError, "for each of 1 ranks, got 2"),
        ({"tokens": 4, "layout": [[(0, 5)]]}, ValueError, "expected ranges of 4 rows, got ranges that end at 5"),
        ({"tokens": 4, "layout": [[(2, 0), (0, 4)]]}, ValueError, "got (2, 0)"),
        ({"cu_seqlens": [0, 1, 2, 3], "fragments": 2}, ValueError, "fragments: expected at least 3 for rank 0, got 2"),
        ({"cu_seqlens": "0,4"}, TypeError, "cu_seqlens: expected a tensor or integers, got str"),
        ({"cu_seqlens": [0, 4.5]}, TypeError, "cu_seqlens: expected integers, got 4.5"),
        ({"tokens": 4, "layout": [[(0, 4.0)]]}, TypeError, "layout: expected integers, got 4.0"),
        ({"tokens": 4, "gather": "no"}, TypeError, "gather: expected True or False, got 'no'"),
        ({"tokens": 4, "deterministic_degree": None}, TypeError, "deterministic_degree: expected True or False"),
        ({"cu_seqlens": torch.zeros(2)}, ValueError, "cu_seqlens: expected [N + 1] int32 or int64"),
        ({"tokens": 4, "group": 7}, ValueError, "group: expected a process group"),
        ({"tokens": 4, "group": dist.GroupMember.NON_GROUP_MEMBER}, ValueError, "group that holds this process"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(alone, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        build_cp_context(**arguments)


def test_a_dimension_of_a_mesh_is_a_group(alone):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    assert build_cp_context(tokens=4, group=mesh["cp"]).group is mesh["cp"].get_group()
    with pytest.raises(ValueError, match=r"a DeviceMesh of one dimension \(mesh\['cp'\]\), got 2 dimensions"):
        build_cp_context(tokens=4, group=mesh)


def test_it_needs_torch_distributed():
    with pytest.raises(ValueError, match=r"group: expected torch\.distributed to be initialised"):
        build_cp_context([0, 4])


@pytest.mark.end_to_end
def test_ranks_that_disagree_are_told_by_verify(ranks):
    same = [{"cu_seqlens": [0, 4, 9]}]
    assert ranks.run(3, "verified", same) == ["", "", ""]
    bounds = [*same, {"cu_seqlens": [0, 5, 9]}]
    message = "cu_seqlens: expected the same on all ranks, got (0, 4, 9) on rank 0 and (0, 5, 9) on rank 1"
    assert ranks.run(3, "verified", bounds) == [message] * 3
    layouts = [*same, {"cu_seqlens": [0, 4, 9], "layout": [[(3, 9)], [(0, 3)]]}]
    assert all("ranges: expected the same" in text for text in ranks.run(2, "verified", layouts))


@pytest.mark.parametrize(("size", "more"), [(3, {}), (2, {"deterministic_degree": True, "grid": 15})])
def test_a_refreshed_context_serves_other_lengths(ranks, size, more):
    assert all(ranks.run(size, "refreshed", inputs(60), [0, 7, 30, 60], [0, 0, 44, 59], RAW, more))


@pytest.mark.parametrize("backend", ["halves", "edges"])
def test_a_refreshed_context_leaves_copies_alone(ranks, backend):
    """Hooks of saved tensors may copy them, to the CPU for example; sequences were cut where the new ones begin."""
    arguments = inputs(60, 3), normal(1, 60, 4, 6), [0, 7, 30, 60], [0, 0, 44, 59], {**RAW, "backend": backend}
    assert all(ranks.run(2, "refreshed_behind_copies", *arguments))


@pytest.mark.parametrize(
    ("size", "context", "N"),
    [(2, {"tokens": 70}, 1), (3, {"tokens": 70, "layout": "zigzag"}, 1), (3, {"cu_seqlens": [0, 25, 25, 35, 60]}, 4)],
)
@pytest.mark.parametrize("outputs", ["o", "final_state", "both"])
@pytest.mark.parametrize("backend", ["halves", "edges"])
def test_hooks_in_halves(ranks, size, context, N, outputs, backend):
    """Each runs once a direction, with requests as ``Begun`` says, and results are the oracle's."""
    T = context.get("tokens", 60)
    tensors = inputs(T, N)
    grads = {"o": normal(1, T, 4, 6), "final_state": normal(N, 4, 8, 6)}
    options = {**RAW, "output_final_state": True}
    expected = oracle(
        tensors, grads if outputs == "both" else {outputs: grads[outputs]}, context.get("cu_seqlens"), options
    )
    asked = {"both": grads, "o": {"o": grads["o"]}, "final_state": {**grads, "without o": None}}[outputs]
    options["backend"] = backend
    parts, counts = zip(*ranks.run(size, "step_by_hooks", tensors, asked, context, options), strict=True)
    assert_close(parts, expected, 1e-12)
    assert all(set(count.values()) == {1} for count in counts)


def test_a_call_that_hooks_refuse_is_served_by_plain_calls(ranks):
    tensors = inputs(64)
    options = {**RAW, "return_intermediate_states": True}
    found = ranks.run(2, "step_by_hooks", tensors, {}, {"tokens": 64}, options)
    parts, counts = zip(*found, strict=True)
    expected = oracle(tensors, {}, None, RAW)
    assert_close(parts, expected, 1e-12)
    assert all(set(count.values()) == {0} for count in counts)


@pytest.mark.end_to_end
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("bounds", [[0, 64], [0, 10, 16, 50, 64]])
def test_flas_contexts(ranks, bounds, layout):
    """Importing fla takes seconds."""
    pytest.importorskip("fla")
    tensors = inputs(64)
    grads = {"o": normal(1, 64, 4, 6)}
    parts = ranks.run(2, "step_with_flas_context", tensors, grads, bounds, layout)
    expected = oracle(tensors, grads, bounds, RAW)
    assert_close(parts, expected, 1e-12)


@pytest.mark.parametrize("cells", [{}, {"deterministic_degree": True, "grid": 16}])
def test_an_explanation_says_what_is_sent(ranks, cells):
    """Every collective of a training step is there, with its bytes, and in its order."""
    for said, seen in ranks.run(2, "explained", inputs(64), {"tokens": 64, "gather": True, **cells}, RAW):
        assert said == seen
        assert len(said) == 4 + bool(cells)

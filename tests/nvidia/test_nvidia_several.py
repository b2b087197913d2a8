"""Prefills of several sequences, or over a pool, that are cut into segments on Hopper: which, and what is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import installed
import pytest
import torch

installed.need_backend("nvidia")
installed.need_package("triton")

from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS, choose_forward
from kda_core_nvidia.choose.chunk import hopper_config, most_of_several

from kda_core.request import Request
from kda_core.triton_lib.plan import Copy, metadata

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def request(N: int = 0, T: int = 8192, H: int = 4, B: int = 1, K: int = 128, dtype: Any = BF16, **more: Any) -> Request:
    """A call of N packed sequences; N = 0: of a batch."""
    q, k, v, g = (empty(B, T, H, K, dtype=dtype) for _ in range(4))
    bounds = empty(N + 1, dtype=torch.int32) if N else None
    fields = {"op": "chunk_kda", "scale": 1.0, "q": q, "k": k, "v": v, "g": g, "beta": q[..., 0], "cu_seqlens": bounds}
    return Request(**(fields | more))


def pooled(r: Request, **more: Any) -> Request:
    state, slots = empty(9, r.HV, 128, 128, dtype=torch.float32), empty(r.N, dtype=torch.int32)
    return replace(r, initial_state=state, ssm_state_indices=slots, inplace_final_state=True, **more)


def rows(r: Request) -> int:
    return choose_forward(metadata(r), CHIPS[90]).segment_rows


def test_hopper_cuts_prefills_of_few_sequences_and_heads():
    """Where all together leave three quarters of the chip idle; packed ones as if all were one."""
    assert [rows(request(1, T)) for T in (3071, 3072, 8192, 65536)] == [0, 512, 768, 4096]
    assert [rows(request(1, H=H)) for H in (1, 8, 12, 16, 17)] == [768, 1024, 1664, 2048, 0]
    assert [rows(request(N, 16384)) for N in (1, 2, 4, 5)] == [1024, 1120, 1280, 0]
    assert [rows(request(N, 16384, 8)) for N in (1, 2, 3)] == [2048, 2368, 0]
    # Three sequences of 3,072 rows on average.
    assert [rows(request(3, T, 2)) for T in (9215, 9216)] == [0, 768]
    for other in ({"return_intermediate_states": True}, {"K": 64}, {"dtype": torch.half}):
        assert rows(request(1, **other)) == 0, other
    assert [rows(request(B=B)) for B in (2, 4, 5)] == [1024, 2048, 0]
    nobody = [replace(request(), cu_seqlens=empty(1, dtype=torch.int32)), pooled(request(B=0))]
    assert [rows(r) for r in nobody] == [0, 0]
    assert [rows(pooled(r)) for r in (request(), request(1))] == [768, 768]
    table = empty(1, 2, dtype=torch.int32)
    assert rows(pooled(request(1), checkpoint_indices=table, checkpoint_every=64)) == 0


def test_segments_fill_the_chip_once():
    """Four segments of 16 heads have a program of 64 channels for nearly every multiprocessor; a fifth has no rows."""
    choice = choose_forward(metadata(request(1, H=16)), CHIPS[90])
    assert choice.recurrence == hopper_config("recurrence", CHIPS[90], 128, 128, 4 * 16)


@pytest.mark.parametrize("H", [1, 2, 4, 8, 16])
def test_the_join_has_room_for_all_segments(H: int):
    for N, T in ((1, 3072), (1, 2**20), (2, 2**17), (4, 2**17), (16 // H, 2**20)):
        r = metadata(request(N, T, H))
        if rows(r):
            (join,) = (x for x in plan_of(r, CHIPS[90]).launches if x.name == "join_hopper")
            assert join.grid[2] - 1 <= join.constants["MOST"]
            assert join.grid[2] <= most_of_several(H) + 1


@pytest.mark.parametrize(
    "r", [request(2), pooled(request(2)), pooled(request()), request(B=2, output_final_state=True)]
)
def test_states_come_from_the_call_and_go_where_it_asks(r: Request):
    plan = plan_of(r, CHIPS[90])
    assert plan.kernels == (
        "segments_kernel", "prepare_hopper", "transitions_hopper", "join_hopper", "recurrence_hopper",
    )  # fmt: skip
    _, prepare, _, join, recurrence = (x.arguments for x in plan.launches)
    assert (join["given"] and join["given"].source) == ("initial_state" if r.ssm_state_indices is not None else None)
    assert join["indices"] == (None if r.ssm_state_indices is None else metadata(r).ssm_state_indices)
    assert join["states"] == recurrence["initial_state"]
    final = recurrence["final_state"]
    written = "initial_state" if r.inplace_final_state else "final_state" if r.output_final_state else None
    assert (final and final.source) == written
    assert (recurrence["final_indices"] is None) == (final is None)
    # Skipped sequences are skipped by both.
    assert (
        prepare["indices"]
        == recurrence["indices"]
        == join["states"]._replace(
            source="own of segments", shape=prepare["indices"].shape, strides=(1,), dtype=torch.int64
        )
    )


def test_a_batch_with_gaps_is_copied_and_written_through_a_copy():
    """Its sequences become one row of tokens."""
    wide = empty(2, 8200, 4, 128)
    r = replace(request(B=2), v=wide[:, :8192], out=wide[:, 8:])
    copies = [x for x in plan_of(r, CHIPS[90]).steps if isinstance(x, Copy)]
    assert [(x.source.source, x.target.source) for x in copies] == [("v", "v, contiguous"), ("o", "out")]
    assert plan_of(request(B=2), CHIPS[90]).kernels == plan_of(r, CHIPS[90]).kernels

"""Several sequences, or one over a pool, that are cut into segments on Hopper: which, and what is launched."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import installed
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

installed.need_backend("nvidia")
installed.need_package("triton")

from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS, choose_backward, choose_forward
from kda_core_nvidia.choose.chunk import hopper_config, most_of_several, several, starts_shape
from kda_core_nvidia.choose.fragments import as_fragments
from kda_core_nvidia.plans.forward import saved_specs

from kda_core.request import DIFFERENTIABLE, Request
from kda_core.triton_lib.layout import slots
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
    assert [rows(request(N, 16384)) for N in (1, 2, 4, 5)] == [1024, 1152, 1280, 0]
    assert [rows(request(N, 16384, 8)) for N in (1, 2, 3)] == [2048, 2368, 0]
    # Three sequences of 3,072 rows on average.
    assert [rows(request(3, T, 2)) for T in (9215, 9216)] == [0, 768]
    for other in ({"return_intermediate_states": True}, {"K": 64}, {"dtype": torch.half}):
        assert rows(request(1, **other)) == 0, other
    assert [rows(request(B=B)) for B in (2, 4, 5)] == [1024, 2048, 0]
    nobody = [replace(request(), cu_seqlens=empty(1, dtype=torch.int32)), pooled(request(B=0))]
    nobody += [request(B=0), request(B=0, save_for_backward=True)]
    assert [rows(r) for r in nobody] == [0] * 4
    assert starts_shape(metadata(nobody[-1])) == ()
    assert [rows(pooled(r)) for r in (request(), request(1))] == [768, 768]
    table = empty(1, 2, dtype=torch.int32)
    assert rows(pooled(request(1), checkpoint_indices=table, checkpoint_every=64)) == 0


def keeping(r: Request, every: int) -> Any:
    """The last launch of a call with checkpoints."""
    table = empty(r.N, 2, dtype=torch.int32)
    kept = {"checkpoint_indices": table, "checkpoint_every": every} if every else {}
    return plan_of(pooled(r, **kept), CHIPS[90]).launches[-1]


@pytest.mark.parametrize(("every", "lacks"), [(0, 0), (96, 0), (48, 16), (528, 16)])
def test_every_call_with_checkpoints_has_the_kernel_that_keeps_them(every: int, lacks: int):
    """Many short sequences as well, which ``prepare_hopper`` would finish otherwise."""
    last = keeping(request(300, 14400, 40), every)
    assert last.name == "recurrence_hopper"
    assert last.constants["FINISHED"] == (not every)
    assert last.constants["LACKS"] == lacks
    assert (last.arguments["checkpoints"] is not None) == bool(every)


def test_checkpoints_within_chunks_have_the_same_configuration():
    """Sequences are no shorter for them; and rows of values that do not lie evenly are no more even."""
    long = request(8, 8192, 32)
    chosen = [{n: keeping(long, every).constants[n] for n in ("BV", "STAGES", "OUT", "STORERS")} for every in (64, 48)]
    assert chosen[0] == chosen[1]
    uneven = request(B=2, T=64, v=empty(2, 65, 4, 128)[:, :64])
    assert [keeping(uneven, every).name for every in (64, 48)] == ["recurrence", "recurrence"]


def test_steps_of_several_sequences():
    """From 4,096 rows on average. A forward saves with room for the segments of every chip."""
    steps = [request(N, T, save_for_backward=True) for N, T in ((1, 4095), (1, 4096), (2, 8191), (2, 8192))]
    assert [rows(r) for r in steps] == [0, 512, 0, 768]
    assert rows(request(B=2, save_for_backward=True)) == 1024
    # Compilers know the number of sequences by a symbol, and compile anew where a shape depends on it.
    assert len({starts_shape(metadata(request(N, 16384, save_for_backward=True))) for N in (1, 2, 3, 4)}) == 1
    for N, B, T, H in itertools.product((0, 1, 3), (1, 2), (4096, 12300, 33000), (1, 4, 16)):
        r = metadata(request(0 if B > 1 else N, T, H, B, save_for_backward=True))
        for arch in (80, 90, 100):
            choice = choose_forward(r, CHIPS[arch])
            cut = as_fragments(r, choice.segment_rows)
            assert slots(cut) <= choice.saved_slots
            if choice.segment_rows and several(r):
                assert cut.N <= starts_shape(r)[0]


@pytest.mark.parametrize("call", [{"N": 2, "T": 16384}, {"B": 2}])
def test_launches_of_a_step(call: dict[str, int]):
    r = request(**call, save_for_backward=True)
    state = empty(r.N, r.HV, 128, 128, dtype=torch.float32)
    r = replace(r, initial_state=state, grad_o=r.v, grad_final_state=state, needs_grad=frozenset(DIFFERENTIABLE))
    saved = saved_specs(metadata(r), CHIPS[90])
    r = replace(r, save_for_backward=False, saved=tuple(empty(*x.shape, dtype=x.dtype) for x in saved))
    plan = plan_of(r, CHIPS[90])
    assert plan.kernels[:5] == (
        "segments_kernel", "prepare_hopper", "reverse_transitions_hopper", "join_hopper", "recurrences_hopper",
    )  # fmt: skip
    assert plan.kernels[-1] == "first_segments_kernel"
    _, _, transitions, join, recurrences, *_ = (x.arguments for x in plan.launches)
    assert transitions["sequences"] == join["sequences"]
    assert join["states"] == recurrences["grad_final_state"]
    assert recurrences["initial_state"].source == f"saved[{len(saved) - 1}]"
    shapes = {x.name: x.shape for x in plan.buffers.values() if x.role == "result"}
    assert shapes == {f"d{n}": getattr(r, n).shape for n in ("q", "k", "v", "g", "beta", "initial_state")}


@given(
    N=st.sampled_from([0, 1, 2, 4, 40]), B=st.integers(0, 4), T=st.sampled_from([0, 1, 100, 4095, 8192, 33000]),
    H=st.sampled_from([1, 4, 16, 20]), K=st.sampled_from([64, 128, 256]), dtype=st.sampled_from([BF16, torch.half]),
    do=st.booleans(), arch=st.sampled_from([80, 90, 120]), everything=st.booleans(),
)  # fmt: skip
@example(N=0, B=0, T=8192, H=4, K=128, dtype=BF16, do=True, arch=90, everything=False)
def test_a_step_of_any_call(N: int, B: int, T: int, H: int, K: int, dtype: Any, do: bool, arch: int, everything: bool):
    """A forward saves as announced, a backward is cut as its forward, and gradients have their inputs' shapes."""
    chip = CHIPS[arch]
    r = request(N, T, H, 1 if N else B, K, dtype, save_for_backward=True, disable_recompute=everything)
    r = replace(r, initial_state=empty(*r.state_shape, dtype=torch.float32))
    saved = saved_specs(metadata(r), chip)
    plan = plan_of(r, chip)
    made = [plan.buffers[x].shape for x in list(plan.results.values())[3:] if x is not None]
    assert made == [x.shape for x in saved]
    rows = choose_forward(metadata(r), chip).segment_rows
    more = {"saved": tuple(empty(*x.shape, dtype=x.dtype) for x in saved), "grad_o": r.v if do else None}
    r = replace(r, **more, save_for_backward=False, needs_grad=frozenset(DIFFERENTIABLE))
    assert choose_backward(metadata(r), chip).segment_rows == rows
    plan = plan_of(r, chip)
    found = {n: plan.buffers[x].shape for n, x in plan.results.items() if x is not None}
    assert found == {n: getattr(r, n).shape for n in ("q", "k", "v", "g", "beta", "initial_state")}


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

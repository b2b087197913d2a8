"""``kda explain --plan`` on NVIDIA, without a GPU."""

from __future__ import annotations

import installed
import pytest
import torch

installed.need_backend("nvidia")
installed.need_package("triton")

from kda_core import _explain, api


def example(op: str = "chunk_kda", **options):
    """Arguments of a call on a device that this machine need not have."""
    from kda_core._cli import example_call

    present = frozenset(n for n in ("cu_seqlens", "cu_seqlens_cpu") if options.pop(n, False))
    backward = options.pop("backward", False)
    return example_call(
        getattr(api, op), options, sizes=(1, 64, 2, 64, 64), dtype="bfloat16", device=torch.device("cuda"),
        backward=backward, bounds=(0, 30, 64) if present else None, present=present,
    )  # fmt: skip


def test_forward_and_backward():
    forward, backward = _explain.plan(**example(backward=True), chip="sm_90", backend="nvidia")
    assert (forward.name, backward.name) == ("forward", "backward")
    assert [s.name for s in forward.steps] == ["prepare", "recurrence"]
    assert [s.name for s in backward.steps][-2:] == ["gradients_kernel", "finish_kernel"]
    assert {b.name for b in forward.buffers if b.role == "result"} == {"o", "P", "X"}
    held = {b.name: b.steps for b in backward.buffers}
    # A small call holds its scratch to the end.
    assert held["keys"] == held["dbeta by channel block"] == (0, 3)
    assert forward.peak_scratch == sum(b.nbytes for b in forward.buffers if b.role == "scratch")
    assert forward.bytes_floor < forward.bytes_moved


@pytest.mark.parametrize("op", ["fused_recurrent_kda", "kda_gate"])
def test_other_functions(op: str):
    options = {"lower_bound": -5.0} if op == "kda_gate" else {}
    plans = _explain.plan(**example(op, backward=True, **options), op=op, chip="sm_80", backend="nvidia")
    assert [p.name for p in plans] == ["forward", "backward"]
    assert all(p.chip == "sm_80" and p.steps for p in plans)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"chip: expected one of sm_80, .* got 'sm_91'"):
        _explain.plan(**example(), chip="sm_91", backend="nvidia")
    packed = example(cu_seqlens=True, cu_seqlens_cpu=True, return_intermediate_states=True)
    with pytest.raises(ValueError, match="follows from the values of cu_seqlens"):
        _explain.plan(**packed, chip="sm_90", backend="nvidia")
    with pytest.raises(ValueError, match="chip: needs the name of a backend"):
        _explain.plan(**example(), chip="sm_90")

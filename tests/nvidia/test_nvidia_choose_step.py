"""Which kernels a decoding step of a layer gets, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import installed
import torch

installed.need_backend("nvidia")
installed.need_package("triton")

from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS

from kda_core import empty_records
from kda_core.request import DecodeStepRequest, Request


def layer_step(N: int = 3, T: int = 1, H: int = 4, W: int = 4, **options: Any) -> DecodeStepRequest:
    """A step of a layer of four heads on a pool in float32."""
    D = (2 * H + 4) * 128
    g, slots = torch.empty(N, T, 4, 128, device="meta"), torch.empty(N, dtype=torch.int32, device="meta")
    fields = {
        "x": torch.empty(N, T, D, device="meta"), "g": g, "beta": g[..., 0], "weight": torch.empty(D, W, device="meta"),
        "conv_state": torch.empty(9, W - 1, D, device="meta"), "state": torch.empty(9, 4, 128, 128, device="meta"),
        "norm_gate": g, "norm_weight": g[0, 0, 0], "indices": slots, "use_gate_in_kernel": False,
    }  # fmt: skip
    return DecodeStepRequest(**(fields | options))


def layer_kernels(r: DecodeStepRequest, arch: int = 90, *misaligned: str) -> tuple[str, ...]:
    return plan_of(r, CHIPS[arch], frozenset(misaligned)).kernels


def test_steps_of_layers():
    """sm_90 has one kernel for tokens, and for drafts that are recorded, where v has as many heads as q and k."""
    records = torch.empty(3, 2, 4, 384, device="meta")
    many = torch.empty(3, 9, 4, 384, device="meta")
    inputs = torch.empty(3, 9, 1536, device="meta")
    slots = torch.empty(3, dtype=torch.int32, device="meta")
    for r in (
        layer_step(),
        layer_step(W=2),
        layer_step(indices=None),
        layer_step(state_v_first=True, out=layer_step().g),
    ):
        assert layer_kernels(r) == ("layer_step",)
    few = {"commit": many[:, :8], "num_committed": slots, "commit_inputs": inputs[:, :8]}
    for r in (layer_step(T=2, records=records), layer_step(T=2, records=records, **few)):
        assert layer_kernels(r) == ("recurrent_draft",)
    half = torch.empty(9, 4, 128, 128, dtype=torch.float16, device="meta")
    table = torch.empty(3, 2, dtype=torch.int32, device="meta")
    more = few | {"commit": many, "commit_inputs": inputs}
    others = [layer_step(T=2), layer_step(H=2), layer_step(W=5), layer_step(state=half), layer_step(T=2, indices=table)]
    others += [layer_step(T=9, records=many), layer_step(T=2, records=records, **more)]
    for r in others:
        assert len(layer_kernels(r)) == 3
    pool = torch.empty(600, 4, 128, 128, dtype=torch.bfloat16, device="meta")
    many = layer_step(300, 2, records=torch.empty(300, 2, 4, 384, device="meta"), state=pool)
    assert layer_kernels(many) == layer_kernels(replace(many, state=pool.float())) == ("recurrent_draft",)
    assert len(layer_kernels(layer_step(), 100)) == len(layer_kernels(layer_step(), 90, "state")) == 3


def draft(T: int = 4, C: int = 0, M: int = 0, *, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> Request:
    """A draft of three sequences, behind a commit of C tokens or of a path of M."""
    rows = {n: torch.empty(3, T, 4, 128, dtype=torch.bfloat16, device="meta") for n in "qkvg"}
    slots, pool = torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(9, 4, 128, 128, dtype=dtype)
    fields = rows | {
        "beta": rows["g"][..., 0], "scale": 1.0, "initial_state": pool.to("meta"), "ssm_state_indices": slots,
        "inplace_final_state": True, "update_state": False,
        "records": empty_records(3, T, 4, 128, 128, device="meta"),
    }  # fmt: skip
    if C:
        fields |= {"commit": empty_records(3, C, 4, 128, 128, device="meta"), "num_committed": slots}
    if M:
        fields["commit_path"] = torch.empty(3, M, dtype=torch.int32, device="meta")
    return Request(op="fused_recurrent_kda", **(fields | changed))


def test_every_draft_of_few_tokens_from_bfloat16_states_has_the_kernel_whose_bits_are_its_own():
    """However tensors lie, and however many tokens may be committed first: a call with them has the bits of two."""
    wide = torch.empty(3, 4, 4, 257, dtype=torch.bfloat16, device="meta")
    crooked = draft(q=wide[..., 3:131], k=wide.transpose(1, 2)[..., :128], g=wide[..., 1:129])
    for r in (draft(), draft(1), draft(C=8), draft(4, 8, 8), crooked):
        assert plan_of(r, CHIPS[90]).kernels == ("recurrent_draft",)
    assert plan_of(draft(), CHIPS[90], frozenset("qkg")).kernels == ("recurrent_draft",)
    apart = ("commit_kernel", "recurrent_draft")
    for r in (draft(C=9), draft(1, 64), draft(4, 8, 9), draft(4, 9, 4)):
        commit, launch = plan_of(r, CHIPS[90]).launches
        assert (commit.name, launch.name) == apart
        assert launch.arguments["commit"] is None
    # The kernel writes rows; what has none is copied.
    gaps = plan_of(draft(out=wide[..., :-1:2]), CHIPS[90])
    assert gaps.kernels == ("recurrent_draft",)
    assert len(gaps.steps) == 2
    # Steps and drafts from float32 states have the bits of ``recurrent`` where it sums alike, and it takes the others.
    full = torch.float32
    others = [draft(C=9, dtype=full), draft(4, 8, 8, dtype=full), draft(out=wide[..., :-1:2], dtype=full), draft(9)]
    for r in (*others, replace(crooked, initial_state=crooked.initial_state.float())):
        assert plan_of(r, CHIPS[90]).kernels == ("recurrent",)
    layer = layer_step(
        T=2, records=empty_records(3, 2, 4, 128, 128, device="meta"), num_committed=draft().ssm_state_indices,
        commit=empty_records(3, 9, 4, 128, 128, device="meta"), commit_inputs=torch.empty(3, 9, 1536, device="meta"),
        state=draft().initial_state,
    )  # fmt: skip
    assert layer_kernels(layer)[1:3] == apart

"""Calls of this backend: plan, run."""

from __future__ import annotations

from functools import cache, partial

import torch

from kda_core.request import AnyRequest, CommitRequest, DecodeStepRequest, GateRequest, LayerRequest
from kda_core.triton_lib.calls import Calls, h_shape
from kda_core.triton_lib.commit_kernels import plan_commit
from kda_core.triton_lib.gate_kernels import plan_gate
from kda_core.triton_lib.layer_plans import plan_decode_step, plan_of_layer
from kda_core.triton_lib.plan import Plan, metadata
from kda_core.triton_lib.run import INTERPRET
from kda_core_amd import choose
from kda_core_amd.plans.backward import plan_backward, plan_begin_backward, plan_finish_backward
from kda_core_amd.plans.forward import (
    add_recurrent,
    plan_begin,
    plan_finish,
    plan_forward,
    plan_recurrent,
    saved_specs,
)

LAYER_LANES = 128
"""Lanes of a program of the kernels around the operator in a layer: two waves of 64, four of 32."""


@cache
def chip(device: torch.device) -> choose.Architecture:
    """Facts of ``device``."""
    if INTERPRET:
        return choose.ARCHITECTURES[choose.INTERPRETED]
    properties = torch.cuda.get_device_properties(device)
    foreign = choose.FOREIGN and torch.version.hip is None
    name = choose.FOREIGN_ARCHITECTURE if foreign else properties.gcnArchName.split(":")[0]
    return choose.ARCHITECTURES[name].having(properties.multi_processor_count)


_HALVES = {
    "begin": plan_begin, "finish": plan_finish, "begin_backward": plan_begin_backward,
    "finish_backward": plan_finish_backward,
}  # fmt: skip


def plan_of(
    request: AnyRequest | LayerRequest, on: choose.Architecture, misaligned: frozenset[str] = frozenset(),
    half: str = "", rows: int | None = None,
) -> Plan:  # fmt: skip
    """The plan of a call, as ``Calls`` asks for it. ``rows``: of a segment, 0 for none; None: ``segment_rows``."""
    r = metadata(request, misaligned)
    if half:
        return _HALVES[half](r, on)
    if isinstance(r, DecodeStepRequest):
        return plan_decode_step(r, partial(add_recurrent, chip=on), on.wave)
    if isinstance(r, LayerRequest):
        return plan_of_layer(r, on.wave, LAYER_LANES // on.wave)
    if isinstance(r, CommitRequest):
        return plan_commit(r, choose.COMMIT.num_warps, False, **choose.compile_options(choose.COMMIT, on))
    if isinstance(r, GateRequest):
        return plan_gate(r, choose.GATE.num_warps, **choose.compile_options(choose.GATE, on))
    if not r.needs_grad and r.op == "fused_recurrent_kda":
        return plan_recurrent(r, on)
    rows = choose.segment_rows(r, on) if rows is None else rows
    return plan_backward(r, on, rows) if r.needs_grad else plan_forward(r, on, rows, h_shape(request))


CALLS = Calls(plan_of, chip, choose.ARCHITECTURES, saved_specs)

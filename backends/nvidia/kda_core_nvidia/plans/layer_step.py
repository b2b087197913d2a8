"""The plan of ``kda_decode_step`` in one launch."""

from __future__ import annotations

from typing import Any

from kda_core.request import DecodeStepRequest, Request
from kda_core.triton_lib.frame import finish_output, gate_parameters, names, output
from kda_core.triton_lib.layer_plans import convolved
from kda_core.triton_lib.plan import Builder, Plan, changed, input_layouts
from kda_core.triton_lib.recurrent_kernels import sequence_strides
from kda_core_nvidia.choose.recurrent import DraftConfig
from kda_core_nvidia.layer_step import layer_step
from kda_core_nvidia.plans.recurrent import draft_arguments
from kda_core_nvidia.recurrent_draft import DRAFT_COLUMNS, SIZE, recurrent_draft

WARPS = SIZE.value // DRAFT_COLUMNS.value
"""Warps of a program, which has a whole head."""


def plan_layer_step(r: DecodeStepRequest, config: DraftConfig) -> Plan:
    """The plan of a call that one kernel takes; the request is metadata alone."""
    b = Builder()
    N, T, H, _ = r.g.shape
    x, g = b.rows(r.x), b.rows(r.g)
    gate = None if r.norm_gate is None else b.rows(r.norm_gate)
    o = output(b, r.out, (N, T, H, r.V), r.x.dtype)
    s_in, s_ih, I_ROW, _ = r.state.strides
    s_cs, s_cr, s_cd = r.conv_state.strides
    own = {
        "x": x, "weight": b.dense(r.weight), "bias": b.dense(r.bias), "conv_state": r.conv_state, "gate": gate,
        "norm_weight": b.dense(r.norm_weight), "o": o, "eps": float(r.norm_eps), "s_xn": x.stride(0),
        "s_xt": x.stride(1), "s_cs": s_cs, "s_cr": s_cr, "s_cd": s_cd, "s_in": s_in, "s_ih": s_ih, "I_ROW": I_ROW,
        "slots": r.state.shape[0], "TAPS": r.weight.shape[1], "STAGED": config.staged, "TURNS": config.turns,
    }  # fmt: skip
    call = changed(r.recurrence(*convolved(r, x), r.state), g=g, **gate_parameters(b, r))
    named = names(call) | sequence_strides(False, g=g, b=r.beta, o=o, a=gate) | own
    kernel = layer_step if r.records is None else recurrent_draft
    named |= {"state": r.state} if r.records is None else _draft(b, r, call, config)
    b.pick(kernel, N * H, WARPS // config.turns, named, enable_fp_fusion=False, maxnreg=config.registers)
    finish_output(b, r, o)
    return b.plan(input_layouts(r), {"o": o if r.out is None else None})


def _draft(b: Builder, r: DecodeStepRequest, call: Request, config: DraftConfig) -> dict[str, Any]:
    """Further arguments of a draft; the convolution's rows take the place of q, k and v."""
    unused = dict.fromkeys(("q", "k", "v", "inputs"))
    found = unused | sequence_strides(False, **unused) | draft_arguments(b, call, config) | {"s_xi": 0, "s_ti": 0}
    if r.commit is not None:
        inputs = b.rows(r.commit_inputs)
        found |= {"inputs": inputs, "s_xi": inputs.stride(0), "s_ti": inputs.stride(1)}
    return found

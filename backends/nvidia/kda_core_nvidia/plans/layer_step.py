"""The plan of ``kda_decode_step`` in one launch."""

from __future__ import annotations

from typing import Any

from kda_core.request import DecodeStepRequest
from kda_core.triton_lib.arguments import gate_kind, has_contiguous_rows
from kda_core.triton_lib.frame import gate_parameters
from kda_core.triton_lib.plan import Builder, Copy, Plan, input_layouts
from kda_core_nvidia.choose.recurrent import DraftConfig, draft_chunk, power_of_two
from kda_core_nvidia.layer_step import layer_step
from kda_core_nvidia.recurrent_draft import DRAFT_COLUMNS, SIZE, recurrent_draft

WARPS = SIZE.value // DRAFT_COLUMNS.value
"""Warps of a program, which has a whole head."""


def plan_layer_step(r: DecodeStepRequest, config: DraftConfig) -> Plan:
    """The plan of a call that one kernel takes; the request is metadata alone."""
    b = Builder()
    N, T, H, _ = r.g.shape
    x, g, o = b.rows(r.x), b.rows(r.g), r.out
    gate = None if r.norm_gate is None else b.rows(r.norm_gate)
    if o is None or not has_contiguous_rows(o):
        o = (b.result if o is None else b.scratch)("o", (N, T, H, r.V), r.x.dtype)
    s_in, s_ih, I_ROW, _ = r.state.strides
    s_cs, s_cr, s_cd = r.conv_state.strides
    s_an, s_at, s_ah = (0, 0, 0) if gate is None else gate.strides[:3]
    named: dict[str, Any] = {
        "x": x, "weight": b.dense(r.weight), "bias": b.dense(r.bias), "conv_state": r.conv_state, "g": g,
        "beta": r.beta, "gate": gate, "norm_weight": b.dense(r.norm_weight), "o": o, "indices": r.indices,
        "scale": float(r.scale), "lower_bound": float(r.lower_bound or 0.0), "eps": float(r.norm_eps),
        "s_xn": x.stride(0), "s_xt": x.stride(1), "s_cs": s_cs, "s_cr": s_cr, "s_cd": s_cd, "s_in": s_in, "s_ih": s_ih,
        "s_an": s_an, "s_at": s_at, "s_ah": s_ah, "s_index": 0 if r.indices is None else r.indices.stride(0),
        "pad_slot_id": r.pad_slot_id, "slots": r.state.shape[0], "H": H, "TAPS": r.weight.shape[1], "I_ROW": I_ROW,
        "GATE": gate_kind(r), "L2NORM": r.use_qk_l2norm_in_kernel, "SIGMOID": r.use_beta_sigmoid_in_kernel,
        "NEG_EIGVAL": r.allow_neg_eigval, "V_FIRST": r.state_v_first, **gate_parameters(b, r),
    }  # fmt: skip
    for letter, view in (("g", g), ("b", r.beta), ("o", o)):
        named |= {f"s_{letter}{i}": s for i, s in zip("nth", view.strides, strict=False)}
    kernel = layer_step if r.records is None else recurrent_draft
    named |= {"STAGED": config.staged} | ({"state": r.state} if r.records is None else _draft(b, r))
    b.pick(kernel, N * H, WARPS, named, enable_fp_fusion=False, maxnreg=config.registers)
    if r.out is not None and o is not r.out:
        b.step(Copy(r.out, o))
    return b.plan(input_layouts(r), {"o": o if r.out is None else None})


def _draft(b: Builder, r: DecodeStepRequest) -> dict[str, Any]:
    """Further arguments of a draft."""
    given = ("s_qn", "s_qt", "s_qh", "s_kn", "s_kt", "s_kh", "s_vn", "s_vt", "s_vh", "s_xi", "s_ti", "s_committed")
    found: dict[str, Any] = dict.fromkeys(("q", "k", "v", "inputs")) | dict.fromkeys(given, 0)
    found |= dict.fromkeys(("path", "parents")) | {
        "M": 0, "CHUNK": draft_chunk(r.x.shape[1], r.state.dtype), "TURNS": 1,
        "initial_state": r.state, "records": r.records, "commit": r.commit, "committed": r.num_committed,
        "T": r.x.shape[1], "C": 0, "TP": power_of_two(r.x.shape[1]), "CP": 0, "HV": r.g.shape[2], "GROUP": 1,
    }  # fmt: skip
    for letter, view in (("r", r.records), ("c", r.commit)):
        strides = (0, 0, 0) if view is None else view.strides
        found |= {f"s_{letter}{i}": s for i, s in zip("nth", strides, strict=False)}
    if r.commit is not None:
        inputs, C = b.rows(r.commit_inputs), r.commit.shape[1]
        found |= {"inputs": inputs, "s_xi": inputs.stride(0), "s_ti": inputs.stride(1), "C": C}
        found |= {"CP": power_of_two(max(1, C)), "s_committed": r.num_committed.stride(0)}
    return found

"""The forward of ``fused_recurrent_kda``, and ``kda_decode_step`` in one launch.

Sequences of at most SHORT tokens, and all drafts, are one launch of ``recurrent``, longer ones two of the kernels for
prompts. Dense sequences are all of one kind. Packed ones may be of both, and only the device knows: where they have
more than SHORT tokens together, all three kernels are launched, and each skips sequences that it does not own. In
decoding the last two have no work: they start before the first one ends, and the last one has no more programs than run
at once. Dense steps with many states in bfloat16, stored K first, are one launch of ``recurrent_step`` on Hopper, and
drafts that leave records one of ``recurrent_draft``.

Nothing waits for the device, so that a call can be captured in a CUDA graph whose replays read whatever the indices
hold by then. Inputs are read where they lie, at any stride of batch, token and head; an input whose last dimension is
not contiguous is copied first, and so are parameters and boundaries with gaps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from kda_core.request import DecodeStepRequest, Request
from kda_core.triton_lib.commit_kernels import add_first_commit
from kda_core.triton_lib.frame import finish_output, gate_parameters, names, output, outputs, readable
from kda_core.triton_lib.layer_plans import convolved
from kda_core.triton_lib.layout import power_of_two
from kda_core.triton_lib.plan import Builder, Plan, View, changed, input_layouts
from kda_core.triton_lib.recurrent_kernels import launch_recurrent, record_arguments, sequence_strides, token_arguments
from kda_core_nvidia.choose import RecurrentChoice
from kda_core_nvidia.choose.recurrent import DraftConfig, commits_apart, draft_chunk
from kda_core_nvidia.layer_step import layer_step
from kda_core_nvidia.recurrent_blocks import PLANES, ROWS, SHORT, lead
from kda_core_nvidia.recurrent_blocks_prepare import blocks_prepare
from kda_core_nvidia.recurrent_blocks_recurrence import blocks_recurrence
from kda_core_nvidia.recurrent_draft import DRAFT_COLUMNS, recurrent_draft
from kda_core_nvidia.recurrent_step import COLUMNS, SIZE, recurrent_step

STEP_WARPS = 4
"""Warps of ``recurrent_step`` and ``recurrent_draft``: together they load whole rows of a state."""

LAYER_WARPS = SIZE.value // DRAFT_COLUMNS.value
"""Warps of a program of ``layer_step``, which has a whole head."""

COMMIT_WARPS = 4
"""Warps of a program of ``commit_kda``."""

WITHOUT_LAYER: dict[str, Any] = {
    **dict.fromkeys(("x", "weight", "bias", "conv_state", "inputs", "gate", "norm_weight")), "eps": 0.0,
    **dict.fromkeys(("s_xn", "s_xt", "s_xi", "s_ti", "s_cs", "s_cr", "s_cd", "s_an", "s_at", "s_ah", "TAPS"), 0),
}  # fmt: skip
"""Arguments of ``recurrent_draft`` for what is around it in a layer."""

PREPARE_STAGES, RECURRENCE_STAGES = 4, 2
"""Depths of the pipelines of loads of ``blocks_prepare`` (which has one warp) and ``blocks_recurrence``."""


def plan_recurrent(request: Request, choice: RecurrentChoice) -> Plan:
    """The plan of a forward of ``fused_recurrent_kda``, whose results are o and final_state."""
    b = Builder()
    o, final_state = add_recurrent(b, request, choice)
    return b.plan(input_layouts(request), {"o": o, "final_state": final_state})


def add_recurrent(
    b: Builder, request: Request, choice: RecurrentChoice, leads: bool = False
) -> tuple[View, View | None]:
    """Add the launches; o and the final state. ``leads``: a short call's next kernel waits for it by itself."""
    o, final_state = outputs(b, request, any_strides=choice.draft is None)
    r = readable(b, request)
    if choice.draft is not None and commits_apart(r):
        r = add_first_commit(b, r, COMMIT_WARPS, True, enable_fp_fusion=False)
    # The kernels for prompts follow, and mostly find no work: they can do so while the last programs run.
    followed = choice.overlap and (leads or choice.prompts is not None)
    named = token_arguments(r, final_state, o) | {"LEAD": lead if followed else None}
    if choice.step is not None:
        _add_step(b, r, choice, named)
    if choice.draft is not None:
        _add_draft(b, r, choice, named)
    if choice.short is not None:
        _add_short(b, r, choice, named)
    if choice.prompts is not None:
        _add_prompts(b, r, choice, named)
    return finish_output(b, request, o), final_state


def _add_step(b: Builder, r: Request, choice: RecurrentChoice, named: dict[str, Any]) -> None:
    config, programs = choice.step, r.N * r.HV * (SIZE.value // (STEP_WARPS * COLUMNS.value))
    own = {"I_ROW": named["I_K"], "F_ROW": named["F_K"], "PARTS": config.parts}
    b.pick(recurrent_step, programs, STEP_WARPS, named | own, enable_fp_fusion=False, maxnreg=config.registers)


def _add_draft(b: Builder, r: Request, choice: RecurrentChoice, named: dict[str, Any]) -> None:
    config = choice.draft
    own = WITHOUT_LAYER | draft_arguments(b, r, config) | {"I_ROW": named["I_V" if r.state_v_first else "I_K"]}
    programs = r.N * r.HV * (SIZE.value // (config.turns * STEP_WARPS * DRAFT_COLUMNS.value))
    b.pick(recurrent_draft, programs, STEP_WARPS, named | own, maxnreg=config.registers, enable_fp_fusion=False)


def _add_short(b: Builder, r: Request, choice: RecurrentChoice, named: dict[str, Any]) -> None:
    """Add ``recurrent``. Where prompts follow, packed sequences of more than SHORT tokens are left to them."""
    config, one_token = choice.short, r.T == 1 and r.cu_seqlens is None
    own = {
        "ONE_TOKEN": one_token, "AHEAD": True, "MOST": 0 if choice.prompts is None else SHORT.value,
        "EVICTION": config.eviction, "SIGNED": True, "INDEX": tl.int32,
    }  # fmt: skip
    options = {"maxnreg": config.registers} if config.registers and one_token else {}
    launch_recurrent(
        b, r, named | own, config.block_v, config.num_warps, config.row_bytes, enable_fp_fusion=False, **options
    )


def draft_arguments(b: Builder, r: Request, config: DraftConfig) -> dict[str, Any]:
    """The same with those of ``recurrent_draft`` alone, whose rows of tokens and records are as many as it unrolls."""
    found = record_arguments(b, r)
    return found | {
        "TP": power_of_two(r.T), "CP": 0 if r.commit is None else power_of_two(max(1, found["C"], found["M"])),
        "CHUNK": draft_chunk(r.T, r.state_dtype), "TURNS": config.turns, "STAGED": config.staged,
    }  # fmt: skip


def _add_prompts(b: Builder, r: Request, choice: RecurrentChoice, named: dict[str, Any]) -> None:
    """Add ``blocks_prepare`` and ``blocks_recurrence`` for every sequence of more than SHORT tokens."""
    prompts, slots, rows, KP = choice.prompts, choice.prompts.slots, ROWS.value, named["KP"]
    named = named | {
        "planes": b.scratch("planes", (slots, r.HV, PLANES.value, rows, KP), torch.float16),
        "squares": b.scratch("squares", (slots, r.HV, 2, rows, rows), torch.float16),
        "factors": b.scratch("factors", (slots, r.HV, 3 * rows + KP), torch.float32),
        "blocks": -(-r.T // rows), "EXACT_OUT": r.q.dtype != torch.bfloat16, "BOUNDED": prompts.bounded,
        "TERMS": prompts.terms, "OVERLAP": choice.overlap,
    }  # fmt: skip
    # Packed: whatever the kernel ahead is, this one may start before it ends.
    early = choice.overlap and r.cu_seqlens is not None
    own = {"STAGES": PREPARE_STAGES}
    b.pick(blocks_prepare, slots * r.HV, 1, named | own, enable_fp_fusion=False, launch_pdl=early)
    own = {"STAGES": RECURRENCE_STAGES, "BV": prompts.block_v, "STEP": prompts.step}
    programs = prompts.sequences * r.HV * -(-r.V // prompts.block_v)
    options = {"enable_fp_fusion": False, "launch_pdl": choice.overlap}
    b.pick(blocks_recurrence, programs, prompts.num_warps, named | own, **options)


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
    named |= {"state": r.state} if r.records is None else _draft_of_layer(b, r, call, config)
    b.pick(kernel, N * H, LAYER_WARPS // config.turns, named, enable_fp_fusion=False, maxnreg=config.registers)
    finish_output(b, r, o)
    return b.plan(input_layouts(r), {"o": o if r.out is None else None})


def _draft_of_layer(b: Builder, r: DecodeStepRequest, call: Request, config: DraftConfig) -> dict[str, Any]:
    """Further arguments of a draft; the convolution's rows take the place of q, k and v."""
    unused = dict.fromkeys(("q", "k", "v", "inputs"))
    found = unused | sequence_strides(False, **unused) | draft_arguments(b, call, config) | {"s_xi": 0, "s_ti": 0}
    if r.commit is not None:
        inputs = b.rows(r.commit_inputs)
        found |= {"inputs": inputs, "s_xi": inputs.stride(0), "s_ti": inputs.stride(1)}
    return found

"""The forward of ``fused_recurrent_kda``.

Sequences of at most SHORT tokens, and all drafts, are one launch of ``recurrent``, longer ones two of the kernels for
prompts. Dense sequences are all of one kind. Packed ones may be of both, and only the device knows: where they have
more than SHORT tokens together, all three kernels are launched, and each skips sequences that it does not own. In
decoding the last two have no work: they start before the first one ends, and the last one has no more programs than run
at once. Dense steps with many states in bfloat16, stored K first, are one launch of ``recurrent_step`` on Hopper.

Nothing waits for the device, so that a call can be captured in a CUDA graph whose replays read whatever the indices
hold by then. Inputs are read where they lie, at any stride of batch, token and head; an input whose last dimension is
not contiguous is copied first, and so are parameters and boundaries with gaps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import gate_kind, state_strides
from kda_core.triton_lib.layout import padded
from kda_core.triton_lib.plan import Builder, Plan, View, input_layouts
from kda_core_nvidia.choose import RecurrentChoice
from kda_core_nvidia.choose.recurrent import Prompts, RecurrentConfig, StepConfig, power_of_two
from kda_core_nvidia.plans.forward import gate_parameters
from kda_core_nvidia.recurrent import recurrent
from kda_core_nvidia.recurrent_blocks import PLANES, ROWS, SHORT
from kda_core_nvidia.recurrent_blocks_prepare import blocks_prepare
from kda_core_nvidia.recurrent_blocks_recurrence import blocks_recurrence
from kda_core_nvidia.recurrent_step import COLUMNS, SIZE, recurrent_step

STEP_WARPS = 4
"""Warps of ``recurrent_step``: together they load whole rows of a state."""

PREPARE_STAGES, RECURRENCE_STAGES = 4, 2
"""Depths of the pipelines of loads of ``blocks_prepare`` (which has one warp) and ``blocks_recurrence``."""


def plan_recurrent(request: Request, choice: RecurrentChoice) -> Plan:
    """The plan of a forward of ``fused_recurrent_kda``, whose results are o and final_state."""
    b, r = Builder(), request
    o = b.result("o", (r.B, r.T, r.HV, r.V), r.q.dtype) if r.out is None else r.out
    final_state = r.initial_state if r.inplace_final_state else None
    if r.output_final_state and not r.inplace_final_state:
        final_state = b.result("final_state", r.state_shape, r.state_dtype)
    r = replace(r, **{n: b.rows(getattr(r, n)) for n in "qkvg"})
    r = replace(r, cu_seqlens=b.dense(r.cu_seqlens), **gate_parameters(b, r))
    if choice.step is not None:
        _add_step(b, r, choice.step, o, final_state)
    if choice.short is not None:
        _add_short(b, r, choice, choice.short, o, final_state)
    if choice.prompts is not None:
        _add_prompts(b, r, choice, choice.prompts, o, final_state)
    return b.plan(input_layouts(request), {"o": o, "final_state": final_state})


def _strides(packed: bool, **views: View) -> dict[str, int]:
    """Strides by sequence (a token's, when sequences are found by their first token), token and head."""
    found = {}
    for letter, x in views.items():
        s_b, s_t, s_h = x.strides[:3]
        found |= {f"s_{letter}n": s_t if packed else s_b, f"s_{letter}t": s_t, f"s_{letter}h": s_h}
    return found


def _options(r: Request) -> dict[str, Any]:
    """Constants of every kernel that applies the gate and the norms."""
    return {
        "HV": r.HV, "GROUP": r.HV // r.H, "GATE": gate_kind(r), "L2NORM": r.use_qk_l2norm_in_kernel,
        "SIGMOID": r.use_beta_sigmoid_in_kernel, "NEG_EIGVAL": r.allow_neg_eigval, "enable_fp_fusion": False,
    }  # fmt: skip


def _numbers(r: Request) -> dict[str, Any]:
    return {"scale": float(r.scale), "lower_bound": float(r.lower_bound or 0.0), "pad_slot_id": r.pad_slot_id}


def _rows(r: Request) -> dict[str, Any]:
    """What every kernel that applies the gate reads of each token, by the kernels' parameters."""
    return {"q": r.q, "k": r.k, "g": r.g, "beta": r.beta, "A_log": r.A_log, "dt_bias": r.dt_bias}


def _add_step(b: Builder, r: Request, config: StepConfig, o: View, final_state: View | None) -> None:
    states, indices = r.N * r.HV, r.ssm_state_indices
    s_in, s_ih, I_K, _ = state_strides(r.initial_state, False)
    s_fn, s_fh, F_K, _ = state_strides(final_state, False)
    strides = {}
    for letter, x in {"q": r.q, "k": r.k, "v": r.v, "g": r.g, "b": r.beta, "o": o}.items():
        strides |= {f"s_{letter}n": x.stride(0), f"s_{letter}h": x.stride(2)}
    constants = {"I_ROW": I_K, "F_ROW": F_K, "PARTS": config.parts, "maxnreg": config.registers}
    b.launch(
        recurrent_step, (states * (SIZE.value // (STEP_WARPS * COLUMNS.value)), 1, 1), STEP_WARPS,
        _options(r) | constants, **_rows(r), v=r.v, initial_state=r.initial_state, final_state=final_state, o=o,
        indices=indices, **_numbers(r),
        **strides, s_in=s_in, s_ih=s_ih, s_fn=s_fn, s_fh=s_fh, s_index=0 if indices is None else indices.stride(0),
    )  # fmt: skip


def _add_short(
    b: Builder, r: Request, choice: RecurrentChoice, config: RecurrentConfig, o: View, final_state: View | None
) -> None:
    """Add ``recurrent``. Where prompts follow, packed sequences of more than SHORT tokens are left to them."""
    N, T, HV, K, V, packed, v_first = r.N, r.T, r.HV, r.K, r.V, r.cu_seqlens is not None, r.state_v_first
    indices, accepted = r.ssm_state_indices, r.num_accepted_tokens
    s_slot, width = (indices.stride(1), indices.shape[1]) if indices is not None and indices.dim() == 2 else (0, 1)
    KP, short_only, one_token = power_of_two(K), choice.prompts is not None, T == 1 and not packed
    s_in, s_ih, I_K, I_V = state_strides(r.initial_state, v_first)
    s_fn, s_fh, F_K, F_V = state_strides(final_state, v_first)
    constants = {
        "K": K, "V": V, "KP": KP, "VP": power_of_two(V),
        "KS": min(KP, config.row_bytes // r.state_dtype.itemsize) if v_first else KP, "BV": config.block_v, "I_K": I_K,
        "I_V": I_V, "F_K": F_K, "F_V": F_V, "V_FIRST": v_first, "IN_PLACE": r.inplace_final_state,
        "EVERY_TOKEN": width > 1, "ONE_TOKEN": one_token, "MOST": SHORT.value if short_only else 0,
        "EVICTION": config.eviction,
        # The kernels for prompts follow, and mostly find no work: they can do so while the last programs run.
        "LEADS": short_only and choice.overlap,
    }  # fmt: skip
    if config.registers and one_token:
        constants["maxnreg"] = config.registers
    b.launch(
        recurrent,
        # With packed sequences one more set of programs zeroes the rows behind the last one.
        ((N + packed) * HV * -(-V // config.block_v), 1, 1), config.num_warps, _options(r) | constants, **_rows(r),
        v=r.v, initial_state=r.initial_state, final_state=final_state, o=o, cu_seqlens=r.cu_seqlens, indices=indices,
        accepted=accepted, **_numbers(r), T=T, N=N,
        **_strides(packed, q=r.q, k=r.k, v=r.v, g=r.g, b=r.beta, o=o), s_ov=o.stride(3), s_in=s_in, s_ih=s_ih,
        s_fn=s_fn, s_fh=s_fh, s_index=0 if indices is None else indices.stride(0), s_slot=s_slot,
        s_accepted=0 if accepted is None else accepted.stride(0), width=width,
    )  # fmt: skip


def _add_prompts(
    b: Builder, r: Request, choice: RecurrentChoice, prompts: Prompts, o: View, final_state: View | None
) -> None:
    """Add ``blocks_prepare`` and ``blocks_recurrence`` for every sequence of more than SHORT tokens."""
    T, HV, K, V, packed = r.T, r.HV, r.K, r.V, r.cu_seqlens is not None
    KP, config, slots = padded(K), prompts.config, prompts.slots
    rows = ROWS.value
    planes = b.scratch("planes", (slots, HV, PLANES.value, rows, KP), torch.float16)
    squares = b.scratch("squares", (slots, HV, 2, rows, rows), torch.float16)
    factors = b.scratch("factors", (slots, HV, 3 * rows + KP), torch.float32)
    shared = {
        "planes": planes, "squares": squares, "factors": factors, "o": o, "cu_seqlens": r.cu_seqlens,
        "indices": r.ssm_state_indices, "T": T, "N": r.N, "blocks": -(-T // rows),
        **_strides(packed, o=o), "s_ov": o.stride(3),
        "s_index": 0 if r.ssm_state_indices is None else r.ssm_state_indices.stride(0),
    }  # fmt: skip
    # Packed: whatever the kernel ahead is, this one may start before it ends.
    overlap = {"OVERLAP": choice.overlap, "launch_pdl": choice.overlap and packed}
    constants = {
        "K": K, "V": V, "KP": KP, "VP": power_of_two(V), "EXACT_OUT": o.dtype != torch.bfloat16,
        "BOUNDED": prompts.bounded, "TERMS": prompts.terms, "STAGES": PREPARE_STAGES,
    }  # fmt: skip
    b.launch(
        blocks_prepare, (slots * HV, 1, 1), 1, _options(r) | constants | overlap, **_rows(r), **shared, **_numbers(r),
        **_strides(packed, q=r.q, k=r.k, g=r.g, b=r.beta),
    )  # fmt: skip
    s_in, s_ih, I_K, I_V = state_strides(r.initial_state, r.state_v_first)
    s_fn, s_fh, F_K, F_V = state_strides(final_state, r.state_v_first)
    constants = {
        "HV": HV, "K": K, "V": V, "KP": KP, "BV": config.block_v, "I_K": I_K, "I_V": I_V, "F_K": F_K, "F_V": F_V,
        "STAGES": RECURRENCE_STAGES, "STEP": prompts.step, "enable_fp_fusion": False, "OVERLAP": choice.overlap,
        "launch_pdl": choice.overlap,
    }  # fmt: skip
    b.launch(
        blocks_recurrence, (prompts.sequences * HV * -(-V // config.block_v), 1, 1), config.num_warps, constants,
        **shared, v=r.v, initial_state=r.initial_state, final_state=final_state,
        **_strides(packed, v=r.v), s_in=s_in, s_ih=s_ih, s_fn=s_fn, s_fh=s_fh, pad_slot_id=r.pad_slot_id,
    )  # fmt: skip

"""Host side of ``fused_recurrent_kda``: configurations, launches, and the backward (the one of ``chunk_kda``).

Sequences of at most SHORT tokens, and all drafts, are one launch of ``recurrent``, longer ones two of the kernels for
prompts. Dense sequences are all of one kind; packed ones may be of both, and only the device knows: where they have
more than SHORT tokens together, all three kernels are launched, and each passes over what is not its own. In steps the
later two find nothing: they start before the first one ends, and of the last one no more programs than run at once.
Dense steps with many states in bfloat16, stored K first, are one of ``recurrent_step`` on Hopper.

Nothing waits for the device, so that a call can be captured in a CUDA graph whose replays read whatever the indices
hold by then. Inputs are read where they lie, at any stride of batch, token and head; one whose last dimension is not
contiguous is copied first, and so are parameters and boundaries with gaps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import triton
from torch import Tensor

from kda_core.request import BackwardResult, ForwardResult, Request
from kda_core.triton_lib.arguments import LEAST_BOUNDED_DECAY, contiguous, gate_kind, rows_contiguous, state_strides
from kda_core.triton_lib.layout import padded
from kda_core_nvidia.launch import INTERPRET, Launcher, chip, on_device
from kda_core_nvidia.plan import new_result, new_scratch, planned
from kda_core_nvidia.recurrent import recurrent
from kda_core_nvidia.recurrent_blocks import PLANES, ROWS, SHORT
from kda_core_nvidia.recurrent_blocks_prepare import blocks_prepare
from kda_core_nvidia.recurrent_blocks_recurrence import blocks_recurrence
from kda_core_nvidia.recurrent_step import COLUMNS, SIZE, recurrent_step

_recurrent = Launcher(recurrent)
_recurrent_step = Launcher(recurrent_step)
_blocks_prepare = Launcher(blocks_prepare)
_blocks_recurrence = Launcher(blocks_recurrence)


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Launch configuration of ``recurrent``.

    Attributes:
        block_v: value channels of a tile.
        num_warps: warps of a program.
        row_bytes: V first: how much of a row neighbouring lanes read at once; the rest lies in registers.
        eviction: policy of the load of the states. With "evict_last" a state is still in the L2 cache when it is
            written back, and lines leave the cache in the order in which they were written, which memory is faster at;
            a few states fit the cache anyway.
        registers: most of a thread for one token a call and 65 to 128 key channels; 0: what ptxas takes by itself, with
            which it loads a quarter of a state when half of the arithmetic is done. That costs a fifth where there are
            few programs, and nothing where there are many.
    """

    block_v: int
    num_warps: int
    row_bytes: int = 128
    eviction: str = ""
    registers: int = 0


# Measured on an H200 at K = V = 128, H = 32: one step at N = 1 to 512 with float32 and bfloat16 pools, T = 2 to 8 at
# N = 1 to 64. One tile for each layout and dtype, whatever the number of sequences and tokens: with another tile sums
# are taken in another order, and how many states there are must not show in any bit of a result. Only V first may a
# tile have more rows or fewer: each is summed on its own, by the same threads in the same order.
_CONFIGS = {
    # (V first, bfloat16): (the least states N · HV for it, the configuration), by number of states
    (False, False): (
        (0, RecurrentConfig(64, 2, 128, "evict_last")),
        (65, RecurrentConfig(64, 2)),
        (513, RecurrentConfig(64, 2, 128, "evict_last")),
    ),
    (False, True): ((0, RecurrentConfig(32, 1)), (1025, RecurrentConfig(32, 1, 128, "evict_last"))),
    (True, False): (
        (0, RecurrentConfig(16, 1, 256, "evict_last", 152)),
        (65, RecurrentConfig(8, 1, 256, registers=96)),
        (513, RecurrentConfig(16, 1, 256, "evict_last", 152)),
        (4097, RecurrentConfig(16, 1, 256, "evict_last")),
    ),
    (True, True): (
        (0, RecurrentConfig(8, 1, 128, "evict_last")),
        (65, RecurrentConfig(8, 1)),
        (513, RecurrentConfig(16, 1, 128, "evict_last")),
    ),
}


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Launch configuration of ``recurrent_step``: registers of a thread, parts in which a state is stored (or 0)."""

    registers: int
    parts: int


STEP_WARPS = 4
"""Of ``recurrent_step``: together they load whole rows of a state."""

# Measured as the tables above were, for bfloat16 K first; ``recurrent`` is faster for fewer states, and V first.
_STEP_CONFIGS = ((256, StepConfig(80, 0)), (8192, StepConfig(80, 4)))
"""(the least states N · HV for it, the configuration), by number of states."""


@dataclass(frozen=True, slots=True)
class BlocksConfig:
    """Launch configuration of ``blocks_recurrence``: value channels of a program, and its warps."""

    block_v: int
    num_warps: int


PREPARE_STAGES, RECURRENCE_STAGES = 4, 2
"""Depths of the pipelines of loads of ``blocks_prepare`` (which has one warp) and ``blocks_recurrence``."""


@cache
def blocks_config(major: int, K: int, V: int) -> BlocksConfig:
    """Configuration of a prompt for chips of compute capability ``major``; it depends on no number of sequences."""
    if K > 128:
        # Four warps share the channels: the state of one would not fit its registers.
        return BlocksConfig(16, 4)
    if major != 9:
        # Only wgmma holds more without spills.
        return BlocksConfig(16, 2)
    block_v = min(padded(V), 64)
    return BlocksConfig(block_v, block_v // 16)


@cache
def recurrent_config(
    states: int, K: int, V: int, v_first: bool, state_dtype: torch.dtype, given: bool = True
) -> RecurrentConfig:
    """Configuration for ``states`` = N · HV states; how many there are decides over nothing that shows in a result.

    Without a given state there is none to load, and triton 3.6 finds the large tile no layout without spills.
    """
    table = _CONFIGS[v_first, state_dtype == torch.bfloat16]
    config = [c for least, c in table if states >= least][-1]
    if triton.next_power_of_2(K) != 128:
        # That tiles of several sizes sum alike has been seen there only, and bounds on registers are for its tiles.
        config = replace(config, block_v=table[-1][1].block_v, registers=0)
    if not given and not v_first:
        config = RecurrentConfig(16, 1)
    block_v = config.block_v
    if K > 128:
        # A thread holds a share of the state, and K first also a share of every row, which grows with K as well.
        block_v //= 2 if v_first else 4
    return replace(config, block_v=min(block_v, triton.next_power_of_2(V)))


def _overlap(device: torch.device) -> bool:
    """Whether kernels of a call may start before the one ahead of them ends (programmatic dependent launch)."""
    return not INTERPRET and chip(device).capability[0] >= 9


def _strides(x: Tensor, packed: bool) -> tuple[int, int, int]:
    """Strides by sequence (a token's, when sequences are found by their first token), token and head."""
    s_b, s_t, s_h = x.stride()[:3]
    return (s_t if packed else s_b), s_t, s_h


def _allocated(request: Request) -> tuple[Tensor, Tensor | None]:
    """The output, and the tensor that final states are written to, if any."""
    q = request.q
    o = request.out
    if o is None:
        o = new_result(q, (request.B, request.T, request.HV, request.V))
    if request.inplace_final_state:
        return o, request.initial_state
    if not request.output_final_state:
        return o, None
    return o, new_result(q, request.state_shape, request.state_dtype)


_INPUTS = attrgetter(
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"),
    *("ssm_state_indices", "num_accepted_tokens", "out"),
)


def _forward(request: Request) -> dict[str, Tensor | None]:
    """Launch; the result's tensors by name."""
    o, final_state = _allocated(request)
    # A slot for every token: such calls are drafts, which are short.
    every_token = request.ssm_state_indices is not None and request.ssm_state_indices.shape[1:].numel() > 1
    blocks = request.T > SHORT.value and not every_token and request.num_accepted_tokens is None
    if _step_serves(request, o, final_state):
        _launch_step(request, o, final_state)
    elif request.cu_seqlens is not None or not blocks:
        _launch(request, o, final_state, blocks)
    if blocks:
        _launch_blocks(request, o, final_state)
    return {"o": o, "final_state": final_state}


def recurrent_forward(request: Request) -> ForwardResult:
    """Run ``fused_recurrent_kda`` for a call that the plugin accepted."""
    with on_device(request.device):
        made = planned(request, "forward", _INPUTS(request), lambda: _forward(request))
    return ForwardResult(o=made["o"], final_state=None if request.inplace_final_state else made["final_state"])


def _rows_aligned(x: Tensor) -> bool:
    """Whether triton sees that rows of ``x`` [N, 1, H, K] begin at multiples of 16 bytes: its layout goes by that."""
    s_n, _, s_h, _ = x.stride()
    return not (s_n & 15 or s_h & 15 or x.data_ptr() & 15)


def _tiles_aligned(state: Tensor) -> bool:
    """Whether every row of a state can be copied 16 bytes at a time, and so that triton sees it."""
    s_n, s_h, s_row, s_last = state.stride()
    return s_last == 1 and not (s_n & 15 or s_h & 15 or s_row & 7 or state.data_ptr() & 15)


def _step_serves(request: Request, o: Tensor, final_state: Tensor | None) -> bool:
    """Whether ``recurrent_step`` takes a call; its results are the bits of ``recurrent``."""
    state = request.initial_state
    return (
        request.T == 1
        and state is not None
        and state.dtype == torch.bfloat16
        and not request.state_v_first
        and request.K == request.V == SIZE.value
        and request.N * request.HV >= _STEP_CONFIGS[0][0]
        and request.cu_seqlens is None
        and request.num_accepted_tokens is None
        and (request.ssm_state_indices is None or request.ssm_state_indices.shape[1:].numel() == 1)
        and o.stride(3) == 1
        and _rows_aligned(request.q)
        and _rows_aligned(request.k)
        and _rows_aligned(request.g)
        and _tiles_aligned(state)
        and (final_state is None or final_state is state or _tiles_aligned(final_state))
        and chip(request.device).capability[0] == 9
        and not INTERPRET
    )


def _launch_step(request: Request, o: Tensor, final_state: Tensor | None) -> None:
    """Run ``recurrent_step``."""
    q, k, v, g = (rows_contiguous(x) for x in (request.q, request.k, request.v, request.g))
    beta, indices = request.beta, request.ssm_state_indices
    states = request.N * request.HV
    gate = gate_kind(request)
    config = [c for least, c in _STEP_CONFIGS if states >= least][-1]
    s_in, s_ih, I_K, _ = state_strides(request.initial_state, False)
    s_fn, s_fh, F_K, _ = state_strides(final_state, False)
    strides = [s for x in (q, k, v, g, beta, o) for s in (x.stride(0), x.stride(2))]
    arguments = (
        q,
        k,
        v,
        g,
        beta,
        contiguous(request.A_log) if gate != "none" else None,
        contiguous(request.dt_bias) if gate != "none" else None,
        request.initial_state,
        final_state,
        o,
        indices,
        float(request.scale),
        float(request.lower_bound or 0.0),
        *strides,
        s_in,
        s_ih,
        s_fn,
        s_fh,
        0 if indices is None else indices.stride(0),
        request.pad_slot_id,
    )
    constants = {
        "HV": request.HV,
        "GROUP": request.HV // request.H,
        "I_ROW": I_K,
        "F_ROW": F_K,
        "GATE": gate,
        "L2NORM": request.use_qk_l2norm_in_kernel,
        "SIGMOID": request.use_beta_sigmoid_in_kernel,
        "NEG_EIGVAL": request.allow_neg_eigval,
        "PARTS": config.parts,
        "enable_fp_fusion": False,
        "maxnreg": config.registers,
    }
    programs = states * (SIZE.value // (STEP_WARPS * COLUMNS.value))
    _recurrent_step((programs, 1, 1), arguments, constants, STEP_WARPS)


def _launch(request: Request, o: Tensor, final_state: Tensor | None, short_only: bool) -> None:
    """Run ``recurrent``; ``short_only``: packed sequences of more than SHORT tokens are left to others."""
    q, k, v, g = (rows_contiguous(x) for x in (request.q, request.k, request.v, request.g))
    beta, initial_state = request.beta, request.initial_state
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    N, T = request.N, q.shape[1]
    packed = request.cu_seqlens is not None
    gate = gate_kind(request)
    indices, accepted = request.ssm_state_indices, request.num_accepted_tokens
    s_index, s_slot, width = 0, 0, 1
    if indices is not None:
        s_index = indices.stride(0)
        if indices.dim() == 2:
            s_slot, width = indices.stride(1), indices.shape[1]
    v_first, state_dtype = request.state_v_first, request.state_dtype
    config = recurrent_config(N * HV, K, V, v_first, state_dtype, initial_state is not None)
    KP = triton.next_power_of_2(K)
    s_in, s_ih, I_K, I_V = state_strides(initial_state, v_first)
    s_fn, s_fh, F_K, F_V = state_strides(final_state, v_first)
    # With packed sequences one more set of programs zeroes the rows behind the last one.
    programs = (N + packed) * HV * -(-V // config.block_v)
    # The kernels for prompts follow, and mostly find nothing: they can do so while the last programs run.
    leads = short_only and _overlap(request.device)
    arguments = (
        q,
        k,
        v,
        g,
        beta,
        contiguous(request.A_log) if gate != "none" else None,
        contiguous(request.dt_bias) if gate != "none" else None,
        initial_state,
        final_state,
        o,
        contiguous(request.cu_seqlens),
        indices,
        accepted,
        float(request.scale),
        float(request.lower_bound or 0.0),
        T,
        N,
        *_strides(q, packed),
        *_strides(k, packed),
        *_strides(v, packed),
        *_strides(g, packed),
        *_strides(beta, packed),
        *_strides(o, packed),
        o.stride(3),
        s_in,
        s_ih,
        s_fn,
        s_fh,
        s_index,
        s_slot,
        0 if accepted is None else accepted.stride(0),
        width,
        request.pad_slot_id,
    )
    constants = {
        "HV": HV,
        "GROUP": HV // H,
        "K": K,
        "V": V,
        "KP": KP,
        "VP": triton.next_power_of_2(V),
        "KS": min(KP, config.row_bytes // state_dtype.itemsize) if v_first else KP,
        "BV": config.block_v,
        "I_K": I_K,
        "I_V": I_V,
        "F_K": F_K,
        "F_V": F_V,
        "GATE": gate,
        "L2NORM": request.use_qk_l2norm_in_kernel,
        "SIGMOID": request.use_beta_sigmoid_in_kernel,
        "NEG_EIGVAL": request.allow_neg_eigval,
        "V_FIRST": v_first,
        "IN_PLACE": request.inplace_final_state,
        "EVERY_TOKEN": width > 1,
        "ONE_TOKEN": T == 1 and not packed,
        "MOST": SHORT.value if short_only else 0,
        "EVICTION": config.eviction,
        "LEADS": leads,
        "enable_fp_fusion": False,
    }
    if config.registers and constants["ONE_TOKEN"]:
        constants["maxnreg"] = config.registers
    _recurrent((programs, 1, 1), arguments, constants, config.num_warps)


def _launch_blocks(request: Request, o: Tensor, final_state: Tensor | None) -> None:
    """Run ``blocks_prepare`` and ``blocks_recurrence`` for every sequence of more than SHORT tokens."""
    q, k, v, g = (rows_contiguous(x) for x in (request.q, request.k, request.v, request.g))
    beta, initial_state = request.beta, request.initial_state
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    N, T = request.N, q.shape[1]
    packed = request.cu_seqlens is not None
    gate = gate_kind(request)
    indices = request.ssm_state_indices
    KP = padded(K)
    major = chip(request.device).capability[0]
    config = blocks_config(major, K, V)
    overlap = _overlap(request.device)
    blocks = -(-T // ROWS.value)
    sequences, slots = N, N * blocks
    if packed:
        # Bounds for sequences of at least SHORT + 1 tokens: ROWS + 1 of them fill two blocks.
        sequences, slots = min(N, T // (SHORT.value + 1)), 2 * T // (ROWS.value + 1)
    planes = new_scratch(q, (slots, HV, PLANES.value, ROWS.value, KP), torch.float16)
    squares = new_scratch(q, (slots, HV, 2, ROWS.value, ROWS.value), torch.float16)
    factors = new_scratch(q, (slots, HV, 3 * ROWS.value + KP), torch.float32)
    bounds = contiguous(request.cu_seqlens)
    s_index = 0 if indices is None else indices.stride(0)
    arguments: tuple[Any, ...] = (
        q,
        k,
        g,
        beta,
        contiguous(request.A_log) if gate != "none" else None,
        contiguous(request.dt_bias) if gate != "none" else None,
        planes,
        squares,
        factors,
        o,
        bounds,
        indices,
        float(request.scale),
        float(request.lower_bound or 0.0),
        T,
        N,
        blocks,
        *_strides(q, packed),
        *_strides(k, packed),
        *_strides(g, packed),
        *_strides(beta, packed),
        *_strides(o, packed),
        o.stride(3),
        s_index,
        request.pad_slot_id,
    )
    constants = {
        "HV": HV,
        "GROUP": HV // H,
        "K": K,
        "V": V,
        "KP": KP,
        "VP": triton.next_power_of_2(V),
        "GATE": gate,
        "L2NORM": request.use_qk_l2norm_in_kernel,
        "SIGMOID": request.use_beta_sigmoid_in_kernel,
        "NEG_EIGVAL": request.allow_neg_eigval,
        "EXACT_OUT": o.dtype != torch.bfloat16,
        "BOUNDED": gate == "bounded" and request.lower_bound >= LEAST_BOUNDED_DECAY,
        "TERMS": 1 if INTERPRET else 3,
        "STAGES": PREPARE_STAGES,
        "OVERLAP": overlap,
        "launch_pdl": overlap and packed,
        "enable_fp_fusion": False,
    }
    _blocks_prepare((slots * HV, 1, 1), arguments, constants, 1)
    s_in, s_ih, I_K, I_V = state_strides(initial_state, request.state_v_first)
    s_fn, s_fh, F_K, F_V = state_strides(final_state, request.state_v_first)
    states = (v, initial_state, final_state, o)
    strides = (*_strides(v, packed), *_strides(o, packed), o.stride(3), s_in, s_ih, s_fn, s_fh)
    constants = {
        "HV": HV,
        "K": K,
        "V": V,
        "KP": KP,
        "BV": config.block_v,
        "I_K": I_K,
        "I_V": I_V,
        "F_K": F_K,
        "F_V": F_V,
    }
    heads = HV * -(-V // config.block_v)
    where = (bounds, indices, T, N, blocks)
    arguments = (planes, squares, factors, *states, *where, *strides, s_index, request.pad_slot_id)
    step = 0
    if packed and T <= SHORT.value * N:
        # There may be as many long sequences as that, but most likely there are few or none: as many programs as run
        # at once, which is two on a multiprocessor of Hopper.
        sequences = step = min(sequences, max(1, 2 * chip(request.device).multiprocessors // heads))
    constants |= {"STAGES": RECURRENCE_STAGES, "STEP": step, "OVERLAP": overlap}
    constants |= {"launch_pdl": overlap, "enable_fp_fusion": False}
    _blocks_recurrence((sequences * heads, 1, 1), arguments, constants, config.num_warps)


def recurrent_backward(request: Request) -> BackwardResult:
    """Gradients of ``fused_recurrent_kda``: the same function as ``chunk_kda``, so the same backward.

    What that function alone has (a pool, ``num_accepted_tokens``) is not differentiable and never comes this far.
    """
    from kda_core_nvidia.chunk_backward import chunk_backward

    own = replace(request, op="chunk_kda")
    own.__dict__["memo"] = request.memo
    return chunk_backward(own)

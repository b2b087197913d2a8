"""Which kernels serve a call of ``fused_recurrent_kda``, with which configurations: ``choose`` for decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kda_core.request import DecodeStepRequest, Request
from kda_core.triton_lib.arguments import LEAST_BOUNDED_DECAY, gate_kind
from kda_core.triton_lib.layout import padded, power_of_two
from kda_core.triton_lib.plan import View
from kda_core_nvidia.choose.chip import Chip
from kda_core_nvidia.recurrent_blocks import ROWS, SHORT
from kda_core_nvidia.recurrent_step import SIZE


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
        registers: most of a thread for one token a call and 65 to 128 key channels; 0: as many as ptxas takes, with
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
RECURRENT_CONFIGS = {
    # (V first, 16 bits): (the least states N · HV for it, the configuration), by number of states
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


# Measured as the tables above were, for bfloat16 K first; ``recurrent`` is faster for fewer states, and V first.
STEP_CONFIGS = ((256, StepConfig(80, 0)), (8192, StepConfig(80, 4)))
"""(the least states N · HV for it, the configuration), by number of states."""


DRAFT_TOKENS = 8
"""Tokens of a draft, and of one that is committed, that ``recurrent_draft`` takes at most."""


MANY_DRAFTS = 512
"""States N · HV in bfloat16 from which a program has a whole head, whose second half loads during the first."""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Launch configuration of ``recurrent_draft`` and ``layer_step``.

    Attributes:
        registers: most of a thread: four programs run on a multiprocessor with 128.
        staged: states come by way of shared memory, in whole lines, of which a warp reads a half or less.
        turns: blocks of value channels of a program, one after the other.
    """

    registers: int
    staged: bool
    turns: int = 1


MANY_LAYER_DRAFTS = 256
"""The same for drafts of a layer, which always have a whole head."""


# Measured on an H200 at H = 32, N = 1 to 256. Where a warp reads whole rows of float32, registers for two programs a
# multiprocessor are faster than shared memory for three.
LAYER_STEPS = {
    (False, False): ((0, DraftConfig(96, True, 2)),),
    (False, True): ((0, DraftConfig(64, True)), (256, DraftConfig(80, True, 2)), (1024, DraftConfig(64, True))),
    (True, False): ((0, DraftConfig(128, False)),),
    (True, True): ((0, DraftConfig(80, True)), (128, DraftConfig(96, True, 2))),
}
"""Configurations of ``layer_step`` by (V first, states in 16 bits), each with the least states N · HV for it."""


def blocks_config(chip: Chip, K: int, V: int) -> tuple[int, int]:
    """Value channels and warps of a program of ``blocks_recurrence``; they depend on no number of sequences."""
    if K > 128:
        # Four warps share the channels: the state of one would not fit its registers.
        return 16, 4
    if chip.major != 9:
        # Only wgmma holds more without spills.
        return 16, 2
    block_v = min(padded(V), 64)
    return block_v, block_v // 16


def recurrent_config(
    states: int, K: int, V: int, v_first: bool, state_dtype: torch.dtype, given: bool = True
) -> RecurrentConfig:
    """Configuration for ``states`` = N · HV states; how many there are decides over nothing that shows in a result.

    Without a given state there is none to load, and triton 3.6 finds the large tile no layout without spills.
    """
    table = RECURRENT_CONFIGS[v_first, state_dtype.itemsize == 2]
    config = [c for least, c in table if states >= least][-1]
    if power_of_two(K) != 128:
        # That tiles of several sizes sum alike has been seen there only, and bounds on registers are for its tiles.
        config = replace(config, block_v=table[-1][1].block_v, registers=0)
    if not given and not v_first:
        config = RecurrentConfig(16, 1)
    block_v = config.block_v
    if K > 128:
        # A thread holds a share of the state, and K first also a share of every row, which grows with K as well.
        block_v //= 2 if v_first else 4
    return replace(config, block_v=min(block_v, power_of_two(V)))


def draft_chunk(T: int, dtype: torch.dtype) -> int:
    """Tokens of a draft that are one chunk; 0: they run token by token, with the bits of steps."""
    return T if dtype.itemsize == 2 else 0


def draft_config(r: Request) -> DraftConfig:
    """Configuration of ``recurrent_draft``, measured on an H200 at H = 32, N = 1 to 128; no bit of a result shows it.

    float32 states and the rows of 8 tokens and 8 records leave room for three programs in shared memory rather than
    four.
    """
    half = r.state_dtype.itemsize == 2
    tokens = r.T if r.commit is None else max(r.T, r.commit.shape[1])
    staged = half or (not r.state_v_first and tokens <= 4)
    return DraftConfig(128, staged, 2 if half and r.N * r.HV >= MANY_DRAFTS else 1)


def _rows_aligned(x: View) -> bool:
    """Whether triton sees that rows of ``x`` [N, T, H, K] begin at multiples of 16 bytes: its layout goes by that."""
    s_n, s_t, s_h, _ = x.strides
    return x.aligned and not (s_n & 15 or s_h & 15 or (x.shape[1] > 1 and s_t & 15))


def _tiles_aligned(state: View | None) -> bool:
    """Whether every row of a state can be copied 16 bytes at a time, and so that triton sees it; True for None."""
    if state is None:
        return True
    s_n, s_h, s_row, s_last = state.strides
    return s_last == 1 and state.aligned and not (s_n & 15 or s_h & 15 or s_row & 7)


def _dense_on_hopper(r: Request, chip: Chip) -> bool:
    """Whether a call is one for steps and drafts, but for its states' dtype and slots."""
    return (
        chip.hopper
        and r.K == r.V == SIZE.value
        and r.cu_seqlens is None
        and r.num_accepted_tokens is None
        and r.has_initial_state is None
        and _tiles_aligned(r.initial_state)
    )


def _summed_alike(r: Request) -> bool:
    """Whether ``recurrent`` takes its sums in the order in which the kernels for steps and drafts take them."""
    return all(_rows_aligned(x) for x in (r.q, r.k, r.g))


def step_serves(r: Request, chip: Chip, least: int) -> bool:
    """Whether ``recurrent_step`` takes a call of at least ``least`` states; its results are the bits of ``recurrent``.

    A final state that the call allocates is contiguous and aligned.
    """
    state, indices = r.initial_state, r.ssm_state_indices
    return (
        r.T == 1
        and state is not None
        and state.dtype == torch.bfloat16
        and not r.state_v_first
        and r.N * r.HV >= least
        and r.final_state_indices is None
        and r.records is None
        and (indices is None or indices.dim() == 1 or indices.shape[1] == 1)
        and (r.out is None or r.out.strides[3] == 1)
        and _summed_alike(r)
        and _dense_on_hopper(r, chip)
    )


def draft_serves(r: Request, chip: Chip) -> bool:
    """Whether ``recurrent_draft`` takes a call; from float32 states its results are the bits of ``recurrent``.

    From bfloat16 states tokens are one chunk (``draft_chunk``), and trees are drafts like others. There it takes every
    draft of so many tokens, however its tensors lie and whatever comes first, since no other kernel has its bits.
    """
    state = r.initial_state
    fits = (
        r.records is not None
        and not r.update_state
        and state is not None
        and state.dtype in (torch.float32, torch.bfloat16)
        and 0 < r.T <= DRAFT_TOKENS
        and r.ssm_state_indices is not None
        and _dense_on_hopper(r, chip)
    )
    if not fits or draft_chunk(r.T, r.state_dtype):
        return fits
    plain = r.commit_path is None and r.parents is None and (r.out is None or r.out.strides[3] == 1)
    return plain and not commits_apart(r) and _summed_alike(r)


def commits_apart(r: Request) -> bool:
    """Whether more tokens may be committed first than ``recurrent_draft`` takes."""
    counts = [x.shape[1] for x in (r.commit, r.commit_path) if x is not None]
    return max(counts, default=0) > DRAFT_TOKENS


def choose_layer_step(r: DecodeStepRequest, chip: Chip) -> DraftConfig | None:
    """How one kernel takes a call of ``kda_decode_step``, ``layer_step`` or ``recurrent_draft``; None: neither does.

    No bit of a result shows which one it was.
    """
    state, indices = r.state, r.indices
    N, T, HV, K = r.g.shape
    serves = (
        r.H == HV
        and r.V == K == SIZE.value
        and 2 <= r.weight.shape[1] <= 4
        and r.accepted is None
        and (indices is None or indices.dim() == 1 or indices.shape[1] == 1)
        and state.dtype in (torch.float32, torch.bfloat16)
        and _tiles_aligned(state)
        and chip.hopper
    )
    if not serves:
        return None
    half = state.dtype.itemsize == 2
    if r.records is None:
        table = LAYER_STEPS[r.state_v_first, half]
        return [c for least, c in table if N * HV >= least][-1] if T == 1 else None
    if max(T, 0 if r.commit is None else r.commit.shape[1]) > DRAFT_TOKENS:
        return None
    if half and N * HV >= MANY_LAYER_DRAFTS:
        return DraftConfig(112, True, 2)
    return DraftConfig(128, half or not r.state_v_first)


@dataclass(frozen=True, slots=True)
class Prompts:
    """How sequences of more than SHORT tokens run.

    Attributes:
        block_v, num_warps: of a program of ``blocks_recurrence``.
        slots: blocks of rows; a bound when packed.
        sequences: sequences that ``blocks_recurrence`` has programs for; a bound when packed.
        step: packed: a program takes every ``step``-th long sequence; 0: one each.
        bounded: decays are at least exp(−5) a row.
        terms: 16-bit terms of a decay.
    """

    block_v: int
    num_warps: int
    slots: int
    sequences: int
    step: int
    bounded: bool
    terms: int


@dataclass(frozen=True, slots=True)
class RecurrentChoice:
    """How a call of ``fused_recurrent_kda`` runs.

    Attributes:
        step: ``recurrent_step`` takes it; None: it does not.
        draft: ``recurrent_draft`` takes it; None: it does not.
        short: ``recurrent`` takes its short sequences, or all; None: it has no work.
        prompts: the kernels for long sequences; None: they have no work.
        overlap: kernels of the call may start before the one ahead of them ends.
    """

    step: StepConfig | None
    short: RecurrentConfig | None
    prompts: Prompts | None
    overlap: bool
    draft: DraftConfig | None = None


def choose_recurrent(r: Request, chip: Chip) -> RecurrentChoice:
    """How a call of ``fused_recurrent_kda`` runs on ``chip``; the request is metadata alone."""
    states = r.N * r.HV
    # A slot, or a record, for every token: such calls are drafts, which are short.
    draft = r.writes_every_token or r.num_accepted_tokens is not None or r.records is not None
    long = r.T > SHORT.value and not draft
    step = short = None
    taken = draft_config(r) if draft_serves(r, chip) else None
    if step_serves(r, chip, STEP_CONFIGS[0][0]):
        step = [c for least, c in STEP_CONFIGS if states >= least][-1]
    elif taken is None and (r.cu_seqlens is not None or not long):
        short = recurrent_config(states, r.K, r.V, r.state_v_first, r.state_dtype, r.initial_state is not None)
    return RecurrentChoice(step, short, _prompts(r, chip) if long else None, chip.overlaps, taken)


def _prompts(r: Request, chip: Chip) -> Prompts:
    N, T = r.N, r.T
    block_v, warps = blocks_config(chip, r.K, r.V)
    sequences, slots, step = N, N * -(-T // ROWS.value), 0
    if r.cu_seqlens is not None:
        # Bounds for sequences of at least SHORT + 1 tokens: ROWS + 1 of them fill two blocks.
        sequences, slots = min(N, T // (SHORT.value + 1)), 2 * T // (ROWS.value + 1)
        if T <= SHORT.value * N:
            # There may be as many long sequences as that, but most likely there are few or none: as many programs as
            # run at once, which is two on a multiprocessor of Hopper.
            heads = r.HV * -(-r.V // block_v)
            sequences = step = min(sequences, max(1, 2 * chip.multiprocessors // heads))
    bounded = gate_kind(r) == "bounded" and r.lower_bound >= LEAST_BOUNDED_DECAY
    return Prompts(block_v, warps, slots, sequences, step, bounded, 1 if chip.interpreted else 3)

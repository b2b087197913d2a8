"""How a forward of ``chunk_kda`` runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import decays_bounded, has_contiguous_rows
from kda_core.triton_lib.layout import CHUNK, padded, slots
from kda_core.triton_lib.segments import in_pieces
from kda_core_nvidia.choose import chunk
from kda_core_nvidia.choose.backward import keeps_states
from kda_core_nvidia.choose.chip import Chip
from kda_core_nvidia.choose.fragments import at_once, cut_for, fragment_slots


def recurrence_config(chip: Chip, dtype: torch.dtype, K: int, V: int, heads: int, h: bool = False) -> chunk.BlockConfig:
    """Configuration of ``recurrence``.

    Blocks of 128 value channels read the keys' tiles half as often. Only wgmma holds their state without spills, and
    with few sequences and heads they would leave most of the chip idle.

    Args:
        heads: sequences times value heads.
        h: whether states are stored at chunks: a whole block then passes through shared memory.
    """
    wide = padded(K) > 128
    if dtype == torch.float32:
        return chunk.BlockConfig(16, 8, 1) if wide else chunk.BlockConfig(16, 4, 2)
    if chip.major == 10:
        # Fewer warps spill there, and so do blocks of 64 where the state takes all of them.
        return chunk.BlockConfig(32, 8, 2) if wide else chunk.BlockConfig(min(padded(V), 64), 8, 3)
    if wide:
        # wgmma holds the state of 128 channels, and each tile of keys is read half as often.
        many = chip.major == 9 and padded(V) >= 128 and not h
        return chunk.BlockConfig(128, 8, 3) if many else chunk.BlockConfig(min(padded(V), 64), 8, 2)
    if chip.major == 9 and padded(V) >= 128 and chip.load(heads * -(-V // 128)) > 0.6:
        return chunk.BlockConfig(128, 8, 3)
    return chunk.BlockConfig(min(padded(V), 64), 4, 3)


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """How a forward of ``chunk_kda`` runs.

    Attributes:
        segment_rows: rows of each segment; 0: sequences, or fragments of a call in halves, are not cut.
        saved_slots: slots of what is saved for a backward that recomputes.
        descriptors: the plain recurrence reads keys through descriptors.
        transitions: of the kernels that join segments.
        keeps_states: the recurrence stores z and states for a backward.
        overlap: the recurrence for Hopper may start before ``prepare`` ends.
        most_programs: of the recurrence where ``prepare`` finishes most sequences: two rounds.
    """

    prepare: chunk.PrepareConfig | chunk.PrepareHopperConfig
    recurrence: chunk.BlockConfig | chunk.HopperConfig
    precision: chunk.Precision
    segment_rows: int
    saved_slots: int
    descriptors: bool
    transitions: chunk.BlockConfig | chunk.TransitionsHopperConfig
    keeps_states: bool
    overlap: bool
    most_programs: int

    @property
    def finishes(self) -> bool:
        """Whether ``prepare_hopper`` finishes sequences of one chunk or two, and the recurrence leaves them alone."""
        return isinstance(self.prepare, chunk.PrepareHopperConfig) and self.prepare.finishes

    @property
    def follows(self) -> bool:
        """Whether the recurrence follows ``prepare_hopper`` pair by pair."""
        return isinstance(self.prepare, chunk.PrepareHopperConfig) and self.prepare.programs > 0


def finishing(r: Request, prepare: chunk.PrepareHopperConfig, chip: Chip) -> chunk.PrepareHopperConfig:
    """``prepare_hopper`` for a call whose recurrence has a kernel for Hopper: finishes most sequences where it pays."""
    # A training step that keeps everything needs the keys.
    if (r.save_for_backward and r.disable_recompute) or not chunk.short(r, chunk.MOSTLY_ONE_PAIR):
        return prepare
    paired = chunk.short(r, chunk.MOSTLY_ONE_CHUNK)
    # Up to one program for each multiprocessor the recurrence is faster, since it has two where prepare has one.
    if r.N * r.HV <= (1 + paired) * chip.multiprocessors:
        return prepare
    prepare = replace(prepare, finishes=True, paired=paired)
    state = r.initial_state
    # With float32 decays, two programs and their states have no room.
    if r.g.dtype != torch.bfloat16 or state is None or state.dtype != torch.float32 or state.stride(-1) != 1:
        return prepare
    return replace(prepare, ahead=True, registers=255)


LEAST_FOLLOWED = 0.24
"""Programs of a recurrence that follows ``prepare``, at least, for each multiprocessor. Fewer are as fast without."""

_FOLLOWED = (((0.28, 0.31), 2, 0), ((0.4, 0.4), 3, 0), ((0.5, 0.5), 3, 1))
"""By such programs, at most, without a bound of decays and with one: programs of ``prepare_hopper`` on a
multiprocessor, and of those beside one of the recurrence, which takes twice the time then. With more programs
``prepare`` would have too few places."""


def followed(r: Request, prepare: chunk.PrepareHopperConfig, chip: Chip) -> chunk.PrepareHopperConfig:
    """``prepare_hopper`` for a call that is not cut: dense calls of some heads have a recurrence that follows it."""
    load = chip.load(2 * r.N * r.HV)
    dense = r.cu_seqlens is None and r.ssm_state_indices is None
    if not dense or load < LEAST_FOLLOWED or slots(r) * r.HV < 4 * chip.multiprocessors:
        return prepare
    for most, each, stay in _FOLLOWED:
        if load <= most[decays_bounded(r)]:
            return replace(prepare, programs=min(each, prepare.places) * chip.multiprocessors, stay=stay)
    return prepare


def choose_forward(request: Request, chip: Chip) -> ForwardChoice:
    """How a forward of ``chunk_kda`` runs on ``chip``; ``request`` is metadata alone."""
    fragments = bool(request.cp_context)
    rows, r, transitions = cut_for(request, chip)
    cut = in_pieces(r)
    K, V, dtype = r.K, r.V, r.q.dtype
    h, kept = request.return_intermediate_states, request.checkpoint_indices is not None
    KP, count, heads = padded(K), slots(cut), at_once(request, r) * r.HV
    v = r.v if has_contiguous_rows(r.v) else r.v.contiguous()
    keeps = r.save_for_backward and keeps_states(request, chip)
    if keeps or ((fragments or rows) and isinstance(transitions, chunk.TransitionsHopperConfig)):
        v = chunk.as_copied(v)
    hopper = not h and chunk.serves(chip, dtype, count, r.HV, KP, V, v)
    prepare = chunk.choose_prepare(cut, chip)
    if isinstance(prepare, chunk.PrepareHopperConfig) and hopper and V == K == 128 and not (fragments or rows or kept):
        prepare = finishing(r, prepare, chip)
        prepare = prepare if keeps else followed(r, prepare, chip)
    if hopper:
        recurrence = chunk.hopper_config("kept" if keeps else "recurrence", chip, KP, V, heads, chunk.short(r))
    else:
        recurrence = recurrence_config(chip, dtype, K, V, heads, h or kept)
    return ForwardChoice(
        prepare, recurrence, chunk.precision(dtype, chip), segment_rows=rows,
        saved_slots=fragment_slots(request) if fragments else chunk.saved_slots(request),
        descriptors=chip.descriptors and chunk.countable(count * r.HV * 3 * CHUNK), transitions=transitions,
        # Calls that are cut have another kernel ahead, which writes the initial states.
        keeps_states=keeps, overlap=chip.overlaps and not (fragments or rows), most_programs=4 * chip.multiprocessors,
    )  # fmt: skip

"""How a backward of ``chunk_kda`` runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import decays_bounded, has_contiguous_rows
from kda_core.triton_lib.layout import CHUNK, padded, slots
from kda_core.triton_lib.plan import View, changed, dense_view
from kda_core_nvidia.choose import chunk
from kda_core_nvidia.choose.chip import Chip
from kda_core_nvidia.choose.fragments import at_once, cut_for


@dataclass(frozen=True, slots=True)
class GradientsConfig:
    """Launch configuration of ``gradients``: channels of a program, value channels at a time, warps, stages."""

    block_k: int
    block_v: int
    num_warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class GradientsHopperConfig:
    """Launch configuration of ``gradients_hopper``: two programs share a multiprocessor's registers and memory."""

    num_warps: int = 4
    registers: int = 255


@dataclass(frozen=True, slots=True)
class GradientsPersistentConfig:
    """Launch configuration of ``gradients_hopper_persistent``: programs at most, and warps that multiply.

    There is a program for every multiprocessor, whose registers and shared memory it takes.
    """

    programs: int
    num_warps: int = 8


MILD = {torch.bfloat16: 160.0, torch.float16: 12.0, torch.float32: 0.0}
"""Log2 decay over a chunk up to which one reference point serves all its pairs (over fewer rows a part of that):
2^(+-MILD/2) leaves room for operands and sums in the dtype of the products. float32 keeps to the levels, whose
exponents are small where they matter."""


def mildest(dtype: torch.dtype, l2norm: bool) -> float:
    """``MILD`` for q and k as they come: without a norm float16's reach up to 4,094, as ``lift`` allows."""
    return 8.0 if dtype == torch.float16 and not l2norm else MILD[dtype]


def rows_readable(x: View) -> bool:
    """Whether the backward reads ``x`` [B, T, ..] as it lies: rows are contiguous, a tile's offsets fit 32 bits."""
    return (x.dim() == 3 or has_contiguous_rows(x)) and x.strides[1] * 128 < 2**31


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Tiles of the backward's plain kernels for one shape class; both recurrences are one launch."""

    recurrences: chunk.BlockConfig
    gradients: GradientsConfig


def backward_config(chip: Chip, dtype: torch.dtype, kp: int, vp: int, heads: int) -> BackwardConfig:
    """The configuration for head dimensions padded to ``kp`` and ``vp``; ``heads``: sequences times value heads."""
    arch = chip.arch
    if dtype == torch.float32:
        # Products in full precision run on scalar units: small tiles, many warps.
        small = chunk.BlockConfig(16 if kp > 128 else min(vp, 32), 8, 1)
        return BackwardConfig(small, GradientsConfig(16, min(vp, 32), 4, 1))
    bv = min(vp, 64)
    # A warp holds 16 channels of the transposed blocks. Two warps, so that the products stay with mma.sync: with wgmma
    # (four warps, no faster) ptxas 12.8 spills its descriptors and restores some from the stack pointer.
    # Two blocks of value channels: a loop's loads run ahead through shared memory, one body's take registers.
    gradients = GradientsConfig(min(kp, 32), min(64, max(16, vp // 2)), min(kp, 32) // 16, 3)
    if arch not in (90, 100, 103):
        # Products take both operands from registers there: less of the state to a warp, or nothing in flight.
        if kp > 128:
            return BackwardConfig(chunk.BlockConfig(16, 4, 2), gradients)
        return BackwardConfig(chunk.BlockConfig(bv, bv // 16, 1), gradients)
    if kp > 128:
        return BackwardConfig(chunk.BlockConfig(bv, 8, 2), gradients)
    recurrence = chunk.BlockConfig(bv, bv // 16, 3)
    if kp == 128 and vp >= 128 and chip.load(heads * (vp // 128)) >= _FULL_BACKWARD:
        # Enough programs to fill the chip with 128 value channels each.
        recurrence = chunk.BlockConfig(128, 8, 3)
    return BackwardConfig(recurrence, gradients)


_FULL_BACKWARD = 96 / 132
"""Load from which the backward's recurrences take blocks of 128 value channels (measured on an H200)."""

MANY = 8192
"""Slots times heads of a turn from which ``gradients`` gains more by descriptors than these cost the host."""

WHOLE = (None,)
"""All sequences in one turn."""

Turns = tuple[slice | None, ...]


def turns_of(r: Request, chip: Chip) -> Turns:
    """The sequences of a call by turns, so that states and their gradients are held for one turn at a time.

    Wide heads' states are more than half of a step's memory. Half of the batch at a time is as fast when it still has a
    program of the recurrences for every multiprocessor, and changes no result: no kernel looks beyond a sequence.
    """
    half, vp = -(-r.B // 2), padded(r.V)
    wide = padded(r.K) * vp > 128 * 128
    if r.cu_seqlens is None and r.B > 1 and wide and chip.load(r.B // 2 * r.HV * -(-vp // 128)) >= 1:
        return slice(0, half), slice(half, r.B)
    return WHOLE


def halved(r: Request, chip: Chip) -> bool:
    """Whether the backward runs for half of the heads at a time: ``turns_of``, where the batch is packed or one."""
    vp = padded(r.V)
    if padded(r.K) * vp <= 128 * 128 or r.H % 2 or turns_of(r, chip) != WHOLE:
        return False
    return chip.load(r.N * r.HV // 2 * -(-vp // 128)) >= 1


def heads_of(call: Request, half: int) -> Request:
    """The call for the first or the second half of its heads; ``saved`` is cut, and no longer contiguous."""
    own, own_v = (slice(half * n // 2, (half + 1) * n // 2) for n in (call.H, call.HV))
    axes = {"q": (2, own), "k": (2, own), **dict.fromkeys(("v", "g", "beta", "grad_o"), (2, own_v))}
    axes |= dict.fromkeys(("initial_state", "grad_final_state"), (1, own_v))
    axes |= dict.fromkeys(("A_log", "dt_bias"), (0, own_v))
    parts = {n: x.cut(*where) for n, where in axes.items() if (x := getattr(call, n)) is not None}
    return changed(call, **parts, saved=tuple(x.cut(1, own_v) for x in call.saved))


def gradients_on_hopper(r: Request, chip: Chip) -> bool:
    """Whether ``gradients_hopper`` serves a call.

    Dtypes and head dimensions decide, and neither strides nor lengths: a sequence's bits do not depend on its company.
    (More slots than 32 bits count are more than any memory holds.)
    """
    return (
        chip.hopper
        and r.q.dtype == torch.bfloat16
        and r.g.dtype in (torch.bfloat16, torch.float32)
        and r.K == r.V
        and r.K in (128, 256)
        and r.grad_o.dtype == r.q.dtype
        and r.B * r.T > 0
        and chunk.countable(slots(r) * r.HV * r.V)
    )


LEAST_FAR = 65536
"""Rows times heads of a sequence, at least, whose decays are not bounded: the second launch takes 60 µs for one pair,
which a shorter one does not save."""

LEAST_TAILS, LEAST_FAR_TAILS = 64000, 131072
"""The same where sequences end within pairs, with bounded decays and with others: that takes two or three launches
more, of which each has its own last round of programs."""

LEAST_PAIRED, LEAST_SHORT = 128, 786432
"""The same where sequences have fewer rows than that on average: 8,192 rows of 16 heads lose 3%, of 96 gain 3 to 11."""


def gradients_persistent(r: Request, rows: int) -> bool:
    """Whether ``gradients_hopper_persistent`` serves a call that ``gradients_hopper`` serves.

    Dense calls of whole pairs lose only where they have fewer than there are multiprocessors, 3 µs of 100. The two have
    other bits, and which serves follows from the batch: ``batch_invariant`` leaves all calls to the other.

    Args:
        rows: of a sequence, whose segments ``r`` may have, or of all that are packed, times heads.
    """
    if r.batch_invariant:
        return False
    whole = r.cu_seqlens is None and r.T % (2 * CHUNK) == 0
    bounded = decays_bounded(r)
    if whole:
        least = 0 if bounded else LEAST_FAR
    elif r.B * r.T < LEAST_PAIRED * r.N:
        least = LEAST_SHORT
    else:
        least = LEAST_TAILS if bounded else LEAST_FAR_TAILS
    # There is a pair, or a sequence at least: a program without pairs reads two slots.
    some = r.T > CHUNK if r.cu_seqlens is None else r.N > 0
    fits = r.K == 128 or (r.K == 256 and whole)
    return some and rows >= least and fits and r.g.dtype == r.q.dtype and r.H == r.HV


MOST_OVERLAP = 2048
"""Slots times heads, at most, of calls whose kernels of the backward may start before the one ahead ends. Larger ones
are slower by it, probably because the programs of a head, which read the same keys, no longer start together."""

LEAST_KEPT = 32
"""Sequences times value heads, at least: with 32 a step gains 5%, with 64 10%; fewer were not measured."""


def keeps_states(r: Request, chip: Chip) -> bool:
    """Whether a forward with ``disable_recompute`` also saves z and states, by pairs of chunks.

    Only the kernels for Hopper write and read them.
    """
    return (
        r.disable_recompute
        and chip.hopper
        and not (r.cp_context or r.return_intermediate_states or r.checkpoint_indices is not None)
        and r.q.dtype == torch.bfloat16
        and r.K == r.V == 128
        and r.N * r.HV >= LEAST_KEPT
        and not chunk.short(r)
        and r.B * r.T > 0
        and chunk.countable(slots(r) * r.HV * 128)
        and gradients_persistent(r, r.T * r.HV)
    )


@dataclass(frozen=True, slots=True)
class BackwardChoice:
    """How a backward of ``chunk_kda`` runs, or the backward of half of its heads.

    Attributes:
        halves: choices for each half of the heads, where they run one after the other; else ().
        segment_rows, precision, transitions: as in ``ForwardChoice``.
        prepare: of the second ``prepare``.
        turns: the sequences of each turn.
        states, reverse: the recurrences.
        kept: reverse runs alone, since the forward has stored states and z.
        gradients: a ``GradientsPersistentConfig`` also has the recurrences store every second state.
        operand: ``states`` keeps v as an operand of wgmma.
        descriptors, tokens: ``gradients`` reads blocks of states, and of do and dv, through descriptors.
        overlap: the recurrences for Hopper and the persistent kernel may start before the one ahead of them ends.
    """

    halves: tuple[BackwardChoice, ...]
    segment_rows: int
    precision: chunk.Precision
    prepare: chunk.PrepareConfig | chunk.PrepareHopperConfig
    turns: Turns
    states: chunk.BlockConfig | chunk.HopperConfig
    reverse: chunk.BlockConfig | chunk.HopperConfig
    kept: bool
    gradients: GradientsConfig | GradientsHopperConfig | GradientsPersistentConfig
    operand: bool
    descriptors: bool
    tokens: bool
    transitions: chunk.BlockConfig | chunk.TransitionsHopperConfig
    overlap: bool


def choose_backward(request: Request, chip: Chip, half: bool = False, many: int = MANY) -> BackwardChoice:
    """How the backward of ``chunk_kda`` runs on ``chip``.

    Args:
        request: metadata alone; ``saved`` holds what the forward saved.
        half: the request is for half of the heads of another one.
        many: slots times heads from which ``gradients`` reads through descriptors.
    """
    if request.grad_o is None:
        # Zeros stand for it.
        request = changed(request, grad_o=dense_view("do", request.v.shape, request.v.dtype))
    fragments = bool(request.cp_context)
    rows, r, transitions = cut_for(request, chip)
    K, V, HV, T, dtype = r.K, r.V, r.HV, r.T, r.q.dtype
    KP, VP = padded(K), padded(V)
    do = _as_read(r.grad_o)
    on_hopper = gradients_on_hopper(changed(r, grad_o=do), chip)
    paired = on_hopper and gradients_persistent(r, (r.B * T if rows else request.T) * HV)
    # States of pairs take half of the memory.
    turns = WHOLE if fragments or paired else turns_of(r, chip)
    most, N = slots(r), at_once(request, r)
    if turns != WHOLE:
        N = max(turn.stop - turn.start for turn in turns)
        most = N * -(-T // CHUNK)
    v = _as_read(r.v)
    if (fragments or rows) and isinstance(transitions, chunk.TransitionsHopperConfig):
        v, do = chunk.as_copied(v), chunk.as_copied(do)
    config = backward_config(chip, dtype, KP, VP, r.N * HV)

    def hopper(x: View) -> bool:
        return VP == V and all(chunk.serves(chip, dtype, most, HV, KP, V, x.cut(0, t)) for t in turns)

    states = reverse = config.recurrences
    if hopper(v) and hopper(do):
        # Both are one launch.
        states, reverse = (chunk.hopper_config(n, chip, KP, V, N * HV) for n in ("states", "reverse"))
    kept = bool(r.saved) and paired and keeps_states(request, chip) and hopper(do)
    if kept:
        states = reverse = chunk.hopper_config("alone", chip, KP, V, N * HV)
    gradients = config.gradients
    if on_hopper:
        gradients = GradientsPersistentConfig(chip.multiprocessors) if paired else GradientsHopperConfig()
    # Products on scalar units spill more with them. Rows of a descriptor are counted in 32 bits.
    descriptors = chip.descriptors and dtype.itemsize == 2 and many <= most * HV < 2**31 // max(VP, CHUNK)
    # Rows of the call's own tensors only where no block reaches beyond a sequence, or beyond a head's channels.
    tokens = descriptors and r.cu_seqlens is None and T % CHUNK == 0 and VP == V and do.dtype == dtype
    dv = dense_view("dv", r.v.shape, r.v.dtype)
    tokens = tokens and all(chunk.row_aligned(x.cut(0, t)) for t in turns for x in (do, dv))
    halves: tuple[BackwardChoice, ...] = ()
    if not (half or fragments or paired) and halved(request, chip):
        halves = tuple(choose_backward(heads_of(request, i), chip, half=True, many=many) for i in (0, 1))
    return BackwardChoice(
        halves, segment_rows=rows, precision=chunk.precision(dtype, chip),
        prepare=chunk.choose_prepare(r, chip, again=bool(r.saved)), turns=turns, states=states, reverse=reverse,
        kept=kept, gradients=gradients, operand=chip.arch == 90 and config.recurrences.block_v >= 64,
        descriptors=descriptors, tokens=tokens, transitions=transitions,
        # Segments and packed sequences have other kernels between.
        overlap=chip.overlaps and not (fragments or rows) and r.cu_seqlens is None and most * HV <= MOST_OVERLAP,
    )  # fmt: skip


def _as_read(x: View) -> View:
    """``x`` as the backward's kernels get it."""
    return x if rows_readable(x) else x.contiguous()

"""Shared by the forward and the backward of ``chunk_kda``: configurations, precision, segments, and when the kernels
for Hopper take a recurrence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kda_core.request import Request
from kda_core.triton_lib.layout import CHUNK, padded, slots
from kda_core.triton_lib.plan import View, changed, dense_view
from kda_core.triton_lib.segments import in_one, packed_segments
from kda_core_nvidia.choose.chip import Chip


@dataclass(frozen=True, slots=True)
class PrepareConfig:
    """Launch configuration of ``prepare``.

    Attributes:
        block_k, stages: channels at a time, depth of the load pipeline.
        wide, wide_stages: the same for the loops that only multiply what they load.
    """

    block_k: int
    num_warps: int
    stages: int
    wide: int
    wide_stages: int


@dataclass(frozen=True, slots=True)
class PrepareHopperConfig:
    """Launch configuration of ``prepare_hopper``.

    Attributes:
        registers: of a thread.
        paired: for sequences most of which end with the first chunk of a pair: it is paired with that of the next head.
        finishes: it also does what is left of sequences of one chunk or two. The recurrence has the others.
        ahead: it fetches their states, which are float32, ahead.
        programs: where the recurrence follows it pair by pair, while both run (``progress_hopper``); else 0.
        stay: those that stay beside a program of the recurrence then.
    """

    registers: int
    num_warps: int = 4
    paired: bool = False
    finishes: bool = False
    ahead: bool = False
    programs: int = 0
    stay: int = 0

    @property
    def places(self) -> int:
        """Programs that share a multiprocessor, which has 65,536 registers."""
        return 65536 // (32 * self.num_warps * self.registers)


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Launch configuration of a recurrence: value channels of a program, warps, depth of the load pipeline."""

    block_v: int
    num_warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Launch configuration of a recurrence in its form for Hopper.

    One warp group computes 64 value channels. One other warp loads and ``storers`` warps store. ``registers`` is what
    a multiprocessor has for so many threads; the warps that do not multiply give most of their own away.

    Attributes:
        block_v: value channels of a program.
        stages: chunks that are loaded ahead.
        storers: warps that store; 0: the warps that multiply store.
        out: chunks that wait to be stored.
        registers: of a thread, at launch.
    """

    block_v: int
    stages: int
    storers: int
    out: int
    registers: int

    @property
    def num_warps(self) -> int:
        """Warps that multiply."""
        return self.block_v // 16

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's constants that follow from it."""
        return {"BV": self.block_v, "STAGES": self.stages, "OUT": self.out, "STORERS": self.storers}


@dataclass(frozen=True, slots=True)
class TransitionsHopperConfig:
    """Launch configuration of the kernels for Hopper that join segments.

    Attributes:
        rows: key channels of a program of the transitions.
        unroll: chunks from one look at what is left of a segment's start to the next.
        stages, registers: of ``transitions_hopper``: chunks that are loaded ahead, registers of a thread at launch.
            With fewer, ptxas runs the products one after another.
        reverse_stages, reverse_registers: the same of ``reverse_transitions_hopper``.
        join_block, join_stages: value channels of a program of ``join_hopper``, matrices that it loads ahead.
    """

    rows: int = 64
    num_warps: int = 4
    unroll: int = 4
    stages: int = 6
    registers: int = 144
    reverse_stages: int = 4
    reverse_registers: int = 152
    join_block: int = 16
    join_stages: int = 3


Precision = tuple[int, str, str]
"""How float32 numbers enter the forward's products: 16-bit terms of a decay, precision of large and 16×16 products."""


def precision(dtype: torch.dtype, chip: Chip) -> Precision:
    """The forward's precision for an input dtype."""
    if dtype == torch.float32:
        # Three bfloat16 parts hold all of a float32; of two tf32 parts the lower is cut, which single products show.
        # Six bfloat16 products take what three of tf32 do. (The interpreter multiplies float32 whatever it is told.)
        return (1, "ieee", "ieee") if chip.interpreted else (3, "bf16x6", "bf16x6")
    # tf32 operands are cut to 11 bits, not rounded: a bias that bfloat16 results hide and float16 ones do not.
    return (2, "tf32", "tf32" if dtype == torch.bfloat16 else "tf32x3")


def split_scale(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """The output's scale as (power of two, rest): the power enters q, where it rounds nothing, the rest the output.

    Fold in as few factors as possible before rounding to 16 bits: without decays, q is its own operand. With float32
    operands there is nothing to gain, and the rest is 1. float16 operands take no power above 1, because LIFT has taken
    most of their room upwards, and none below 2⁻⁶, where they have few digits.
    """
    scale = float(scale)  # an integer would compile kernels that take integers
    mantissa, exponent = math.frexp(scale)
    if dtype.itemsize > 2 or not math.isfinite(scale) or abs(exponent) > 100 or scale == 0:
        return scale, 1.0
    if abs(mantissa) < math.sqrt(0.5):
        exponent -= 1
    power = math.ldexp(1.0, exponent)
    if dtype == torch.float16:
        power = min(max(power, 2.0**-6), 1.0)
    return power, scale / power


def prepare_config(K: int, dtype: torch.dtype, again: bool = False) -> PrepareConfig:
    """Configuration of ``prepare``; ``again``: of its second run, from what the forward saved."""
    if dtype.itemsize != 2:
        return PrepareConfig(block_k=16, num_warps=1, stages=4, wide=16, wide_stages=4)
    # Memory is read in whole rows of a block, however short they are: blocks as wide as registers allow, up to a cache
    # line.
    wide = min(64, padded(K))
    if again and wide > 16:
        return PrepareConfig(block_k=32, num_warps=2, stages=4, wide=wide, wide_stages=3)
    # One warp: chunks are many and small, and one warp needs no barrier. More than 16 channels spill.
    return PrepareConfig(block_k=16, num_warps=1, stages=4, wide=wide, wide_stages=3)


_PREPARE_HOPPER = {torch.bfloat16: PrepareHopperConfig(168), torch.float32: PrepareHopperConfig(255)}
"""By the dtype of g: three programs share a multiprocessor, or two."""

SHORT = 96
"""Rows of a packed sequence, on average, up to which kernels are those for short ones. Their bits are the others'."""


MOSTLY_ONE_CHUNK = 48
"""The same for kernels that pair heads where others finish what they prepare."""

MOSTLY_ONE_PAIR = 64
"""The same for kernels that finish sequences of one pair of chunks."""


def short(r: Request, rows: int = SHORT) -> bool:
    """Whether kernels for few chunks serve the sequences: by the call's shape, since lengths are on the GPU."""
    return r.T <= CHUNK if r.cu_seqlens is None else r.T <= rows * r.N


def choose_prepare(r: Request, chip: Chip, again: bool = False) -> PrepareConfig | PrepareHopperConfig:
    """The kernel that prepares a call, by its configuration; ``again`` as for ``prepare_config``.

    The results of the two kernels differ in their last bits. Dtypes and head dimensions therefore decide, and neither
    strides nor the number and lengths of the sequences: a sequence's bits do not depend on its company. (More slots
    than 32 bits count are more than any memory holds.)
    """
    hopper = (
        chip.hopper
        and r.q.dtype == torch.bfloat16
        and r.g.dtype in _PREPARE_HOPPER
        and r.K in (128, 256)
        and r.B * r.T > 0
        and countable(slots(r) * r.HV * 3 * CHUNK)
    )
    if not hopper:
        return prepare_config(r.K, r.q.dtype, again)
    return replace(_PREPARE_HOPPER[r.g.dtype], paired=r.K == 128 and short(r))


_HOPPER_CONFIGS = {
    # (kernel, padded K, value channels of a program)
    ("recurrence", 128, 64): HopperConfig(64, 4, 0, 1, 128),
    ("recurrence", 128, 128): HopperConfig(128, 4, 0, 1, 168),
    ("recurrence", 256, 64): HopperConfig(64, 3, 2, 2, 255),
    ("recurrence", 256, 128): HopperConfig(128, 3, 2, 2, 168),
    ("states", 128, 64): HopperConfig(64, 4, 2, 2, 128),
    ("states", 256, 64): HopperConfig(64, 3, 4, 2, 168),
    ("reverse", 128, 64): HopperConfig(64, 4, 2, 1, 128),
    ("reverse", 256, 64): HopperConfig(64, 3, 4, 1, 168),
    # Where the forward stores z and states, and reverse runs without states.
    ("kept", 128, 64): HopperConfig(64, 4, 2, 2, 168),
    ("kept", 128, 128): HopperConfig(128, 4, 2, 2, 168),
    ("alone", 128, 64): HopperConfig(64, 5, 2, 2, 160),
    ("alone", 128, 128): HopperConfig(128, 4, 2, 2, 168),
}


_MANY = HopperConfig(64, 3, 0, 1, 128)
"""The recurrence of many short sequences with 128 key channels: two programs share a multiprocessor, so that states
come and go while others are computed."""

_SHARING = {"states": HopperConfig(64, 3, 2, 2, 128), "reverse": HopperConfig(64, 3, 2, 1, 128)}
"""The backward's recurrences of 128 key channels where two programs share a multiprocessor."""


def hopper_config(kernel: str, chip: Chip, KP: int, V: int, heads: int, short: bool = False) -> HopperConfig:
    """The configuration for ``heads`` = sequences times value heads.

    A program of 64 channels takes less time than one of 128. Where there are more of them than multiprocessors, one
    program of 128 loads each chunk once instead of twice. Only the forward gains by that: the backward stores so much
    that it is no faster.

    States and reverse are one launch. A program that has a multiprocessor to itself loads further ahead, and is nearly
    twice as fast as each of two that share one. One round of such programs, two that are nearly full, or three, are
    faster than one or two rounds of pairs; short sequences need pairs, whose starts overlap.

    Args:
        kernel: recurrence, states or reverse; kept and alone: the first and the last where a forward keeps states.
        short: of a call for which ``short`` is true.
    """
    load = chip.load(2 * heads * (V // 64))
    if kernel in _SHARING and KP == 128 and (1 < load < 1.85 or load > 3):
        return _SHARING[kernel]
    wide = kernel in ("recurrence", "kept", "alone") and V % 128 == 0 and chip.load(heads * (V // 64)) > 1
    if kernel == "recurrence" and wide and short and KP == 128:
        return _MANY
    return _HOPPER_CONFIGS[kernel, KP, 128 if wide else 64]


def countable(rows: int) -> bool:
    """Whether a descriptor can have so many rows, which it counts in 32 bits, as grids do programs: one at least."""
    return 0 < rows < 2**31


def row_aligned(x: View) -> bool:
    """Whether ``x`` [B, T, H, D] is a matrix of B · T rows of which blocks can be copied through a descriptor."""
    s_b, s_t, s_h, s_last = x.strides
    B, T, H, D = x.shape
    return (
        s_last == 1
        and x.aligned
        and not (s_t & 7 or s_h & 7)
        and (B == 1 or s_b == s_t * T)
        and 0 <= s_h * (H - 1) <= s_t - D
        # Offsets within a chunk are counted in 32 bits.
        and s_t * CHUNK < 2**31
        and countable(B * T)
    )


def as_copied(x: View) -> View:
    """``x``, or the layout of the copy that a plan makes of rows which bulk copies cannot take."""
    return x if row_aligned(x) else dense_view(x.source, x.shape, x.dtype)


def serves(chip: Chip, dtype: torch.dtype, count: int, HV: int, KP: int, V: int, rows: View) -> bool:
    """Whether the kernel for Hopper takes a recurrence.

    Args:
        count: chunk slots.
        rows: what it reads of every token.
    """
    return (
        chip.hopper
        and dtype.itemsize == 2
        and KP in (128, 256)
        and V in (64, 128, 256)
        and countable(count * HV * max(3 * CHUNK, V))
        and row_aligned(rows)
    )


LEAST_ROWS = 2048
"""Rows of a segment, at least: shorter ones spend more on their transitions than they save."""

LEAST_SEGMENTS = 4

ROWS = ("q", "k", "v", "g", "beta", "grad_o")
"""Inputs [B, T, ..] of a call."""

JOIN_PRECISION = "tf32x3"
"""Precision of the products that join segments."""

LEAST_ROWS_HOPPER = 512
"""The same with ``transitions_hopper``, whose programs are half as many and take a third of the time."""

LEAST_TOTAL_HOPPER, LEAST_TOTAL_PREFILL = 4096, 3072
"""Rows of a sequence, at least, that is cut then, and where no backward follows: of shorter ones the launches cost what
the recurrence saves."""

LARGEST_CHIP = 256
"""Multiprocessors that segments are counted for, at most: a call of more programs is whole on every chip."""

MOST_PROGRAMS = 132
"""Programs of 64 channels that are cut for on Hopper: the multiprocessors of its largest chip."""


def cut_on_hopper(r: Request, chip: Chip) -> bool:
    """Whether the kernels for Hopper join the segments of a call, by dtype and head dimensions."""
    rows = r.B * r.T
    return joins_on_hopper(r, chip, rows // CHUNK + rows // LEAST_ROWS_HOPPER + MOST_PROGRAMS)


def joins_on_hopper(r: Request, chip: Chip, count: int) -> bool:
    """The same for a call that has so many slots."""
    ours = r.q.dtype == torch.bfloat16 and r.K == r.V == 128
    return chip.hopper and ours and countable(count * r.HV * 3 * CHUNK)


def _programs(r: Request) -> int:
    """Programs of 64 value channels for one sequence."""
    return r.HV * -(-padded(r.V) // 64)


def several(r: Request) -> bool:
    """Whether segments of a call may be several sequences', or their states in a pool: on Hopper alone."""
    return r.cu_seqlens is not None or r.B != 1 or r.ssm_state_indices is not None


def segment_rows(request: Request, chip: Chip) -> int:
    """Rows of each segment of a call, or 0 when it is not cut: long calls with few sequences and heads."""
    r = request
    if r.q.dtype.itemsize != 2 or r.return_intermediate_states or r.disable_recompute or r.batch_invariant:
        return 0
    hopper = cut_on_hopper(r, chip)
    prefill = not (r.save_for_backward or r.saved or r.needs_grad)
    if several(r):
        some = hopper and r.checkpoint_indices is None and are_few(r, prefill)
        count = most_each(r, chip) if some else 0
        rows = -(-r.T // count) if count else 0
        # Whole pairs of chunks, which ``gradients_hopper_persistent`` takes.
        return -(-rows // (2 * CHUNK)) * 2 * CHUNK
    count = min(chip.multiprocessors, LARGEST_CHIP) // _programs(r)
    count = min(count, most_segments(r) if hopper else r.T // LEAST_ROWS)
    if not (cutting_pays(r, count, prefill) if hopper else count >= LEAST_SEGMENTS):
        return 0
    return rows_of_each(r.T, count, LEAST_SEGMENTS if hopper else count + 1)


def rows_of_each(T: int, count: int, least: int) -> int:
    """Rows of each of about so many segments.

    Segments of one length are a batch, and their boundaries need not be written: rather fewer of these, but at least
    ``least`` and more than half.
    """
    even = [n for n in range(least, count + 1) if T % (2 * CHUNK * n) == 0]
    count = even[-1] if even and 2 * even[-1] > count else count
    return -(-T // (CHUNK * count)) * CHUNK


def are_few(r: Request, prefill: bool = False) -> bool:
    """Whether several sequences are few and long enough to be cut; ``prefill`` as for ``cutting_pays``."""
    return 0 < r.N <= MOST_PROGRAMS // (LEAST_SEGMENTS * _programs(r)) and _is_long(r, prefill)


def _is_long(r: Request, prefill: bool) -> bool:
    least = LEAST_TOTAL_PREFILL if prefill else LEAST_TOTAL_HOPPER
    # Lengths of packed sequences are on the GPU: those that are all of the same length shall not lose.
    return r.T >= least * (1 if r.cu_seqlens is None else r.N)


def most_each(r: Request, chip: Chip) -> int:
    """Segments of each sequence of a batch, or of all that are packed as if they were one; 0: it is not cut."""
    packed = r.cu_seqlens is not None
    for n in range(MOST_PROGRAMS // (2 * r.HV), LEAST_SEGMENTS - 1, -1):
        # A boundary between sequences is one between segments.
        programs = (n + r.N - 1 if packed else n * r.N) * _programs(r)
        if programs <= chip.multiprocessors and n * LEAST_ROWS_HOPPER <= r.T and n * n * 2 * CHUNK <= r.T:
            return n
    return 0


def most_of_several(HV: int) -> int:
    """Segments of a call of several sequences, at most: ``most_each`` and one for each of ``are_few`` more."""
    return MOST_PROGRAMS // (2 * HV) + MOST_PROGRAMS // (2 * LEAST_SEGMENTS * HV)


def cutting_pays(r: Request, count: int, prefill: bool = False) -> bool:
    """Whether a call is faster in so many segments, which the kernels for Hopper join.

    Args:
        prefill: no backward follows.
    """
    return count >= LEAST_SEGMENTS and _is_long(r, prefill)


def saved_slots(request: Request) -> int:
    """Slots of what is saved without ``disable_recompute``, enough for a call that is cut into segments as well.

    Whether it is cut depends on the device; shapes must not. At least one: none would say that nothing is saved.
    """
    may_cut = bool(starts_shape(request)) if several(request) else LARGEST_CHIP // _programs(request) > 1
    if may_cut and not request.batch_invariant:
        rows = request.B * request.T
        return rows // CHUNK + rows // LEAST_ROWS_HOPPER + request.N + 1
    return max(1, slots(request))


def most_segments(r: Request) -> int:
    """Segments that the kernels for Hopper join, at most: a step of the join takes as long as two chunks elsewhere."""
    # Not by a square root, whose argument would have to be known (``triton_lib.lengths``).
    counts = range(MOST_PROGRAMS // (2 * r.HV), 0, -1)
    return next((n for n in counts if n * LEAST_ROWS_HOPPER <= r.T and n * n * 2 * CHUNK <= r.T), 0)


def starts_shape(r: Request) -> tuple[int, ...]:
    """Shape of the states at the starts of segments that a training forward saves; () for calls that are never cut.

    As for ``saved_slots`` it does not depend on the device: at most 66 states. For several sequences it depends as
    little as possible on their number, for each value of which a compiler would have to compile anew: at most 82.
    """
    if r.disable_recompute or r.batch_invariant or r.q.dtype != torch.bfloat16 or not r.K == r.V == 128:
        return ()
    if several(r):
        count = most_of_several(r.HV) if are_few(r) else 0
    else:
        count = most_segments(r)
        count = count if cutting_pays(r, count) else 0
    return (count, r.HV, r.V, r.K) if count else ()


def in_parts(x: View, count: int) -> View:
    """``x`` [1, T, ..] as [count, T / count, ..]."""
    rows = x.shape[1] // count
    return x._replace(shape=(count, rows, *x.shape[2:]), strides=(rows * x.strides[1], *x.strides[1:]))


def as_segments(request: Request, rows: int) -> Request:
    """The call with its segments as sequences, states V first and none given.

    Segments of one length of one sequence are a batch; others are packed sequences.
    """
    if several(request) or request.T % rows:
        parts = {n: in_one(x) for n in ROWS if request.B > 1 and (x := getattr(request, n)) is not None}
        return changed(packed_segments(request, rows, v_first=True), **parts)
    parts = {n: in_parts(x, request.T // rows) for n in ROWS if (x := getattr(request, n)) is not None}
    return changed(request, **parts, initial_state=None, grad_final_state=None, state_v_first=True)


def transitions_of(r: Request, chip: Chip, hopper: bool) -> BlockConfig | TransitionsHopperConfig:
    """Configuration of the kernels that join segments; of the plain ones rows of a program, warps, stages."""
    if hopper:
        return TransitionsHopperConfig()
    kp, block = padded(r.K), min(padded(r.K), padded(r.V), 64)
    if chip.major == 9:
        return BlockConfig(block, 8 if kp > 128 else max(4, block // 16), 2 if kp > 128 else 3)
    if chip.major == 10:
        return BlockConfig(min(block, 32) if kp > 128 else block, 8, 2)
    return BlockConfig(16, 4, 2) if kp > 128 else BlockConfig(block, max(1, block // 16), 1)

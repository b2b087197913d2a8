"""Every choice between kernels' configurations: pure functions of a call's metadata and of facts of a chip.

Configurations are frozen data: nothing is tuned at run time. They follow from architecture, operand width and padded
head dimensions alone, never from T or N, so that no length compiles anything anew, and results do not change with the
batch that a sequence travels in. Only whether one long sequence is cut follows from its length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from kda_core.capabilities import runs_on_foreign_device
from kda_core.request import Request
from kda_core.triton_lib.arguments import IN_HALVES, rejected_in_halves
from kda_core.triton_lib.layout import CHUNK, padded
from kda_core.triton_lib.run import INTERPRET

KIB = 1024


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts about a chip that kernels and tests need.

    Attributes:
        name: gfx..., or FOREIGN_ARCHITECTURE.
        wave: lanes of a wave.
        lds: bytes of local data share that one workgroup may use.
        registers: 32-bit registers of one lane that a SIMD unit shares among its waves.
        granule: registers are given to a wave in multiples of this.
        waves: waves that a SIMD unit can hold.
        simds: SIMD units that share one local data share.
        units: compute units: of a device at hand its own, otherwise those of the largest chip.
    """

    name: str
    wave: int
    lds: int
    registers: int
    granule: int
    waves: int
    units: int
    simds: int = 4

    def having(self, units: int) -> Architecture:
        """The same with so many compute units."""
        return replace(self, units=units)


FOREIGN = runs_on_foreign_device("amd")
"""For tests only, read once: on another vendor's GPU the arithmetic and the addresses of these kernels, which are plain
Triton, can be checked at full size, and nothing about speed, registers or instructions of an AMD chip."""

FOREIGN_ARCHITECTURE = "foreign"
"""Any other GPU, where ``FOREIGN`` allows it."""

INTERPRETED = "gfx942"
"""The architecture that Triton's interpreter stands in for."""

# Sources: LLVM's AMDGPU target description (register granules, waves a SIMD), AMD's CDNA and RDNA 3 ISA manuals (LDS),
# its data sheets (compute units of one die of an MI250X, of an MI300X, an MI355X and an RX 7900 XTX).
ARCHITECTURES = MappingProxyType({
    "gfx90a": Architecture("gfx90a", 64, 64 * KIB, 512, 8, 8, 110),
    "gfx942": Architecture("gfx942", 64, 64 * KIB, 512, 8, 8, 304),
    "gfx950": Architecture("gfx950", 64, 160 * KIB, 512, 8, 8, 256),
    "gfx1100": Architecture("gfx1100", 32, 64 * KIB, 1536, 24, 16, 96, simds=2),
    FOREIGN_ARCHITECTURE: Architecture(FOREIGN_ARCHITECTURE, 32, 99 * KIB, 512, 8, 16, 132),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    """Launch configuration of one kernel.

    Attributes:
        block: channels of a program's tile: keys for ``prepare``, values for the recurrences, ``recurrent`` and
            ``join``.
        num_warps: waves of a program.
        stages: depth of the load pipeline of its loop; 1 is none, and more than 2 is not used.
        waves_per_eu: waves a SIMD unit that the compiler's register budget is to leave room for; 0: its own choice.
        keys: key channels of a block of a recurrence's state (or of ``join``'s); 0: all of them.
        level_loop: ``prepare`` and ``gradients`` take a tile's levels in a loop, ``join`` a state's blocks in turn, so
            that the operands of one are alive at a time.
    """

    block: int
    num_warps: int
    stages: int = 1
    waves_per_eu: int = 0
    keys: int = 0
    level_loop: bool = False


GATE = COMMIT = Config(0, 4)
"""Configuration of ``kda_gate`` and ``commit_kda`` on every architecture: they stream."""

MATRIX_SIDE = 16
"""``matrix_instr_nonkdim``: tiles are 16 rows, so that the 16×16 instructions fit them."""

_SHAPES = ((2, 128), (2, 256), (4, 128), (4, 256))
"""(operand bytes, padded K up to); for ``recurrent`` the bytes of a state's elements. K is padded to 16 at least."""


def _table(*configs: Config) -> dict[tuple[int, int], Config]:
    """Configurations by shape; the last one serves the shapes after it, too."""
    return dict(zip(_SHAPES, (*configs, *[configs[-1]] * (len(_SHAPES) - len(configs))), strict=True))


# Between segments, products of float32: blocks of key channels that leave room for the operands in local data share.
_JOIN = _table(Config(16, 4, keys=32))
_STEP = _table(Config(32, 2), Config(32, 4), Config(32, 2), Config(32, 4))
_RECURRENCES = _table(Config(32, 2), Config(32, 2), Config(32, 4))
_CDNA = MappingProxyType({
    "prepare": _table(Config(32, 1)),
    **dict.fromkeys(("recurrence", "recurrence, pieces"), _table(Config(32, 2, 2), Config(32, 2), Config(32, 4))),
    "recurrent": _STEP,
    "recurrent, V first": _STEP,
    "join": _JOIN,
    "states": _RECURRENCES,
    "reverse": _RECURRENCES,
    "gradients": _table(Config(32, 4)),
})  # fmt: skip
# Chosen for the fewest spilled registers: a lane has 256, operands of the matrix unit lie in both halves of a wave, and
# float32 has no matrix unit, so that whole rows of its operands lie in every lane. Hence few key channels at a time.
_WIDE_STEP = {shape: Config(c.block, 2 * c.num_warps) for shape, c in _STEP.items()}
_FEW_KEYS = _table(Config(16, 2, keys=32), Config(16, 4, keys=32), Config(16, 16, keys=64))
_RDNA = MappingProxyType({
    "prepare": _table(*[Config(16, 4, level_loop=True)] * 2, Config(16, 8, level_loop=True)),
    # Checkpoints need addresses beside the state: smaller blocks leave room for them.
    "recurrence": _table(Config(16, 2, keys=32), Config(16, 4, keys=16), Config(16, 16, keys=64)),
    "recurrence, pieces": _table(Config(16, 4, keys=32), Config(16, 16, keys=32), Config(16, 16, keys=64)),
    "recurrent": _WIDE_STEP,
    "recurrent, V first": _WIDE_STEP,
    "join": _table(Config(16, 16, keys=32, level_loop=True)),
    "states": _FEW_KEYS,
    "reverse": _table(Config(16, 2, keys=32), Config(16, 4, keys=16), Config(16, 8, keys=32)),
    "gradients": _table(Config(16, 16, level_loop=True)),
})  # fmt: skip
# For tests alone; all but that of gradients are the fastest of a few on an H200, whose lanes have 255 registers and
# whose warps are RDNA's.
_FOREIGN_RECURRENCES = _table(Config(32, 2, 2), Config(32, 4), Config(16, 4))
_FOREIGN = MappingProxyType({
    "prepare": _table(Config(16, 1), Config(16, 1), Config(16, 2)),
    **dict.fromkeys(("recurrence", "recurrence, pieces"), _FOREIGN_RECURRENCES),
    "recurrent": _table(Config(32, 1), Config(32, 1), Config(64, 2)),
    "recurrent, V first": _table(Config(16, 1)),
    "join": _JOIN,
    "states": _FOREIGN_RECURRENCES,
    "reverse": _FOREIGN_RECURRENCES,
    "gradients": _table(Config(16, 8)),
})  # fmt: skip
CONFIGS = MappingProxyType(
    {"gfx90a": _CDNA, "gfx942": _CDNA, "gfx950": _CDNA, "gfx1100": _RDNA, FOREIGN_ARCHITECTURE: _FOREIGN}
)


def config(kernel: str, architecture: Architecture, dtype: torch.dtype, KP: int) -> Config:
    """The configuration of a kernel for operands (``recurrent``: states) of ``dtype`` and padded key channels KP."""
    return CONFIGS[architecture.name][kernel][dtype.itemsize, 128 if KP <= 128 else 256]


def dot_widths(dtype: torch.dtype, target: Architecture) -> tuple[int, str, str]:
    """(bfloat16 terms of a decay, precision of products of operands, precision of the inverse's products).

    On AMD float32 products are full ones ("ieee"): only gfx942 has a shorter kind. The matrix unit of a foreign device
    may have none; it takes the closest kind that it has. The interpreter multiplies bfloat16 operands wrongly, unless
    the kit corrects it, so decays stay float32 there.
    """
    if INTERPRET:
        return 1, "ieee", "ieee"
    terms = 3 if dtype == torch.float32 else 2
    if target.name != FOREIGN_ARCHITECTURE:
        return terms, "ieee", "ieee"
    precision = {torch.bfloat16: "tf32", torch.float16: "tf32x3"}.get(dtype, "bf16x6")
    return terms, precision, precision


def compile_options(chosen: Config, target: Architecture) -> dict[str, int]:
    """Triton's options for a configuration, except its waves; those of AMD's compiler are unknown to others."""
    if target.name == FOREIGN_ARCHITECTURE:
        return {"num_stages": chosen.stages}
    return {"num_stages": chosen.stages, "waves_per_eu": chosen.waves_per_eu, "matrix_instr_nonkdim": MATRIX_SIDE}


FINISH_ROWS = 16
"""Rows of a program of the backward's last kernel."""

LEAST_ROWS = 1024
"""Rows of a segment, at least: shorter ones spend more on their transitions than they save."""

LEAST_SEGMENTS = 8
"""With fewer segments, as for 32 heads on 132 compute units, a cut gains nothing or loses."""

MOST_SEGMENTS = 32
"""States pass from one segment to the next, one after another."""

MOST_KEYS = 128
"""Key channels of a head, at most: wider heads have not been timed."""

PROGRAMS_A_UNIT = 4
"""Programs of the recurrence for each compute unit, at most: this bounds the number of segments."""


def segment_rows(request: Request, target: Architecture) -> int:
    """Rows of each segment of a call, or 0 when it is not cut."""
    q = request.q
    if q.shape[1] < LEAST_SEGMENTS * LEAST_ROWS or q.shape[0] != 1 or request.cu_seqlens is not None:
        return 0
    if q.dtype.itemsize != 2 or q.shape[3] > MOST_KEYS:
        return 0
    if request.inplace_final_state or request.ssm_state_indices is not None or request.return_intermediate_states:
        return 0
    if request.batch_invariant:
        return 0
    VP = padded(request.V)
    block = min(config("recurrence", target, q.dtype, padded(request.K)).block, VP)
    programs = request.HV * VP // block
    room = PROGRAMS_A_UNIT * target.units // programs
    count = min(room, request.T // LEAST_ROWS, MOST_SEGMENTS)
    if count < LEAST_SEGMENTS:
        return 0
    return -(-request.T // (count * CHUNK)) * CHUNK


FRAGMENT_UNITS = 304
"""Compute units that fragments are cut for, those of the largest chip: a forward saves the same shapes on all."""


def fragment_rows(r: Request) -> int:
    """Rows of a segment of a call in halves, or 0 where each fragment is one: batches, short ones, and many heads."""
    programs = r.HV * (padded(r.K) + padded(r.V)) // 32
    count = min(FRAGMENT_UNITS // programs, r.T // LEAST_ROWS, MOST_SEGMENTS) if r.B == 1 else 1
    return -(-r.T // (count * CHUNK)) * CHUNK if count > 1 else 0


def halves_rejected(r: Request) -> str | None:
    """Why the hooks in halves do not serve a call that a plain call serves, or None."""
    if r.K > MOST_KEYS or r.q.dtype.itemsize != 2:
        return f"{IN_HALVES}: takes 16-bit inputs with K up to {MOST_KEYS}"
    return rejected_in_halves(r)

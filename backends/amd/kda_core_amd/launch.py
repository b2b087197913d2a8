"""What the host knows of a chip, the kernels' configurations (frozen data: nothing is tuned at run time), launches.

Configurations are chosen by architecture, operand width and padded head dimensions alone: never by T or N, so that no
length compiles anything anew, and results do not change with the batch that a sequence travels in.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from kda_core_amd.plugin import FOREIGN, INTERPRET

KIB = 1024


@dataclass(frozen=True, slots=True)
class Architecture:
    """What kernels and tests need to know about a chip.

    Attributes:
        name: gfx..., or FOREIGN_ARCHITECTURE.
        wave: lanes of a wave.
        lds: bytes of local data share that one workgroup may use.
        registers: 32-bit registers of one lane that a SIMD unit shares among its waves.
        granule: registers are given to a wave in multiples of this.
        waves: waves that a SIMD unit can hold.
        simds: SIMD units that share one local data share.
    """

    name: str
    wave: int
    lds: int
    registers: int
    granule: int
    waves: int
    simds: int = 4


FOREIGN_ARCHITECTURE = "foreign"
"""Any other GPU, under the test-only switch of ``plugin``: the same kernels as plain Triton."""

# Sources: LLVM's AMDGPU target description (register granules, waves a SIMD), AMD's CDNA and RDNA 3 ISA manuals (LDS).
ARCHITECTURES = MappingProxyType(
    {
        "gfx90a": Architecture("gfx90a", 64, 64 * KIB, 512, 8, 8),
        "gfx942": Architecture("gfx942", 64, 64 * KIB, 512, 8, 8),
        "gfx950": Architecture("gfx950", 64, 160 * KIB, 512, 8, 8),
        "gfx1100": Architecture("gfx1100", 32, 64 * KIB, 1536, 24, 16, simds=2),
        FOREIGN_ARCHITECTURE: Architecture(FOREIGN_ARCHITECTURE, 32, 99 * KIB, 512, 8, 16),
    }
)


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
        rows: rows of a tile of ``gradients``: 16, or the chunk's 32.
        level_loop: ``prepare`` and ``gradients`` take a tile's levels in a loop, ``join`` a state's blocks in turn, so
            that the operands of one are alive at a time.
    """

    block: int
    num_warps: int
    stages: int = 1
    waves_per_eu: int = 0
    keys: int = 0
    rows: int = 32
    level_loop: bool = False


GATE = Config(0, 4)
"""Configuration of ``kda_gate`` on every architecture: it streams, and its tile is a head's channels."""

MATRIX_SIDE = 16
"""``matrix_instr_nonkdim``: tiles are 16 rows, so that the 16×16 instructions fit them."""

# (operand bytes, padded K up to) -> configuration; for ``recurrent`` the bytes of a state's elements. K is padded to 16
# at least and limited to 256.
_STEP = {(2, 128): Config(32, 2), (2, 256): Config(32, 4), (4, 128): Config(32, 2), (4, 256): Config(32, 4)}
# Between segments, products of float32: blocks of key channels that leave room for the operands in local data share.
_JOIN = {shape: Config(16, 4, keys=32) for shape in _STEP}
_CDNA = MappingProxyType(
    {
        "prepare": {(2, 128): Config(32, 1), (2, 256): Config(32, 1), (4, 128): Config(32, 1), (4, 256): Config(32, 1)},
        "recurrence": {
            (2, 128): Config(32, 2, 2),
            (2, 256): Config(32, 2),
            (4, 128): Config(32, 4),
            (4, 256): Config(32, 4),
        },
        "recurrent": _STEP,
        "recurrent, V first": _STEP,
        "join": _JOIN,
        "states": {(2, 128): Config(32, 2), (2, 256): Config(32, 2), (4, 128): Config(32, 4), (4, 256): Config(32, 4)},
        "reverse": {(2, 128): Config(32, 2), (2, 256): Config(32, 2), (4, 128): Config(32, 4), (4, 256): Config(32, 4)},
        "gradients": {
            (2, 128): Config(32, 4),
            (2, 256): Config(32, 4),
            (4, 128): Config(32, 4),
            (4, 256): Config(32, 4),
        },
    }
)
_WIDE_STEP = {shape: Config(c.block, 2 * c.num_warps) for shape, c in _STEP.items()}
# Chosen for the fewest spilled registers: a lane has 256, operands of the matrix unit lie in both halves of a wave, and
# float32 has no matrix unit, so that whole rows of its operands lie in every lane. Hence few key channels at a time.
_RDNA = MappingProxyType(
    {
        "prepare": {
            (2, 128): Config(16, 4, level_loop=True),
            (2, 256): Config(16, 4, level_loop=True),
            (4, 128): Config(16, 8, level_loop=True),
            (4, 256): Config(16, 8, level_loop=True),
        },
        "recurrence": {
            (2, 128): Config(16, 2, keys=32),
            (2, 256): Config(16, 4, keys=32),
            (4, 128): Config(16, 16, keys=64),
            (4, 256): Config(16, 16, keys=64),
        },
        "recurrent": _WIDE_STEP,
        "recurrent, V first": _WIDE_STEP,
        "join": {shape: Config(16, 16, keys=32, level_loop=True) for shape in _STEP},
        "states": {
            (2, 128): Config(16, 2, keys=32),
            (2, 256): Config(16, 4, keys=32),
            (4, 128): Config(16, 16, keys=64),
            (4, 256): Config(16, 16, keys=64),
        },
        "reverse": {
            (2, 128): Config(16, 2, keys=32),
            (2, 256): Config(16, 4, keys=16),
            (4, 128): Config(16, 8, keys=32),
            (4, 256): Config(16, 8, keys=32),
        },
        "gradients": {
            (2, 128): Config(16, 16, level_loop=True),
            (2, 256): Config(16, 16, level_loop=True),
            (4, 128): Config(16, 16, level_loop=True),
            (4, 256): Config(16, 16, level_loop=True),
        },
    }
)
# For tests alone; these are the fastest of a few on an H200, whose lanes have 255 registers and whose warps are RDNA's.
_FOREIGN = MappingProxyType(
    {
        "prepare": {(2, 128): Config(16, 1), (2, 256): Config(16, 1), (4, 128): Config(16, 2), (4, 256): Config(16, 2)},
        "recurrence": {
            (2, 128): Config(32, 2, 2),
            (2, 256): Config(32, 4),
            (4, 128): Config(16, 4),
            (4, 256): Config(16, 4),
        },
        "recurrent": {(size, K): Config(32, 1) if size == 2 else Config(64, 2) for size, K in _STEP},
        "recurrent, V first": {shape: Config(16, 1) for shape in _STEP},
        "join": _JOIN,
        "states": {
            (2, 128): Config(32, 2, 2),
            (2, 256): Config(32, 4),
            (4, 128): Config(16, 4),
            (4, 256): Config(16, 4),
        },
        "reverse": {
            (2, 128): Config(32, 2, 2),
            (2, 256): Config(32, 4),
            (4, 128): Config(16, 4),
            (4, 256): Config(16, 4),
        },
        "gradients": {
            (2, 128): Config(128, 8, rows=16),
            (2, 256): Config(128, 8, rows=16),
            (4, 128): Config(16, 4),
            (4, 256): Config(16, 4),
        },
    }
)
CONFIGS = MappingProxyType(
    {"gfx90a": _CDNA, "gfx942": _CDNA, "gfx950": _CDNA, "gfx1100": _RDNA, FOREIGN_ARCHITECTURE: _FOREIGN}
)


def config(kernel: str, architecture: Architecture, dtype: torch.dtype, KP: int) -> Config:
    """The configuration of a kernel for operands (``recurrent``: states) of ``dtype`` and padded key channels KP."""
    return CONFIGS[architecture.name][kernel][dtype.itemsize, 128 if KP <= 128 else 256]


@cache
def architecture(device: torch.device) -> Architecture:
    """The architecture of ``device``; the interpreter stands in for gfx942."""
    if INTERPRET:
        return ARCHITECTURES["gfx942"]
    if FOREIGN and torch.version.hip is None:
        return ARCHITECTURES[FOREIGN_ARCHITECTURE]
    return ARCHITECTURES[torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]]


@cache
def compute_units(device: torch.device) -> int:
    """Compute units of ``device``: what its programs spread over."""
    return 304 if INTERPRET else torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device):
    """Make ``device`` current for launches, at no cost when it already is."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def dot_widths(dtype: torch.dtype, target: Architecture) -> tuple[int, str, str]:
    """(bfloat16 terms of a decay, precision of products of operands, precision of the inverse's products).

    On AMD float32 products are full ones ("ieee"): only gfx942 has a shorter kind. A foreign device's matrix unit may
    have none, and takes what comes near. The interpreter multiplies bfloat16 operands wrongly, unless the kit corrects
    it, so that decays stay float32 there.
    """
    if INTERPRET:
        return 1, "ieee", "ieee"
    terms = 3 if dtype == torch.float32 else 2
    if target.name != FOREIGN_ARCHITECTURE:
        return terms, "ieee", "ieee"
    precision = {torch.bfloat16: "tf32", torch.float16: "tf32x3"}.get(dtype, "bf16x6")
    return terms, precision, precision


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    chosen: Config,
    target: Architecture,
) -> None:
    """Launch ``programs`` programs along axis 0.

    Args:
        kernel: the kernel.
        arguments: its first parameters, in order.
        constants: its remaining parameters, all constexpr.
        chosen: its configuration.
        target: what it runs on.
    """
    if programs == 0:
        return
    if INTERPRET:
        kernel[(programs,)](*arguments, **constants)
        return
    kernel[(programs,)](*arguments, **constants, **compile_options(chosen, target))


def compile_options(chosen: Config, target: Architecture) -> dict[str, int]:
    """Triton's options for a configuration; those of AMD's compiler are unknown to others.

    Whether multiplications and additions become one instruction is stated: it decides the bits of results, and triton
    warns (3.9) that what it does by default is going to change.
    """
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.stages, "enable_fp_fusion": True}
    if target.name != FOREIGN_ARCHITECTURE:
        options |= {"waves_per_eu": chosen.waves_per_eu, "matrix_instr_nonkdim": MATRIX_SIDE}
    return options

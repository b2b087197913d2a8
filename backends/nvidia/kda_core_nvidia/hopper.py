"""When the kernels written for Hopper take a recurrence; their configurations (frozen data) and descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from kda_core.triton_lib.layout import CHUNK
from kda_core_nvidia.launch import INTERPRET, Chip, gluon_descriptor, gluon_fields


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Launch configuration of a recurrence.

    One warp group for 64 value channels, and others of which one warp loads and ``storers`` store: the registers are
    what a multiprocessor has for so many threads; the warps that do not multiply give most of their own away.

    Attributes:
        block_v: value channels of a program.
        stages: chunks that are loaded ahead.
        storers: warps that store; 0: those that multiply do it themselves.
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
        """The kernel's constants that follow from it, and the compiler's option."""
        shared = {"BV": self.block_v, "STAGES": self.stages, "OUT": self.out, "STORERS": self.storers}
        return shared | {"maxnreg": self.registers}


_CONFIGS = {
    # (kernel, padded K, value channels of a program)
    ("recurrence", 128, 64): HopperConfig(64, 4, 0, 1, 128),
    ("recurrence", 128, 128): HopperConfig(128, 4, 0, 1, 168),
    ("recurrence", 256, 64): HopperConfig(64, 3, 2, 2, 255),
    ("recurrence", 256, 128): HopperConfig(128, 3, 2, 2, 168),
    ("states", 128, 64): HopperConfig(64, 6, 2, 2, 160),
    ("states", 256, 64): HopperConfig(64, 3, 4, 2, 168),
    ("reverse", 128, 64): HopperConfig(64, 5, 2, 2, 160),
    ("reverse", 256, 64): HopperConfig(64, 3, 4, 1, 168),
}

_LEAST_ROWS = {128: 4096, 256: 1024}
"""Rows of a call, by padded K, from which the backward gains more on the chip than the descriptors cost the host."""


def hopper_config(kernel: str, target: Chip, KP: int, V: int, sequences_heads: int) -> HopperConfig:
    """The configuration for so many programs of each block of value channels.

    A program of 64 channels takes less time than one of 128, but where there are more of them than multiprocessors, two
    of them share the loads of a chunk when they are one. Only the forward does that: the backward stores so much that
    it is no faster.

    Args:
        kernel: recurrence, states or reverse.
    """
    wide = kernel == "recurrence" and V % 128 == 0 and sequences_heads * (V // 64) > target.multiprocessors
    return _CONFIGS[kernel, KP, 128 if wide else 64]


def backward_gains(target: Chip, KP: int, V: int, sequences_heads: int, rows: int) -> bool:
    """Whether the backward's recurrences are faster in their form for Hopper.

    With 128 key channels and a program of 64 value channels for every multiprocessor, the plain kernels, of which
    several share one, keep the memory as busy.
    """
    few = KP > 128 or sequences_heads * -(-V // 64) <= target.multiprocessors
    return few and rows >= _LEAST_ROWS.get(KP, rows + 1)


def row_aligned(x: Tensor) -> bool:
    """Whether ``x`` [B, T, H, D] is a matrix of B · T rows of which blocks can be copied through a descriptor."""
    s_b, s_t, s_h, s_last = x.stride()
    B, T, H, D = x.shape
    return (
        s_last == 1
        and not (x.data_ptr() & 15 or s_t & 7 or s_h & 7)
        and (B == 1 or s_b == s_t * T)
        and 0 <= s_h * (H - 1) <= s_t - D
        # Offsets within a chunk are counted in 32 bits.
        and s_t * CHUNK < 2**31
        # A descriptor is of one row at least.
        and 0 < B * T < 2**31
    )


def serves(target: Chip, keys: Tensor, V: int, rows: Tensor) -> bool:
    """Whether the kernel for Hopper takes a recurrence.

    Args:
        keys: what ``prepare`` wrote.
        V: head dimension of the values.
        rows: what it reads of every token.
    """
    slots, HV, _, _, KP = keys.shape
    return (
        target.capability == (9, 0)
        and not INTERPRET
        and keys.dtype.itemsize == 2
        and KP in (128, 256)
        and V in (64, 128, 256)
        # Rows of a descriptor are counted in 32 bits.
        and 0 < slots * HV * max(3 * CHUNK, V) < 2**31
        and row_aligned(rows)
    )


@cache
def _shared_layout(dtype: torch.dtype, rows: int, columns: int) -> Any:
    """How a block [rows, columns] lies in shared memory."""
    if dtype == torch.float32:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)


@cache
def _kind(dtype: torch.dtype, rows: int, columns: int) -> dict[str, Any]:
    """What descriptors of blocks [rows, columns] of contiguous matrices with such rows have in common."""
    return gluon_fields([columns, 1], [rows, columns], _shared_layout(dtype, rows, columns))


def blocks(x: Tensor, rows: int, columns: int) -> GluonDescriptor:
    """A descriptor of blocks [rows, columns] of ``x``, contiguous, as a matrix with rows of ``columns``."""
    return gluon_descriptor(_kind(x.dtype, rows, columns), x, [x.numel() // columns, columns])


def token_blocks(x: Tensor, rows: int, columns: int) -> GluonDescriptor:
    """A descriptor of blocks of ``rows`` tokens and ``columns`` channels of ``x`` [B, T, H, D], as B · T rows."""
    B, T, H, D = x.shape
    _, s_t, s_h, _ = x.stride()
    fields = gluon_fields([s_t, 1], [rows, columns], _shared_layout(x.dtype, rows, columns))
    return gluon_descriptor(fields, x, [B * T, (H - 1) * s_h + D])

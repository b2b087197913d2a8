"""The launch of ``prepare_hopper``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kda_core.request import Request
from kda_core.triton_lib.arguments import row_strides
from kda_core.triton_lib.layout import CHUNK
from kda_core.triton_lib.plan import Builder, Copy, Tile, View, matrix_tile, token_tile
from kda_core.triton_lib.segments import one_token_axis
from kda_core_nvidia.choose.chunk import PrepareHopperConfig, row_aligned
from kda_core_nvidia.prepare_hopper import prepare_hopper

CHANNELS = 64
"""Key channels of a warp, and of a block that is copied."""


def aligned(b: Builder, x: View) -> View:
    """``x`` [B, T, H, D], copied where bulk copies cannot take its rows."""
    if row_aligned(x):
        return x
    copy = b.scratch(f"{x.source}, aligned", x.shape, x.dtype)
    b.step(Copy(copy, x))
    return copy


def _chunks(x: View, count: int, by_rows: bool = False) -> Tile:
    """Blocks of so many chunks."""
    return token_tile(x, count * CHUNK, CHANNELS, swizzled=not by_rows, by_rows=by_rows)


def launch_prepare_hopper(
    b: Builder, r: Request, config: PrepareHopperConfig, named: Mapping[str, Any], states: Mapping[str, Any] | None,
    progress: View | None,
) -> None:  # fmt: skip
    """Add a launch of ``prepare_hopper``.

    Args:
        named: what it takes, by its names, tiles apart.
        states: the same of a recurrence, where sequences are finished.
        progress: as for ``add_prepare``.
    """
    q, k, g = (aligned(b, x) for x in (r.q, r.k, r.g))
    beta, o = one_token_axis(b, r.beta), named["o"]
    # Chunks of a program, and of a block that is copied.
    chunks = 2 if r.K == 128 else 1
    count = 1 if config.paired else chunks
    pairs = r.B * -(-named["chunks"] // chunks) if r.cu_seqlens is None else r.T // (chunks * CHUNK) + r.N + 1
    strides = row_strides(q=q, k=k, g=g, b=beta, o=o)[1] | {"s_ob": o.stride(0) if r.B > 1 else 0}
    tiles = {
        "q": _chunks(q, count), "k": _chunks(k, count), "g": _chunks(g, count, by_rows=True),
        "keys": matrix_tile(named["keys"], CHUNK, r.K, CHANNELS, swizzled=True),
    }  # fmt: skip
    if states is None:
        numbers = ("s_vh", *(f"s_{x}{axis}" for x in "if" for axis in "nhkv"), "s_has", "s_final", "final_slots")
        tensors = ("values", "initial_state", "final_state", "has_state", "final_indices")
        states = {**dict.fromkeys(numbers, 0), **dict.fromkeys(tensors), "o_scale": 1.0}
        # One kernel for every layout of states.
        states |= {"V_FIRST": False, "LAST_CONTIGUOUS": True}
    else:
        tiles["values"] = _chunks(r.v, 1)
    named = {**named, **states, **strides, **tiles, "beta": beta, "G_BITS": 8 * g.itemsize}
    named |= {"PAIRED": config.paired, "FINISHED": config.finishes, "AHEAD": config.ahead}
    # A recurrence that follows has two programs a head.
    named |= {"progress": progress, "followers": 2 * r.N * r.HV, "stay": config.stay}
    b.pick(prepare_hopper, config.programs or pairs * r.HV, config.num_warps, named, maxnreg=config.registers)

"""The launches of ``gradients_hopper``, and of ``gradients_hopper_persistent`` with its table of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import row_strides
from kda_core.triton_lib.layout import CHUNK, slots
from kda_core.triton_lib.plan import Builder, changed, matrix_tile, token_tile
from kda_core.triton_lib.segments import one_token_axis
from kda_core_nvidia.choose.backward import GradientsHopperConfig, GradientsPersistentConfig
from kda_core_nvidia.gradients_hopper import gradients_hopper
from kda_core_nvidia.gradients_hopper_persistent import gradients_hopper_persistent
from kda_core_nvidia.gradients_pairs import pairs_kernel
from kda_core_nvidia.plans.forward import aligned

VALUES = 64
"""Value channels of a block of do, dv and z, and of a state of a slot."""

CHANNELS = 128
"""Key channels of a program."""

BEHIND = 128
"""Programs for rows behind the last sequence."""


def launch_gradients_hopper(
    b: Builder, r: Request, config: GradientsHopperConfig, named: Mapping[str, Any], tokens: int, last: bool = False
) -> None:
    """Add a launch of ``gradients_hopper``.

    Args:
        r: the call, or some of its sequences.
        named: what the kernel reads and writes, by its names.
        tokens: rows of dβ of the whole call.
        last: of each sequence its last chunk alone, where the others are in pairs.
    """
    blocks = r.K // CHANNELS
    whole = r.cu_seqlens is None and r.T % CHUNK == 0
    rows = {f"{n}_rows": None if whole else named[n] for n in ("dq", "dk", "dg", "dv")}
    one = {"tokens": None, "HO": None} if blocks == 1 else {"tokens": tokens}
    named = {**named, **_tiles(b, r, CHUNK, VALUES, named), **rows, **one, "LAST": last}
    grid = (r.N if last else slots(r)) * r.HV * blocks
    b.pick(gradients_hopper, grid, config.num_warps, named, maxnreg=config.registers)


def launch_gradients_persistent(
    b: Builder, r: Request, config: GradientsPersistentConfig, overlap: bool, named: Mapping[str, Any]
) -> None:
    """Add launches of ``gradients_hopper_persistent``, and of ``gradients_hopper`` for chunks that are in no pair.

    z and the states are by pairs of slots.

    Args:
        overlap: the first launch may begin before the recurrences end.
    """
    read = {n: aligned(b, getattr(r, n)) for n in ("q", "k", "g", "grad_o")} | {"beta": one_token_axis(b, r.beta)}
    copied = any(x is not getattr(r, n) for n, x in read.items())
    r = changed(r, **read)
    pairs = slots(r, 2 * CHUNK)
    blocks = pairs * r.HV * (r.K // CHANNELS)
    own = {"table": None, "pair_count": None}
    packed, behind = r.cu_seqlens is not None, r.T % (2 * CHUNK)
    if packed or behind > 0:
        own = {"table": b.scratch("pairs", (2 * pairs, 4), torch.int32)}
        own["pair_count"] = b.scratch("pairs, numbers", (2,), torch.int32)
        programs = r.N + (BEHIND if packed else 1)
        b.pick(pairs_kernel, programs, 4, {**named, **own, "N": r.N, "pairs": pairs, "ROWS": CHANNELS})
    # A pair's rows and numbers are loaded before the kernel ahead ends, so that this must be the recurrences.
    overlap = overlap and own["table"] is None and not copied
    if packed or 0 < behind <= CHUNK:
        launch_gradients_hopper(b, r, GradientsHopperConfig(), {**named, "N": r.N}, 0, last=True)
    rows = {f"{n}_rows": named[n] for n in ("dq", "dk", "dg")}
    named = {**named, **own, **_tiles(b, r, 2 * CHUNK, CHANNELS, named), "C": 2 * CHUNK, "blocks": blocks}
    # Neighbours have the halves of a pair's key channels.
    most, named["exchange"] = config.programs, None
    if r.K > CHANNELS:
        most = max(2, most - most % 2)
        named["exchange"] = b.scratch("sums of neighbours", (most, 2, 256), torch.int64, True)
    far = {"far_pairs": None, "far_count": None}
    if not named["BOUNDED"]:
        far = {"far_pairs": b.scratch("far pairs", (blocks,), torch.int32)}
        far["far_count"] = b.scratch("far pairs, number", (1,), torch.int32, True)
    whole = dict.fromkeys(("dq_rows", "dk_rows", "dg_rows", "first_block"))
    some = packed or behind > CHUNK
    others = whole | rows
    launches = [(blocks, whole | {"FAR": False})]
    if some:
        # A sequence has at most one.
        launches.append((r.N * r.HV, others | {"first_block": blocks, "FAR": False}))
    if not named["BOUNDED"]:
        launches.append((blocks, (others if some else whole) | {"FAR": True}))
    for count, launch in launches:
        programs = min(count, most)
        early = overlap and not launch["FAR"]
        b.pick(gradients_hopper_persistent, programs, config.num_warps, {**named, **far, **launch}, launch_pdl=early)


def _tiles(b: Builder, r: Request, rows: int, block_v: int, named: Mapping[str, Any]) -> dict[str, Any]:
    """Tiles and strides that both kernels take.

    Args:
        rows: of a program.
        block_v: value channels of a block of a state.
    """
    q, k, g, do = (aligned(b, x) for x in (r.q, r.k, r.g, r.grad_o))
    beta = one_token_axis(b, r.beta)
    written = {n: named[n] for n in ("dq", "dk", "dg")}
    tiles = {n: token_tile(x, rows, CHANNELS, swizzled=True) for n, x in {"q": q, "k": k, "g": g, **written}.items()}
    tiles |= {n: token_tile(x, rows, VALUES, swizzled=True) for n, x in {"do": do, "dv": named["dv"]}.items()}
    tiles["z"] = matrix_tile(named["z"], rows, r.V, VALUES, swizzled=True)
    tiles |= {n: matrix_tile(named[n], block_v, r.K, CHANNELS, swizzled=True) for n in ("states", "state_grads")}
    return tiles | row_strides(q=q, k=k, g=g, b=beta, o=do)[1] | {"beta": beta}

"""The launch of ``prepare_hopper``."""

from __future__ import annotations

from collections.abc import Mapping

from kda_core.request import Request
from kda_core.triton_lib.arguments import gate_kind
from kda_core.triton_lib.layout import CHUNK
from kda_core.triton_lib.plan import Builder, Copy, Tile, View, matrix_tile, token_tile
from kda_core_nvidia.choose.chunk import PrepareHopperConfig, row_aligned, split_scale
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


def one_token_axis(b: Builder, x: View) -> View:
    """``x`` [B, T, ..], copied where its rows do not lie evenly over all of B · T."""
    return x if x.shape[0] == 1 or x.stride(0) == x.stride(1) * x.shape[1] else b.dense(x)


def _pairs_of_chunks(x: View, by_rows: bool = False) -> Tile:
    """Blocks of two chunks."""
    return token_tile(x, 2 * CHUNK, CHANNELS, swizzled=not by_rows, by_rows=by_rows)


def launch_prepare_hopper(
    b: Builder, r: Request, config: PrepareHopperConfig, bounded: bool, o: View, parameters: Mapping[str, View | None]
) -> None:
    """Add a launch of ``prepare_hopper``.

    Args:
        bounded: whether each row's log decay is at least −5.
        o: [B, T, HV, V], to be zeroed where no sequence (or a skipped one) has rows.
        parameters: A_log, dt_bias, all that is written, and the inverse, by the kernel's names.
    """
    q, k, g = (aligned(b, x) for x in (r.q, r.k, r.g))
    beta = one_token_axis(b, r.beta)
    keys, indices, chunks = parameters["keys"], r.ssm_state_indices, -(-r.T // CHUNK)
    pairs = r.B * -(-chunks // 2) if r.cu_seqlens is None else r.T // (2 * CHUNK) + r.N + 1
    constants = {
        "K": r.K, "V": r.V, "C": CHUNK, "G_BITS": 8 * g.itemsize, "GATE": gate_kind(r), "BOUNDED": bounded,
        "L2NORM": r.use_qk_l2norm_in_kernel, "SIGMOID": r.use_beta_sigmoid_in_kernel, "NEG_EIGVAL": r.allow_neg_eigval,
        "maxnreg": config.registers,
    }  # fmt: skip
    arguments = dict(parameters) | {
        "q": _pairs_of_chunks(q),
        "k": _pairs_of_chunks(k),
        "g": _pairs_of_chunks(g, by_rows=True),
        "keys": matrix_tile(keys, CHUNK, r.K, CHANNELS, swizzled=True),
    }
    b.launch(
        prepare_hopper, (pairs * r.HV, 1, 1), config.num_warps, constants, **arguments, beta=beta, o=o,
        cu_seqlens=b.dense(r.cu_seqlens), indices=indices, scale=split_scale(r.scale, q.dtype)[0],
        lower_bound=float(r.lower_bound or 0.0), T=r.T, N=r.N, chunks=chunks, HV=r.HV, group=r.HV // q.shape[2],
        s_qh=q.stride(2), s_kh=k.stride(2), s_gh=g.stride(2), s_bt=beta.stride(1), s_bh=beta.stride(2),
        s_ob=o.stride(0) if r.B > 1 else 0, s_ot=o.stride(1), s_oh=o.stride(2),
        s_index=0 if indices is None else indices.stride(0), pad_slot_id=r.pad_slot_id,
    )  # fmt: skip

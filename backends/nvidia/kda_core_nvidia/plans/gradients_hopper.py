"""The launches of ``gradients_hopper`` and ``gradients_hopper_persistent``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kda_core.request import Request
from kda_core.triton_lib.arguments import gate_kind
from kda_core.triton_lib.layout import CHUNK, slots
from kda_core.triton_lib.plan import Builder, View, matrix_tile, token_tile
from kda_core_nvidia.choose.backward import GradientsHopperConfig, GradientsPersistentConfig
from kda_core_nvidia.gradients_hopper import gradients_hopper
from kda_core_nvidia.gradients_hopper_persistent import gradients_hopper_persistent
from kda_core_nvidia.plans.prepare_hopper import aligned, one_token_axis

VALUES = 64
"""Value channels of a block of do, dv and z, and of a state of a slot."""

CHANNELS = 128
"""Key channels of a program."""


def launch_gradients_hopper(
    b: Builder, r: Request, config: GradientsHopperConfig, bounded: bool, o_scale: float, read: Mapping[str, View],
    small: Mapping[str, View | None], written: Mapping[str, View], heads: int, tokens: int,
) -> None:  # fmt: skip
    """Add a launch of ``gradients_hopper``.

    Args:
        r: the call, or some of its sequences.
        bounded: whether each row's log decay is at least −5.
        o_scale: what state gradients still have to be multiplied by.
        read: dv, z, states and state_grads.
        small: what the kernel reads and writes through pointers, by its names.
        written: dq, dk and dg [B, T, HV, K].
        heads: value heads of the tensor that dg is a part of.
        tokens: rows of dβ of the whole call.
    """
    blocks = r.K // CHANNELS
    constants, arguments = _shared(b, r, CHUNK, VALUES, o_scale, read, written)
    constants |= {"BOUNDED": bounded, "V_FIRST": r.state_v_first, "maxnreg": config.registers}
    whole = r.cu_seqlens is None and r.T % CHUNK == 0
    rows = {f"{n}_rows": None if whole else x for n, x in {**written, "dv": read["dv"]}.items()}
    b.launch(
        gradients_hopper, (slots(r) * r.HV * blocks, 1, 1), config.num_warps, constants, **arguments, **rows, **small,
        cu_seqlens=r.cu_seqlens, tokens=None if blocks == 1 else tokens, T=r.T, N=r.N, chunks=-(-r.T // CHUNK),
        HO=None if blocks == 1 else heads, group=r.HV // r.H,
    )  # fmt: skip


def launch_gradients_persistent(
    b: Builder, r: Request, config: GradientsPersistentConfig, o_scale: float, read: Mapping[str, View],
    small: Mapping[str, View | None], written: Mapping[str, View],
) -> None:  # fmt: skip
    """Add a launch of ``gradients_hopper_persistent``; arguments as above, z and the states by pairs of slots."""
    constants, arguments = _shared(b, r, 2 * CHUNK, r.V, o_scale, read, written)
    blocks = slots(r) // 2 * r.HV
    grid = (min(blocks, config.programs), 1, 1)
    b.launch(gradients_hopper_persistent, grid, config.num_warps, constants, **arguments, **small, blocks=blocks)


def _shared(
    b: Builder, r: Request, rows: int, block_v: int, o_scale: float, read: Mapping[str, View],
    written: Mapping[str, View],
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Constants and arguments that both kernels have.

    Args:
        rows: of a program.
        block_v: value channels of a block of a state.
    """
    q, k, g, do = (aligned(b, x) for x in (r.q, r.k, r.g, r.grad_o))
    beta = one_token_axis(b, r.beta)
    tiles = {n: token_tile(x, rows, CHANNELS, swizzled=True) for n, x in {"q": q, "k": k, "g": g, **written}.items()}
    tiles |= {n: token_tile(x, rows, VALUES, swizzled=True) for n, x in {"do": do, "dv": read["dv"]}.items()}
    tiles["z"] = matrix_tile(read["z"], rows, r.V, VALUES, swizzled=True)
    tiles |= {n: matrix_tile(read[n], block_v, r.K, CHANNELS, swizzled=True) for n in ("states", "state_grads")}
    constants = {
        "K": r.K, "V": r.V, "C": rows, "GATE": gate_kind(r), "BETA_SIGMOID": r.use_beta_sigmoid_in_kernel,
        "BETA_SCALE": 2.0 if r.allow_neg_eigval else 1.0,
    }  # fmt: skip
    arguments = tiles | {
        "beta": beta, "A_log": r.A_log, "dt_bias": r.dt_bias, "s_qh": q.stride(2), "s_kh": k.stride(2),
        "s_gh": g.stride(2), "s_oh": do.stride(2), "s_bt": beta.stride(1), "s_bh": beta.stride(2),
        "scale": float(r.scale), "o_scale": o_scale, "lower_bound": float(r.lower_bound or 0.0), "HV": r.HV,
    }  # fmt: skip
    return constants, arguments

"""A call's tensors and options in the form in which kernels take them."""

from __future__ import annotations

import math
from typing import Any

import torch

from kda_core.request import Request

LEAST_BOUNDED_DECAY = -5.0
"""Least natural-log decay of a row for which the bounded form of decays holds (``decay.BOUNDED_SHIFT``)."""


def gate_kind(request: Request) -> str:
    """The kernels' name of a request's gate: "none", "softplus" or "bounded"."""
    if not request.use_gate_in_kernel:
        return "none"
    return "softplus" if request.lower_bound is None else "bounded"


def decays_bounded(request: Request) -> bool:
    """Whether each row's log decay is known, or promised, to be at least −5, in a dtype that can use it.

    The bounded form has exponents up to ±58: 2^58 does not fit float16, and costs float32 five of its bits.
    """
    if request.q.dtype != torch.bfloat16:
        return False
    if request.lower_bound is not None and request.lower_bound < LEAST_BOUNDED_DECAY:
        return False
    return request.safe_gate or gate_kind(request) == "bounded"


def has_contiguous_rows(x: Any) -> bool:
    """Whether kernels can read and write ``x`` itself: its last dimension is contiguous."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def row_strides(**tensors: Any) -> tuple[int, dict[str, int]]:
    """The unit of batch strides, and strides by batch (in units), token and head: s_qb, s_qt and s_qh of ``q``.

    The unit is 8 elements if it divides all batch strides, so that kernels see alignment. Strides of a batch of one are
    not used: they are 0.
    """
    unit = 1 if any(x.shape[0] > 1 and x.stride(0) % 8 for x in tensors.values()) else 8
    found = {}
    for letter, x in tensors.items():
        batch = x.stride(0) // unit if x.shape[0] > 1 else 0
        found |= {f"s_{letter}b": batch, f"s_{letter}t": x.stride(1), f"s_{letter}h": x.stride(2)}
    return unit, found


def state_strides(state: Any, v_first: bool) -> tuple[int, int, int, int]:
    """Strides of a state by (sequence, head, K, V); zeros without a state."""
    if state is None:
        return 0, 0, 0, 0
    s_n, s_h, s_row, s_last = state.stride()
    return (s_n, s_h, s_last, s_row) if v_first else (s_n, s_h, s_row, s_last)


def named_state_strides(letter: str, state: Any, v_first: bool) -> dict[str, int]:
    """``state_strides`` by the kernels' names: s_in, s_ih, s_ik and s_iv of the letter i."""
    return dict(zip((f"s_{letter}{axis}" for axis in "nhkv"), state_strides(state, v_first), strict=True))


def lift(dtype: torch.dtype, l2norm: bool, scale: float = 1.0) -> float:
    """Power of two by which stored ke and qg are scaled. Sums of their products are divided by it again, in float32.

    ke and qg are keys and queries times the decay since the start of their chunk. float16 has fewer digits below 2⁻¹⁴,
    where rows that decay by e⁻⁶ lie. If every channel decays like that, o sees the earlier state, and the state's
    gradient sees the later rows, only through such numbers. Rows of norm 1 leave room for 2⁸. Rows that are not
    normalised may have norms up to 4,000.

    Args:
        dtype: of q, k and v.
        l2norm: whether rows of q and k are normalised in the operator.
        scale: a further factor of qg; above 1 it takes some of the room.
    """
    if dtype != torch.float16:
        return 1.0
    room = 256.0 if l2norm else 16.0
    return room if abs(scale) <= 1 else math.ldexp(room, -math.frexp(scale)[1])


IN_HALVES = "a sequence over several devices in two halves"


def rejected_in_halves(r: Request) -> str | None:
    """Why no backend's hooks in halves serve the options of a call, or None."""
    named = {"return_intermediate_states": r.return_intermediate_states, "out": r.out is not None}
    named |= {"ssm_state_indices": r.ssm_state_indices is not None, "inplace_final_state": r.inplace_final_state}
    named["initial_state"] = r.initial_state is not None
    given = [n for n, x in named.items() if x]
    return f"{IN_HALVES}: without {', '.join(given)}" if given else None

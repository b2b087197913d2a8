"""The power of two that float16 operands of products with the state are stored times."""

import math

import torch


def lift(dtype: torch.dtype, l2norm: bool, scale: float = 1.0) -> float:
    """Power of two that ke and qg are stored times: sums of their products are divided by it again, in float32.

    ke and qg are keys and queries times the decay since the start of their chunk. float16 has fewer digits below 2⁻¹⁴,
    and those of rows that decay by e⁻⁶ are below. Where every channel decays like that they are all that o has of the
    state before, or the state's gradient of the rows after. Rows of norm 1 leave room for 2⁸; rows as they come are
    left theirs, to 4,000.

    Args:
        dtype: of q, k and v.
        l2norm: whether rows of q and k are normalised in the operator.
        scale: what else qg is stored times; above 1 it takes of the room.
    """
    if dtype != torch.float16:
        return 1.0
    room = 256.0 if l2norm else 16.0
    return room if abs(scale) <= 1 else math.ldexp(room, -math.frexp(scale)[1])

"""Power-of-two scale that keeps float16 operands of products with the state out of the subnormals."""

import math

import torch


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

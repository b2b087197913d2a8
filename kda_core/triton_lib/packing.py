"""Device functions that find rows of packed sequences without any help from the host."""

import triton
import triton.language as tl


@triton.jit
def sequence_of_slot(cu_seqlens, N, i_slot, C: tl.constexpr):
    """Sequence that owns chunk slot ``i_slot`` when slot(n, i) = cu_seqlens[n] // C + n + i.

    First slots grow strictly with n, so that a binary search finds the last n in [0, N] whose first slot is not past
    ``i_slot``. N itself stands for the rows behind the last sequence. The answer has N's integer type.
    """
    low = N * 0
    high = N
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(cu_seqlens + middle).to(tl.int64) // C + middle
        if first <= i_slot:
            low = middle
        else:
            high = middle - 1
    return low

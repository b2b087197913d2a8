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


@triton.jit
def chunks_before(cu_seqlens, i_n, length, ROWS: tl.constexpr):
    """Chunks of ROWS rows of the sequences before ``i_n``: where its first intermediate state lies."""
    # One exit: Triton 3.6 compiles what follows a return in a branch that is known at compile time.
    if cu_seqlens is None:
        before = i_n * ((length + ROWS - 1) // ROWS)
    else:
        before = tl.zeros_like(i_n)
        for first in range(0, i_n, 64):
            o_n = first + tl.arange(0, 64)
            m_n = o_n < i_n
            begin = tl.load(cu_seqlens + o_n, mask=m_n, other=0).to(tl.int64)
            end = tl.load(cu_seqlens + o_n + 1, mask=m_n, other=0).to(tl.int64)
            before += tl.sum((end - begin + ROWS - 1) // ROWS)
    return before

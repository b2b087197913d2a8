"""Device function that finds the rows of a chunk slot (numbering: ``triton_lib.layout``)."""

import triton
import triton.language as tl

from kda_core.triton_lib.packing import sequence_of_slot


@triton.jit
def rows_of_slot(cu_seqlens, i_slot, T, N, chunks, C: tl.constexpr):
    """Sequence, batch row, first row (within the batch row) and number of rows, at most C, of a slot; all int64.

    Packed: "sequence" N is the rows behind the last one; a slot that holds nothing has no rows (or fewer).
    """
    if cu_seqlens is None:
        i_n = i_slot // chunks
        i_b = i_n
        first_row = (i_slot % chunks) * C
        end = T.to(tl.int64)
    else:
        i_n = sequence_of_slot(cu_seqlens, N.to(tl.int64), i_slot, C)
        i_b = tl.zeros_like(i_slot)
        begin = tl.load(cu_seqlens + i_n).to(tl.int64)
        first_row = begin + (i_slot - begin // C - i_n) * C
        end = T.to(tl.int64)
        if i_n < N:
            end = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
    return i_n, i_b, first_row, tl.minimum(end - first_row, C)

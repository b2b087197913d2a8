"""Fragments of sequences that several devices share, cut into segments where they are packed."""

import triton
import triton.language as tl

from kda_core.triton_lib.packing import sequence_of_slot


@triton.jit(do_not_specialize=["N", "rows"])
def bounds_kernel(cu_seqlens, bounds, N, rows):
    """Boundaries [segments + 1] of fragments [N + 1] cut into segments of ``rows`` rows, on the device alone.

    Segment i of fragment n is number cu_seqlens[n] // rows + n + i, as chunks have slots; numbers left over are
    segments without rows. Grid: segments + 1.
    """
    i = tl.program_id(0).to(tl.int64)
    last = N.to(tl.int64)
    n = sequence_of_slot(cu_seqlens, last, i, rows)
    begin = tl.load(cu_seqlens + n).to(tl.int64)
    end = tl.load(cu_seqlens + tl.minimum(n + 1, last)).to(tl.int64)
    tl.store(bounds + i, tl.minimum(begin + (i - begin // rows - n) * rows, end))

"""Fragments of sequences that several devices share, cut into segments where they are packed."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kda_core.request import Request
from kda_core.triton_lib.plan import Boundaries, Builder


def write_bounds(b: Builder, r: Request, cut: Request, rows: int) -> Request:
    """``cut``, the call ``r`` in segments of ``rows`` rows, with boundaries that the plan writes where they are new."""
    if cut.cu_seqlens is r.cu_seqlens:
        return cut
    bounds = b.scratch(cut.cu_seqlens.source, cut.cu_seqlens.shape, torch.int64)
    if r.cu_seqlens is None:
        b.step(Boundaries(bounds, rows, r.T))
    else:
        b.pick(bounds_kernel, cut.N + 1, 1, {"cu_seqlens": r.cu_seqlens, "bounds": bounds, "N": r.N, "rows": rows})
    return replace(cut, cu_seqlens=bounds)


@triton.jit(do_not_specialize=["N", "rows"])
def bounds_kernel(cu_seqlens, bounds, N, rows):
    """Boundaries [segments + 1] of fragments [N + 1] cut into segments of ``rows`` rows, on the device alone.

    Segment i of fragment n is number cu_seqlens[n] // rows + n + i, as chunks have slots; numbers left over are
    segments without rows. Grid: segments + 1.
    """
    i = tl.program_id(0).to(tl.int64)
    last = N.to(tl.int64)
    low = last * 0
    high = last
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens + middle).to(tl.int64) // rows + middle <= i:
            low = middle
        else:
            high = middle - 1
    begin = tl.load(cu_seqlens + low).to(tl.int64)
    end = tl.load(cu_seqlens + tl.minimum(low + 1, last)).to(tl.int64)
    tl.store(bounds + i, tl.minimum(begin + (i - begin // rows - low) * rows, end))

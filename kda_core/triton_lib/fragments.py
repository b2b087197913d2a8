"""Where sequences, or fragments that several devices share, are cut into segments."""

import triton
import triton.language as tl

from kda_core.triton_lib.packing import is_padding, sequence_of_slot


@triton.jit(do_not_specialize=["N", "T", "rows", "per", "s_index", "pad_slot_id", "slots", "s_final", "final_slots"])
def segments_kernel(
    cu_seqlens,  # [N + 1], or None for a batch of N sequences of T rows
    indices, final_indices,  # [N] or None
    bounds,  # [S + 1] int64: boundaries of segments of ``rows`` rows
    sequences,  # [S + 1] int64: whose a segment is; -1: nobody's, or a skipped sequence's; or None
    own,  # [S] int64: the segment's number, or -1; or None
    ends,  # [S] int64: where the state at a segment's end is stored, or -1: nowhere; or None
    N, T, rows,
    per,  # segments of a sequence of the batch
    s_index, pad_slot_id, slots, s_final, final_slots,
    EMPTY: tl.constexpr,  # sequences without rows store their state
):  # fmt: skip
    """Segments on the device alone. Grid: S + 1.

    Segment i of sequence n is number cu_seqlens[n] // rows + n + i, as chunks have slots; numbers left over are
    segments without rows.
    """
    i = tl.program_id(0).to(tl.int64)
    if cu_seqlens is None:
        n = tl.minimum(i // tl.maximum(per, 1), N)  # sequences without rows have none
        begin = n * T
        end = tl.minimum(n + 1, N.to(tl.int64)) * T
        first = n * per
    else:
        last = N.to(tl.int64)
        n = sequence_of_slot(cu_seqlens, last, i, rows)
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        end = tl.load(cu_seqlens + tl.minimum(n + 1, last)).to(tl.int64)
        first = begin // rows + n
    start = begin + (i - first) * rows
    tl.store(bounds + i, tl.minimum(start, end))
    # Each sequence has a segment, if only for its state.
    used = (n < N) & ((start < end) | (i == first))
    state = n
    if indices is not None:
        state = tl.load(indices + n * s_index, mask=n < N, other=-1).to(tl.int64)
        used &= is_padding(state, pad_slot_id, slots) == 0
    if sequences is not None:
        tl.store(sequences + i, tl.where(used, n, -1))
    if i < tl.num_programs(0) - 1:
        if own is not None:
            tl.store(own + i, tl.where(used, i, -1))
        if ends is not None:
            writes = used & (start + rows >= end)
            if not EMPTY:
                writes &= begin < end
            if final_indices is not None:
                state = tl.load(final_indices + n * s_final, mask=n < N, other=-1).to(tl.int64)
                writes &= is_padding(state, pad_slot_id, final_slots) == 0
            tl.store(ends + i, tl.where(writes, state, -1))

"""The pairs of slots that ``gradients_hopper_persistent`` takes, where a sequence may end within one: packed calls, and
dense ones whose sequences do not fill their last pair.

A pair begins with its sequence or with a pair's rows behind another, so that a sequence's bits are its own. Pairs are
counted without gaps, those of a sequence in turn: whole ones, and apart from them those that end with their sequence.
Their states and slots are where the recurrences and ``prepare`` have them. The last chunk of a sequence that has an odd
number of them is in no pair: ``gradients_hopper`` takes it.

Rows behind the last sequence get gradients of zero.

Grid: a program a sequence, then one that counts, which with others has the rows behind the last one. Addresses: int64.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.packing import chunks_before, rows_of_sequence


@triton.jit(do_not_specialize=["T", "N", "chunks", "pairs", "HV"])
def pairs_kernel(
    table,  # [2, pairs, 4]: first row, slot, place among the states, rows; whole pairs, then others
    pair_count,  # [2]
    dq, dk, dg, dv,  # [B · T, HV, K]
    dbeta,  # [B · T, HV]
    cu_seqlens,  # [N + 1] or None
    T, N, chunks, pairs, HV, K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0).to(tl.int64)
    if i_n < N:
        i_b, bos, length, slot0 = rows_of_sequence(cu_seqlens, i_n, T, chunks, C)
        _, _, _, place0 = rows_of_sequence(cu_seqlens, i_n, T, (chunks + 1) // 2, 2 * C)
        before = chunks_before(cu_seqlens, i_n, T, 2 * C, 2 * C)
        others_before = chunks_before(cu_seqlens, i_n, T, 2 * C, C + 1) - before + pairs
        count = (length + C - 1) // (2 * C)
        for first in range(0, count, ROWS):
            j = first + tl.arange(0, ROWS)
            there = j < count
            at = table + tl.where(j < length // (2 * C), before + j, others_before) * 4
            tl.store(at, (i_b * T + bos + j * 2 * C).to(tl.int32), mask=there)
            tl.store(at + 1, (slot0 + 2 * j).to(tl.int32), mask=there)
            tl.store(at + 2, (place0 + j).to(tl.int32), mask=there)
            tl.store(at + 3, tl.minimum(length - j * 2 * C, 2 * C).to(tl.int32), mask=there)
    if i_n == N:
        whole = chunks_before(cu_seqlens, i_n, T, 2 * C, 2 * C)
        others = chunks_before(cu_seqlens, i_n, T, 2 * C, C + 1) - whole
        tl.store(pair_count, whole.to(tl.int32))
        tl.store(pair_count + 1, others.to(tl.int32))
        # Programs without pairs read the first one.
        o = tl.arange(0, 4)
        tl.store(table + o, tl.zeros([4], tl.int32), mask=o < tl.where(whole == 0, 4, 0))
        tl.store(table + pairs * 4 + o, tl.zeros([4], tl.int32), mask=o < tl.where(others == 0, 4, 0))
    if cu_seqlens is not None and i_n >= N:
        end = tl.load(cu_seqlens + N).to(tl.int64)
        o_k = tl.arange(0, K)
        for row in range(end + i_n - N, T, tl.num_programs(0) - N):
            for i_h in range(HV):
                at = (row * HV + i_h) * K + o_k
                tl.store(dq + at, tl.zeros([K], dq.dtype.element_ty))
                tl.store(dk + at, tl.zeros([K], dk.dtype.element_ty))
                tl.store(dg + at, tl.zeros([K], dg.dtype.element_ty))
                tl.store(dv + at, tl.zeros([K], dv.dtype.element_ty))
                tl.store(dbeta + row * HV + i_h, tl.zeros([], dbeta.dtype.element_ty))

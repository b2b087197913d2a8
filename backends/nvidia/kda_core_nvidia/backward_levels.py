"""Device helpers of the backward: chunk slots, gates and decays over intervals.

Decays inside a chunk are needed as exp of a sum over an interval of rows: from the chunk's start to a row,
from a row to the chunk's end, or, for the level with half-blocks of b rows, from a row to the middle of its
block of 2 b rows (KERNELS: hierarchical reference points). Every one of those sums is a product of a 0/1
matrix [C, C] with the block's log2 decays [C, BK]. Sums of non-positive terms do not cancel, as differences
of cumulative sums do after one very negative decay, and the matrix units return them in the layout in which
the neighbouring products are. The decays enter as two or three fp16 terms (22 or 33 significant bits); the
products with 0 and 1 are exact.
"""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(1 / math.log(2))
L2NORM_EPS = tl.constexpr(1e-6)
# exp2 of anything below is 0 in fp32, so that a clamp there changes no result; the chunk's sums stay within fp16.
MIN_LOG2_DECAY = tl.constexpr(-512.0)


@triton.jit
def locate(i_slot, slot_sequence, first_slot, cu_seqlens, T, NT, N, C: tl.constexpr, VARLEN: tl.constexpr):
    """Where chunk ``i_slot`` lies: (batch row, end of its sequence, first token, sequence).

    Tokens count within the batch row. Packed: sequence N is the rest of the row behind the last sequence, and
    a slot that holds nothing has sequence -1.
    """
    if VARLEN:
        i_n = tl.load(slot_sequence + i_slot)
        i_s = tl.maximum(i_n, 0)
        bos = tl.load(cu_seqlens + i_s).to(tl.int32)
        eos = tl.load(cu_seqlens + tl.minimum(i_s + 1, N)).to(tl.int32)
        eos = tl.where(i_n == N, T, eos)
        t0 = bos + (i_slot - tl.load(first_slot + i_s)) * C
        i_b = i_n * 0
    else:
        i_n = i_slot // NT
        i_b = i_n
        eos = T
        t0 = (i_slot % NT) * C
    return i_b, eos, t0, i_n


@triton.jit
def softplus(x):
    """log(1 + exp x), accurate for very negative x too."""
    y = tl.exp(-tl.abs(x))
    y1 = 1.0 + y
    # log1p(y) = y log(1 + y) / ((1 + y) - 1): the rounding of 1 + y divides out.
    log1p = tl.where(y1 == 1.0, y, y * tl.log(y1) / tl.where(y1 == 1.0, 1.0, y1 - 1.0))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def log2_decay(b_g, a, b_bias, lower_bound, GATE: tl.constexpr):
    """Log2 decay of a block of g. GATE: 0 g is the natural-log decay, 1 softplus gate, 2 lower-bound gate."""
    if GATE == 1:
        b_g = -a * softplus(b_g + b_bias[None, :])
    elif GATE == 2:
        b_g = lower_bound * tl.sigmoid(a * (b_g + b_bias[None, :]))
    return tl.maximum(b_g * LOG2E, MIN_LOG2_DECAY)


@triton.jit
def load_gate(A_log, dt_bias, i_h, o_k, m_k, K: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr):
    """exp(A_log) of a head (1 without it) and its block of dt_bias (0 without it)."""
    a = 1.0
    if HAS_A:
        a = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    b_bias = tl.zeros(o_k.shape, tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    return a, b_bias


@triton.jit
def split3(b_x, EXACT: tl.constexpr):
    """fp16 terms that sum to ``b_x``: two, or three when EXACT (else the third is unused)."""
    hi = b_x.to(tl.float16)
    rest = b_x - hi.to(tl.float32)
    mid = rest.to(tl.float16)
    lo = mid
    if EXACT:
        lo = (rest - mid.to(tl.float32)).to(tl.float16)
    return hi, mid, lo


@triton.jit
def interval_sum(b_w, hi, mid, lo, EXACT: tl.constexpr):
    """The 0/1 matrix ``b_w`` (bool [C, C]) times a block that was split by :func:`split3`, in fp32."""
    w = b_w.to(tl.float16)
    out = tl.dot(w, hi)
    out = tl.dot(w, mid, out)
    if EXACT:
        out = tl.dot(w, lo, out)
    return out


@triton.jit
def level_interval(o_r, o_s, b: tl.constexpr):
    """Rows between row r and the middle of its 2b-block: (start, r] in a second half, (r, end] of a first half."""
    half = (o_r // b)[:, None] == (o_s // b)[None, :]
    second = ((o_r // b) % 2 == 1)[:, None]
    return half & ((second & (o_s[None, :] <= o_r[:, None])) | ((second == 0) & (o_s[None, :] > o_r[:, None])))


@triton.jit
def level_pairs(o_r, o_s, b: tl.constexpr):
    """Pairs (r, s) with r in the second and s in the first half of the same 2b-block."""
    same = (o_r // (2 * b))[:, None] == (o_s // (2 * b))[None, :]
    return same & (((o_r // b) % 2 == 1)[:, None]) & (((o_s // b) % 2 == 0)[None, :])


@triton.jit
def level_mirror(o_r, o_s, b: tl.constexpr):
    """The transpose of :func:`level_pairs`: r in the first and s in the second half of the same 2b-block."""
    same = (o_r // (2 * b))[:, None] == (o_s // (2 * b))[None, :]
    return same & (((o_r // b) % 2 == 0)[:, None]) & (((o_s // b) % 2 == 1)[None, :])


@triton.jit
def level_reach(o_r, o_s, b: tl.constexpr):
    """Rows s of row r's half whose pairs straddle the decay of row r: s >= r in a second half, s < r in a first."""
    half = (o_r // b)[:, None] == (o_s // b)[None, :]
    second = ((o_r // b) % 2 == 1)[:, None]
    return half & ((second & (o_s[None, :] >= o_r[:, None])) | ((second == 0) & (o_s[None, :] < o_r[:, None])))

"""What the kernels for prompts of ``fused_recurrent_kda`` share: blocks of 16 tokens, exact to float32 on matrix units.

Two launches, as for ``chunk_kda``: ``blocks_prepare`` (one program a block and value head) and ``blocks_recurrence``
(sequential). The equations are those of ``layout``, for C = 16 rows.

Float32 from 16-bit products. Rows and columns of both factors are scaled by powers of two to the upper end of
float16's range and split into a float16 and what it leaves, another one: 22 bits. The product of two remainders is
below float32's last bit and left out, so that three products of 16-bit operands give one of float32 (bfloat16 would
need six). An element keeps its 22 bits down to 2⁻¹⁶ of its row's norm (q and k: before they decay); what is smaller has
an error of at most 2⁻³⁸ of that norm. What only enters o takes one or two products where o is bfloat16: an error of
2⁻¹² beside the 2⁻⁹ of o's own rounding. Sums onto the state are ordinary float32 additions: the matrix unit's do not
round but cut.

Which sequences: those of more than SHORT tokens, whatever lies beside them; ``recurrent`` has the others. Both go by a
sequence's own length, and nothing here depends on how many sequences there are, so that no bit of the results does.
With packed sequences the blocks of the long ones are numbered through, and ``locate`` finds them.

Layout, in the order of blocks, n · ceil(T / 16) + i when dense; every tensor is contiguous:

    planes   [blocks, HV, 5 or 6, 16, KP]   float16   ke, qg (high halves), ke (low), kA (high, low); qg (low) where o
                                                      is not bfloat16. Rows are scaled: q and k to a norm of 2^TOP
    squares  [blocks, HV, 2, 16, 16]        float16   P, [row r, column s], times 2^-TOP; high and low
    factors  [blocks, HV, 48 + KP]          float32   by row: what ke, kA and qg are to be multiplied with; exp(G_C) − 1

Rows past a sequence's end are zero (their factors are finite). Index arithmetic is int64 from the block up.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.decay import selected_sum, straddles, to_reference

ROWS = tl.constexpr(16)
"""Rows of a block."""

TOP = tl.constexpr(14)
"""Operands are scaled to norms or magnitudes from 2^(TOP − 1) to 2^TOP; float16 ends at 2^16."""

SHORT = tl.constexpr(8)
"""Sequences of at most so many tokens belong to ``recurrent``, wherever they are and whatever lies beside them."""

SCAN = tl.constexpr(256)
"""Sequences that ``locate`` looks at at once."""


@triton.jit
def locate(cu_seqlens, N, i, BY_BLOCK: tl.constexpr):
    """The packed sequence of more than SHORT tokens that holds block ``i`` of all such (or is the i-th of them).

    Returns: its number (N: there is none) and how many blocks lie before it.
    """
    o_n = tl.arange(0, SCAN)
    found = N * 0
    first = N * 0
    passed = N * 0
    before = N * 0
    while first < N:
        m_n = first + o_n < N
        begin = tl.load(cu_seqlens + first + o_n, mask=m_n, other=0).to(tl.int64)
        end = tl.load(cu_seqlens + first + o_n + 1, mask=m_n, other=0).to(tl.int64)
        length = (end - begin).to(tl.int32)
        blocks = tl.where(length > SHORT, (length + ROWS - 1) // ROWS, 0)
        units = blocks
        if not BY_BLOCK:
            units = (length > SHORT).to(tl.int32)
        earlier = m_n & (passed + tl.cumsum(units, 0) <= i)
        count = tl.sum(earlier.to(tl.int32), 0)
        found += count
        before += tl.sum(tl.where(earlier, blocks, 0), 0)
        passed += tl.sum(units, 0)
        # Behind the one that was found nothing is earlier any more.
        first = tl.where(count < SCAN, N, first + SCAN)
    return found, before


@triton.jit
def exponent(x):
    """Exponent e of float32 x >= 0, 2^e <= x < 2^(e + 1); at least −100, and at most 128 (inf, NaN)."""
    return tl.maximum((x.to(tl.int32, bitcast=True) >> 23) - 127, -100)


@triton.jit
def power(e):
    """2^e in float32, −127 < e < 128."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """float16 and the rest, float16: x to 22 bits."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def product(a_high, a_low, b_high, b_low, start, EXACT: tl.constexpr):
    """start (None: zero) + a · b from their halves; the small products first, as long as the sum is small."""
    if EXACT:
        start = tl.dot(a_low, b_high, start)
        start = tl.dot(a_high, b_low, start)
    return tl.dot(a_high, b_high, start)


@triton.jit
def level(b_q, b_k, parts, m, el, b: tl.constexpr, TERMS: tl.constexpr, EXACT_OUT: tl.constexpr):
    """Add q kᵀ and k kᵀ, right for the pairs that straddle the middle of a 2b-block, to m and el."""
    r = tl.arange(0, 16)
    decay = tl.exp2(selected_sum(to_reference(r, r, b), parts, TERMS))
    k_high, k_low = halves(b_k * decay)
    q_high, q_low = halves(b_q * decay)
    right_high = tl.trans(k_high)
    right_low = tl.trans(k_low)
    el = product(k_high, k_low, right_high, right_low, el, True)
    m = product(q_high, q_low, right_high, right_low, m, EXACT_OUT)
    return m, el


@triton.jit
def of_level(x8, x4, x2, x1):
    """Every pair from the level that is right for it; zero on and above the diagonal."""
    r = tl.arange(0, 16)
    x = tl.where(straddles(r, r, 8), x8, 0.0)
    x = tl.where(straddles(r, r, 4), x4, x)
    x = tl.where(straddles(r, r, 2), x2, x)
    return tl.where(straddles(r, r, 1), x1, x)


@triton.jit
def scaled_halves(x):
    """Halves of the rows of x scaled to 2^TOP, and what scales the rows back."""
    e = exponent(tl.max(tl.abs(x), 1)) - (TOP - 1)
    high, low = halves(x * power(-e)[:, None])
    return high, low, power(e)

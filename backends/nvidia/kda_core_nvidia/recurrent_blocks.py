"""Shared by the kernels for prompts of ``fused_recurrent_kda``: blocks of 16 tokens, exact to float32 on matrix units.

Two launches, as for ``chunk_kda``: ``blocks_prepare`` (one program a block and value head) and ``blocks_recurrence``
(sequential). The equations are those of ``triton_lib.layout``, for C = 16 rows.

Float32 from 16-bit products. Rows and columns of both factors are scaled by powers of two to the upper end of
float16's range and split into a float16 and what it leaves, another one: 22 bits. The product of two remainders is
below float32's last bit and left out, so that three products of 16-bit operands give one of float32 (bfloat16 would
need six). Where decays span more than float16 can (``pairs``), the parts are tf32, and for the inverse three bfloat16
ones. An element keeps its 22 bits down to 2⁻¹⁶ of its row's norm (q and k: before they decay); what is smaller has an
error of at most 2⁻³⁸ of that norm. Only q kᵀ between rows takes one or two products where o is bfloat16: an error of
2⁻¹² of every channel beside the 2⁻⁹ of o's own rounding. (What a token reads of the state, qg S, and what its own
write takes away, P r, may nearly cancel: 2⁻¹² of either would show.) Sums onto the state are ordinary float32
additions: the matrix unit's do not round but cut. Multiplications and additions are fused where the code says so and
nowhere else: a compiler that chooses may do so differently for dense and packed sequences.

Which sequences: those of more than SHORT tokens, whatever lies beside them; ``recurrent`` has the others. Both go by a
sequence's own length, and nothing here depends on how many sequences there are, so that no bit of the results does.
With packed sequences the blocks of the long ones are numbered through, and ``locate`` finds them.

Layout, in the order of blocks, n · ceil(T / 16) + i when dense; every tensor is contiguous:

    planes   [blocks, HV, PLANES, 16, KP]   float16   ke, qg (high halves), ke, qg (low), kA (high, low). Rows are
                                                      scaled: q and k to a norm of 2^TOP
    squares  [blocks, HV, 2, 16, 16]        float16   P, [row r, column s], times 2^-TOP; high and low
    factors  [blocks, HV, 48 + KP]          float32   by row: what ke, kA and qg are to be multiplied with; decays

Rows past a sequence's end are zero (their factors are finite). Index arithmetic is int64 from the block up.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kda_core.triton_lib.decay import selected_sum
from kda_core.triton_lib.parts import nearest, two_parts
from kda_core.triton_lib.squares import straddles, to_reference
from kda_core_nvidia.prepare import INTERPRETED, _widen

ROWS = tl.constexpr(16)
"""Rows of a block."""

PLANES = tl.constexpr(6)
"""ke, qg and kA in halves."""

TOP = tl.constexpr(14)
"""Operands are scaled to norms or magnitudes from 2^(TOP − 1) to 2^TOP; float16 ends at 2^16."""

SHORT = tl.constexpr(8)
"""Sequences of at most so many tokens belong to ``recurrent``, wherever they are and whatever lies beside them."""

TF32 = tl.constexpr(0x2000)
"""The last bit of tf32, among those of float32."""

SCAN = tl.constexpr(256)
"""Sequences that ``locate`` looks at at once."""


@triton.jit
def lead():
    """Let the kernels that follow start before this one ends, for ``recurrent``."""
    gdc_launch_dependents()


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
        units = blocks if BY_BLOCK else (length > SHORT).to(tl.int32)
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
def power_of(x):
    """2^x; below 2^−126 zero, which spares what keeps denormal results."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def bounded_decay(b_g, slope, bias, reach):
    """``gate.log2_decay`` of the bounded gate: reach · sigmoid, by the instructions that keep no denormal numbers.

    Args:
        slope: −log2(e) times the rate. bias: dt_bias, or 0.
        reach: the bound in log2 units; 0 in rows whose decay must be 0.
    """
    x = 1.0 + power_of((b_g + bias) * slope)
    if INTERPRETED:
        root = tl.rsqrt(x)
    else:
        root = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return reach * root * root


@triton.jit
def scaled(x, scale):
    """A loaded block [16, 16] in float32, its rows times powers of two, by one product that rounds nothing.

    An infinity or NaN in a row becomes NaN in all rows, which it does to keys in any case: (I + L)⁻¹ mixes them.
    """
    if x.dtype == tl.bfloat16 and not INTERPRETED:
        r = tl.arange(0, 16)
        return tl.dot(tl.where(r[:, None] == r[None, :], scale[:, None], 0.0).to(tl.bfloat16), x)
    return _widen(x, 16) * scale[:, None]


@triton.jit
def product(a_high, a_low, b_high, b_low, start, EXACT: tl.constexpr):
    """start (None: zero) + a · b from their halves; the small products first, as long as the sum is small."""
    if EXACT:
        start = tl.dot(a_low, b_high, start)
        start = tl.dot(a_high, b_low, start)
    return tl.dot(a_high, b_high, start)


@triton.jit
def store_halves(p, x, APART: tl.constexpr):
    """Store both halves of x, so many elements apart."""
    high, low = two_parts(x, tl.float16)
    tl.store(p, high)
    tl.store(p + APART, low)


@triton.jit
def level(b_q, b_k, parts, m, el, j: tl.constexpr, TERMS: tl.constexpr, EXACT_OUT: tl.constexpr):
    """Add q kᵀ and k kᵀ, right for the pairs that straddle the middle of a block of 2^(j + 1) rows, to m and el."""
    r = tl.arange(0, 16)
    decay = power_of(selected_sum(to_reference(r[:, None], r[None, :], j), parts, TERMS))
    k_high, k_low = two_parts(b_k * decay, tl.float16)
    q_high, q_low = two_parts(b_q * decay, tl.float16)
    right_high = tl.trans(k_high)
    right_low = tl.trans(k_low)
    el = product(k_high, k_low, right_high, right_low, el, True)
    m = product(q_high, q_low, right_high, right_low, m, EXACT_OUT)
    return m, el


@triton.jit
def signed(r, s):
    """Rows between r and the last one of the first half: 1 where r is behind it, −1 where r lies before it."""
    later = (r >= 8)[:, None] & (s >= 8)[None, :] & (s[None, :] <= r[:, None])
    earlier = (r < 8)[:, None] & (s < 8)[None, :] & (s[None, :] > r[:, None])
    return later.to(tl.float32) - earlier.to(tl.float32)


@triton.jit
def alternating(x):
    """Channels of x [16, BK] in the order in which results of products are operands of tf32 products where they lie.

    A thread has two neighbouring channels of every eight, and is to have one of the first and one of the last four.
    """
    return tl.reshape(tl.permute(tl.reshape(x, [16, x.shape[1] // 8, 4, 2]), (0, 1, 3, 2)), x.shape)


@triton.jit
def pairs(b_q, b_k, parts, m, el, TERMS: tl.constexpr, EXACT_OUT: tl.constexpr):
    """Add q kᵀ and k kᵀ, right for all pairs below the diagonal, to m and el; decays are at least −5 a row.

    No exponent is then beyond ±58. Pairs above the diagonal may overflow, and are not looked at.
    """
    r = tl.arange(0, 16)
    distance = selected_sum(signed(r, r), parts, TERMS)
    decay = power_of(distance)
    left = alternating(b_k * decay)
    left_q = alternating(b_q * decay)
    right = tl.trans(alternating(b_k * power_of(-distance)))
    if TERMS == 1:
        el = tl.dot(left, right, el, input_precision="ieee")
        m = tl.dot(left_q, right, m, input_precision="ieee")
    else:
        left_high = nearest(left, TF32)
        left_low = left - left_high
        right_high = nearest(right, TF32)
        right_low = right - right_high
        el = tl.dot(left_low, right_high, el, input_precision="tf32")
        el = tl.dot(left_high, right_low, el, input_precision="tf32")
        el = tl.dot(left_high, right_high, el, input_precision="tf32")
        if EXACT_OUT:
            q_high = nearest(left_q, TF32)
            m = tl.dot(left_q - q_high, right_high, m, input_precision="tf32")
            m = tl.dot(q_high, right_low, m, input_precision="tf32")
            m = tl.dot(q_high, right_high, m, input_precision="tf32")
        else:
            # Rounded to tf32; the bits below are not zero, the matrix unit cuts them off.
            left_q = (left_q.to(tl.int32, bitcast=True) + TF32 // 2).to(tl.float32, bitcast=True)
            m = tl.dot(left_q, right_high, m, input_precision="tf32")
    return m, el


@triton.jit
def of_level(x8, x4, x2, x1):
    """Every pair from the level that is right for it; zero on and above the diagonal."""
    r = tl.arange(0, 16)[:, None]
    s = tl.arange(0, 16)[None, :]
    x = tl.where(straddles(r, s, 3), x8, 0.0)
    x = tl.where(straddles(r, s, 2), x4, x)
    x = tl.where(straddles(r, s, 1), x2, x)
    return tl.where(straddles(r, s, 0), x1, x)


@triton.jit
def scaled_halves(x):
    """Halves of the rows of x scaled to 2^TOP, and what scales the rows back."""
    e = exponent(tl.max(tl.abs(x), 1)) - (TOP - 1)
    high, low = two_parts(x * power(-e)[:, None], tl.float16)
    return high, low, power(e)

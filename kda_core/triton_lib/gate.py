"""Device functions for the gate, beta and row norms; log decays are in log2 units, so that ``exp2`` undoes them.

Source of the gates: Kimi Linear, arXiv 2510.26692; K3's bounded form is ``lower_bound · sigmoid(exp(A_log) · x)``.
"""

import math
import struct

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1 / math.log(2))

LOG2_E_REST = tl.constexpr(LOG2_E.value - struct.unpack("f", struct.pack("f", LOG2_E.value))[0])
"""The part of LOG2_E that float32 leaves out."""

LN_2 = tl.constexpr(math.log(2))

LEAST_EXPONENT = tl.constexpr(-150.0)
"""exp of it and of less is 0 in float32."""

LARGEST_A_LOG = tl.constexpr(80.0)
"""exp of it is finite, and above MAX_RATE."""

LOG2_DECAY_FLOOR = tl.constexpr(-1e30)
"""Stands for −inf: sums of it stay finite, and 0 · floor is 0 where 0 · −inf would be NaN."""

FLOAT16_FLOOR = tl.constexpr(-512.0)
"""The same where log2 decays become float16 numbers; 2 to it, and to any less, is 0 in float32."""

MAX_RATE = tl.constexpr(2.0**100)
"""Stands for a rate exp(A_log) that overflows, so that neither 0 · rate nor differences of products become NaN."""

NORM_EPS = tl.constexpr(1e-6)
"""Added to the sum of squares of a q or k row, as in every KDA implementation."""


@triton.jit
def exp(x, EXACT: tl.constexpr = True):
    """e^x in float32 for x <= 88. EXACT: to a few units in the last place; otherwise, of a rounded x·log₂e, to |x|."""
    if not EXACT:
        return tl.exp2(x * LOG2_E)
    x = tl.where(x < LEAST_EXPONENT, LEAST_EXPONENT, x)  # of −inf nothing could be taken; NaN stays
    y = x * LOG2_E
    rest = tl.fma(x, LOG2_E_REST, tl.fma(x, LOG2_E, -y))
    power = tl.exp2(y)
    return tl.fma(power * LN_2, rest, power)


@triton.jit
def _reciprocal(x, EXACT: tl.constexpr = True):
    """1 / x for x in [1, 2]; EXACT: to the last place or so."""
    # The square of a reciprocal root is two instructions where a float32 division takes six (here and below).
    root = tl.rsqrt(x)
    y = root * root
    if EXACT:
        y = tl.fma(tl.fma(-x, y, 1.0), y, y)
    return y


@triton.jit
def sigmoid(x, EXACT: tl.constexpr = True):
    """1 / (1 + exp(−x)), as exact as ``exp``."""
    if not EXACT:
        return _reciprocal(1.0 + exp(-x, False), False)  # exp may overflow to inf, and the result is then the right 0
    e = exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) * _reciprocal(1.0 + e)


@triton.jit
def softplus(x, EXACT: tl.constexpr = True):
    """log(1 + exp(x)), as exact as ``exp``."""
    # log(1 + u) = 2 artanh(u / (2 + u)), u = exp(−|x|) <= 1, so that s <= 1/3: eight terms reach float32's last digit.
    u = exp(-tl.abs(x), EXACT)
    root = tl.rsqrt(2.0 + u)
    s = u * root * root
    square = s * s
    series = square * (1 / 15) + 1 / 13
    series = series * square + 1 / 11
    series = series * square + 1 / 9
    series = series * square + 1 / 7
    series = series * square + 1 / 5
    series = series * square + 1 / 3
    series = series * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def gate_rate(A_log, i_h):
    """exp(A_log) of head ``i_h``, or 1 without A_log."""
    rate = 1.0
    if A_log is not None:
        rate = rate_of(tl.load(A_log + i_h))
    return rate


@triton.jit
def rate_of(x):
    """exp of a loaded A_log."""
    x = x.to(tl.float32)
    x = exp(tl.where(x > LARGEST_A_LOG, LARGEST_A_LOG, x))
    return tl.where(x > MAX_RATE, MAX_RATE, x)  # NaN stays


@triton.jit
def gate_gradient(x, rate, lower_bound, grad, GATE: tl.constexpr, EXACT: tl.constexpr = True):
    """Gradient of x = g + dt_bias and the summands of dA_log, from ``grad`` of the natural-log decay.

    With γ = −rate·softplus(x): dx = −rate·sigmoid(x)·dγ and dA_log = Σ γ·dγ. With γ = b·sigmoid(rate·x):
    dx = b·rate·s(z)·s(−z)·dγ, z = rate·x, and dA_log = Σ x·dx. Where x is infinite, a gradient that vanishes stays 0.
    EXACT as in ``exp``; what is beside results of 16 bits need not be.
    """
    if GATE == "bounded":
        # s(z)·s(−z) = e / (1 + e)², e = exp(−|z|), and not s·(1 − s), which loses every digit for large z.
        e = exp(-tl.abs(x * rate), EXACT)
        s = _reciprocal(1.0 + e, EXACT)
        dx = e * s * s * grad * lower_bound * rate
        summand = tl.where(dx == 0.0, 0.0, x * dx)
    else:
        dx = -(sigmoid(x, EXACT) * rate * grad)
        summand = tl.where(grad == 0.0, 0.0, -(softplus(x, EXACT) * rate * grad))
    return dx, summand


@triton.jit
def norm_gradient(b_x, b_d):
    """Gradient of rows ``b_x`` [R, KP], float32, from that of the normalised ones, x / sqrt(Σ x² + ε)."""
    # A row without a gradient may lie behind the last sequence, where it may hold anything, NaN too.
    b_x = tl.where(tl.sum(tl.abs(b_d), 1)[:, None] == 0.0, 0.0, b_x)
    norm = tl.rsqrt(tl.sum(b_x * b_x, 1) + NORM_EPS)[:, None]
    b_x *= norm
    return norm * (b_d - b_x * tl.sum(b_x * b_d, 1)[:, None])


@triton.jit
def log2_decay(
    b_g, a, bias, lower_bound, GATE: tl.constexpr, UNIT: tl.constexpr = 1.0, NEEDS_FLOOR: tl.constexpr = True
):
    """UNIT times the log2 decay of a block of g, float32, floored so that it is finite (NaN stays NaN).

    Args:
        b_g: float32 block of g.
        a: exp(A_log), or 1; unused without a gate.
        bias: dt_bias, broadcastable, or 0; unused without a gate.
        lower_bound: bound of the bounded gate, broadcastable (0 in rows whose decay must be 0); unused otherwise.
        GATE: "none" (g is the natural-log decay), "softplus" or "bounded".
        UNIT: 1, or float16's (``decay.split``), which needs a higher floor: FLOAT16_FLOOR times it.
        NEEDS_FLOOR: whether a bounded gate's bound may lie below FLOAT16_FLOOR.
    """
    if GATE == "bounded":
        # The sum first: products with the rate would be rounded, of which a sum that cancels leaves more.
        root = tl.rsqrt(1.0 + tl.exp2((b_g + bias) * (a * -LOG2_E)))
        if UNIT != 1.0 and NEEDS_FLOOR:
            # UNIT last: times a bound of −1e38 it is infinite.
            y = (lower_bound * LOG2_E) * root * root
            y = tl.where(y < FLOAT16_FLOOR, FLOAT16_FLOOR, y) * UNIT
        else:
            y = (lower_bound * (LOG2_E * UNIT)) * root * root
    elif GATE == "softplus":
        y = (a * (-LOG2_E * UNIT)) * softplus(b_g + bias, False)
    else:
        y = b_g * (LOG2_E * UNIT)
    if GATE != "bounded":
        FLOOR: tl.constexpr = LOG2_DECAY_FLOOR if UNIT == 1.0 else FLOAT16_FLOOR * UNIT
        y = tl.where(y < FLOOR, FLOOR, y)
    return y


@triton.jit
def write_strength(b_beta, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr, EXACT: tl.constexpr = True):
    """beta in float32 from what the caller gave: the value itself, or logits; doubled for negative eigenvalues."""
    b_beta = b_beta.to(tl.float32)
    if SIGMOID:
        b_beta = sigmoid(b_beta, EXACT)
    if NEG_EIGVAL:
        b_beta = 2.0 * b_beta
    return b_beta

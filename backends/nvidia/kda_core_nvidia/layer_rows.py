"""Device functions of the short convolution and the norm in kernels that have a whole head, written in Gluon.

A tile [4, 128] holds the head's channels of q, k and v, and a part that is empty: a warp or two for each part. A thread
owns its channels, so that it may write the inputs before the next token over those that it has read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.convolution_kernels import convolved
from kda_core.triton_lib.gate import sigmoid
from kda_core_nvidia.recurrent_step import SIZE


@gluon.jit
def _laid(found, LAYOUT: gl.constexpr):
    laid = ()
    for j in gl.static_range(len(found)):
        laid += (gl.convert_layout(found[j], LAYOUT),)
    return laid


@gluon.jit
def head_filter(weight, bias, i_h, H: gl.constexpr, W: gl.constexpr):
    """Channels of head ``i_h`` and their parts, the weights of each tap (as loaded, 2 or 4 of them) and the bias."""
    WARPS: gl.constexpr = gl.num_warps()
    TAPS: gl.constexpr = 2 if W == 2 else 4
    OWNED: gl.constexpr = gl.BlockedLayout([1, 16 // WARPS], [1, 32], [4, WARPS // 4], [1, 0])
    FILTER: gl.constexpr = gl.BlockedLayout([1, 16 // WARPS, TAPS], [1, 32, 1], [4, WARPS // 4, 1], [2, 1, 0])
    part = gl.arange(0, 4, layout=gl.SliceLayout(1, OWNED))[:, None]
    channel = (part * H + i_h) * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, OWNED))[None, :]
    tap = gl.arange(0, TAPS, layout=gl.SliceLayout(0, gl.SliceLayout(1, FILTER)))[None, None, :]
    o_w = gl.convert_layout(channel, gl.SliceLayout(2, FILTER))[:, :, None] * W + tap
    w = gl.load(weight + o_w, mask=(tap < W) & (o_w < 3 * H * SIZE * W), other=0.0)
    b_bias = gl.zeros([4, SIZE], gl.float32, OWNED)
    if bias is not None:
        b_bias += gl.load(bias + channel, mask=part < 3, other=0.0).to(gl.float32)
    if TAPS == 2:
        first, second = gl.split(w)
        taps = _laid((first, second), OWNED)
    else:
        even, odd = gl.split(w.reshape([4, SIZE, 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        taps = _laid((first, second, third, fourth), OWNED)
    return channel, part, taps, b_bias


@gluon.jit
def convolved_row(window, x, taps, b_bias, W: gl.constexpr):
    """The convolution of a token x [4, 128] behind its W - 1 inputs, with SiLU, rounded to x's dtype; in float32."""
    window += (x,)
    seen = ()
    weights = ()
    for j in gl.static_range(W):
        seen += (window[j].to(gl.float32),)
        weights += (taps[j].to(gl.float32),)
    b_z = convolved(seen, weights, b_bias, W)
    return (b_z * sigmoid(b_z, False)).to(x.dtype).to(gl.float32)


@gluon.jit
def normed(rows, gate, weight, eps):
    """``gated_rms_norm`` of float32 rows [T, 128]."""
    r = gl.rsqrt(gl.sum(rows * rows, 1) / SIZE + eps)[:, None]
    return rows * (r * weight.to(gl.float32) * sigmoid(gate.to(gl.float32)))

"""Kernels of a decoding step of a layer beside the recurrence: the short convolution over a pool, and the gated norm.

The convolution is that of ``convolution_kernels``, and rounds its results as that one does. A program owns its channels
of a sequence: it reads their last W - 1 inputs, and writes them again behind each token, or behind the last one. In a
call with records it writes those behind the tokens that are committed first.
Offsets are int64.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kda_core.triton_lib.convolution_kernels import convolved, filter_of
from kda_core.triton_lib.gate import sigmoid
from kda_core.triton_lib.packing import is_padding


@triton.jit(
    do_not_specialize=["T", "slots", "s_index", "s_slot", "width", "pad_slot_id", "C"],
    do_not_specialize_on_alignment=["indices", "accepted", "committed"],
)
def convolution_step_kernel(
    x,  # [N, T, D], the last stride 1
    weight,  # [D, W]
    bias,  # [D] or None
    conv_state,  # [slots, W - 1, D]
    indices,  # [N, width] slots or None
    accepted,  # [N] or None
    inputs,  # [N, C, D] of the tokens to be committed, the last stride 1; or None
    committed,  # [N] or None
    y,  # [N, T, D]
    T, C, slots, width, pad_slot_id: tl.int64, s_index: tl.int64, s_slot: tl.int64, s_xn: tl.int64, s_xt: tl.int64,
    s_cn: tl.int64, s_ct: tl.int64, s_cd: tl.int64, s_in: tl.int64, s_it: tl.int64,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr,
    EVERY_TOKEN: tl.constexpr,  # a slot for every token rather than one for the last
    KEEPS: tl.constexpr,  # inputs behind these tokens are written
):  # fmt: skip
    """Grid: one program a (sequence, BD channels), channels fastest. Rows of y of skipped sequences are not written."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    i_n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_d = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    m_d = o_d < D
    i_slot = i_n
    if indices is not None:
        i_first = 0
        if accepted is not None:
            # Out of range is clamped: the device has nobody to tell, and must not read past the table.
            i_first = tl.minimum(tl.maximum(tl.load(accepted + i_n).to(tl.int64), 1), width) - 1
        i_slot = tl.load(indices + i_n * s_index + i_first * s_slot).to(tl.int64)
        if is_padding(i_slot, pad_slot_id, slots):
            return
    taps, b_bias = filter_of(weight, bias, o_d, m_d, W)
    p_first = conv_state + i_slot * s_cn + o_d * s_cd
    window = ()
    if inputs is not None:
        # Out of range is clamped, as above.
        count = tl.minimum(tl.maximum(tl.load(committed + i_n).to(tl.int64), 0), C)
    for j in tl.static_range(W - 1):
        if inputs is None:
            b_in = tl.load(p_first + j * s_ct, mask=m_d, other=0.0)
        else:
            behind = count + j - (W - 1)
            m_old, m_new = o_d < tl.where(behind < 0, D, 0), o_d < tl.where(behind < 0, 0, D)
            b_old = tl.load(p_first + (count + j) * s_ct, mask=m_old, other=0.0)
            b_new = tl.load(inputs + i_n * s_in + behind * s_it + o_d, mask=m_new, other=0.0)
            b_in = tl.where(behind < 0, b_old, b_new.to(b_old.dtype))
        window += (b_in.to(tl.float32),)
    if inputs is not None:
        tl.debug_barrier()
        for j in tl.static_range(W - 1):
            tl.store(p_first + j * s_ct, window[j].to(conv_state.dtype.element_ty), mask=m_d)
    p_x = x + i_n * s_xn + o_d
    p_y = y + i_n * T * D + o_d
    for t in range(0, T):
        seen = window
        seen += (tl.load(p_x, mask=m_d, other=0.0).to(tl.float32),)
        b_z = convolved(seen, taps, b_bias, W)
        tl.store(p_y, (b_z * sigmoid(b_z, False)).to(y.dtype.element_ty), mask=m_d)
        window = seen[1:]
        p_x += s_xt
        p_y += D
        # Without a table sequence n has slot n, which pad_slot_id does not skip.
        i_last, writes = i_slot, t == T - 1
        if EVERY_TOKEN:
            i_last = tl.load(indices + i_n * s_index + t * s_slot).to(tl.int64)
            writes = not is_padding(i_last, pad_slot_id, slots)
        if KEEPS:  # noqa: SIM102 (known when the kernel is compiled)
            if writes:
                # All has been read from the slot before a part of it is written.
                tl.debug_barrier()
                p_last = conv_state + i_last * s_cn + o_d * s_cd
                for j in tl.static_range(W - 1):
                    tl.store(p_last + j * s_ct, window[j].to(conv_state.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["R", "T", "eps"])
def norm_step_kernel(
    rows,  # [N, T, HV, V], contiguous
    gate,  # [N, T, HV, V], the last stride 1
    weight,  # [V]
    o,  # [N, T, HV, V], the last stride 1
    R, T, eps, s_an: tl.int64, s_at: tl.int64, s_ah: tl.int64, s_on: tl.int64, s_ot: tl.int64, s_oh: tl.int64,
    HV: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    OVERLAP: tl.constexpr,  # it may have started before the kernel ahead ends
):  # fmt: skip
    """``gated_rms_norm`` of R = N · T · HV rows. Grid: one program for each ROWS of them."""
    i_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_v = tl.arange(0, VP)[None, :]
    mask = (i_r < R)[:, None] & (o_v < V)
    i_h = i_r % HV
    i_t = i_r // HV % T
    i_n = i_r // HV // T
    b_gate = tl.load(gate + (i_n * s_an + i_t * s_at + i_h * s_ah)[:, None] + o_v, mask=mask, other=0.0)
    b_w = tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    b_gate = sigmoid(b_gate.to(tl.float32))
    if OVERLAP:
        gdc_wait()
    b_o = tl.load(rows + i_r[:, None] * V + o_v, mask=mask, other=0.0).to(tl.float32)
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None] * b_w * b_gate
    tl.store(o + (i_n * s_on + i_t * s_ot + i_h * s_oh)[:, None] + o_v, b_o.to(o.dtype.element_ty), mask=mask)

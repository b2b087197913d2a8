"""Device functions for a transposed state, Sᵀ [BV, KP] in float32, as a tuple of KP / BK blocks of key channels.

A product holds the operands of one block at a time, which is what bounds its registers on chips whose lanes hold whole
rows of them; one block is the whole state.
"""

import triton
import triton.language as tl


@triton.jit
def state_offsets(o_v, o_k, s_k, s_v):
    """Offsets of a transposed block [BV, KP] inside one state; o_v is int64."""
    return o_v[:, None] * s_v + o_k[None, :].to(tl.int64) * s_k


@triton.jit
def load_state(p_state, o_v, m_v, s_k, s_v, K: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """A transposed state as a tuple of KP / BK blocks [BV, BK], zero past K and V and where there is none."""
    blocks = ()
    for i_k in tl.static_range(KP // BK):
        block = tl.zeros([BV, BK], tl.float32)
        if p_state is not None:
            o_k = i_k * BK + tl.arange(0, BK)
            mask = m_v[:, None] & (o_k < K)[None, :]
            block = tl.load(p_state + state_offsets(o_v, o_k, s_k, s_v), mask=mask, other=0.0).to(tl.float32)
        blocks += (block,)
    return blocks


@triton.jit
def store_state(p_state, blocks, o_v, m_v, s_k, s_v, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr):
    """Store what ``load_state`` loads."""
    for i_k in tl.static_range(KP // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        mask = m_v[:, None] & (o_k < K)[None, :]
        block = blocks[i_k].to(p_state.dtype.element_ty)
        tl.store(p_state + state_offsets(o_v, o_k, s_k, s_v), block, mask=mask)

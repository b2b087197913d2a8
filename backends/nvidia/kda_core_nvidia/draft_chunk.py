"""The tokens of a draft as one chunk, from a bfloat16 state: the parts of ``recurrent_draft`` that multiply.

With S the committed state and D the decays from it to a token,

    u_t = β (v_t − r_k (Sᵀ(D k_t) + Σ A_ts u_s))      o_t = r_q (Sᵀ(D q_t) + Σ B_ts u_s) + r_q r_k (q_t · k_t) u_t

where A and B are products of k_t and q_t, decayed, with k_s of the tokens that t continues from. No token waits for the
state behind another, and other tokens than its ancestors leave no trace in a token's bits.

S is a right operand as it is stored. The rows of k and q are each the sum of three parts in bfloat16, which have the 24
bits of float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.commit_kernels import parent_of
from kda_core.triton_lib.factor import decayed
from kda_core_nvidia.hopper import block_barrier, mma_v2, seen_as
from kda_core_nvidia.recurrent_step import SIZE


@gluon.jit
def whole(x):
    """Sums of rows [T, parts, K / parts]."""
    return gl.sum(gl.sum(x, 2), 1)


@gluon.jit
def row(buffer, i, ROWS: gl.constexpr, BV: gl.constexpr, FLAT: gl.constexpr, VALUES: gl.constexpr):
    """A row of value channels."""
    return seen_as(buffer, gl.float32, [ROWS, BV], FLAT).index(i).load(VALUES)


@gluon.jit
def ancestors_of_tokens(parents, T: gl.constexpr):
    """The tokens that each of T continues from, a bit for each; all earlier ones where there is no tree [T]."""
    found = ()
    for t in gl.static_range(T):
        above = gl.to_tensor((1 << t) - 1)
        if parents is not None:
            parent = parent_of(parents, t)
            above = gl.to_tensor(0)
            for s in gl.static_range(t):
                above = gl.where(parent == s, found[s] | (1 << s), above)
        found += (above,)
    return found


@gluon.jit
def pairs(b_q, b_k, factor, ancestors, o_t, TP: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
          FLAT: gl.constexpr):  # fmt: skip
    """k and q [TP, .., K] with the decays from the start to their token, and shared A and B [s, t]."""
    T: gl.constexpr = len(ancestors)
    above = gl.zeros([TP], gl.int32, TOKENS)
    for t in gl.static_range(T):
        above = gl.where(o_t == t, ancestors[t], above)
    KEYS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, ROWS))
    keys = gl.allocate_shared_memory(gl.float32, [TP * SIZE], FLAT, b_k.reshape([TP * SIZE]))
    decays = gl.allocate_shared_memory(gl.float32, [TP * SIZE], FLAT, factor.reshape([TP * SIZE]))
    k_products = gl.allocate_shared_memory(gl.float32, [TP * TP], FLAT)
    q_products = gl.allocate_shared_memory(gl.float32, [TP * TP], FLAT)
    block_barrier()
    k_d = decayed(b_k, factor)
    q_d = decayed(b_q, factor)
    for s in gl.static_range(T - 2, -1, -1):
        k_s = keys.slice(s * SIZE, SIZE).load(KEYS)[None, None, :]
        d_s = decays.slice(s * SIZE, SIZE).load(KEYS)[None, None, :]
        k_products.slice(s * TP, TP).store(whole(k_d * k_s))
        q_products.slice(s * TP, TP).store(whole(q_d * k_s))
        follows = ((above >> s) & 1 == 1)[:, None, None]
        k_d = gl.where(follows, decayed(k_d, d_s), k_d)
        q_d = gl.where(follows, decayed(q_d, d_s), q_d)
    return q_d, k_d, q_products, k_products


@gluon.jit
def _stacked(first, second, T: gl.constexpr):
    """[2, T, K] twice as 16 rows: those of up to four tokens begin at 0, 4, 8 and 12."""
    x = gl.join(first, second).permute([3, 0, 1, 2]).reshape([4, 1, T, SIZE])
    return x.broadcast_to([4, 4 // T, T, SIZE]).reshape([16, SIZE])


@gluon.jit
def in_parts(k, q, T: gl.constexpr):
    """k and q [T, K] in float32, each the sum of three of bfloat16, as left operands of 16 rows.

    With up to four tokens the second parts lie below the first, and zeros below the third. The order of sums is the
    same with more.
    """
    x = gl.join(k, q).permute([2, 0, 1])
    first = x.to(gl.bfloat16)
    x -= first.to(gl.float32)
    second = x.to(gl.bfloat16)
    third = (x - second.to(gl.float32)).to(gl.bfloat16)
    # Eight rows of 16 bytes lie in different banks.
    LEFT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    if T == 8:
        parts = gl.allocate_shared_memory(gl.bfloat16, [3, 16, SIZE], LEFT)
        parts.index(0).store(first.reshape([16, SIZE]))
        parts.index(1).store(third.reshape([16, SIZE]))
        parts.index(2).store(second.reshape([16, SIZE]))
    else:
        parts = gl.allocate_shared_memory(gl.bfloat16, [2, 16, SIZE], LEFT)
        parts.index(0).store(_stacked(first, second, T))
        parts.index(1).store(_stacked(third, third * 0, T))
    return parts


@gluon.jit
def store_products(products, parts, state, T: gl.constexpr):
    """Products of the rows with a state [K, V]; those of the second parts are added when they are read, or here."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, gl.num_warps()], instr_shape=[16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    right = state.load(gl.DotOperandLayout(1, LAYOUT, 2))
    zeros = gl.full([16, state.shape[1]], 0.0, gl.float32, LAYOUT)
    y = mma_v2(parts.index(0).load(LEFT), right, mma_v2(parts.index(1).load(LEFT), right, zeros))
    if T == 8:
        y += mma_v2(parts.index(2).load(LEFT), right, zeros)
    products.store(y)


@gluon.jit
def products_of(products, t, T: gl.constexpr, BV: gl.constexpr, FLAT: gl.constexpr, COLUMN: gl.constexpr):
    """Those of a token's k and q."""
    y_k = row(products, t, 16, BV, FLAT, COLUMN)
    y_q = row(products, (8 if T == 8 else 4) + t, 16, BV, FLAT, COLUMN)
    if T < 8:
        y_k += row(products, 8 + t, 16, BV, FLAT, COLUMN)
        y_q += row(products, 12 + t, 16, BV, FLAT, COLUMN)
    return y_k, y_q

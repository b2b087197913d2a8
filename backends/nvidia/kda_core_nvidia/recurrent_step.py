"""``recurrent`` for one token of every sequence with states in bfloat16, stored K first, written in Gluon: the same
sums, by way of shared memory. K = V = 128.

``recurrent`` holds its tile in registers, in float32, from its load to its store. A warp of it reads and writes half a
cache line of every row, and registers are so many that few programs run at once. Here the warps of a program load whole
rows to shared memory, where the state lies as it is stored; it is read twice from there, so that a thread has no more
of it in float32 than it is adding up.

Threads hold the channels that those of ``recurrent`` hold and take every sum in the same order: not a bit of a result
shows which of the two kernels it came from.

Grid: (N · HV · V / value channels of a program), value blocks fastest, then heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.factor import decay_factor, decayed
from kda_core.triton_lib.gate import NORM_EPS, gate_rate, log2_decay, write_strength
from kda_core.triton_lib.packing import is_padding
from kda_core_nvidia.hopper import async_copy, block_barrier, copy_elements

SIZE = gl.constexpr(128)
"""K and V."""

COLUMNS = gl.constexpr(32)
"""Value channels of a warp."""


@gluon.jit
def widen(x):
    """bfloat16 in float32, an instruction for each element."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit(
    do_not_specialize=["scale", "lower_bound", "s_index", "pad_slot_id", "slots"],
    do_not_specialize_on_alignment=["indices"],
)
def recurrent_step(
    q, k,  # [N, 1, H, K]
    v,  # [N, 1, HV, V]
    g,  # [N, 1, HV, K]
    beta,  # [N, 1, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, K] or None
    initial_state,  # [N or slots of a pool, HV, K, V] bfloat16, rows aligned to 16 bytes
    final_state,  # likewise, the same tensor when it is advanced in place, or None
    o,  # [N, 1, HV, V]
    indices,  # [N] slots or None
    scale, lower_bound,
    # strides by sequence and head
    s_qn, s_qh, s_kn, s_kh, s_vn, s_vh, s_gn, s_gh, s_bn, s_bh, s_on, s_oh, s_in, s_ih, s_fn, s_fh,
    s_index: gl.int64, pad_slot_id: gl.int64, slots,
    HV: gl.constexpr,
    GROUP: gl.constexpr,  # value heads a key head
    I_ROW: gl.constexpr, F_ROW: gl.constexpr,  # strides of a state's rows, of initial_state and final_state
    GATE: gl.constexpr, L2NORM: gl.constexpr, SIGMOID: gl.constexpr, NEG_EIGVAL: gl.constexpr,
    PARTS: gl.constexpr,  # rows are stored whole, too, by way of shared memory, in so many parts; 0: from registers
):  # fmt: skip
    W: gl.constexpr = gl.num_warps()
    BV: gl.constexpr = COLUMNS * W
    BLOCKS: gl.constexpr = SIZE // BV
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, W], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [8 // W, 4 * W], [W, 1], [1, 0])
    # A warp reads COLUMNS of two rows at once, which must lie in different banks.
    LAID: gl.constexpr = gl.SwizzledSharedLayout(COLUMNS, 1, W, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    KEYS: gl.constexpr = gl.SliceLayout(1, L)
    VALUES: gl.constexpr = gl.SliceLayout(0, L)
    pid = gl.program_id(0)
    i_v = pid % BLOCKS * BV
    i_h = (pid // BLOCKS % HV).to(gl.int64)
    i_n = (pid // (BLOCKS * HV)).to(gl.int64)
    i_state = i_n
    if indices is not None:
        i_state = gl.load(indices + i_n * s_index).to(gl.int64)

    # On their way while the slot is, which the state has to wait for.
    o_k = gl.arange(0, SIZE, layout=gl.BlockedLayout([4], [32], [W], [0]))
    b_q = gl.load(q + i_n * s_qn + i_h // GROUP * s_qh + o_k)
    b_k = gl.load(k + i_n * s_kn + i_h // GROUP * s_kh + o_k)
    b_g = gl.load(g + i_n * s_gn + i_h * s_gh + o_k)
    b_beta = gl.load(beta + i_n * s_bn + i_h * s_bh)
    rate = gate_rate(A_log, i_h)
    bias = 0.0
    if dt_bias is not None:
        bias = gl.load(dt_bias + i_h * SIZE + o_k).to(gl.float32)
    o_v = i_v + gl.arange(0, BV, layout=VALUES)
    b_v = gl.load(v + i_n * s_vn + i_h * s_vh + o_v).to(gl.float32)
    p_o = o + i_n * s_on + i_h * s_oh + o_v
    if indices is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if is_padding(i_state, pad_slot_id, slots):
            gl.store(p_o, gl.full([BV], 0.0, o.dtype.element_ty, VALUES))
            return

    tile = gl.allocate_shared_memory(initial_state.dtype.element_ty, [SIZE, BV], LAID)
    o_row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, LINES)).to(gl.int64)[:, None]
    o_column = i_v + gl.arange(0, BV, layout=gl.SliceLayout(0, LINES))[None, :]
    copy_elements(tile, initial_state + i_state * s_in + i_h * s_ih + (o_row * I_ROW + o_column))
    async_copy.commit_group()

    b_q = b_q.to(gl.float32)
    b_k = b_k.to(gl.float32)
    b_beta = write_strength(b_beta, SIGMOID, NEG_EIGVAL)
    y = log2_decay(b_g.to(gl.float32), rate, bias, lower_bound, GATE)
    r_q = scale
    r_k = 1.0
    if L2NORM:
        r_q *= gl.rsqrt(gl.sum(b_q * b_q, 0) + NORM_EPS)
        r_k *= gl.rsqrt(gl.sum(b_k * b_k, 0) + NORM_EPS)
    qk = gl.sum(b_q * b_k, 0) * (r_q * r_k)
    factor = decay_factor(y)
    k_d = gl.convert_layout(decayed(b_k, factor), KEYS)[:, None]
    q_d = gl.convert_layout(decayed(b_q, factor), KEYS)[:, None]
    async_copy.wait_group(0)
    S = widen(tile.load(L))
    u = b_beta * (b_v - r_k * gl.sum(S * k_d, 0))
    b_o = r_q * gl.sum(S * q_d, 0) + qk * u
    gl.store(p_o, b_o.to(o.dtype.element_ty))
    if final_state is not None:
        p_state = final_state + i_state * s_fn + i_h * s_fh
        if PARTS == 0:
            # The tile is not read before this, for whose registers it would wait.
            block_barrier()
            factor = gl.convert_layout(factor, KEYS)
            b_k = gl.convert_layout(b_k, KEYS)
            S = widen(tile.load(L))
            S = decayed(S, factor[:, None])
            S = gl.fma((r_k * u)[None, :], b_k[:, None], S)
            o_row = gl.arange(0, SIZE, layout=KEYS).to(gl.int64)[:, None]
            gl.store(p_state + (o_row * F_ROW + o_v[None, :]), S.to(final_state.dtype.element_ty))
        else:
            PART: gl.constexpr = SIZE // PARTS
            factors = gl.allocate_shared_memory(gl.float32, [SIZE], FLAT, factor)
            keys = gl.allocate_shared_memory(gl.float32, [SIZE], FLAT, b_k)
            block_barrier()
            for i in gl.static_range(PARTS):
                part = tile.slice(i * PART, PART)
                S = widen(part.load(L))
                S = decayed(S, factors.slice(i * PART, PART).load(KEYS)[:, None])
                S = gl.fma((r_k * u)[None, :], keys.slice(i * PART, PART).load(KEYS)[:, None], S)
                part.store(S.to(final_state.dtype.element_ty))
            o_row = gl.arange(0, PART, layout=gl.SliceLayout(1, LINES)).to(gl.int64)[:, None]
            p_state += o_row * F_ROW + o_column
            for i in gl.static_range(PARTS):
                gl.store(p_state + i * (PART * F_ROW), tile.slice(i * PART, PART).load(LINES))

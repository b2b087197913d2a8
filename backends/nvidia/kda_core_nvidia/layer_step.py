"""``kda_decode_step`` for one token of every sequence in one launch, written in Gluon. H = HV, K = V = 128.

A program has a whole head of a sequence: it convolves the head's channels of q, k and v, a thread for each, which reads
the inputs before the token and writes them back; it advances the head's state, by way of shared memory; and it norms
the head's output. Nothing passes from one program to another. With half as many warps it takes one half of the value
channels after the other, which both load at once: more programs run on a multiprocessor then.

All sums are taken in the order of ``convolution_step_kernel``, ``recurrent`` and ``norm_step_kernel``: not a bit of a
result shows which kernels it came from. ``recurrent_draft`` says how a tile lies in threads.

Grid: (N · H), heads fastest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.factor import decay_factor, decayed
from kda_core.triton_lib.gate import NORM_EPS, gate_rate, log2_decay, write_strength
from kda_core.triton_lib.packing import is_padding
from kda_core.triton_lib.recurrent_kernels import along_v
from kda_core_nvidia.hopper import async_copy, block_barrier, copy_elements, seen_as
from kda_core_nvidia.layer_rows import convolved_row, head_filter, normed
from kda_core_nvidia.recurrent_draft import contract, keep, kept
from kda_core_nvidia.recurrent_step import SIZE, widen
from kda_core_nvidia.transitions_hopper import rounded


@gluon.jit
def _parted(S, WIDE: gl.constexpr, PARTED: gl.constexpr, L: gl.constexpr):
    """A tile in float32, its key channels in parts."""
    if not WIDE:
        S = widen(S)
    return gl.convert_layout(S.reshape(PARTED), L)


@gluon.jit(
    do_not_specialize=["scale", "lower_bound", "eps", "s_index", "pad_slot_id", "slots"],
    do_not_specialize_on_alignment=["indices"],
)
def layer_step(
    x,  # [N, 1, 3 · H · 128], the last stride 1
    weight,  # [D, TAPS]
    bias,  # [D] or None
    conv_state,  # [slots, TAPS - 1, D]
    g,  # [N, 1, H, K]
    beta,  # [N, 1, H]
    A_log,  # [H] or None
    dt_bias,  # [H, K] or None
    state,  # [slots, H, K, V] (or [..., V, K]), float32 or bfloat16, rows aligned to 16 bytes
    gate,  # [N, 1, H, V], the last stride 1, or None
    norm_weight,  # [V] or None
    o,  # [N, 1, H, V], the last stride 1
    indices,  # [N] slots or None
    scale, lower_bound, eps,
    s_xn, s_cs, s_cr, s_cd, s_gn, s_gh, s_bn, s_bh, s_in, s_ih, s_an, s_ah, s_on, s_oh,
    s_index: gl.int64, pad_slot_id: gl.int64, slots,
    H: gl.constexpr,
    TAPS: gl.constexpr,  # of the convolution
    I_ROW: gl.constexpr,  # stride of a state's rows
    GATE: gl.constexpr, L2NORM: gl.constexpr, SIGMOID: gl.constexpr, NEG_EIGVAL: gl.constexpr, V_FIRST: gl.constexpr,
    STAGED: gl.constexpr,  # a state comes by way of shared memory, and is read from there twice
    TURNS: gl.constexpr,  # with STAGED: blocks of value channels, one after the other; else 1
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    BV: gl.constexpr = SIZE // TURNS
    COLUMNS: gl.constexpr = BV // WARPS
    WIDE: gl.constexpr = state.dtype.element_ty == gl.float32
    HALVES: gl.constexpr = 2 if WIDE and not V_FIRST else 1
    VECTOR: gl.constexpr = 4 if WIDE else 8
    # Lanes of a warp read and write different banks of the tile.
    if V_FIRST:
        PARTS: gl.constexpr = 2
        LANES: gl.constexpr = 16 if WIDE else 8
        OWN: gl.constexpr = COLUMNS * LANES // 32
        TILE: gl.constexpr = gl.BlockedLayout([OWN, 64 // LANES], [32 // LANES, LANES], [WARPS, 1], [1, 0])
        L: gl.constexpr = gl.BlockedLayout([OWN, 1, 64 // LANES], [32 // LANES, 1, LANES], [WARPS, 1, 1], [2, 1, 0])
        SHAPE: gl.constexpr = (BV, SIZE)
        PARTED: gl.constexpr = (BV, 2, 64)
        KEYS: gl.constexpr = gl.SliceLayout(0, L)
        VALUES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
        LAID: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 1, 1, [1, 0])
    else:
        PARTS: gl.constexpr = 4 if WIDE else 8
        LANES: gl.constexpr = 32 // PARTS
        TILE: gl.constexpr = gl.BlockedLayout([1, COLUMNS // LANES], [PARTS, LANES], [1, WARPS], [1, 0])
        L: gl.constexpr = gl.BlockedLayout([1, 1, COLUMNS // LANES], [1, PARTS, LANES], [1, 1, WARPS], [2, 1, 0])
        SHAPE: gl.constexpr = (SIZE, BV)
        PARTED: gl.constexpr = (SIZE // PARTS, PARTS, BV)
        KEYS: gl.constexpr = gl.SliceLayout(2, L)
        VALUES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, L))
        LAID: gl.constexpr = gl.SwizzledSharedLayout(COLUMNS, 1, WARPS, [1, 0])
    # Whole lines of memory; the dimension of a state's key channels.
    ACROSS: gl.constexpr = SHAPE[1] // VECTOR
    LINES: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    K_DIM: gl.constexpr = 1 if V_FIRST else 0
    LINES_K: gl.constexpr = gl.SliceLayout(1 - K_DIM, LINES)
    LINES_V: gl.constexpr = gl.SliceLayout(K_DIM, LINES)
    ROW: gl.constexpr = gl.BlockedLayout([HALVES, 4 // HALVES], [1, 32], [WARPS, 1], [1, 0])
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(4, max(1, PARTS // 4), min(PARTS, 4), [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # As triton lays rows of ``norm_step_kernel``.
    OWN_ROW: gl.constexpr = 4 if x.dtype.element_ty == gl.float32 else 8
    NORM: gl.constexpr = gl.BlockedLayout([1, OWN_ROW], [OWN_ROW // 4, 128 // OWN_ROW], [WARPS, 1], [1, 0])
    pid = gl.program_id(0)
    i_h = (pid % H).to(gl.int64)
    i_n = (pid // H).to(gl.int64)
    i_state = i_n
    if indices is not None:
        i_state = gl.load(indices + i_n * s_index).to(gl.int64)

    # On their way while the slot is, which the states have to wait for.
    o_d, o_part, taps, b_bias = head_filter(weight, bias, pid % H, H, TAPS)
    given = gl.load(x + i_n * s_xn + o_d, mask=o_part < 3, other=0.0)
    HALF: gl.constexpr = SIZE // HALVES
    o_k = gl.arange(0, HALVES, layout=gl.SliceLayout(1, ROW))[:, None] * HALF
    o_k += gl.arange(0, HALF, layout=gl.SliceLayout(0, ROW))[None, :]
    b_g = gl.load(g + i_n * s_gn + i_h * s_gh + o_k)
    b_beta = gl.load(beta + i_n * s_bn + i_h * s_bh)
    rate = gate_rate(A_log, i_h)
    dt = 0.0
    if dt_bias is not None:
        dt = gl.load(dt_bias + i_h * SIZE + o_k).to(gl.float32)
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, NORM))[None, :]
    if gate is not None:
        b_gate = gl.load(gate + i_n * s_an + i_h * s_ah + o_v)
        b_w = gl.load(norm_weight + o_v)
    p_o = o + i_n * s_on + i_h * s_oh
    if indices is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if is_padding(i_state, pad_slot_id, slots):
            gl.store(p_o + o_v, gl.full([1, SIZE], 0.0, o.dtype.element_ty, NORM))
            return

    p_first = conv_state + i_state * s_cs + o_d.to(gl.int64) * s_cd
    p_row = p_first
    window = ()
    for _ in gl.static_range(TAPS - 1):
        window += (gl.load(p_row, mask=o_part < 3, other=0.0),)
        p_row += s_cr
    p_state = state + i_state * s_in + i_h * s_ih
    if STAGED:
        tiles = gl.allocate_shared_memory(state.dtype.element_ty, [TURNS, SHAPE[0], SHAPE[1]], LAID)
        o_row = gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, LINES)).to(gl.int64)[:, None]
        o_column = gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, LINES))[None, :]
        p_lines = p_state + (o_row * I_ROW + o_column)
        for turn in gl.static_range(TURNS):
            copy_elements(tiles.index(turn), p_lines + turn * (BV * I_ROW if V_FIRST else BV))
            async_copy.commit_group()
    else:
        o_row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, TILE)).to(gl.int64)[:, None]
        p_state += o_row * I_ROW + gl.arange(0, SIZE, layout=gl.SliceLayout(0, TILE))[None, :]
        S = gl.load(p_state)

    factor = decay_factor(log2_decay(b_g.to(gl.float32), rate, dt, lower_bound, GATE))
    b_beta = write_strength(b_beta, SIGMOID, NEG_EIGVAL)
    y = convolved_row(window, given, taps, b_bias, TAPS).reshape([4 * SIZE])
    inputs = gl.allocate_shared_memory(gl.float32, [4 * SIZE], FLAT, y)
    window += (given.to(conv_state.dtype.element_ty),)
    p_row = p_first
    for j in gl.static_range(TAPS - 1):
        gl.store(p_row, window[j + 1], mask=o_part < 3)
        p_row += s_cr
    block_barrier()
    rows = seen_as(inputs, gl.float32, [4, HALVES, HALF], PLAIN)
    b_q = rows.index(0).load(ROW)
    b_k = rows.index(1).load(ROW)
    r_q = scale
    r_k = 1.0
    if L2NORM:
        r_q *= gl.rsqrt(gl.sum(gl.sum(b_q * b_q, 1), 0) + NORM_EPS)
        r_k *= gl.rsqrt(gl.sum(gl.sum(b_k * b_k, 1), 0) + NORM_EPS)
    qk = gl.sum(gl.sum(b_q * b_k, 1), 0) * (r_q * r_k)
    if STAGED:
        all_k = seen_as(inputs, gl.float32, [4, SIZE], FLAT).index(1)
        factors = gl.allocate_shared_memory(gl.float32, [SIZE], FLAT, factor.reshape([SIZE]))
        updates = gl.allocate_shared_memory(gl.float32, [SIZE], FLAT)
    else:
        all_k = keep(b_k, 1, PARTS, KEPT, V_FIRST)
        factors = keep(factor, 1, PARTS, KEPT, V_FIRST)
    all_k_d = keep(decayed(b_k, factor), 1, PARTS, KEPT, V_FIRST)
    all_q_d = keep(decayed(b_q, factor), 1, PARTS, KEPT, V_FIRST)
    if gate is not None:
        outputs = gl.allocate_shared_memory(gl.float32, [SIZE], FLAT)
    for turn in gl.static_range(TURNS):
        if STAGED:
            async_copy.wait_group(TURNS - 1 - turn)
        block_barrier()
        if STAGED:
            S = tiles.index(turn).load(TILE)
        S = _parted(S, WIDE, PARTED, L)
        y_k = contract(S * kept(all_k_d, 0, 1, PARTS, KEPT, KEYS, V_FIRST), BV, HALVES, VALUES, V_FIRST)
        y_q = contract(S * kept(all_q_d, 0, 1, PARTS, KEPT, KEYS, V_FIRST), BV, HALVES, VALUES, V_FIRST)
        b_v = seen_as(inputs, gl.float32, [4 * TURNS, BV], FLAT).index(2 * TURNS + turn).load(VALUES)
        u = b_beta * (b_v - r_k * y_k)
        b_o = (r_q * y_q + qk * u).to(x.dtype.element_ty)
        if gate is None:
            gl.store(p_o + (turn * BV + gl.arange(0, BV, layout=VALUES)), b_o)
        else:
            outputs.slice(turn * BV, BV).store(b_o.to(gl.float32))
        u *= r_k
        if STAGED:
            # The tile is read again, in whole lines: its registers would keep other programs from running.
            updates.slice(turn * BV, BV).store(u)
            block_barrier()
            S = tiles.index(turn).load(LINES)
            if not WIDE:
                S = widen(S)
            b_u = gl.expand_dims(updates.slice(turn * BV, BV).load(LINES_V), K_DIM)
            S = decayed(S, gl.expand_dims(factors.load(LINES_K), 1 - K_DIM))
            S = gl.fma(b_u, gl.expand_dims(all_k.load(LINES_K), 1 - K_DIM), S)
            gl.store(p_lines + turn * (BV * I_ROW if V_FIRST else BV), S if WIDE else rounded(S))
        else:
            S = decayed(S, kept(factors, 0, 1, PARTS, KEPT, KEYS, V_FIRST))
            S = gl.fma(along_v(u, V_FIRST), kept(all_k, 0, 1, PARTS, KEPT, KEYS, V_FIRST), S)
            gl.store(p_state, gl.convert_layout(S.reshape(SHAPE), TILE))
    if gate is not None:
        block_barrier()
        b_o = normed(seen_as(outputs, gl.float32, [1, SIZE], PLAIN).load(NORM), b_gate, b_w, eps)
        gl.store(p_o + o_v, b_o.to(o.dtype.element_ty))

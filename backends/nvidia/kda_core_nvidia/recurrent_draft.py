"""``recurrent`` for drafts that leave records, written in Gluon. K = V = 128.

All that a token needs without its state is computed once a program, a warp for each token, while the state
comes from memory, and lies in shared memory when the tokens are computed: their loop has no barrier, waits for no load,
and warps share no sum. Records that are committed first lie beside it.

From float32 states, threads take every sum in the order in which those of ``recurrent`` take it: not a bit of a result
shows which of the two kernels it came from. States stored K first lie in two warps there, which are added last.

From bfloat16 states, the tokens are one chunk on matrix units (``draft_chunk``), and may be a tree. The committed state
lies in shared memory as it is stored. Where there are many states, a program's second half of a head loads meanwhile.

In a decoding step of a layer (``TAPS``) a program has a whole head. It convolves the head's channels of q, k and v, and
norms the rows of o that it has written.

Grid: (N · HV · V / value channels of a program), value blocks fastest, then heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core.triton_lib.commit_kernels import token_of
from kda_core.triton_lib.factor import decay_factor, decayed
from kda_core.triton_lib.gate import NORM_EPS, gate_rate, log2_decay, write_strength
from kda_core.triton_lib.packing import is_padding
from kda_core.triton_lib.recurrent_kernels import along_v
from kda_core_nvidia.draft_chunk import ancestors_of_tokens, in_parts, pairs, products_of, row, store_products, whole
from kda_core_nvidia.hopper import async_copy, block_barrier, copy_elements, seen_as
from kda_core_nvidia.layer_rows import convolved_row, head_filter, normed
from kda_core_nvidia.recurrent_step import SIZE, widen
from kda_core_nvidia.transitions_hopper import rounded

DRAFT_COLUMNS = gl.constexpr(16)
"""Value channels of a warp: half of what a warp of ``recurrent`` holds K first, so that twice as many run."""


@gluon.jit
def keep(x, T: gl.constexpr, PARTS: gl.constexpr, KEPT: gl.constexpr, V_FIRST: gl.constexpr):
    """Rows of key channels in shared memory, those of a thread side by side."""
    if not V_FIRST:
        x = x.reshape([T, SIZE // PARTS, PARTS]).permute([0, 2, 1])
    x = x.reshape([T * PARTS, SIZE // PARTS])
    return gl.allocate_shared_memory(gl.float32, x.shape, KEPT, x)


@gluon.jit
def kept(buffer, t, T: gl.constexpr, PARTS: gl.constexpr, KEPT: gl.constexpr, KEYS: gl.constexpr,
          V_FIRST: gl.constexpr):  # fmt: skip
    """A row of them against a tile."""
    row = seen_as(buffer, gl.float32, [T, PARTS, SIZE // PARTS], KEPT).index(t)
    return row.load(KEYS)[None, :, :] if V_FIRST else row.permute([1, 0]).load(KEYS)[:, :, None]


@gluon.jit
def _number(buffer, t, T: gl.constexpr, FLAT: gl.constexpr, VALUES: gl.constexpr):
    """A token's number beside value channels."""
    return seen_as(buffer, gl.float32, [T, 1], FLAT).index(t).load(VALUES)


@gluon.jit
def _part(buffer, i, T: gl.constexpr, HALVES: gl.constexpr, ROWS: gl.constexpr):
    """One of four parts of rows of convolutions, [T, HALVES, K / HALVES]."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 4 // HALVES], [1, 32], [gl.num_warps(), 1], [1, 0])
    x = seen_as(buffer, gl.float32, [T, 4 * SIZE], PLAIN).slice(i * SIZE, SIZE, dim=1).load(WHOLE)
    return gl.convert_layout(x.reshape([T, HALVES, SIZE // HALVES]), ROWS)


@gluon.jit
def contract(x, BV: gl.constexpr, HALVES: gl.constexpr, VALUES: gl.constexpr, V_FIRST: gl.constexpr):
    """Sum of a tile over its key channels."""
    AXIS: gl.constexpr = 1 if V_FIRST else 0
    x = gl.sum(x, AXIS)
    if HALVES == 2:
        x = gl.sum(x.reshape([2, 2, BV]), 1)
    return gl.convert_layout(gl.sum(x, AXIS), VALUES)


@gluon.jit(
    do_not_specialize=["scale", "lower_bound", "eps", "T", "C", "M", "pad_slot_id", "slots"],
    do_not_specialize_on_alignment=["indices", "committed", "path", "parents"],
)
def recurrent_draft(
    q, k,  # [N, T, H, K]
    v,  # [N, T, HV, V]
    g,  # [N, T, HV, K]
    beta,  # [N, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, K] or None
    initial_state,  # [slots of a pool, HV, K, V] (or [..., V, K]), rows aligned to 16 bytes
    o,  # [N, T, HV, V]
    indices,  # [N] slots
    records,  # [N, T, HV, 2K + V]
    commit,  # [N, C, HV, 2K + V] or None: records that come first
    committed,  # [N], how many of them, or None
    path,  # [N, M], which of them, or None: the first ones
    parents,  # [N, T], tokens that the tokens continue from, or None: each from the one before it
    # around it, in a layer, or None: with them there is no q, k and v, and a program has a whole head. HV = H
    x,  # [N, T, 3 · H · 128], the last stride 1
    weight,  # [D, TAPS]
    bias,  # [D] or None
    conv_state,  # [slots, TAPS - 1, D]
    inputs,  # [N, C, D] behind which the records are, the last stride 1; or None
    gate,  # [N, T, HV, V], the last stride 1, or None
    norm_weight,  # [V] or None
    scale, lower_bound, eps, T, C, M,
    # strides by sequence, token, head
    s_qn, s_qt, s_qh, s_kn, s_kt, s_kh, s_vn, s_vt, s_vh, s_gn, s_gt, s_gh, s_bn, s_bt, s_bh, s_on, s_ot, s_oh,
    s_rn, s_rt, s_rh, s_cn, s_ct, s_ch, s_committed: gl.int64, s_in, s_ih, s_index: gl.int64, pad_slot_id: gl.int64,
    slots, s_xn, s_xt, s_xi, s_ti, s_cs, s_cr, s_cd, s_an, s_at, s_ah,
    HV: gl.constexpr,
    GROUP: gl.constexpr,  # value heads a key head
    I_ROW: gl.constexpr,  # stride of a state's rows
    TP: gl.constexpr, CP: gl.constexpr,  # T, and C and M, or more
    CHUNK: gl.constexpr,  # T where the tokens are one chunk; 0: token by token
    TURNS: gl.constexpr,  # with CHUNK: blocks of value channels, one after the other; else 1
    STAGED: gl.constexpr,  # states come by way of shared memory, in whole lines; with CHUNK always
    GATE: gl.constexpr, L2NORM: gl.constexpr, SIGMOID: gl.constexpr, NEG_EIGVAL: gl.constexpr, V_FIRST: gl.constexpr,
    TAPS: gl.constexpr,  # of the convolution; 0: q, k and v are given
):  # fmt: skip
    W: gl.constexpr = gl.num_warps()
    BV: gl.constexpr = DRAFT_COLUMNS * W
    OWN_V: gl.constexpr = TURNS * BV
    BLOCKS: gl.constexpr = SIZE // OWN_V
    WIDE: gl.constexpr = initial_state.dtype.element_ty == gl.float32
    HALVES: gl.constexpr = 2 if WIDE and not V_FIRST else 1
    # A tile as it lies in memory, and with its key channels in PARTS.
    if V_FIRST:
        PARTS: gl.constexpr = 2
        LANES: gl.constexpr = 16 if WIDE else 8
        # A thread reads inputs and writes results of all its value channels at once: they are neighbours.
        OWN: gl.constexpr = DRAFT_COLUMNS * LANES // 32
        TILE: gl.constexpr = gl.BlockedLayout([OWN, 64 // LANES], [32 // LANES, LANES], [W, 1], [1, 0])
        SHAPE: gl.constexpr = (BV, SIZE)
        L: gl.constexpr = gl.BlockedLayout([OWN, 1, 64 // LANES], [32 // LANES, 1, LANES], [W, 1, 1], [2, 1, 0])
        PARTED: gl.constexpr = (BV, 2, 64)
        KEYS: gl.constexpr = gl.SliceLayout(0, L)
        VALUES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    else:
        PARTS: gl.constexpr = 4 if WIDE else 8
        LANES: gl.constexpr = 32 // PARTS
        TILE: gl.constexpr = gl.BlockedLayout([1, DRAFT_COLUMNS // LANES], [PARTS, LANES], [1, W], [1, 0])
        SHAPE: gl.constexpr = (SIZE, BV)
        L: gl.constexpr = gl.BlockedLayout([1, 1, DRAFT_COLUMNS // LANES], [1, PARTS, LANES], [1, 1, W], [2, 1, 0])
        PARTED: gl.constexpr = (SIZE // PARTS, PARTS, BV)
        KEYS: gl.constexpr = gl.SliceLayout(2, L)
        VALUES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, L))
    ROWS: gl.constexpr = gl.BlockedLayout([1, HALVES, 4 // HALVES], [1, 1, 32], [W, 1, 1], [2, 1, 0])
    TOKENS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, ROWS))
    # Lanes read different banks.
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(4, max(1, PARTS // 4), min(PARTS, 4), [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, BV // 32], [1, 32], [W, 1], [1, 0])
    pid = gl.program_id(0)
    i_v = pid % BLOCKS * OWN_V
    i_h = (pid // BLOCKS % HV).to(gl.int64)
    i_n = (pid // (BLOCKS * HV)).to(gl.int64)
    i_state = gl.load(indices + i_n * s_index).to(gl.int64)

    # On their way while the slot is, which the state has to wait for.
    HALF: gl.constexpr = SIZE // HALVES
    o_k = gl.arange(0, HALVES, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :, None] * HALF
    o_k += gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))[None, None, :]
    o_t = gl.arange(0, TP, layout=TOKENS)
    rows = o_t.to(gl.int64)[:, None, None]
    m_t = (o_t < T)[:, None, None]
    if TAPS:
        o_d, o_part, taps, b_bias = head_filter(weight, bias, pid % HV, HV, TAPS)
        p_x = x + i_n * s_xn + o_d
        given = ()
        for t in gl.static_range(TP):
            # Rows behind the last are not looked at.
            given += (gl.load(p_x, mask=o_part < gl.where(t < T, 3, 0), other=0.0),)
            p_x += s_xt
    else:
        b_q = gl.load(q + i_n * s_qn + i_h // GROUP * s_qh + (rows * s_qt + o_k), mask=m_t, other=0.0).to(gl.float32)
        b_k = gl.load(k + i_n * s_kn + i_h // GROUP * s_kh + (rows * s_kt + o_k), mask=m_t, other=0.0).to(gl.float32)
    b_g = gl.load(g + i_n * s_gn + i_h * s_gh + (rows * s_gt + o_k), mask=m_t, other=0.0).to(gl.float32)
    b_beta = gl.load(beta + i_n * s_bn + i_h * s_bh + o_t.to(gl.int64) * s_bt, mask=o_t < T, other=0.0)
    rate = gate_rate(A_log, i_h)
    dt = 0.0
    if dt_bias is not None:
        dt = gl.load(dt_bias + i_h * SIZE + o_k).to(gl.float32)
    o_column = i_v + gl.arange(0, OWN_V, layout=gl.SliceLayout(0, COLUMNS))[None, :]
    o_t = gl.arange(0, TP, layout=gl.SliceLayout(1, COLUMNS))[:, None]
    if not TAPS:
        value = gl.load(v + i_n * s_vn + i_h * s_vh + (o_t.to(gl.int64) * s_vt + o_column), mask=o_t < T, other=0.0)
    if commit is not None:
        # The lines of ``recurrent``. A count out of range is clamped.
        most = C
        if path is not None:
            path += i_n * M
            most = gl.where(C > 0, M, 0)
        count = gl.minimum(gl.maximum(gl.load(committed + i_n * s_committed), 0), most).to(gl.int32)
        o_c = gl.arange(0, CP, layout=TOKENS)
        p_u = commit + i_n * s_cn + i_h * s_ch
        m_c = (o_c < count)[:, None, None]
        p_rows = p_u + (token_of(path, gl.where(o_c < count, o_c, 0), C)[:, None, None] * s_ct + o_k)
        earlier_k = gl.load(p_rows, mask=m_c, other=0.0)
        earlier_d = gl.load(p_rows + SIZE, mask=m_c, other=0.0)
        o_c = gl.arange(0, CP, layout=gl.SliceLayout(1, COLUMNS))[:, None]
        p_u += 2 * SIZE
        o_u = token_of(path, gl.where(o_c < count, o_c, 0), C) * s_ct
        earlier_u = gl.load(p_u + (o_u + o_column), mask=o_c < count, other=0.0)

    if is_padding(i_state, pad_slot_id, slots):
        zeros = gl.full([TP, OWN_V], 0.0, o.dtype.element_ty, COLUMNS)
        gl.store(o + i_n * s_on + i_h * s_oh + (o_t.to(gl.int64) * s_ot + o_column), zeros, mask=o_t < T)
        return
    if TAPS:
        p_first = conv_state + i_state * s_cs + o_d.to(gl.int64) * s_cd
        p_row = p_first
        window = ()
        for j in gl.static_range(TAPS - 1):
            if inputs is None:
                window += (gl.load(p_row, mask=o_part < 3, other=0.0),)
                p_row += s_cr
            else:
                behind = count.to(gl.int64) + (j - (TAPS - 1))
                m_old, m_new = o_part < gl.where(behind < 0, 3, 0), o_part < gl.where(behind < 0, 0, 3)
                b_old = gl.load(p_first + (behind + (TAPS - 1)) * s_cr, mask=m_old, other=0.0)
                b_new = gl.load(inputs + i_n * s_xi + behind * s_ti + o_d, mask=m_new, other=0.0)
                window += (gl.where(behind < 0, b_old, b_new.to(b_old.dtype)),)
    p_state = initial_state + i_state * s_in + i_h * s_ih + (i_v.to(gl.int64) * I_ROW if V_FIRST else i_v)
    if STAGED:
        # A warp reads DRAFT_COLUMNS of rows that must lie in different banks; matrix units read 8 rows of 16 bytes.
        LAID: gl.constexpr = gl.SwizzledSharedLayout(*((DRAFT_COLUMNS, 1, W) if WIDE else (8, 1, 8)), [1, 0])
        VECTOR: gl.constexpr = 4 if WIDE else 8
        ACROSS: gl.constexpr = SHAPE[1] // VECTOR
        LINES: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [W, 1], [1, 0])
        tiles = gl.allocate_shared_memory(initial_state.dtype.element_ty, [TURNS, SHAPE[0], SHAPE[1]], LAID)
        o_row = gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, LINES)).to(gl.int64)[:, None]
        o_column = gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, LINES))[None, :]
        p_lines = p_state + (o_row * I_ROW + o_column)
        for turn in gl.static_range(TURNS):
            copy_elements(tiles.index(turn), p_lines + turn * (BV * I_ROW if V_FIRST else BV))
            async_copy.commit_group()
    o_row = gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, TILE)).to(gl.int64)[:, None]
    o_column = gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, TILE))[None, :]
    p_state += o_row * I_ROW + o_column
    if not STAGED:
        S = gl.load(p_state)

    if TAPS:
        if inputs is not None:
            p_row = p_first
            for j in gl.static_range(TAPS - 1):
                gl.store(p_row, window[j], mask=o_part < 3)
                p_row += s_cr
        convolutions = gl.allocate_shared_memory(gl.float32, [TP * 4 * SIZE], FLAT)
        for t in gl.static_range(TP):
            y = convolved_row(window, given[t], taps, b_bias, TAPS)
            window += (given[t],)
            seen_as(convolutions, gl.float32, [TP, 4 * SIZE], FLAT).index(t).store(y.reshape([4 * SIZE]))
            window = window[1:]
        block_barrier()
        b_q = _part(convolutions, 0, TP, HALVES, ROWS)
        b_k = _part(convolutions, 1, TP, HALVES, ROWS)
    y = log2_decay(b_g, rate, dt, lower_bound, GATE)
    r_q = gl.full([TP], 1.0, gl.float32, TOKENS) * scale
    r_k = gl.full([TP], 1.0, gl.float32, TOKENS)
    if L2NORM:
        r_q *= gl.rsqrt(whole(b_q * b_q) + NORM_EPS)
        r_k *= gl.rsqrt(whole(b_k * b_k) + NORM_EPS)
    qk = whole(b_q * b_k) * (r_q * r_k)
    factor = decay_factor(y)
    p_record = records + i_n * s_rn + i_h * s_rh
    p_rows = p_record + (rows * s_rt + o_k)
    m_own = m_t & (o_k < gl.where(i_v == 0, SIZE, 0))
    gl.store(p_rows, b_k, mask=m_own)
    gl.store(p_rows + SIZE, factor, mask=m_own)
    all_r_q = gl.allocate_shared_memory(gl.float32, [TP], FLAT, r_q)
    all_r_k = gl.allocate_shared_memory(gl.float32, [TP], FLAT, r_k)
    all_qk = gl.allocate_shared_memory(gl.float32, [TP], FLAT, qk)
    strengths = gl.allocate_shared_memory(gl.float32, [TP], FLAT, write_strength(b_beta, SIGMOID, NEG_EIGVAL))
    if not TAPS:
        all_v = gl.allocate_shared_memory(gl.float32, [TP * OWN_V], FLAT, value.to(gl.float32).reshape([TP * OWN_V]))
    if CHUNK:
        if parents is not None:
            parents += i_n * T
        ancestors = ancestors_of_tokens(parents, CHUNK)
        o_t = gl.arange(0, TP, layout=TOKENS)
        q_d, k_d, q_products, k_products = pairs(b_q, b_k, factor, ancestors, o_t, TP, ROWS, TOKENS, FLAT)
        parts = in_parts(k_d.reshape([TP, SIZE]), q_d.reshape([TP, SIZE]), TP)
    else:
        all_k = keep(b_k, TP, PARTS, KEPT, V_FIRST)
        factors = keep(factor, TP, PARTS, KEPT, V_FIRST)
        all_k_d = keep(decayed(b_k, factor), TP, PARTS, KEPT, V_FIRST)
        all_q_d = keep(decayed(b_q, factor), TP, PARTS, KEPT, V_FIRST)
    if commit is not None:
        all_earlier_k = keep(earlier_k, CP, PARTS, KEPT, V_FIRST)
        all_earlier_d = keep(earlier_d, CP, PARTS, KEPT, V_FIRST)
        all_u = gl.allocate_shared_memory(gl.float32, [CP * OWN_V], FLAT, earlier_u.reshape([CP * OWN_V]))
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    OWN_COLUMN: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0]) if CHUNK else VALUES
    p_o = o + i_n * s_on + i_h * s_oh + (i_v + gl.arange(0, BV, layout=OWN_COLUMN))
    p_u = p_record + (2 * SIZE + i_v + gl.arange(0, BV, layout=OWN_COLUMN))
    if STAGED:
        async_copy.wait_group(TURNS - 1)
    block_barrier()
    if CHUNK:
        products = gl.allocate_shared_memory(gl.float32, [16, BV], SUMS)
        for turn in gl.static_range(TURNS):
            if turn > 0:
                # The products of the turn before have been read as well.
                async_copy.wait_group(TURNS - 1 - turn)
                block_barrier()
            tile = tiles.index(turn)
            if commit is not None:  # noqa: SIM102 (known when the kernel is compiled)
                if count > 0:
                    S = gl.convert_layout(widen(tile.load(TILE)).reshape(PARTED), L)
                    for m in range(0, count):
                        b_u = row(all_u, m * TURNS + turn, CP * TURNS, BV, FLAT, VALUES)
                        S = decayed(S, kept(all_earlier_d, m, CP, PARTS, KEPT, KEYS, V_FIRST))
                        S = gl.fma(along_v(b_u, V_FIRST), kept(all_earlier_k, m, CP, PARTS, KEPT, KEYS, V_FIRST), S)
                    written = rounded(gl.convert_layout(S.reshape(SHAPE), TILE))
                    tile.store(written)
                    if V_FIRST:
                        gl.store(p_state + turn * (BV * I_ROW), written)
                    block_barrier()
                    if not V_FIRST:
                        # A warp has a part of every line.
                        gl.store(p_lines + turn * BV, tile.load(LINES))
            store_products(products, parts, tile.permute([1, 0]) if V_FIRST else tile, TP)
            block_barrier()
            updates = ()
            p_token, p_update = p_o + turn * BV, p_u + turn * BV
            for t in gl.static_range(CHUNK):
                if TAPS:
                    b_v = row(convolutions, (4 * t + 2) * TURNS + turn, 4 * TP * TURNS, BV, FLAT, OWN_COLUMN)
                else:
                    b_v = row(all_v, t * TURNS + turn, TP * TURNS, BV, FLAT, OWN_COLUMN)
                y_k, y_q = products_of(products, t, TP, BV, FLAT, OWN_COLUMN)
                for s in gl.static_range(t):
                    above = (ancestors[t] >> s) & 1 == 1
                    b_a = _number(k_products, s * TP + t, TP * TP, FLAT, OWN_COLUMN)
                    b_b = _number(q_products, s * TP + t, TP * TP, FLAT, OWN_COLUMN)
                    y_k = gl.where(above, gl.fma(b_a, updates[s], y_k), y_k)
                    y_q = gl.where(above, gl.fma(b_b, updates[s], y_q), y_q)
                b_r = _number(all_r_k, t, TP, FLAT, OWN_COLUMN)
                u = _number(strengths, t, TP, FLAT, OWN_COLUMN) * (b_v - b_r * y_k)
                b_o = _number(all_r_q, t, TP, FLAT, OWN_COLUMN) * y_q + _number(all_qk, t, TP, FLAT, OWN_COLUMN) * u
                u *= b_r
                updates += (u,)
                gl.store(p_token, b_o.to(o.dtype.element_ty))
                gl.store(p_update, u)
                p_token += s_ot
                p_update += s_rt
    else:
        if STAGED:
            S = tiles.index(0).load(TILE)
        S = gl.convert_layout(S.reshape(PARTED), L)
        if commit is not None:
            for m in range(0, count):
                b_u = row(all_u, m, CP, BV, FLAT, VALUES)
                S = decayed(S, kept(all_earlier_d, m, CP, PARTS, KEPT, KEYS, V_FIRST))
                S = gl.fma(along_v(b_u, V_FIRST), kept(all_earlier_k, m, CP, PARTS, KEPT, KEYS, V_FIRST), S)
            if count > 0:
                gl.store(p_state, gl.convert_layout(S.reshape(SHAPE), TILE))
        for t in range(0, T):
            if TAPS:
                b_v = row(convolutions, 4 * t + 2, 4 * TP, BV, FLAT, VALUES)
            else:
                b_v = row(all_v, t, TP, BV, FLAT, VALUES)
            b_r = _number(all_r_k, t, TP, FLAT, VALUES)
            y_k = contract(S * kept(all_k_d, t, TP, PARTS, KEPT, KEYS, V_FIRST), BV, HALVES, VALUES, V_FIRST)
            y_q = contract(S * kept(all_q_d, t, TP, PARTS, KEPT, KEYS, V_FIRST), BV, HALVES, VALUES, V_FIRST)
            u = _number(strengths, t, TP, FLAT, VALUES) * (b_v - b_r * y_k)
            b_o = _number(all_r_q, t, TP, FLAT, VALUES) * y_q + _number(all_qk, t, TP, FLAT, VALUES) * u
            u *= b_r
            gl.store(p_o, b_o.to(o.dtype.element_ty))
            gl.store(p_u, u)
            p_o += s_ot
            p_u += s_rt
            # The last state is nobody's.
            if t + 1 < T:
                S = decayed(S, kept(factors, t, TP, PARTS, KEPT, KEYS, V_FIRST))
                S = gl.fma(along_v(u, V_FIRST), kept(all_k, t, TP, PARTS, KEPT, KEYS, V_FIRST), S)

    if gate is not None:
        # Rows that this program has just written.
        block_barrier()
        OWN_ROW: gl.constexpr = 4 if x.dtype.element_ty == gl.float32 else 8
        NORM: gl.constexpr = gl.BlockedLayout([1, OWN_ROW], [OWN_ROW // 4, 128 // OWN_ROW], [W, 1], [1, 0])
        o_row = gl.arange(0, TP, layout=gl.SliceLayout(1, NORM)).to(gl.int64)[:, None]
        o_column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, NORM))[None, :]
        m_row = o_row < T
        p_rows = o + i_n * s_on + i_h * s_oh + (o_row * s_ot + o_column)
        b_o = gl.load(p_rows, mask=m_row, other=0.0).to(gl.float32)
        b_gate = gl.load(gate + i_n * s_an + i_h * s_ah + (o_row * s_at + o_column), mask=m_row, other=0.0)
        b_o = normed(b_o, b_gate, gl.load(norm_weight + o_column), eps)
        gl.store(p_rows, b_o.to(o.dtype.element_ty), mask=m_row)

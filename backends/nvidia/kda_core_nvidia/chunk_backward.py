"""Backward of ``chunk_kda``: prepare once more (unless the forward kept all its results), two recurrences, one
chunk-parallel kernel.

1. prepare: what the recurrences need of every chunk, from the inverses that the forward kept (prepare);
2. states: forward recurrence, residuals and the state of every slot (backward_states);
3. reverse: backward recurrence, dv and the state gradient of every slot (backward_reverse);
4. gradients: dq, dk, dg, dβ and partial sums for A_log and dt_bias (backward_gradients);
5. finish: sums over channel blocks and grouped heads, the gradient of the row norms (backward_finish).

Nothing synchronises with the host: with ``cu_seqlens`` the slots of each sequence are found on the device, in buffers
whose size T and N bound. Sums over value heads and over slots are ordered, so that results repeat bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.request import BackwardResult, Request
from kda_core.triton_lib.arguments import gate_kind
from kda_core.triton_lib.layout import CHUNK, padded, slots
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.segments import as_packed
from kda_core_nvidia.backward_finish import finish_kernel
from kda_core_nvidia.backward_gradients import gradients_kernel
from kda_core_nvidia.backward_hopper import reverse_hopper, states_hopper
from kda_core_nvidia.backward_reverse import reverse_kernel
from kda_core_nvidia.backward_states import states_kernel
from kda_core_nvidia.chunk_forward import Kept, Prepared, run_prepare
from kda_core_nvidia.hopper import (
    HopperConfig,
    backward_gains,
    blocks,
    hopper_config,
    row_aligned,
    serves,
    token_blocks,
)
from kda_core_nvidia.launch import Chip, Launcher, chip, on_device, row_blocks, split_scale, token_tiles
from kda_core_nvidia.plan import done_with, new_result, new_scratch, planned
from kda_core_nvidia.segments import ends, segment_rows, starts

_states = Launcher(states_kernel)
_states_hopper = Launcher(states_hopper)
_reverse = Launcher(reverse_kernel)
_reverse_hopper = Launcher(reverse_hopper)
_gradients = Launcher(gradients_kernel)
_finish = Launcher(finish_kernel)


@dataclass(frozen=True, slots=True)
class Config:
    """Tiles of the kernels for one shape class.

    Attributes:
        states, reverse: value channels of a program, warps, stages.
        gradients: channels of a program, value channels at a time, warps, stages.
    """

    states: tuple[int, int, int]
    reverse: tuple[int, int, int]
    gradients: tuple[int, int, int, int]


MILD = {torch.bfloat16: 160.0, torch.float16: 12.0, torch.float32: 0.0}
"""Log2 decay over a chunk up to which one reference point serves all its pairs (over fewer rows a part of that):
2^(+-MILD/2) leaves room for operands and sums in the dtype of the products. float32 keeps to the levels, whose
exponents are small where they matter."""


def mildest(dtype: torch.dtype, l2norm: bool) -> float:
    """``MILD`` for q and k as they come: without a norm float16's reach up to 4,094, as ``lift`` allows."""
    return 8.0 if dtype == torch.float16 and not l2norm else MILD[dtype]


def choose(dtype: torch.dtype, kp: int, vp: int, heads: int, arch: int) -> Config:
    """The configuration for head dimensions padded to ``kp`` and ``vp``.

    Args:
        dtype: of q, k and v.
        heads: sequences times value heads, the programs of a recurrence that keeps V whole.
        arch: compute capability, as two digits.
    """
    if dtype == torch.float32:
        # Products in full precision run on scalar units: small tiles, many warps.
        small = (16 if kp > 128 else min(vp, 32), 8, 1)
        return Config(small, small, (16, min(vp, 32), 4, 1))
    bv = min(vp, 64)
    # A warp holds 16 channels of the transposed blocks. Two warps, so that the products stay with mma.sync: with wgmma
    # (four warps, no faster) ptxas 12.8 spills its descriptors and restores some from the stack pointer.
    # Two blocks of value channels: a loop's loads run ahead through shared memory, one body's take registers.
    gradients = (min(kp, 32), min(64, max(16, vp // 2)), min(kp, 32) // 16, 3)
    if arch not in (90, 100, 103):
        # Products take both operands from registers there: less of the state to a warp, or nothing in flight.
        if kp > 128:
            return Config((16, 4, 2), (min(vp, 32), 8, 2), gradients)
        return Config((bv, bv // 16, 1), (bv, bv // 16, 1), gradients)
    if kp > 128:
        if arch == 90 and vp >= 128:
            return Config((bv, 8, 3), (128, 8, 3), gradients)
        return Config((bv, 8, 2), (bv, 8, 2), gradients)
    recurrence = (bv, bv // 16, 3)
    if kp == 128 and vp >= 128 and heads * vp >= 96 * 128:
        # Enough programs to fill the chip with 128 value channels each.
        recurrence = (128, 8, 3)
    return Config(recurrence, recurrence, gradients)


class _Constants(NamedTuple):
    """The kernels' constants for one kind of call, and the configuration that they follow from."""

    config: Config
    states: dict[str, Any]
    reverse: dict[str, Any]
    gradients: dict[str, Any]
    finish: dict[str, Any]


@cache
def _constants(
    dtype: torch.dtype,
    H: int,
    HV: int,
    HO: int,
    K: int,
    V: int,
    heads: int,
    arch: int,
    v_first: bool,
    gate: str,
    sigmoid: bool,
    neg_eigval: bool,
    l2norm: bool,
) -> _Constants:
    kp, vp = padded(K), padded(V)
    config = choose(dtype, kp, vp, heads, arch)
    shape = {"HV": HV, "K": K, "V": V, "C": CHUNK, "KP": kp, "VP": vp}
    lifted = {"LIFT": lift(dtype, l2norm)}
    precision = {"PRECISION": "ieee" if dtype == torch.float32 else "tf32"}
    bv, _, stages = config.states
    operand = {"V_AS_OPERAND": arch == 90 and bv >= 64, "V_FIRST": v_first}
    states = shape | lifted | {"BV": bv} | operand | precision | {"STAGES": stages}
    bv, _, stages = config.reverse
    reverse = shape | lifted | {"BV": bv, "V_FIRST": v_first} | precision | {"STAGES": stages}
    bk, bv, _, stages = config.gradients
    gradients = (
        {"H": H, "HO": HO}
        | shape
        | {"BK": bk, "BV": bv, "GATE": gate, "BETA_SIGMOID": sigmoid, "BETA_SCALE": 2.0 if neg_eigval else 1.0}
        | precision
        | {"LEVELS": CHUNK.bit_length() - 1, "MILD": mildest(dtype, l2norm), "STAGES": stages}
        | {"DESCRIPTORS": False, "TOKENS": False, "V_FIRST": v_first}
    )
    finish = {"H": H, "HV": HV, "HO": HO, "K": K, "KP": kp, "NK": kp // bk, "R": max(1, 2048 // kp), "L2NORM": l2norm}
    return _Constants(config, states, reverse, gradients, finish)


@cache
def _hopper_constants(
    kernel: str, target: Chip, lifted: float, HV: int, K: int, V: int, heads: int, v_first: bool
) -> tuple[dict[str, Any], HopperConfig]:
    """The constants of a kernel for Hopper, and its configuration."""
    config = hopper_config(kernel, target, padded(K), V, heads)
    shape = {"HV": HV, "K": K, "V": V, "C": CHUNK, "LIFT": lifted, "KP": padded(K), "V_FIRST": v_first}
    return shape | config.constants, config


def _run_states_hopper(
    given: tuple[Any, ...], target: Chip, lifted: float, HV: int, K: int, V: int, heads: int, v_first: bool
) -> bool:
    """Launch ``states`` in its form for Hopper, with the plain one's arguments; False where that one is to be taken."""
    v, keys, X, D, state, z, states, *rest = given
    T = rest[-3]
    if z.shape[-1] != V or not (backward_gains(target, padded(K), V, heads, T) and serves(target, keys, V, v)):
        return False
    constants, config = _hopper_constants("states", target, lifted, HV, K, V, heads, v_first)
    KP, BV = constants["KP"], config.block_v
    arguments = (
        *(token_blocks(v, CHUNK, BV), v, blocks(keys, CHUNK, KP), blocks(X, CHUNK, CHUNK), blocks(D, 1, KP), state),
        *(z, states, *rest),
    )
    _states_hopper((V // BV * heads, 1, 1), arguments, constants, config.num_warps)
    return True


def _run_reverse_hopper(
    given: tuple[Any, ...], target: Chip, lifted: float, HV: int, K: int, V: int, heads: int, v_first: bool
) -> bool:
    """The same of ``reverse``."""
    keys, P, D, do, grad_final_state, dv, state_grads, *rest = given
    T = rest[-4]
    if do is None or state_grads.shape[2] != V:
        return False
    if not (backward_gains(target, padded(K), V, heads, T) and serves(target, keys, V, do)):
        return False
    constants, config = _hopper_constants("reverse", target, lifted, HV, K, V, heads, v_first)
    KP, BV = constants["KP"], config.block_v
    arguments = (
        *(token_blocks(do, CHUNK, BV), blocks(keys, 2 * CHUNK, KP), blocks(keys, CHUNK, KP), blocks(P, CHUNK, CHUNK)),
        *(blocks(D, 1, KP), do, grad_final_state, dv, state_grads, *rest),
    )
    _reverse_hopper((V // BV * heads, 1, 1), arguments, constants, config.num_warps)
    return True


def _rows_first(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """``x`` itself if its last dimension is dense and a tile's offsets fit 32 bits, else a copy; and its strides."""
    strides, shape = x.stride(), x.shape
    if (strides[-1] == 1 or len(shape) == 3 or shape[-1] == 1) and strides[1] * 128 < 2**31:
        return x, strides
    x = x.contiguous()
    return x, x.stride()


WHOLE = (None,)
"""All sequences in one turn."""

_MANY = 8192
"""Slots times heads of a turn from which gradients gain more by descriptors than these cost the host."""


def _with_descriptors(
    constants: dict[str, Any], target: Chip, do: Tensor | None, dv: Tensor, z: Tensor, states: Tensor, grads: Tensor,
    packed: bool,
) -> tuple[dict[str, Any], tuple[Any, ...]]:  # fmt: skip
    """The constants of ``gradients``, and what it takes for do, dv, z, the states and their gradients."""
    count, HV, VP, KP = states.shape
    # Products on scalar units spill more with them. Rows of a descriptor are counted in 32 bits.
    if not target.descriptors or z.dtype.itemsize > 2 or not _MANY <= count * HV < 2**31 // max(VP, CHUNK):
        return constants, (do, dv, z, states, grads)
    BV, BK = constants["BV"], constants["BK"]
    # Rows of the call's own tensors only where no block reaches beyond a sequence, or beyond a head's channels.
    tokens = not packed and do is not None and dv.shape[1] % CHUNK == 0 and dv.shape[3] == VP
    if tokens and do.dtype == dv.dtype and row_aligned(do) and row_aligned(dv):
        do, dv = token_tiles(do, CHUNK, BV), token_tiles(dv, CHUNK, BV)
    else:
        tokens = False
    blocks = row_blocks(z, VP, CHUNK, BV), row_blocks(states, KP, BV, BK), row_blocks(grads, KP, BV, BK)
    return {**constants, "DESCRIPTORS": True, "TOKENS": tokens}, (do, dv, *blocks)


def _turns(r: Request, kp: int, vp: int, multiprocessors: int) -> tuple[slice | None, ...]:
    """The sequences of a call by turns, so that states and their gradients are held for one turn at a time.

    Wide heads' states are more than half of a step's memory. Half of the batch at a time is as fast when it still has a
    program of the recurrences for every multiprocessor, and changes no result: no kernel looks beyond a sequence.
    """
    half = -(-r.B // 2)
    wide = kp * vp > 128 * 128
    if r.cu_seqlens is None and r.B > 1 and wide and r.B // 2 * r.HV * -(-vp // 128) >= multiprocessors:
        return slice(0, half), slice(half, r.B)
    return WHOLE


def _cut(x: Tensor | None, rows: slice | None) -> Tensor | None:
    """``x[rows]``; ``x`` itself when it is None or ``rows`` is."""
    return x if x is None or rows is None else x[rows]


_INPUTS = attrgetter(
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "grad_o", "grad_final_state")
)


def _kind(x: Tensor | None) -> Any:
    """What launches follow from of a gradient that is given: its shape follows from the call's."""
    return None if x is None else (x.is_contiguous() or x.stride(), x.dtype)


def chunk_backward(request: Request) -> BackwardResult:
    """Gradients of ``chunk_kda`` for ``request.grad_o`` and ``request.grad_final_state`` (either may be None).

    Returns:
        gradients of q, k, v, g, beta, and of A_log, dt_bias and initial_state where the call has them, each in the
        shape and dtype of its input (dt_bias as [HV, K]), contiguous.
    """
    if torch.is_grad_enabled():
        # Autograd has it off already, and the context takes as long as a launch.
        with torch.no_grad():
            return chunk_backward(request)
    key = "backward", _kind(request.grad_o), _kind(request.grad_final_state), "initial_state" in request.needs_grad
    with on_device(request.q.device):
        inputs = (*_INPUTS(request), *request.saved)
        made = planned(request, key, inputs, lambda: _by_halves(request) if _halved(request) else _backward(request))
        return BackwardResult(grads=_summed(request, made))


def _summed(call: Request, made: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The gradients, of which ``made`` holds those of A_log and dt_bias in parts."""
    grads = {n: x for n, x in made.items() if x is not None}
    if "A_log parts" in grads:
        grads["A_log"] = grads.pop("A_log parts").sum((0, 2)).to(call.A_log.dtype)
    if "dt_bias parts" in grads:
        grads["dt_bias"] = grads.pop("dt_bias parts").sum(0).to(call.dt_bias.dtype)
    return grads


def _halved(r: Request) -> bool:
    """Whether half of the heads are gone through at a time: ``_turns``, where the batch is packed or one."""
    multiprocessors = chip(r.device).multiprocessors
    kp, vp = padded(r.K), padded(r.V)
    if kp * vp <= 128 * 128 or r.q.shape[2] % 2 or _turns(r, kp, vp, multiprocessors) != WHOLE:
        return False
    return r.N * r.HV // 2 * -(-vp // 128) >= multiprocessors


def _by_halves(call: Request) -> dict[str, Tensor | None]:
    """The gradients, half of the heads at a time; those of q, k and g are written in place."""
    H, HV = call.q.shape[2], call.HV
    grads = {n: torch.empty_like(getattr(call, n), memory_format=torch.contiguous_format) for n in "qkg"}
    parts = []
    for i in range(2):
        own, own_v = (slice(i * n // 2, (i + 1) * n // 2) for n in (H, HV))
        into = {"q": grads["q"][:, :, own], "k": grads["k"][:, :, own], "g": grads["g"][:, :, own_v]}
        part = _heads_of(call, own, own_v)
        found = _summed(part, _backward(part, into))
        parts.append({n: x for n, x in found.items() if n not in into})
    axes = {"v": 2, "beta": 2, "initial_state": 1, "A_log": 0, "dt_bias": 0}
    return grads | {n: torch.cat([part[n] for part in parts], axes[n]) for n in parts[0]}


def _heads_of(call: Request, own: slice, own_v: slice) -> Request:
    """The call for some of its heads: those of queries and keys, and the value heads that share them."""
    heads = {"q": own, "k": own, "v": own_v, "g": own_v, "beta": own_v, "grad_o": own_v}
    changed = {n: getattr(call, n)[:, :, cut] for n, cut in heads.items() if getattr(call, n) is not None}
    states = {n: getattr(call, n) for n in ("initial_state", "grad_final_state")}
    changed |= {n: x[:, own_v] for n, x in states.items() if x is not None}
    changed |= {n: x[own_v] for n, x in (("A_log", call.A_log), ("dt_bias", call.dt_bias)) if x is not None}
    return replace(call, **changed, saved=tuple(x[:, own_v].contiguous() for x in call.saved))


def _backward(call: Request, into: dict[str, Tensor] | None = None) -> dict[str, Tensor | None]:
    """The gradients; those of q, k and g are written ``into`` some heads of tensors where these are given.

    Of A_log and dt_bias the parts of every slot: [slots, HV, ..] and [slots, HV, K].
    """
    target = chip(call.device)
    rows = segment_rows(call, target)
    r = as_packed(call, rows, v_first=True) if rows else call
    B, T, H, K = r.q.shape
    HV, V = r.v.shape[2:]
    N, dtype, needs = r.N, r.q.dtype, r.needs_grad
    kp, vp, C = padded(K), padded(V), CHUNK
    major, minor = target.capability
    gate = gate_kind(r)
    sigmoid, l2norm = r.use_beta_sigmoid_in_kernel, r.use_qk_l2norm_in_kernel
    arch, v_first, neg_eigval = 10 * major + minor, r.state_v_first, r.allow_neg_eigval
    wider = into["g"].stride(1) // K if into else HV
    constants = _constants(dtype, H, HV, wider, K, V, N * HV, arch, v_first, gate, sigmoid, neg_eigval, l2norm)
    config = constants.config
    NT, n_slots = -(-T // C), slots(r)
    _, o_scale = split_scale(r.scale, dtype)

    found = [_rows_first(x) for x in (r.q, r.k, r.v, r.g, r.beta, r.v if r.grad_o is None else r.grad_o)]
    q, k, v, g, beta, do = (x for x, _ in found)
    do = None if r.grad_o is None else do
    # Batch and token strides of one long token axis.
    collapsed = B == 1 or all(s[0] == s[1] * T for _, s in found)
    T_row = T if collapsed else 0
    s_q, s_k, s_v, s_g, s_b, s_do = ((0 if collapsed else s[0], s[1], s[2]) for _, s in found)
    cu = None if r.cu_seqlens is None else r.cu_seqlens.contiguous()
    A_log = r.A_log.contiguous() if gate != "none" and r.A_log is not None else None
    dt_bias = r.dt_bias.contiguous() if gate != "none" and r.dt_bias is not None else None

    dv = new_result(q, (B, T, HV, V))
    if r.saved and r.disable_recompute:
        prepared = Prepared(*r.saved)
    else:
        prepared = run_prepare(r, dv, backward=True, kept=Kept(*r.saved) if r.saved else None)
    keys, P, D, X, norms = prepared
    state = None if call.initial_state is None else call.initial_state.contiguous()
    grad_final = None if call.grad_final_state is None else call.grad_final_state.contiguous()
    want_initial = state is not None and "initial_state" in needs
    grad_state = new_result(q, call.state_shape, call.state_dtype) if want_initial else None
    grad_states = grad_state
    # Exact ends of sequences of one chunk, where there may be such, and their states are stored in 16 bits.
    short = r is call and dtype.itemsize == 2 and (cu is not None or T <= C)
    exact = (state, grad_final) if short and state is not None and grad_final is not None else (None, None)
    if r is not call:
        # The states at the starts of the segments and their gradients at the ends stand for those of packed sequences.
        state, transitions = starts(r, target, v, keys, D, state, call.state_v_first)
        if do is None:
            do = torch.zeros_like(v)
            s_do = do.stride()[:3]
        grad_final = ends(r, target, do, (keys, P, D), transitions, grad_final, call.state_v_first)
        grad_states = torch.empty_like(state) if want_initial else None
        del transitions

    turns = _turns(r, kp, vp, target.multiprocessors)
    most = n_slots if turns == WHOLE else max(turn.stop - turn.start for turn in turns) * NT
    z, states, state_grads = (new_scratch(q, (most, HV, *shape)) for shape in ((C, vp), (vp, kp), (vp, kp)))
    grouped = HV != H
    bk = config.gradients[0]
    NK = kp // bk
    dq_hat = dk_hat = dq = dk = dg = dbeta_partial = dA = dbias = None
    for turn in turns:
        # The sequences of a turn, and their slots.
        own = turn and slice(turn.start * NT, turn.stop * NT)
        count = N if turn is None else turn.stop - turn.start
        own_keys, own_D, own_v, own_do = _cut(keys, own), _cut(D, own), _cut(v, turn), _cut(do, turn)
        facts = (target, constants.states["LIFT"], HV, K, V, count * HV, v_first)
        given = own_v, own_keys, _cut(X, own), own_D, _cut(state, turn), z, states, cu, *s_v, T, T_row, NT
        if not _run_states_hopper(given, *facts):
            bv, warps, _ = config.states
            _states((vp // bv * count * HV, 1, 1), given, constants.states, warps)
        given = own_keys, _cut(P, own), own_D, own_do, _cut(grad_final, turn), _cut(dv, turn), state_grads
        given = *given, _cut(grad_states, turn), cu, *s_do, T, T_row, NT, o_scale
        if not _run_reverse_hopper(given, *facts):
            bv, warps, _ = config.reverse
            _reverse((vp // bv * count * HV, 1, 1), given, constants.reverse, warps)
        del given
        if turn is turns[-1]:
            done_with(keys, P, X)
            prepared = keys = P = X = own_keys = None
        if dg is None:
            if into is None:
                dg = new_result(g, (B, T, HV, K))
            else:
                dq, dk, dg = into["q"], into["k"], into["g"]
            dq_hat, dk_hat = dq, dk
            if grouped or into is None:
                hat = torch.float32 if grouped else dtype
                new = new_scratch if grouped else new_result
                dq_hat, dk_hat = (new(q, (B, T, HV, K), hat) for _ in range(2))
            dbeta_partial = new_scratch(D, (NK, B, T, HV))
            # Slots that hold nothing write no summand; only packed calls have such.
            packed = cu is not None
            dA = None if A_log is None else new_result(D, (n_slots, HV, NK), zeros=packed)
            dbias = None if dt_bias is None else new_result(D, (n_slots, HV, K), zeros=packed)
        own_dv = _cut(dv, turn)
        gradient_constants, (read_do, *read) = _with_descriptors(
            constants.gradients, target, own_do, own_dv, z, states, state_grads, cu is not None
        )
        _gradients(
            ((n_slots if turn is None else count * NT) * HV * NK, 1, 1),
            (
                *(_cut(q, turn), _cut(k, turn), _cut(g, turn), _cut(beta, turn), A_log, dt_bias, read_do),
                *(*read, own_D, _cut(norms, own)),
                *(_cut(dq_hat, turn), _cut(dk_hat, turn), _cut(dg, turn)),
                *(dbeta_partial if turn is None else dbeta_partial[:, turn], _cut(dA, own), _cut(dbias, own)),
                *(*(_cut(x, turn) for x in exact), cu),
                *(*s_q, *s_k, *s_g, *s_b, *s_do),
                *(float(r.scale), o_scale, 0.0 if r.lower_bound is None else float(r.lower_bound)),
                *(T, T_row, NT, N, B * T),
            ),
            gradient_constants,
            config.gradients[2],
        )
    done_with(z, states, state_grads, D, norms)
    del z, states, state_grads, read
    dbeta = new_result(beta, (B, T, HV))
    if into is None:
        dq, dk = (new_result(q, (B, T, H, K)) for _ in range(2)) if grouped else (dq_hat, dk_hat)
    _finish(
        (-(-B * T // constants.finish["R"]), H, 1),
        (q, k, dq_hat, dk_hat, dbeta_partial, dq, dk, dbeta, *s_q, *s_k, T, T_row, B * T),
        constants.finish,
        4,
    )
    if grad_states is not grad_state:
        grad_state.copy_(grad_states[:1] if call.state_v_first else grad_states[:1].transpose(-1, -2))
    grads = {"q": dq, "k": dk, "v": dv, "g": dg, "beta": dbeta}
    return grads | {"initial_state": grad_state, "A_log parts": dA, "dt_bias parts": dbias}

"""Backward of ``chunk_kda``: prepare once more (unless the forward kept its results), two recurrences, one
chunk-parallel kernel.

1. prepare: what the recurrences need of every chunk, as in the forward (prepare);
2. states: forward recurrence, residuals and the state of every slot (backward_states);
3. reverse: backward recurrence, dv and the state gradient of every slot (backward_reverse);
4. gradients: dq, dk, dg, dβ and partial sums for A_log and dt_bias (backward_gradients);
5. finish: sums over channel blocks and grouped heads, the gradient of the row norms (backward_finish).

Nothing synchronises with the host: with ``cu_seqlens`` the slots of each sequence are found on the device, in buffers
whose size T and N bound. Sums over value heads and over slots are ordered, so that results repeat bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kda_core.request import BackwardResult, Request
from kda_core_nvidia.backward_finish import finish_kernel
from kda_core_nvidia.backward_gradients import gradients_kernel
from kda_core_nvidia.backward_hopper import reverse_hopper, states_hopper
from kda_core_nvidia.backward_reverse import reverse_kernel
from kda_core_nvidia.backward_states import states_kernel
from kda_core_nvidia.chunk_forward import Prepared, gate_kind, run_prepare
from kda_core_nvidia.hopper import blocks, hopper_config, serves, token_blocks
from kda_core_nvidia.launch import Launcher, chip, on_device
from kda_core_nvidia.layout import CHUNK, padded, slots
from kda_core_nvidia.segments import as_packed, ends, segment_rows, starts

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
"""Log2 decay over a chunk up to which one reference point serves all its pairs: 2^(+-MILD/2) leaves room for operands
and sums in the dtype of the products. float32 keeps to the levels, whose exponents are small where they matter."""


def choose(dtype: torch.dtype, kp: int, vp: int, heads: int, arch: int) -> Config:
    """The configuration for head dimensions padded to ``kp`` and ``vp``.

    Args:
        dtype: of q, k and v.
        heads: sequences times value heads, the programs of a recurrence that keeps V whole.
        arch: compute capability, as two digits.
    """
    if dtype == torch.float32:
        # Products in full precision run on scalar units: small tiles, many warps.
        small = (min(vp, 32), 8, 1)
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


def _rows_first(x: Tensor) -> Tensor:
    """``x`` itself if its last dimension is dense and a tile's offsets fit 32 bits, else a contiguous copy."""
    if (x.shape[-1] == 1 or x.stride(-1) == 1 or x.dim() == 3) and x.stride(1) * 128 < 2**31:
        return x
    return x.contiguous()


def _collapses(x: Tensor) -> bool:
    """Whether batch and token strides are those of one long token axis."""
    return x.shape[0] == 1 or x.stride(0) == x.stride(1) * x.shape[1]


WHOLE = (None,)
"""All sequences in one turn."""


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


@torch.no_grad()
def chunk_backward(request: Request) -> BackwardResult:
    """Gradients of ``chunk_kda`` for ``request.grad_o`` and ``request.grad_final_state`` (either may be None).

    Returns:
        gradients of q, k, v, g, beta, and of A_log, dt_bias and initial_state where the call has them, each in the
        shape and dtype of its input (dt_bias as [HV, K]), contiguous.
    """
    with on_device(request.device):
        return BackwardResult(grads=_backward(request))


def _backward(call: Request) -> dict[str, Tensor]:
    target = chip(call.device)
    rows = segment_rows(call, target)
    r = as_packed(call, rows) if rows else call
    B, T, H, HV, K, V, N = r.B, r.T, r.H, r.HV, r.K, r.V, r.N
    kp, vp, C = padded(K), padded(V), CHUNK
    dtype, q = r.q.dtype, r.q
    major, minor = target.capability
    arch = 10 * major + minor
    config = choose(dtype, kp, vp, N * HV, arch)
    NT, n_slots = -(-T // C), slots(r)

    inputs = {name: _rows_first(getattr(r, name)) for name in ("q", "k", "v", "g", "beta")}
    inputs["do"] = _rows_first(inputs["v"] if r.grad_o is None else r.grad_o)
    collapsed = all(_collapses(x) for x in inputs.values())
    T_row = T if collapsed else 0
    strides = {n: (0 if collapsed else x.stride(0), x.stride(1), x.stride(2)) for n, x in inputs.items()}
    q, k, v, g, beta, do = inputs.values()
    do = None if r.grad_o is None else do
    cu = None if r.cu_seqlens is None else r.cu_seqlens.contiguous()
    gate = gate_kind(r)
    A_log = r.A_log.contiguous() if gate != "none" and r.A_log is not None else None
    dt_bias = r.dt_bias.contiguous() if gate != "none" and r.dt_bias is not None else None

    dv = q.new_empty((B, T, HV, V))
    prepared = Prepared(*r.saved) if r.saved else run_prepare(r, dv, backward=True)
    keys, P, D, X, norms = prepared
    shape = {"HV": HV, "K": K, "V": V, "C": C, "KP": kp, "VP": vp}
    precision = {"PRECISION": "ieee" if dtype == torch.float32 else "tf32"}
    state = None if call.initial_state is None else call.initial_state.contiguous()
    grad_final = None if call.grad_final_state is None else call.grad_final_state.contiguous()
    want_initial = state is not None and "initial_state" in r.needs_grad
    grad_state = q.new_empty(call.state_shape, dtype=call.state_dtype) if want_initial else None
    grad_states = grad_state
    if r is not call:
        # The states at the starts of the segments and their gradients at the ends stand for those of packed sequences.
        v_first = call.state_v_first
        state, transitions = starts(r, target, v, keys, D, state, v_first)
        if do is None:
            do = torch.zeros_like(v)
            strides["do"] = do.stride()[:3]
        grad_final = ends(r, target, do, (keys, P, D), transitions, grad_final, v_first)
        grad_states = torch.empty_like(state) if want_initial else None
        del transitions

    turns = _turns(r, kp, vp, target.multiprocessors)
    most = n_slots if turns == WHOLE else max(turn.stop - turn.start for turn in turns) * NT
    z, states = q.new_empty((most, HV, C, vp)), q.new_empty((most, HV, vp, kp))
    state_grads = torch.empty_like(states)
    grouped = HV != H
    bk = config.gradients[0]
    NK = kp // bk
    dq_hat = dk_hat = dg = dbeta_partial = dA = dbias = None
    for turn in turns:
        # The sequences of a turn, and their slots.
        own = turn and slice(turn.start * NT, turn.stop * NT)
        count = N if turn is None else turn.stop - turn.start
        own_keys, own_D, own_v = _cut(keys, own), _cut(D, own), _cut(v, turn)
        hopper = hopper_config(target, V, count * HV)
        hopper_shape = {"HV": HV, "K": K, "V": V, "C": C, "KP": kp, "BV": hopper.block_v}
        hopper_shape |= {"V_FIRST": r.state_v_first, "STAGES": hopper.stages}
        hopper_grid = (V // hopper.block_v, count * HV, 1)
        if vp == V and serves(target, own_keys, own_v, K, V):
            _states_hopper(
                hopper_grid,
                (
                    *(
                        token_blocks(own_v, C, hopper.block_v),
                        own_v,
                        blocks(own_keys, C, kp),
                        blocks(_cut(X, own), C, C),
                    ),
                    *(blocks(own_D, 1, kp), _cut(state, turn), z, blocks(states, hopper.block_v, kp), cu),
                    *(*strides["v"], T, T_row, NT),
                ),
                hopper_shape,
                hopper.num_warps,
                maxnreg=hopper.registers,
            )
        else:
            bv, warps, stages = config.states
            operand = {"V_AS_OPERAND": arch == 90 and bv >= 64, "V_FIRST": r.state_v_first}
            _states(
                (vp // bv, count * HV, 1),
                (
                    *(own_v, own_keys, _cut(X, own), own_D, _cut(state, turn), z, states, cu),
                    *(*strides["v"], T, T_row, NT),
                ),
                shape | {"BV": bv} | operand | precision | {"STAGES": stages},
                warps,
            )
        own_do = _cut(do, turn)
        if vp == V and own_do is not None and serves(target, own_keys, own_do, K, V):
            _reverse_hopper(
                hopper_grid,
                (
                    *(token_blocks(own_do, C, hopper.block_v), blocks(own_keys, 2 * C, kp), blocks(own_keys, C, kp)),
                    *(blocks(_cut(P, own), C, C), blocks(own_D, 1, kp), own_do, _cut(grad_final, turn), _cut(dv, turn)),
                    *(
                        blocks(state_grads, hopper.block_v, kp),
                        _cut(grad_states, turn),
                        cu,
                        *strides["do"],
                        T,
                        T_row,
                        NT,
                    ),
                ),
                hopper_shape,
                hopper.num_warps,
                maxnreg=hopper.registers,
            )
        else:
            bv, warps, stages = config.reverse
            _reverse(
                (vp // bv, count * HV, 1),
                (
                    *(own_keys, _cut(P, own), own_D, own_do, _cut(grad_final, turn)),
                    *(_cut(dv, turn), state_grads, _cut(grad_states, turn), cu, *strides["do"], T, T_row, NT),
                ),
                shape | {"BV": bv, "V_FIRST": r.state_v_first} | precision | {"STAGES": stages},
                warps,
            )
        if turn is turns[-1]:
            prepared = keys = P = X = own_keys = None
        if dg is None:
            hat = torch.float32 if grouped else dtype
            dq_hat, dk_hat = (q.new_empty((B, T, HV, K), dtype=hat) for _ in range(2))
            dg, dbeta_partial = g.new_empty((B, T, HV, K)), D.new_empty((NK, B, T, HV))
            # Slots that hold nothing write no summand.
            dA = None if A_log is None else D.new_zeros((n_slots, HV, NK))
            dbias = None if dt_bias is None else D.new_zeros((n_slots, HV, K))
        bk, bv, warps, stages = config.gradients
        _gradients(
            ((n_slots if turn is None else count * NT) * HV * NK, 1, 1),
            (
                *(_cut(q, turn), _cut(k, turn), _cut(g, turn), _cut(beta, turn), A_log, dt_bias, _cut(do, turn)),
                *(_cut(dv, turn), z, states, state_grads, _cut(D, own), _cut(norms, own)),
                *(_cut(dq_hat, turn), _cut(dk_hat, turn), _cut(dg, turn)),
                *(dbeta_partial if turn is None else dbeta_partial[:, turn], _cut(dA, own), _cut(dbias, own), cu),
                *(s for name in ("q", "k", "g", "beta", "do") for s in strides[name]),
                *(float(r.scale), 0.0 if r.lower_bound is None else float(r.lower_bound), T, T_row, NT, N, B * T),
            ),
            {"H": H}
            | shape
            | {"BK": bk, "BV": bv, "GATE": gate, "BETA_SIGMOID": r.use_beta_sigmoid_in_kernel}
            | {"BETA_SCALE": 2.0 if r.allow_neg_eigval else 1.0}
            | precision
            | {"LEVELS": C.bit_length() - 1, "MILD": MILD[dtype], "STAGES": stages},
            warps,
        )
    del z, states, state_grads
    dbeta = beta.new_empty((B, T, HV))
    dq, dk = (q.new_empty((B, T, H, K)), q.new_empty((B, T, H, K))) if grouped else (dq_hat, dk_hat)
    R = max(1, 2048 // kp)
    _finish(
        (-(-B * T // R), H, 1),
        (q, k, dq_hat, dk_hat, dbeta_partial, dq, dk, dbeta, *strides["q"], *strides["k"], T, T_row, B * T),
        {"H": H, "HV": HV, "K": K, "KP": kp, "NK": NK, "R": R, "L2NORM": r.use_qk_l2norm_in_kernel},
        4,
    )
    grads = {"q": dq, "k": dk, "v": dv, "g": dg, "beta": dbeta}
    if grad_state is not None:
        if grad_states is not grad_state:
            grad_state.copy_(grad_states[:1] if call.state_v_first else grad_states[:1].transpose(-1, -2))
        grads["initial_state"] = grad_state
    if dA is not None:
        grads["A_log"] = dA.sum((0, 2)).to(A_log.dtype)
    if dbias is not None:
        grads["dt_bias"] = dbias.sum(0).to(dt_bias.dtype)
    return grads

"""Backward of ``chunk_kda``: the inputs once more through prepare, two recurrences, one chunk-parallel kernel.

1. prepare: what the recurrences need of every chunk (backward_prepare);
2. states: forward recurrence, residuals and the state of every slot (backward_states);
3. reverse: backward recurrence, dv and the state gradient of every slot (backward_reverse);
4. gradients: dq, dk, dg, dβ and partial sums for A_log and dt_bias (backward_gradients);
5. finish: sums over channel blocks and grouped heads, the gradient of the row norms (backward_finish).

Nothing synchronises with the host: with ``cu_seqlens`` the slots of each sequence are found on the device, in buffers
whose size T and N bound. Sums over value heads and over slots are ordered, so that results repeat bitwise.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_core.request import BackwardResult, Request
from kda_core_nvidia.backward_finish import finish_kernel
from kda_core_nvidia.backward_gradients import gradients_kernel
from kda_core_nvidia.backward_prepare import prepare_kernel
from kda_core_nvidia.backward_reverse import reverse_kernel
from kda_core_nvidia.backward_states import states_kernel
from kda_core_nvidia.chunk_forward import gate_kind

CHUNK = 32
"""Rows of a chunk; the states before and after each are kept for the gradients kernel."""


@dataclass(frozen=True, slots=True)
class Config:
    """Tiles of the kernels for one shape class.

    Attributes:
        prepare: channels at a time, warps.
        states, reverse: value channels of a program, warps, stages.
        gradients: channels of a program, value channels at a time, warps.
    """

    prepare: tuple[int, int]
    states: tuple[int, int, int]
    reverse: tuple[int, int, int]
    gradients: tuple[int, int, int]


ROOMY = {80, 90, 100, 103}
"""Architectures whose programs can have 160 KiB of shared memory and more; the others have 99 KiB."""

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
        return Config((min(kp, 32), 4), small, small, (16, min(vp, 32), 4))
    bk = min(kp, 64)
    bv = min(vp, 64)
    # A warp holds 16 channels of the transposed blocks. Two warps, so that the products stay with mma.sync: with wgmma
    # (four warps, no faster) ptxas 12.8 spills its descriptors and restores some from the stack pointer.
    gradients = (min(kp, 32), vp if vp <= 128 and arch in ROOMY else min(vp, 64), min(kp, 32) // 16)
    prepare = (bk, max(1, bk // 32))
    if arch not in (90, 100, 103):
        # Products take both operands from registers there: less of the state to a warp, or nothing in flight.
        if kp > 128:
            return Config(prepare, (16, 4, 2), (min(vp, 32), 8, 2), gradients)
        return Config(prepare, (bv, bv // 16, 1), (bv, bv // 16, 1), gradients)
    recurrence = (bv, bv // 16, 3)
    if kp > 128:
        recurrence = (bv, 8, 2)
    elif kp == 128 and vp >= 128 and heads * vp >= 96 * 128:
        # Enough programs to fill the chip with 128 value channels each.
        recurrence = (128, 8, 3)
    return Config(prepare, recurrence, recurrence, gradients)


@triton.jit(do_not_specialize=["T", "N", "n_slots"])
def slots_kernel(cu_seqlens, slot_sequence, first_slot, T, N, n_slots, C: tl.constexpr, BLOCK: tl.constexpr):
    """Number the slots of packed sequences; one program a sequence, and one more for the rows behind the last.

    Writes first_slot [N+1] and slot_sequence [n_slots] (N behind the last sequence, -1 for unused slots).
    """
    i_n = tl.program_id(0)
    first = 0
    for i in range(0, tl.cdiv(i_n, BLOCK)):
        o = i * BLOCK + tl.arange(0, BLOCK)
        start = tl.load(cu_seqlens + o, mask=o < i_n, other=0).to(tl.int32)
        end = tl.load(cu_seqlens + o + 1, mask=o < i_n, other=0).to(tl.int32)
        first += tl.sum((end - start + C - 1) // C)
    bos = tl.load(cu_seqlens + i_n).to(tl.int32)
    eos = T
    if i_n < N:
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int32)
    last = first + tl.cdiv(eos - bos, C)
    tl.store(first_slot + i_n, first)
    for i in range(first, last, BLOCK):
        o = i + tl.arange(0, BLOCK)
        tl.store(slot_sequence + o, o * 0 + i_n, mask=o < last)
    if i_n == N:
        for i in range(last, n_slots, BLOCK):
            o = i + tl.arange(0, BLOCK)
            tl.store(slot_sequence + o, o * 0 - 1, mask=o < n_slots)


@functools.cache
def architecture(device: torch.device) -> int:
    """Compute capability as two digits; that of Hopper for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _padded(size: int) -> int:
    """Power of two of at least 16, the smallest side of a matrix product."""
    return max(16, triton.next_power_of_2(size))


def _rows_first(x: Tensor) -> Tensor:
    """``x`` itself if its last dimension is dense and a tile's offsets fit 32 bits, else a contiguous copy."""
    if (x.shape[-1] == 1 or x.stride(-1) == 1 or x.dim() == 3) and x.stride(1) * 128 < 2**31:
        return x
    return x.contiguous()


def _collapses(x: Tensor) -> bool:
    """Whether batch and token strides are those of one long token axis."""
    return x.shape[0] == 1 or x.stride(0) == x.stride(1) * x.shape[1]


@torch.no_grad()
def chunk_backward(request: Request) -> BackwardResult:
    """Gradients of ``chunk_kda`` for ``request.grad_o`` and ``request.grad_final_state`` (either may be None).

    Returns:
        gradients of q, k, v, g, beta, and of A_log, dt_bias and initial_state where the call has them, each in the
        shape and dtype of its input (dt_bias as [HV, K]), contiguous.
    """
    on_device = torch.cuda.device(request.device) if request.device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        return BackwardResult(grads=_gradients(request))


def _gradients(r: Request) -> dict[str, Tensor]:
    B, T, H, HV, K, V, N = r.B, r.T, r.H, r.HV, r.K, r.V, r.N
    kp, vp = _padded(K), _padded(V)
    C = CHUNK
    varlen = r.cu_seqlens is not None
    device, dtype = r.device, r.q.dtype
    arch = architecture(device)
    config = choose(dtype, kp, vp, N * HV, arch)
    NT = triton.cdiv(T, C)
    n_slots = T // C + N + 1 if varlen else B * NT
    has_do = r.grad_o is not None

    inputs = {name: _rows_first(getattr(r, name)) for name in ("q", "k", "v", "g", "beta")}
    inputs["do"] = _rows_first(r.grad_o) if has_do else inputs["v"]
    collapsed = all(_collapses(x) for x in inputs.values())
    T_row = T if collapsed else 0
    strides = {n: (0 if collapsed else x.stride(0), x.stride(1), x.stride(2)) for n, x in inputs.items()}
    q, k, v, g, beta, do = inputs.values()

    empty = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
    gate = gate_kind(r)
    has_a, has_bias = gate != "none" and r.A_log is not None, gate != "none" and r.dt_bias is not None
    dt_bias = r.dt_bias.contiguous() if has_bias else g
    A_log = r.A_log.contiguous() if has_a else g
    lower_bound = 0.0 if r.lower_bound is None else float(r.lower_bound)
    cu = r.cu_seqlens.contiguous() if varlen else g
    if varlen:
        slot_sequence, first_slot = empty(n_slots, dtype=torch.int32), empty(N + 1, dtype=torch.int32)
        slots_kernel[(N + 1,)](cu, slot_sequence, first_slot, T, N, n_slots, C=C, BLOCK=1024)
    else:
        slot_sequence = first_slot = cu
    where = (slot_sequence, first_slot, cu)
    exact = dtype == torch.float32
    precision = "ieee" if exact else "tf32"
    gate_flags = {
        "GATE": gate,
        "HAS_A": has_a,
        "HAS_BIAS": has_bias,
        "L2NORM": r.use_qk_l2norm_in_kernel,
        "BETA_SIGMOID": r.use_beta_sigmoid_in_kernel,
        "BETA_SCALE": 2.0 if r.allow_neg_eigval else 1.0,
        "VARLEN": varlen,
        "PRECISION": precision,
        "MILD": MILD[dtype],
    }

    ke, qg, kx = (empty(n_slots, HV, C, kp) for _ in range(3))
    P, X = empty(n_slots, HV, C, C), empty(n_slots, HV, C, C)
    decay, total_decay = (empty(n_slots, HV, kp, dtype=torch.float32) for _ in range(2))
    rstd, mild = empty(n_slots, HV, 2, C, dtype=torch.float32), empty(n_slots, HV, dtype=torch.int8)
    bk, warps = config.prepare
    prepare_kernel[(n_slots * HV,)](
        q, k, g, beta, A_log, dt_bias, ke, qg, kx, P, X, decay, total_decay, mild, rstd, *where,
        *strides["q"], *strides["k"], *strides["g"], *strides["beta"],
        r.scale, lower_bound, T, T_row, NT, N, H=H, HV=HV, K=K, C=C, KP=kp, BK=bk,
        INVERSE_PRECISION=precision, LEVELS=C.bit_length() - 1, num_warps=warps, num_stages=1, **gate_flags,
    )  # fmt: skip

    shape = {"HV": HV, "K": K, "V": V, "C": C, "KP": kp, "VP": vp, "V_FIRST": r.state_v_first, "VARLEN": varlen}
    shape |= {"PRECISION": precision}
    has_state = r.initial_state is not None
    z, states = empty(n_slots, HV, C, vp), empty(n_slots, HV, vp, kp)
    state = r.initial_state.contiguous() if has_state else z
    bv, warps, stages = config.states
    states_kernel[(vp // bv, N * HV)](
        v, ke, kx, X, decay, state, z, states, first_slot, cu, *strides["v"], T, T_row, NT,
        HAS_STATE=has_state, V_AS_OPERAND=arch == 90 and bv >= 64, BV=bv, STAGES=stages, num_warps=warps, **shape,
    )  # fmt: skip
    del X
    has_final = r.grad_final_state is not None
    want_initial = has_state and "initial_state" in r.needs_grad
    dv = empty(B, T, HV, V)
    state_grads = empty(n_slots, HV, vp, kp)
    grad_state = torch.empty(r.state_shape, dtype=r.state_dtype, device=device) if want_initial else z
    bv, warps, stages = config.reverse
    reverse_kernel[(vp // bv, N * HV)](
        ke, qg, kx, P, decay, do, r.grad_final_state.contiguous() if has_final else z, dv, state_grads, grad_state,
        first_slot, cu, *strides["do"], T, T_row, NT,
        HAS_DO=has_do, HAS_FINAL=has_final, WANT_INITIAL=want_initial, BV=bv, STAGES=stages, num_warps=warps, **shape,
    )  # fmt: skip
    del ke, qg, kx, P, decay

    bk, bv, warps = config.gradients
    NK, grouped = kp // bk, HV != H
    dq_hat, dk_hat = (empty(B, T, HV, K, dtype=torch.float32 if grouped else dtype) for _ in range(2))
    dbeta_partial = empty(NK, B, T, HV, dtype=torch.float32)
    dg, dbeta = empty(B, T, HV, K, dtype=g.dtype), empty(B, T, HV, dtype=beta.dtype)
    zeros = lambda *shape: torch.zeros(shape, dtype=torch.float32, device=device)  # noqa: E731
    dA, dbias = zeros(n_slots, HV, NK) if has_a else rstd, zeros(n_slots, HV, K) if has_bias else rstd
    gradients_kernel[(n_slots * HV * NK,)](
        q, k, g, beta, A_log, dt_bias, do, dv, z, states, state_grads, total_decay, mild, rstd,
        dq_hat, dk_hat, dg, dbeta_partial, dA, dbias, *where,
        *strides["q"], *strides["k"], *strides["g"], *strides["beta"], *strides["do"],
        r.scale, lower_bound, T, T_row, NT, N, B * T, H=H, HV=HV, K=K, V=V, C=C, KP=kp, VP=vp, BK=bk, BV=bv,
        HAS_DO=has_do, LEVELS=C.bit_length() - 1, num_warps=warps, num_stages=1, **gate_flags,
    )  # fmt: skip
    del z, states, state_grads
    dq, dk = (empty(B, T, H, K), empty(B, T, H, K)) if grouped else (dq_hat, dk_hat)
    R = max(1, 2048 // kp)
    finish_kernel[(triton.cdiv(B * T, R), H)](
        q, k, dq_hat, dk_hat, dbeta_partial, dq, dk, dbeta, *strides["q"], *strides["k"], T, T_row, B * T,
        H=H, HV=HV, K=K, KP=kp, NK=NK, R=R, L2NORM=r.use_qk_l2norm_in_kernel, num_warps=4,
    )  # fmt: skip
    grads = {"q": dq, "k": dk, "v": dv, "g": dg, "beta": dbeta}
    if want_initial:
        grads["initial_state"] = grad_state
    if has_a:
        grads["A_log"] = dA.sum((0, 2)).to(r.A_log.dtype)
    if has_bias:
        grads["dt_bias"] = dbias.sum(0).to(r.dt_bias.dtype)
    return grads

"""The checks of the arguments, made before any backend is asked.

``check`` looks at types, shapes, dtypes, devices and combinations; it works on fake tensors and
its answer depends on the request's signature alone, so that the router asks once a signature.
``check_values`` looks at the contents of small index tensors, where they can be read without waiting
for a device: only those on the CPU. Both raise ValueError or TypeError naming the argument, what was
expected and what came; nothing has been written by then.
"""

from __future__ import annotations

import numbers
import sys
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from kda_core import _expect as expect
from kda_core._expect import (
    DATA_DTYPES,
    INDEX_DTYPES,
    extent,
    fail,
    is_normal,
    names_of,
    normal_range,
    shape_of,
    state_dtypes,
)
from kda_core._pool_checks import check_commit, check_commit_values, check_slot_values, check_slots
from kda_core._signature import is_plain
from kda_core.request import AnyRequest, CommitRequest, GateRequest, Request

CHUNK_SIZES = (32, 64)
FLAGS = tuple(f.name for f in fields(Request) if f.type == "bool")
NUMBERS = ("scale", "lower_bound")
PYTHON = (bool, int, float, type(None))
OPTIONS = {
    kind: tuple(f.name for f in fields(kind) if f.type in ("bool", "int", "float", "float | None"))
    for kind in (Request, GateRequest, CommitRequest)
}
"""Fields that are flags or numbers."""


def check(r: AnyRequest) -> None:
    """Raise unless types, shapes, dtypes, devices and the combination of options are right."""
    if isinstance(r, CommitRequest):
        check_commit(r)
        return
    if isinstance(r, GateRequest):
        expect.tensor("g", r.g, DATA_DTYPES)
        if r.g.dim() < 2:
            fail("g", "at least two dimensions [..., HV, K]", f"{shape_of(r.g)}")
        _check_gate(r, True, False, (r.g.shape[-2], r.g.shape[-1]), r.output_dtype)
        return
    _check_data(r)
    _check_options(r)
    _check_gate(r, r.use_gate_in_kernel, r.safe_gate, (r.HV, r.K), r.compute_dtype)
    _check_packing(r)
    _check_state(r)
    check_slots(r)
    if r.out is not None:
        expect.tensor("out", r.out, (r.q.dtype,), r.device)
        expect.shape("out", r.out, (r.B, r.T, r.HV, r.V), "[B, T, HV, V]")
        expect.no_overlap("out", r.out)


def convert_scalars(r: AnyRequest) -> bool:
    """Replace options that are NumPy scalars, or integers beyond 64 bits, by Python values; whether there were any.

    Checks, the router, operators and backends then see only the Python value.
    """
    found = {}
    for name in OPTIONS[type(r)]:
        given = getattr(r, name)
        if given is None or type(given) in (bool, float):
            continue
        value = python_value(given)
        if name in NUMBERS and type(value) is int and 2**63 <= abs(value) <= sys.float_info.max:
            value = float(value)
        if value is not given:
            found[name] = value
    r.__dict__.update(found)
    return bool(found)


def resolve_signs(r: AnyRequest) -> bool:
    """Replace tensors whose sign is a bit of the tensor (``z.conj().imag``) by copies; whether there were any.

    Kernels read memory, which holds the values with the other sign. A tensor that is written to cannot be copied.
    """
    found = {n: t.resolve_neg() for n, t in vars(r).items() if type(t) in (Tensor, Parameter) and t.is_neg()}
    for name in () if isinstance(r, GateRequest) else r.written:
        if name in found:
            fail(name, "a tensor that can be written to as it lies in memory", "a negative view (see resolve_neg)")
    r.__dict__.update(found)
    return bool(found)


def python_value(value: Any) -> Any:
    """A NumPy scalar as the Python value that it stands for; anything else as it came."""
    if type(value) in PYTHON or not _is_numpy_scalar(value):
        return value
    found = value.item()
    # NumPy's long double has no Python type of its own.
    return float(found) if _is_numpy_scalar(found) and isinstance(found, numbers.Real) else found


def _is_numpy_scalar(value: Any) -> bool:
    # No NumPy scalar exists before NumPy is imported.
    return isinstance(value, getattr(sys.modules.get("numpy"), "generic", ()))


def has_values(r: Any) -> bool:
    """Whether ``check_values`` has anything to check; fake tensors have no values."""
    if r.op == "commit_kda":
        return is_plain(r.pool)
    given = r.op != "kda_gate" and (r.cu_seqlens is not None or r.inplace_final_state or r.out is not None)
    return given and is_plain(r.q)


def check_values(r: Request | CommitRequest) -> None:
    """Raise when index tensors on the CPU hold values that the contract forbids."""
    if isinstance(r, CommitRequest):
        check_commit_values(r)
        return
    bounds = None if r.cu_seqlens is None else _check_cu_seqlens_values(r)
    if r.inplace_final_state:
        check_slot_values(r, bounds)
    if r.out is not None:
        _check_places(r)
    elif r.inplace_final_state and (r.memo is None or extent not in r.memo):
        _check_written(r)


def _check_places(r: Request) -> None:
    """Refuse an ``out`` that overlaps what the call reads: in repeated calls the large tensors, where they begin."""
    extents = None if r.memo is None else r.memo.get(extent)
    if extents is None:
        _check_written(r)
        return
    a, b, c, d, e, f, length = extents
    begin, state = r.out.data_ptr(), r.initial_state  # type: ignore[union-attr]
    end = begin + length
    q, k, v, g, beta = r.q.data_ptr(), r.k.data_ptr(), r.v.data_ptr(), r.g.data_ptr(), r.beta.data_ptr()
    # Written out: a loop takes twice as long.
    if (
        (q < end and begin < q + a)
        or (k < end and begin < k + b)
        or (v < end and begin < v + c)
        or (g < end and begin < g + d)
        or (beta < end and begin < beta + e)
        or (state is not None and (s := state.data_ptr()) < end and begin < s + f)
    ):
        _check_written(r)


def _check_written(r: Request) -> None:
    """Refuse ``out`` and a pool that share memory with other tensors of the call."""
    expect.own_memory(vars(r), r.written)
    if r.memo is not None:
        r.memo[extent] = tuple(map(extent, (r.q, r.k, r.v, r.g, r.beta, r.initial_state, r.out)))


def _check_data(r: Request) -> None:
    expect.tensor("q", r.q, DATA_DTYPES)
    for name in ("k", "v"):
        expect.tensor(name, getattr(r, name), (r.q.dtype,), r.device, ", the dtype of q")
    for name in ("g", "beta"):
        expect.tensor(name, getattr(r, name), DATA_DTYPES, r.device)
    if r.q.dim() != 4:
        fail("q", "shape [B, T, H, K]", shape_of(r.q))
    if r.v.dim() != 4:
        fail("v", "shape [B, T, HV, V]", shape_of(r.v))
    B, T, H, K = r.q.shape
    if H < 1 or K < 1:
        fail("q", "at least one head and one channel", shape_of(r.q))
    expect.shape("k", r.k, (B, T, H, K), "[B, T, H, K] of q")
    if r.v.shape[0] != B or r.v.shape[1] != T:
        fail("v", f"shape [B, T, HV, V] with B, T = {B}, {T} of q", shape_of(r.v))
    HV, V = r.v.shape[2:]
    if HV < 1 or V < 1:
        fail("v", "at least one head and one channel", shape_of(r.v))
    if HV % H != 0:
        expected = f"a number of heads HV that is a multiple of H = {H} of q {shape_of(r.q)}"
        fail("v", expected, f"HV = {HV} in {shape_of(r.v)}")
    expect.shape("g", r.g, (B, T, HV, K), "[B, T, HV, K]")
    expect.shape("beta", r.beta, (B, T, HV), "[B, T, HV]")


def _check_options(r: Request) -> None:
    for name in FLAGS:
        expect.flag(name, getattr(r, name))
    expect.number("scale", r.scale)
    if r.scale and not is_normal(r.scale, r.compute_dtype):
        fail("scale", f"0 or {normal_range(r.compute_dtype)}", f"{r.scale}")
    expect.integer("chunk_size", r.chunk_size)
    if r.chunk_size not in CHUNK_SIZES:
        fail("chunk_size", f"one of {CHUNK_SIZES}", f"{r.chunk_size}")
    dtype = r.intermediate_states_dtype
    if dtype is not None:
        if not isinstance(dtype, torch.dtype) or dtype not in state_dtypes(r):
            raise TypeError(f"intermediate_states_dtype: expected {names_of(state_dtypes(r))} or None, got {dtype!r}")
        if not r.return_intermediate_states:
            fail("intermediate_states_dtype", "return_intermediate_states=True beside it", "False")
    if r.allow_neg_eigval and not r.use_beta_sigmoid_in_kernel:
        fail("allow_neg_eigval", "use_beta_sigmoid_in_kernel=True beside it", "False")


def _check_gate(
    r: Request | GateRequest, in_kernel: bool, safe_gate: bool, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    A_log, dt_bias, lower_bound = r.A_log, r.dt_bias, r.lower_bound
    if lower_bound is not None:
        expect.number("lower_bound", lower_bound)
        if not (lower_bound < 0 and is_normal(lower_bound, dtype)):
            fail("lower_bound", f"a number below 0 and {normal_range(dtype)}", f"{lower_bound}")
    if not in_kernel:
        for name, t in (("A_log", A_log), ("dt_bias", dt_bias)):
            if t is not None:
                fail(name, "use_gate_in_kernel=True beside it", "False, so that it has no effect")
        return
    if A_log is None and lower_bound is None:
        fail("A_log", "a tensor [HV], which the softplus gate needs", "None without a lower_bound")
    if safe_gate and lower_bound is None:
        fail("lower_bound", "a number, which safe_gate=True with use_gate_in_kernel=True needs", "None")
    HV, K = heads
    if A_log is not None:
        expect.tensor("A_log", A_log, DATA_DTYPES, r.device)
        expect.shape("A_log", A_log, (HV,), "[HV]")
    if dt_bias is not None:
        expect.tensor("dt_bias", dt_bias, DATA_DTYPES, r.device)
        if tuple(dt_bias.shape) != (HV, K):
            fail("dt_bias", f"shape [HV·K] = [{HV * K}] or [HV, K] = [{HV}, {K}]", shape_of(dt_bias))


def _check_packing(r: Request) -> None:
    cu, cu_cpu = r.cu_seqlens, r.cu_seqlens_cpu
    if cu is None:
        if cu_cpu is not None:
            fail("cu_seqlens_cpu", "cu_seqlens beside it (it is a copy of it on the CPU)", "cu_seqlens=None")
        return
    expect.tensor("cu_seqlens", cu, INDEX_DTYPES, r.device)
    if cu.dim() != 1 or cu.shape[0] < 1:
        fail("cu_seqlens", "shape [N+1]", shape_of(cu))
    if r.B != 1:
        fail("q", "B = 1 with cu_seqlens (packed sequences lie one behind the other)", f"B = {r.B} in {shape_of(r.q)}")
    if cu_cpu is not None:
        expect.tensor("cu_seqlens_cpu", cu_cpu, INDEX_DTYPES, torch.device("cpu"))
        expect.shape("cu_seqlens_cpu", cu_cpu, tuple(cu.shape), "[N+1] of cu_seqlens")
    elif r.return_intermediate_states and cu.device.type != "cpu":
        fail("cu_seqlens_cpu", "a copy of cu_seqlens on the CPU, which the shape of h depends on", "None")


def _check_state(r: Request) -> None:
    state = r.initial_state
    if state is None:
        if r.inplace_final_state and r.ssm_state_indices is None:
            fail("initial_state", "the states that inplace_final_state=True writes to", "None")
        return
    expect.tensor("initial_state", state, state_dtypes(r), r.device)
    symbols = "V, K" if r.state_v_first else "K, V"
    if r.ssm_state_indices is None:
        expect.shape("initial_state", state, r.state_shape, f"[N, HV, {symbols}]")
    elif state.dim() != 4 or tuple(state.shape[1:]) != r.state_shape[1:]:
        expected = f"a pool of shape [slots, HV, {symbols}] = [slots, {str(list(r.state_shape[1:]))[1:]}"
        fail("initial_state", expected, shape_of(state))
    if r.written_states == "initial_state":
        expect.no_overlap("initial_state", state)


def _check_cu_seqlens_values(r: Request) -> list[int] | None:
    """Check boundaries that are on the CPU and return them."""
    bounds = None
    for name, cu in (("cu_seqlens", r.cu_seqlens), ("cu_seqlens_cpu", r.cu_seqlens_cpu)):
        if cu is None or not cu.is_cpu:
            continue
        found = cu.tolist()
        if found[0] != 0:
            fail(name, "to start at 0", f"{found[0]}")
        if found != sorted(found):
            fail(name, "values that do not decrease", f"{found}")
        if found[-1] > r.T:
            fail(name, f"to end at or before T = {r.T}", f"{found[-1]}")
        if bounds is not None and bounds != found:
            fail("cu_seqlens_cpu", f"the values of cu_seqlens {bounds}", f"{found}")
        bounds = found
    return bounds

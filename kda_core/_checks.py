"""The checks of the arguments, made before any backend is asked.

``check_metadata`` looks at types, shapes, dtypes, devices and combinations; it works on fake tensors and
its answer depends on the request's signature alone, so that the router asks once a signature.
``check_values`` looks at the contents of small index tensors, where they can be read without waiting
for a device: only those on the CPU. Both raise ValueError or TypeError naming the argument, what was
expected and what came; nothing has been written by then.
"""

from __future__ import annotations

import functools
import itertools
import numbers
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.masked import is_masked_tensor
from torch.nn.parameter import Parameter, is_lazy

from kda_core._overlaps import extent, meets_itself, share_memory
from kda_core.request import DATA, AnyRequest, GateRequest, Request

DATA_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
STATE_DTYPES = (torch.float32, torch.bfloat16)
CHUNK_SIZES = (32, 64)
FLAGS = tuple(f.name for f in fields(Request) if f.type == "bool")
NUMBERS = ("scale", "lower_bound")
OPTIONS = {Request: (*FLAGS, *NUMBERS, "chunk_size", "pad_slot_id"), GateRequest: ("lower_bound",)}
"""Fields that are flags or numbers."""


def check(r: AnyRequest) -> None:
    """Raise unless types, shapes, dtypes, devices and the combination of options are right."""
    if isinstance(r, GateRequest):
        check_gate_metadata(r)
    else:
        check_metadata(r)


def check_metadata(r: Request) -> None:
    """``check`` for a call of ``chunk_kda`` or ``fused_recurrent_kda``."""
    _check_data(r)
    _check_options(r)
    _check_gate(
        r.use_gate_in_kernel, r.A_log, r.dt_bias, r.lower_bound, r.safe_gate, (r.HV, r.K), r.device, r.compute_dtype
    )
    _check_packing(r)
    _check_state(r)
    _check_slots(r)
    if r.out is not None:
        _expect_tensor("out", r.out, (r.q.dtype,), r.device)
        _expect_shape("out", r.out, (r.B, r.T, r.HV, r.V), "[B, T, HV, V]")
        _expect_no_overlap("out", r.out)


def check_gate_metadata(r: GateRequest) -> None:
    """The same for ``kda_gate``."""
    _expect_tensor("g", r.g, DATA_DTYPES)
    if r.g.dim() < 2:
        _fail("g", "at least two dimensions [..., HV, K]", f"{_shape(r.g)}")
    _check_gate(
        True, r.A_log, r.dt_bias, r.lower_bound, False, (r.g.shape[-2], r.g.shape[-1]), r.device, r.output_dtype
    )


def check_differentiable(r: Request) -> None:
    """Raise if a call that needs gradients has an option that is not differentiable."""
    for name, used in (
        ("ssm_state_indices", r.ssm_state_indices is not None),
        ("inplace_final_state", r.inplace_final_state),
        ("out", r.out is not None),
        ("return_intermediate_states", r.return_intermediate_states),
    ):
        if python_value(used) is True:  # check_metadata refuses what is no flag
            raise ValueError(
                f"{name}: expected no gradient to be needed (it is not differentiable; call it under torch.no_grad() "
                "or torch.inference_mode()), got an input that requires a gradient"
            )


def check_kinds(r: AnyRequest) -> None:
    """Refuse tensors of kinds that no operator takes: the dispatcher's own error does not name the argument."""
    for name, t in vars(r).items():
        if isinstance(t, Tensor):
            _expect_dense(name, t)


def convert_scalars(r: AnyRequest) -> bool:
    """Replace options that are NumPy scalars, or integers beyond 64 bits, by Python values that operators take.

    Checks, the router and backends then see only the Python value.

    Returns:
        Whether anything was replaced.
    """
    found = {}
    for name in OPTIONS[type(r)]:
        given = getattr(r, name)
        value = python_value(given)
        if name in NUMBERS and type(value) is int and 2**63 <= abs(value) <= sys.float_info.max:
            value = float(value)
        if value is not given:
            found[name] = value
    r.__dict__.update(found)
    return bool(found)


def resolve_signs(r: AnyRequest) -> bool:
    """Replace tensors whose sign is a bit of the tensor, as that of ``z.conj().imag``, by copies with the values.

    Kernels read memory, which holds the values with the other sign. A tensor that is written to cannot be copied.

    Returns:
        Whether anything was replaced.
    """
    found = {n: t.resolve_neg() for n, t in vars(r).items() if type(t) in (Tensor, Parameter) and t.is_neg()}
    written = ("out", "initial_state") if isinstance(r, Request) and r.inplace_final_state else ("out",)
    for name in written:
        if name in found:
            _fail(name, "a tensor that can be written to as it lies in memory", "a negative view (see resolve_neg)")
    r.__dict__.update(found)
    return bool(found)


def python_value(value: Any) -> Any:
    """A NumPy scalar as the Python value that it stands for; anything else as it came."""
    if not _is_numpy_scalar(value):
        return value
    found = value.item()
    # NumPy's long double has no Python type of its own.
    return float(found) if _is_numpy_scalar(found) and isinstance(found, numbers.Real) else found


def _is_numpy_scalar(value: Any) -> bool:
    # No NumPy scalar exists before NumPy is imported.
    return isinstance(value, getattr(sys.modules.get("numpy"), "generic", ()))


def check_values(r: Request) -> None:
    """Raise when index tensors on the CPU hold values that the contract forbids."""
    bounds = None if r.cu_seqlens is None else _check_cu_seqlens_values(r)
    if r.inplace_final_state:
        _check_slot_values(r, bounds)
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
    tensors = {n: t for n, t in vars(r).items() if type(t) in (Tensor, Parameter)}
    for name in ("out", "initial_state") if r.inplace_final_state else ("out",):
        written = tensors.pop(name, None)
        for other, t in tensors.items():
            if written is not None and t.device == written.device and share_memory(written, t):
                same = written.data_ptr() == t.data_ptr()
                _fail(name, "memory of its own", f"the memory of {other}" if same else f"memory that {other} overlaps")
    if r.memo is not None:
        r.memo[extent] = tuple(map(extent, (r.q, r.k, r.v, r.g, r.beta, r.initial_state, r.out)))


def _fail(argument: str, expected: str, actual: str) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {actual}")


def _shape(t: Tensor) -> str:
    return str(list(t.shape))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _expect_tensor(
    name: str, t: Any, dtypes: Sequence[torch.dtype], device: torch.device | None = None, why: str = ""
) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
    _expect_dense(name, t)
    if t.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {_names(dtypes)}{why}, got {_names((t.dtype,))}")
    if device is not None and t.device != device:
        _fail(name, f"a tensor on {device}, where q is", f"one on {t.device}")


def _expect_dense(name: str, t: Tensor) -> None:
    if t.is_nested:
        hint = " (pack its sequences one behind the other, with cu_seqlens)" if name in DATA else ""
        raise TypeError(f"{name}: expected a dense (strided) tensor, got a nested one with layout {t.layout}{hint}")
    if t.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense (strided) tensor, got layout {t.layout}")
    if t.is_quantized:
        raise TypeError(f"{name}: expected a dense (strided) tensor, got a quantized one of {_names((t.dtype,))}")
    if type(t) is Tensor:
        return
    if hasattr(t, "device_mesh"):
        raise TypeError(
            f"{name}: expected a plain tensor, as q is, got a DTensor; make DTensors of all, or pass its to_local()"
        )
    if is_lazy(t):
        raise TypeError(f"{name}: expected a tensor, got a parameter that has not been initialised")
    if is_masked_tensor(t):
        raise TypeError(f"{name}: expected a dense (strided) tensor, got a masked one")


def _expect_shape(name: str, t: Tensor, expected: tuple[int, ...], symbols: str) -> None:
    if tuple(t.shape) != expected:
        _fail(name, f"shape {symbols} = {list(expected)}", _shape(t))


def expect_flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is a bool: an option that merely counts as true or false may be another argument's."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def _expect_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")


def _expect_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")


def _is_normal(value: float, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` holds a number with full precision: it neither overflows nor is subnormal."""
    limits = torch.finfo(dtype)
    return limits.tiny <= abs(value) <= limits.max


def _normal_range(dtype: torch.dtype) -> str:
    limits = torch.finfo(dtype)
    return f"of a size from {limits.tiny:.2g} to {limits.max:.2g}, as {_names((dtype,))} holds it"


def _expect_no_overlap(name: str, t: Tensor) -> None:
    """Refuse a tensor as a place to write to where elements share memory."""
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if size > 1 and stride == 0:
            _fail(name, "memory of its own for every element", f"an expanded tensor with strides {tuple(t.stride())}")
    if type(t) in (Tensor, Parameter) and meets_itself(t):  # sizes of traced tensors may be symbols
        _fail(name, "memory of its own for every element", f"overlapping ones with strides {tuple(t.stride())}")


def _check_data(r: Request) -> None:
    _expect_tensor("q", r.q, DATA_DTYPES)
    for name in ("k", "v"):
        _expect_tensor(name, getattr(r, name), (r.q.dtype,), r.device, ", the dtype of q")
    for name in ("g", "beta"):
        _expect_tensor(name, getattr(r, name), DATA_DTYPES, r.device)
    if r.q.dim() != 4:
        _fail("q", "shape [B, T, H, K]", _shape(r.q))
    if r.v.dim() != 4:
        _fail("v", "shape [B, T, HV, V]", _shape(r.v))
    B, T, H, K = r.q.shape
    if H < 1 or K < 1:
        _fail("q", "at least one head and one channel", _shape(r.q))
    _expect_shape("k", r.k, (B, T, H, K), "[B, T, H, K] of q")
    if r.v.shape[0] != B or r.v.shape[1] != T:
        _fail("v", f"shape [B, T, HV, V] with B, T = {B}, {T} of q", _shape(r.v))
    HV, V = r.v.shape[2:]
    if HV < 1 or V < 1:
        _fail("v", "at least one head and one channel", _shape(r.v))
    if HV % H != 0:
        _fail(
            "v", f"a number of heads HV that is a multiple of H = {H} of q {_shape(r.q)}", f"HV = {HV} in {_shape(r.v)}"
        )
    _expect_shape("g", r.g, (B, T, HV, K), "[B, T, HV, K]")
    _expect_shape("beta", r.beta, (B, T, HV), "[B, T, HV]")


def _check_options(r: Request) -> None:
    for name in FLAGS:
        expect_flag(name, getattr(r, name))
    _expect_number("scale", r.scale)
    if r.scale and not _is_normal(r.scale, r.compute_dtype):
        _fail("scale", f"0 or {_normal_range(r.compute_dtype)}", f"{r.scale}")
    _expect_int("chunk_size", r.chunk_size)
    if r.chunk_size not in CHUNK_SIZES:
        _fail("chunk_size", f"one of {CHUNK_SIZES}", f"{r.chunk_size}")
    if r.allow_neg_eigval and not r.use_beta_sigmoid_in_kernel:
        _fail("allow_neg_eigval", "use_beta_sigmoid_in_kernel=True beside it", "False")


def _check_gate(
    in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, safe_gate: bool,
    heads: tuple[int, int], device: torch.device, dtype: torch.dtype,
) -> None:  # fmt: skip
    if lower_bound is not None:
        _expect_number("lower_bound", lower_bound)
        if not (lower_bound < 0 and _is_normal(lower_bound, dtype)):
            _fail("lower_bound", f"a number below 0 and {_normal_range(dtype)}", f"{lower_bound}")
    if not in_kernel:
        for name, t in (("A_log", A_log), ("dt_bias", dt_bias)):
            if t is not None:
                _fail(name, "use_gate_in_kernel=True beside it", "False, so that it has no effect")
        return
    if A_log is None and lower_bound is None:
        _fail("A_log", "a tensor [HV], which the softplus gate needs", "None without a lower_bound")
    if safe_gate and lower_bound is None:
        _fail("lower_bound", "a number, which safe_gate=True with use_gate_in_kernel=True needs", "None")
    HV, K = heads
    if A_log is not None:
        _expect_tensor("A_log", A_log, DATA_DTYPES, device)
        _expect_shape("A_log", A_log, (HV,), "[HV]")
    if dt_bias is not None:
        _expect_tensor("dt_bias", dt_bias, DATA_DTYPES, device)
        if tuple(dt_bias.shape) != (HV, K):
            _fail("dt_bias", f"shape [HV·K] = [{HV * K}] or [HV, K] = [{HV}, {K}]", _shape(dt_bias))


def _check_packing(r: Request) -> None:
    cu, cu_cpu = r.cu_seqlens, r.cu_seqlens_cpu
    if cu is None:
        if cu_cpu is not None:
            _fail("cu_seqlens_cpu", "cu_seqlens beside it (it is a copy of it on the CPU)", "cu_seqlens=None")
        return
    _expect_tensor("cu_seqlens", cu, INDEX_DTYPES, r.device)
    if cu.dim() != 1 or cu.shape[0] < 1:
        _fail("cu_seqlens", "shape [N+1]", _shape(cu))
    if r.B != 1:
        _fail("q", "B = 1 with cu_seqlens (packed sequences lie one behind the other)", f"B = {r.B} in {_shape(r.q)}")
    if cu_cpu is not None:
        _expect_tensor("cu_seqlens_cpu", cu_cpu, INDEX_DTYPES, torch.device("cpu"))
        _expect_shape("cu_seqlens_cpu", cu_cpu, tuple(cu.shape), "[N+1] of cu_seqlens")
    elif r.return_intermediate_states and cu.device.type != "cpu":
        _fail("cu_seqlens_cpu", "a copy of cu_seqlens on the CPU, which the shape of h depends on", "None")


def _check_state(r: Request) -> None:
    state = r.initial_state
    if state is None:
        if r.inplace_final_state and r.ssm_state_indices is None:
            _fail("initial_state", "the states that inplace_final_state=True writes to", "None")
        return
    dtypes = (*STATE_DTYPES, torch.float64) if r.q.dtype == torch.float64 else STATE_DTYPES
    _expect_tensor("initial_state", state, dtypes, r.device)
    symbols = "V, K" if r.state_v_first else "K, V"
    if r.ssm_state_indices is None:
        _expect_shape("initial_state", state, r.state_shape, f"[N, HV, {symbols}]")
    elif state.dim() != 4 or tuple(state.shape[1:]) != r.state_shape[1:]:
        _fail(
            "initial_state",
            f"a pool of shape [slots, HV, {symbols}] = [slots, {str(list(r.state_shape[1:]))[1:]}",
            _shape(state),
        )
    if r.inplace_final_state:
        _expect_no_overlap("initial_state", state)


def _check_slots(r: Request) -> None:
    indices, accepted = r.ssm_state_indices, r.num_accepted_tokens
    _expect_int("pad_slot_id", r.pad_slot_id)
    if isinstance(r.pad_slot_id, int) and not -(2**63) <= r.pad_slot_id < 2**63:
        _fail("pad_slot_id", "a number of 64 bits", f"{r.pad_slot_id}")
    if indices is None:
        if accepted is not None:
            _fail("num_accepted_tokens", "ssm_state_indices [N, 1+S] beside it", "ssm_state_indices=None")
        return
    if r.initial_state is None:
        _fail("initial_state", "the pool that ssm_state_indices points into", "None")
    _expect_tensor("ssm_state_indices", indices, INDEX_DTYPES, r.device)
    widths = "[N] or [N, 1]" if r.op == "chunk_kda" else "[N] or [N, 1+S]"
    if indices.dim() not in (1, 2) or indices.shape[0] != r.N or (indices.dim() == 2 and indices.shape[1] < 1):
        _fail("ssm_state_indices", f"shape {widths} with N = {r.N}", _shape(indices))
    if indices.dim() == 2 and indices.shape[1] > 1:
        if r.op == "chunk_kda":
            _fail(
                "ssm_state_indices",
                f"shape {widths} (one slot a sequence; fused_recurrent_kda takes more)",
                _shape(indices),
            )
        if r.cu_seqlens is None and r.T > indices.shape[1]:
            _fail("ssm_state_indices", f"a slot for each of the T = {r.T} tokens", _shape(indices))
    if accepted is not None:
        _expect_tensor("num_accepted_tokens", accepted, INDEX_DTYPES, r.device)
        _expect_shape("num_accepted_tokens", accepted, (r.N,), "[N]")
        if indices.dim() != 2:
            _fail("ssm_state_indices", "shape [N, 1+S] beside num_accepted_tokens", _shape(indices))


def _check_cu_seqlens_values(r: Request) -> list[int] | None:
    """Check boundaries that are on the CPU and return them."""
    bounds = None
    for name, cu in (("cu_seqlens", r.cu_seqlens), ("cu_seqlens_cpu", r.cu_seqlens_cpu)):
        if cu is None or not cu.is_cpu:
            continue
        found = cu.tolist()
        if found[0] != 0:
            _fail(name, "to start at 0", f"{found[0]}")
        if found != sorted(found):
            _fail(name, "values that do not decrease", f"{found}")
        if found[-1] > r.T:
            _fail(name, f"to end at or before T = {r.T}", f"{found[-1]}")
        if bounds is not None and bounds != found:
            _fail("cu_seqlens_cpu", f"the values of cu_seqlens {bounds}", f"{found}")
        bounds = found
    return bounds


@functools.lru_cache(maxsize=64)
def _are_slots_of_their_own(slots: tuple[int, ...], pool_size: int, pad_slot_id: int) -> bool:
    """Whether every sequence has one slot within the pool and none is skipped."""
    return len(set(slots)) == len(slots) and 0 <= min(slots) <= max(slots) < pool_size and pad_slot_id not in slots


def _check_slot_values(r: Request, bounds: list[int] | None) -> None:
    indices, accepted, pool = r.ssm_state_indices, r.num_accepted_tokens, r.initial_state
    if indices is None or pool is None or not indices.is_cpu:
        return
    width = 1 if indices.dim() == 1 else indices.shape[1]
    if width == 1 and accepted is None:
        # Decoding runs this once a token and layer: accept valid slots without skipped rows from a cache.
        slots = (indices if indices.dim() == 1 else indices[:, 0]).tolist()
        if not slots or _are_slots_of_their_own(tuple(slots), pool.size(0), r.pad_slot_id):
            return
    rows = indices.reshape(-1, width).tolist()
    every_token = width > 1
    lengths = [r.T] * r.N if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
    if every_token and max(lengths, default=0) > width:
        _fail(
            "ssm_state_indices",
            f"a slot for each of the {max(lengths)} tokens of the longest sequence",
            _shape(indices),
        )
    counts = [1] * r.N if accepted is None else accepted.tolist()
    for count in counts:
        if not 1 <= count <= width:
            _fail("num_accepted_tokens", f"values from 1 to {width}", f"{count}")
    owner: dict[int, int] = {}
    for n, (row, count, length) in enumerate(zip(rows, counts, lengths, strict=True)):
        if row[count - 1] < 0 or row[count - 1] == r.pad_slot_id:
            continue  # skipped: its other slots are never read
        touched = [row[count - 1], *(row[:length] if every_token else row)]
        used = {slot for slot in touched if slot >= 0 and slot != r.pad_slot_id}
        written = [slot for slot in touched[1:] if slot >= 0 and slot != r.pad_slot_id]
        for slot in used:
            if slot >= pool.shape[0]:
                _fail("ssm_state_indices", f"slots below {pool.shape[0]}, the size of the pool", f"{slot}")
            if owner.setdefault(slot, n) != n:
                _fail(
                    "ssm_state_indices", "every slot in one sequence only", f"slot {slot} in rows {owner[slot]} and {n}"
                )
        if len(set(written)) != len(written):
            _fail("ssm_state_indices", "different slots for the tokens of a sequence", f"{written} in row {n}")

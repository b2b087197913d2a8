"""torch.library operators: schema, fake kernel and autograd of every public function.

Three operators a function: a functional one with autograd, its backward, and one that writes to the
caller's memory (a pool of states, ``out``) and has no gradient. The backend is chosen inside the
operator, by the device its tensors are on (or by the name that the caller asked for), so that a
compiled graph holds one opaque call.

A tensor that a call does not produce is returned as an empty one of shape [0]: schemas have no
optional results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from kda_core.errors import ContractViolation
from kda_core.plugins import TRACED, Backend, registry
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import BackwardResult, ForwardResult, GateRequest, Op, Request, TensorSpec

NAMESPACE = "kda_core"
HOOKS = {
    "chunk_kda": ("kda_core_chunk_forward", "kda_core_chunk_backward"),
    "fused_recurrent_kda": ("kda_core_recurrent_forward", "kda_core_recurrent_backward"),
}

GATE_DIFFERENTIABLE = ("g", "A_log", "dt_bias")

_TENSORS = (
    ("q", "Tensor"),
    ("k", "Tensor"),
    ("v", "Tensor"),
    ("g", "Tensor"),
    ("beta", "Tensor"),
    ("A_log", "Tensor?"),
    ("dt_bias", "Tensor?"),
    ("initial_state", "Tensor?"),
    ("cu_seqlens", "Tensor?"),
    ("cu_seqlens_cpu", "Tensor?"),
)
_SLOTS = (
    ("ssm_state_indices", "Tensor?"),
    ("num_accepted_tokens", "Tensor?"),
    ("out", "Tensor(b!)?"),
)
_OPTIONS = (
    ("scale", "float"),
    ("output_final_state", "bool"),
    ("use_qk_l2norm_in_kernel", "bool"),
    ("use_gate_in_kernel", "bool"),
    ("use_beta_sigmoid_in_kernel", "bool"),
    ("allow_neg_eigval", "bool"),
    ("safe_gate", "bool"),
    ("lower_bound", "float?"),
    ("disable_recompute", "bool"),
    ("return_intermediate_states", "bool"),
    ("state_v_first", "bool"),
    ("chunk_size", "int"),
)
_SLOT_OPTIONS = (("inplace_final_state", "bool"), ("pad_slot_id", "int"))

_FUNCTIONAL = (*_TENSORS, *_OPTIONS, ("save_for_backward", "bool"))
# States that are only read are not declared as written: an argument of their own for those that are.
_INPLACE = (
    *_TENSORS,
    ("pool", "Tensor(a!)?"),
    *_SLOTS,
    *_OPTIONS,
    *_SLOT_OPTIONS,
)
TENSOR_NAMES = tuple(name for name, _ in _TENSORS)
OPTION_NAMES = tuple(name for name, _ in _OPTIONS)
_FUNCTIONAL_NAMES = tuple(name for name, _ in _FUNCTIONAL)
_INPLACE_NAMES = tuple(name for name, _ in _INPLACE)
_BACKWARD_NAMES = (*TENSOR_NAMES, *OPTION_NAMES)

_library = torch.library.Library(NAMESPACE, "DEF")


def _define(name: str, arguments: str, results: str, implementation: Callable, fake: Callable) -> None:
    _library.define(f"{name}({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _schema(arguments: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{kind} {name}" for name, kind in arguments)


def _asked(name: str) -> str | None:
    """The backend that the caller asked for, from the operator's argument (``plugins.traced_name`` adds to it)."""
    return name.partition(TRACED)[0] or None


def _absent(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _or_absent(t: Tensor | None, like: Tensor) -> Tensor:
    return _absent(like) if t is None else t


def _present(t: Tensor, wanted: bool) -> Tensor | None:
    return t if wanted else None


def forward(backend: Backend, r: Request) -> ForwardResult:
    """Run a request's forward on a backend."""
    result = backend.result(HOOKS[r.op][0], r)
    if not isinstance(result, ForwardResult):
        raise ContractViolation(
            f"backend {backend.info.name!r} returned {type(result).__name__}, expected ForwardResult"
        )
    return result


def backward(backend: Backend, r: Request) -> dict[str, Tensor]:
    """Run a request's backward on a backend: a gradient for every name in ``needs_grad``."""
    return _complete(backend, backend.result(HOOKS[r.op][1], r), r.needs_grad)


def gate_backward(backend: Backend, r: GateRequest) -> dict[str, Tensor]:
    """The same for ``kda_gate``."""
    return _complete(backend, backend.result("kda_core_gate_backward", r), r.needs_grad)


def _complete(backend: Backend, result: Any, needs: frozenset[str]) -> dict[str, Tensor]:
    name = backend.info.name
    if not isinstance(result, BackwardResult):
        raise ContractViolation(f"backend ({name}) returned {type(result).__name__}, expected BackwardResult")
    if not needs <= result.grads.keys():
        missing = sorted(needs - result.grads.keys())
        raise ContractViolation(f"backend ({name}) returned no gradient of {', '.join(missing)}")
    return result.grads


def _missing_double_backward(name: str) -> Callable:
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"{name}: double backward is not supported (the backward has no gradient of its own)")

    return backward


def _nothing(ctx: Any, inputs: tuple, output: Any) -> None:
    return None


def _fake_intermediate_states(r: Request) -> Tensor:
    chunks: int | torch.SymInt = (r.T + r.chunk_size - 1) // r.chunk_size
    if r.cu_seqlens is not None:
        # Their number depends on the values of cu_seqlens.
        chunks = torch.library.get_ctx().new_dynamic_size()
    return r.v.new_empty((r.B, chunks, *r.state_shape[1:]), dtype=r.state_dtype)


def _fake_forward(r: Request) -> tuple[Tensor, Tensor, Tensor]:
    o = _absent(r.v) if r.out is not None else r.v.new_empty((r.B, r.T, r.HV, r.V), dtype=r.q.dtype)
    has_final_state = r.output_final_state and not r.inplace_final_state
    final_state = r.v.new_empty(r.state_shape, dtype=r.state_dtype) if has_final_state else _absent(r.v)
    h = _fake_intermediate_states(r) if r.return_intermediate_states else _absent(r.v)
    return o, final_state, h


def _register(op: Op) -> None:
    """Define the three operators of a public function."""

    def functional(*args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        *values, name = args
        r = Request(op=op, **dict(zip(_FUNCTIONAL_NAMES, values, strict=True)))
        result = forward(registry.choose(r, _asked(name)), r)
        final_state, h = _or_absent(result.final_state, r.v), _or_absent(result.h, r.v)
        return result.o, final_state, h, [t.reshape(-1) for t in result.saved]

    def functional_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        *values, name = args
        r = Request(op=op, **dict(zip(_FUNCTIONAL_NAMES, values, strict=True)))
        backend = registry.choose(r, _asked(name))
        saved: tuple[TensorSpec, ...] = ()
        if r.save_for_backward:
            saved = backend.result("kda_core_saved_spec", r)
        return (*_fake_forward(r), [r.v.new_empty(math.prod(spec.shape), dtype=spec.dtype) for spec in saved])

    def inplace_request(values: list[Any]) -> Request:
        named = dict(zip(_INPLACE_NAMES, values, strict=True))
        pool = named.pop("pool")
        return Request(op=op, **(named if pool is None else named | {"initial_state": pool}))

    def inplace(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *values, name = args
        r = inplace_request(values)
        result = forward(registry.choose(r, _asked(name)), r)
        count_writes(r)
        o = None if r.out is not None else result.o
        return _or_absent(o, r.v), _or_absent(result.final_state, r.v), _or_absent(result.h, r.v)

    def inplace_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *values, name = args
        r = inplace_request(values)
        registry.choose(r, _asked(name))
        return _fake_forward(r)

    def differentiated(*args: Any) -> list[Tensor]:
        grad_o, grad_final_state, *values, saved, needs, name = args
        forwarded = Request(op=op, **dict(zip(_BACKWARD_NAMES, values, strict=True)), save_for_backward=True)
        # The choice is that of the forward: the same signature, so the same backend.
        backend = registry.choose(forwarded, _asked(name))
        r = replace(
            forwarded,
            saved=_shaped(backend, forwarded, saved),
            grad_o=grad_o,
            grad_final_state=grad_final_state,
            needs_grad=frozenset(n for n, needed in zip(DIFFERENTIABLE, needs, strict=True) if needed),
        )
        r.__dict__["memo"] = forwarded.memo
        found = backward(backend, r)
        return [found[n] for n in DIFFERENTIABLE if n in r.needs_grad]

    def differentiated_fake(grad_o: Tensor | None, grad_final_state: Tensor | None, *args: Any) -> list[Tensor]:
        *values, _, needs, _ = args
        inputs = dict(zip(_BACKWARD_NAMES, values, strict=True))
        wanted = [inputs[n] for n, needed in zip(DIFFERENTIABLE, needs, strict=True) if needed]
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in wanted]

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *values, name = inputs
        named = dict(zip(_FUNCTIONAL_NAMES, values, strict=True))
        if not named["save_for_backward"]:
            raise ValueError(
                f"save_for_backward: expected True where a gradient is needed; call kda_core.{op} with gradients "
                "enabled (a program that was traced or exported without them has none)"
            )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(named[n] for n, _ in _TENSORS), *output[3])
        ctx.options = [named[n] for n, _ in _OPTIONS]
        ctx.has_final_state = named["output_final_state"]
        ctx.backend = name

    def apply_backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, *_: Any) -> tuple:
        # Read once: under activation checkpointing a second look at saved tensors is an error.
        kept = ctx.saved_tensors
        tensors, saved = kept[: len(_TENSORS)], list(kept[len(_TENSORS) :])
        needs = [ctx.needs_input_grad[_FUNCTIONAL_NAMES.index(n)] for n in DIFFERENTIABLE]
        results: list[Tensor | None] = [None] * (len(_FUNCTIONAL_NAMES) + 1)
        if not ctx.has_final_state:
            grad_final_state = None
        if grad_o is not None or grad_final_state is not None:
            operator = getattr(torch.ops.kda_core, f"{op}_backward")
            found = operator(grad_o, grad_final_state, *tensors, *ctx.options, saved, needs, ctx.backend)
            for n, needed in zip(DIFFERENTIABLE, needs, strict=True):
                if needed:
                    results[_FUNCTIONAL_NAMES.index(n)] = found.pop(0)
        return tuple(results)

    _define(
        op, f"{_schema(_FUNCTIONAL)}, str backend", "(Tensor, Tensor, Tensor, Tensor[])", functional, functional_fake
    )
    _define(f"{op}_", f"{_schema(_INPLACE)}, str backend", "(Tensor, Tensor, Tensor)", inplace, inplace_fake)
    _define(
        f"{op}_backward",
        "Tensor? grad_o, Tensor? grad_final_state, "
        f"{_schema((*_TENSORS, *_OPTIONS))}, Tensor[] saved, bool[] needs, str backend",
        "Tensor[]",
        differentiated,
        differentiated_fake,
    )
    torch.library.register_autograd(f"{NAMESPACE}::{op}", apply_backward, setup_context=setup_context, lib=_library)
    torch.library.register_autograd(
        f"{NAMESPACE}::{op}_backward", _missing_double_backward(op), setup_context=_nothing, lib=_library
    )


def _shaped(backend: Backend, forwarded: Request, saved: list[Tensor]) -> tuple[Tensor, ...]:
    """What the forward saved, in its announced shapes.

    It travels flat: among the sizes there are numbers of chunks, and a compiler that meets such a size
    compiles one graph for 1 and another for the rest.
    """
    if not saved:
        return ()
    specs = backend.result("kda_core_saved_spec", forwarded)
    found, expected = [t.numel() for t in saved], [math.prod(spec.shape) for spec in specs]
    if found != expected:
        raise ContractViolation(
            f"backend {backend.info.name!r} saved tensors of {found} elements, kda_core_saved_spec says {expected}"
        )
    return tuple(t.view(spec.shape) for t, spec in zip(saved, specs, strict=True))


def _register_gate() -> None:
    def request(args: tuple, **more: Any) -> tuple[GateRequest, str | None]:
        g, A_log, dt_bias, lower_bound, *_, name = args
        return GateRequest(g=g, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, **more), _asked(name)

    def functional(*args: Any) -> Tensor:
        r, name = request(args, save_for_backward=args[4])
        return registry.choose(r, name).result("kda_core_gate_forward", r)

    def functional_fake(*args: Any) -> Tensor:
        r, name = request(args, save_for_backward=args[4])
        registry.choose(r, name)
        return r.g.new_empty(r.g.shape, dtype=r.output_dtype)

    def differentiated(grad_output: Tensor, *args: Any) -> list[Tensor]:
        r, name = request(args, save_for_backward=True)
        needs = frozenset(n for n, needed in zip(GATE_DIFFERENTIABLE, args[4], strict=True) if needed)
        backend = registry.choose(r, name)
        found = gate_backward(backend, replace(r, grad_output=grad_output, needs_grad=needs))
        return [found[n] for n in GATE_DIFFERENTIABLE if n in needs]

    def differentiated_fake(grad_output: Tensor, *args: Any) -> list[Tensor]:
        tensors = [t for t, needed in zip(args[:3], args[4], strict=True) if needed]
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]

    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        g, A_log, dt_bias, ctx.lower_bound, _, ctx.backend = inputs
        ctx.save_for_backward(g, A_log, dt_bias)

    def apply_backward(ctx: Any, grad: Tensor) -> tuple:
        needs = list(ctx.needs_input_grad[:3])
        found = torch.ops.kda_core.kda_gate_backward(grad, *ctx.saved_tensors, ctx.lower_bound, needs, ctx.backend)
        return (*(found.pop(0) if needed else None for needed in needs), None, None, None)

    tensors = "Tensor g, Tensor? A_log, Tensor? dt_bias, float? lower_bound"
    _define("kda_gate", f"{tensors}, bool save_for_backward, str backend", "Tensor", functional, functional_fake)
    _define(
        "kda_gate_backward",
        f"Tensor grad_output, {tensors}, bool[] needs, str backend",
        "Tensor[]",
        differentiated,
        differentiated_fake,
    )
    torch.library.register_autograd(f"{NAMESPACE}::kda_gate", apply_backward, setup_context=setup_context, lib=_library)
    torch.library.register_autograd(
        f"{NAMESPACE}::kda_gate_backward", _missing_double_backward("kda_gate"), setup_context=_nothing, lib=_library
    )


for _op in get_args(Op):
    _register(_op)
_register_gate()


def writes_to_caller(r: Request) -> bool:
    """Whether the call writes to the caller's memory and therefore has no gradient."""
    return r.inplace_final_state or r.out is not None


def count_writes(r: Request) -> None:
    """Tell autograd that a pool or ``out`` was written, so that a stale use of it in a backward is found."""
    pool = r.initial_state if r.inplace_final_state else None
    if pool is not None and not pool.is_inference():
        torch.autograd.graph.increment_version(pool)
    if r.out is not None and not r.out.is_inference():
        torch.autograd.graph.increment_version(r.out)


def inplace_arguments(r: Request) -> list[Any]:
    """What the operator that writes to the caller's memory takes, the backend's name aside."""
    states = {"initial_state": None, "pool": r.initial_state} if r.inplace_final_state else {"pool": None}
    return [states[n] if n in states else getattr(r, n) for n in _INPLACE_NAMES]


def call(r: Request, backend: str | None) -> ForwardResult:
    """Run a request through its operator, so that autograd, fake tensors and compilers see it."""
    if writes_to_caller(r):
        operator = getattr(torch.ops.kda_core, f"{r.op}_")
        o, final_state, h = operator(*inplace_arguments(r), backend or "")
    else:
        operator, names = getattr(torch.ops.kda_core, r.op), _FUNCTIONAL_NAMES
        o, final_state, h, _ = operator(*(getattr(r, n) for n in names), backend or "")
    return ForwardResult(
        o=o if r.out is None else r.out,
        final_state=_present(final_state, r.output_final_state and not r.inplace_final_state),
        h=_present(h, r.return_intermediate_states),
    )


def call_gate(r: GateRequest, backend: str | None) -> Tensor:
    """The same for ``kda_gate``."""
    return torch.ops.kda_core.kda_gate(r.g, r.A_log, r.dt_bias, r.lower_bound, r.save_for_backward, backend or "")

"""torch.library operators: implementation, fake kernel and autograd of every public function.

Three operators a function: a functional one with autograd, its backward, and one that writes to the
caller's memory (a pool of states, ``out``) and has no gradient. ``kda_gate`` writes to nothing and has two. The backend
is chosen inside the operator, by the device its tensors are on (or by the name that the caller asked for), so that a
compiled graph holds one opaque call.

``schemas`` has their schemas, and says which changes programs that hold them allow; ``transforms`` is what
``torch.func`` makes of them. A tensor that a call does not produce is returned as an empty one of shape [0].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_core import _meta, _results, _schemas, _torch_private
from kda_core._plugins import TRACED, Backend, registry
from kda_core._schemas import GATE_DIFFERENTIABLE, NAMESPACE, SAVED_NAMES, Schema
from kda_core._signature import is_plain
from kda_core.errors import NO_DOUBLE_BACKWARD, NO_FORWARD_MODE, ContractViolation
from kda_core.hookspecs import MAX_SAVED_TENSORS
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import BackwardResult, ForwardResult, GateRequest, Op, Request, TensorSpec

HOOKS: dict[str, tuple[str, str]] = {
    "chunk_kda": ("kda_core_chunk_forward", "kda_core_chunk_backward"),
    "fused_recurrent_kda": ("kda_core_recurrent_forward", "kda_core_recurrent_backward"),
}

_library = torch.library.Library(NAMESPACE, "DEF")


def under_transforms(kernel_of: Callable) -> Callable:
    """A kernel of ``transforms``, which is imported when ``torch.func`` first meets an operator: few use it."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        from kda_core import _transforms

        return kernel_of(_transforms)(*args, **kwargs)

    return kernel


def define(schema: Schema, implementation: Callable, fake: Callable, transformed: Callable) -> None:
    _library.define(schema.text, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(schema.name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{schema.name}", fake, lib=_library)
    # torch.func dispatches here first. Without this kernel it would use the autograd below, which it cannot.
    _torch_private.implement_under_transforms(_library, schema.name, transformed)


def asked(name: str) -> str | None:
    """The backend that the caller asked for, from the operator's argument (``plugins.traced_name`` adds to it)."""
    return name.partition(TRACED)[0] or None


def _absent(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _or_absent(t: Tensor | None, like: Tensor) -> Tensor:
    return _absent(like) if t is None else t


def _present(t: Tensor, wanted: bool) -> Tensor | None:
    return t if wanted else None


def default_scale(q: Tensor) -> float:
    """K ** -0.5; 1 for a q that is no tensor of rank 4, which the checks refuse by name."""
    try:
        shape: tuple[int, ...] = getattr(q, "shape", ())
    except RuntimeError:  # nested tensors of the strided layout have none
        shape = ()
    return shape[3] ** -0.5 if len(shape) == 4 and shape[3] else 1.0


def _request(op: Op, values: dict[str, Any]) -> tuple[Request, str | None]:
    """The request that an operator's arguments stand for, and the backend that was asked for; takes ``values``."""
    name = asked(values.pop("backend"))
    if values["scale"] is None:
        values["scale"] = default_scale(values["q"])
    return Request(op=op, **values), name


def refuse_tangents(op: str, *values: Any) -> None:
    """Raise if a value has a tangent: operators ignore tangents, so forward-mode results would be wrong."""
    if not _torch_private.in_forward_mode():
        return
    if torch.compiler.is_compiling() or any(map(_has_tangent, values)):
        raise RuntimeError(NO_FORWARD_MODE.format(op=op))


def _has_tangent(t: Any) -> bool:
    if torch.compiler.is_compiling():
        return True  # traced tensors have lost their tangents
    # A tangent below vmap is found when the operator reaches that level.
    if not isinstance(t, Tensor) or _torch_private.is_batched(t):
        return False
    return forward_ad.unpack_dual(t).tangent is not None


def forward(backend: Backend, r: Request) -> ForwardResult:
    """Run a request's forward on a backend."""
    result = backend.result(HOOKS[r.op][0], r)
    memo = r.memo
    if memo is None or ForwardResult not in memo or type(result) is not ForwardResult:
        _results.check_forward(backend, r, result)
    return result


def backward(backend: Backend, r: Request) -> dict[str, Tensor]:
    """Run a request's backward on a backend: a gradient for every name in ``needs_grad``."""
    return _checked(backend, r, backend.result(HOOKS[r.op][1], r), r.memo)


def gate_forward(backend: Backend, r: GateRequest) -> Tensor:
    """Run ``kda_gate`` on a backend."""
    log_decay = backend.result("kda_core_gate_forward", r)
    memo = r.memo
    if memo is None or ForwardResult not in memo or not isinstance(log_decay, Tensor):
        _results.check_decay(backend, r, log_decay)
    return log_decay


def gate_backward(backend: Backend, r: GateRequest) -> dict[str, Tensor]:
    """Run the backward of ``kda_gate``."""
    return _checked(backend, r, backend.result("kda_core_gate_backward", r), r.memo)


def _checked(backend: Backend, r: Request | GateRequest, result: Any, memo: dict | None) -> dict[str, Tensor]:
    seen = memo is not None and (BackwardResult, r.needs_grad) in memo and type(result) is BackwardResult
    if not (seen and r.needs_grad <= result.grads.keys()):
        _results.check_gradients(backend, r, result, memo)
    return result.grads


def _missing_double_backward(name: str) -> Callable:
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(NO_DOUBLE_BACKWARD.format(op=name))

    return backward


def _nothing(ctx: Any, inputs: tuple, output: Any) -> None:
    return None


def saved_specs(backend: Backend, r: Request) -> tuple[TensorSpec, ...]:
    """The tensors that the backend says it saves.

    Raises:
        ContractViolation: more tensors than the operators have places for.
    """
    specs = backend.result("kda_core_saved_spec", r)
    _check_number_of_saved(backend, len(specs))
    return specs


def _check_number_of_saved(backend: Backend, found: int) -> None:
    if found > MAX_SAVED_TENSORS:
        raise ContractViolation(
            f"backend {backend.info.name!r} saves {found} tensors for its backward, expected {MAX_SAVED_TENSORS} at "
            "most; it can lay several of one dtype into one"
        )


def _places(saved: list[Tensor], like: Tensor) -> list[Tensor]:
    """Saved tensors as the operator's last results: each place holds one, or an absent one."""
    return saved + [_absent(like) for _ in range(MAX_SAVED_TENSORS - len(saved))]


def _fake_forward(r: Request) -> tuple[Tensor, Tensor, Tensor]:
    o = _absent(r.v) if r.out is not None else _meta.empty_o(r)
    h = None
    if r.return_intermediate_states:
        # Traced boundaries have no values: the number of chunks is known only at run time.
        known = r.cu_seqlens is None or is_plain(r.cu_seqlens_cpu)
        h = _meta.empty_h(r, _meta.chunks_of(r) if known else torch.library.get_ctx().new_dynamic_size())
    return o, _or_absent(_meta.empty_final_state(r), r.v), _or_absent(h, r.v)


def _needed(named: dict[str, Tensor | None], needs: list[bool]) -> frozenset[str]:
    """Names of the inputs whose gradient a backward operator is asked for; without ``needs``, of all that are given."""
    given = [t is not None for t in named.values()]
    if not needs:
        needs = given
    if len(needs) != len(named) or any(n and not g for n, g in zip(needs, given, strict=True)):
        names = ", ".join(named)
        raise ValueError(f"needs: expected True or False for each of {names}; True only for given ones, got {needs}")
    return frozenset(name for name, wanted in zip(named, needs, strict=True) if wanted)


def _gradients(
    found: dict[str, Tensor], names: tuple[str, ...], needed: frozenset[str], like: Tensor
) -> tuple[Tensor, ...]:
    return tuple(found[n] if n in needed else _absent(like) for n in names)


def _fake_gradients(named: dict[str, Any], names: tuple[str, ...], needs: list[bool], like: Tensor) -> tuple:
    needed = _needed({n: named[n] for n in names}, needs)
    grads = {n: torch.empty_like(named[n], memory_format=torch.contiguous_format) for n in needed}
    return _gradients(grads, names, needed, like)


def _needed_by_autograd(ctx: Any, all_names: tuple[str, ...], names: tuple[str, ...]) -> list[bool]:
    # Trailing arguments that have their defaults are left out.
    asked = dict(zip(all_names, ctx.needs_input_grad, strict=False))
    return [asked.get(n, False) for n in names]


def _register(op: Op) -> None:
    """Define the three operators of a public function."""
    schema = _schemas.FUNCTIONAL[op]

    def functional(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        refuse_tangents(op, *args, *kwargs.values())
        r, name = _request(op, schema.bind(args, kwargs))
        backend = registry.choose(r, name)
        result = forward(backend, r)
        _check_number_of_saved(backend, len(result.saved))
        final_state, h = _or_absent(result.final_state, r.v), _or_absent(result.h, r.v)
        return result.o, final_state, h, *_places([t.reshape(-1) for t in result.saved], r.v)

    def functional_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        r, name = _request(op, schema.bind(args, kwargs))
        backend = registry.choose(r, name)
        specs = saved_specs(backend, r) if r.save_for_backward else ()
        saved = [r.v.new_empty(math.prod(spec.shape), dtype=spec.dtype) for spec in specs]
        return *_fake_forward(r), *_places(saved, r.v)

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        named = schema.bind(inputs, {})
        if not named["save_for_backward"]:
            raise ValueError(
                f"save_for_backward: expected True where a gradient is needed; call kda_core.{op} with gradients "
                "enabled (a program that was traced or exported without them has none)"
            )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(named[n] for n in _schemas.TENSOR_NAMES), *output[3:])
        ctx.options = {n: named[n] for n in (*_schemas.OPTION_NAMES, "backend")}
        ctx.has_final_state = named["output_final_state"]
        # Otherwise a gradient of the intermediate states would be dropped in silence.
        ctx.mark_non_differentiable(*output[2 if ctx.has_final_state else 1 :])

    def apply_backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, *_: Any) -> tuple:
        # Read once: under activation checkpointing a second look at saved tensors is an error.
        kept = ctx.saved_tensors
        grads: dict[str, Tensor] = {}
        if not ctx.has_final_state:
            grad_final_state = None
        if grad_o is not None or grad_final_state is not None:
            named = dict(zip((*_schemas.TENSOR_NAMES, *SAVED_NAMES), kept, strict=True))
            needs = _needed_by_autograd(ctx, schema.names, DIFFERENTIABLE)
            asked = {**named, **ctx.options, "grad_o": grad_o, "grad_final_state": grad_final_state, "needs": needs}
            grads = call_backward(op, asked)
        return tuple(grads.get(n) for n in schema.names)

    define(schema, functional, functional_fake, under_transforms(lambda t: t.kernel(op)))
    torch.library.register_autograd(f"{NAMESPACE}::{op}", apply_backward, setup_context=setup_context, lib=_library)
    _register_inplace(op)
    _register_backward(op)


def _register_inplace(op: Op) -> None:
    schema = _schemas.INPLACE[op]

    def request(args: tuple, kwargs: dict[str, Any]) -> tuple[Request, str | None]:
        values = schema.bind(args, kwargs)
        pool = values.pop("pool")
        if pool is not None:
            if values["initial_state"] is not None:
                raise ValueError("initial_state: expected None beside pool, which holds the states, got a tensor")
            values |= {"initial_state": pool, "inplace_final_state": True}
        return _request(op, values)

    def inplace(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        refuse_tangents(op, *args, *kwargs.values())
        r, name = request(args, kwargs)
        result = forward(registry.choose(r, name), r)
        count_writes(r)
        o = None if r.out is not None else result.o
        return _or_absent(o, r.v), _or_absent(result.final_state, r.v), _or_absent(result.h, r.v)

    def inplace_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        r, name = request(args, kwargs)
        registry.choose(r, name)
        return _fake_forward(r)

    define(schema, inplace, inplace_fake, under_transforms(lambda t: t.inplace_kernel(schema)))


def _register_backward(op: Op) -> None:
    schema = _schemas.BACKWARD[op]

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        refuse_tangents(op, *args, *kwargs.values())
        values = schema.bind(args, kwargs)
        saved = [values.pop(n) for n in SAVED_NAMES]
        grads = {n: values.pop(n) for n in ("grad_o", "grad_final_state")}
        needed = _needed({n: values[n] for n in DIFFERENTIABLE}, values.pop("needs"))
        if grads["grad_o"] is None and grads["grad_final_state"] is None:
            raise ValueError("grad_o: expected a tensor, or one for grad_final_state, got None for both")
        forwarded, name = _request(op, {**values, "save_for_backward": True})
        # The choice is that of the forward: the same signature, so the same backend.
        backend = registry.choose(forwarded, name)
        r = replace(forwarded, saved=_shaped(backend, forwarded, saved), needs_grad=needed, **grads)
        r.__dict__["memo"] = forwarded.memo
        return _gradients(backward(backend, r), DIFFERENTIABLE, needed, r.v)

    def differentiated_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values = schema.bind(args, kwargs)
        return _fake_gradients(values, DIFFERENTIABLE, values["needs"], values["v"])

    define(schema, differentiated, differentiated_fake, under_transforms(lambda t: t.backward_kernel(op)))
    torch.library.register_autograd(
        f"{NAMESPACE}::{schema.name}", _missing_double_backward(op), setup_context=_nothing, lib=_library
    )


def _shaped(backend: Backend, forwarded: Request, saved: list[Tensor | None]) -> tuple[Tensor, ...]:
    """The saved tensors in their announced shapes; runs the forward again if the caller has none.

    They are passed flat: some sizes are numbers of chunks, and a compiler compiles one graph for a size of 1 and
    another for the rest.
    """
    specs = saved_specs(backend, forwarded)
    expected = [math.prod(spec.shape) for spec in specs]
    found = [0 if t is None else t.numel() for t in saved]
    if not any(found) and any(expected):
        return forward(backend, forwarded).saved
    if found != expected + [0] * (MAX_SAVED_TENSORS - len(expected)):
        raise ContractViolation(
            f"backend {backend.info.name!r} saved tensors of {found} elements, kda_core_saved_spec says {expected}"
        )
    return tuple(
        t.view(spec.shape) if t is not None else forwarded.v.new_empty(spec.shape, dtype=spec.dtype)
        for t, spec in zip(saved, specs, strict=False)
    )


def _register_gate() -> None:
    schema, of_backward = _schemas.GATE, _schemas.GATE_BACKWARD

    def request(values: dict[str, Any]) -> tuple[GateRequest, str | None]:
        name = asked(values.pop("backend"))
        return GateRequest(**values), name

    def functional(*args: Any, **kwargs: Any) -> Tensor:
        refuse_tangents("kda_gate", *args, *kwargs.values())
        r, name = request(schema.bind(args, kwargs))
        return gate_forward(registry.choose(r, name), r)

    def functional_fake(*args: Any, **kwargs: Any) -> Tensor:
        r, name = request(schema.bind(args, kwargs))
        registry.choose(r, name)
        return _meta.empty_decay(r)

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        refuse_tangents("kda_gate", *args, *kwargs.values())
        values = of_backward.bind(args, kwargs)
        grad_output = values.pop("grad_output")
        needed = _needed({n: values[n] for n in GATE_DIFFERENTIABLE}, values.pop("needs"))
        if grad_output is None:
            raise ValueError("grad_output: expected a tensor, got None")
        r, name = request({**values, "save_for_backward": True})
        backend = registry.choose(r, name)
        found = gate_backward(backend, replace(r, grad_output=grad_output, needs_grad=needed))
        return _gradients(found, GATE_DIFFERENTIABLE, needed, r.g)

    def differentiated_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values = of_backward.bind(args, kwargs)
        return _fake_gradients(values, GATE_DIFFERENTIABLE, values["needs"], values["g"])

    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        named = schema.bind(inputs, {})
        ctx.save_for_backward(*(named[n] for n in GATE_DIFFERENTIABLE))
        ctx.options = {n: named[n] for n in ("lower_bound", "backend")}

    def apply_backward(ctx: Any, grad: Tensor) -> tuple:
        named = dict(zip(GATE_DIFFERENTIABLE, ctx.saved_tensors, strict=True))
        needs = _needed_by_autograd(ctx, schema.names, GATE_DIFFERENTIABLE)
        grads = call_gate_backward({**named, **ctx.options, "grad_output": grad, "needs": needs})
        return tuple(grads.get(n) for n in schema.names)

    define(schema, functional, functional_fake, under_transforms(lambda t: t.gate_kernel))
    define(of_backward, differentiated, differentiated_fake, under_transforms(lambda t: t.gate_backward_kernel))
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
    for name in {"out", "records", r.written_states, r.checkpoint_states}:
        t = None if name is None else getattr(r, name)
        if t is not None and not t.is_inference():
            torch.autograd.graph.increment_version(t)


def call(r: Request, backend: str | None) -> ForwardResult:
    """Run a request through its operator, so that autograd, fake tensors and compilers see it."""
    # Compilers trace this; that of torch 2.7 knows no | of dictionaries.
    more: dict[str, Any] = {"backend": backend or ""}
    if writes_to_caller(r):
        schema = _schemas.INPLACE[r.op]
        more["pool"] = r.initial_state if r.inplace_final_state else None
        if r.inplace_final_state:
            more["initial_state"] = None
    else:
        schema = _schemas.FUNCTIONAL[r.op]
    values = [more[n] if n in more else getattr(r, n) for n in schema.names]
    o, final_state, h, *_ = getattr(torch.ops.kda_core, schema.name)(*values)
    return ForwardResult(
        o=o if r.out is None else r.out,
        final_state=_present(final_state, r.output_final_state and not r.inplace_final_state),
        h=_present(h, r.return_intermediate_states),
    )


def call_gate(r: GateRequest, backend: str | None) -> Tensor:
    """The same for ``kda_gate``."""
    return torch.ops.kda_core.kda_gate(r.g, r.A_log, r.dt_bias, r.lower_bound, backend or "", r.save_for_backward)


def call_backward(op: str, values: dict[str, Any]) -> dict[str, Tensor]:
    """Run a backward operator; the gradients that ``values["needs"]`` asks for, by name."""
    found = _call_named(_schemas.BACKWARD[op], values)
    return {n: grad for n, grad, wanted in zip(DIFFERENTIABLE, found, values["needs"], strict=True) if wanted}


def call_gate_backward(values: dict[str, Any]) -> dict[str, Tensor]:
    """The same for ``kda_gate``."""
    found = _call_named(_schemas.GATE_BACKWARD, values)
    return {n: grad for n, grad, wanted in zip(GATE_DIFFERENTIABLE, found, values["needs"], strict=True) if wanted}


def _call_named(schema: Schema, values: dict[str, Any]) -> Any:
    """Call an operator with the arguments of its schema, out of ``values``."""
    return getattr(torch.ops.kda_core, schema.name)(*(values.get(n) for n in schema.names))

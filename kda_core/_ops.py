"""torch.library operators: implementation, fake kernel and autograd of every public function.

At most three operators a function: a functional one with autograd, its backward, and one that writes to the
caller's memory (a pool of states, ``out``) and has no gradient. All are made from the rows of ``schemas``. The backend
is chosen inside the operator, by the device its tensors are on (or by the name that the caller asked for), so that a
compiled graph holds one opaque call.

``schemas`` says which changes programs that hold the operators allow; ``transforms`` is what ``torch.func`` makes of
them. A tensor that a call does not produce is returned as an empty one of shape [0].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda_core import _autograd, _torch_private
from kda_core._bind import default_scale
from kda_core._plugins import TRACED, Backend, registry
from kda_core._schemas import NAMESPACE, OPERATORS, Operator, Schema
from kda_core._signature import is_plain
from kda_core.errors import ContractViolation
from kda_core.hookspecs import MAX_SAVED_TENSORS
from kda_core.request import AnyRequest, CommitRequest, ForwardResult, GateRequest, Request, chunks_of

_library = torch.library.Library(NAMESPACE, "DEF")


def define(schema: str, implementation: Callable, fake: Callable, library: torch.library.Library = _library) -> str:
    """Define an operator; its full name."""
    name = schema.partition("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    return f"{library.ns}::{name}"


def define_differentiable(
    row: Operator, functional: Callable, fake: Callable, differentiated: Callable,
    library: torch.library.Library = _library,
) -> None:  # fmt: skip
    """Define a functional operator and its backward, with autograd."""

    def gradients(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        _autograd.refuse_tangents(row.op, *args, *kwargs.values())
        values = row.backward.bind(args, kwargs)
        like = values.get("v", values["g"])
        needed = _needed({n: values[n] for n in row.differentiable}, values.pop("needs"))
        found = differentiated(values, needed)
        return tuple(found[n] if n in needed else _absent(like) for n in row.differentiable)

    def fake_gradients(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values = row.backward.bind(args, kwargs)
        like = values.get("v", values["g"])
        named = {n: values[n] for n in row.differentiable}
        needed = _needed(named, values["needs"])
        return tuple(
            torch.empty_like(t, memory_format=torch.contiguous_format) if n in needed else _absent(like)
            for n, t in named.items()
        )

    name = define(row.functional.text, functional, fake, library)
    torch.library.register_autograd(
        name, partial(_autograd.backward, row), setup_context=partial(_autograd.setup_context, row), lib=library
    )
    name = define(row.backward.text, gradients, fake_gradients, library)
    torch.library.register_autograd(
        name, _autograd.missing_double_backward(row.op), setup_context=_autograd.nothing, lib=library
    )


def _absent(like: Tensor) -> Tensor:
    return like.new_empty(0)


def or_absent(t: Tensor | None, like: Tensor) -> Tensor:
    return _absent(like) if t is None else t


def _places(saved: list[Tensor], like: Tensor) -> list[Tensor]:
    """Saved tensors as the operator's last results: each place holds one, or an absent one."""
    return saved + [_absent(like) for _ in range(MAX_SAVED_TENSORS - len(saved))]


def request_of(row: Operator, values: dict[str, Any]) -> tuple[Any, str | None]:
    """The request that an operator's arguments stand for, and the backend that was asked for; takes ``values``.

    The name of the backend is that of ``plugins.traced_name``, which adds to it.
    """
    name = values.pop("backend").partition(TRACED)[0]
    if row.request is Request:
        pool = values.pop("pool", None)
        if pool is not None:
            if values["initial_state"] is not None:
                raise ValueError("initial_state: expected None beside pool, which holds the states, got a tensor")
            values |= {"initial_state": pool, "inplace_final_state": True}
        if values["scale"] is None:
            values["scale"] = default_scale(values["q"])
    return row.request(op=row.op, **values), name or None


def _needed(named: dict[str, Tensor | None], needs: list[bool]) -> frozenset[str]:
    """Names of the inputs whose gradient a backward operator is asked for; without ``needs``, of all that are given."""
    given = [t is not None for t in named.values()]
    if not needs:
        needs = given
    if len(needs) != len(named) or any(n and not g for n, g in zip(needs, given, strict=True)):
        names = ", ".join(named)
        raise ValueError(f"needs: expected True or False for each of {names}; True only for given ones, got {needs}")
    return frozenset(name for name, wanted in zip(named, needs, strict=True) if wanted)


def _shaped(backend: Backend, forwarded: Request, saved: list[Tensor | None]) -> tuple[Tensor, ...]:
    """The saved tensors in their announced shapes; runs the forward again if the caller has none.

    They are passed flat: some sizes are numbers of chunks, and a compiler compiles one graph for a size of 1 and
    another for the rest.
    """
    specs = backend.saved_specs(forwarded)
    expected = [math.prod(spec.shape) for spec in specs]
    found = [0 if t is None else t.numel() for t in saved]
    if not any(found) and any(expected):
        return backend.forward(forwarded).saved
    if found != expected + [0] * (MAX_SAVED_TENSORS - len(expected)):
        raise ContractViolation(
            f"backend {backend.info.name!r} saved tensors of {found} elements, kda_core_saved_spec says {expected}"
        )
    return tuple(
        t.view(spec.shape) if t is not None else forwarded.v.new_empty(spec.shape, dtype=spec.dtype)
        for t, spec in zip(saved, specs, strict=False)
    )


def _fake_forward(r: AnyRequest) -> Any:
    """The results of a forward without values; those that are no saved tensors."""
    if isinstance(r, GateRequest):
        return r.g.new_empty(r.g.shape, dtype=r.output_dtype)
    if isinstance(r, CommitRequest):
        return None
    o = r.v.new_empty((r.B, r.T, r.HV, r.V), dtype=r.q.dtype)
    final_state = h = None
    if r.output_final_state and not r.inplace_final_state:
        final_state = r.v.new_empty(r.state_shape, dtype=r.state_dtype)
    if r.return_intermediate_states:
        # Traced boundaries have no values: the number of chunks is known only at run time.
        known = r.cu_seqlens is None or is_plain(r.cu_seqlens_cpu)
        chunks = chunks_of(r) if known else torch.library.get_ctx().new_dynamic_size()
        h = r.v.new_empty((r.B, chunks, *r.state_shape[1:]), dtype=r.h_dtype)
    return _results(r, ForwardResult(o, final_state, h))


def _results(r: Request, result: ForwardResult) -> tuple[Tensor, ...]:
    o = None if r.out is not None else result.o
    return or_absent(o, r.v), or_absent(result.final_state, r.v), or_absent(result.h, r.v)


def _register(row: Operator) -> None:
    """Define the operators of a public function."""

    def functional(*args: Any, **kwargs: Any) -> Any:
        _autograd.refuse_tangents(row.op, *args, *kwargs.values())
        r, name = request_of(row, row.functional.bind(args, kwargs))
        backend = registry.choose(r, name)
        result = backend.forward(r)
        if not row.saved:
            return result
        backend.check_number_of_saved(len(result.saved))
        return *_results(r, result), *_places([t.reshape(-1) for t in result.saved], r.v)

    def functional_fake(*args: Any, **kwargs: Any) -> Any:
        r, name = request_of(row, row.functional.bind(args, kwargs))
        backend = registry.choose(r, name)
        if not row.saved:
            return _fake_forward(r)
        specs = backend.saved_specs(r) if r.save_for_backward and backend is not None else ()
        saved = [r.v.new_empty(math.prod(spec.shape), dtype=spec.dtype) for spec in specs]
        return *_fake_forward(r), *_places(saved, r.v)

    def differentiated(values: dict[str, Any], needed: frozenset[str]) -> dict[str, Tensor]:
        saved = [values.pop(n) for n in row.saved]
        given = {n: values.pop(n) for n in row.grads}
        if all(grad is None for grad in given.values()):
            first, *others = row.grads
            more = f", or one for {others[0]}, got None for both" if others else ", got None"
            raise ValueError(f"{first}: expected a tensor{more}")
        forwarded, name = request_of(row, {**values, "save_for_backward": True})
        # The choice is that of the forward: the same signature, so the same backend.
        backend = registry.choose(forwarded, name)
        if row.saved:
            given["saved"] = _shaped(backend, forwarded, saved)
        r = replace(forwarded, needs_grad=needed, **given)
        r.__dict__["memo"] = forwarded.memo
        return backend.backward(r)

    def writing(*args: Any, **kwargs: Any) -> tuple[Tensor, ...] | None:
        _autograd.refuse_tangents(row.op, *args, *kwargs.values())
        r, name = request_of(row, row.writing.bind(args, kwargs))
        result = registry.choose(r, name).forward(r)
        count_writes(r)
        return _results(r, result) if isinstance(result, ForwardResult) else None

    def writing_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...] | None:
        r, name = request_of(row, row.writing.bind(args, kwargs))
        registry.choose(r, name)
        return _fake_forward(r)

    if row.functional is not None:
        define_differentiable(row, functional, functional_fake, differentiated)
        _under_transforms(row, "functional")
        _under_transforms(row, "backward")
    if row.writing is not None:
        define(row.writing.text, writing, writing_fake)
        _under_transforms(row, "writing")


def _under_transforms(row: Operator, kind: str) -> None:
    """What ``torch.func`` makes of an operator: it asks this kernel first, and cannot use the autograd above.

    The kernel is of ``transforms``, which is imported when ``torch.func`` first meets an operator: few use it.
    """
    schema: Schema = getattr(row, kind)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        from kda_core import _transforms

        return getattr(_transforms, kind)(row, schema.bind(args, kwargs))

    _torch_private.implement_under_transforms(_library, schema.name, kernel)


for _row in OPERATORS.values():
    _register(_row)


def writes_to_caller(r: AnyRequest) -> bool:
    """Whether the call writes to the caller's memory and therefore has no gradient."""
    return isinstance(r, CommitRequest) or (isinstance(r, Request) and (r.inplace_final_state or r.out is not None))


def count_writes(r: Any) -> None:
    """Tell autograd that a pool or ``out`` was written, so that a stale use of it in a backward is found."""
    memo = {} if r.memo is None else r.memo
    names = memo.get(count_writes)
    if names is None:
        given = (n for n in r.written if getattr(r, n) is not None) if writes_to_caller(r) else ()
        names = memo[count_writes] = tuple(given)
    for name in names:
        t = getattr(r, name)
        if not t.is_inference():
            torch.autograd.graph.increment_version(t)


def call(r: AnyRequest, backend: str | None) -> Any:
    """Run a request through its operator, for autograd, fake tensors and compilers; as ``Backend.forward``.

    Results that the call does not ask for are absent tensors.
    """
    row = OPERATORS[r.op]
    # Compilers trace this; that of torch 2.7 knows no | of dictionaries.
    more: dict[str, Any] = {"backend": backend or ""}
    schema = row.writing if writes_to_caller(r) else row.functional
    if isinstance(r, Request) and schema is row.writing:
        more["pool"] = r.initial_state if r.inplace_final_state else None
        if r.inplace_final_state:
            more["initial_state"] = None
    values = [more[n] if n in more else getattr(r, n) for n in schema.names]
    found = getattr(getattr(torch.ops, NAMESPACE), schema.name)(*values)
    if not isinstance(r, Request):
        return found
    o, final_state, h, *_ = found
    return ForwardResult(o if r.out is None else r.out, final_state, h)

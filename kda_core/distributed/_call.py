"""``chunk_kda`` with a context: begin, exchange, finish, and the same backwards.

Each direction is one opaque operator (``chunk_kda`` and ``chunk_kda_backward`` of the namespace
``kda_core_distributed``): compilers see a node that they cannot take apart, and no collective that they could move.
Eager calls run the same code under a plain autograd function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kda_core import _autograd, _checks, _expect, _ops, _schemas
from kda_core._bind import build_request
from kda_core._ledger import Explanation
from kda_core._torch_private import needs_operator
from kda_core.distributed._context import ContextParallel, from_fla, is_fla_context
from kda_core.distributed._halves import Chosen
from kda_core.distributed._passes import backward, forward, transfers
from kda_core.distributed._shared import Shared
from kda_core.errors import UnsupportedCall
from kda_core.hookspecs import MAX_SAVED_TENSORS
from kda_core.request import DATA, DIFFERENTIABLE, ForwardResult, Request, TensorSpec

NAMESPACE = "kda_core_distributed"
PLACES = MAX_SAVED_TENSORS + 1
"""Saved tensors of a forward: a backend's, and the states at the fragments' starts."""


class Ranks:
    """Serves calls with a context as a ``Backend`` serves plain ones; ``s`` is None for ``on``.

    Args:
        known: what an earlier call of the same metadata chose.
    """

    def __init__(self, s: Any, name: str | None, known: Chosen | None) -> None:
        self.s, self.name, self.known = s, name, known

    def on(self, c: ContextParallel) -> Ranks:
        """The same for another context."""
        return Ranks(c.shared, self.name, self.known)

    def forward(self, r: Request) -> ForwardResult:
        s = self.s
        found, matrices = forward(r, s, self.name, self.known)
        if not r.save_for_backward:
            return found
        # The tables, too: they must not change before the backward.
        return ForwardResult(found.o, found.final_state, None, (*s[:3], matrices, *found.saved))  # type: ignore[arg-type]

    def check_saved(self, r: Request, saved: Any) -> None:
        """Nothing is announced."""

    def backward(self, r: Request) -> dict[str, Tensor]:
        s, matrices, *saved = self._shared(r.saved)
        r.__dict__["saved"] = tuple(saved)
        # Hooks of saved tensors may return others.
        return backward(r, s, self.name, matrices, None if r.memo is None else self.known)

    def traced(self, row: _schemas.Operator, saved: Any) -> tuple[_schemas.Operator, dict[str, Any]]:
        """As of ``Backend``."""
        s, matrices, *saved = self._shared(saved)
        flat = _flat(saved, s)
        # The compiler of torch 2.7 zips equal lengths only.
        places = dict(zip(_SAVED[: len(flat)], flat, strict=True))
        return _OPERATOR, {**_named(s), **places, "matrices": matrices, "backend": self.name or ""}

    def _shared(self, saved: Any) -> tuple:
        fragments, slots, chain, *others = saved
        s = self.s
        if fragments is not s.fragments or slots is not s.slots or chain is not s.chain:  # as hooks may
            s = Shared(fragments, slots, chain, *s[3:-1])
        return s, *others


def run(r: Request, name: str | None, arguments: dict[str, Any] | None) -> ForwardResult:
    """Serve ``chunk_kda`` with a context; every rank of its group makes the call.

    Raises:
        TypeError, ValueError: a context or tensors that do not fit.
        UnsupportedCall: an option that a context does not go with, or no backend.
    """
    c = context_of(r)
    s, compiling = c.shared, torch.compiler.is_compiling()
    if compiling or needs_operator(r.q):
        cpu = c.call_cu_seqlens_cpu if r.return_intermediate_states else None
        # By name: compilers of torch 2.7 do not see what vars() gives.
        own = {"cu_seqlens": None, "cu_seqlens_cpu": cpu, "cp_context": None}
        values = {**{n: getattr(r, n) for n in _FIELDS}, **own}
        if not compiling:
            plain = build_request(values)
            _checks.convert_scalars(plain)
            values = vars(plain)
        values = {**values, **_named(s), "backend": name or ""}
        o, final, h, *_ = torch.ops.kda_core_distributed.chunk_kda(*(values.get(n) for n in _FORWARD.names))
        return ForwardResult(o, final if r.output_final_state else None, h if r.return_intermediate_states else None)
    if r.return_intermediate_states:
        r = build_request({**vars(r), "cu_seqlens_cpu": c.call_cu_seqlens_cpu})
    known = None
    if not s.grid:
        known = s.chosen(r, name)[0]
        r.__dict__["memo"] = known.memo
        if any(t is not None and t.is_neg() for t in _differentiable_of(r)):
            known = None  # every choice resolves signs
    ranks = Ranks(s, name, known)
    if not r.save_for_backward:
        return ranks.forward(r)
    o, final = _autograd.call(ranks, r, arguments or vars(r))
    return ForwardResult(o, final)


def serving(r: Request, name: str | None) -> Ranks:
    """The server of later calls of a call's metadata."""
    return Ranks(None, name, r.cp_context.shared.chosen(r, name)[0])


def _named(s: Shared) -> dict[str, Any]:
    """``s._asdict()``, which compilers of torch 2.7 do not look into."""
    return {n: getattr(s, n) for n in _ARGUMENTS}


_ARGUMENTS = Shared._fields[:-1]
"""The operators' arguments; tables follow from the others."""
_differentiable_of = attrgetter(*DIFFERENTIABLE)
_FIELDS = tuple(f.name for f in fields(Request) if f.init)


def answered(r: Request, answer: Callable[[Request], Any]) -> Any:
    """The answer to a question about the call of this rank's fragments; an explanation also says what is sent.

    A value that is no context is left to the router.
    """
    if not isinstance(r.cp_context, ContextParallel) and not is_fla_context(r.cp_context):
        return answer(r)
    c = context_of(r)
    s = c.shared
    parts = s.parts(build_request({**vars(r), "cu_seqlens_cpu": c.call_cu_seqlens_cpu}))
    found = answer(parts[0][1].local(parts[0][0]) if parts else build_request({**vars(r), "cp_context": None}))
    return replace(found, transfers=transfers(r, s)) if isinstance(found, Explanation) else found


def context_of(r: Request) -> ContextParallel:
    """The context of a call, after the checks that the plain call does not make."""
    c = r.cp_context
    if not isinstance(c, ContextParallel):
        if not is_fla_context(c):
            expected = "a context of kda_core.distributed.build_cp_context"
            raise TypeError(f"cp_context: expected {expected}, got {type(c).__name__}")
        c = from_fla(c)
    pools = ("ssm_state_indices", "has_initial_state", "final_state_indices", "final_state_pool")
    for name in ("out", *pools, "batch_invariant"):
        value = _checks.python_value(getattr(r, name))
        if value is not None and value is not False:
            raise UnsupportedCall(f"chunk_kda: {name} is not served with cp_context; leave one of them out")
    for name in DATA:
        t = getattr(r, name)
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
        if t.dim() != (3 if name == "beta" else 4) or (t.shape[0], t.shape[1]) != (c.batch, c.rows):
            rows = f"[B, T, …] = [{c.batch}, {c.rows}, …], the rows of rank {c.rank} of cp_context"
            _expect.fail(name, rows, f"{list(t.shape)}")
    if r.q.device != c.device:
        _expect.fail("cp_context", f"tables on {r.q.device}, where q is", f"{c.device}; give device=")
    state = r.initial_state
    if not c.states and (state is not None or r.output_final_state):
        raise UnsupportedCall(
            "chunk_kda: a context of fla's has neither initial nor final states; use kda_core.distributed's own"
        )
    v_first = _checks.python_value(r.state_v_first)
    _expect.flag("state_v_first", v_first)  # fragments are called with K first
    if state is not None:
        _expect.tensor("initial_state", state, (*_expect.STATE_DTYPES, r.compute_dtype), r.q.device)
        shape = (c.sequences, r.HV, *((r.V, r.K) if v_first else (r.K, r.V)))
        _expect.shape("initial_state", state, shape, "[N, HV, K, V], the states of all sequences,")
    # fla's callers pass the context's own.
    given = r.cu_seqlens
    if given is not None and (
        torch.compiler.is_compiling() or not _same_memory(given, getattr(r.cp_context, "cu_seqlens", None))
    ):
        _expect.fail("cu_seqlens", "None with cp_context, which holds the boundaries", "others")
    return c


def _same_memory(a: Any, b: Any) -> bool:
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return both and (a.data_ptr(), a.shape, a.device) == (b.data_ptr(), b.shape, b.device)


# The operators. Their arguments are those of the plain ones, then the context's.
_CONTEXT = (
    "Tensor? fragments=None, Tensor? slots=None, Tensor? chain=None, "
    'str group_name="", int before=0, SymInt sequences=0, int dense=0, bool gather=False, bool padded=True, '
    "int grid=0, int[] cells=[]"
)
_SAVED = (*_schemas.SAVED_NAMES, f"saved_{MAX_SAVED_TENSORS}")


def _extended(schema: _schemas.Schema, more: str, results: int) -> _schemas.Schema:
    arguments = schema.text[schema.text.index("(") + 1 : schema.text.index(") ->")]
    return _schemas.Schema(schema.name, f"{arguments}, {_CONTEXT}{more}", results)


_PLAIN = _schemas.OPERATORS["chunk_kda"]
_FORWARD = _extended(_PLAIN.functional, "", 4 + PLACES)
_BACKWARD = _extended(_PLAIN.backward, f", Tensor? matrices=None, Tensor? {_SAVED[-1]}=None", len(DIFFERENTIABLE))
_TENSORS = (*_PLAIN.tensors, "fragments", "slots", "chain")
_OPERATOR = replace(
    _PLAIN, functional=_FORWARD, backward=_BACKWARD, tensors=_TENSORS,
    options=tuple(n for n in _FORWARD.names if n not in (*_TENSORS, "backend")), saved=("matrices", *_SAVED),
    namespace=NAMESPACE,
)  # fmt: skip
_library = torch.library.Library(NAMESPACE, "DEF")


def _take(values: dict[str, Any]) -> tuple[Request, Shared, str | None]:
    s = Shared(*(values.pop(n) for n in _ARGUMENTS))
    r, name = _ops.request_of(_PLAIN, values)
    return r, s, name


def _operator(*args: Any) -> tuple[Tensor, ...]:
    _autograd.refuse_tangents("chunk_kda", *args)
    r, s, name = _take(_FORWARD.bind(args, {}))
    result, matrices = forward(r, s, name)
    matrices = r.q.new_empty(0) if matrices is None else matrices[..., : r.K].contiguous()
    return _results(r, result.o, result.final_state, result.h, matrices, _flat(result.saved, s))


def _flat(saved: Sequence[Tensor], s: Shared) -> list[Tensor]:
    """Saved tensors of one dimension, each with those of all cells."""
    each = len(saved) // max(len(s.cells), 1)
    flat = [[t.reshape(-1) for t in saved[i::each]] for i in range(each)]
    return [torch.cat(own) if s.grid else own[0] for own in flat]


def _saved_of(flat: Sequence[Tensor], parts: Sequence[tuple[Chosen, Request]]) -> tuple[Tensor, ...]:
    """The inverse."""
    rest, found = list(flat), []
    for chosen, call in parts:
        for i, spec in enumerate(chosen.halves.saved_spec(call)):
            count = math.prod(spec.shape)
            found.append(rest[i][:count].view(spec.shape))
            rest[i] = rest[i][count:]
    return tuple(found)


def _chosen_parts(r: Request, s: Shared, name: str | None) -> list[tuple[Chosen, Request]]:
    """Who serves each call that this rank makes, and those calls."""
    return [part.chosen(q, name) for q, part in s.parts(r)]


def _results(r: Request, o: Tensor, final: Any, h: Any, matrices: Tensor, saved: list[Tensor]) -> tuple[Tensor, ...]:
    absent = [r.v.new_empty(0) for _ in range(PLACES - len(saved))]
    return o, _ops.or_absent(final, r.v), _ops.or_absent(h, r.v), matrices, *saved, *absent


def _fake_operator(*args: Any) -> tuple[Tensor, ...]:
    r, s, name = _take(_FORWARD.bind(args, {}))
    parts = _chosen_parts(r, s, name)
    final = h = None
    shape = (s.sequences, *r.state_shape[1:])
    if r.output_final_state:
        final = r.v.new_empty(shape, dtype=r.state_dtype)
    if r.return_intermediate_states:
        h = r.v.new_empty((r.B, torch.library.get_ctx().new_dynamic_size(), *shape[1:]), dtype=r.h_dtype)
    matrices = r.q.new_empty(0)
    specs: list[tuple[TensorSpec, ...]] = []
    if r.save_for_backward:
        # Each saved tensor of all parts, one behind the other.
        specs = [*zip(*(c.halves.saved_spec(call) for c, call in parts), strict=True)]
        if parts and not parts[0][0].alone:
            slots = (s.dense or 1) if s.grid else s.slots.shape[1]
            count = s.fragments.shape[-1] - 1 if parts[0][0].halves.all_matrices else slots
            matrices = r.q.new_empty(len(parts) * count, r.HV, r.K, r.K, dtype=r.compute_dtype)
    saved = [r.v.new_empty(sum(math.prod(p.shape) for p in each), dtype=each[0].dtype) for each in specs]
    o = r.v.new_empty((r.B, r.T, r.HV, r.V), dtype=r.q.dtype)
    return _results(r, o, final, h, matrices, saved)


def _differentiated(values: dict[str, Any], needed: frozenset[str]) -> dict[str, Tensor]:
    flat, matrices = [values.pop(n) for n in _SAVED], values.pop("matrices")
    more = {n: values.pop(n) for n in _OPERATOR.grads}
    r, s, name = _take({**values, "save_for_backward": True})
    saved = _saved_of(flat, _chosen_parts(r, s, name))
    return backward(build_request({**vars(r), "saved": saved, "needs_grad": needed, **more}), s, name, matrices)


_ops.define_differentiable(_OPERATOR, _operator, _fake_operator, _differentiated, _library)

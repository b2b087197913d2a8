"""Results and gradients of a call in float64 from the token recurrence, cached between tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kda_core import reference
from kda_core.request import Request
from kda_core.testing.inputs import Call
from kda_core.testing.rounding import in_float64

Results = dict[str, Tensor]

MAX_CACHED_BYTES = 512 * 2**20
MAX_GRAPH_BYTES = 2**30
"""Autograd keeps some states for every token; past this many bytes the gradient is computed piece by piece."""

# Per token autograd keeps the decayed and the new state, and the products of both with k and with q.
_KEPT_STATES = 5

_cache: OrderedDict[str, tuple[Results, int]] = OrderedDict()
"""Results and how many bytes they take, by the call's digest."""


@contextmanager
def single_threaded() -> Iterator[None]:
    """Small operations run faster on one thread, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def results(call: Call) -> Results:
    """Every result of a call in float64 on the CPU, in the call's layout.

    Returns:
        "o"; "final_state" (of a call with a pool: the states in its ``written_slots``, and the whole pool as
        "pool"); "h" if asked for; and with ``call.grads`` a gradient "d..." of every differentiable argument.
    """
    key = call.digest()
    if key in _cache:
        _cache.move_to_end(key)
        return _cache[key][0]
    r = in_float64(call.request())
    with single_threaded():
        found = _backward(r, call.grads) if call.grads else _forward(r)
    if call.has_pool:
        found["pool"] = getattr(r, r.written_states or "initial_state")
        found["final_state"] = found["pool"][call.written_slots()]
    _cache[key] = found, sum(t.numel() * t.element_size() for t in found.values())
    while len(_cache) > 1 and sum(size for _, size in _cache.values()) > MAX_CACHED_BYTES:
        _cache.popitem(last=False)
    return found


def _forward(r: Request) -> Results:
    result = reference.forward(replace(r, out=None, output_final_state=True))
    found = {"o": result.o, "final_state": result.final_state, "h": result.h}
    return {n: t for n, t in found.items() if t is not None}


def _backward(r: Request, grads: Results, most_bytes: int = MAX_GRAPH_BYTES) -> Results:
    lengths = [end - start for _, start, end in reference.sequence_bounds(r)]
    piece = max(1, most_bytes // max(1, _KEPT_STATES * 8 * r.N * r.HV * r.K * r.V))
    steps = reference.recurrence if max(lengths, default=0) <= piece else partial(_in_pieces, piece)
    return whole_backward(r, {n: t.double() for n, t in grads.items()}, steps)


def whole_backward(r: Request, grads: Results, steps: Callable[..., Any] = reference.recurrence) -> Results:
    """Results and gradients of a request in float64, on its device."""
    names = [n for n in reference.DIFFERENTIABLE if getattr(r, n) is not None]
    leaves = {n: getattr(r, n).detach().to(torch.float64, copy=True).requires_grad_() for n in names}
    with torch.enable_grad():
        found = reference.oracle(r, inputs=leaves, steps=steps)
        outputs = {"o": found.o, "final_state": found.final_state.mT if r.state_v_first else found.final_state}
        # Without a token, or without an initial state, an output may depend on nothing.
        names_out = [n for n in grads if outputs[n].requires_grad]
        given = torch.autograd.grad(
            [outputs[n] for n in names_out], list(leaves.values()), [grads[n] for n in names_out], allow_unused=True
        )
    result = {n: t.detach() for n, t in outputs.items()}
    for n, grad in zip(names, given, strict=True):
        result[f"d{n}"] = torch.zeros_like(leaves[n]) if grad is None else grad
    return result


def _in_pieces(length: int, *rows_and_state: Any) -> tuple[Tensor, list[Tensor]]:
    """``reference.recurrence`` in pieces of ``length`` tokens; the backward computes the states within each again.

    The states between pieces stand for those within them, which no result of a backward has.
    """
    *rows, state, _ = rows_and_state
    outputs, states = [], [state]
    for piece in zip(*(x.split(length, 1) for x in rows), strict=True):
        o, state = checkpoint(_outputs_and_state, *piece, state, use_reentrant=False, preserve_rng_state=False)
        outputs.append(o)
        states += [state] * o.shape[1]
    return torch.cat(outputs, 1), states


def _outputs_and_state(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    o, states = reference.recurrence(*arguments)
    return o, states[-1]

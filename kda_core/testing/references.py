"""Results and gradients of a call in float64 from the token recurrence, cached between tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from kda_core import reference
from kda_core.request import DATA, Request
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


def _backward(r: Request, grads: Results) -> Results:
    grads = {n: t.double() for n, t in grads.items()}
    lengths = [end - start for _, start, end in reference.sequence_bounds(r)]
    kept = _KEPT_STATES * 8 * r.N * max(lengths, default=0) * r.HV * r.K * r.V
    return whole_backward(r, grads) if kept <= MAX_GRAPH_BYTES else _piecewise_backward(r, grads)


def whole_backward(r: Request, grads: Results) -> Results:
    """Results and gradients of a request in float64, on its device."""
    names = [n for n in reference.DIFFERENTIABLE if getattr(r, n) is not None]
    leaves = {n: getattr(r, n).detach().to(torch.float64, copy=True).requires_grad_() for n in names}
    with torch.enable_grad():
        found = reference.oracle(r, inputs=leaves)
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


def _piecewise_backward(r: Request, grads: Results, most_bytes: int = MAX_GRAPH_BYTES) -> Results:
    """Gradients of long sequences, in pieces from back to front; only the states between pieces are kept."""
    like = {n: getattr(r, n) for n in reference.DIFFERENTIABLE if getattr(r, n) is not None}
    total = {f"d{n}": torch.zeros_like(t) for n, t in like.items()}
    total |= {"o": r.v.new_zeros(r.B, r.T, r.HV, r.V), "final_state": r.v.new_zeros(r.state_shape)}
    per_token = _KEPT_STATES * 8 * r.HV * r.K * r.V
    length = max(1, most_bytes // per_token)
    for n, (b, start, end) in enumerate(reference.sequence_bounds(r)):
        state = r.v.new_zeros(1, *r.state_shape[1:]) if r.initial_state is None else r.initial_state[n : n + 1]
        pieces = []
        for cut in range(start, end, length):
            tokens = (slice(b, b + 1), slice(cut, min(cut + length, end)))
            parts = {name: getattr(r, name)[tokens] for name in DATA}
            piece = replace(r, **parts, initial_state=state, cu_seqlens=None, cu_seqlens_cpu=None)
            result = reference.forward(replace(piece, output_final_state=True))
            total["o"][tokens] = result.o
            pieces.append((tokens, piece))
            state = result.final_state
        total["final_state"][n] = state[0]
        d_state = grads.get("final_state", torch.zeros_like(total["final_state"]))[n : n + 1]
        for tokens, piece in reversed(pieces):
            given = {"o": grads["o"][tokens]} if "o" in grads else {}
            found = whole_backward(piece, given | {"final_state": d_state})
            for name in DATA:
                total[f"d{name}"][tokens] = found[f"d{name}"]
            for name in like.keys() & {"A_log", "dt_bias"}:
                total[f"d{name}"] += found[f"d{name}"]
            d_state = found["dinitial_state"]
        if r.initial_state is not None:
            total["dinitial_state"][n] = d_state[0]
    return total

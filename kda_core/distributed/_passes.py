"""A forward and a backward of this rank: begin, exchange, finish; of all its rows, or of one cell of a grid at a time.

Calls of one cell have the same bits on every rank, and so has all that is computed of all cells in their order: the
chain of their transitions, and the sums of the gradients of ``A_log`` and ``dt_bias``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kda_core._bind import build_request
from kda_core._ledger import Transfer
from kda_core._torch_private import without_autocast
from kda_core.distributed._exchange import full_precision, gathered, join
from kda_core.distributed._halves import Chosen
from kda_core.distributed._shared import Shared, k_first, like_callers, rows_of
from kda_core.request import DATA, Edges, ForwardResult, Request

PARAMETERS = ("A_log", "dt_bias")
ALIGNED = 64
"""Bytes: matrix libraries may round otherwise at other addresses."""


class Step:
    """One call's forward, or backward: ``begin``, what ranks exchange, and ``finish`` or ``finish_backward``.

    Args:
        name: the backend that was asked for, or None.
        known: what was chosen, for tensors of the same metadata.
        given: states (gradients of final states), [N, HV, K, V], or None.
        matrices: what the forward kept; a forward sets it.
        backward: whether ``r`` has ``saved``, ``grad_o`` and ``needs_grad``.
    """

    def __init__(
        self, r: Request, s: Shared, name: str | None, known: Chosen | None, given: Tensor | None,
        matrices: Tensor | None = None, backward: bool = False,
    ) -> None:  # fmt: skip
        self.r, self.s, self.matrices, self.backward = r, s, matrices, backward
        self.chosen, self.request = s.chosen(r, name) if known is None else (known, s.local(r))
        t = s.tables()
        own = t.edges[2 if backward else r.save_for_backward]
        edges = Edges(None if t.no_given[backward] else given, *own, matrices)
        self.request.__dict__.update(cp_context=edges, memo=self.chosen.halves_memo)
        self.kept: tuple[Tensor, ...] = ()

    def begin(self) -> Tensor:
        """The slots' transitions, [S, HV, K, K + V]: matrices, and additions with the given states in them."""
        halves = self.chosen.halves
        begun = halves.begin_backward(self.request) if self.backward else halves.begin(self.request)
        sent, matrices, self.kept = begun
        assert sent is not None
        if self.r.save_for_backward and not self.backward:
            if matrices is None:  # behind what is sent
                sent, matrices = (sent, sent) if self.s.dense else sent.chunk(2)
            self.matrices = matrices
        return sent

    def finish(self, came: Tensor | None) -> ForwardResult:
        """This call's part; of a cell, with parts of the final states of all sequences, [N, HV, K, V]."""
        r, s = self.r, self.s
        found = self.chosen.halves.finish(self.request, self.kept, came)
        o, final, h = found.o, found.final_state, found.h
        if final is None and h is None and self.request.q is r.q:
            return found
        if final is not None and not s.grid:
            final = s.final(r, final)
        if h is not None:
            h = like_callers(r, h.reshape(r.B, -1, *h.shape[2:]), r.h_dtype)
        if self.request.q is not r.q:
            o = o.view(r.B, r.T, r.HV, r.V)
        return ForwardResult(o, final, h, found.saved)

    def finish_backward(self, came: Tensor | None) -> dict[str, Tensor]:
        """This call's part of the gradients, that of the initial states for all sequences, [N, HV, K, V]."""
        r = self.r
        grads = self.chosen.halves.finish_backward(self.request, self.kept, came)
        if self.request.q is not r.q:
            grads = {**grads, **{n: grads[n].view(getattr(r, n).shape) for n in r.needs_grad.intersection(DATA)}}
        return grads


def transfers(r: Request, s: Shared) -> tuple[Transfer, ...]:
    """The collectives of a call, and of its backward where an input requires a gradient."""
    if s.is_alone():
        return ()
    W, itemsize, states = s.group.size(), r.compute_dtype.itemsize, s.sequences * r.HV * r.K * r.V
    gathers = s.gather and r.output_final_state
    what = "M and b of every cell" if s.grid else "M and b of the fragments at the ranges' edges"
    summaries = "all_gather", s.slots.shape[1] * r.HV * r.K * (r.K + r.V), what
    found: list[tuple[Any, Any, int, str]] = [("forward", *summaries)]
    if gathers:
        found.append(("forward", "all_reduce", states, "all final states"))
    if r.save_for_backward:
        if gathers:
            found.append(("backward", "all_reduce", states, "gradients of all final states"))
        found.append(("backward", *summaries))
        names = [n for n in PARAMETERS if (t := getattr(r, n)) is not None and t.requires_grad]
        if s.grid and names:
            numbers = s.slots.shape[1] // (s.dense or 1) * sum(getattr(r, n).numel() for n in names)
            found.append(("backward", "all_gather", numbers, f"gradients of {' and '.join(names)} of every cell"))
    return tuple(Transfer(way, collective, W, n * itemsize, text) for way, collective, n, text in found)


def _joined(step: Step) -> Tensor | None:
    """The states that our fragments receive, where ``Edges`` find them; one collective."""
    if step.chosen.alone:
        return None
    s, first = step.s, 4 + step.s.before if step.backward else 4
    steps = s.slots.shape[0] - first if step.backward else s.before
    # A place of zeros is for chains that are shorter; where nothing comes ``Edges`` say themselves.
    every = gathered(step.begin(), s.group, s.padded and steps > 1)
    if steps < 2:  # the additions alone
        return every if steps else None
    return join(every, s.slots[first : first + steps])


def _aligned(r: Request) -> Request:
    """The call with tensors whose addresses say nothing about the rank's other cells."""

    def moved(t: Tensor) -> Tensor:
        return t.clone() if t.data_ptr() % ALIGNED else t

    rows = {n: moved(t) for n, t in rows_of(r)}
    return build_request({**vars(r), **rows, "saved": tuple(map(moved, r.saved))})


def _chained(r: Request, s: Shared, steps: Sequence[Step], backward: bool) -> list[Tensor]:
    """The states that the fragments of our cells receive; one collective, and products in the order of all cells.

    Every rank makes the same products of the same shapes.
    """
    assert s.chain is not None
    n, places = s.dense or 1, s.slots.shape[1]
    own = r.q.new_zeros(places, r.HV, r.K, r.K + r.V, dtype=r.compute_dtype)
    for i, step in enumerate(steps):
        own[i * n : (i + 1) * n] = step.begin()
    every = gathered(own, s.group, False).view(-1, n * r.HV, r.K, r.K + r.V)
    order, goes_on = s.chain[0], s.chain[1].bool()
    state = own.new_zeros(n * r.HV, r.K, r.V)
    found: dict[int, Tensor] = {}
    cells = range(len(order))
    with full_precision(state.device):
        for cell in reversed(cells) if backward else cells:
            if cell in s.cells:
                found[cell] = state
            if len(found) == len(s.cells):
                break
            both = every.index_select(0, order[cell : cell + 1])[0]
            passed = torch.baddbmm(both[..., r.K :], both[..., : r.K], state)
            # Not a product with zero: it would carry another sequence's NaN.
            state = torch.where(goes_on[cell], passed, both[..., r.K :])
    return [found[cell].view(n, r.HV, r.K, r.V) for cell in s.cells]


def _forward_of_cells(
    r: Request, s: Shared, name: str | None, given: Tensor | None
) -> tuple[ForwardResult, Tensor | None]:
    steps = [Step(_aligned(q), t, name, None, given) for q, t in s.parts(r)]
    if not steps:
        _refuse_without_cells(r, s, name)
    came = _chained(r, s, steps, False)
    parts: Any = [step.finish(states) for step, states in zip(steps, came, strict=True)]
    final = h = None
    if r.output_final_state:
        final = s.final(r, _total(r, s, [p.final_state for p in parts]))
    if r.return_intermediate_states:
        h = torch.cat([r.q.new_empty(r.B, 0, *r.state_shape[1:], dtype=r.h_dtype), *(p.h for p in parts)], 1)
    matrices = [m for step in steps if (m := step.matrices) is not None]
    found = ForwardResult(_rows(r.v, [p.o for p in parts]), final, h, tuple(t for p in parts for t in p.saved))
    return found, torch.cat(matrices) if matrices else None


def _rows(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The rows of all cells, [B, T, ...]; there may be none."""
    return torch.cat([torch.empty_like(like[:, :0]), *parts], 1)


def _refuse_without_cells(r: Request, s: Shared, name: str | None) -> None:
    """Refuse what ranks with cells refuse: they do not come to the exchange."""
    none, cpu = (torch.zeros(s.fragments.shape[1:], dtype=torch.int64, device=d) for d in (r.device, "cpu"))
    s._replace(fragments=none, known_tables=None).chosen(build_request({**vars(r), "cu_seqlens_cpu": cpu[0]}), name)


def _backward_of_cells(
    r: Request, s: Shared, name: str | None, matrices: Any, given: Tensor | None
) -> dict[str, Tensor]:
    parts = s.parts(r)
    each = matrices.chunk(len(parts)) if parts else ()
    steps = [Step(_aligned(q), t, name, None, given, m, backward=True) for (q, t), m in zip(parts, each, strict=True)]
    came = _chained(r, s, steps, True)
    found = [step.finish_backward(states) for step, states in zip(steps, came, strict=True)]
    grads = {n: _rows(getattr(r, n), [g[n] for g in found]) for n in r.needs_grad.intersection(DATA)}
    if "initial_state" in r.needs_grad:
        grads["initial_state"] = _total(r, s, [g["initial_state"] for g in found])
    names = [n for n in PARAMETERS if n in r.needs_grad]
    if names:
        sizes = [getattr(r, n).numel() for n in names]
        own = r.q.new_zeros(s.slots.shape[1] // (s.dense or 1), sum(sizes), dtype=r.compute_dtype)
        for i, g in enumerate(found):
            own[i] = torch.cat([g[n].flatten() for n in names])
        every = gathered(own, s.group, False).index_select(0, s.chain[0])  # type: ignore[index]
        # A rank has a part of these gradients; the first one has all.
        total = every.sum(0) if s.group.rank() == 0 else torch.zeros_like(every[0])
        for n, t in zip(names, total.split(sizes), strict=True):
            grads[n] = t.view(getattr(r, n).shape).to(getattr(r, n).dtype)
    return grads


def _total(r: Request, s: Shared, states: list[Tensor]) -> Tensor:
    """[N, HV, K, V] with the states of every cell, which lie at places of their own."""
    return functools.reduce(Tensor.add_, states, s.no_states(r))


def forward(
    r: Request, s: Shared, name: str | None, known: Chosen | None = None
) -> tuple[ForwardResult, Tensor | None]:
    """Run a call whose tensors are the caller's, as of ``Step``; also the matrices that its backward is given."""
    # Autocast would round the states that ranks exchange: on some ranks perhaps, whose others wait then.
    with without_autocast(r.device.type):
        given = None if r.initial_state is None else k_first(r, r.initial_state)
        if s.grid:
            return _forward_of_cells(r, s, name, given)
        step = Step(r, s, name, known, given)
        return step.finish(_joined(step)), step.matrices


def backward(
    r: Request, s: Shared, name: str | None, matrices: Tensor | None, known: Chosen | None = None
) -> dict[str, Tensor]:
    """Run its backward: ``r`` has ``saved``, ``grad_o``, ``grad_final_state`` and ``needs_grad``."""
    with without_autocast(r.device.type):
        given = None if r.grad_final_state is None else k_first(r, r.grad_final_state)
        if s.gather and r.output_final_state:
            given = s.summed(s.no_states(r) if given is None else given.to(r.compute_dtype, copy=True))
        if s.grid:
            grads = _backward_of_cells(r, s, name, matrices, given)
        else:
            step = Step(r, s, name, known, given, matrices, backward=True)
            grads = step.finish_backward(_joined(step))
        if "initial_state" not in r.needs_grad:
            return grads
        states = like_callers(r, grads["initial_state"], r.initial_state.dtype)  # type: ignore[union-attr]
        return {**grads, "initial_state": states}

"""A call whose sequences are cut between processes, in one process: halves of every fragment, states passed by hand.

This is what ``Feature.CONTEXT_PARALLEL`` promises: each process begins with its own rows, the states at the starts of
fragments follow from the matrices and additions of all (here in float64), and each process finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kda_core._loaded import Backend
from kda_core._plugins import registry
from kda_core.request import DATA, DIFFERENTIABLE, Begun, Edges, ForwardResult, Request
from kda_core.testing.axes import DTYPES, axes
from kda_core.testing.inputs import Call, placed, same_bits
from kda_core.testing.subject import Mismatch, Record, Results, Subject, undeclared


@dataclass
class Process:
    """One process's part of a call."""

    request: Request  # its rows, on the backend's device
    rows: slice  # of the whole call
    sequences: list[int]  # of each fragment

    def part(self, x: Tensor) -> Tensor:
        """Its rows of a tensor [B, T, ..] of the whole call, on its device."""
        return placed(x[:, self.rows].contiguous(), self.request.device)


def processes(kda: Subject, call: Call, cuts: Sequence[int]) -> list[Process]:
    """The parts of a call: process i has rows cuts[i - 1] to cuts[i], and the last one all that follow.

    A single fragment is a dense call, several are packed; a batch stays one, of fragments of each row.
    """
    r = call.request()
    return [_process(kda, r, call, slice(a, b)) for a, b in pairwise([0, *cuts, r.T])]


def _process(kda: Subject, r: Request, call: Call, rows: slice) -> Process:
    if r.B > 1:
        lengths, sequences = None, list(range(r.B))
    else:
        ends = torch.tensor(call.lengths()).cumsum(0).tolist()
        fragments = list(_fragments([0, *ends], rows.start, rows.stop)) or [(len(ends) - 1, 0)]
        sequences, lengths = [n for n, _ in fragments], [length for _, length in fragments]
        if lengths == [rows.stop - rows.start]:
            lengths = None
    parts = {n: placed(getattr(r, n)[:, rows].contiguous(), kda.device) for n in DATA}
    parts |= {n: placed(x, kda.device) for n in ("A_log", "dt_bias") if (x := getattr(r, n)) is not None}
    states = {"initial_state": None, "output_final_state": True, "cp_context": True, "cu_seqlens_cpu": None}
    states["cu_seqlens"] = None
    if lengths is not None:
        states["cu_seqlens"] = placed(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), kda.device)
    return Process(replace(r, **parts, **states, save_for_backward=bool(call.grads)), rows, sequences)


def _fragments(bounds: list[int], first: int, last: int) -> list[tuple[int, int]]:
    """(sequence, rows) of what lies from row ``first`` to ``last``; a process without rows has an empty fragment."""
    found = []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        length = min(end, last) - max(begin, first)
        # Every process that touches an empty sequence may have it: its matrix is I.
        if length > 0 or (length == 0 and (begin == end or first == last)):
            found.append((n, length))
    return found


def run(kda: Subject, call: Call, cuts: Sequence[int]) -> Results:
    """Run a call in halves on processes that are cut at these rows; results and gradients as of the whole call.

    Raises:
        Refused: the backend does not declare the call, or refuses its halves by name.
        Mismatch: a half's results break the contract, or an input was modified.
    """
    own = processes(kda, call, cuts)
    request, whole = own[0].request, call.request()
    features = sorted(f.name for f in request.features | whole.features)
    record = Record(kda.name, axes(whole), DTYPES[whole.q.dtype], features, call.name)
    kda.records.append(record)
    if reasons := undeclared(kda.info, request):
        raise record.turned_down("refused", *reasons)
    backend = registry.named(kda.name)
    for p in own:
        if reason := backend.rejection(p.request):
            raise record.turned_down("rejected", reason)
    before = [{n: getattr(p.request, n).clone() for n in DATA} for p in own]
    found = _Run(backend, call, own).results()
    for p, kept in zip(own, before, strict=True):
        if changed := [n for n in DATA if not same_bits(kept[n], getattr(p.request, n))]:
            raise Mismatch(f"{', '.join(changed)}: modified by a half of the call")
    return found


class _Run:
    def __init__(self, backend: Backend, call: Call, own: list[Process]) -> None:
        self.backend, self.call, self.own, self.whole = backend, call, own, call.request()

    def results(self) -> dict[str, Tensor]:
        r, call = self.whole, self.call
        begun = [self._begin("kda_core_chunk_begin", p.request) for p in self.own]
        matrices = [b.matrices for b in begun]
        starts, _ = _scan(self.own, matrices, begun, _k_first(r, r.initial_state))
        done = [self._finish(p.request, b, x) for p, b, x in zip(self.own, begun, starts, strict=True)]
        found = {"o": torch.cat([x.o.cpu() for x in done], 1)}
        if r.output_final_state:
            found["final_state"] = self._last([x.final_state for x in done]).to(r.state_dtype)
        if call.grads:
            found |= self._backward(done, matrices)
        return found

    def _last(self, states: list[Tensor]) -> Tensor:
        """The states of the last fragment of each sequence."""
        found = torch.empty(self.whole.state_shape, dtype=states[0].dtype)
        for p, own in zip(self.own, states, strict=True):
            for f, n in enumerate(p.sequences):
                found[n] = own[f].cpu()
        return found

    def _begin(self, hook: str, r: Request) -> Begun:
        begun = self.backend.call(hook, request=r)
        self.backend.check_begun(r, begun)
        return begun if begun.additions is not None else Begun(*begun.matrices.split((r.K, r.V), -1), begun.kept)

    def _finish(self, r: Request, begun: Begun, starts: Tensor) -> ForwardResult:
        result = self.backend.call("kda_core_chunk_finish", request=r, kept=begun.kept, starts=starts)
        self.backend.check_forward(r, result)
        if r.save_for_backward:
            specs = self.backend.call("kda_core_saved_spec", request=r)
            saved, said = [(tuple(t.shape), t.dtype) for t in result.saved], [(tuple(s.shape), s.dtype) for s in specs]
            if saved != said:
                raise Mismatch(f"kda_core_chunk_finish saved tensors of {saved}, kda_core_saved_spec says {said}")
        return result

    def _finish_backward(self, r: Request, begun: Begun, ends: Tensor) -> dict[str, Tensor]:
        hook = "kda_core_chunk_finish_backward"
        result = self.backend.call(hook, request=r, kept=begun.kept, ends=ends)
        self.backend.check_gradients(r, result, None)
        return result.grads

    def _backward(self, done: list[ForwardResult], matrices: list[Tensor | None]) -> dict[str, Tensor]:
        r, grads = self.whole, self.call.grads
        names = [n for n in DIFFERENTIABLE if getattr(r, n) is not None]
        needs = frozenset(names) - {"initial_state"}
        requests = [
            replace(p.request, saved=x.saved, grad_o=p.part(grads["o"]) if "o" in grads else None, needs_grad=needs)
            for p, x in zip(self.own, done, strict=True)
        ]
        begun = [self._begin("kda_core_chunk_begin_backward", q) for q in requests]
        transposed = [m.mT if b.matrices is None else b.matrices for m, b in zip(matrices, begun, strict=True)]
        given, first = _scan(self.own, transposed, begun, _k_first(r, grads.get("final_state")), backwards=True)
        parts = [self._finish_backward(q, b, x) for q, b, x in zip(requests, begun, given, strict=True)]
        found = {n: [x[n].cpu() for x in parts] for n in needs}
        joined = {f"d{n}": torch.cat(x, 1) if n in DATA else sum(x) for n, x in found.items()}
        if "initial_state" in names:
            first = first.mT if r.state_v_first else first
            joined["dinitial_state"] = first.to(r.initial_state.dtype).contiguous()
        return joined


def _k_first(r: Request, state: Tensor | None) -> Tensor:
    """States [N, HV, K, V] in float64; None: zeros."""
    if state is None:
        return torch.zeros((r.N, r.HV, r.K, r.V), dtype=torch.float64)
    return (state.mT if r.state_v_first else state).double()


def _scan(
    own: list[Process], matrices: list[Tensor], begun: list[Begun], states: Tensor, backwards: bool = False
) -> tuple[list[Tensor], Tensor]:
    """The states that each process is given, [F, HV, K, V], and those of the sequences behind all fragments."""
    states = states.clone()
    given = [torch.empty(b.additions.shape, dtype=torch.float64) for b in begun]
    order = [(i, f) for i, p in enumerate(own) for f in range(len(p.sequences))]
    for i, f in reversed(order) if backwards else order:
        n = own[i].sequences[f]
        given[i][f] = states[n]
        states[n] = matrices[i][f].double().cpu() @ states[n] + begun[i].additions[f].double().cpu()
    return [x.to(b.additions) for x, b in zip(given, begun, strict=True)], states


def compare_edges(kda: Subject, call: Call) -> None:
    """Run the halves of a call with ``Edges``, and with states that lie as its fragments do: the same bits come out."""
    r, backend = processes(kda, call, ())[0].request, registry.named(kda.name)
    F, lead, rows, device = r.N, (r.HV, r.K), r.cu_seqlens is not None, r.device
    N, C = (F + 2, 3) if rows else (F, F)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return placed(torch.randn(shape, generator=random), device)

    def table(*values: int) -> Tensor:
        return placed(torch.tensor(values), device)

    # Every second fragment has its state among the given ones, the others what came.
    places = table(*(F - f if f % 2 else N for f in range(F)))
    sources = table(*(C if f % 2 else f % C for f in range(F)))
    results = table(*((f + 2) % (N + 1) for f in range(F))) if rows else None
    sends = table(F - 1, 0) if rows else None
    given, came = normal(N, r.HV, r.V, r.K).mT, normal(C, *lead, r.K + r.V)
    zeros = came.new_zeros(1, *lead, r.V)
    own = torch.cat([given.float(), zeros])[places]
    starts = own + torch.cat([came[..., r.K :], zeros])[sources]

    def same(name: str, found: Tensor, expected: Tensor, close: bool = False) -> None:
        right = torch.allclose(found, expected, 1e-3, 1e-3) if close else same_bits(found, expected)
        if not right:
            raise Mismatch(f"{name}: not as without edges")

    def sent(name: str, found: Tensor, matrices: Tensor, additions: Tensor) -> None:
        asked = slice(None) if sends is None else sends
        same(f"{name}, matrices", found[..., : r.K], matrices[asked])
        same(f"{name}, additions", found[..., r.K :], (additions + matrices @ own)[asked], True)
        none = places[asked] == N
        same(f"{name}, additions alone", found[none][..., r.K :], additions[asked][none])

    def of_sequences(states: Tensor) -> Tensor:
        if results is None:
            return states
        return states.new_zeros(N + 1, *states.shape[1:]).index_copy_(0, results, states)[:N]

    run = _Run(backend, call, [])
    edges = Edges(given, places, sends, sources, results, N)
    by_edges = replace(r, cp_context=edges)
    plain, begun = run._begin("kda_core_chunk_begin", r), run._begin("kda_core_chunk_begin", by_edges)
    both = torch.cat([begun.matrices, begun.additions], -1)
    sent("begin", both, plain.matrices, plain.additions)
    done, found = run._finish(r, plain, starts), run._finish(by_edges, begun, came)
    same("o", found.o, done.o)
    same("final_state", found.final_state, of_sequences(done.final_state))
    needs = frozenset(n for n in DIFFERENTIABLE if getattr(call.request(), n) is not None)
    r = replace(r, saved=done.saved, grad_o=placed(call.grads["o"], device), needs_grad=needs - {"initial_state"})
    kept = both if sends is not None else torch.cat([plain.matrices, plain.additions], -1)
    by_edges = replace(r, needs_grad=needs, cp_context=edges._replace(matrices=kept))
    back, begun = (run._begin("kda_core_chunk_begin_backward", q) for q in (r, by_edges))
    sent("begin_backward", torch.cat([begun.matrices, begun.additions], -1), plain.matrices.mT, back.additions)
    expected, grads = run._finish_backward(r, back, starts), run._finish_backward(by_edges, begun, came)
    for n in needs - {"initial_state"}:
        same(f"d{n}", grads[n], expected[n])
    first = of_sequences(plain.matrices.mT @ starts + back.additions)
    same("dinitial_state", grads["initial_state"], first, True)

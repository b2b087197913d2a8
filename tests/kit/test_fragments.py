"""The kit's tests of halves (``Feature.CONTEXT_PARALLEL``) pass a faultless backend and find wrong ones."""

from __future__ import annotations

from dataclasses import replace

import installed
import pytest
import torch
from mutants import Mutant
from torch import Tensor

from kda_core.capabilities import BackendInfo, Feature
from kda_core.hookspecs import hookimpl
from kda_core.request import DATA, BackwardResult, Begun, ForwardResult, Request, TensorSpec
from kda_core.testing import fragments
from kda_core.testing.cases import FP32, Case
from kda_core.testing.subject import Mismatch, Refused, Subject
from kda_core.testing.suite import test_context_parallel as suite
from kda_core.testing.targets import Target

installed.need_backend("cpu")


class Halved(Mutant):
    """The CPU backend with halves made of plain calls, and a fault in a method that a subclass overrides."""

    def begun(self, r: Request, begun: Begun) -> Begun:
        return begun

    def begun_backward(self, r: Request, begun: Begun) -> Begun:
        return begun

    def started(self, starts: Tensor) -> Tensor:
        return starts

    def ended(self, ends: Tensor) -> Tensor:
        return ends

    @hookimpl
    def kda_core_backend(self) -> BackendInfo:
        info = super().kda_core_backend()
        own = replace(info.capabilities, features=info.capabilities.features | {Feature.CONTEXT_PARALLEL}, closed={})
        return replace(info, capabilities=own)

    @hookimpl
    def kda_core_saved_spec(self, request: Request) -> tuple[TensorSpec, ...]:
        own = self.cpu.kda_core_saved_spec(request=replace(request, cp_context=None))
        if not request.cp_context:
            return own
        states = request.N, request.HV, *((request.V, request.K) if request.state_v_first else (request.K, request.V))
        return (*own, TensorSpec(states, request.compute_dtype))

    def last_states(self, r: Request, v: Tensor, states: Tensor) -> Tensor:
        options = {"save_for_backward": False, "state_v_first": False, "output_final_state": True, "cp_context": None}
        return self.cpu.kda_core_chunk_forward(request=replace(r, v=v, initial_state=states, **options)).final_state

    def summary(self, r: Request) -> tuple[Tensor, Tensor]:
        unit = torch.eye(r.K, dtype=r.compute_dtype).expand(r.N, r.HV, r.K, r.K).contiguous()
        none = r.v.new_zeros(*r.v.shape[:-1], r.K)
        zeros = unit.new_zeros(r.N, r.HV, r.K, r.V)
        return self.last_states(r, none, unit), self.last_states(r, r.v, zeros)

    @hookimpl
    def kda_core_chunk_begin(self, request: Request) -> Begun:
        return self.begun(request, Begun(*self.summary(request), ()))

    @hookimpl
    def kda_core_chunk_finish(self, request: Request, kept: tuple[Tensor, ...], starts: Tensor) -> ForwardResult:
        given = self.started(starts)
        given = given.mT.contiguous() if request.state_v_first else given
        result = self.cpu.kda_core_chunk_forward(request=replace(request, cp_context=None, initial_state=given))
        return replace(result, saved=(*result.saved, given)) if request.save_for_backward else result

    def plain_backward(self, r: Request, ends: Tensor | None, needs: frozenset[str]) -> dict[str, Tensor]:
        *saved, starts = r.saved
        if ends is not None and r.state_v_first:
            ends = ends.mT.contiguous()
        grad_o = torch.zeros_like(r.v) if r.grad_o is None else r.grad_o
        own = {"saved": tuple(saved), "initial_state": starts, "grad_final_state": ends, "needs_grad": needs}
        return self.cpu.kda_core_chunk_backward(request=replace(r, cp_context=None, grad_o=grad_o, **own)).grads

    @hookimpl
    def kda_core_chunk_begin_backward(self, request: Request) -> Begun:
        grad = self.plain_backward(request, None, frozenset({"initial_state"}))["initial_state"]
        grad = grad.mT.contiguous() if request.state_v_first else grad
        return self.begun_backward(request, Begun(None, grad, ()))

    @hookimpl
    def kda_core_chunk_finish_backward(
        self, request: Request, kept: tuple[Tensor, ...], ends: Tensor
    ) -> BackwardResult:
        return BackwardResult(self.plain_backward(request, self.ended(ends), request.needs_grad))


class OneSegmentTooFew(Halved):
    """The summary of a fragment lacks its last row."""

    def begun(self, r: Request, begun: Begun) -> Begun:
        if r.cu_seqlens is not None or r.T < 2:
            return begun
        short = replace(r, **{n: getattr(r, n)[:, :-1] for n in DATA})
        return Begun(*self.summary(short), ())


class MatricesNotTransposed(Halved):
    """Gradients of states go through the forward's matrices as they are."""

    def begun_backward(self, r: Request, begun: Begun) -> Begun:
        return begun._replace(matrices=self.summary(replace(r, saved=(), grad_o=None, needs_grad=frozenset()))[0])


class StartsIgnored(Halved):
    """Every fragment starts from zeros."""

    def started(self, starts: Tensor) -> Tensor:
        return torch.zeros_like(starts)


class EndsIgnored(Halved):
    """No fragment hears of the gradients behind it."""

    def ended(self, ends: Tensor) -> Tensor:
        return torch.zeros_like(ends)


class OutputsIgnored(Halved):
    """The part of the gradient of a fragment's start that its own outputs add is left out."""

    def begun_backward(self, r: Request, begun: Begun) -> Begun:
        return begun._replace(additions=torch.zeros_like(begun.additions))


class StartsOfTheNeighbour(Halved):
    """Packed fragments take each other's starts."""

    def started(self, starts: Tensor) -> Tensor:
        return starts.roll(1, 0)


@pytest.fixture
def subject(request, registered) -> Subject:
    return Subject(Target(registered(request.param()), torch.device("cpu")))


def findings(kda: Subject, backward: bool) -> list[str]:
    """The kit's cases that fail."""
    found = []
    for case, cuts in suite.CASES:
        call = case.having(backward=backward).call()
        try:
            kda.compare(call, fragments.run(kda, call, cuts))
        except Mismatch:
            found.append(case.name)
    return found


@pytest.mark.parametrize("subject", [Halved], indirect=True)
@pytest.mark.parametrize("backward", [False, True])
def test_a_faultless_backend_passes(subject, backward: bool):
    assert findings(subject, backward) == []


@pytest.mark.parametrize("subject", [OneSegmentTooFew, StartsIgnored, StartsOfTheNeighbour], indirect=True)
def test_wrong_forwards_are_found(subject):
    assert findings(subject, backward=False)


@pytest.mark.parametrize("subject", [MatricesNotTransposed, EndsIgnored, OutputsIgnored], indirect=True)
def test_wrong_backwards_are_found(subject):
    assert findings(subject, backward=True)


@pytest.mark.parametrize("subject", [Halved], indirect=True)
def test_rows_add_up(subject):
    """Every row and every sequence is some process's."""
    case = Case(name="parts", T=20, lengths=(5, 0, 9), state=FP32)
    own = fragments.processes(subject, case.call(), (5, 5, 9))
    assert [(p.rows.start, p.rows.stop) for p in own] == [(0, 5), (5, 5), (5, 9), (9, 20)]
    assert [p.sequences for p in own] == [[0, 1], [0, 1, 2], [1, 2], [2]]


def test_a_backend_without_halves_is_not_run():
    kda = Subject(Target("cpu", torch.device("cpu")))
    with pytest.raises(Refused, match="a sequence spread over devices"):
        fragments.run(kda, suite.CASES[0][0].call(), (64,))

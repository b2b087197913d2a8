"""Deliberately wrong backends that keep memory or values from one call to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from mutants import Mutant, gradients
from torch import Tensor

from kda_core.request import ForwardResult, Request


class _Keeping(Mutant):
    """Subclasses keep tensors in one dictionary."""

    abstract = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[object, Tensor] = {}

    def in_workspace(self, key: object, t: Tensor) -> Tensor:
        """The tensor, in the memory of the first one with its key, shape and dtype."""
        kept = self.kept.setdefault((key, t.shape, t.dtype), t)
        return kept if kept is t else kept.copy_(t)


class SavedInAWorkspace(_Keeping):
    """A forward's saved tensors lie in the memory of an earlier one's of the same shapes."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        saved = [self.in_workspace((r.op, n), t) for n, t in enumerate(result.saved or ())]
        return replace(result, saved=tuple(saved)) if saved else result


class GradientInAWorkspace(_Keeping):
    """So does dq."""

    def gradients(self, r: Request, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: self.in_workspace(r.op, t) if n == "q" else t for n, t in grads.items()}


class RateKeptByAddress(_Keeping):
    """A_log is read once for each address; an optimizer changes it in place."""

    field: ClassVar[str] = "A_log"

    def asked(self, r: Request) -> Request:
        t = getattr(r, self.field)
        if t is None:
            return r
        # The tensor itself is kept too, so that its address stays its own.
        self.kept.setdefault((t.data_ptr(), "itself"), t)
        return replace(r, **{self.field: self.kept.setdefault((t.data_ptr(), t.shape), t.detach().clone())})


class SlotsKeptByAddress(RateKeptByAddress):
    """The same for ssm_state_indices; a server writes other slots into the same tensor."""

    field = "ssm_state_indices"


class EmptyStateIsTheInitialOne(Mutant):
    """Without tokens the initial state itself comes back."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        itself = r.T == 0 and r.initial_state is not None and result.final_state is not None
        return replace(result, final_state=r.initial_state) if itself and not r.inplace_final_state else result


@gradients
def gradients_by_heads(r, grads):
    """Gradients are views of tensors that are laid out by heads."""
    return {n: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t for n, t in grads.items()}

"""Faults of drafts that leave records, and of their commit."""

from __future__ import annotations

from dataclasses import replace

import mutants
import torch
from torch import Tensor

from kda_core.request import CommitRequest, ForwardResult, Request


class PoolWrittenByTheDraft(mutants.Mutant):
    """A call with records leaves the last state in the pool as well."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if r.records is not None:
            self.compute(replace(r, records=None, update_state=True))
        return result


class RecordsOneTokenOff(mutants.Mutant):
    """Each token's record stands in the row of the token before it."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if r.records is not None and r.T > 1:
            r.records[:, :-1] = r.records[:, 1:].clone()
        return result


class RecordsOfRawKeys(mutants.Mutant):
    """Keys are recorded as they came, without their norm."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if r.records is not None and r.use_qk_l2norm_in_kernel and r.H == r.HV:
            r.records[..., : r.K] = r.k
        return result


class SkippedRowsRecorded(mutants.Mutant):
    """Rows of skipped sequences are written too."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if r.records is not None:
            r.records.nan_to_num_(0.0)
        return result


class CommitOfOneTooMany(mutants.Mutant):
    """The first rejected token is committed as well, unless it is the first of all."""

    def committed(self, r: CommitRequest) -> CommitRequest:
        if r.cu_seqlens is not None:
            return r
        return replace(r, num_accepted=(r.num_accepted + (r.num_accepted > 0)).clamp_max(r.T))


class NothingAcceptedIsOne(mutants.Mutant):
    """At least one token is committed."""

    def committed(self, r: CommitRequest) -> CommitRequest:
        return replace(r, num_accepted=r.num_accepted.clamp_min(1))


class CommitOfRowsOfTheBatch(mutants.Mutant):
    """The slot of a commit is the number of the sequence."""

    def committed(self, r: CommitRequest) -> CommitRequest:
        slots: Tensor = r.state_indices.clone()
        slots[slots >= 0] = (slots >= 0).nonzero()[:, 0].to(slots.dtype)
        return replace(r, state_indices=slots)


class CommitInACallIgnored(mutants.Mutant):
    """A call with ``commit`` starts from the slot as it is."""

    def asked(self, r: Request) -> Request:
        return r if r.commit is None else r.after_commit()


class CommitInACallNotStored(mutants.Mutant):
    """A call with ``commit`` starts from the right state, and leaves the slot as it was."""

    def compute(self, r: Request) -> ForwardResult:
        if r.commit is None or r.initial_state is None:
            return super().compute(r)
        return super().compute(replace(r, initial_state=r.initial_state.clone()))


class TreesAreChains(mutants.Mutant):
    """Every token continues from the one before it."""

    def asked(self, r: Request) -> Request:
        return replace(r, parents=None)


class ParentsOfTheFirstTree(mutants.Mutant):
    """All sequences of a call have the tree of the first one."""

    def asked(self, r: Request) -> Request:
        return r if r.parents is None else replace(r, parents=r.parents[:1].expand_as(r.parents).contiguous())


class GrandparentsForParents(mutants.Mutant):
    """Tokens continue from the parent of their parent, where that is a token."""

    def asked(self, r: Request) -> Request:
        if r.parents is None:
            return r
        above = r.parents.gather(1, r.parents.clamp_min(0).long())
        return replace(r, parents=torch.where((r.parents >= 0) & (above >= 0), above, r.parents))


class OneRootOnly(mutants.Mutant):
    """Tokens that continue from the state before the call are taken for children of the first token."""

    def asked(self, r: Request) -> Request:
        if r.parents is None:
            return r
        parents = r.parents.clamp_min(0)
        parents[:, :1] = -1
        return replace(r, parents=parents)


class PathIgnored(mutants.Mutant):
    """A commit takes the first tokens instead of those of the path."""

    def committed(self, r: CommitRequest) -> CommitRequest:
        return replace(r, path=None, num_accepted=r.num_accepted.clamp_max(r.T))


class PathInACallIgnored(mutants.Mutant):
    """The same in a call that begins with a commit."""

    def asked(self, r: Request) -> Request:
        return r if r.commit is None else replace(r, commit_path=None)


class PathOfTheFirstSequence(mutants.Mutant):
    """All sequences commit the path of the first one."""

    def committed(self, r: CommitRequest) -> CommitRequest:
        return r if r.path is None else replace(r, path=r.path[:1].expand_as(r.path).contiguous())

"""Faults of drafts that leave records, and of their commit."""

from __future__ import annotations

from dataclasses import replace

import torch
from mutants import Mutant, answered, asked, committed

from kda_core.request import ForwardResult, Request


class PoolWrittenByTheDraft(Mutant):
    """A call with records leaves the last state in the pool as well."""

    def answered(self, r: Request, result: ForwardResult) -> ForwardResult:
        if r.records is not None:
            self.compute(replace(r, records=None, update_state=True))
        return result


@answered
def records_one_token_off(r, result):
    """Each token's record stands in the row of the token before it."""
    if r.records is not None and r.T > 1:
        r.records[:, :-1] = r.records[:, 1:].clone()


@answered
def records_of_raw_keys(r, result):
    """Keys are recorded as they came, without their norm."""
    if r.records is not None and r.use_qk_l2norm_in_kernel and r.H == r.HV:
        r.records[..., : r.K] = r.k


@answered
def skipped_rows_recorded(r, result):
    """Rows of skipped sequences are written too."""
    if r.records is not None:
        r.records.nan_to_num_(0.0)


@committed
def commit_of_one_too_many(r):
    """The first rejected token is committed as well, unless it is the first of all."""
    if r.cu_seqlens is not None:
        return r
    return replace(r, num_accepted=(r.num_accepted + (r.num_accepted > 0)).clamp_max(r.T))


@committed
def nothing_accepted_is_one(r):
    """At least one token is committed."""
    return replace(r, num_accepted=r.num_accepted.clamp_min(1))


@committed
def commit_of_rows_of_the_batch(r):
    """The slot of a commit is the number of the sequence."""
    slots = r.state_indices.clone()
    slots[slots >= 0] = (slots >= 0).nonzero()[:, 0].to(slots.dtype)
    return replace(r, state_indices=slots)


@asked
def commit_in_a_call_ignored(r):
    """A call with ``commit`` starts from the slot as it is."""
    return r if r.commit is None else r.after_commit()


class CommitInACallNotStored(Mutant):
    """A call with ``commit`` starts from the right state, and leaves the slot as it was."""

    def compute(self, r: Request) -> ForwardResult:
        if r.commit is None or r.initial_state is None:
            return super().compute(r)
        return super().compute(replace(r, initial_state=r.initial_state.clone()))


@asked
def trees_are_chains(r):
    """Every token continues from the one before it."""
    return replace(r, parents=None)


@asked
def parents_of_the_first_tree(r):
    """All sequences of a call have the tree of the first one."""
    return r if r.parents is None else replace(r, parents=r.parents[:1].expand_as(r.parents).contiguous())


@asked
def grandparents_for_parents(r):
    """Tokens continue from the parent of their parent, where that is a token."""
    if r.parents is None:
        return r
    above = r.parents.gather(1, r.parents.clamp_min(0).long())
    return replace(r, parents=torch.where((r.parents >= 0) & (above >= 0), above, r.parents))


@asked
def one_root_only(r):
    """Tokens that continue from the state before the call are taken for children of the first token."""
    if r.parents is None:
        return r
    parents = r.parents.clamp_min(0)
    parents[:, :1] = -1
    return replace(r, parents=parents)


@committed
def path_ignored(r):
    """A commit takes the first tokens instead of those of the path."""
    return replace(r, path=None, num_accepted=r.num_accepted.clamp_max(r.T))


@asked
def path_in_a_call_ignored(r):
    """The same in a call that begins with a commit."""
    return r if r.commit is None else replace(r, commit_path=None)


@committed
def path_of_the_first_sequence(r):
    """All sequences commit the path of the first one."""
    return r if r.path is None else replace(r, path=r.path[:1].expand_as(r.path).contiguous())

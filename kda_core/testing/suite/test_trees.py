"""Drafts that are trees: outputs and records of every token, and the commit of a path, beside drafts of the path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kda_core
from kda_core._plugins import registry
from kda_core.capabilities import Feature
from kda_core.testing.inputs import Call, placed, same_bits
from kda_core.testing.marks import requires
from kda_core.testing.subject import Subject
from kda_core.testing.suite.test_records import (
    BF16,
    KINDS,
    RECORDED,
    commit,
    commit_unchecked,
    draft,
    expect_commit_and_draft,
    indices,
    needs_unchecked_values,
)

TREES = requires(Feature.DRAFT_TREES)

FORKED = ((-1, 0, 0, 1, 1, 2, 4), (-1, -1, 0, 0, 1, 3, -1), (-1, 0, 1, 2, 3, 4, 5))
"""A tree with a fork at two depths, one with three roots, and a chain."""


def _tree(kda: Subject, parents: tuple[tuple[int, ...], ...], slots: Tensor | None = None, **fields) -> Call:
    """Drafts with these trees, which leave records."""
    slots = indices(4, 0, 2) if slots is None else slots
    call = draft(kda, slots, len(parents[0]), **fields).recorded()
    return call.having(parents=torch.tensor(parents, dtype=torch.int32))


def _path(parents: tuple[int, ...], token: int) -> list[int]:
    """The tokens from the root to this one."""
    path: list[int] = []
    while token >= 0:
        path.insert(0, token)
        token = parents[token]
    return path


@RECORDED
@TREES
@pytest.mark.parametrize("fields", KINDS)
def test_a_token_has_the_bits_of_a_draft_of_its_ancestors(kda, fields: dict):
    """And a commit of its path those of a commit of that draft, for every token of the trees."""
    call = _tree(kda, FORKED, **fields)
    found = kda.check(call)
    rows = ("q", "k", "v", "g", "beta")
    for token in range(len(FORKED[0])):
        paths = [_path(parents, token) for parents in FORKED]
        longest = max(map(len, paths))
        # Behind a shorter path its last token again, which nothing before it depends on.
        filled = torch.tensor([path + path[-1:] * (longest - len(path)) for path in paths])
        of_path = {n: torch.stack([x[i] for x, i in zip(call.tensors[n], filled, strict=True)]) for n in rows}
        plain = call.having(**of_path, parents=None).recorded()
        expected = kda.run(plain)
        counts = torch.tensor([len(path) for path in paths])
        for n, path in enumerate(paths):
            length = len(path)
            assert same_bits(found["o"][n, path], expected["o"][n, :length]), (n, path)
            assert same_bits(found["records"][n, path], expected["records"][n, :length]), (n, path)
        pool = commit(kda, call, found["records"], counts, path=filled.int())
        assert same_bits(pool, commit(kda, plain, expected["records"], counts))


@RECORDED
@TREES
def test_a_chain_has_the_bits_of_a_plain_draft(kda):
    """Sixteen tokens; any negative number says that the first has no parent."""
    call = draft(kda, indices(4, 0, 2), 16, l2norm=True).recorded()
    chain = torch.arange(-1, 15)[None].repeat(3, 1)
    chain[1, 0] = -7
    expected, found = kda.run(call), kda.check(call.having(parents=chain))
    assert all(same_bits(found[n], expected[n]) for n in ("o", "records"))


@RECORDED
@TREES
def test_a_tree_of_sixty_four_tokens(kda):
    """Deep and wide: ancestors at both ends of a number of 64 bits."""
    deep = [t - 1 for t in range(63)] + [61]
    wide = [-1] + [0] * 62 + [31]
    comb = [-1] + [t - 1 - (t % 3 == 0) for t in range(1, 64)]
    kda.check(_tree(kda, tuple(map(tuple, (deep, wide, comb))), gate="lower bound", l2norm=True))


@RECORDED
@TREES
@requires(Feature.STRIDED_INPUT)
def test_tables_of_any_strides(kda):
    """Parents and paths that are slices of wider tables, as a server's buffers are."""
    call = _tree(kda, FORKED)
    found = kda.run(call)
    strided = kda.run(replace(call, strided=frozenset({"parents"})))
    assert same_bits(strided["o"], found["o"])
    assert same_bits(strided["records"], found["records"])
    path, counts = torch.tensor([[0, 1, 4, 6], [0, 3, 5, 0], [0, 1, 2, 3]]), torch.tensor([4, 3, 2])
    expected = commit(kda, call, found["records"], counts, path=path)
    tensors = {n: t.to(kda.device) for n, t in call.tensors.items()}
    pool, wide = tensors["initial_state"].clone(), placed(path, kda.device, strided=True)
    assert not wide.is_contiguous()
    slots, records = tensors["ssm_state_indices"], found["records"].to(kda.device)
    kda_core.commit_kda(pool, records, counts.to(kda.device), slots, path=wide, backend=kda.name)
    assert same_bits(pool.cpu(), expected)


@RECORDED
@TREES
@requires(Feature.HAS_INITIAL_STATE)
def test_branches_of_sequences_that_start_from_zero_or_are_skipped(kda):
    """Branches of a fresh sequence start from zero as well, and those of a skipped one leave no record."""
    call = _tree(kda, FORKED, indices(4, -1, 2))
    kda.check(call.having(has_initial_state=torch.tensor([False, True, True])))


@RECORDED
@TREES
@pytest.mark.parametrize("state", [None, BF16], ids=["float32", "bfloat16"])
def test_a_path_is_committed_by_the_next_call(kda, state):
    """It has the bits of the two calls; a fresh sequence and a skipped one are among them, and branches start anew."""
    fields = {} if state is None else {"state": state}
    first = _tree(kda, FORKED, **fields)
    earlier = kda.run(first)["records"]
    path = torch.tensor([[0, 1, 4, 6], [0, 3, 5, 0], [0, 1, 2, 3]], dtype=torch.int32)
    counts = torch.tensor([4, 2, 0], dtype=torch.int32)
    call = first.having(ssm_state_indices=indices(4, -1, 2)).recorded()
    expect_commit_and_draft(kda, call, earlier, counts, path=path)


@RECORDED
@TREES
def test_numbers_out_of_range_where_nothing_reads_them(kda):
    """Parents that are no earlier token, paths and counts out of range are clamped: no other memory is touched."""
    needs_unchecked_values(kda)
    good, bad = ((-1, 0, 1, 1), (-1, -1, 1, 0), (-1, 0, 0, 2)), ((9, 0, 2**30, 1), (-3, -9, 5, 0), (0, 0, 0, 2**20))
    call = _tree(kda, good)
    expected = kda.run(call)
    tensors = {n: placed(t, kda.device) for n, t in call.having(parents=torch.tensor(bad)).tensors.items()}
    request = call.having(**tensors).request()
    result = registry.named(kda.name).call("kda_core_recurrent_forward", request=request)
    assert same_bits(result.o.cpu(), expected["o"])
    assert same_bits(tensors["records"].cpu(), expected["records"])
    records = expected["records"]
    counts, path = torch.tensor([3, 0, 2]), torch.tensor([[0, 3, 3], [1, 2, 0], [0, 2, 3]])
    committed = commit(kda, call, records, counts, path=path)
    far = torch.tensor([[-5, 9, 2**30], [1, 2, 0], [0, 2, 99]])
    assert same_bits(commit_unchecked(kda, call, records, torch.tensor([2**20, -1, 2]), path=far), committed)

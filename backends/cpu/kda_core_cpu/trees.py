"""Trees of draft tokens as packed sequences, one from the root to each leaf.

A token that branches share is computed once for each of them, with the same bits, as those of a sequence do not depend
on its batch. So a token has the bits of a draft of its ancestors alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kda_core.request import DATA, Request


def as_branches(r: Request) -> tuple[Request, tuple[torch.Tensor, ...]]:
    """The packed request of all branches, and (row, sequence, token) of each token of the trees.

    Its records are a fresh buffer.
    """
    branches = r.branches()
    owner = torch.tensor([n for n, _ in branches], dtype=torch.long, device="cpu")
    lengths = torch.tensor([0, *(len(tokens) for _, tokens in branches)], device="cpu")
    rows = [(n, t) for n, tokens in branches for t in tokens]
    first = {row: i for i, row in reversed(list(enumerate(rows)))}
    sequence, token = torch.tensor(rows, dtype=torch.long, device="cpu").reshape(-1, 2).unbind(1)
    data = {name: getattr(r, name)[sequence, token][None] for name in DATA}
    by_sequence = ("ssm_state_indices", "num_accepted_tokens", "has_initial_state")
    given = {n: t[owner] for n in by_sequence if (t := getattr(r, n)) is not None}
    records = r.records.new_empty(1, len(rows), *r.records.shape[2:])  # type: ignore[union-attr]
    packed = replace(r, **data, **given, cu_seqlens=lengths.cumsum(0), records=records, parents=None, out=None)
    places = torch.tensor([(i, *row) for row, i in first.items()], dtype=torch.long, device="cpu")
    return packed, places.reshape(-1, 3).unbind(1)

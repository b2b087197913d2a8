"""The checks of a pool's arguments: which slots are read and written, by metadata and by values.

The oracle in ``kda_core.reference`` has a rule of its own for them.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_core import _expect as expect
from kda_core._expect import INDEX_DTYPES, STATE_DTYPES, fail, shape_of, state_dtypes
from kda_core.request import CommitRequest, Request

CHECKPOINT_ROWS = 16
"""Tokens between checkpoints are a multiple of so many, the smallest block that matrix units take."""

MOST_NODES = 64
"""Tokens of a tree: a kernel keeps the ancestors of one in the bits of a number."""


def slot_rows(table: Tensor | None, N: int, pad_slot_id: int) -> list[list[int]]:
    """[N][W] slots of a table [N] or [N, W], -1 where one is to be skipped; without a table row n is slot n."""
    if table is None or not N:
        return [[n] for n in range(N)]
    return [[-1 if slot < 0 or slot == pad_slot_id else slot for slot in row] for row in table.reshape(N, -1).tolist()]


@dataclass(frozen=True)
class PoolSlots:
    """The slots of a call whose index tensors are on the CPU, by sequence; -1: none.

    Attributes:
        start: [N] slot that a sequence starts from; -1: it is skipped.
        read: [N] the same, and -1 where a sequence starts from zero.
        written: [N][W] slots of ``written_states`` for every token, or for the last one.
        checkpoints: [N][M] slots of ``checkpoint_states``.
    """

    start: list[int]
    read: list[int]
    written: list[list[int]]
    checkpoints: list[list[int]]

    @classmethod
    def of(cls, r: Request, lengths: list[int]) -> PoolSlots:
        """``lengths``: tokens of every sequence. Counts of accepted tokens must be right."""
        rows = slot_rows(r.ssm_state_indices, r.N, r.pad_slot_id)
        counts = [1] * r.N if r.num_accepted_tokens is None else r.num_accepted_tokens.tolist()
        start = [row[count - 1] for row, count in zip(rows, counts, strict=True)]
        given = [True] * r.N if r.has_initial_state is None else r.has_initial_state.tolist()

        def reached(table: Tensor | None, every: int) -> list[list[int]]:
            """The slots of the table's columns that a sequence has tokens for, ``every`` so many one."""
            slots = zip(slot_rows(table, r.N, r.pad_slot_id), start, lengths, strict=True)
            ends = [(row, 0 if first < 0 else length // every) for row, first, length in slots]
            return [[*row[:end], *[-1] * (len(row) - end)] for row, end in ends]

        nothing: list[list[int]] = [[] for _ in range(r.N)]
        return cls(
            start,
            [slot if known else -1 for slot, known in zip(start, given, strict=True)],
            [[-1] * len(row) for row in rows] if r.written_states is None else reached(r.written_slots, 1),
            nothing if r.checkpoint_states is None else reached(r.checkpoint_indices, r.checkpoint_every),
        )


def check_slots(r: Request) -> None:
    indices, accepted = r.ssm_state_indices, r.num_accepted_tokens
    _check_reads_and_writes(r)
    _check_records(r)
    expect.int64("pad_slot_id", r.pad_slot_id)
    if indices is None:
        if accepted is not None:
            fail("num_accepted_tokens", "ssm_state_indices [N, 1+S] beside it", "ssm_state_indices=None")
        return
    if r.initial_state is None:
        fail("initial_state", "the pool that ssm_state_indices points into", "None")
    _check_table("ssm_state_indices", indices, r)
    if r.writes_every_token and r.cu_seqlens is None and r.T > r.written_slots.shape[1]:  # type: ignore[union-attr]
        name = "ssm_state_indices" if r.final_state_indices is None else "final_state_indices"
        fail(name, f"a slot for each of the T = {r.T} tokens", shape_of(r.written_slots))  # type: ignore[arg-type]
    if accepted is not None:
        expect.tensor("num_accepted_tokens", accepted, INDEX_DTYPES, r.device)
        expect.shape("num_accepted_tokens", accepted, (r.N,), "[N]")
        if indices.dim() != 2:
            fail("ssm_state_indices", "shape [N, 1+S] beside num_accepted_tokens", shape_of(indices))


def _check_table(name: str, table: Tensor, r: Request) -> None:
    """Check a table of slots, by its metadata."""
    expect.tensor(name, table, INDEX_DTYPES, r.device)
    widths = "[N] or [N, 1]" if r.op == "chunk_kda" else "[N] or [N, 1+S]"
    if table.dim() not in (1, 2) or table.shape[0] != r.N or (table.dim() == 2 and table.shape[1] < 1):
        fail(name, f"shape {widths} with N = {r.N}", shape_of(table))
    if r.op == "chunk_kda" and table.dim() == 2 and table.shape[1] > 1:
        fail(name, f"shape {widths} (one slot a sequence; fused_recurrent_kda takes more)", shape_of(table))


def _check_reads_and_writes(r: Request) -> None:
    """Check which states of a pool are read, and where they are written."""
    fresh, indices, pool = r.has_initial_state, r.final_state_indices, r.final_state_pool
    given = {
        "has_initial_state": fresh is not None, "update_state=False": not r.update_state,
        "final_state_indices": indices is not None, "checkpoint_indices": r.checkpoint_indices is not None,
        "records": r.records is not None,
    }  # fmt: skip
    for name, used in given.items():
        if used and r.ssm_state_indices is None:
            fail("ssm_state_indices", f"slots of a pool beside {name}", "None")
    if fresh is not None:
        expect.tensor("has_initial_state", fresh, (torch.bool,), r.device)
        expect.shape("has_initial_state", fresh, (r.N,), "[N]")
    if not r.update_state and (r.output_final_state or indices is not None):
        name, expected = ("final_state_indices", "None") if indices is not None else ("output_final_state", "False")
        fail(name, f"{expected} beside update_state=False, which computes no final states", "one")
    if indices is not None:
        _check_table("final_state_indices", indices, r)
    _check_checkpoints(r)
    if pool is not None:
        if indices is None:
            fail("final_state_indices", "slots of final_state_pool beside it", "None")
        _check_pool("final_state_pool", pool, r)


def _check_pool(name: str, pool: Tensor, r: Request) -> None:
    """Check a pool that is written, by its metadata."""
    expect.tensor(name, pool, state_dtypes(r), r.device)
    if pool.dim() != 4 or tuple(pool.shape[1:]) != r.state_shape[1:]:
        expected = ", ".join(map(str, r.state_shape[1:]))
        fail(name, f"shape [slots, {expected}], as initial_state", shape_of(pool))
    expect.no_overlap(name, pool)


def _check_records(r: Request) -> None:
    _check_commit(r)
    if r.parents is not None:
        _check_tree(r)
    if r.records is None:
        return
    if r.update_state:
        fail("update_state", "False beside records, which are committed later", "True")
    expect.tensor("records", r.records, (r.compute_dtype,), r.device)
    expect.shape("records", r.records, (r.B, r.T, r.HV, 2 * r.K + r.V), "[B, T, HV, 2K + V]")
    expect.rows("records", r.records)


def _check_tree(r: Request) -> None:
    if r.records is None:
        fail("records", "a tensor beside parents", "None")
    if r.cu_seqlens is not None:
        fail("cu_seqlens", "None beside parents, whose trees are dense", "a tensor")
    expect.tensor("parents", r.parents, INDEX_DTYPES, r.device)
    expect.shape("parents", r.parents, (r.B, r.T), "[N, T]")  # type: ignore[arg-type]
    if r.T > MOST_NODES:
        fail("parents", f"trees of at most {MOST_NODES} tokens", f"T = {r.T}")


def _check_commit(r: Request) -> None:
    """The checks of a commit that a call begins with."""
    if r.commit_path is not None and r.commit is None:
        fail("commit", "a tensor beside commit_path", "None")
    if (r.commit is None) != (r.num_committed is None):
        fail("commit" if r.commit is None else "num_committed", "a tensor beside the other of the two", "None")
    if r.commit is None:
        return
    for name, needed in (("records", r.records), ("ssm_state_indices", r.ssm_state_indices)):
        if needed is None:
            fail(name, "a tensor beside commit", "None")
    if r.cu_seqlens is not None:
        fail("cu_seqlens", "None beside commit, whose records are dense (commit_kda takes packed ones)", "a tensor")
    expect.tensor("num_committed", r.num_committed, INDEX_DTYPES, r.device)
    expect.shape("num_committed", r.num_committed, (r.N,), "[N]")  # type: ignore[arg-type]
    expect.tensor("commit", r.commit, (r.compute_dtype,), r.device)
    if r.commit.dim() != 4 or (r.commit.shape[0], *r.commit.shape[2:]) != (r.N, r.HV, 2 * r.K + r.V):
        fail("commit", f"shape [N, T', HV, 2K + V] = [{r.N}, T', {r.HV}, {2 * r.K + r.V}]", shape_of(r.commit))
    expect.rows("commit", r.commit)
    if r.commit_path is not None:
        _check_rows("commit_path", r.commit_path, r.N, r.device)
    slots = r.ssm_state_indices
    if slots.dim() == 2 and slots.shape[1] > 1:  # type: ignore[union-attr]
        fail("ssm_state_indices", "shape [N] or [N, 1] beside commit", shape_of(slots))  # type: ignore[arg-type]


def _check_rows(name: str, table: Tensor, N: int, device: torch.device, fewest: int = 1) -> None:
    """Check a table of slots or tokens [N, M], by its metadata."""
    expect.tensor(name, table, INDEX_DTYPES, device)
    if table.dim() != 2 or table.shape[0] != N or table.shape[1] < fewest:
        fail(name, f"shape [N, M] with N = {N}", shape_of(table))


def check_commit(r: CommitRequest) -> None:
    """The checks of ``commit_kda``, by metadata."""
    expect.flag("state_v_first", r.state_v_first)
    expect.int64("pad_slot_id", r.pad_slot_id)
    expect.tensor("pool", r.pool, (*STATE_DTYPES, torch.float64))
    if r.pool.dim() != 4:
        fail("pool", f"shape [slots, HV, {'V, K' if r.state_v_first else 'K, V'}]", shape_of(r.pool))
    expect.no_overlap("pool", r.pool)
    expect.tensor("records", r.records, (torch.float32, torch.float64), r.device)
    if r.records.dim() != 4 or tuple(r.records.shape[2:]) != (r.HV, 2 * r.K + r.V):
        expected = f"shape [B, T, HV, 2K + V] = [B, T, {r.HV}, {2 * r.K + r.V}] beside this pool"
        fail("records", expected, shape_of(r.records))
    expect.rows("records", r.records)
    if r.pool.dtype == torch.float64 and r.records.dtype != torch.float64:
        raise TypeError("records: expected dtype float64, as the pool has, got float32")
    if r.cu_seqlens is not None:
        expect.tensor("cu_seqlens", r.cu_seqlens, INDEX_DTYPES, r.device)
        if r.cu_seqlens.dim() != 1 or r.cu_seqlens.shape[0] < 1:
            fail("cu_seqlens", "shape [N+1]", shape_of(r.cu_seqlens))
        if r.records.shape[0] != 1:
            fail("records", "B = 1 with cu_seqlens", shape_of(r.records))
    for name in ("num_accepted", "state_indices"):
        expect.tensor(name, getattr(r, name), INDEX_DTYPES, r.device)
        expect.shape(name, getattr(r, name), (r.N,), "[N]")
    if r.path is not None:
        _check_rows("path", r.path, r.N, r.device)


def check_commit_values(
    r: CommitRequest, counts: str = "num_accepted", slots: str = "state_indices", path: str = "path"
) -> None:
    """The checks of the values of index tensors that are on the CPU; ``counts``, ``slots``, ``path``: their names."""
    if not r.state_indices.is_cpu:
        return
    lengths = [r.T] * r.N
    if r.cu_seqlens is not None:
        bounds = r.cu_seqlens.tolist()
        if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > r.T:
            fail("cu_seqlens", f"values from 0 that do not decrease, up to T = {r.T} at most", f"{bounds}")
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
    owner: dict[int, int] = {}
    rows = zip(r.num_accepted.tolist(), slot_rows(r.state_indices, r.N, r.pad_slot_id), lengths, strict=True)
    for n, (count, (slot,), length) in enumerate(rows):
        if slot < 0:
            continue
        _check_slot(slots, slot, r.pool.shape[0])
        _check_owner(slots, slot, owner.setdefault(slot, n), n)
        most, of = (length, "tokens") if r.path is None else (r.path.shape[1], f"columns of {path}")
        if not 0 <= count <= most:
            fail(counts, f"values from 0 to {most}, the {of} of sequence {n}", f"{count}")
        taken = [] if r.path is None else r.path[n, :count].tolist()
        if not all(0 <= token < length for token in taken):
            fail(path, f"tokens from 0 to {length - 1} of sequence {n}", f"{taken}")
    if r.memo is None or check_commit_values not in r.memo:
        expect.own_memory(vars(r), r.written)
        if r.memo is not None:
            r.memo[check_commit_values] = True


def _check_checkpoints(r: Request) -> None:
    indices, every = r.checkpoint_indices, r.checkpoint_every
    expect.int64("checkpoint_every", every)
    if indices is None:
        for name, used in (("checkpoint_every", every != 0), ("checkpoint_pool", r.checkpoint_pool is not None)):
            if used:
                fail("checkpoint_indices", f"slots [N, M] beside {name}", "None")
        return
    _check_rows("checkpoint_indices", indices, r.N, r.device, fewest=0)
    least, beside = CHECKPOINT_ROWS, ""
    if r.return_intermediate_states:
        least, beside = r.chunk_size, ", which is chunk_size, beside intermediate states"
    if every < 1 or every % least:
        fail("checkpoint_every", f"a positive multiple of {least}{beside}", f"{every}")
    if r.checkpoint_pool is not None:
        _check_pool("checkpoint_pool", r.checkpoint_pool, r)
    elif r.written_states is None:
        fail("checkpoint_pool", "a pool beside update_state=False", "None")


@functools.lru_cache(maxsize=64)
def _are_slots_of_their_own(slots: tuple[int, ...], pool_size: int, pad_slot_id: int) -> bool:
    """Whether every sequence has one slot within the pool and none is skipped."""
    return len(set(slots)) == len(slots) and 0 <= min(slots) <= max(slots) < pool_size and pad_slot_id not in slots


def check_slot_values(r: Request, bounds: list[int] | None) -> None:
    indices, accepted, pool = r.ssm_state_indices, r.num_accepted_tokens, r.initial_state
    if r.parents is not None and r.parents.is_cpu:
        for n, row in enumerate(r.parents.tolist()):
            for t, parent in enumerate(row):
                if parent >= t:
                    fail("parents", f"a token before token {t} of sequence {n}, or -1", f"{parent}")
    if indices is None or pool is None or not indices.is_cpu:
        return
    if r.commit is not None:
        check_commit_values(r.committing(), "num_committed", "ssm_state_indices", "commit_path")
        r = r.after_commit()
    target, final = r.written_slots, r.final_state_indices
    if final is None and indices.numel() == r.N and accepted is None and r.checkpoint_indices is None:
        # Decoding runs this once a token and layer: accept valid slots without skipped rows from a cache.
        firsts = (indices if indices.dim() == 1 else indices[:, 0]).tolist()
        if not firsts or _are_slots_of_their_own(tuple(firsts), pool.size(0), r.pad_slot_id):
            return
    every_token, name = r.writes_every_token, "ssm_state_indices" if final is None else "final_state_indices"
    lengths = [r.T] * r.N if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
    if every_token and max(lengths, default=0) > target.shape[1]:  # type: ignore[union-attr]
        longest = max(lengths)
        fail(name, f"a slot for each of the {longest} tokens of the longest sequence", shape_of(target))  # type: ignore[arg-type]
    most = 1 if indices.dim() == 1 else indices.shape[1]
    for count in [] if accepted is None else accepted.tolist():
        if not 1 <= count <= most:
            fail("num_accepted_tokens", f"values from 1 to {most}", f"{count}")
    # The slots of an empty sequence are checked, too.
    slots = PoolSlots.of(r, [max(1, length) for length in lengths])
    # By pool and slot; a sequence may write what it alone reads.
    owner: dict[tuple[str, int], int] = {}
    for n, (start, written, kept) in enumerate(zip(slots.start, slots.written, slots.checkpoints, strict=True)):
        if start < 0:
            continue
        _check_slot("ssm_state_indices", start, pool.shape[0])
        states = [(name, r.written_states, slot) for slot in written]
        states += [("checkpoint_indices", r.checkpoint_states, slot) for slot in kept]
        own: set[tuple[str, int]] = set()
        for table, where, slot in states:
            if where is None or slot < 0:
                continue
            _check_slot(table, slot, getattr(r, where).shape[0])
            _check_owner(table, slot, owner.setdefault((where, slot), n), n)
            if (where, slot) in own:
                fail(table, "different slots for the states of a sequence", f"slot {slot} twice in row {n}")
            own.add((where, slot))
    for n, slot in enumerate(slots.read):
        _check_owner(name, slot, owner.get(("initial_state", slot), n), n)


def _check_slot(name: str, slot: int, size: int) -> None:
    if slot >= size:
        fail(name, f"slots below {size}, the size of the pool", f"{slot}")


def _check_owner(name: str, slot: int, owner: int, n: int) -> None:
    """Refuse a slot that sequence ``owner`` writes and ``n`` reads or writes."""
    if owner != n:
        fail(name, "every slot in one sequence only, if it is written", f"slot {slot} in rows {owner} and {n}")

"""Which slots of its pools a call reads and writes; the oracle in ``kda_core.reference`` has a rule of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kda_core.request import Request


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

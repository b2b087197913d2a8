"""Calls of the public functions as data, and tensors in poisoned memory."""

from __future__ import annotations

import ctypes
import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core._bind import bind
from kda_core._pool_checks import PoolSlots
from kda_core.reference import sequence_bounds
from kda_core.request import DATA, Request
from kda_core.testing.finite import live_rows, padding_faults

GUARD = 512  # Poisoned elements before and behind every input: more than any tile's reach past an end

POISON = {torch.int32: 2**30, torch.int64: 2**30}
"""Poison around index tensors: an index that no pool and no sequence has. Around others: NaN."""


def indices(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    """Slots, counts or rows of them."""
    return torch.tensor(values, dtype=dtype)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a public function, with its tensors on the CPU."""

    op: str  # "chunk_kda" or "fused_recurrent_kda"
    tensors: dict[str, Tensor]  # every tensor argument that is given, by name
    options: dict[str, Any] = field(default_factory=dict)  # every other argument that is given, by name
    grads: dict[str, Tensor] = field(default_factory=dict)  # of "o" and "final_state"; empty: forward only
    # Names of tensors, "grad_o", "grad_final_state" and "out" too, to be passed as slices of wider ones.
    strided: frozenset[str] = frozenset()
    given_out: bool = False  # pass a buffer full of NaN as ``out``
    name: str = ""  # for messages

    def having(self, **changes: Any) -> Call:
        """The call with some arguments changed; None takes a tensor out."""
        tensors, options = dict(self.tensors), dict(self.options)
        for name, value in changes.items():
            tensors.pop(name, None)
            options.pop(name, None)
            if isinstance(value, Tensor):
                tensors[name] = value
            elif value is not None:
                options[name] = value
        return replace(self, tensors=tensors, options=options)

    @property
    def has_pool(self) -> bool:
        """Whether the call advances states in place."""
        return "ssm_state_indices" in self.tensors or self.options.get("inplace_final_state", False)

    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        cu = self.tensors.get("cu_seqlens")
        B, T = self.tensors["q"].shape[:2]
        return [T] * B if cu is None else cu.diff().tolist()

    def slots(self) -> PoolSlots:
        """The slots that the call reads and writes."""
        return PoolSlots.of(self.request(), self.lengths())

    def advanced_sequences(self) -> list[int]:
        """The sequences whose states in the pool the call reads and writes: none that is skipped or has no token."""
        starts = zip(self.slots().start, self.lengths(), strict=True)
        return [n for n, (start, length) in enumerate(starts) if start >= 0 and length]

    def written_slots(self) -> list[int]:
        """The slots of the pool that the call writes, in order of sequence and token."""
        return [slot for row in self.slots().written for slot in row if slot >= 0]

    def checkpoint_slots(self) -> list[int]:
        """The slots that the call's checkpoints are written to, in order of sequence and token."""
        if "checkpoint_indices" not in self.tensors:
            return []
        size = self.tensors[self.request().checkpoint_states or "checkpoint_pool"].shape[0]
        return [slot for row in self.slots().checkpoints for slot in row if 0 <= slot < size]

    def slots_of(self, name: str) -> list[int]:
        """All slots of a pool that the call writes, by the name of its argument."""
        request = self.request()
        slots = self.written_slots() if request.written_states == name else []
        return slots + (self.checkpoint_slots() if request.checkpoint_states == name else [])

    def without_pool(self) -> Call:
        """The call on the states that its sequences start from; a skipped one starts from zero."""
        if not self.has_pool:
            return self
        pool, read = self.tensors["initial_state"], torch.tensor(self.slots().read, dtype=torch.long)
        dense = torch.where((read < 0)[:, None, None, None], 0, pool[read.clamp_min(0)])
        names = ("ssm_state_indices", "num_accepted_tokens", "inplace_final_state", "out", "has_initial_state")
        gone = dict.fromkeys((*names, "update_state", "final_state_indices", "final_state_pool"))
        gone |= dict.fromkeys(("checkpoint_indices", "checkpoint_every", "checkpoint_pool", "records", "parents"))
        call = self.having(initial_state=dense, **gone)
        return call if "parents" not in self.tensors else call.with_sequences(self.request().branches())

    def with_sequences(self, rows: list[tuple[int, list[int]]]) -> Call:
        """The call's tokens as packed sequences: (number of a sequence, its tokens) of each."""
        data = {name: self.packed(self.tensors[name], rows) for name in DATA}
        lengths = torch.tensor([0, *(len(tokens) for _, tokens in rows)])
        owner = torch.tensor([n for n, _ in rows], dtype=torch.long)
        states = self.tensors["initial_state"][owner]
        return self.having(**data, cu_seqlens=lengths.cumsum(0), initial_state=states)

    def packed(self, t: Tensor, rows: list[tuple[int, list[int]]]) -> Tensor:
        """The rows of these tokens, one sequence behind the other, of a tensor [B, T, ...] beside the call."""
        bounds = sequence_bounds(self.request())
        index = [(bounds[n][0], bounds[n][1] + t) for n, tokens in rows for t in tokens]
        of_row, token = torch.tensor(index, dtype=torch.long, device="cpu").reshape(-1, 2).unbind(1)
        return t[of_row, token][None]

    def in_pool(self, indices: Tensor, slots: int, accepted: Tensor | None = None) -> Call:
        """The call on a pool of that many slots, full of NaN but for the states that its sequences start from."""
        states = self.tensors["initial_state"]
        pool = torch.full((slots, *states.shape[1:]), float("nan"), dtype=states.dtype)
        call = self.having(initial_state=pool, ssm_state_indices=indices, num_accepted_tokens=accepted)
        for n, slot in enumerate(call.slots().read):
            if slot >= 0:
                pool[slot] = states[n]
        return call.forward_only()

    def written_elsewhere(self, indices: Tensor, slots: int = 0, dtype: torch.dtype | None = None) -> Call:
        """The call with its states written to other slots; with ``slots``, of a pool of that many, full of NaN."""
        states = self.tensors["initial_state"]
        pool = states.new_full((slots, *states.shape[1:]), float("nan"), dtype=dtype) if slots else None
        return self.having(final_state_indices=indices, final_state_pool=pool)

    def recorded(self) -> Call:
        """The call with records, in a buffer full of NaN."""
        r = self.request()
        shape = (r.B, r.T, r.HV, 2 * r.K + r.V)
        return self.having(records=torch.full(shape, float("nan"), dtype=r.compute_dtype))

    def computed_rows(self) -> Tensor:
        """[B, T] bool: the tokens of sequences that are not skipped."""
        return live_rows(self.request(), [slot < 0 for slot in self.slots().start])

    def faults(self, results: dict[str, Tensor]) -> list[str]:
        """Sentences about results that take no arithmetic, and so must be exact.

        Rows of no sequence, or of a skipped one, are zero. A sequence without tokens passes its state on, and its
        final state's gradient.
        """
        live, found = self.computed_rows(), []
        for name in results.keys() & {"o", "dq", "dk", "dv", "dg", "dbeta"}:
            found += padding_faults(name, results[name], live)
        empty = [n for n, length in enumerate(self.lengths()) if not length]
        states = {} if self.has_pool else {"final_state": self.tensors.get("initial_state")}
        for name, given in (states | {"dinitial_state": self.grads.get("final_state")}).items():
            if name not in results:
                continue
            passed = results[name][empty]
            if passed.any() if given is None else not same_bits(passed, given[empty]):
                found.append(f"{name}: a sequence without tokens must pass on what it is given, bit for bit")
        return found

    def decoding(self) -> Call:
        """The same sequences for ``fused_recurrent_kda``, which has no chunks."""
        chunked = ("chunk_size", "safe_gate", "disable_recompute", "return_intermediate_states", "cu_seqlens_cpu")
        return replace(self.having(**dict.fromkeys((*chunked, "batch_invariant"))), op="fused_recurrent_kda")

    def forward_only(self) -> Call:
        """The call without its backward."""
        return replace(self, grads={})

    def slice_tokens(self, start: int, end: int) -> Call:
        """Tokens ``start`` to ``end`` of a dense call, forward only."""
        parts = {n: self.tensors[n][:, start:end].contiguous() for n in DATA}
        return replace(self.forward_only(), tensors=self.tensors | parts)

    def request(self) -> Request:
        """The request that the public function makes of this call."""
        with torch.no_grad():
            return replace(bind(self.op, self.tensors | self.options), save_for_backward=bool(self.grads))

    def digest(self) -> str:
        """A key of everything that decides the result."""
        h = hashlib.sha256(repr((self.op, sorted(self.options.items()))).encode())
        for kind, tensors in (("", self.tensors), ("d", self.grads)):
            for name in sorted(tensors):
                t = tensors[name].detach().cpu().contiguous()
                h.update(f"{kind}{name}{t.dtype}{tuple(t.shape)}".encode())
                # Without NumPy, which neither torch nor the kit needs.
                h.update(ctypes.string_at(t.data_ptr(), t.nbytes))
        return h.hexdigest()

    def __call__(self, tensors: dict[str, Tensor], backend: str) -> tuple:
        """Make the call on these tensors."""
        return getattr(kda_core, self.op)(**tensors, **self.options, backend=backend)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal bit for bit, NaN included."""
    same_kind = a.shape == b.shape and a.dtype == b.dtype
    return same_kind and (not a.numel() or torch.equal(_bytes(a), _bytes(b)))


def _bytes(t: Tensor) -> Tensor:
    # A contiguous tensor may have any stride along an axis of one element; a view as bytes needs stride 1.
    return t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8)


def _widened(shape: tuple[int, ...]) -> list[int]:
    """The shape of the tensor that a strided one of this shape is a slice of."""
    if len(shape) < 2:
        return [*shape, 2]
    return [*shape[:-2], shape[-2] + 1, 2 * shape[-1] + 3]


def _sliced(wide: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The part of that shape of a tensor of shape ``_widened(shape)``."""
    if len(shape) < 2:
        return wide[..., 0]
    return wide[..., : shape[-2], : shape[-1]]


def placed(t: Tensor, device: torch.device, strided: bool = False) -> Tensor:
    """A copy of ``t`` on ``device`` inside a larger, poisoned buffer.

    Args:
        strided: make it a slice of a tensor whose last two axes are wider (as q is of a fused projection), or a column
            of a matrix.
    """
    shape = _widened(t.shape) if strided else list(t.shape)
    size, poison = math.prod(shape), POISON.get(t.dtype, float("nan"))
    buffer = torch.empty(size + 2 * GUARD, dtype=t.dtype, device=device).fill_(poison)
    view = buffer[GUARD : GUARD + size].view(shape)
    return (_sliced(view, t.shape) if strided else view).copy_(t)


def slice_is_strided(shape: tuple[int, ...]) -> bool:
    """Whether ``placed(..., strided=True)`` of that shape is no contiguous tensor: a slice of one element is."""
    return not _sliced(torch.empty(_widened(shape), device="meta"), shape).is_contiguous()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, strided: bool = False) -> Tensor:
    """An output buffer full of NaN, with poisoned memory around it."""
    return placed(torch.full(shape, float("nan"), dtype=dtype), device, strided)


def guards(t: Tensor) -> Tensor:
    """The bytes of the whole buffer that a placed tensor lies in."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())

"""Contexts: which rows of which sequences the ranks of a group hold, as tables on the device."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kda_core import _expect
from kda_core._checks import python_value
from kda_core._expect import fail
from kda_core._torch_private import cat
from kda_core.distributed._cells import GRID, Cells, moved, on_grid
from kda_core.distributed._exchange import resolve_group
from kda_core.distributed._layout import LAYOUTS, Fragment, Layout, Range, joined, split, tables
from kda_core.distributed._shared import Shared


class ContextParallel:
    """Sequences whose rows lie on several ranks; made by ``build_cp_context``.

    Attributes:
        group_name: the process group's name in torch.
        rank, size: this rank in the group, and the number of ranks.
        sequences: N, of all ranks.
        batch, rows: B and T of the tensors that this rank passes.
        ranges: this rank's ranges of global rows, of each of the B; None in a context of fla's.
        layout: that of all ranks, with all B side by side; None in a context of fla's.
        cu_seqlens: [F + 1] int64 on the device: boundaries of this rank's fragments within its rows; the last ones may
            be empty. ``cu_seqlens_cpu``: a copy on the CPU.
        conv1d_kernel_size, gather: as given.
        dense: F where all fragments have the same number of rows for good, or 0.
        fragments: [5, F + 1] int64 on the device: ``cu_seqlens``; the sequence that a fragment begins; the one that it
            ends, or N; the slot that it receives from, or where chains may be longer than one its own, forward and
            backward.
        slots: int64 on the device, a column for each range of the rank that has most: the fragment that is sent forward
            and backward; the one that is received for, or F; rows of slots to join forward, from the beginning of the
            sequence on, and the others to join backward, from its end on. Slots of all ranks count through; W times
            their number stands for none.
        tails, sources: int64 on the device, for ``conv_halo``: the last rows of each of our slots, and for each slot of
            all ranks the places of the rows ahead among the tails of all.
        cells: the tables of calls with ``deterministic_degree``, or None.
        shared: all this as operators take it.
        kinds: all that checks and choices ask of a context, without states and with them; memos keep it. None: they ask
            for more.
    """

    def __init__(self, group: Any, batch: int, rows: int, sequences: int, gather: bool) -> None:
        self.group_name = group.group_name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.batch, self.rows, self.sequences, self.gather = batch, rows, sequences, gather
        self.conv1d_kernel_size: int | None = None
        self.dense = 0
        self.layout: Layout | None = None
        self.states = True
        self.ranges: list[Range] | None = None
        self.given: dict[str, Any] = {}
        self.cells: Cells | None = None
        self.kinds: tuple[str, str] | None = None
        self._values: Tensor | None = None

    @property
    def group(self) -> Any:
        """The process group, which a context does not keep alive: threads that outlive it may end the interpreter."""
        return resolve_group(self.group_name)

    def fill(
        self, slots: list[list[Fragment]], chains: list[tuple[list[int], list[int]]], longest: tuple[int, int],
        most: int, device: Any, tails: tuple[list[int], list[int]] = ([], []),
    ) -> None:  # fmt: skip
        """Set the tables of slots with these fragments and ``Layout.chains``; ``most``: F; ``tails``: ``Layout.tails``.

        ``longest`` are lengths of chains ahead and behind.
        """
        F, none = most, self.size * len(slots)
        received = [[[none] * (n - len(c)) + c for n, c in zip(longest, chain, strict=True)] for chain in chains]
        # A chain of one slot is not joined: that slot's additions are the state.
        sources = [[slot if len(own) > 1 else (*own, none)[0] for own in both] for slot, both in enumerate(received)]
        by_fragment, edges = tables(slots, F, self.sequences, sources, none)
        columns = [[*edge, *own[0], *own[1]] for edge, own in zip(edges, received, strict=True)]
        by_slot = [x for row in zip(*columns, strict=True) for x in row]
        self._values, host, parts = moved((by_fragment, by_slot, *tails), self._values, device)
        self.cu_seqlens_cpu = host[: F + 1]
        self.fragments, self.slots = parts[0].view(5, F + 1), parts[1].view(-1, len(slots))
        self.tails, self.sources = parts[2].view(len(slots), -1), parts[3].view(none, -1)
        # Chains of other boundaries may be shorter.
        padded = not self.dense or any(none in column[4:] for column in columns)
        shared = Shared(
            self.fragments, self.slots, None, self.group_name, longest[0], self.sequences, self.dense, self.gather,
            padded, 0, (),
        )  # fmt: skip
        g = self.cells
        if g is not None:
            shared = shared._replace(
                fragments=g.fragments, slots=g.slots, chain=g.chain, before=0, dense=g.dense, grid=g.grid, cells=g.own
            )
        self.shared = shared.with_tables()
        shapes = tuple(self.fragments.shape), tuple(self.slots.shape), self.dense, str(self.device)
        asked = self.size, self.batch, self.rows, self.states, shapes
        self.kinds = None if g else (str(asked), str((asked, self.sequences)))

    @property
    def cu_seqlens(self) -> Tensor:
        return self.fragments[0]

    @property
    def call_cu_seqlens_cpu(self) -> Tensor:
        """The boundaries that ``chunk_kda`` takes: [F + 1], or [P, F + 1] of cells."""
        return self.cu_seqlens_cpu if self.cells is None else self.cells.cu_seqlens_cpu

    @property
    def device(self) -> torch.device:
        return self.fragments.device

    def local(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a whole tensor [B, T, ...], or of any tensor along ``dim``."""
        if self.ranges is None:
            raise ValueError("local: a context of fla's does not know the rows of its rank")
        parts = [x.narrow(dim, a, b - a) for a, b in self.ranges]
        return cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def refresh(self, cu_seqlens: Tensor | Sequence[int]) -> None:
        """Take other boundaries of as many sequences; a captured CUDA graph then serves those when it is replayed.

        Raises:
            ValueError: a context without ``cu_seqlens``, another number of sequences, or more fragments than the
                tables have places for (see ``fragments`` of ``build_cp_context``).
        """
        if self.dense or self.layout is None:
            raise ValueError("refresh: expected a context that was made with cu_seqlens")
        bounds = _bounds(cu_seqlens)
        if len(bounds) != self.sequences + 1:
            fail("cu_seqlens", f"{self.sequences} sequences as before", f"{len(bounds) - 1}")
        _fill(self, Layout(bounds, self.layout.ranges, self.rank), self.fragments.shape[1] - 1, self.device)

    def verify(self) -> None:
        """Check that all ranks have made the same context; a collective call, for debugging.

        Raises:
            ValueError: on every rank, with what differs.
        """
        if self.layout is None:
            return
        own = {"cu_seqlens": self.layout.bounds, "ranges": self.layout.ranges, "batch": self.batch, **self.given}
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, own, group=self.group)
        for name, (r, theirs) in itertools.product(own, enumerate(every)):
            if theirs[name] != every[0][name]:
                fail(name, "the same on all ranks", f"{every[0][name]} on rank 0 and {theirs[name]} on rank {r}")

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.size}, {self.sequences} sequences, {self.rows} rows here)"


def build_cp_context(
    cu_seqlens: Any = None,
    group: Any = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    layout: str | Sequence[Sequence[Range]] = "contiguous",
    tokens: int | None = None,
    batch: int = 1,
    gather: bool = False,
    fragments: int | None = None,
    device: torch.device | str | None = None,
    deterministic_degree: bool = False,
    grid: int | None = None,
) -> ContextParallel:
    """Describe sequences whose rows lie on several ranks, for ``chunk_kda(..., cp_context=...)``.

    Local: no rank waits for another. Every rank of the group makes it with the same arguments (``verify`` checks that).

    Args:
        cu_seqlens: [N + 1] *global* boundaries of packed sequences, over all ranks, a tensor or integers (B = 1); None:
            ``batch`` sequences of ``tokens`` rows, each of them laid out alike. A context of fla's is converted.
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        conv1d_kernel_size: taps of a layer's short convolution, for ``conv_halo``.
        cu_seqlens_cpu: a copy of ``cu_seqlens`` on the CPU; without it values on a device are read back.
        layout: "contiguous"; "zigzag", where rank r of W holds parts r and 2 W - 1 - r of 2 W; or for every rank a list
            of its ranges (start, end) of global rows, of any lengths, in the order of its tensors. Parts differ by a
            row where they do not divide evenly. Ranks may be empty.
        tokens: number of global rows (of each sequence without ``cu_seqlens``); None: the last boundary. Rows behind
            that belong to no sequence.
        batch: B, without ``cu_seqlens``.
        gather: give every rank all final states, in one more collective; otherwise the rank that holds the end of a
            sequence has its final state, and others have zeros.
        fragments: places of the tables, F; None: the fragments of this rank (of the cell that has most), rounded up to
            a power of two. With equal F contexts of other lengths need no recompilation.
        device: of the tables; None: that of ``cu_seqlens``, or of the group's accelerator.
        deterministic_degree: results and gradients have the same bits for every number of ranks. Every rank calls the
            backend once for each cell of ``grid`` rows, and all cells' summaries are exchanged. The gradients of
            ``A_log`` and ``dt_bias`` are summed over ranks already: the first rank has them, others have zeros.
        grid: rows of a cell, with ``deterministic_degree``: ranges begin and end at multiples of it. None: 4,096.

    Returns:
        A context for any number of calls and layers.

    Raises:
        ValueError: torch.distributed is not initialised, a group without this process, boundaries that decrease, ranges
            that overlap, leave rows out or cut a cell, too few ``fragments``, ``grid`` without
            ``deterministic_degree``.
        TypeError: an argument of another type.
    """
    if is_fla_context(cu_seqlens):
        return from_fla(cu_seqlens)
    process_group = _process_group(group)
    ranks = dist.get_world_size(process_group)
    batch, tokens, fragments = _size("batch", batch), _size("tokens", tokens, 0), _size("fragments", fragments)
    conv1d_kernel_size, grid = _size("conv1d_kernel_size", conv1d_kernel_size), _size("grid", grid)
    gather, deterministic_degree = map(python_value, (gather, deterministic_degree))
    _expect.flag("gather", gather)
    _expect.flag("deterministic_degree", deterministic_degree)
    if grid is not None and not deterministic_degree:
        fail("grid", "None without deterministic_degree=True", f"{grid}")
    if cu_seqlens is None:
        if tokens is None:
            fail("tokens", "a number of rows where there is no cu_seqlens", "None")
        bounds = [tokens * b for b in range(batch + 1)]
    else:
        if batch != 1:
            fail("batch", "1 with cu_seqlens (sequences are packed)", f"{batch}")
        bounds = _bounds(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    total = bounds[-1] // batch if tokens is None else tokens
    ranges = [joined(own) for own in _ranges(layout, total, ranks)]
    every = [[(a + total * b, e + total * b) for b in range(batch) for a, e in own] for own in ranges]
    found = Layout(bounds, every, dist.get_rank(process_group))
    c = ContextParallel(process_group, batch, found.rows // batch, len(bounds) - 1, gather)
    c.conv1d_kernel_size = conv1d_kernel_size
    if deterministic_degree:
        grid = GRID if grid is None else grid
        dense = batch if cu_seqlens is None and total else 0
        c.cells = Cells(on_grid(ranges, total, grid), c.rank, grid, total, batch, dense, dense or fragments)
        fragments = fragments and fragments * len(c.cells.own)
    c.given, c.ranges = {"tokens": total, "gather": gather, "grid": grid}, ranges[c.rank]
    each = {f.end - f.start for f in found.fragments}
    count = len(found.fragments)
    if cu_seqlens is None and len(each) == 1 and count == found.slots * (found.rows > 0):
        c.dense = count
    elif fragments is None:
        fragments = 1 << max(count - 1, 0).bit_length()
    _fill(c, found, c.dense or fragments or 1, _device(device, cu_seqlens, process_group))
    return c


def _fill(c: ContextParallel, layout: Layout, most: int, device: torch.device) -> None:
    if c.cells is not None:
        c.cells.fill(layout.bounds, device)
    if len(layout.fragments) > most:
        fail("fragments", f"at least {len(layout.fragments)} for rank {c.rank}", f"{most}")
    chains = [*map(layout.chains, range(layout.slots))]
    longest = layout.longest()  # so that other boundaries give tables of the same size
    if c.dense:
        longest = max(len(ahead) for ahead, _ in chains), max(len(behind) for _, behind in chains)
    c.layout = layout
    taps = c.conv1d_kernel_size
    c.fill(layout.of_slot, chains, longest, most, device, layout.tails(taps - 1) if taps else ([], []))


def _size(name: str, value: Any, least: int = 1) -> Any:
    value = python_value(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        fail(name, f"a number of at least {least}", f"{value!r}")
    return value


def _bounds(cu_seqlens: Any) -> list[int]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            fail("cu_seqlens", "[N + 1] int32 or int64", f"{list(cu_seqlens.shape)} {cu_seqlens.dtype}")
        return cu_seqlens.tolist()
    if not isinstance(cu_seqlens, Sequence) or isinstance(cu_seqlens, str):
        raise TypeError(f"cu_seqlens: expected a tensor or integers, got {type(cu_seqlens).__name__}")
    return [_integer("cu_seqlens", x) for x in cu_seqlens]


def _integer(name: str, value: Any) -> int:
    """Not ``int``, which cuts a fraction off."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected integers, got {value!r}") from None


def _ranges(layout: Any, rows: int, ranks: int) -> Sequence[Sequence[Range]]:
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            fail("layout", f"{', '.join(LAYOUTS)} or ranges for every rank", f"{layout!r}")
        return split(layout, rows, ranks)
    if not isinstance(layout, Sequence) or len(layout) != ranks:
        found = f"{len(layout)}" if isinstance(layout, Sequence) else f"{layout!r}"
        fail("layout", f"a list of ranges for each of {ranks} ranks", found)
    ranges = [[(_integer("layout", a), _integer("layout", b)) for a, b in own] for own in layout]
    end = max((b for own in ranges for _, b in own), default=0)
    if end != rows and rows:
        fail("layout", f"ranges of {rows} rows", f"ranges that end at {end}")
    return ranges


def _process_group(group: Any) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        start = "start the processes with torchrun and call torch.distributed.init_process_group first"
        fail("group", f"torch.distributed to be initialised ({start})", "no process group")
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            fail("group", "a DeviceMesh of one dimension (mesh['cp'])", f"{group.ndim} dimensions")
        group = group.get_group()
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        fail("group", "a process group that holds this process, or a DeviceMesh", f"{group!r}")
    return found


def _device(device: Any, cu_seqlens: Any, group: Any) -> torch.device:
    if device is not None:
        found = torch.device(device)
    elif isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type != "cpu":
        found = cu_seqlens.device
    else:
        accelerator = torch.accelerator.current_accelerator() if dist.get_backend(group) != "gloo" else None
        found = accelerator or torch.device("cpu")
    if found.type != "cpu" and found.index is None:
        found = torch.device(found.type, torch.accelerator.current_device_index())
    return found


def is_fla_context(value: Any) -> bool:
    return type(value).__name__ == "FLACPContext" and type(value).__module__.partition(".")[0] == "fla"


def from_fla(theirs: Any) -> ContextParallel:
    """The same as a context of ours; fla's have neither initial nor final states."""
    group = _process_group(theirs.group)
    bounds = (theirs.cu_seqlens if theirs.cu_seqlens_cpu is None else theirs.cu_seqlens_cpu).tolist()
    c = ContextParallel(group, 1, bounds[-1], 0, False)
    c.conv1d_kernel_size, c.states = theirs.conv1d_kernel_size, False
    W, r = c.size, c.rank
    rows = [*itertools.pairwise(bounds)]
    if theirs.layout == "contiguous":
        ranges, places = [rows], [r]
        pre, post = [theirs.pre_num_ranks], [theirs.post_num_ranks]
    else:
        front = theirs.front_num_seqs
        ranges, places = [rows[:front], rows[front:]], [r, 2 * W - 1 - r]
        pre, post = theirs.pre_num_ranks_by_part, theirs.post_num_ranks_by_part
    parts = len(places)

    def slots(places: range) -> list[int]:
        return [p * parts if p < W else (2 * W - 1 - p) * parts + 1 for p in places]

    every = [*zip(ranges, places, pre, post, strict=True)]
    chains = [(slots(range(p - n, p)), slots(range(p + m, p, -1))) for _, p, n, m in every]
    # Read of these: whether the first one begins its sequence, and whether the last one ends it.
    cut = [[Fragment(0, a, b, not n, not m) for a, b in own] for own, _, n, m in every]
    c.fill(cut, chains, (max(places), W * parts - 1 - min(places)), len(rows), theirs.cu_seqlens.device)
    return c

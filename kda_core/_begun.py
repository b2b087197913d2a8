"""Results and tables of hooks in halves; ``request`` has them for backends."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Begun(NamedTuple):
    """Result of the first half of a forward or a backward: what each fragment does to a state that it is not yet told.

    A fragment is a run of rows of one sequence. A request for halves has ``cp_context=True`` and F = N fragments as its
    sequences: packed (any lengths, also 0), or B dense ones. It has no ``initial_state``, ``grad_final_state``, ``out``
    nor pool: states and their gradients enter as ``starts`` and ``ends``. States are K first, in ``compute_dtype``.

    Attributes:
        matrices: M [F, HV, K, K], contiguous. Forward: S_end = M @ S_start + b. Backward: dS_start = M @ dS_end + b,
            and None stands for the transposed matrices of the forward of the same fragments, which the core has kept.
        additions: b [F, HV, K, V], contiguous. A fragment without rows has M = I and b = 0. A forward may give None,
            and [M | b] as ``matrices``, [F, HV, K, K + V], which needs no copy before it is sent.
        kept: for the second half of the same direction, which may write into these tensors and return them.
    """

    matrices: Tensor | None
    additions: Tensor | None
    kept: tuple[Tensor, ...]


class Edges(NamedTuple):
    """Where the states at the edges of fragments lie, so that hooks in halves read and write them in their places.

    Backends that declare ``Capabilities.edges`` get it as ``cp_context``, in the place of True. For a backward read end
    for start, start for end, and gradients for states. Tables, ``matrices`` and ``starts`` are contiguous.

    Attributes:
        given: states at the starts of all N sequences, [N, HV, K, V] of any dtype and strides; None: zeros.
        places: [F] int64, the sequence that a fragment starts, or N.
        sends: [P] int64, the fragments whose [M | M S + b] the first half returns as ``matrices``, [P, HV, K, K + V],
            with S the given state of a fragment that starts its sequence, or 0; None: all.
        sources: [F] int64, where ``starts`` of the second half has the state of a fragment: [C, HV, K, V or more], the
            last V columns; C and more: nowhere. None: at its number. ``starts`` may be None: there are only given ones.
        results: [F] int64, the sequence that a fragment ends, or N. The final states, and in a backward the gradient of
            "initial_state" (float32) where it is needed, are those of sequences, [N, ...], zeros where no fragment has
            the end. None: fragment f ends sequence f.
        sequences: N.
        matrices: in a backward M of the fragments of ``sends``, [P, HV, K, K or more], the first K columns.
    """

    given: Tensor | None
    places: Tensor | None
    sends: Tensor | None
    sources: Tensor | None
    results: Tensor | None
    sequences: int
    matrices: Tensor | None = None

"""Launches that cut long sequences into segments and join them; ``segments`` has the kernels and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import named_state_strides, row_strides
from kda_core.triton_lib.chain_kernels import add_chain, in_rows
from kda_core.triton_lib.frame import names
from kda_core.triton_lib.layout import CHUNK, padded
from kda_core.triton_lib.plan import Builder, View, changed, matrix_tile, token_tile
from kda_core.triton_lib.segments import one_token_axis, segments_each, write_bounds, write_segments
from kda_core_nvidia.backward_reverse import recurrences_kernel
from kda_core_nvidia.choose import BackwardChoice, ForwardChoice
from kda_core_nvidia.choose.chunk import JOIN_PRECISION, ROWS, TransitionsHopperConfig, most_of_several, split_scale
from kda_core_nvidia.choose.fragments import CHAIN_COLUMNS, CHAIN_WARPS, MOST_CHANNELS, as_fragments
from kda_core_nvidia.join_hopper import join_hopper
from kda_core_nvidia.segments import first_segments_kernel, join_kernel
from kda_core_nvidia.transitions_hopper import reverse_transitions_hopper, transitions_hopper

JOIN_ROWS = 16
"""Value channels of a program of ``join_kernel``, and of ``first_segments_kernel``."""

Choice = ForwardChoice | BackwardChoice


def cut_into_segments(b: Builder, r: Request, rows: int) -> Request:
    """``as_fragments``, with boundaries that the plan writes where it has them."""
    return write_bounds(b, r, as_fragments(r, rows), rows)


def cut_several(
    b: Builder, r: Request, rows: int, final_state: View | None = None, starts: View | None = None
) -> tuple[Request, View]:
    """``as_segments`` of several sequences, or of one whose state is in a pool.

    Args:
        final_state: is written as the call asks.
        starts: for the states at the starts of segments, which become the pool of the call in segments; or None.

    Returns:
        the call in segments, and [S + 1] of which sequence each is: -1 where it has no rows, or is skipped.
    """
    r = changed(r, **{n: one_token_axis(b, x) for n in ROWS if (x := getattr(r, n)) is not None})
    cut = as_fragments(r, rows)
    counts = {"sequences": cut.N + 1, "own": starts and cut.N, "ends": final_state and cut.N}
    table = {n: x and b.scratch(f"{n} of segments", (x,), torch.int64) for n, x in counts.items()}
    empty = r.has_initial_state is None and r.final_state_indices is None
    bounds = write_segments(b, r, rows, **table, EMPTY=empty)
    cut = changed(
        cut, cu_seqlens=bounds, initial_state=starts, has_initial_state=None, ssm_state_indices=table["own"],
        pad_slot_id=-1, final_state_indices=table["ends"], final_state_pool=final_state, update_state=True,
        inplace_final_state=final_state is not None,
    )  # fmt: skip
    return cut, table["sequences"]


def add_first_segments(b: Builder, call: Request, rows: int, grad_starts: View, grad_state: View) -> None:
    """Gradients of the states at the starts of sequences from those of ``cut_several``'s segments."""
    named = names(call) | {"grad_starts": grad_starts, "grad_initial_state": grad_state, "rows": rows, "BV": JOIN_ROWS}
    named["per"] = segments_each(call, rows)
    b.pick(first_segments_kernel, (call.V // JOIN_ROWS, call.N * call.HV), 4, named)


KEPT = "kept"
"""The result that holds what the second half of a call is given and the call does not save."""


def hopper_tiles(keys: View, P: View, D: View) -> dict[str, Any]:
    """Descriptors of what ``prepare`` wrote, by the parameters of the kernels for Hopper."""
    KP = D.shape[-1]
    return {
        "single": matrix_tile(keys, CHUNK, KP, swizzled=True), "pairs": matrix_tile(keys, 2 * CHUNK, KP, swizzled=True),
        "P": matrix_tile(P, CHUNK, CHUNK, swizzled=True), "decays": matrix_tile(D, 1, KP, by_rows=True),
    }  # fmt: skip


def chain_segments(
    b: Builder, r: Request, count: int, choice: Choice, matrices: View, additions: View | None, reverse: bool = False,
    **tensors: View | None,
) -> None:  # fmt: skip
    """Add a launch of ``chain_kernel``.

    Args:
        r: the call, of which ``count`` segments are joined.
        matrices, additions: for Hopper; else transitions, and additions where ``reverse``.
        tensors: what it reads and writes (``triton_lib.chain_kernels.add_chain``).
    """
    K, V = r.K, r.V
    if isinstance(choice.transitions, TransitionsHopperConfig):
        strides = {"S_M": 2 * K * K, "M_IN": 1, "M_OUT": K, "PART": K * K, "S_A": K * V, "A_K": V, "A_V": 1}
        named = {"matrices": matrices, "additions": additions, **strides}
    else:
        named = in_rows(r, matrices, additions if reverse else None)
    named |= {"BV": CHAIN_COLUMNS, "BK": padded(K), "IN_TURN": False, "STAGES": 1}
    named["DOT"] = JOIN_PRECISION
    add_chain(b, r, count, choice.segment_rows, named, CHAIN_WARPS, reverse=reverse, **tensors)


class Segments:
    """Adds the launches that find the states at the starts of segments, and the gradients of states at their ends.

    Args:
        r: the call in segments. Rows of v and do are contiguous; bulk copies take them on Hopper.
        prepared: keys, P and D, then others, as ``prepare`` wrote them for ``r``.
        call: the call itself, whose states, contiguous, are those of its first and its last segment; on Hopper no
            transitions begin or end there. None for fragments: all segments have transitions, which are results.
        sequences: from ``cut_several``, else None.
    """

    def __init__(
        self, b: Builder, r: Request, choice: Choice, prepared: Sequence[View], call: Request | None = None,
        sequences: View | None = None,
    ) -> None:  # fmt: skip
        self.b, self.r, self.call, self.sequences = b, r, call, sequences
        self.keys, self.P, self.D, *_ = prepared
        self.choice, self.config, self.rows = choice, choice.transitions, choice.segment_rows
        self.hopper = isinstance(self.config, TransitionsHopperConfig)
        self.transitions: tuple[View, View | None] | None = None

    def _new(self, name: str, *layout: Any) -> View:
        return self.b.within(KEPT, *layout) if self.call is None else self.b.scratch(name, *layout)

    def _names(self, count: int) -> dict[str, Any]:
        """Arguments of the launches for Hopper for ``count`` segments, with the tensors that they write."""
        r, call, sequences, config = self.r, self.call, self.sequences, self.config
        named = names(r) | {
            "count": r.N, "EVERY": call is None,
            "initial_state": call and call.initial_state, "grad_final_state": call and call.grad_final_state,
            "STAGES": config.stages, **hopper_tiles(self.keys, self.P, self.D),
            "BR": config.rows, "UNROLL": config.unroll, "spare": 0, "forgotten": None, "sequences": sequences,
            "matrices": self._new("matrices of segments", (count, r.HV, 2, r.K, r.K), torch.bfloat16),
            "additions": self._new("additions of segments", (count, r.HV, r.K, r.V), torch.float32),
        }  # fmt: skip
        if call is None:
            return named
        return named | {
            "V_FIRST": call.state_v_first, "cu_seqlens": sequences and r.cu_seqlens, "chunks": self.rows // CHUNK,
            "spare": 0 if r.cu_seqlens is None else 1,
            "forgotten": self.b.scratch("forgotten", (count, r.HV, r.K // config.rows), torch.int32),
        }  # fmt: skip

    def add(self, reverse: bool = False) -> tuple[View, View | None]:
        """Add the transitions of states, or in reverse of their gradients; tensors that ``chain_segments`` takes."""
        if not self.hopper:
            return self.add_plain()
        named = self.add_reverse_transitions() if reverse else self.add_transitions()
        return named["matrices"], named["additions"]

    def add_transitions(self) -> dict[str, Any]:
        """Add the transitions of segments, for Hopper; arguments of the launch, with "matrices" and "additions"."""
        r, config, count = self.r, self.config, self.r.N - (self.call is not None and self.sequences is None)
        named = self._names(count)
        own = {"values": token_tile(r.v, CHUNK, r.V, swizzled=True), "s_vh": r.v.stride(2)}
        grid = (r.K // config.rows, count * r.HV)
        self.b.pick(transitions_hopper, grid, config.num_warps, named | own, maxnreg=config.registers)
        return named

    def add_reverse_transitions(self) -> dict[str, Any]:
        """The same for gradients of states, from do."""
        r, config, do, count = self.r, self.config, self.r.grad_o, self.r.N - (self.call is not None)
        named = self._names(count + (self.sequences is not None)) | {"o_scale": split_scale(r.scale, r.q.dtype)[1]}
        if self.call is not None:
            named["T"] = r.T * (r.N if r.cu_seqlens is None else 1)
        tile = token_tile(do, CHUNK, r.V, swizzled=True)
        own = {"s_oh": do.stride(2), "STAGES": config.reverse_stages, "gradients": tile}
        grid, options = (r.K // config.rows, count * r.HV), {"maxnreg": config.reverse_registers}
        self.b.pick(reverse_transitions_hopper, grid, config.num_warps, named | own, **options)
        return named

    def add_plain(self) -> tuple[View, View | None]:
        """Add the transitions of all segments, [segments, HV, VP + KP, KP] in float32, and, in one launch, those of
        gradients of states in a backward, [segments, HV, VP, KP].
        """
        r, config, do = self.r, self.config, self.r.grad_o
        KP, VP, heads = padded(r.K), padded(r.V), r.N * r.HV
        transitions = self._new("transitions", (r.N, r.HV, VP + KP, KP), torch.float32)
        additions = do and self._new("additions of segments", (r.N, r.HV, VP, KP), torch.float32)
        programs, more = (VP + KP) // config.block_v * heads, VP // config.block_v * heads if do else 0
        absent = ("X", "z", "states", "state_grads", "dv", "initial_state", "grad_final_state", "grad_initial_state")
        named = names(r) | row_strides(v=r.v)[1] | row_strides(o=do or r.v)[1] | dict.fromkeys(absent) | {
            "do": do, "keys": self.keys, "P": self.P, "D": self.D, "transitions": transitions, "additions": additions,
            # Segments, also a batch of them, lie on one token axis.
            "s_vb": 0, "s_ob": 0, "T_row": r.T, "o_scale": split_scale(r.scale, r.q.dtype)[1], "programs": programs,
            "BV": config.block_v, "V_AS_OPERAND": False, "PRECISION": "tf32", "STAGES": config.stages,
            "EVERY_SECOND": False,
        }  # fmt: skip
        self.b.pick(recurrences_kernel, programs + more, config.num_warps, named)
        return transitions, additions

    def add_starts(self, states: View | None = None) -> View:
        """Compute the state at the start of every segment, [count, HV, V, K] in float32.

        Args:
            states: to be written; scratch when left out.
        """
        r = self.r
        states = states or self.b.scratch("states at starts", (r.N, r.HV, r.V, r.K), torch.float32)
        if self.hopper:
            self._add_join(self.add_transitions(), self.call.initial_state, states)
        else:
            self.transitions = self.add_plain()
            self._join_plain(self.call.initial_state, states)
        return states

    def add_ends(self) -> View:
        """Compute the gradient of the state at the end of every segment, shaped alike; after ``add_starts``."""
        r = self.r
        states = self.b.scratch("gradients at ends", (r.N, r.HV, r.V, r.K), torch.float32)
        if self.hopper:
            self._add_join(self.add_reverse_transitions(), self.call.grad_final_state, states, reverse=True)
        else:
            self._join_plain(self.call.grad_final_state, states, reverse=True)
            self.b.free(*self.transitions)
        return states

    def _join_plain(self, given: View | None, states: View, reverse: bool = False) -> None:
        r, call, (transitions, additions) = self.r, self.call, self.transitions
        if r.K <= MOST_CHANNELS:
            chain_segments(self.b, call, r.N, self.choice, transitions, additions, reverse, given=given, states=states)
            return
        named = names(call) | {
            "given": given, "transitions": transitions, "additions": additions if reverse else None, "states": states,
            "count": r.N, "REVERSE": reverse, "BV": JOIN_ROWS, "BK": 32, "PRECISION": JOIN_PRECISION,
        }  # fmt: skip
        self.b.pick(join_kernel, (named["VP"] // JOIN_ROWS, r.HV), 4, named)

    def _add_join(self, named: dict[str, Any], given: View | None, states: View, reverse: bool = False) -> None:
        r, call, config = self.r, self.call, self.config
        named = named | {"given": given, "states": states, "REVERSE": reverse}
        own = {n: names(call)[n] for n in ("indices", "s_index", "has_state", "s_has")}
        own |= named_state_strides("g", given, call.state_v_first) | {
            "matrices": matrix_tile(named["matrices"], r.K, r.K, swizzled=True), "BV": config.join_block,
            "PARTS": r.K // config.rows, "STAGES": config.join_stages,
            "MOST": max(32, padded(r.N - 1 if self.sequences is None else most_of_several(r.HV))),
        }  # fmt: skip
        self.b.pick(join_hopper, (r.V // config.join_block, r.HV, r.N), 8, named | own)

"""A call whose launches are added to a plan; launches of the recurrences, for sequences or for the transitions of
segments, and of what joins these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import lift, named_state_strides, row_strides
from kda_core.triton_lib.chain_kernels import add_chain, in_rows
from kda_core.triton_lib.frame import names, readable
from kda_core.triton_lib.layout import CHUNK
from kda_core.triton_lib.plan import Builder, View
from kda_core.triton_lib.segments import packed_segments, write_bounds
from kda_core_amd.choose import Architecture, Config, compile_options, config, dot_widths
from kda_core_amd.recurrence import recurrence, reverse_kernel


class Frame:
    """A call whose launches are added to a plan.

    Args:
        b: the builder of the plan.
        r: the call's metadata.
        chip: what it runs on.

    Attributes:
        names: values by the kernels' names of parameters. Launches add what they write.
    """

    def __init__(self, b: Builder, r: Request, chip: Architecture) -> None:
        self.b, self.r, self.chip = b, readable(b, r), chip
        terms, dot, small_dot = dot_widths(r.q.dtype, chip)
        self.names = names(self.r) | {
            "LIFT": lift(r.q.dtype, r.use_qk_l2norm_in_kernel, r.scale), "TERMS": terms, "DOT": dot,
            "SMALL_DOT": small_dot, "FEW_REGISTERS": chip.wave == 32,
        }  # fmt: skip
        if r.needs_grad:
            self.names["do"] = b.scratch("do", r.v.shape, r.v.dtype, True) if r.grad_o is None else b.rows(r.grad_o)

    def config(self, kernel: str, dtype: torch.dtype | None = None) -> Config:
        """The configuration of a kernel for operands of ``dtype``, q's when left out."""
        return config(kernel, self.chip, dtype or self.r.q.dtype, self.names["KP"])

    def blocks(self, chosen: Config) -> dict[str, int]:
        """Value channels of a program of a recurrence, and key channels of a block of its state."""
        KP, VP = self.names["KP"], self.names["VP"]
        return {"BV": min(chosen.block, VP), "BK": min(chosen.keys or KP, KP)}

    def launch(self, kernel: Any, chosen: Config, grid: int | tuple[int, int], /, **own: Any) -> None:
        """Add a launch of ``grid`` programs, if any; ``own``: values that no other launch takes."""
        given = {"STAGES": chosen.stages, "LEVEL_LOOP": chosen.level_loop, **self.names, **own}
        self.b.pick(kernel, grid, chosen.num_warps, given, **compile_options(chosen, self.chip))


def cut(b: Builder, r: Request, chip: Architecture, rows: int) -> Frame:
    """The call in segments of ``rows`` rows as sequences, states V first and none given; 0: itself, states V first."""
    if not rows:
        return Frame(b, replace(r, state_v_first=True), chip)
    return Frame(b, write_bounds(b, r, packed_segments(r, rows, v_first=True), rows), chip)


def launch_recurrence(f: Frame, kernel: Any, name: str, columns: int, rows: dict[str, View], **own: Any) -> None:
    """Add a launch of ``recurrence`` or ``reverse_kernel``.

    Args:
        name: of the configuration.
        columns: value channels, or VP and more with rows of matrices.
        rows: tensors [B, T, HV, V], by the letter of their strides.
        own: other arguments.
    """
    chosen, programs = f.config(name), f.r.N * f.r.HV
    blocks, (unit, strides) = f.blocks(chosen), row_strides(**rows)
    if columns > f.names["VP"]:
        blocks["BV"] = min(blocks["BV"], f.names["KP"])
    own = {"programs": programs, "UNIT": unit, **blocks, **strides, **own}
    f.launch(kernel, chosen, -(-columns // blocks["BV"]) * programs, **own)


def add_recurrence(
    f: Frame, name: str, columns: int, initial_state: View | None = None, final_state: View | None = None,
    o: View | None = None, **written: View | None,
) -> None:  # fmt: skip
    """Add a launch of ``recurrence``; ``name`` and ``columns`` as for ``launch_recurrence``.

    Args:
        written: other tensors, by their names there.
    """
    v, v_first, absent = f.names["v"], f.r.state_v_first, dict.fromkeys(("X", "z", "states", "transitions", "h"))
    launch_recurrence(
        f, recurrence, name, columns, {"v": v, "o": o or v}, initial_state=initial_state, final_state=final_state, o=o,
        P=o and f.names["P"], H_EVERY=f.r.chunk_size // CHUNK, **absent | written,
        **named_state_strides("i", initial_state, v_first), **named_state_strides("f", final_state, v_first),
    )  # fmt: skip


def add_transitions(f: Frame, new: Callable[..., View] | None = None) -> View:
    """bᵀ and Mᵀ of segments, [segments, HV, VP + KP, KP] in float32.

    Args:
        f: of the call in segments, after ``prepare``.
        new: allocates it; scratch when left out.
    """
    KP, columns = f.names["KP"], f.names["VP"] + f.names["KP"]
    transitions = (new or f.b.scratch)("transitions", (f.r.N, f.r.HV, columns, KP), torch.float32)
    add_recurrence(f, "states", columns, transitions=transitions)
    return transitions


def add_reverse_transitions(f: Frame, new: Callable[..., View] | None = None) -> View:
    """The gradients of states that come from the outputs of segments, [segments, HV, VP, KP] in float32."""
    KP, VP = f.names["KP"], f.names["VP"]
    additions = (new or f.b.scratch)("additions of segments", (f.r.N, f.r.HV, VP, KP), torch.float32)
    launch_recurrence(
        f, reverse_kernel, "reverse", VP, {"o": f.names["do"]}, grad_final_state=None, dv=None, state_grads=None,
        grad_initial_state=None, additions=additions, **dict.fromkeys(("s_vb", "s_vt", "s_vh")),
        **named_state_strides("f", None, False), **named_state_strides("i", None, False),
    )  # fmt: skip
    return additions


def join(
    f: Frame, call: Request, rows: int, transitions: View, additions: View | None = None, **tensors: View | None
) -> None:
    """Add a launch of ``chain_kernel`` over the segments of ``call``, in reverse with ``additions``.

    Args:
        tensors: what it reads and writes (``add_chain``).
    """
    chosen = f.config("join", torch.float32)
    segments = in_rows(call, transitions, additions) | {
        "BV": chosen.block, "BK": min(chosen.keys, f.names["KP"]), "IN_TURN": chosen.level_loop,
        # As float16's: where a foreign device's matrix unit has no float32, 22 bits are enough beside rounded operands.
        "STAGES": chosen.stages, "DOT": dot_widths(torch.float16, f.chip)[1],
    }  # fmt: skip
    add_chain(
        f.b, call, f.r.N, rows, segments, chosen.num_warps, reverse=additions is not None, **tensors,
        **compile_options(chosen, f.chip),
    )  # fmt: skip

"""A call of this backend whose launches are added to a plan."""

from __future__ import annotations

from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.frame import names, readable
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.plan import Builder
from kda_core_amd.choose import Architecture, Config, compile_options, config, dot_widths


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

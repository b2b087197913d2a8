"""What the launches of one call share: a launch takes what its kernel names."""

from __future__ import annotations

from typing import Any

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import decays_bounded, gate_kind, has_contiguous_rows
from kda_core.triton_lib.layout import CHUNK, padded
from kda_core.triton_lib.lift import lift
from kda_core.triton_lib.plan import Builder, Copy, View
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
        self.b, self.r, self.chip = b, r, chip
        gate, indices = gate_kind(r), r.ssm_state_indices
        parameters = {n: b.dense(getattr(r, n)) if gate != "none" else None for n in ("A_log", "dt_bias")}
        terms, dot, small_dot = dot_widths(r.q.dtype, chip)
        self.names: dict[str, Any] = {
            "q": b.rows(r.q), "k": b.rows(r.k), "v": b.rows(r.v), "g": b.rows(r.g), "beta": r.beta, **parameters,
            "cu_seqlens": b.dense(r.cu_seqlens), "indices": indices, "pad_slot_id": r.pad_slot_id,
            "s_index": 0 if indices is None else indices.stride(0), "scale": float(r.scale),
            "lower_bound": float(r.lower_bound or 0.0),
            "T": r.T, "N": r.N, "H": r.H, "HV": r.HV, "group": r.HV // r.H, "chunks": -(-r.T // CHUNK),
            "K": r.K, "V": r.V, "KP": padded(r.K), "VP": padded(r.V), "C": CHUNK,
            "LIFT": lift(r.q.dtype, r.use_qk_l2norm_in_kernel, r.scale), "V_FIRST": r.state_v_first,
            "GATE": gate, "BOUNDED": decays_bounded(r), "L2NORM": r.use_qk_l2norm_in_kernel,
            "SIGMOID": r.use_beta_sigmoid_in_kernel, "NEG_EIGVAL": r.allow_neg_eigval,
            "TERMS": terms, "DOT": dot, "SMALL_DOT": small_dot, "FEW_REGISTERS": chip.wave == 32,
        }  # fmt: skip

    def config(self, kernel: str, dtype: torch.dtype | None = None) -> Config:
        """The configuration of a kernel for operands of ``dtype``, q's when left out."""
        return config(kernel, self.chip, dtype or self.r.q.dtype, self.names["KP"])

    def blocks(self, chosen: Config) -> dict[str, int]:
        """Value channels of a program of a recurrence, and key channels of a block of its state."""
        KP, VP = self.names["KP"], self.names["VP"]
        return {"BV": min(chosen.block, VP), "BK": min(chosen.keys or KP, KP)}

    def launch(self, kernel: Any, chosen: Config, grid: int, /, **own: Any) -> None:
        """Add a launch of ``grid`` programs, if any; ``own``: values that no other launch takes."""
        given = {"STAGES": chosen.stages, "LEVEL_LOOP": chosen.level_loop, **self.names, **own}
        self.b.pick(kernel, grid, chosen.num_warps, given, compile_options(chosen, self.chip))


def outputs(b: Builder, r: Request) -> tuple[View, View | None]:
    """``o`` as kernels can write it (``finish_output`` puts it where the caller wants it) and the final state."""
    o = r.out
    if o is None or not has_contiguous_rows(o):
        o = (b.result if o is None else b.scratch)("o", (r.B, r.T, r.HV, r.V), r.q.dtype)
    if r.inplace_final_state:
        return o, r.initial_state
    return o, b.result("final_state", r.state_shape, r.state_dtype) if r.output_final_state else None


def finish_output(b: Builder, r: Request, o: View) -> View:
    """The result, in the caller's buffer if there is one."""
    if r.out is not None and o is not r.out:
        b.step(Copy(r.out, o))
    return o if r.out is None else r.out

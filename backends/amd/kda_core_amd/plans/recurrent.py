"""Forward of ``fused_recurrent_kda``: one launch of ``recurrent``."""

from __future__ import annotations

import torch
import triton.language as tl

from kda_core.request import Request
from kda_core.triton_lib.commit_kernels import add_first_commit
from kda_core.triton_lib.frame import finish_output, outputs, readable
from kda_core.triton_lib.layout import padded, power_of_two
from kda_core.triton_lib.plan import Builder, Plan, View, input_layouts
from kda_core.triton_lib.recurrent_kernels import launch_recurrent, token_arguments
from kda_core_amd.choose import COMMIT, Architecture, compile_options, config

OPTIONS = {
    "ONE_TOKEN": False, "AHEAD": False, "MOST": 0, "EVICTION": "", "LEAD": None, "SIGNED": False, "INDEX": tl.int64,
}  # fmt: skip
"""One kernel for every number of tokens, whose decays are rounded: a second product for each element of the state would
cost a step up to a fifth of its time."""


def plan_recurrent(r: Request, chip: Architecture) -> Plan:
    """The plan of a forward of ``fused_recurrent_kda``, whose results are o and final_state; ``r``: metadata alone."""
    b = Builder()
    o, final_state = add_recurrent(b, r, chip)
    return b.plan(input_layouts(r), {"o": o, "final_state": final_state})


def add_recurrent(b: Builder, r: Request, chip: Architecture) -> tuple[View, View | None]:
    """Add the launch, behind that of a commit; o and the final state."""
    if r.commit is not None:
        r = add_first_commit(b, r, COMMIT.num_warps, False, **compile_options(COMMIT, chip))
    o, final_state = outputs(b, r, any_strides=True)
    state = final_state if r.initial_state is None else r.initial_state
    dtype = torch.float32 if state is None else state.dtype
    chosen = config("recurrent, V first" if r.state_v_first else "recurrent", chip, dtype, padded(r.K))
    given = readable(b, r)
    launch_recurrent(
        b, given, token_arguments(given, final_state, o) | OPTIONS, min(chosen.block, power_of_two(r.V)),
        chosen.num_warps, **compile_options(chosen, chip),
    )  # fmt: skip
    return finish_output(b, r, o), final_state

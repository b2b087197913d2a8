"""Forward of ``fused_recurrent_kda``: one launch of ``recurrent``."""

from __future__ import annotations

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import row_strides, state_strides
from kda_core.triton_lib.commit_kernels import add_first_commit
from kda_core.triton_lib.frame import finish_output, outputs
from kda_core.triton_lib.plan import Builder, Plan, View, input_layouts
from kda_core_amd.choose import COMMIT, Architecture, compile_options
from kda_core_amd.plans.frame import Frame
from kda_core_amd.recurrent import recurrent


def _columns(table: View | None) -> tuple[int, int]:
    """Stride and number of the columns of a table of slots; of one column the stride does not matter."""
    return (0, 1) if table is None or table.dim() == 1 or table.shape[1] == 1 else (table.stride(1), table.shape[1])


def plan_recurrent(r: Request, chip: Architecture) -> Plan:
    """The plan of a forward of ``fused_recurrent_kda``, whose results are o and final_state; ``r``: metadata alone."""
    b = Builder()
    o, final_state = add_recurrent(b, r, chip)
    return b.plan(input_layouts(r), {"o": o, "final_state": final_state})


def add_recurrent(b: Builder, r: Request, chip: Architecture) -> tuple[View, View | None]:
    """Add the launch, behind that of a commit; o and the final state."""
    if r.commit is not None:
        r = add_first_commit(b, r, COMMIT.num_warps, False, **compile_options(COMMIT, chip))
    o, final_state = outputs(b, r)
    f = Frame(b, r, chip)
    indices, accepted = r.ssm_state_indices, r.num_accepted_tokens
    s_column, width = _columns(indices)
    s_final_column, final_width = _columns(r.final_state_indices)
    state = final_state if r.initial_state is None else r.initial_state
    name = "recurrent, V first" if r.state_v_first else "recurrent"
    chosen = f.config(name, torch.float32 if state is None else state.dtype)
    BV = min(chosen.block, f.names["VP"])
    s_in, s_ih, I_K, I_V = state_strides(r.initial_state, r.state_v_first)
    s_fn, s_fh, F_K, F_V = state_strides(final_state, r.state_v_first)
    unit, strides = row_strides(**{n: f.names[n] for n in "qkvg"}, b=r.beta, o=o)
    s_rb, s_rt, s_rh = (0, 0, 0) if r.records is None else r.records.strides[:3]
    sequences = r.N + (r.cu_seqlens is not None)
    f.launch(
        recurrent, chosen, sequences * r.HV * -(-r.V // BV), o=o, initial_state=r.initial_state,
        final_state=final_state, records=r.records, parents=b.dense(r.parents), accepted=accepted, width=width,
        s_rb=s_rb if r.cu_seqlens is None else 0, s_rt=s_rt, s_rh=s_rh, s_in=s_in, s_ih=s_ih, s_fn=s_fn, s_fh=s_fh,
        s_row=f.names["s_index"], s_column=s_column, s_final_column=s_final_column, final_width=final_width,
        s_accepted=0 if accepted is None else accepted.stride(0), BV=BV, UNIT=unit, I_K=I_K, I_V=I_V, F_K=F_K, F_V=F_V,
        EVERY_TOKEN=r.writes_every_token, **strides,
    )  # fmt: skip
    return finish_output(b, r, o), final_state

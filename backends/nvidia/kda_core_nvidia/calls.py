"""Calls of this backend: choose, plan, run."""

from __future__ import annotations

from kda_core.request import AnyRequest, CommitRequest, DecodeStepRequest, GateRequest, LayerRequest, Request
from kda_core.triton_lib.calls import Calls, h_shape
from kda_core.triton_lib.commit_kernels import plan_commit
from kda_core.triton_lib.gate_kernels import plan_gate
from kda_core.triton_lib.layer_plans import plan_decode_step, plan_of_layer
from kda_core.triton_lib.plan import Builder, Plan, changed, metadata
from kda_core_nvidia.choose import CHIPS, Chip, choose_backward, choose_forward, choose_recurrent
from kda_core_nvidia.choose.recurrent import choose_layer_step
from kda_core_nvidia.plans.backward import plan_backward, plan_begin_backward, plan_finish_backward
from kda_core_nvidia.plans.forward import plan_begin, plan_finish, plan_forward, saved_specs
from kda_core_nvidia.plans.recurrent import COMMIT_WARPS, add_recurrent, plan_layer_step, plan_recurrent
from kda_core_nvidia.run import Bound, chip

WARPS = 4
"""Warps of a program of ``kda_gate`` and of the kernels around the operator in a layer."""

_HALVES = {
    "begin": (plan_begin, choose_forward), "finish": (plan_finish, choose_forward),
    "begin_backward": (plan_begin_backward, choose_backward),
    "finish_backward": (plan_finish_backward, choose_backward),
}  # fmt: skip


def plan_in_three(r: DecodeStepRequest, on: Chip) -> Plan:
    """The plan of ``kda_decode_step`` with a launch for each of its parts; the request is metadata alone."""

    def add(b: Builder, x: Request) -> object:
        return add_recurrent(b, x, choose_recurrent(x, on), True)

    # Sums without fused multiplications, as ``layer_step`` takes them.
    return plan_decode_step(r, add, 32, launch_pdl=on.overlaps, enable_fp_fusion=False)


def plan_of(
    request: AnyRequest | LayerRequest, on: Chip, misaligned: frozenset[str] = frozenset(), half: str = ""
) -> Plan:
    """The plan of a call, as ``Calls`` asks for it."""
    r = metadata(request, misaligned)
    if half:
        plan, choose = _HALVES[half]
        return plan(r, choose(r, on))
    if isinstance(r, DecodeStepRequest):
        config = choose_layer_step(r, on)
        return plan_in_three(r, on) if config is None else plan_layer_step(r, config)
    if isinstance(r, LayerRequest):
        return plan_of_layer(r, 32, WARPS)
    if isinstance(r, CommitRequest):
        return plan_commit(r, COMMIT_WARPS, True, enable_fp_fusion=False)
    if isinstance(r, GateRequest):
        return plan_gate(r, WARPS)
    if r.needs_grad:
        r = changed(r, op="chunk_kda")
        return plan_backward(r, choose_backward(r, on))
    if r.op == "fused_recurrent_kda":
        return plan_recurrent(r, choose_recurrent(r, on))
    return plan_forward(r, choose_forward(r, on), h_shape(request))


CALLS = Calls(plan_of, chip, {x.name: x for x in CHIPS.values()}, saved_specs, Bound)

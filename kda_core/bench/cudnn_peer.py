"""The public KDA operator of cudnn-frontend (1.32). Written from the wheel's source and not yet run beside it.

Its time with the host includes the operator's host code; its time from a graph is that of its kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_core import reference
from kda_core.bench.peers import Forward, GpuPeer, with_pool
from kda_core.bench.workload import DATA, Call, Problem, Work


class CudnnFrontend(GpuPeer):
    """``cudnn.linear_attention.kimi_delta_attention``: tokens in one row, states V first.

    In inference it computes the bounded gate, norms and sigmoid. Its backward takes normalised q and k, log decays and
    beta: they are computed before the timed call, and their gradients are not compared.
    """

    name = "cudnn-frontend"
    module = "cudnn.linear_attention.ops"
    install = "pip install the wheel of cudnn-frontend 1.32"

    def version(self) -> str:
        import cudnn

        return str(cudnn.__version__)

    def refuses(self, problem: Problem) -> str | None:
        shape = problem.shape
        if problem.gate == "softplus" and not problem.training:
            return "it has no softplus gate"
        if problem.mode == "kept":
            return "it has no such mode"
        if problem.dtype != torch.bfloat16 or (shape.K, shape.V) != (128, 128):
            return "timed with bfloat16 and K = V = 128 only"
        if problem.backward and shape.H != shape.HV:
            return "its backward takes H = HV only"
        return None

    def note(self, problem: Problem) -> str:
        if problem.training:
            return "norms, gate and sigmoid computed beforehand, not timed"
        return super().note(problem)

    def prepare(self, work: Work) -> Call:
        from cudnn.linear_attention import kimi_delta_attention

        shape, gated = work.problem.shape, work.problem.gate != "given"
        rows = dict(zip(DATA, _rows(work), strict=True))
        flat = {n: x.detach().reshape(-1, *x.shape[2:]) for n, x in rows.items()}
        lengths = shape.lengths or (shape.T,) * shape.B
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(work.device, torch.int32)
        options: dict[str, Any] = {"output_final_state": not work.problem.training}
        if not work.problem.training:
            options["use_qk_l2norm_in_kernel"] = True
            if gated:
                options |= {"use_beta_sigmoid_in_kernel": True, "safe_gate": True}
                options |= {"gate_lower_bound": work.options["lower_bound"]}
                options |= {"a_log": work.tensors["A_log"], "dt_bias": work.tensors["dt_bias"]}

        def forward(state: Tensor | None) -> Forward:
            o, final_state = kimi_delta_attention(*flat.values(), bounds, initial_state=state, **options)[:2]
            return o.view_as(work.tensors["v"]), final_state if state is not None else None

        if not work.problem.training:
            return work.call(with_pool(work, forward))
        return _trained(work, flat, lambda: forward(None)[0])


def _rows(work: Work) -> list[Tensor]:
    """q, k, v, g and beta as the operator takes them: raw in inference; normalised, log decay and beta in training."""
    x = work.tensors
    if not work.problem.training:
        return [x[n] for n in DATA]
    unit = [reference.l2norm(x[n].float()).to(x[n].dtype) for n in ("q", "k")]
    return [*unit, x["v"], work.log_decay().float(), work.beta().float()]


def _trained(work: Work, flat: dict[str, Tensor], forward: Any) -> Call:
    leaves = [x.requires_grad_() for x in flat.values()]
    # Its dq and dk belong to normalised rows, its dg and dbeta to log decays and beta.
    comparable = ("v",) if work.problem.gate != "given" else ("v", "g", "beta")

    def run() -> dict[str, Tensor]:
        o = forward()
        if work.grad_o is None:
            return {"o": o.detach()}
        found = torch.autograd.grad(o, leaves, work.grad_o)
        named = zip(flat, found, strict=True)
        return {"o": o.detach()} | {f"d{n}": d.view_as(work.tensors[n]) for n, d in named if n in comparable}

    return run

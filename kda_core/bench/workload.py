"""The tensors of one row: arguments of ``chunk_kda``, and values derived from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_core.bench import regimes
from kda_core.bench.shapes import Shape

MODES = {
    "training": "forward and backward",
    "inference": "forward, float32 states V first in and out",
    "forward": "the forward of a training step",
    "kept": "forward and backward, with disable_recompute",
}

GATED = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
GIVEN = ("q", "k", "v", "g", "beta")
DATA = GIVEN

Results = dict[str, Tensor]
"""Results by name: "o", "final_state" ([N, HV, V, K]), and a gradient "d..." of every differentiable input."""

Call = Callable[[], Results]


@dataclass(frozen=True)
class Problem:
    """The call that one row measures.
    Attributes:
        mode: one of MODES. gate, decay: see ``regimes``.
        dtype: of q, k and v. gate_dtype: of g and beta.
    """

    mode: str
    shape: Shape
    gate: str
    decay: str
    dtype: torch.dtype
    gate_dtype: torch.dtype

    @property
    def training(self) -> bool:
        """Whether inputs need gradients."""
        return self.mode != "inference"

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self.mode in ("training", "kept")

    @property
    def label(self) -> str:
        """For progress and messages."""
        return f"{self.mode} {self.shape} {self.gate} {self.decay}"


class Work:
    """Inputs of a problem on a device.

    Attributes:
        tensors, options: arguments of ``kda_core.chunk_kda``; calls change a pool and nothing else.
        leaves: names of the tensors whose gradients are computed.
        grad_o: gradient of o, or None.
        mean_decay: mean natural-log decay a token. channel_decays: the smallest and the largest mean of a channel.
    """

    def __init__(self, problem: Problem, device: torch.device, seed: int = 0) -> None:
        self.problem, self.device = problem, device
        shape = problem.shape
        torch.manual_seed(seed)
        q, k = (self._normal(shape.B, shape.T, shape.H, shape.K) for _ in range(2))
        v = self._normal(shape.B, shape.T, shape.HV, shape.V)
        self.tensors: dict[str, Tensor] = {"q": q, "k": k, "v": v}
        self.options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
        self._add_gate()
        if shape.lengths:
            bounds = torch.tensor([0, *shape.lengths]).cumsum(0)
            self.tensors["cu_seqlens"] = bounds.to(device)
        self.leaves: tuple[str, ...] = ()
        self.grad_o: Tensor | None = None
        if problem.training:
            self.options["disable_recompute"] = problem.mode == "kept"
            self.leaves = tuple(name for name in GATED if name in self.tensors)
            for name in self.leaves:
                self.tensors[name].requires_grad_()
        else:
            self._add_state()
        if problem.backward:
            self.grad_o = torch.randn_like(v)

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, dtype=self.problem.dtype, device=self.device)

    def _add_gate(self) -> None:
        problem, shape = self.problem, self.problem.shape
        size = (shape.B, shape.T, shape.HV, shape.K)
        raw = regimes.draw(problem.gate, problem.decay, size, problem.gate_dtype, self.device)
        channels = raw.log_decay(tokens=2048).mean((0, 1))
        self.mean_decay = channels.mean().item()
        self.channel_decays = (channels.max().item(), channels.min().item())
        beta = torch.randn(size[:3], dtype=problem.gate_dtype, device=self.device)
        # safe_gate promises bounded decays, which a softplus gate cannot.
        if problem.gate == "given":
            self.tensors |= {"g": raw.log_decay().to(problem.gate_dtype), "beta": beta.sigmoid()}
            self.options["safe_gate"] = raw.lower_bound is not None
            return
        self.tensors |= {"g": raw.g, "beta": beta, "A_log": raw.A_log, "dt_bias": raw.dt_bias}
        self.options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        if raw.lower_bound is not None:
            self.options |= {"lower_bound": raw.lower_bound, "safe_gate": True}

    def _add_state(self) -> None:
        shape = self.problem.shape
        slots = 2 * shape.N if shape.pool else shape.N
        self.tensors["initial_state"] = torch.randn(slots, shape.HV, shape.V, shape.K, device=self.device)
        self.options |= {"state_v_first": True, "output_final_state": True}
        if shape.pool:
            self.tensors["ssm_state_indices"] = torch.arange(0, slots, 2, dtype=torch.int32, device=self.device)

    @property
    def bytes(self) -> int:
        """Bytes that have to be read and written."""
        rows = sum(self.tensors[n].nbytes for n in DATA)
        out = self.tensors["v"].nbytes
        if not self.problem.training:
            shape = self.problem.shape
            return rows + out + 2 * 4 * shape.N * shape.HV * shape.V * shape.K
        return rows + out + (rows + out + rows if self.problem.backward else 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of all inputs, the gradient of o included."""
        return sum(x.nbytes for x in (*self.tensors.values(), self.grad_o) if x is not None)

    def states(self) -> Tensor:
        """[N, HV, V, K] initial states, copied out of a pool where there is one."""
        state = self.tensors["initial_state"]
        indices = self.tensors.get("ssm_state_indices")
        return state if indices is None else state[indices.long()]

    def log_decay(self) -> Tensor:
        """[B, T, HV, K] float32 natural-log decays, differentiable."""
        g = self.tensors["g"]
        if self.problem.gate == "given":
            return g
        A_log, dt_bias = self.tensors["A_log"], self.tensors["dt_bias"]
        return regimes.RawGate(g, A_log, dt_bias, self.options.get("lower_bound")).log_decay()

    def beta(self) -> Tensor:
        """[B, T, HV] beta itself, differentiable."""
        beta = self.tensors["beta"]
        return beta if self.problem.gate == "given" else beta.sigmoid()

    def call(self, function: Callable[[], tuple[Tensor, Tensor | None]]) -> Call:
        """A call of the problem's mode, from a function that computes o and the final state (V first, or None)."""
        if not self.problem.training:

            def inference() -> Results:
                with torch.inference_mode():
                    o, state = function()
                    return {"o": o} if state is None else {"o": o, "final_state": state}

            return inference

        def forward() -> Results:
            return {"o": function()[0]}

        leaves = [self.tensors[n] for n in self.leaves]
        names = [f"d{n}" for n in self.leaves]

        def both() -> Results:
            o = function()[0]
            # A missing gradient is an error of the function, not of the benchmark.
            found = torch.autograd.grad(o, leaves, self.grad_o, allow_unused=True)
            return {"o": o.detach()} | {n: x for n, x in zip(names, found, strict=True) if x is not None}

        return both if self.problem.backward else forward

"""Programs that were exported once and must run for ever after: what they compute, and how their files are made.

    python tests/support/exported_programs.py

writes ``tests/core/data/NAME.vVERSION.pt2`` for the schemas of today (``schemas.SCHEMA_VERSION``), unless it exists.
A file is never replaced: users hold programs like it, which later versions must run. When the schemas grow, raise the
version, run this again and add the new files' digests to ``tests/core/test_exported.py``, which runs the files of every
version. Export with the newest torch: its format is read by later versions, not by earlier ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import kda_core
from kda_core import _schemas

DATA = Path(__file__).parents[1] / "core" / "data"
B, T, H, HV, K, V = 2, 9, 1, 2, 4, 3

ALL_IN_THE_OPERATOR = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


class Dense(nn.Module):
    """``chunk_kda`` with everything in the operator, from a state to a state."""

    def forward(self, q, k, v, g, beta, A_log, dt_bias, initial_state):
        return kda_core.chunk_kda(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, output_final_state=True,
            lower_bound=-5.0, **ALL_IN_THE_OPERATOR,
        )  # fmt: skip


class Packed(nn.Module):
    """The same over packed sequences, with the softplus gate, a scale and states V first."""

    def forward(self, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens):
        return kda_core.chunk_kda(
            q, k, v, g, beta, scale=0.25, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state,
            output_final_state=True, state_v_first=True, cu_seqlens=cu_seqlens, **ALL_IN_THE_OPERATOR,
        )  # fmt: skip


class Decode(nn.Module):
    """A token of each sequence by ``fused_recurrent_kda``, over a pool of states that is advanced in place."""

    def forward(self, q, k, v, g, beta, A_log, dt_bias, pool, slots):
        return kda_core.fused_recurrent_kda(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=pool, ssm_state_indices=slots,
            **ALL_IN_THE_OPERATOR,
        )[0]  # fmt: skip


class Gate(nn.Module):
    """``kda_gate``."""

    def forward(self, g, A_log, dt_bias):
        return kda_core.kda_gate(g, A_log, dt_bias)


PROGRAMS: dict[str, nn.Module] = {
    "chunk_kda_dense": Dense(), "chunk_kda_packed": Packed(), "fused_recurrent_kda_pool": Decode(), "kda_gate": Gate(),
}  # fmt: skip


def inputs(name: str, seed: int = 0) -> tuple[Tensor, ...]:
    """Arguments of a program, the same ones at every call."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def data(B: int, T: int) -> tuple[Tensor, ...]:
        shapes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV, K), (B, T, HV), (HV,), (HV * K,))
        return tuple(normal(*shape) for shape in shapes)

    if name == "chunk_kda_dense":
        return *data(B, T), normal(B, HV, K, V)
    if name == "chunk_kda_packed":
        return *data(1, T), normal(3, HV, V, K), torch.tensor([0, 5, 5, 8])
    if name == "fused_recurrent_kda_pool":
        return *data(B, 1), normal(4, HV, K, V), torch.tensor([2, -1], dtype=torch.int32)
    return normal(B, T, HV, K), normal(HV), normal(HV * K)


def export(name: str) -> torch.export.ExportedProgram:
    """Export a program for inference; the lengths of dense sequences stay free."""
    arguments = inputs(name)
    free = {1: torch.export.Dim("T", min=2, max=4096)} if name in ("chunk_kda_dense", "kda_gate") else {}
    shapes = [free if t.dim() >= 3 and t.shape[1] == T else None for t in arguments]
    with torch.no_grad():
        program = torch.export.export(PROGRAMS[name], arguments, dynamic_shapes=shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of the machine that exported it
    return program


def main() -> None:
    DATA.mkdir(exist_ok=True)
    for name in PROGRAMS:
        path = DATA / f"{name}.v{_schemas.SCHEMA_VERSION}.pt2"
        if path.exists():
            print(f"{path.name} is there, and stays as it is")
            continue
        torch.export.save(export(name), path)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()

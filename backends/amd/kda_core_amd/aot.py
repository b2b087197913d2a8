"""``python -m kda_core_amd.aot``: compile every shipped configuration without a GPU and print what it takes.

For each kernel: vector registers, spills and local data share, as the assembler's metadata has them, and the waves that
fit on a SIMD unit. Exit status 1 when a kernel spills more registers than stated (SPILL_LIMIT, KNOWN_LARGE_SPILLS) or
needs more local data share than the chip has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from triton.backends.compiler import GPUTarget

from kda_core.request import AnyRequest
from kda_core.testing.cases import BF16, FP16, FP32, Case
from kda_core.triton_lib import ahead_of_time as tool
from kda_core.triton_lib.plan import Plan, View
from kda_core_amd.calls import plan_of
from kda_core_amd.choose import ARCHITECTURES, FOREIGN_ARCHITECTURE, LEAST_ROWS, MOST_KEYS, MOST_SEGMENTS, Architecture
from kda_core_amd.plans.forward import saved_specs

SPILL_LIMIT = 8
"""Vector registers of a lane that may spill: a few saved round a loop cost nothing that can be measured."""

KNOWN_LARGE_SPILLS = {
    ("gfx1100", "prepare", 2, 128): 32,
    ("gfx1100", "recurrence", 2, 128): 16,
    ("gfx1100", "recurrence", 2, 256): 24,
    ("gfx1100", "recurrence", 4, 256): 24,
    ("gfx1100", "recurrence, checkpoints", 2, 128): 56,
    ("gfx1100", "recurrence, checkpoints", 2, 256): 160,
    ("gfx1100", "recurrence, checkpoints", 4, 256): 24,
    ("gfx1100", "recurrence, h", 2, 128): 56,
    ("gfx1100", "recurrence, h", 2, 256): 160,
    ("gfx1100", "recurrence, states", 2, 256): 24,
    ("gfx1100", "reverse_kernel", 2, 128): 24,
    ("gfx1100", "reverse_kernel", 2, 256): 40,
    ("gfx1100", "reverse_kernel, additions", 2, 128): 32,
}
"""(architecture, kernel, bytes of an operand, padded K up to) -> registers of a lane that spill in kernels that are
served all the same, only for tensors of 2 GiB and more ("h": with intermediate states; "states": with those of a
backward; "checkpoints" and "additions": with those). A lane of gfx1100 has 256 registers, its matrix unit wants every
operand in both halves of a wave, and an address of 64 bits takes two."""

POINTER_RANGE = 32
"""Bits that reach every byte of a tensor below 2 GiB; triton's ROCm launcher says so of such a tensor."""


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel: registers and spilled ones of a lane, bytes of stack and of local data share."""

    vgprs: int
    vgpr_spills: int
    sgpr_spills: int
    stack: int
    lds: int
    waves: float = 0

    def __str__(self) -> str:
        registers = f"{self.vgprs:3d} VGPRs {self.vgpr_spills:3d} spilled {self.stack:4d} B stack"
        return f"{registers} {self.lds / 1024:5.1f} KiB LDS {self.waves:5g} waves a SIMD unit"

    def problems(self, job: tool.Job) -> list[str]:
        """Why a configuration must not be shipped."""
        found = []
        operand = next(job.launch.views()).itemsize
        width = 128 if job.arguments.get("KP", 0) <= 128 else 256
        kinds = "h", "checkpoints", "states", "transitions", "additions"
        more = [n for n in kinds if job.arguments.get(n) is not None]
        name = ", ".join([job.launch.name, *more])
        stated = KNOWN_LARGE_SPILLS if job.large else {}
        limit, lds = stated.get((job.arch, name, operand, width), SPILL_LIMIT), ARCHITECTURES[job.arch].lds
        if self.vgpr_spills > limit:
            found.append(f"{self.vgpr_spills} spilled registers, at most {limit} allowed")
        if self.lds > lds:
            found.append(f"{self.lds} bytes of local data share, {lds} available")
        return found


def occupancy(vgprs: int, lds: int, num_warps: int, target: Architecture) -> float:
    """Waves a SIMD unit, an estimate: by registers and by local data share."""
    granted = -(-max(vgprs, 1) // target.granule) * target.granule
    waves: float = min(target.waves, target.registers // granted)
    return min(waves, target.lds // lds * num_warps / target.simds) if lds else waves


_GATES: dict[str, dict[str, Any]] = {
    "given": {}, "given, safe": {"options": {"safe_gate": True}}, "softplus": {"gate": "softplus"},
    "bounded": {"gate": "lower bound"},
}  # fmt: skip
_EVERY_GATE = tuple(_GATES)
_SHIPPED = (
    (BF16, 64, ("bounded",)), (BF16, 128, _EVERY_GATE), (BF16, 256, _EVERY_GATE),
    (FP16, 128, ("given",)), (FP32, 128, _EVERY_GATE), (FP32, 256, _EVERY_GATE),
)  # fmt: skip
"""(dtype, K, gates) that stand for every configuration: float16 has bfloat16's, and K up to 128 has that of 128."""

_QUICK = ((BF16, 128, ("bounded",)), (FP32, 256, ("softplus",)))
"""The most common shape and the largest."""

_V_FIRST = {"options": {"state_v_first": True}}


def cases(quick: bool = False) -> Iterator[Case]:
    """Calls that between them launch every configuration; ``quick``: the most common shape and the largest."""
    for dtype, K, gates in _QUICK if quick else _SHIPPED:
        for gate in gates:
            trained = "safe" not in gate
            case = Case(
                name=f"{tool.TYPES[dtype]} K {K} {gate}", T=64, lengths=(32, 32), H=2, HV=4, K=K, dtype=dtype,
                gate_dtype=dtype, state=FP32, l2norm=True, beta="sigmoid", backward=trained, **_GATES[gate],
            )  # fmt: skip
            yield case
            if gate == "given":
                options = {"return_intermediate_states": True}
                yield case.having(name=f"{tool.TYPES[dtype]} K {K} states", backward=False, options=options)
            if gate == gates[0]:
                tags = frozenset({"pool", "served", "checkpoints"})
                yield case.having(name=f"{tool.TYPES[dtype]} K {K}, served", backward=False, tags=tags)
                yield case.having(name=f"{tool.TYPES[dtype]} K {K}, pieces", backward=False, tags=tags | {"pieces"})
                # The layout of states changes the same code for every gate.
                yield case.having(name=f"{tool.TYPES[dtype]} K {K}, V first", backward=False, **_V_FIRST)
            if gate == "bounded" and dtype.itemsize == 2 and K == MOST_KEYS:
                # One long sequence, which is cut.
                yield case.having(name=f"{tool.TYPES[dtype]} K {K} segments", lengths=(), T=LEAST_ROWS * MOST_SEGMENTS)
            if trained:
                drafts = case.having(op="fused_recurrent_kda", tags=frozenset({"drafts"}), backward=False)
                yield drafts
                yield drafts.having(name=f"{drafts.name}, served", tags=drafts.tags | {"served"})
                yield drafts.having(name=f"{drafts.name}, V first", **_V_FIRST)
                for kind in ("records", "trees"):
                    tags = frozenset({"pool", "records", kind})
                    yield drafts.having(name=f"{drafts.name}, {kind}", tags=tags)


def fragments(quick: bool = False) -> Iterator[Case]:
    """Calls in halves: packed, and of few heads, which are cut; with both layouts of states."""
    dense = Case(
        name="halves", T=LEAST_ROWS * MOST_SEGMENTS, H=2, HV=4, K=128, dtype=BF16, gate_dtype=BF16, l2norm=True,
        backward=True, **_GATES["bounded"],
    )  # fmt: skip
    yield dense.having(name="halves, packed", lengths=(dense.T // 2, 5), **_V_FIRST)
    if not quick:
        yield dense
        yield dense.having(name="halves, short", T=64, lengths=(32, 32))


@cache
def _calls(quick: bool) -> list[tuple[str, AnyRequest]]:
    """Names and requests."""
    found: list[Any] = []
    for case in cases(quick):
        found.append((case.name, tool.inference(case)))
        if case.backward:
            found.append((case.name, tool.gradients(case)))
    gates = [call for bound in (None, -5.0) for call in tool.gate_calls(BF16, bound)]
    return [*found, *gates, *tool.commit_calls(), *tool.layer_calls(quick)]


def plans(chip: Architecture, quick: bool) -> Iterator[tuple[str, Plan]]:
    yield from ((name, plan_of(call, chip)) for name, call in _calls(quick))
    for case in fragments(quick):
        yield from tool.halves(case, lambda r, half: plan_of(r, chip, half=half), lambda r: saved_specs(r, chip))


def _of_tensor(x: View, job: tool.Job) -> tuple[str, list[list[Any]]]:
    # As triton's ROCm launcher tells the compiler of tensors below 2 GiB.
    return "*" + tool.TYPES[x.dtype], [tool.DIVISIBLE] + [["tt.pointer_range", POINTER_RANGE]] * (not job.large)


def _resources(job: tool.Job, kernel: Any) -> Resources:
    text, lds = kernel.asm["amdgcn"], kernel.metadata.shared
    names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    numbers = [int(re.search(rf"\.{name}:\s*(\d+)", text)[1]) for name in names]
    return Resources(*numbers, lds, occupancy(numbers[0], lds, job.launch.num_warps, ARCHITECTURES[job.arch]))


_CHIPS = MappingProxyType({name: chip for name, chip in ARCHITECTURES.items() if name != FOREIGN_ARCHITECTURE})

TOOL = tool.Tool(
    "kda_core_amd", "Compile for AMD GPUs: registers, spills, local data share.", _CHIPS, tuple(_CHIPS),
    plans, _of_tensor, lambda job: GPUTarget("hip", job.arch, ARCHITECTURES[job.arch].wave), _resources, sizes=True,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(TOOL.main())

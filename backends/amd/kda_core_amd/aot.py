"""``python -m kda_core_amd.aot``: compile every shipped configuration without a GPU and print what it takes.

Calls are planned for each architecture, and the launches of their plans are compiled: the same plans that calls run.
For each kernel: vector registers, spills and local data share, as the assembler's
metadata has them, and the waves that fit on a SIMD unit. Exit status 1 when a kernel spills more registers than
stated (SPILL_LIMIT, KNOWN_LARGE_SPILLS) or needs more local data share than the chip has.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kda_core.request import AnyRequest, GateRequest, Request
from kda_core.triton_lib.addresses import Hazard, hazards
from kda_core.triton_lib.ahead_of_time import DIVISIBLE, TYPES, layer_calls, specialised
from kda_core.triton_lib.layout import CHUNK
from kda_core.triton_lib.plan import Launch, View
from kda_core.triton_lib.run import compile_options
from kda_core_amd.calls import plan_of
from kda_core_amd.choose import ARCHITECTURES, FOREIGN_ARCHITECTURE, MOST_KEYS, Architecture

SPILL_LIMIT = 8
"""Vector registers of a lane that may spill: a few saved round a loop cost nothing that can be measured."""

KNOWN_LARGE_SPILLS = {
    ("gfx1100", "recurrence", 2, 128): 16,
    ("gfx1100", "recurrence", 2, 256): 24,
    ("gfx1100", "recurrence", 4, 256): 24,
    ("gfx1100", "recurrence, h", 2, 128): 56,
    ("gfx1100", "recurrence, h", 2, 256): 160,
    ("gfx1100", "reverse_kernel", 2, 128): 24,
    ("gfx1100", "reverse_kernel", 2, 256): 40,
}
"""(architecture, kernel, bytes of an operand, padded K up to) -> registers of a lane that spill in kernels that are
served all the same, only for tensors of 2 GiB and more ("h": with intermediate states). A lane of gfx1100 has 256
registers, its matrix unit wants every operand in both halves of a wave, and an address of 64 bits takes two."""

POINTER_RANGE = 32
"""Bits that reach every byte of a tensor below 2 GiB; triton's ROCm launcher says so of such a tensor."""


@dataclass(frozen=True)
class Job:
    """A launch to be compiled for a chip, of a call that ``name`` describes."""

    launch: Launch
    name: str
    target: Architecture

    @property
    def kernel(self) -> Any:
        return self.launch.kernel

    @property
    def values(self) -> dict[str, Any]:
        """Values of the kernel's parameters."""
        return {**self.launch.arguments, **self.launch.constants}

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler."""
        return {n: x for n, x in compile_options(self.launch).items() if n not in self.kernel.arg_names}


def source(job: Job, small: bool) -> ASTSource:
    """What triton compiles for a launch.

    Args:
        small: every tensor is below 2 GiB, as triton's ROCm launcher tells the compiler.
    """

    def of_tensor(x: View) -> tuple[str, list[list[Any]]]:
        return "*" + TYPES[x.dtype], [DIVISIBLE] + [["tt.pointer_range", POINTER_RANGE]] * small

    return ASTSource(job.kernel, *specialised(job.kernel, job.values, of_tensor))


def compiled(job: Job, small: bool = True) -> Any:
    """Compile a launch for its architecture; the result's ``asm`` holds every stage's text."""
    target = GPUTarget("hip", job.target.name, job.target.wave)
    return triton.compile(source(job, small), target=target, options=job.options)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers of a lane, spilled registers, bytes of stack and of local data share."""

    vgprs: int
    vgpr_spills: int
    sgpr_spills: int
    stack: int
    lds: int

    @classmethod
    def of(cls, kernel: Any) -> Resources:
        text = kernel.asm["amdgcn"]

        def number(name: str) -> int:
            return int(re.search(rf"\.{name}:\s*(\d+)", text)[1])

        return cls(
            number("vgpr_count"),
            number("vgpr_spill_count"),
            number("sgpr_spill_count"),
            number("private_segment_fixed_size"),
            kernel.metadata.shared,
        )

    def occupancy(self, target: Architecture, num_warps: int) -> float:
        """Waves a SIMD unit, an estimate: by registers and by local data share."""
        granted = -(-max(self.vgprs, 1) // target.granule) * target.granule
        waves: float = min(target.waves, target.registers // granted)
        if self.lds:
            waves = min(waves, target.lds // self.lds * num_warps / target.simds)
        return waves

    def problems(self, job: Job, small: bool = True) -> list[str]:
        """Why a configuration must not be shipped; ``small`` as it was compiled."""
        found = []
        target, values = job.target, job.values
        operand = next(job.launch.views()).itemsize
        width = 128 if values.get("KP", 0) <= 128 else 256
        name = job.launch.name + ", h" * (values.get("h") is not None)
        stated = {} if small else KNOWN_LARGE_SPILLS
        limit = stated.get((target.name, name, operand, width), SPILL_LIMIT)
        if self.vgpr_spills > limit:
            found.append(f"{self.vgpr_spills} spilled registers, at most {limit} allowed")
        if self.lds > target.lds:
            found.append(f"{self.lds} bytes of local data share, {target.lds} available")
        return found


_GATES: dict[str, dict[str, Any]] = {
    "given": {},
    "given, safe": {"safe_gate": True},
    "softplus": {"use_gate_in_kernel": True},
    "bounded": {"use_gate_in_kernel": True, "lower_bound": -5.0},
}


def _request(op: str, dtype: torch.dtype, K: int, gate_options: dict[str, Any], T: int = 64) -> Request:
    """A packed call with everything in the kernel."""
    H, HV, N = 2, 4, 2
    q = torch.empty(1, T, H, K, dtype=dtype)
    g = torch.empty(1, T, HV, K, dtype=dtype)
    options = dict(gate_options)
    if options.get("use_gate_in_kernel"):
        options |= {"A_log": torch.empty(HV), "dt_bias": torch.empty(HV, K)}
    return Request(
        op=op, q=q, k=torch.empty_like(q), v=torch.empty(1, T, HV, K, dtype=dtype), g=g,
        beta=torch.empty(1, T, HV, dtype=dtype), scale=K**-0.5, initial_state=torch.empty(N, HV, K, K),
        cu_seqlens=torch.zeros(N + 1, dtype=torch.int32), output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, **options,
    )  # fmt: skip


def _one_sequence(request: Request) -> Request:
    """The same call with one dense sequence, to be cut into segments."""
    states = {name: getattr(request, name) for name in ("initial_state", "grad_final_state")}
    return replace(request, cu_seqlens=None, **{name: x if x is None else x[:1] for name, x in states.items()})


def _in_pool(request: Request, v_first: bool) -> Request:
    """The same call on a pool, with a slot for every token."""
    return replace(
        request,
        ssm_state_indices=torch.zeros(request.N, 3, dtype=torch.int32),
        num_accepted_tokens=torch.ones(request.N, dtype=torch.int32),
        inplace_final_state=True,
        state_v_first=v_first,
    )


_EVERY_GATE = tuple(_GATES)
_SHIPPED = (
    (torch.bfloat16, 64, ("bounded",)),
    (torch.bfloat16, 128, _EVERY_GATE),
    (torch.bfloat16, 256, _EVERY_GATE),
    (torch.float16, 128, ("given",)),
    (torch.float32, 128, _EVERY_GATE),
    (torch.float32, 256, _EVERY_GATE),
)
"""(dtype, K, gates) that stand for every configuration: float16 has bfloat16's, and K up to 128 has that of 128."""

_QUICK = ((torch.bfloat16, 128, ("bounded",)), (torch.float32, 256, ("softplus",)))
"""The most common shape and the largest."""


def _calls(shapes: Sequence[tuple]) -> Iterator[tuple[str, AnyRequest, int]]:
    """(name, call, rows of its segments) of every kernel at these shapes."""
    for dtype, K, gates in shapes:
        for gate_name in gates:
            options = _GATES[gate_name]
            request = _request("chunk_kda", dtype, K, options)
            yield f"{TYPES[dtype]} K {K} {gate_name}", request, 0
            if gate_name == "given":
                states = replace(request, return_intermediate_states=True, cu_seqlens_cpu=request.cu_seqlens)
                yield f"{TYPES[dtype]} K {K} states", states, 0
            if gate_name == gates[0]:
                # The layout of states changes the same code for every gate.
                yield f"{TYPES[dtype]} K {K}, V first", replace(request, state_v_first=True), 0
            if "safe" not in gate_name:
                backward = replace(
                    request,
                    grad_o=request.v,
                    grad_final_state=request.initial_state,
                    needs_grad=frozenset({"q", "k", "v", "g", "beta", "initial_state"}),
                )
                yield f"{TYPES[dtype]} K {K} {gate_name}", backward, 0
                if gate_name == "bounded" and dtype.itemsize == 2 and K == MOST_KEYS:
                    name = f"{TYPES[dtype]} K {K} segments"
                    yield name, _one_sequence(request), CHUNK
                    yield name, _one_sequence(backward), CHUNK
                for v_first in (False, True):
                    pool = _in_pool(_request("fused_recurrent_kda", dtype, K, options), v_first)
                    name = f"{TYPES[dtype]} K {K} {gate_name}" + ", V first" * v_first
                    yield name, pool, 0
    for bound in (None, -5.0):
        g = torch.empty(64, 4, 128, dtype=torch.bfloat16)
        request = GateRequest(g=g, A_log=torch.empty(4), dt_bias=torch.empty(4, 128), lower_bound=bound)
        needs = frozenset({"g", "A_log", "dt_bias"})
        name = "softplus" if bound is None else "bounded"
        yield name, request, 0
        yield name, replace(request, grad_output=torch.empty(64, 4, 128), needs_grad=needs), 0
    for name, call in layer_calls("meta"):
        yield name, call, 0


def shipped(target: Architecture, only: str = "", quick: bool = False) -> list[Job]:
    """Every launch to be compiled for an architecture, each once.

    Args:
        only: a part of the kernel's name, or of the launch's.
        quick: the most common shape and the largest, rather than all.
    """
    found: dict[Any, Job] = {}
    for name, call, rows in _calls(_QUICK if quick else _SHIPPED):
        for launch in plan_of(call, target, rows=rows).launches:
            if only in f"{launch.name} {name}":
                one = Job(launch, name, target)
                what = source(one, small=True)
                compiles = (str(x) for x in (what.signature, what.constants, what.attrs, one.options))
                found.setdefault((launch.name, *compiles), one)
    return list(found.values())


def address_hazards(ir: str) -> list[Hazard]:
    """Addresses in the text of a module whose offset may have wrapped at 32 bits, buffer instructions included."""
    return hazards(ir, ("amdg.buffer_", "amdgpu.buffer_"), ("amdg.buffer_load",))


_JOBS: list[Job] = []
"""Launches that the workers of ``report`` compile; the workers are forked, so that launches are not sent to them."""


def _line(index: int, small: bool) -> tuple[str, bool]:
    """Compile a launch; its line of the table, and whether it may be shipped."""
    one = _JOBS[index]
    kernel, waves = compiled(one, small), one.launch.num_warps
    taken = Resources.of(kernel)
    problems = taken.problems(one, small)
    if not small:
        problems += [f"32-bit address: {h.line} ({h.reason})" for h in address_hazards(kernel.asm["ttgir"])]
    line = (
        f"{one.target.name:8} {one.launch.name:20} {one.name:24} {waves:5} {taken.vgprs:5} "
        f"{taken.vgpr_spills:6} {taken.stack:5} {taken.lds:7} {taken.occupancy(one.target, waves):5g}"
    )
    return line + "".join(f"  ERROR: {p}" for p in problems), not problems


def report(launches: list[Job], small: bool, jobs: int) -> int:
    """Compile launches, print a line for each, and answer how many of them must not be shipped."""
    _JOBS[:] = launches
    failed = 0
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for line, right in pool.imap(partial(_line, small=small), range(len(launches))):
            print(line, flush=True)
            failed += not right
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line for each kernel, and answer the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kda_core_amd.aot", description=__doc__.split("\n\n")[1])
    known = [name for name in ARCHITECTURES if name != FOREIGN_ARCHITECTURE]
    parser.add_argument("--arch", nargs="+", default=known, choices=known, help="architectures; default: all of them")
    parser.add_argument("--only", default="", help="only kernels whose name or case contains this")
    parser.add_argument("--quick", action="store_true", help="only the most common shape and the largest")
    parser.add_argument("--large", action="store_true", help="for tensors of any size; checks addresses, too")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compile so many at once")
    chosen = parser.parse_args(arguments)
    print(f"triton {triton.__version__}, tensors {'of any size' if chosen.large else 'below 2 GiB'}")
    print(f"{'':8} {'kernel':20} {'case':24} waves VGPRs spills stack     LDS waves/SIMD")
    launches = [one for name in chosen.arch for one in shipped(ARCHITECTURES[name], chosen.only, chosen.quick)]
    failed = report(launches, not chosen.large, chosen.jobs)
    print(f"{failed} of {len(launches)} failed" if failed else f"{len(launches)} kernels within limits")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

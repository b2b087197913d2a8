"""``python -m kda_core_nvidia.aot --arch 80 89 90 100 120``: compile every shipped configuration without a GPU.

Calls are planned for each architecture, and the launches of their plans are compiled: the same plans that calls run.
For each kernel the table shows registers, stack (spills) and shared memory, read from the machine code by the
``cuobjdump`` that comes with triton. Exit status 1 when a kernel uses more stack than STACK_LIMITS states, or more
shared memory than the chip has, or computes with a copy of the stack pointer.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from kda_core.request import AnyRequest, GateRequest, LayerRequest, Request
from kda_core.triton_lib.ahead_of_time import DIVISIBLE, TYPES, layer_calls, specialised
from kda_core.triton_lib.plan import Launch, Tile, View, metadata
from kda_core.triton_lib.run import compile_options
from kda_core_nvidia import aot_recurrent
from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS, SHARED_LIMIT, choose_backward
from kda_core_nvidia.machine_code import uses_stack_pointer
from kda_core_nvidia.plans.backward import plan_backward
from kda_core_nvidia.plans.forward import saved_specs
from kda_core_nvidia.triton_private import shared_layout

STACK_LIMITS = {
    # (bytes of an element of q, K above 128): bytes of stack that a thread may use
    (2, False): 256,
    (2, True): 400,
    (4, False): 400,
    (4, True): 800,
}
"""What may spill: with 16-bit inputs loop constants, read a few times in 1,400 instructions (above 128 channels, blocks
of 128 value channels spill up to 392 bytes and still take an H200 half the time of blocks of 64); with float32 inputs
the parts of operands of products in full precision, of which a state of more than 128 channels has the most."""


@dataclass(frozen=True)
class Job:
    """A launch to be compiled, of a call that ``name`` describes, for sm_``arch``."""

    launch: Launch
    name: str = ""
    arch: int = 0

    @property
    def kernel(self) -> Any:
        return self.launch.kernel

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Arguments, constants and the compiler's options."""
        return {**self.launch.arguments, **compile_options(self.launch)}

    @property
    def stack_limit(self) -> int:
        """Bytes of stack that a thread may use."""
        return STACK_LIMITS[next(self.launch.views()).itemsize, self.arguments.get("K", 0) > 128]


def _of_tensor(x: View | Tile) -> tuple[str, list[list[Any]]]:
    """Triton's type of a tensor or a descriptor, and its attributes."""
    if isinstance(x, View):
        return "*" + TYPES[x.dtype], [DIVISIBLE] * x.aligned
    stated = x.swizzled or x.by_rows
    layout = f",{shared_layout(x.base.dtype, x.block, x.by_rows)!r}" if stated else ""
    return f"tensordesc<{TYPES[x.base.dtype]}{list(x.block)}{layout}>", []


def source(job: Job) -> tuple[ASTSource, dict[str, int]]:
    """What triton compiles for a launch, and its options."""
    signature, constants, attributes = specialised(job.kernel, job.arguments, _of_tensor)
    options = {n: v for n, v in job.arguments.items() if n not in signature}
    kind = GluonASTSource if job.kernel.is_gluon() else ASTSource
    return kind(job.kernel, signature, constants, attributes), options


def _tool(option: str, cubin: bytes) -> str:
    """What ``cuobjdump`` says about machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes."""

    registers: int
    stack: int
    shared: int
    machine_code: bytes

    def problems(self, job: Job) -> list[str]:
        """Why the configuration must not be shipped."""
        found = []
        if self.stack > job.stack_limit:
            found.append(f"{self.stack} bytes of stack, at most {job.stack_limit} allowed")
        if self.shared > SHARED_LIMIT[job.arch] * 1024:
            found.append(f"{self.shared} bytes of shared memory, {SHARED_LIMIT[job.arch]} KiB available")
        if job.arch == 90 and uses_stack_pointer(_tool("-sass", self.machine_code)):
            found.append("something is computed from a copy of the stack pointer")
        return found


def compiled(job: Job) -> Resources:
    """Compile a launch for the job's architecture."""
    src, options = source(job)
    kernel = triton.compile(src, target=GPUTarget("cuda", job.arch, 32), options=options)
    cubin = kernel.asm["cubin"]
    usage = _tool("--dump-resource-usage", cubin)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Resources(registers, stack, kernel.metadata.shared, cubin)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Case:
    """A call of ``chunk_kda`` that stands for a class of shapes and options."""

    dtype: torch.dtype
    K: int
    V: int
    H: int
    gate: str
    everything: bool = False
    T: int = 64

    def __str__(self) -> str:
        extra = " packed, pool, h" if self.everything else f" T {self.T}" if self.T > 64 else ""
        return f"{TYPES[self.dtype]} K {self.K} V {self.V} H {self.H} {self.gate}{extra}"

    def request(self) -> Request:
        """A request whose tensors have no memory."""
        B, T, H, K, V = 1, self.T, self.H, self.K, self.V
        qk = _empty(2, B, T, H, K, dtype=self.dtype)
        v = _empty(B, T, H, V, dtype=self.dtype)
        options: dict[str, Any] = {"output_final_state": True}
        if self.everything:
            bounds = torch.tensor([0, T])
            options = {
                "cu_seqlens": bounds, "cu_seqlens_cpu": bounds, "ssm_state_indices": torch.zeros(1, dtype=torch.int64),
                "inplace_final_state": True, "return_intermediate_states": True, "state_v_first": True,
            }  # fmt: skip
        if self.gate == "promised":
            options["safe_gate"] = True
        elif self.gate != "given":
            options |= {
                "use_gate_in_kernel": True,
                "A_log": _empty(H),
                "dt_bias": _empty(H, K),
                "lower_bound": -5.0 if self.gate == "bounded" else None,
            }
        state = (V, K) if self.everything else (K, V)
        return Request(
            op="chunk_kda", q=qk[0], k=qk[1], v=v,
            g=_empty(B, T, H, K, dtype=self.dtype if self.gate != "given" else torch.float32),
            beta=_empty(B, T, H, dtype=self.dtype), scale=1.0, initial_state=_empty(1, H, *state),
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, **options,
        )  # fmt: skip

    def training(self) -> Request:
        """The forward of a training step: the same call, without the pool; grouped heads with ``everything``."""
        r = self.request()
        pool = dict.fromkeys(("ssm_state_indices", "cu_seqlens_cpu"))
        off = dict.fromkeys(("inplace_final_state", "return_intermediate_states"), False)
        r = replace(r, **pool, **off, output_final_state=True, save_for_backward=True)
        if self.everything:
            r = replace(r, q=r.q[:, :, : self.H // 2], k=r.k[:, :, : self.H // 2])
        return r

    def gradients(self) -> Request:
        """The request for gradients of ``training``."""
        r = self.training()
        needs = {"q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"}
        saved = tuple(_empty(*spec.shape, dtype=spec.dtype) for spec in saved_specs(r))
        return replace(r, saved=saved, grad_o=r.v, grad_final_state=r.initial_state, needs_grad=frozenset(needs))


FEW, MANY = 16, 256
"""Heads that leave most of a chip idle, and heads that fill it."""

LONG = 32768
"""Rows of a sequence that is cut into segments, with few heads."""

ODD = 96
"""Rows of whole chunks that are no pairs of chunks."""


def cases(quick: bool = False) -> list[Case]:
    """One call for every class of shapes and options that has a configuration of its own; ``quick``: the commonest."""
    if quick:
        found = [Case(torch.bfloat16, 128, 128, MANY, "bounded"), Case(torch.float32, 64, 64, FEW, "softplus")]
        found += [
            Case(torch.bfloat16, 128, 128, MANY, "softplus"),
            Case(torch.bfloat16, 128, 128, FEW, "bounded", T=ODD),
        ]
        return found + [Case(dtype, 128, 128, 4, "given", T=LONG) for dtype in (torch.bfloat16, torch.float16)]
    sizes = itertools.product((torch.bfloat16, torch.float32), (64, 128, 256), (FEW, MANY))
    found = [Case(dtype, size, size, heads, gate) for dtype, size, heads in sizes for gate in ("bounded", "softplus")]
    found += [Case(torch.float16, 128, 128, heads, "softplus") for heads in (FEW, MANY)]
    found += [Case(torch.bfloat16, 100, 60, FEW, "given"), Case(torch.bfloat16, 128, 128, FEW, "promised")]
    found += [Case(torch.bfloat16, 128, 128, FEW, gate, T=ODD) for gate in ("bounded", "promised")]
    found += [Case(torch.bfloat16, 128, 128, heads, "given", True) for heads in (FEW, MANY)]
    found += [Case(torch.bfloat16, size, size, 4, "given", T=LONG) for size in (64, 128, 256)]
    # Segments of one length (above) have other constants than packed ones.
    found += [Case(torch.bfloat16, 128, 128, 4, "given", T=LONG + 1), Case(torch.float16, 128, 128, 4, "given", T=LONG)]
    wholes = ((torch.bfloat16, 128), (torch.float16, 128), (torch.bfloat16, 256))
    found += [Case(dtype, size, size, FEW, "given", T=ODD) for dtype, size in wholes]
    found += [Case(torch.bfloat16, 256, 256, MANY, "given", True), Case(torch.float32, 64, 64, FEW, "given", True)]
    return found


def _calls(quick: bool) -> Iterator[tuple[str, AnyRequest | LayerRequest]]:
    """(name, call) of what launches every kernel."""
    for case in cases(quick):
        yield str(case), case.request()
        yield str(case), case.training()
        if case.everything:
            yield str(case), replace(case.training(), disable_recompute=True)
        yield str(case), case.gradients()
        if case.gate == "bounded":
            # The plain kernels, where those for Hopper serve the rest.
            yield f"{case}, no do", replace(case.gradients(), grad_o=None)
    steps = aot_recurrent.shipped()
    yield from itertools.islice(steps, aot_recurrent.QUICK) if quick else steps
    yield from layer_calls("meta")
    for dtype, bound in ((torch.bfloat16, -5.0), (torch.float32, None)):
        request = GateRequest(
            g=_empty(64, 4, 128, dtype=dtype), A_log=_empty(4), dt_bias=_empty(4, 128), lower_bound=bound
        )
        name = f"gate, {TYPES[dtype]}, {'softplus' if bound is None else 'bounded'}"
        yield name, request
        yield name, replace(request, grad_output=_empty(64, 4, 128), needs_grad=frozenset({"g", "A_log", "dt_bias"}))


def _launches(arch: int, quick: bool) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of every launch of every call."""
    chip = CHIPS[arch]
    for name, call in _calls(quick):
        yield from ((name, launch) for launch in plan_of(call, chip).launches)
    for case in cases(quick):
        if case.gate in ("bounded", "promised") or case.everything:
            # The backward as calls with many slots have it.
            r = metadata(case.gradients())
            plan = plan_backward(r, choose_backward(r, chip, many=0))
            yield from ((f"{case}, descriptors", launch) for launch in plan.launches)


def shipped(arch: int, only: str = "", quick: bool = False) -> list[Job]:
    """Every launch to be compiled for an architecture, each once.

    Args:
        arch: 90 for sm_90.
        only: a part of the kernel's name, or of the call's.
        quick: the commonest configuration of every kernel, rather than all.
    """
    found: dict[Any, Job] = {}
    for name, launch in _launches(arch, quick):
        job = Job(launch, name, arch)
        if only in f"{launch.name} {name}":
            src, options = source(job)
            constants = {n: v for n, v in job.arguments.items() if src.signature.get(n) == "constexpr"}
            # Counts of heads only enter addresses.
            constants |= dict.fromkeys(constants.keys() & {"H", "HV", "HO"})
            compiles = (str(x) for x in (src.signature, constants, src.attrs, options))
            found.setdefault((launch.name, *compiles), job)
    return list(found.values())


_JOBS: list[Job] = []
"""What the workers compile: they are forked, so that launches need not travel."""


def _line(index: int) -> tuple[str, bool]:
    """Compile a launch; its line of the table, and whether it may be shipped."""
    one = _JOBS[index]
    taken = compiled(one)
    problems = taken.problems(one)
    line = (
        f"sm_{one.arch:<4} {one.kernel.__name__:20s} {one.name:44s} {taken.registers:3d} registers "
        f"{taken.stack:5d} B stack {taken.shared / 1024:6.1f} KiB shared"
    )
    return line + "".join(f"  ERROR: {p}" for p in problems), not problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line for each kernel, and answer the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kda_core_nvidia.aot", description=__doc__.split("\n\n")[1])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 89, 90, 100, 120], choices=sorted(SHARED_LIMIT))
    parser.add_argument("--only", default="", help="only kernels whose name or case contains this")
    parser.add_argument("--quick", action="store_true", help="only the commonest configuration of every kernel")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compile so many at once")
    chosen = parser.parse_args(arguments)
    _JOBS[:] = [one for arch in chosen.arch for one in shipped(arch, chosen.only, chosen.quick)]
    print(f"triton {triton.__version__}, {len(_JOBS)} kernels")
    failed = 0
    with multiprocessing.get_context("fork").Pool(chosen.jobs) as pool:
        for line, right in pool.imap(_line, range(len(_JOBS))):
            print(line, flush=True)
            failed += not right
    print(f"{failed} of {len(_JOBS)} kernels must not be shipped" if failed else "all within limits")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

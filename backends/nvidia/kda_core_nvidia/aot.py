"""``python -m kda_core_nvidia.aot --arch 80 89 90 100 120``: compile every shipped configuration without a GPU.

The hooks' functions run on small CPU tensors with their kernels replaced by recorders, so that what is compiled is
what a call would compile. For each kernel the table shows registers, stack (spills) and shared memory, read from the
machine code by the ``cuobjdump`` that comes with triton. Exit status 1 when a kernel uses more stack than STACK_LIMITS
states, or more shared memory than the chip has, or computes with a copy of the stack pointer.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kda_core.request import GateRequest, Request
from kda_core_nvidia import aot_recurrent, chunk_backward, chunk_forward, gate, launch, recurrent_launch, segments
from kda_core_nvidia.launch import Chip, Launcher, compile_options
from kda_core_nvidia.machine_code import uses_stack_pointer

MODULES = (chunk_forward, chunk_backward, gate, recurrent_launch, segments)
"""The modules that launch kernels."""

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

SHARED_LIMIT = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""KiB of shared memory that one program may use, by architecture (CUDA C++ Programming Guide, compute capabilities)."""

MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 160, 110: 20, 120: 188, 121: 48}
"""Of the largest chip of an architecture; only decides between the configurations for many and for few programs."""

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Launch:
    """One recorded launch, of a call that ``name`` describes, for sm_``arch``."""

    kernel: JITFunction
    arguments: dict[str, Any]
    name: str = ""
    arch: int = 0

    @property
    def stack_limit(self) -> int:
        """Bytes of stack that a thread may use."""
        first = next(x for x in self.arguments.values() if isinstance(x, (Tensor, TensorDescriptor, GluonDescriptor)))
        dtype = first.dtype if isinstance(first, Tensor) else first.base.dtype
        return STACK_LIMITS[dtype.itemsize, self.arguments.get("K", 0) > 128]


class _Recorder:
    """Stands in for a kernel: ``recorder[grid](...)`` notes the arguments and launches nothing."""

    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            named = zip(self.kernel.arg_names, args, strict=False)
            self.launches.append(Launch(self.kernel, dict(named) | kwargs))

        return record


@contextmanager
def recorded(*modules: Any) -> Iterator[list[Launch]]:
    """Record what ``modules`` launch, whether kernels are called directly or through a Launcher."""
    launches: list[Launch] = []
    replaced = [(m, n, x) for m in modules for n, x in vars(m).items() if isinstance(x, (JITFunction, Launcher))]
    for module, name, x in replaced:
        if isinstance(x, Launcher):
            recorder = _Recorder(x.kernel, launches)

            def record(grid, arguments, constants, num_warps, recorder=recorder):
                recorder[grid](*arguments, **compile_options(constants), num_warps=num_warps)

            setattr(module, name, record)
        else:
            setattr(module, name, _Recorder(x, launches))
    try:
        yield launches
    finally:
        for module, name, x in replaced:
            setattr(module, name, x)


@contextmanager
def chip_of(arch: int) -> Iterator[None]:
    """Let the modules that launch take every device for one of sm_``arch``."""
    chip = Chip((arch // 10, arch % 10), MULTIPROCESSORS[arch])
    stand_ins = {"chip": lambda device: chip, "architecture": lambda device: arch}
    replaced = [(m, n, vars(m)[n]) for m in (launch, *MODULES) for n in stand_ins if n in vars(m)]
    for module, name, _ in replaced:
        setattr(module, name, stand_ins[name])
    try:
        yield
    finally:
        for module, name, x in replaced:
            setattr(module, name, x)


def source(launch: Launch) -> tuple[ASTSource, dict[str, int]]:
    """What triton compiles for a launch, by triton's own rules of specialisation, and its options."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            kind = "constexpr"
        elif isinstance(value, TensorDescriptor):
            kind = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, GluonDescriptor):
            kind = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
        elif isinstance(value, Tensor):
            kind = "*" + _TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            kind = "fp32"
        elif parameter.do_not_specialize or not (value == 1 or value % 16 == 0):
            kind = parameter.annotation_type or "i32"
        elif value == 1:
            kind = "constexpr"
        else:
            kind = parameter.annotation_type or "i32"
            attributes[(i,)] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(i,)] = value
    options = {n: v for n, v in launch.arguments.items() if n not in signature}
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    return kind(launch.kernel, signature, constants, attributes), options


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

    def problems(self, launch: Launch) -> list[str]:
        """Why the configuration must not be shipped."""
        found = []
        if self.stack > launch.stack_limit:
            found.append(f"{self.stack} bytes of stack, at most {launch.stack_limit} allowed")
        if self.shared > SHARED_LIMIT[launch.arch] * 1024:
            found.append(f"{self.shared} bytes of shared memory, {SHARED_LIMIT[launch.arch]} KiB available")
        if launch.arch == 90 and uses_stack_pointer(_tool("-sass", self.machine_code)):
            found.append("something is computed from a copy of the stack pointer")
        return found


def compiled(launch: Launch, arch: int) -> Resources:
    """Compile a launch for sm_``arch``."""
    src, options = source(launch)
    kernel = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = kernel.asm["cubin"]
    usage = _tool("--dump-resource-usage", cubin)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Resources(registers, stack, kernel.metadata.shared, cubin)


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
        return f"{_TYPES[self.dtype]} K {self.K} V {self.V} H {self.H} {self.gate}{extra}"

    def request(self) -> Request:
        """A request on the CPU; only its metadata matters."""
        B, T, H, K, V = 1, self.T, self.H, self.K, self.V
        qk = torch.empty(2, B, T, H, K, dtype=self.dtype)
        v = torch.empty(B, T, H, V, dtype=self.dtype)
        options: dict[str, Any] = {"output_final_state": True}
        if self.everything:
            bounds = torch.tensor([0, T])
            options = {
                "cu_seqlens": bounds,
                "cu_seqlens_cpu": bounds,
                "ssm_state_indices": torch.zeros(1, dtype=torch.int64),
                "inplace_final_state": True,
                "return_intermediate_states": True,
                "state_v_first": True,
            }
        if self.gate != "given":
            options |= {
                "use_gate_in_kernel": True,
                "A_log": torch.empty(H),
                "dt_bias": torch.empty(H, K),
                "lower_bound": -5.0 if self.gate == "bounded" else None,
            }
        state = (V, K) if self.everything else (K, V)
        return Request(
            op="chunk_kda",
            q=qk[0],
            k=qk[1],
            v=v,
            g=torch.empty(B, T, H, K, dtype=self.dtype if self.gate != "given" else torch.float32),
            beta=torch.empty(B, T, H, dtype=self.dtype),
            scale=1.0,
            initial_state=torch.empty(1, H, *state),
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            **options,
        )

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
        saved = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in chunk_forward.saved_specs(r))
        return replace(r, saved=saved, grad_o=r.v, grad_final_state=r.initial_state, needs_grad=frozenset(needs))


FEW, MANY = 16, 256
"""Heads that leave most of a chip idle, and heads that fill it."""

LONG = 32768
"""Rows of a sequence that is cut into segments, with few heads."""

WHOLE = 4096
"""Rows from which the backward's recurrences have their form for Hopper, in a sequence that is not cut."""


def cases(quick: bool = False) -> list[Case]:
    """One call for every class of shapes and options that has a configuration of its own; ``quick``: the commonest."""
    if quick:
        found = [Case(torch.bfloat16, 128, 128, MANY, "bounded"), Case(torch.float32, 64, 64, FEW, "softplus")]
        return [*found, Case(torch.bfloat16, 128, 128, 4, "given", T=LONG)]
    sizes = itertools.product((torch.bfloat16, torch.float32), (64, 128, 256), (FEW, MANY))
    found = [Case(dtype, size, size, heads, gate) for dtype, size, heads in sizes for gate in ("bounded", "softplus")]
    found += [Case(torch.float16, 128, 128, heads, "softplus") for heads in (FEW, MANY)]
    found += [Case(torch.bfloat16, 100, 60, FEW, "given")]
    found += [Case(torch.bfloat16, 128, 128, heads, "given", True) for heads in (FEW, MANY)]
    found += [Case(torch.bfloat16, size, size, 4, "given", T=LONG) for size in (64, 128, 256)]
    wholes = ((torch.bfloat16, 128), (torch.float16, 128), (torch.bfloat16, 256))
    found += [Case(dtype, size, size, FEW, "given", T=WHOLE) for dtype, size in wholes]
    found += [Case(torch.bfloat16, 256, 256, MANY, "given", True), Case(torch.float32, 64, 64, FEW, "given", True)]
    return found


def _backward_of_many(request: Request) -> None:
    """The backward as calls with many slots have it."""
    many, chunk_backward._MANY = chunk_backward._MANY, 0
    try:
        chunk_backward.chunk_backward(request)
    finally:
        chunk_backward._MANY = many


def _calls(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of what launches every kernel."""
    for case in cases(quick):
        yield str(case), partial(chunk_forward.chunk_forward, case.request())
        yield str(case), partial(chunk_forward.chunk_forward, case.training())
        if case.everything:
            yield str(case), partial(chunk_forward.chunk_forward, replace(case.training(), disable_recompute=True))
        yield str(case), partial(chunk_backward.chunk_backward, case.gradients())
        if case.gate == "bounded" or case.everything:
            yield f"{case}, descriptors", partial(_backward_of_many, case.gradients())
    steps = aot_recurrent.shipped()
    for name, request in itertools.islice(steps, aot_recurrent.QUICK) if quick else steps:
        yield name, partial(recurrent_launch.recurrent_forward, request)
    for dtype, bound in ((torch.bfloat16, -5.0), (torch.float32, None)):
        request = GateRequest(
            g=torch.empty(64, 4, 128, dtype=dtype),
            A_log=torch.empty(4),
            dt_bias=torch.empty(4, 128),
            lower_bound=bound,
            grad_output=torch.empty(64, 4, 128),
            needs_grad=frozenset({"g", "A_log", "dt_bias"}),
        )
        name = f"gate, {_TYPES[dtype]}, {'softplus' if bound is None else 'bounded'}"
        yield name, lambda r=request: (gate.gate_forward(r), gate.gate_backward(r))


def shipped(arch: int, only: str = "", quick: bool = False) -> list[Launch]:
    """Every launch to be compiled for an architecture, each once.

    Args:
        arch: 90 for sm_90.
        only: a part of the kernel's name, or of the call's.
        quick: the commonest configuration of every kernel, rather than all.
    """
    found: dict[Any, Launch] = {}
    with chip_of(arch):
        for name, call in _calls(quick):
            with recorded(*MODULES) as launches:
                call()
            for one in launches:
                one = replace(one, name=name, arch=arch)
                if only in f"{one.kernel.__name__} {name}":
                    src, options = source(one)
                    constants = {n: v for n, v in one.arguments.items() if src.signature.get(n) == "constexpr"}
                    # Counts of heads only enter addresses.
                    constants |= dict.fromkeys(constants.keys() & {"H", "HV", "HO"})
                    compiles = (str(x) for x in (src.signature, constants, src.attrs, options))
                    found.setdefault((one.kernel.__name__, *compiles), one)
    return list(found.values())


_JOBS: list[Launch] = []
"""What the workers compile: they are forked, so that launches need not travel."""


def _line(index: int) -> tuple[str, bool]:
    """Compile a launch; its line of the table, and whether it may be shipped."""
    one = _JOBS[index]
    taken = compiled(one, one.arch)
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

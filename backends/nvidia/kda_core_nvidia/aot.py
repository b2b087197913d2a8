"""``python -m kda_core_nvidia.aot --arch 80 89 90 100 120``: compile every shipped configuration without a GPU.

The launch functions run on small CPU tensors with their kernels replaced by recorders, so that what is compiled is
what a call would compile. For each kernel it prints registers, stack (spills) and shared memory, read from the machine
code by the ``cuobjdump`` that comes with triton. Exit status 1 when a kernel spills more than SPILL_LIMIT and
its neighbours say, or needs more shared memory than the chip has.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kda_core.request import Request
from kda_core_nvidia import chunk_forward
from kda_core_nvidia.launch import Chip, Launcher

SPILL_LIMIT = 160
"""Bytes of stack a thread may use with 16-bit inputs: loop constants, read a few times in 1,400 instructions."""

SPILL_LIMIT_FLOAT32 = 400
"""The same with float32 inputs, whose products take three times the operands."""

SPILL_LIMIT_FLOAT32_WIDE = 8192
"""The same above 128 channels: the state and its tf32 parts do not fit in registers. Right, but slow."""

SHARED_LIMIT = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""KiB of shared memory that one program may use, by architecture (CUDA C++ Programming Guide, compute capabilities)."""

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Launch:
    """One recorded launch."""

    kernel: JITFunction
    arguments: dict[str, Any]


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

            def launch(grid, arguments, constants, num_warps, recorder=recorder):
                recorder[grid](*arguments, **constants, num_warps=num_warps)

            setattr(module, name, launch)
        else:
            setattr(module, name, _Recorder(x, launches))
    try:
        yield launches
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
        elif isinstance(value, torch.Tensor):
            kind = "*" + _TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            kind = "fp32"
        elif parameter.do_not_specialize or not (value == 1 or value % 16 == 0):
            kind = "i32"
        elif value == 1:
            kind = "constexpr"
        else:
            kind = "i32"
            attributes[(i,)] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(i,)] = value
    options = {n: v for n, v in launch.arguments.items() if n not in signature}
    return ASTSource(launch.kernel, signature, constants, attributes), options


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes."""

    registers: int
    stack: int
    shared: int
    machine_code: bytes


def compiled(launch: Launch, arch: int) -> Resources:
    """Compile a launch for sm_``arch``."""
    src, options = source(launch)
    kernel = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = kernel.asm["cubin"]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Resources(registers, stack, kernel.metadata.shared, cubin)


MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 160, 110: 20, 120: 188, 121: 48}
"""Of the largest chip of an architecture; only decides between the configurations for many and for few programs."""


@dataclass(frozen=True)
class Case:
    """A call that stands for a class of shapes and options."""

    dtype: torch.dtype
    K: int
    V: int
    H: int
    gate: str
    everything: bool = False

    def __str__(self) -> str:
        extra = " packed, pool, h" if self.everything else ""
        return f"{_TYPES[self.dtype]} K {self.K} V {self.V} H {self.H} {self.gate}{extra}"

    @property
    def spill_limit(self) -> int:
        """Bytes of stack that a thread may use."""
        if self.dtype != torch.float32:
            return SPILL_LIMIT
        return SPILL_LIMIT_FLOAT32 if self.K <= 128 else SPILL_LIMIT_FLOAT32_WIDE

    def request(self) -> Request:
        """A request on the CPU; only its metadata matters."""
        B, T, H, K, V = 1, 64, self.H, self.K, self.V
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


def cases() -> list[Case]:
    """One call for every class of shapes and options that has a configuration of its own."""
    few, many = 4, 256
    found = [
        Case(dtype, size, size, heads, gate)
        for dtype, size, heads in itertools.product((torch.bfloat16, torch.float32), (64, 128, 256), (few, many))
        for gate in ("bounded", "softplus")
    ]
    found += [Case(torch.float16, 128, 128, heads, "softplus") for heads in (few, many)]
    found += [Case(torch.bfloat16, 100, 60, few, "given")]
    found += [
        Case(torch.bfloat16, size, size, heads, "given", True) for size, heads in ((128, few), (128, many), (256, many))
    ]
    return found


def check(case: Case, arch: int) -> list[tuple[str, Resources]]:
    """Compile what one call launches for one architecture."""
    chip = Chip((arch // 10, arch % 10), MULTIPROCESSORS[arch])
    with recorded(chunk_forward) as launches:
        actual, chunk_forward.chip = chunk_forward.chip, lambda device: chip
        try:
            chunk_forward.chunk_forward(case.request())
        finally:
            chunk_forward.chip = actual
    return [(launch.kernel.__name__, compiled(launch, arch)) for launch in launches]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a table, and return 1 when something spills or does not fit."""
    parser = argparse.ArgumentParser(prog="python -m kda_core_nvidia.aot", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 89, 90, 100, 120], choices=sorted(SHARED_LIMIT))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    work = list(itertools.product(options.arch, cases()))
    bad = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        results = pool.map(check, (case for _, case in work), (arch for arch, _ in work))
        for (arch, case), kernels in zip(work, results, strict=True):
            for name, resources in kernels:
                spills = resources.stack > case.spill_limit
                large = resources.shared > SHARED_LIMIT[arch] * 1024
                bad += spills or large
                print(
                    f"sm_{arch:<4} {name:12s} {case!s:44s} {resources.registers:3d} registers "
                    f"{resources.stack:5d} B stack {resources.shared / 1024:6.1f} KiB shared"
                    + ("  SPILLS" if spills else "")
                    + ("  TOO LARGE" if large else ""),
                    flush=True,
                )
    print(f"{bad} of the kernels spill too much or do not fit" if bad else "all fit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

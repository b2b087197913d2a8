"""``python -m kda_core_nvidia.aot``: compile every shipped configuration without a GPU and print what it takes.

The launch functions run on small CPU tensors with their kernels replaced by recorders, so that what is compiled is
what a call would compile. For each kernel: registers, stack (spills) and shared memory, read from the machine code by
the ``cuobjdump`` that comes with triton. Exit status 1 when a kernel spills more than SPILL_LIMIT bytes or needs more
shared memory than the chip has.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
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

from kda_core_nvidia.launch import Launcher

SPILL_LIMIT = 64
"""Bytes of stack that a thread may use: a few registers saved around a loop cost nothing that can be measured."""

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

"""The AMD backend's kernels compiled for AMD chips, without one: registers, local data share, and 64-bit addresses.

``python -m kda_core_amd.aot`` compiles every shipped configuration for every architecture; here are those of one call.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import installed
import pytest
import torch
from addresses import Hazard, hazards

installed.need_backend("amd")
installed.need_package("triton")

import kda_core_amd
import triton
import triton.language as tl
from kda_core_amd import aot
from kda_core_amd.aot import TOOL
from kda_core_amd.choose import ARCHITECTURES, CONFIGS, FOREIGN_ARCHITECTURE
from kda_core_amd.plugin import BACKEND, SERVED_ARCHITECTURES
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from kda_core import triton_lib
from kda_core.request import Request
from kda_core.triton_lib.ahead_of_time import Job

pytestmark = pytest.mark.end_to_end

CASE = "bf16 K 64 bounded"
CHUNK = (
    "prepare", "recurrence, o", "recurrence, states", "recurrent", "reverse_kernel", "gradients_kernel",
    "finish_kernel",
)  # fmt: skip
SEGMENTS = ("recurrence, transitions", "reverse_kernel, additions", "chain_kernel, given")
LAYER = ("convolution_forward_kernel", "convolution_backward_kernel", "norm_forward_kernel", "norm_backward_kernel")
STEP = ("convolution_step_kernel", "norm_step_kernel")
HALVES = ("segments_kernel", "chain_kernel")
KERNELS = (*CHUNK, *SEGMENTS, *LAYER, *STEP, *HALVES, "commit_kernel")
CASES = (
    dict.fromkeys(SEGMENTS, "bf16 K 128 segments")
    | dict.fromkeys(LAYER, "layer, bf16")
    | dict.fromkeys(STEP, "step of a layer")
    | dict.fromkeys(HALVES, "halves, packed")
    | {"commit_kernel": "commit, fp32 128"}
)
"""Kernels that CASE does not launch, or not with the arguments that are named behind them."""


def _job(architecture: str, kernel: str, large: bool = False) -> Job:
    found = TOOL.shipped(architecture, CASES.get(kernel, CASE), large=large)
    name, *given = kernel.split(", ")
    return [x for x in found if x.launch.name == name and all(x.arguments[n] is not None for n in given)][-1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_resources(kernel: str):
    """No spills, and no more local data share than gfx942 has."""
    job = _job("gfx942", kernel)
    assert TOOL.compiled(job).problems(job) == []


@pytest.mark.parametrize("architecture", SERVED_ARCHITECTURES)
def test_fusion_is_stated(architecture: str):
    """Triton's defaults differ from version to version, and bits of results with it."""
    options = [TOOL.source(x)[1] for x in TOOL.shipped(architecture)]
    assert options
    assert all(found["enable_fp_fusion"] is True for found in options)


def test_limits_are_held():
    """Spilled registers and local data share past what is stated are problems, and a kernel that has them fails."""
    job = _job("gfx942", "recurrence, o")
    right = aot.Resources(vgprs=128, vgpr_spills=aot.SPILL_LIMIT, sgpr_spills=0, stack=0, lds=64 * 1024)
    assert right.problems(job) == []
    (spills,) = replace(right, vgpr_spills=aot.SPILL_LIMIT + 1).problems(job)
    assert "spilled registers" in spills
    (lds,) = replace(right, lds=64 * 1024 + 1).problems(job)
    assert "local data share" in lds


def test_known_spills_are_few():
    """Below 2 GiB nothing is excused; above it only gfx1100, and no more than a lane has."""
    assert {architecture for architecture, *_ in aot.KNOWN_LARGE_SPILLS} == {"gfx1100"}
    assert max(aot.KNOWN_LARGE_SPILLS.values()) < 256
    job = _job("gfx1100", "recurrence, o")
    known = aot.KNOWN_LARGE_SPILLS["gfx1100", "recurrence", 2, 128]
    taken = aot.Resources(vgprs=256, vgpr_spills=known, sgpr_spills=0, stack=0, lds=0)
    assert taken.problems(replace(job, large=True)) == []
    assert taken.problems(job)


def test_quick_is_a_part_of_everything():
    """``--quick`` compiles fewer kernels, and each kernel at least once."""
    quick, every = (TOOL.shipped("gfx942", quick=q) for q in (True, False))
    assert len(quick) < len(every) / 3
    assert {x.launch.name for x in quick} == {x.launch.name for x in every} >= {n.split(",")[0] for n in KERNELS}


def address_hazards(text: str) -> list[Hazard]:
    """Addresses in the text of a module whose offset may have wrapped at 32 bits, buffer instructions included."""
    return hazards(text, ("amdg.buffer_", "amdgpu.buffer_"), ("amdg.buffer_load",))


def _wrong(architecture: str, quick: bool) -> list[tuple[str, str, Hazard]]:
    """Addresses that may wrap in the kernels for tensors of any size, after AMD's pointer canonicalisation."""
    found = []
    for job in TOOL.shipped(architecture, quick=quick, large=True):
        source, options = TOOL.source(job)
        target, context = TOOL.target(job), ir.context()
        backend = make_backend(target)
        ir.load_dialects(context)
        backend.load_dialects(context)
        options = backend.parse_options(options)
        given = options, backend.get_codegen_implementation(options), backend.get_module_map(), context
        module = backend.make_ttir(source.make_ir(target, *given), {}, options)
        text = str(backend.make_ttgir(module, {}, options))
        assert "tt.addptr" in text or "buffer_" in text
        found += [(job.launch.name, job.name, x) for x in address_hazards(text)]
    return found


def test_no_address_of_the_narrowest_chip_wraps():
    """FAILURES 15, for the quick part of what is shipped."""
    assert _wrong("gfx1100", quick=True) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_addresses_are_64_bit(kernel: str):
    """FAILURES 15: in the IR that triton emits, and again after AMD's pointer canonicalisation, no offset may wrap."""
    compiled = TOOL.compile(_job("gfx942", kernel, large=True))
    assert "tt.addptr" in compiled.asm["ttir"]
    for stage in ("ttir", "ttgir"):
        assert address_hazards(compiled.asm[stage]) == []


@triton.jit
def _program_times_stride(x, s, n):
    tl.store(x + tl.program_id(0) * s + tl.arange(0, 64), 1.0)


@triton.jit
def _widened_too_late(x, s, n):
    rows = tl.arange(0, 64) * s
    tl.store(x + rows.to(tl.int64), 1.0)


@triton.jit
def _loop_times_chunk(x, s, n):
    for i in range(n):
        tl.store(x + i * 32 + tl.arange(0, 64), 1.0)


@triton.jit
def _carried_offset(x, s, n):
    offset = 0
    for _ in range(n):
        tl.store(x + offset + tl.arange(0, 64), 1.0)
        offset += s


@triton.jit
def _cut_to_32_bits(x, s, n):
    offset = tl.program_id(0).to(tl.int64) * s
    tl.store(x + offset.to(tl.int32) + tl.arange(0, 64), 1.0)


@triton.jit
def _wide(x, s, n):
    pid = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, 64).to(tl.int64)
    for i in range(n):
        tl.store(x + pid * s + i.to(tl.int64) * 32 + rows * s, 1.0)


@triton.jit
def _loaded(x, s, n):
    place = tl.load(x.to(tl.pointer_type(tl.int64)))
    tl.store(x + tl.load(x.to(tl.pointer_type(tl.int64)) + place), 1.0)


@triton.jit
def _loaded_times_stride(x, s, n):
    tl.store(x + tl.load(x.to(tl.pointer_type(tl.int32))) * s, 1.0)


def _hazards(kernel, stage: str) -> int:
    source = ASTSource(kernel, {"x": "*fp32", "s": "i32", "n": "i32"}, {})
    target, options = GPUTarget("hip", "gfx942", 64), {"enable_fp_fusion": True}
    return len(address_hazards(triton.compile(source, target=target, options=options).asm[stage]))


@pytest.mark.parametrize("stage", ["ttir", "ttgir"])
@pytest.mark.parametrize(
    "kernel",
    [
        _program_times_stride,
        _widened_too_late,
        _loop_times_chunk,
        _carried_offset,
        _cut_to_32_bits,
        _loaded_times_stride,
    ],
    ids=lambda kernel: kernel.fn.__name__,
)
def test_32_bit_addresses_are_found(kernel, stage: str):
    """The check fails on kernels that are deliberately wrong."""
    assert _hazards(kernel, stage) > 0


@pytest.mark.parametrize("stage", ["ttir", "ttgir"])
@pytest.mark.parametrize("kernel", [_wide, _loaded], ids=lambda kernel: kernel.fn.__name__)
def test_64_bit_addresses_pass(kernel, stage: str):
    """And passes on the same arithmetic done in 64 bits, and on numbers of 64 bits that a table holds."""
    assert _hazards(kernel, stage) == 0


@pytest.mark.parametrize("package", [kda_core_amd, triton_lib], ids=lambda package: package.__name__)
def test_no_return_from_a_branch_on_none(package):
    """Triton 3.6 compiles what follows such a return, with None in it: calls without ``cu_seqlens`` would fail."""
    for file in Path(package.__file__).parent.glob("*.py"):
        functions = [f for f in ast.walk(ast.parse(file.read_text())) if isinstance(f, ast.FunctionDef)]
        for f in functions:
            if any("triton.jit" in ast.unparse(d) for d in f.decorator_list):
                branches = [b for b in ast.walk(f) if isinstance(b, ast.If) and "None" in ast.unparse(b.test)]
                assert not [b for b in branches if isinstance(b.body[-1], ast.Return)], f"{file.name}: {f.name}"


def test_every_architecture_is_configured():
    """Plugin, chips and configurations name the same architectures; no pipeline is deeper than two stages."""
    assert set(SERVED_ARCHITECTURES) == ARCHITECTURES.keys() - {FOREIGN_ARCHITECTURE}
    assert CONFIGS.keys() == ARCHITECTURES.keys()
    for kernels in CONFIGS.values():
        for shapes in kernels.values():
            assert shapes.keys() == {(2, 128), (2, 256), (4, 128), (4, 256)}
            assert all(config.stages <= 2 for config in shapes.values())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SERVED_ARCHITECTURES)
def test_everything_that_is_shipped(architecture: str):
    """The command that CI runs, for tensors of any size: resources and addresses of every configuration."""
    assert TOOL.main(["--arch", architecture, "--large"]) == 0
    assert _wrong(architecture, quick=False) == []


@pytest.mark.parametrize(
    ("shape", "V", "refused"),
    [
        ((2**12, 1, 64), 256, False),
        ((2**17, 1, 64), 16, False),
        # 2^23 recurrences of 16 blocks of value channels.
        ((2**17, 1, 64), 256, True),
        ((1, 2**23, 64), 16, True),
    ],
)
def test_calls_of_more_programs_than_a_launch_holds_are_refused(shape: tuple[int, int, int], V: int, refused: bool):
    x, v = torch.empty(*shape, 16, device="meta"), torch.empty(*shape, V, device="meta")
    request = Request(op="fused_recurrent_kda", q=x, k=x, v=v, g=x, beta=torch.empty(shape, device="meta"), scale=1.0)
    reason = BACKEND.kda_core_reject(request)
    assert (reason is not None) is refused
    assert reason is None or "more than one launch holds" in reason

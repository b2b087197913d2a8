"""``python -m kda_core_nvidia.aot --arch 80 89 90 100 120``: compile every shipped configuration without a GPU.

For each kernel the table shows registers, stack (spills) and shared memory, read from the machine code by the
``cuobjdump`` that comes with triton. Exit status 1 when a kernel uses more stack than STACK_LIMITS states, or more
shared memory than the chip has, or computes with a copy of the stack pointer.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from kda_core.request import Request
from kda_core.testing.cases import BF16, FP16, FP32, Case
from kda_core.triton_lib import ahead_of_time as tool
from kda_core.triton_lib.plan import Plan, View, metadata
from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS, SHARED_LIMIT, Chip, choose_backward
from kda_core_nvidia.machine_code import uses_stack_pointer
from kda_core_nvidia.plans.backward import plan_backward
from kda_core_nvidia.plans.forward import saved_specs
from kda_core_nvidia.triton_private import shared_layout

STACK_LIMITS = {(2, False): 256, (2, True): 400, (4, False): 400, (4, True): 800}
"""Bytes of stack that a thread may use, by bytes of an element of q and whether K is above 128. With 16-bit inputs loop
constants spill, read a few times in 1,400 instructions (above 128 channels, blocks of 128 value channels spill up to
392 bytes and still take an H200 half the time of blocks of 64); with float32 inputs the parts of operands of products
in full precision, of which a state of more than 128 channels has the most."""


def _tool(option: str, cubin: bytes) -> str:
    """Output of ``cuobjdump`` for machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel."""

    registers: int
    stack: int
    shared: int
    machine_code: bytes

    def __str__(self) -> str:
        return f"{self.registers:3d} registers {self.stack:5d} B stack {self.shared / 1024:6.1f} KiB shared"

    def problems(self, job: tool.Job) -> list[str]:
        """Why the configuration must not be shipped."""
        found, arch = [], int(job.arch)
        limit = stack_limit(job)
        if self.stack > limit:
            found.append(f"{self.stack} bytes of stack, at most {limit} allowed")
        if self.shared > SHARED_LIMIT[arch] * 1024:
            found.append(f"{self.shared} bytes of shared memory, {SHARED_LIMIT[arch]} KiB available")
        if arch == 90 and uses_stack_pointer(_tool("-sass", self.machine_code)):
            found.append("something is computed from a copy of the stack pointer")
        return found


def stack_limit(job: tool.Job) -> int:
    """Bytes of stack that a thread may use."""
    return STACK_LIMITS[min(4, next(job.launch.views()).itemsize), job.arguments.get("K", 0) > 128]


FEW, MANY = 16, 256
"""Heads that leave most of a chip idle, and heads that fill it."""

LONG = 32768
"""Rows of a sequence that is cut into segments, with few heads."""

ODD = 96
"""Rows of whole chunks that are no pairs of chunks."""

_GATES: dict[str, dict[str, Any]] = {
    "given": {"gate_dtype": FP32}, "promised": {"options": {"safe_gate": True}}, "softplus": {"gate": "softplus"},
    "bounded": {"gate": "lower bound"},
}  # fmt: skip


def chunk_case(dtype: torch.dtype, K: int, V: int, H: int, gate: str, everything: bool = False, T: int = 64) -> Case:
    """A call of ``chunk_kda`` that stands for a class of shapes and options; ``everything``: packed, in a pool, with
    intermediate states.
    """
    extra = " packed, pool, h" if everything else f" T {T}" if T > 64 else ""
    case = Case(
        name=f"{tool.TYPES[dtype]} K {K} V {V} H {H} {gate}{extra}", T=T, H=H, K=K, V=V, dtype=dtype, l2norm=True,
        beta="sigmoid", state=FP32, backward=True, **({"gate_dtype": dtype} | _GATES[gate]),
    )  # fmt: skip
    if gate in ("bounded", "promised") or everything:
        case = case.having(tags=frozenset({"descriptors"}))
    if not everything:
        return case
    options = {"return_intermediate_states": True, "state_v_first": True}
    return case.having(tags=case.tags | {"pool"}, lengths=(T,), index_dtype=torch.int64, options=options)


def paired_case(gate: str) -> Case:
    """A packed call whose backward takes pairs of chunks."""
    case = chunk_case(BF16, 128, 128, MANY, gate, T=1000)
    return case.having(name=f"{case.name}, in pairs", lengths=(900, 100), gate_dtype=BF16, tags=frozenset())


def several_cases(gate: str = "bounded") -> list[Case]:
    """Several sequences that are cut into segments: prefills, packed or a batch, with a pool or without, and steps."""
    case = chunk_case(BF16, 128, 128, 4, gate, T=LONG).having(backward=False, tags=frozenset())
    packed = case.having(name=f"{case.name}, packed", lengths=(LONG - 100, 100))
    pool = packed.having(name=f"{case.name}, pool", tags=frozenset({"pool"}), options={"state_v_first": True})
    found = [packed, served(packed), pool.having(state=BF16), case.having(name=f"{case.name}, batch", B=2)]
    return found + [x.having(name=f"{x.name}, step", backward=True) for x in (found[0], found[-1])]


def kept_cases() -> list[Case]:
    """Training steps whose forward also stores the states of the backward."""
    found = [chunk_case(BF16, 128, 128, heads, "bounded") for heads in (MANY // 4, MANY)] + [paired_case("bounded")]
    return [
        case.having(name=f"{case.name}, kept", options={"disable_recompute": True}, tags=frozenset()) for case in found
    ]


def short_cases() -> list[Case]:
    """Calls of ``chunk_kda`` whose sequences are short: packed, and dense ones, which need no recurrence."""
    found = [chunk_case(BF16, 128, 128, MANY, gate).having(T=32, B=2) for gate in ("given", "softplus")]
    packed = [chunk_case(dtype, 128, 128, MANY, "bounded").having(lengths=(32, 32)) for dtype in (BF16, FP16)]
    found += [*packed, served(packed[0]), packed[0].having(gate="given", gate_dtype=FP32)]
    # Two chunks a sequence, whose states are fetched ahead, or are no float32.
    pair = packed[0].having(T=128, lengths=(64, 64), options={"state_v_first": True})
    found += [pair, pair.having(gate="softplus"), pair.having(state=BF16), pair.having(state=None)]
    return [case.having(name=f"{case.name}, short", tags=case.tags - {"descriptors"}) for case in found]


def served(case: Case, *more: str) -> Case:
    """The call with everything that servers ask of a pool, forward only; with further tags."""
    tags = case.tags - {"descriptors"} | {"pool", "served", *more}
    return case.having(name=", ".join([case.name, "served", *more]), tags=tags, backward=False)


def step_case(
    N: int, T: int, v_first: bool, state: torch.dtype | None, K: int = 128, V: int = 0, name: str = "", **more: Any
) -> Case:
    """A decoding step (or a short prefill) of K3: everything in the kernel, states in a pool. V = 0 means K."""
    name = name or f"{v_first=}, {state}, {N=}, {T=}, {K=}, V={V or K}"
    fields: dict[str, Any] = {
        "op": "fused_recurrent_kda", "tags": frozenset({"pool"}), "dtype": BF16, "gate_dtype": BF16,
        "gate": "lower bound", "beta": "sigmoid", "l2norm": True, "options": {"state_v_first": v_first},
    }  # fmt: skip
    return Case(name=f"recurrent, {name}", B=N, T=T, H=32, K=K, V=V, state=state, **(fields | more))


def _steps() -> Iterator[Case]:
    """Calls that between them launch every configuration of decoding and take every path of its kernels."""
    layouts = [(v_first, state) for v_first in (False, True) for state in (FP32, BF16)]
    yield from (step_case(8, 64, *layout) for layout in layouts)
    yield from (step_case(2, 9, True, FP32, *size) for size in ((16, 16), (64, 32), (128, 64), (256, 256)))
    yield step_case(2, 9, False, FP32, name="prompts, softplus", gate="softplus")
    yield step_case(2, 9, False, FP32, name="prompts, float32", dtype=FP32, gate_dtype=FP32)
    yield from (step_case(N, T, *layout) for layout in layouts for T in (1, 2) for N in (1, 8, 129, 256))
    yield from (step_case(*size, v_first, FP32, 256) for v_first in (False, True) for size in ((9, 2), (2, 1)))
    own = {"tags": frozenset()}
    yield step_case(2, 3, False, FP32, name="drafts", tags=frozenset({"drafts"}))
    for kind in ("records", "commits"):
        tags = frozenset({"pool", "records", kind})
        yield from (step_case(N, 4, *x, tags=tags, name=f"{kind}, {N}, {x}") for x in layouts for N in (1, 8, 64))
        yield step_case(8, 8, False, FP32, tags=tags, name=f"{kind} of 8 tokens")
    tags = frozenset({"pool", "records", "commits", "trees"})
    yield from (step_case(N, 8, *x, tags=tags, name=f"trees, {N}, {x}") for x in layouts for N in (1, 64))
    yield step_case(2, 3, False, FP32, name="softplus gate, states in and out", gate="softplus", **own)
    yield step_case(1, 18, True, FP32, name="prompts packed", lengths=(9, 9))
    yield served(step_case(1, 18, True, FP32, name="prompts packed", lengths=(9, 9)))
    yield from (served(step_case(8, T, v_first, BF16)) for v_first in (False, True) for T in (1, 9))
    yield served(step_case(2, 3, False, FP32, name="drafts", tags=frozenset({"drafts"})))
    yield step_case(1, 6, False, FP32, name="packed", lengths=(3, 3))
    yield step_case(1, 6, False, None, name="packed, decay given, no states", lengths=(3, 3), gate="given", **own)


def cases(quick: bool = False) -> list[Case]:
    """One call for every class of shapes and options that has a configuration of its own; ``quick``: the commonest."""
    if quick:
        found = [chunk_case(BF16, 128, 128, MANY, "bounded"), chunk_case(FP32, 64, 64, FEW, "softplus")]
        found += [chunk_case(BF16, 128, 128, MANY, "softplus"), chunk_case(BF16, 128, 128, FEW, "bounded", T=ODD)]
        found += [chunk_case(BF16, K, K, 4, "given", T=LONG) for K in (128, 256)]
        found += [paired_case("bounded"), *several_cases()[1::3]]
        steps = ((1, 1, FP32), (8, 1, BF16), (8, 64, FP32))
        found += [step_case(N, T, False, state) for N, T, state in steps]
        tags = frozenset({"pool", "records", "commits", "trees"})
        found.append(step_case(8, 4, False, FP32, tags=tags - {"trees"}, name="commits"))
        return [*found, step_case(8, 8, False, BF16, tags=tags, name="trees")]
    sizes = itertools.product((BF16, FP32), (64, 128, 256), (FEW, MANY))
    found = [chunk_case(dtype, K, K, heads, gate) for dtype, K, heads in sizes for gate in ("bounded", "softplus")]
    found += [chunk_case(FP16, 128, 128, heads, "softplus") for heads in (FEW, MANY)]
    found += [chunk_case(BF16, 100, 60, FEW, "given"), chunk_case(BF16, 128, 128, FEW, "promised")]
    found += [chunk_case(BF16, 128, 128, FEW, gate, T=ODD) for gate in ("bounded", "promised")]
    found += [chunk_case(BF16, K, K, MANY, "softplus", T=4096) for K in (128, 256)]
    # Recurrences that follow prepare.
    found += [chunk_case(BF16, 128, 128, FEW, gate, T=2048) for gate in ("bounded", "softplus", "given")]
    found += [paired_case(gate) for gate in ("bounded", "promised", "softplus", "given")]
    found += [chunk_case(BF16, 128, 128, heads, "given", True) for heads in (FEW, MANY)]
    found += [chunk_case(BF16, K, K, 4, "given", T=LONG) for K in (64, 128, 256)]
    # Segments of one length (above) have other constants than packed ones.
    found += [chunk_case(BF16, 128, 128, 4, "given", T=LONG + 1), chunk_case(FP16, 128, 128, 4, "given", T=LONG)]
    found += [chunk_case(dtype, K, K, FEW, "given", T=ODD) for dtype, K in ((BF16, 128), (FP16, 128), (BF16, 256))]
    found += [chunk_case(BF16, 256, 256, MANY, "given", True), chunk_case(FP32, 64, 64, FEW, "given", True)]
    found += [served(chunk_case(BF16, 128, 128, heads, "bounded")) for heads in (FEW, MANY)]
    found += short_cases() + kept_cases() + several_cases()
    found += [served(chunk_case(BF16, 256, 256, FEW, "bounded")), served(chunk_case(FP32, 64, 64, FEW, "softplus"))]
    found += [served(chunk_case(dtype, 128, 128, MANY, "softplus"), "checkpoints") for dtype in (BF16, FP32)]
    sizes = (BF16, 128), (BF16, 256), (FP32, 64)
    found += [served(chunk_case(dtype, K, K, MANY, "softplus"), "checkpoints", "pieces") for dtype, K in sizes]
    return [*found, *_steps()]


def trained(case: Case) -> tuple[Request, Request]:
    """The forward and the backward of a training step; heads are grouped where the call is packed."""
    if "pool" in case.tags:
        case = case.having(H=case.H // 2, HV=case.H)
    forward = tool.training(case)
    return forward, tool.gradients(case, saved_specs(forward, CHIPS[90]))


@cache
def _calls(quick: bool) -> list[tuple[Case | None, str, Any]]:
    """Cases, names and requests."""
    found: list[Any] = []
    for case in cases(quick):
        found.append((case, case.name, tool.inference(case)))
        if case.backward:
            forward, backward = trained(case)
            found += [(case, case.name, forward), (case, case.name, backward)]
            if "pool" in case.tags:
                found.append((case, case.name, replace(forward, disable_recompute=True)))
    gates = [call for gate in ((BF16, -5.0), (FP32, None)) for call in tool.gate_calls(*gate)]
    return found + [(None, *call) for call in (*gates, *tool.commit_calls(), *tool.layer_calls(quick))]


def fragments(quick: bool = False) -> list[Case]:
    """Calls in halves: dense, uneven and packed fragments, cut and not, of every configuration."""
    if quick:
        found = [chunk_case(BF16, 128, 128, 4, "bounded", T=LONG), chunk_case(FP16, 128, 128, FEW, "given")]
        return [found[0].having(lengths=(LONG // 2, LONG // 2)), *found]
    found = [chunk_case(BF16, 128, 128, 4, gate, T=LONG) for gate in ("bounded", "given")]
    found += [chunk_case(dtype, 128, 128, heads, "given") for dtype in (BF16, FP16) for heads in (FEW, MANY)]
    found += [chunk_case(BF16, K, K, 4, "softplus", T=LONG + 1) for K in (64, 128)]
    found += [chunk_case(BF16, 100, 60, FEW, "given"), chunk_case(BF16, 64, 256, FEW, "given")]
    packed = [case.having(name=f"{case.name}, packed", lengths=(case.T // 2, 5)) for case in found]
    return found + [case.having(options={"state_v_first": True}) for case in packed]


def plans(chip: Chip, quick: bool) -> Iterator[tuple[str, Plan]]:
    for case in fragments(quick):
        yield from tool.halves(case, lambda r, half: plan_of(r, chip, half=half), lambda r: saved_specs(r, chip))
    for case, name, call in _calls(quick):
        yield name, plan_of(call, chip)
        if case is not None and call.needs_grad and "descriptors" in case.tags:
            # The backward as calls with many slots have it.
            r = metadata(call)
            yield f"{name}, descriptors", plan_backward(r, choose_backward(r, chip, many=0))


def _of_tensor(x: Any, job: tool.Job) -> tuple[str, list[list[Any]]]:
    if isinstance(x, View):
        return "*" + tool.TYPES[x.dtype], [tool.DIVISIBLE] * x.aligned
    stated = x.swizzled or x.by_rows
    layout = f",{shared_layout(x.base.dtype, x.block, x.by_rows)!r}" if stated else ""
    return f"tensordesc<{tool.TYPES[x.base.dtype]}{list(x.block)}{layout}>", []


def _resources(job: tool.Job, kernel: Any) -> Resources:
    cubin = kernel.asm["cubin"]
    usage = _tool("--dump-resource-usage", cubin)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Resources(registers, stack, kernel.metadata.shared, cubin)


TOOL = tool.Tool(
    "kda_core_nvidia", "Compile for NVIDIA GPUs: registers, stack, shared memory.",
    MappingProxyType({str(arch): chip for arch, chip in CHIPS.items()}), ("80", "89", "90", "100", "120"),
    plans, _of_tensor, lambda job: GPUTarget("cuda", int(job.arch), 32), _resources,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(TOOL.main())

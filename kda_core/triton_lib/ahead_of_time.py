"""Compiles the launches of plans without a GPU, and judges what they take.

Calls of the kit's cases are planned for each architecture, and the launches of their plans are compiled: the same plans
that calls run. A backend's module ``aot`` says what is known of its vendor (``Tool``).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from kda_core._torch_private import fake_tensors
from kda_core.request import (
    AnyRequest,
    CommitRequest,
    DecodeStepRequest,
    Edges,
    GatedNormRequest,
    GateRequest,
    LayerRequest,
    Request,
    ShortConvolutionRequest,
    TensorSpec,
)
from kda_core.testing.cases import Case
from kda_core.triton_lib.calls import backward_of
from kda_core.triton_lib.plan import Launch, Plan
from kda_core.triton_lib.run import compile_options

DIVISIBLE = ["tt.divisibility", 16]
"""Attribute of an integer or an address that 16 divides."""

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.bool: "i1", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
"""Triton's names of dtypes."""

DRAFTS = 3
"""Slots of a sequence whose tokens have one each."""


@dataclass(frozen=True)
class Job:
    """A launch to be compiled.

    Attributes:
        name: of the call that it belongs to.
        arch: name of an architecture.
        large: tensors may have 2 GiB and more.
    """

    launch: Launch
    arch: str
    name: str = ""
    large: bool = False

    @property
    def kernel(self) -> Any:
        return self.launch.kernel

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments, constants and the compiler's options."""
        return {**self.launch.arguments, **compile_options(self.launch)}


@dataclass(frozen=True, eq=False)
class Tool:
    """The facts about a vendor's chips and compiler, and the command ``python -m <package>.aot``.

    Attributes:
        package: of the backend.
        chips: facts of a chip by the name of its architecture.
        usual: architectures that are compiled for when none is named.
        plans: names of calls and their plans for a chip, which between them launch every shipped configuration of every
            kernel; or, where its last argument is true, the commonest one of every kernel.
        of_tensor: triton's type of a tensor or a tile, and its attributes.
        target: triton's target.
        resources: of a compiled kernel: an object with a text, and ``problems(job)``, why it must not be shipped.
        sizes: the compiler is told whether tensors are below 2 GiB.
    """

    package: str
    description: str
    chips: Mapping[str, Any]
    usual: Sequence[str]
    plans: Callable[[Any, bool], Iterable[tuple[str, Plan]]]
    of_tensor: Callable[[Any, Job], tuple[str, list[list[Any]]]]
    target: Callable[[Job], Any]
    resources: Callable[[Job, Any], Any]
    sizes: bool = False

    @cache  # noqa: B019 - a tool lives as long as its module
    def _planned(self, arch: str, quick: bool) -> tuple[tuple[str, Plan], ...]:
        return tuple(self.plans(self.chips[arch], quick))

    def source(self, job: Job) -> tuple[ASTSource, dict[str, Any]]:
        """The specialisation that triton compiles for a launch, by triton's own rules, and its options."""
        signature, constants, attributes = {}, {}, {}
        arguments = job.arguments
        for i, parameter in enumerate(job.kernel.params):
            value = arguments.pop(parameter.name)
            kind, known = "constexpr", []
            if parameter.is_constexpr or value is None:
                pass
            elif isinstance(value, float):
                kind = "fp32"
            elif not isinstance(value, int):
                kind, known = self.of_tensor(value, job)
            elif parameter.do_not_specialize or parameter.annotation_type or value != 1:
                kind = parameter.annotation_type or "i32"
                known = [DIVISIBLE] if value % 16 == 0 and not parameter.do_not_specialize else []
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[(i,)] = value
            if known:
                attributes[(i,)] = known
        kind = GluonASTSource if job.kernel.is_gluon() else ASTSource
        return kind(job.kernel, signature, constants, attributes), arguments

    def compile(self, job: Job) -> Any:
        """Compile a launch; the result's ``asm`` holds every stage's text."""
        source, options = self.source(job)
        return triton.compile(source, target=self.target(job), options=options)

    def compiled(self, job: Job) -> Any:
        """Compile a launch; what it takes."""
        return self.resources(job, self.compile(job))

    def shipped(self, arch: str, only: str = "", quick: bool = False, large: bool = False) -> list[Job]:
        """Every launch to be compiled for an architecture, each once.

        Args:
            only: a part of the kernel's name, or of the call's.
            quick: the commonest configuration of every kernel, rather than all.
            large: for tensors of 2 GiB and more.
        """
        found: dict[Any, Job] = {}
        for name, plan in self._planned(arch, quick):
            for launch in plan.launches:
                if only not in f"{launch.name} {name}":
                    continue
                job = Job(launch, arch, name, large)
                source, options = self.source(job)
                names = job.kernel.arg_names
                # Counts of heads only enter addresses.
                constants = {names[i]: x for (i,), x in source.constants.items() if names[i] not in ("H", "HV", "HO")}
                compiles = (str(x) for x in (source.signature, constants, source.attrs, options))
                found.setdefault((launch.name, *compiles), job)
        return list(found.values())

    def line(self, job: Job) -> tuple[str, bool]:
        """Compile a launch; its line of the table, and whether it may be shipped."""
        taken = self.compiled(job)
        problems = taken.problems(job)
        line = f"{job.arch:8} {job.launch.name:27} {job.name:44} {taken}"
        return line + "".join(f"  ERROR: {p}" for p in problems), not problems

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Compile, print a line for each kernel, and answer the exit status: 1 when one must not be shipped."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.package}.aot", description=self.description)
        parser.add_argument("--arch", nargs="+", default=self.usual, choices=sorted(self.chips), help="architectures")
        parser.add_argument("--only", default="", help="only kernels whose name or case contains this")
        parser.add_argument("--quick", action="store_true", help="only the commonest configuration of every kernel")
        parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compile so many at once")
        if self.sizes:
            parser.add_argument("--large", action="store_true", help="for tensors of any size")
        chosen = parser.parse_args(arguments)
        large = self.sizes and chosen.large
        _QUEUE[:] = [
            (self, job) for arch in chosen.arch for job in self.shipped(arch, chosen.only, chosen.quick, large)
        ]
        print(f"triton {triton.__version__}, {len(_QUEUE)} kernels" + ", tensors of any size" * large)
        failed = 0
        with multiprocessing.get_context("fork").Pool(chosen.jobs) as pool:
            for line, right in pool.imap(_line, range(len(_QUEUE))):
                print(line, flush=True)
                failed += not right
        print(f"{failed} of {len(_QUEUE)} kernels must not be shipped" if failed else "all within limits")
        return 1 if failed else 0


_QUEUE: list[tuple[Tool, Job]] = []
"""Jobs of the workers: they are forked, so that launches need not travel."""


def _line(index: int) -> tuple[str, bool]:
    tool, job = _QUEUE[index]
    return tool.line(job)


def inference(case: Case) -> Request:
    """The forward of a case, whose tensors have no memory; beta has the dtype of q.

    With the tag "pool" its states lie in a pool that is advanced in place, with "drafts" in one where every token has a
    slot. With "records" too, its tokens are recorded instead, with "commits" behind a commit, with "trees" as trees.
    With "served" it has what servers ask of a pool as well, with "checkpoints" those too, some of them within a chunk
    with "pieces".
    """
    with fake_tensors():
        r = case.call().request()
        changed: dict[str, Any] = {"beta": r.beta.to(r.q.dtype), "save_for_backward": False}
        if "records" in case.tags:
            shape = (r.B, r.T, r.HV, 2 * r.K + r.V)
            changed |= {"records": torch.empty(shape, dtype=r.compute_dtype), "update_state": False}
            if "commits" in case.tags:
                changed |= {"commit": changed["records"], "num_committed": torch.empty(r.N, dtype=torch.int32)}
            if "trees" in case.tags:
                changed["parents"] = torch.empty(r.N, r.T, dtype=torch.int32)
                changed["commit_path"] = changed["parents"] if "commits" in case.tags else None
        if case.tags & {"pool", "drafts"}:
            table = (r.N, DRAFTS) if "drafts" in case.tags else (r.N,)
            changed |= {"ssm_state_indices": torch.empty(table, dtype=case.index_dtype), "inplace_final_state": True}
        if "drafts" in case.tags:
            changed["num_accepted_tokens"] = torch.empty(r.N, dtype=torch.int32)
        if "served" in case.tags:
            changed["has_initial_state"] = torch.empty(r.N, dtype=torch.bool)
            changed |= {"final_state_indices": changed["ssm_state_indices"], "final_state_pool": r.initial_state}
            if "checkpoints" in case.tags:
                every = 48 if "pieces" in case.tags else r.chunk_size
                table = torch.empty(r.N, 2, dtype=case.index_dtype)
                changed |= {"checkpoint_indices": table, "checkpoint_every": every}
    if case.lengths:
        # Shapes of intermediate states follow from the values.
        bounds = torch.tensor([0, *case.lengths]).cumsum(0).to(case.index_dtype)
        changed |= {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds}
    return replace(r, **changed)


def training(case: Case) -> Request:
    """The forward of a training step: the same without a pool and intermediate states."""
    left_out = {"return_intermediate_states": False, "cu_seqlens_cpu": None, "save_for_backward": True}
    return replace(inference(case.having(tags=case.tags - {"pool", "drafts", "served", "checkpoints"})), **left_out)


def gradients(case: Case, saved: Sequence[TensorSpec] = ()) -> Request:
    """The backward of a training step, whose forward saved tensors of these specifications."""
    r = training(case)
    return replace(backward_of(r, saved), grad_final_state=r.initial_state)


def halves(
    case: Case, plan_of: Callable[[Request, str], Plan], saved_specs: Callable[[Request], Sequence[TensorSpec]]
) -> Iterator[tuple[str, Plan]]:
    """Names and plans of the halves of a training step, for fragments that are the case's sequences.

    Args:
        plan_of: the plan of the half that is named.
    """

    def made(plan: Plan) -> tuple[torch.Tensor, ...]:
        found = [plan.whole(x) for x in list(plan.results.values())[2:] if x is not None]
        return tuple(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in found)

    forward = training(case)
    states = torch.empty((forward.N, forward.HV, forward.K, forward.K + forward.V), device="meta")
    none: dict[str, Any] = {"initial_state": None, "cp_context": True}
    if case.lengths:
        table = torch.empty(forward.N, dtype=torch.int64, device="meta")
        none["cp_context"] = Edges(states[..., forward.K :], *(table,) * 4, forward.N, states)
    forward = replace(forward, **none)
    begin = plan_of(forward, "begin")
    yield f"{case.name}, begin", begin
    yield f"{case.name}, finish", plan_of(replace(forward, saved=(*made(begin), states)), "finish")
    backward = gradients(case, saved_specs(forward))
    needs = backward.needs_grad if case.lengths else backward.needs_grad - {"initial_state"}
    backward = replace(backward, **none, grad_final_state=None, needs_grad=needs)
    begin = plan_of(backward, "begin_backward")
    yield f"{case.name}, begin backward", begin
    more = (*backward.saved, *made(begin), states)
    yield f"{case.name}, finish backward", plan_of(replace(backward, saved=more), "finish_backward")


def gate_calls(dtype: torch.dtype, lower_bound: float | None) -> Iterator[tuple[str, AnyRequest]]:
    """Names and requests of ``kda_gate``, forward and backward."""
    g, A_log, dt_bias = (torch.empty(*n, device="meta") for n in ((64, 4, 128), (4,), (4, 128)))
    r = GateRequest(g=g.to(dtype), A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    name = f"gate, {TYPES[dtype]}, {'softplus' if lower_bound is None else 'bounded'}"
    yield name, r
    yield name, backward_of(r)


def commit_calls() -> Iterator[tuple[str, AnyRequest]]:
    """Names and requests of ``commit_kda``: a dense draft, and a packed one in another dtype and layout."""
    for size, dtype, v_first in ((128, torch.float32, False), (128, torch.bfloat16, True), (256, torch.float32, True)):
        pool = torch.empty(64, 32, size, size, dtype=dtype, device="meta")
        records = torch.empty(1 if v_first else 8, 32, 32, 3 * size, device="meta")
        n, bounds = torch.empty(8, dtype=torch.int32, device="meta"), torch.empty(9, dtype=torch.int32, device="meta")
        yield f"commit, {TYPES[dtype]} {size}", CommitRequest(
            pool=pool, records=records, num_accepted=n, state_indices=n, cu_seqlens=bounds if v_first else None,
            state_v_first=v_first,
        )  # fmt: skip


def layer_calls(quick: bool = False) -> Iterator[tuple[str, LayerRequest]]:
    """(name, call) of what launches every kernel around the operator: plain, and with everything there is.

    Args:
        quick: only in bfloat16, and the norm of 128 channels.
    """
    empty = partial(torch.empty, device="meta")
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
        x, D, W = empty(1, 128, 3 * 1024, dtype=dtype), 3 * 1024, 4
        plain = ShortConvolutionRequest(x=x, weight=empty(D, W))
        more = {"bias": empty(D), "initial_state": empty(2, W - 1, D, dtype=dtype), "output_final_state": True}
        packed = replace(plain, **more, cu_seqlens=torch.zeros(3, dtype=torch.int32, device="meta"))
        for name, call in (("", plain), (", packed", packed)):
            yield f"layer, {TYPES[dtype]}{name}", call
            thirds = dict.fromkeys(("grad_output", "grad_second", "grad_third"), empty(1, 128, 1024, dtype=dtype))
            gradients = {**thirds, "grad_final_state": call.initial_state, "needs_grad": frozenset({"x"})}
            yield f"layer, {TYPES[dtype]}{name}", replace(call, parts=(1024,) * 3, **gradients)
        for D in (128,) if quick else (64, 128, 256):
            x = empty(1, 128, 8, D, dtype=dtype)
            norm = GatedNormRequest(x=x, gate=x, weight=empty(D), eps=1e-5)
            yield f"layer, {TYPES[dtype]} V {D}", norm
            yield f"layer, {TYPES[dtype]} V {D}", replace(norm, grad_output=x, needs_grad=frozenset({"x"}))
    yield from _decode_steps(quick)


_BY_SEQUENCE = (
    "x", "g", "beta", "norm_gate", "indices", "records", "commit", "num_committed", "commit_inputs",
)  # fmt: skip
"""Tensors of a layer's step that have a row for each sequence."""


def _decode_steps(quick: bool) -> Iterator[tuple[str, LayerRequest]]:
    empty, HV = partial(torch.empty, device="meta"), 8
    kinds = [(torch.float32, 1, H, False) for H in (4, HV)]
    if not quick:
        kinds += [(torch.float32, 3, 4, False), (torch.bfloat16, 1, HV, False)]
        kinds += [(dtype, 1, HV, True) for dtype in (torch.float32, torch.bfloat16)]
    for dtype, T, H, v_first in kinds:
        D, slots = (2 * H + HV) * 128, torch.zeros(2, 3, dtype=torch.int32, device="meta")
        g = empty(2, 4, HV, 128, dtype=torch.bfloat16)
        x, conv_state = empty(2, 4, D, dtype=torch.bfloat16), empty(6, 3, D, dtype=torch.bfloat16)
        call = DecodeStepRequest(
            x=x, g=g, beta=g[..., 0], conv_state=conv_state, weight=empty(D, 4), norm_gate=g, norm_weight=empty(128),
            state=empty(6, HV, 128, 128, dtype=dtype), A_log=empty(HV), dt_bias=empty(HV, 128), indices=slots[:, 0],
            state_v_first=v_first,
        )  # fmt: skip
        kind = f"H {H}, states {TYPES[dtype]}{', V first' * v_first}"
        if T == 1:
            records = empty(2, 4, HV, 384)
            more = {"records": records, "commit": records, "num_committed": slots[:, 0], "commit_inputs": x}
            draft = replace(call, **more)
            yield f"draft of a layer, {kind}", draft
        else:
            call = replace(call, indices=slots, accepted=slots[:, 0], lower_bound=-5.0)
        rows = {n: getattr(call, n)[:, :T] for n in ("x", "g", "beta", "norm_gate")}
        call = replace(call, **rows)
        yield f"step of a layer, T {T}, {kind}", call
        if T == 1 and dtype == torch.bfloat16:
            # Many states may have another configuration.
            for name, few in (("draft", draft), ("step", call)):
                given = {n: x for n in _BY_SEQUENCE if (x := getattr(few, n)) is not None}
                many = {n: x[:1].expand(32, *x.shape[1:]) for n, x in given.items()}
                yield f"{name} of a layer, N 32, {kind}", replace(few, **many)

"""One loaded backend: its hooks, where it runs, what it refuses, and the checks of what its hooks return.

Shapes, dtypes and devices are checked once for each signature of calls. A hook that passed is not looked at again as
long as its call's ``memo`` lives, so that repeated calls pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pluggy
import torch
from torch import Tensor

from kda_core._ledger import said_by
from kda_core._schemas import NAMESPACE, OPERATORS, Operator
from kda_core._torch_private import profiling
from kda_core.capabilities import Available, BackendInfo, Unavailable
from kda_core.errors import ContractViolation
from kda_core.hookspecs import MAX_SAVED_TENSORS
from kda_core.request import (
    AnyRequest,
    BackwardResult,
    Begun,
    CommitRequest,
    Edges,
    ForwardResult,
    GateRequest,
    LayerRequest,
    Request,
    TensorSpec,
    chunks_of,
)

ROWS = {
    hook: f"{NAMESPACE}::{row.op}{direction}"
    for row in OPERATORS.values()
    for hook, direction in zip(row.hooks, ("", "_backward"), strict=False)
}
"""Hooks that compute, by the names of their rows in profilers."""

DEFAULT_ELEMENTS = 2**26
"""At K = V = 128 one head over 4,096 tokens: seconds of a core, and half a gigabyte."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckSettings:
    """The arguments of ``checked_calls``, for the kit."""

    warn: bool = False
    dump: str | None = None
    elements: int = DEFAULT_ELEMENTS


watch: Callable[[Backend, str, Callable[..., Any]], Callable[..., Any]] | None = None
"""Wraps the hooks of all backends while calls are checked: (backend, hook, caller) -> caller."""


@dataclass(eq=False)
class Backend:
    """A loaded backend with its hooks, called through pluggy so that wrappers see every call."""

    info: BackendInfo
    plugin: object
    manager: pluggy.PluginManager
    availability_of: dict[torch.device, Available | Unavailable] = field(default_factory=dict)
    _callers: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call one hook of this backend and of every wrapper; the result may be None."""
        caller = self._callers.get(hook)
        if caller is None:
            caller = self._callers[hook] = self._caller(hook)
        return caller(**arguments)

    def _caller(self, hook: str) -> Callable[..., Any]:
        backends = {impl.plugin for impl in self.manager.hook.kda_core_backend.get_hookimpls() if not impl.wrapper}
        others = backends - {self.plugin}
        caller = self.manager.subset_hook_caller(hook, remove_plugins=others)
        implementations = [impl for impl in caller.get_hookimpls() if impl.plugin not in others]
        # Without wrappers, call the one implementation directly: 2 µs less than through pluggy. When a wrapper is
        # added, the registry drops these callers.
        function = implementations[0].function if len(implementations) == 1 else caller
        return function if watch is None else watch(self, hook, function)

    def forget_callers(self) -> None:
        """Drop the cached callers, so that the next call sees new wrappers and ``watch``."""
        self._callers.clear()

    def result(self, hook: str, request: AnyRequest | LayerRequest) -> Any:
        """Call a hook that must answer."""
        caller = self._callers.get(hook)
        if caller is None:
            caller = self._callers[hook] = self._caller(hook)
        if profiling._is_profiler_enabled and hook in ROWS:
            with profiling.record_function(row_name(self.info.name, hook, request)):
                answer = caller(request=request)
        else:
            answer = caller(request=request)
        if answer is None:
            raise self._violation(f"returned None from {hook}")
        return answer

    def forward(self, r: AnyRequest) -> Any:
        """Run a request's forward: a ForwardResult; the decay of ``kda_gate``; the pool of a commit."""
        result = self.result(OPERATORS[r.op].hooks[0], r)
        memo = r.memo
        if memo is None or memo.get(ForwardResult) is not type(result):
            self.check_forward(r, result)
        return result

    def backward(self, r: Request | GateRequest) -> dict[str, Tensor]:
        """Run a request's backward: a gradient for every name in ``needs_grad``."""
        result = self.result(OPERATORS[r.op].hooks[1], r)
        memo = r.memo
        seen = memo is not None and (BackwardResult, r.needs_grad) in memo and type(result) is BackwardResult
        if not (seen and r.needs_grad <= result.grads.keys()):
            self.check_gradients(r, result, memo)
        return result.grads

    def saved_specs(self, r: Request) -> tuple[TensorSpec, ...]:
        """The tensors that the backend says it saves; ContractViolation for more than the operators have places for."""
        specs = self.result("kda_core_saved_spec", r)
        self.check_number_of_saved(len(specs))
        return specs

    def check_saved(self, r: Request, saved: tuple[Tensor, ...]) -> None:
        """Raise if the saved tensors differ from ``kda_core_saved_spec``, on which compiled graphs rely."""
        specs = self.saved_specs(r)
        found, expected = [(tuple(t.shape), t.dtype) for t in saved], [(tuple(s.shape), s.dtype) for s in specs]
        if found != expected:
            raise self._violation(f"saved tensors of {found}, kda_core_saved_spec says {expected}")

    def traced(self, row: Operator, saved: tuple[Tensor, ...]) -> tuple[Operator, dict[str, Any]]:
        """The row of the operators by which compilers see a call, and values that its backward takes of this one."""
        # The compiler of torch 2.7 zips equal lengths only.
        flat = dict(zip(row.saved[: len(saved)], [t.reshape(-1) for t in saved], strict=True))
        return row, {**flat, "backend": self.info.name}

    def check_number_of_saved(self, found: int) -> None:
        if found > MAX_SAVED_TENSORS:
            most = f"expected {MAX_SAVED_TENSORS} at most; it can lay several of one dtype into one"
            raise self._violation(f"saves {found} tensors for its backward, {most}")

    def check_forward(self, r: AnyRequest, result: Any) -> None:
        """Raise ContractViolation unless ``result`` is what the request's forward must return."""
        if isinstance(r, CommitRequest):
            if result is not r.pool:
                raise self._violation("returned another tensor than the pool it committed to")
            return
        if isinstance(r, GateRequest):
            self._expect("log_decay", result, r.g.shape, r.output_dtype, r.device)
        else:
            self._check_call(r, result)
        if r.memo is not None:
            r.memo[ForwardResult] = type(result)

    def _check_call(self, r: Request, result: Any) -> None:
        if not isinstance(result, ForwardResult):
            raise self._violation(f"returned {type(result).__name__}, expected ForwardResult")
        self._expect("o", result.o, (r.B, r.T, r.HV, r.V), r.q.dtype, r.device)
        if r.out is not None and result.o is not r.out:
            raise self._violation("returned another tensor as o, expected the call's out")
        has_final = r.output_final_state and not r.inplace_final_state
        final = (_of_sequences(r, *r.state_shape[2:]), r.state_dtype) if has_final else None
        h = ((r.B, chunks_of(r), *r.state_shape[1:]), r.h_dtype) if r.return_intermediate_states else None
        for name, found, expected in (("final_state", result.final_state, final), ("h", result.h, h)):
            if expected is not None:
                self._expect(name, found, *expected, r.device)
            elif found is not None:
                self._fail(name, "None, because the call asks for none", found)

    def check_gradients(self, r: Request | GateRequest, result: Any, memo: dict | None) -> None:
        """The same for a backward: a gradient for every name in ``needs_grad``, of its input's shape and dtype."""
        if not isinstance(result, BackwardResult):
            raise self._violation(f"returned {type(result).__name__}, expected BackwardResult")
        if missing := sorted(r.needs_grad - result.grads.keys()):
            raise self._violation(f"returned no gradient of {', '.join(missing)}")
        for name in r.needs_grad:
            like, found = getattr(r, name), result.grads[name]
            if like is None and isinstance(r, Request):  # of ``Edges``
                self._expect(f"d{name}", found, _of_sequences(r, r.K, r.V), r.compute_dtype, r.device)
                continue
            self._expect(f"d{name}", found, like.shape, like.dtype, like.device)
        if memo is not None:
            memo[BackwardResult, r.needs_grad] = True

    def check_begun(self, r: Request, begun: Any) -> None:
        """The same for a first half; ``matrices`` may be None where the request is for a backward."""
        if not isinstance(begun, Begun):
            raise self._violation(f"returned {type(begun).__name__}, expected Begun")
        edges = r.cp_context if isinstance(r.cp_context, Edges) else None
        count = r.N if edges is None or edges.sends is None else edges.sends.shape[0]
        lead, dtype = (count, r.HV, r.K), r.compute_dtype
        if edges is not None or (begun.additions is None and not r.needs_grad):
            self._expect("matrices", begun.matrices, (*lead, r.K + r.V), dtype, r.device)
            return
        if begun.matrices is not None or not r.needs_grad:
            self._expect("matrices", begun.matrices, (*lead, r.K), dtype, r.device)
        self._expect("additions", begun.additions, (*lead, r.V), dtype, r.device)

    def _violation(self, problem: str) -> ContractViolation:
        return ContractViolation(f"backend {self.info.name!r} {problem}")

    def _expect(self, output: str, found: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        if not isinstance(found, Tensor) or (found.shape, found.dtype, found.device) != (tuple(shape), dtype, device):
            self._fail(output, _text(shape, dtype, device), found)

    def _fail(self, output: str, expected: str, found: Any) -> None:
        got = _text(found.shape, found.dtype, found.device) if isinstance(found, Tensor) else repr(found)
        raise self._violation(f"returned {output}: expected {expected}, got {got}")

    def devices_among(self, devices: Iterable[torch.device]) -> list[torch.device]:
        """The devices that the backend serves; its device types if there is none among ``devices``."""
        fitting = [d for d in devices if d.type in self.info.device_types]
        return fitting or [torch.device(device_type) for device_type in self.info.device_types]

    def availability(self, device: torch.device) -> Available | Unavailable:
        """Whether the backend runs on ``device``; asked once a device. If the hook raises, that is why it does not."""
        known = self.availability_of.get(device)
        if known is None:
            if device.type not in self.info.device_types:
                known = Unavailable(f"serves tensors on {' or '.join(self.info.device_types)}, not on {device.type}")
            else:
                try:
                    known = self.call("kda_core_availability", device=device)
                # Foreign code that may raise anything: the backend is out on this device, and others go on.
                except Exception as error:
                    known = Unavailable(f"kda_core_availability failed: {said_by(error)}")
                if not isinstance(known, (Available, Unavailable)):
                    expected = "expected Available or Unavailable"
                    raise self._violation(f"returned {known!r} from kda_core_availability, {expected}")
            self.availability_of[device] = known
        return known

    def rejection(self, request: AnyRequest) -> str | None:
        try:
            reason = self.call("kda_core_reject", request=request)
        # Say whose error it is. It is never a refusal: the call would go to another backend in silence.
        except Exception as error:
            raise ContractViolation(f"backend {self.info.name!r}: kda_core_reject failed: {said_by(error)}") from error
        if reason is not None and not isinstance(reason, str):
            raise self._violation(f"returned {reason!r} from kda_core_reject")
        return reason

    def undeclared(self, request: AnyRequest) -> str | None:
        """Which features and limits of the call the backend does not declare, or None."""
        capabilities = self.info.capabilities
        missing = sorted(request.features - capabilities.features, key=lambda f: f.name)
        found = [reason for f in missing if (reason := capabilities.refusal(f)) is not None]
        if not isinstance(request, GateRequest):
            found += _limit_refusals(request, self.info)
        return "; ".join(found) or None


def row_name(backend: str, hook: str, request: Any) -> str:
    """The row of a backend's work in profilers, e.g. ``kda_core::chunk_kda (cpu) [1, 2048, 8, 128]``.

    It lies within the row of the operator or autograd function (``kda_core::chunk_kda``) and contains those of the
    kernels. It has the shape of q; of v too where that differs; the number of packed sequences.
    """
    if not isinstance(request, Request):
        first = request.g if isinstance(request, GateRequest) else request.records
        return f"{ROWS[hook]} ({backend}) {list(first.shape)}"
    shapes = str(list(request.q.shape))
    if request.v.shape != request.q.shape:
        shapes += f", v {list(request.v.shape)}"
    if request.cu_seqlens is not None:
        shapes += f", {request.N} sequences"
    return f"{ROWS[hook]} ({backend}) {shapes}"


def _limit_refusals(r: Request | CommitRequest, info: BackendInfo) -> Iterator[str]:
    c = info.capabilities
    dtype = r.q.dtype if isinstance(r, Request) else r.records.dtype
    # Records are in the dtype of the arithmetic, which is float32 for narrower inputs too.
    if dtype not in c.dtypes and (isinstance(r, Request) or dtype == torch.float64):
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in c.dtypes))
        yield f"does not take {str(dtype).removeprefix('torch.')} (takes {names})"
    for symbol, size, limit in (("K", r.K, c.max_head_dim_k), ("V", r.V, c.max_head_dim_v)):
        if limit is not None and size > limit:
            yield f"takes head dimensions {symbol} up to {limit}, not {size}"


def _of_sequences(r: Request, *last: int) -> tuple[int, ...]:
    edges = r.cp_context
    return (edges.sequences if isinstance(edges, Edges) else r.N, r.HV, *last)


def _text(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"

"""Calls of a backend whose kernels are launched by plans: find a call's plan, or make it, and run it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import accumulate
from operator import attrgetter, or_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kda_core.call_plan import CallPlan, PlannedBuffer, PlannedStep
from kda_core.request import (
    DIFFERENTIABLE,
    AnyRequest,
    BackwardResult,
    Begun,
    CommitRequest,
    DecodeStepRequest,
    ForwardResult,
    GatedNormRequest,
    GateRequest,
    LayerRequest,
    Request,
    ShortConvolutionRequest,
    TensorSpec,
    chunks_of,
)
from kda_core.triton_lib.lengths import Family, Noted, family, lengths_of, with_numbers
from kda_core.triton_lib.plan import EDGE_NAMES, EDGES, Launch, Plan, Step
from kda_core.triton_lib.run import INTERPRET, PublicPlan, Results, is_current

if INTERPRET:
    from kda_core.testing.interpreter import improve

    # As it comes, triton's interpreter multiplies bfloat16 numbers as integers: gradients were NaN.
    improve()

MAX_PLANS = 1024
"""Plans that are kept, of some 20 KB each; the oldest is dropped first."""


def _named(*names: str) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Names of inputs, and what reads them from a request."""
    return names, attrgetter(*names)


_CHUNK, _chunk_inputs = _named(
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "ssm_state_indices", "out"),
    *("has_initial_state", "final_state_indices", "final_state_pool", "checkpoint_indices", "checkpoint_pool"),
)
_BACKWARD, _backward_inputs = _named(
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "grad_o", "grad_final_state"),
)
_RECURRENT, _recurrent_inputs = _named(
    *_CHUNK, "num_accepted_tokens", "records", "commit", "num_committed", "parents", "commit_path"
)
_COMMIT, _commit_inputs = _named("pool", "records", "num_accepted", "state_indices", "cu_seqlens", "path")
_GATE, _gate_inputs = _named("g", "A_log", "dt_bias", "grad_output")
_GRADIENTS, _gradients = _named("grad_output", "grad_second", "grad_third", "grad_final_state")
_CONVOLUTION, _convolution_inputs = _named("x", "weight", "bias", "initial_state", "cu_seqlens", *_GRADIENTS)
_NORM, _norm_inputs = _named("x", "gate", "weight", "grad_output")
_DECODE_STEP, _decode_step_inputs = _named(
    *("x", "g", "beta", "conv_state", "weight", "state", "bias", "indices", "accepted", "A_log", "dt_bias"),
    *("norm_gate", "norm_weight", "out", "records", "commit", "num_committed", "commit_inputs"),
)
_edges_of, _NO_EDGES = attrgetter(*EDGES), (None,) * len(EDGES)
_MORE = tuple(tuple(f"saved[{i}]" for i in range(n)) for n in range(20))
"""Names of tensors that are handed on from an earlier part of a call, by their number."""
_SAVED = tuple((*_BACKWARD, *more) for more in _MORE)
"""Names of a backward's inputs, by the number of tensors that are handed on."""
_FRAGMENTS, _fragments_inputs = _named("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "grad_o")
_HALF = tuple((*_FRAGMENTS, *EDGE_NAMES, *more) for more in _MORE)
"""Names of the inputs of a call in halves, which has neither states of its own nor a pool."""


def h_shape(request: Request) -> tuple[int, ...]:
    """Shape of the intermediate states; () where none are asked for."""
    r = request
    return (r.B, chunks_of(r), *r.state_shape[1:]) if r.return_intermediate_states else ()


def _kind(request: Request, name: Hashable) -> Hashable:
    """The key of a call's plan. The sign of a scale that is 0 matters, and 0.0 and -0.0 are of one signature."""
    return name if request.scale else (name, str(float(request.scale)))


def _gradient_kind(x: Tensor | None) -> Any:
    """The part of a plan's key that stands for a given gradient, or states: their shape is known."""
    return None if x is None else (x.is_contiguous() or x.stride(), x.dtype)


def _begun(made: dict[str, Any]) -> Begun:
    matrices, additions, *kept = made.values()
    return Begun(matrices, additions, tuple([x for x in kept if x is not None]))


class Calls:
    """The hooks of a backend.

    A plan is kept in the memo that the core gives to the calls of one signature, one for each set of tensors whose
    addresses are not multiples of 16 bytes.

    Args:
        plan_of: makes the plan of a request for a chip; it is told the inputs whose addresses are not multiples of 16
            bytes. Pure, of the call's metadata and the chip; forward, or backward where the request has ``needs_grad``.
            For a half of a call it is also told which: "begin", "finish", "begin_backward" or "finish_backward".
        chip: facts of a device.
        chips: facts of chips by their names, for ``describe``.
        saved_specs: of what a forward of ``chunk_kda`` saves for its backward, for a chip.
        bind: makes, of a plan, the names of inputs and a device, a function of inputs and their addresses.
        most: plans that are kept.
    """

    def __init__(
        self, plan_of: Callable[..., Plan], chip: Callable[[torch.device], Any],
        chips: Mapping[str, Any] = MappingProxyType({}),
        saved_specs: Callable[[Request, Any], tuple[TensorSpec, ...]] = lambda request, chip: (),
        bind: Callable[[Plan, Sequence[str], torch.device], Callable[..., Results]] = PublicPlan, most: int = MAX_PLANS,
    ) -> None:  # fmt: skip
        self._plan_of, self._chip, self._bind, self._most = plan_of, chip, bind, most
        self._chips, self._saved_specs = chips, saved_specs
        self._holders: deque[tuple[dict[Any, Any], Hashable]] = deque()
        self._families: dict[Hashable, Family] = {}

    def run(
        self, request: AnyRequest | LayerRequest, key: Hashable, names: Sequence[str], inputs: Sequence[Tensor | None],
        saved: tuple[Any, ...] | None = None, half: tuple[str, ...] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Run a call; its results by name.

        Args:
            key: tells plans in one memo apart: everything beside the request's signature that the plan follows from.
            names, inputs: every tensor that a step may read or write and the plan does not allocate.
            saved: what the plan reads in the place of the request's.
            half: the half of a call, for ``plan_of``; () for all of it.
        """
        device, memo = request.device, request.memo
        if not is_current(device):
            with torch.cuda.device(device):
                return self.run(request, key, names, inputs, saved, half)
        places = [0 if x is None else x.data_ptr() for x in inputs]
        if reduce(or_, places) & 15:
            key = key, tuple(place & 15 == 0 for place in places)
        bound = None if memo is None else memo.get(key)
        if bound is None:
            bound = self._bound(request, key, names, inputs, places, saved, half)
            if memo is not None:
                memo[key] = bound
                self._holders.append((memo, key))
                if len(self._holders) > self._most:
                    old, name = self._holders.popleft()
                    old.pop(name, None)
        return bound(inputs, places)

    def _bound(
        self, request: Any, key: Hashable, names: Sequence[str], inputs: Sequence[Tensor | None],
        places: Sequence[int], saved: tuple[Any, ...] | None, half: tuple[str, ...],
    ) -> Callable[..., Results]:  # fmt: skip
        """The plan of a call, bound: that of a call with other lengths where one is noted; arguments as of ``run``."""
        device, chip = request.device, self._chip(request.device)
        misaligned = frozenset(n for n, place in zip(names, places, strict=True) if place & 15)
        lengths = None if half else lengths_of(request)
        if lengths is not None:

            def noted() -> Noted | None:
                r, notes = with_numbers(request, lengths, misaligned, lambda r: self._saved_specs(r, chip))
                plan = self._bind(self._plan_of(r, chip, misaligned), names, device)
                return Noted(notes, names, r, plan) if plan.ready else None

            name = key, family(request)
            known = self._families.get(name)
            if known is None:
                # Programs with one length pay for no notes.
                if len(self._families) >= self._most:
                    self._families.clear()
                self._families[name] = Family()
            elif (found := known.bound(lengths, inputs, noted)) is not None:
                return found
        planned = request if saved is None else replace(request, saved=saved)
        return self._bind(self._plan_of(planned, chip, misaligned, *half), names, device)

    def chunk_forward(self, request: Request) -> ForwardResult:
        """Run ``chunk_kda`` for a call that the plugin accepted."""
        key: Hashable = "forward"
        if request.return_intermediate_states:
            # The shape of h follows from values.
            key = key, h_shape(request)
        made = self.run(request, _kind(request, key), _CHUNK, _chunk_inputs(request))
        o, final_state, h, *kept = made.values()
        saved = tuple([x for x in kept if x is not None]) if kept else ()
        return ForwardResult(o=o, final_state=None if request.inplace_final_state else final_state, h=h, saved=saved)

    def chunk_backward(self, request: Request) -> BackwardResult:
        """Gradients of ``chunk_kda``, for all inputs that have one, whichever are asked for.

        Those of ``fused_recurrent_kda`` as well, which is the same function: its other arguments (a pool,
        ``num_accepted_tokens``) are not differentiable and never come this far.
        """
        if torch.is_grad_enabled():
            # Autograd has it off already, and the context takes as long as a launch.
            with torch.no_grad():
                return self.chunk_backward(request)
        given = _gradient_kind(request.grad_o), _gradient_kind(request.grad_final_state)
        key = "backward", *given, "initial_state" in request.needs_grad
        inputs = (*_backward_inputs(request), *request.saved)
        return BackwardResult(grads=self.run(request, _kind(request, key), _SAVED[len(request.saved)], inputs))

    def chunk_begin(self, request: Request) -> Begun:
        """The first half of ``chunk_kda`` for fragments of sequences that several devices share."""
        return _begun(self._half(request, "begin", ()))

    def chunk_finish(self, request: Request, kept: tuple[Tensor, ...], starts: Tensor | None) -> ForwardResult:
        o, final_state, h, *saved = self._half(request, "finish", (*kept, starts)).values()
        return ForwardResult(o, final_state, h, tuple([x for x in saved if x is not None]))

    def chunk_begin_backward(self, request: Request) -> Begun:
        return _begun(self._half(request, "begin_backward", request.saved))

    def chunk_finish_backward(self, request: Request, kept: tuple[Tensor, ...], ends: Tensor | None) -> BackwardResult:
        return BackwardResult(grads=self._half(request, "finish_backward", (*request.saved, *kept, ends)))

    def _half(self, request: Request, half: str, more: tuple[Any, ...]) -> dict[str, Any]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._half(request, half, more)
        key: tuple[Any, ...] = half, _gradient_kind(request.grad_o), "initial_state" in request.needs_grad
        edges, tensors = request.cp_context, _NO_EDGES
        if edges is not True:
            given, _, sends, sources, results, matrices = tensors = _edges_of(edges)
            starts = more[-1] if more else None
            # All but the given states are contiguous; the other tables have a place for each fragment.
            key = (
                *key, edges.sequences, sources is None, results is None, None if sends is None else sends.shape[0],
                None if matrices is None else matrices.shape[3], None if starts is None else starts.shape,
                None if given is None else (_gradient_kind(given), given.shape),
            )  # fmt: skip
        inputs = (*_fragments_inputs(request), *tensors, *more)
        return self.run(request, _kind(request, key), _HALF[len(more)], inputs, more, (half,))

    def recurrent_forward(self, request: Request) -> ForwardResult:
        made = self.run(request, _kind(request, "forward"), _RECURRENT, _recurrent_inputs(request))
        return ForwardResult(o=made["o"], final_state=None if request.inplace_final_state else made["final_state"])

    recurrent_backward = chunk_backward

    def commit(self, request: CommitRequest) -> Tensor:
        self.run(request, "commit", _COMMIT, _commit_inputs(request))
        return request.pool

    def gate_forward(self, request: GateRequest) -> Tensor:
        """Run ``kda_gate``: float32, shape of g."""
        return self.run(request, "gate", _GATE, _gate_inputs(request))["log_decay"]

    def gate_backward(self, request: GateRequest) -> BackwardResult:
        key = "gate backward", _gradient_kind(request.grad_output), request.needs_grad
        return BackwardResult(self.run(request, key, _GATE, _gate_inputs(request)))

    def _convolve(self, request: ShortConvolutionRequest) -> dict[str, Any]:
        key = tuple(map(_gradient_kind, _gradients(request)))
        return self.run(request, key, _CONVOLUTION, _convolution_inputs(request))

    def short_convolution_forward(self, request: ShortConvolutionRequest) -> ForwardResult:
        made = self._convolve(request)
        return ForwardResult(o=made["y"], final_state=made["final"])

    def short_convolution_backward(self, request: ShortConvolutionRequest) -> BackwardResult:
        grads = self._convolve(request)
        return BackwardResult({**grads, "weight": grads["weight"].t()})

    def _norm(self, request: GatedNormRequest) -> dict[str, Any]:
        return self.run(request, _gradient_kind(request.grad_output), _NORM, _norm_inputs(request))

    def gated_rms_norm_forward(self, request: GatedNormRequest) -> Tensor:
        return self._norm(request)["y"]

    def gated_rms_norm_backward(self, request: GatedNormRequest) -> BackwardResult:
        return BackwardResult(self._norm(request))

    def decode_step(self, request: DecodeStepRequest) -> Tensor:
        made = self.run(request, "step", _DECODE_STEP, _decode_step_inputs(request))["o"]
        return made if request.out is None else request.out

    def saved_specs(self, request: Request) -> tuple[TensorSpec, ...]:
        """Shapes and dtypes of what a forward saves on the request's device."""
        return self._saved_specs(request, self._chip(request.device)) if request.op == "chunk_kda" else ()

    def describe(self, request: AnyRequest, chip: str | None) -> tuple[CallPlan, ...]:
        """The plan of a call's forward, and of its backward where the forward saves for one.

        Args:
            chip: the name of one; None: that of the request's device.

        Raises:
            ValueError: no such chip is known, or shapes follow from values.
        """
        if chip is not None and chip not in self._chips:
            raise ValueError(f"chip: expected one of {', '.join(self._chips)}, got {chip!r}")
        if isinstance(request, Request) and request.return_intermediate_states and request.cu_seqlens is not None:
            raise ValueError("return_intermediate_states: how many there are follows from the values of cu_seqlens")
        facts = self._chip(request.device) if chip is None else self._chips[chip]
        plans = [_described("forward", self._plan_of(request, facts), facts)]
        if request.save_for_backward:
            saved = self._saved_specs(request, facts) if request.op == "chunk_kda" else ()
            plans.append(_described("backward", self._plan_of(backward_of(request, saved), facts), facts))
        return tuple(plans)


def backward_of(request: Any, saved: Sequence[TensorSpec] = ()) -> Any:
    """The request of a backward of everything, without memory."""
    if isinstance(request, GateRequest):
        grad = torch.empty(request.g.shape, device="meta")
        needs = frozenset(n for n in ("g", "A_log", "dt_bias") if getattr(request, n) is not None)
        return replace(request, grad_output=grad, needs_grad=needs)
    needs = frozenset(n for n in DIFFERENTIABLE if getattr(request, n) is not None)
    empty = partial(torch.empty, device="meta")
    kept = tuple(empty(x.shape, dtype=x.dtype) for x in saved)
    last = empty(request.state_shape, dtype=request.state_dtype) if request.output_final_state else None
    grad_o = empty(request.v.shape, dtype=request.v.dtype)
    return replace(request, saved=kept, grad_o=grad_o, needs_grad=needs, grad_final_state=last)


def _described(name: str, plan: Plan, chip: Any) -> CallPlan:
    ends = list(accumulate(len(steps) for steps in plan.epochs))
    starts = [0, *ends[:-1]]
    buffers = tuple(
        PlannedBuffer(b.name, b.shape, b.dtype, b.role, (starts[b.epochs[0]], max(0, ends[b.epochs[1]] - 1)), b.nbytes)
        for b in plan.buffers.values()
    )
    return CallPlan(
        name, chip.name, tuple(map(_step, plan.steps)), buffers, plan.bytes_moved, plan.bytes_floor,
        plan.peak_scratch,
    )  # fmt: skip


def _step(step: Step) -> PlannedStep:
    if isinstance(step, Launch):
        return PlannedStep(step.name, step.grid, step.num_warps, step.constants.get("maxnreg"))
    return PlannedStep(type(step).__name__.lower())

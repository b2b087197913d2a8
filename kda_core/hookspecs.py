"""The plugin contract: the hooks that a backend wheel implements, and the contract's version.

A backend is a module (or object) behind an entry point of the group ``kda_core.backends.v1``. Hook
implementations take the documented arguments by name and without defaults: pluggy leaves out, in
silence, an argument that has a default in an implementation.
"""

# Specifications have a text and no body.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import pluggy
import torch
from packaging.version import Version
from torch import Tensor

from kda_core.call_plan import CallPlan
from kda_core.capabilities import Available, BackendInfo, Feature, Unavailable
from kda_core.request import (
    AnyRequest,
    BackwardResult,
    Begun,
    CommitRequest,
    DecodeStepRequest,
    ForwardResult,
    GatedNormRequest,
    GateRequest,
    Request,
    ShortConvolutionRequest,
    TensorSpec,
)

CONTRACT_VERSION = Version("1.2")
"""Version of this contract. Minor: a hook, a request field or a feature was added. Major: a meaning changed."""

PROJECT = "kda_core"
ENTRY_POINT_GROUPS = "kda_core.backends.v"
"""Common prefix of the entry-point groups of all major versions."""
ENTRY_POINT_GROUP = f"{ENTRY_POINT_GROUPS}{CONTRACT_VERSION.major}"

MAX_SAVED_TENSORS = 8
"""Tensors that a forward may save for its backward: the operators' schemas, which never change, have so many places.

A backend that needs more lays several of one dtype into one tensor.
"""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def kda_core_backend() -> BackendInfo:
    """Say who the backend is and what it can serve.

    Fires once, when the wheel is loaded. Data only: it touches no device and imports no kernel.
    """


@hookspec(firstresult=True)
def kda_core_availability(device: torch.device) -> Available | Unavailable:
    """Say whether the backend can run on ``device`` (driver, architecture, versions of torch and others).

    Fires once for each device that a call or ``info`` asks about; the answer is cached.
    """


@hookspec(firstresult=True)
def kda_core_reject(request: AnyRequest) -> str | None:
    """Return the reason why this call cannot be served, or None to accept it.

    Fires once for each request signature (shapes, strides, dtypes, devices, options), after the core
    has compared the call with the declared capabilities. It must be cheap and pure, must look at
    metadata only (tensors may be fake), and must not catch broadly: an exception is an error, never
    a refusal.

    Where a backend declares CONTEXT_PARALLEL, the hook fires once more for a sequence over several devices, with
    ``request.cp_context`` True: a reason then refuses the hooks in halves alone. The core serves the call by plain
    calls of the same backend, and ``explain`` shows the reason.
    """


@hookspec(firstresult=True)
def kda_core_saved_spec(request: Request) -> tuple[TensorSpec, ...]:
    """Announce what the forward of ``request`` saves for its backward, besides the inputs: at most MAX_SAVED_TENSORS.

    Fires when the forward is traced with fake tensors (``torch.compile``, ``torch.export``), when the backward runs
    as an operator, and at the first eager call of a signature. Looks at metadata only; shapes may be symbolic.
    More tensors than MAX_SAVED_TENSORS are a ContractViolation. With ``request.cp_context`` it announces what
    ``kda_core_chunk_finish`` saves, which may be other tensors than those of a plain call.
    """


@hookspec(firstresult=True)
def kda_core_chunk_forward(request: Request) -> ForwardResult:
    """Run ``chunk_kda``. Fires once for each call."""


@hookspec(firstresult=True)
def kda_core_chunk_backward(request: Request) -> BackwardResult:
    """Run the backward of ``chunk_kda`` for ``request.needs_grad``. Fires once for each backward pass."""


@hookspec(firstresult=True)
def kda_core_chunk_begin(request: Request) -> Begun:
    """Run the first half of ``chunk_kda`` for fragments of sequences that several devices share (``Begun`` says how).

    Everything that needs no state at the fragments' starts. Since 1.2, with CONTEXT_PARALLEL. ``Edges`` says what is
    other for a backend that declares ``Capabilities.edges``, here and in the hooks behind. Fires once for each call;
    the core then exchanges matrices and additions between devices and calls ``kda_core_chunk_finish``.
    """


@hookspec(firstresult=True)
def kda_core_chunk_finish(request: Request, kept: tuple[Tensor, ...], starts: Tensor | None) -> ForwardResult:
    """Run the second half from the states at the fragments' starts.

    ``request`` is that of the first half, ``kept`` its result's, ``starts`` is [F, HV, K, V] in ``compute_dtype``,
    contiguous. The result is that of a forward: ``final_state`` holds the state at the end of each fragment, and with
    ``save_for_backward`` ``saved`` is as ``kda_core_saved_spec`` announced. Fires once after each first half.
    """


@hookspec(firstresult=True)
def kda_core_chunk_begin_backward(request: Request) -> Begun:
    """Run the first half of the backward: everything that needs no gradient of the fragments' states at their ends.

    ``request`` has ``saved``, from ``kda_core_chunk_finish``, and ``grad_o``, or None where only states have gradients.
    Fires once for each backward pass.
    """


@hookspec(firstresult=True)
def kda_core_chunk_finish_backward(request: Request, kept: tuple[Tensor, ...], ends: Tensor | None) -> BackwardResult:
    """Run the second half of the backward for ``request.needs_grad``.

    ``request`` is that of the first half, ``kept`` its result's, ``ends`` the gradients of the states at the fragments'
    ends, [F, HV, K, V] in ``compute_dtype``, contiguous, that of a final state included. A gradient of A_log or dt_bias
    is the sum over the fragments of this request. Fires once after each first half; nobody reads ``kept`` again, so
    that its memory may be given back on the way.
    """


@hookspec(firstresult=True)
def kda_core_recurrent_forward(request: Request) -> ForwardResult:
    """Run ``fused_recurrent_kda``. Fires once for each call."""


@hookspec(firstresult=True)
def kda_core_recurrent_backward(request: Request) -> BackwardResult:
    """Run the backward of ``fused_recurrent_kda``. Fires once for each backward pass."""


@hookspec(firstresult=True)
def kda_core_commit(request: CommitRequest) -> Tensor:
    """Run ``commit_kda`` and return ``request.pool``. Since 1.2, with DRAFT_RECORDS. Fires once for each call.

    The records are those that this backend's ``kda_core_recurrent_forward`` wrote to ``request.records``. Read by
    ``CommitRequest``'s rule they say what any other backend would: the core compares with the reference by it.
    """


@hookspec(firstresult=True)
def kda_core_gate_forward(request: GateRequest) -> Tensor:
    """Run ``kda_gate``: the log decay, shape of g, float32 (float64 for float64 g). Fires once for each call."""


@hookspec(firstresult=True)
def kda_core_gate_backward(request: GateRequest) -> BackwardResult:
    """Run the backward of ``kda_gate``. Fires once for each backward pass."""


@hookspec(firstresult=True)
def kda_core_short_convolution_forward(request: ShortConvolutionRequest) -> ForwardResult:
    """Run ``kda_core.nn.short_convolution``: ``o`` [B, T, D] in the dtype of x, ``final_state`` where it is asked for.

    Optional, together with its backward; since 1.1. Fires once for each eager call on a device that the backend serves,
    in a dtype that it declares. Without the hook the core's torch code runs, which compiled calls use as well.
    """


@hookspec(firstresult=True)
def kda_core_short_convolution_backward(request: ShortConvolutionRequest) -> BackwardResult:
    """Run its backward for ``request.needs_grad``. Optional. Fires once for each backward pass."""


@hookspec(firstresult=True)
def kda_core_gated_rms_norm_forward(request: GatedNormRequest) -> Tensor:
    """Run ``kda_core.nn.gated_rms_norm``: shape and dtype of x. Optional, as its backward. Fires as the other does."""


@hookspec(firstresult=True)
def kda_core_gated_rms_norm_backward(request: GatedNormRequest) -> BackwardResult:
    """Run its backward for ``request.needs_grad``. Optional. Fires once for each backward pass."""


@hookspec(firstresult=True)
def kda_core_decode_step(request: DecodeStepRequest) -> Tensor:
    """Run ``kda_core.nn.kda_decode_step``: [N, T, HV, V] in the dtype of x, ``request.out`` itself where it is given.

    Optional; since 1.2. Fires once for each eager call on a device that the backend serves, in a dtype that it
    declares; with ``records`` or ``commit`` only where it declares DRAFT_RECORDS. Without the hook the convolution, the
    recurrence and the norm are calls of their own.
    """


@hookspec(firstresult=True)
def kda_core_plan(request: AnyRequest, chip: str | None) -> tuple[CallPlan, ...]:
    """Say what a call allocates and launches: its forward, and with ``save_for_backward`` its backward.

    Optional. Fires for ``kda explain --plan`` alone. Looks at metadata only (tensors may be fake) and needs no
    device: ``chip`` names the chip to plan for, as the backend spells it, or is None for the request's device.
    Raises ValueError for a chip that the backend does not know.
    """


REQUIRED_HOOKS = ("kda_core_backend", "kda_core_availability", "kda_core_reject")
"""Hooks that every backend implements."""

HALVES = (
    "kda_core_chunk_begin",
    "kda_core_chunk_finish",
    "kda_core_chunk_begin_backward",
    "kda_core_chunk_finish_backward",
)
"""Hooks that come with CONTEXT_PARALLEL."""

OPTIONAL_HOOKS = (
    "kda_core_plan", "kda_core_short_convolution_forward", "kda_core_short_convolution_backward",
    "kda_core_gated_rms_norm_forward", "kda_core_gated_rms_norm_backward", "kda_core_decode_step", *HALVES,
)  # fmt: skip
"""Hooks that a backend may leave out."""

HOOKS_OF_FEATURE: dict[Feature, tuple[str, ...]] = {
    Feature.CHUNK: ("kda_core_chunk_forward",),
    Feature.BACKWARD: ("kda_core_chunk_backward", "kda_core_saved_spec"),
    Feature.RECURRENT: ("kda_core_recurrent_forward",),
    Feature.RECURRENT_BACKWARD: ("kda_core_recurrent_backward", "kda_core_saved_spec"),
    Feature.DRAFT_RECORDS: ("kda_core_recurrent_forward", "kda_core_commit"),
    Feature.DRAFT_TREES: ("kda_core_recurrent_forward", "kda_core_commit"),
    Feature.GATE: ("kda_core_gate_forward",),
    Feature.GATE_BACKWARD: ("kda_core_gate_backward",),
    Feature.CONTEXT_PARALLEL: (*HALVES, "kda_core_saved_spec"),
}
"""Hooks that a backend implements because it declares a feature.

A backend without CONTEXT_PARALLEL still serves a sequence over several devices, by plain calls.
"""

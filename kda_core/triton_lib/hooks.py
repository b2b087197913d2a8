"""The hooks of a backend whose kernels are launched by plans. Only those that run or plan kernels import triton."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from kda_core.call_plan import CallPlan
from kda_core.capabilities import FEATURES_1_2, Available, BackendInfo, Capabilities, Feature, Unavailable
from kda_core.hookspecs import hookimpl
from kda_core.request import AnyRequest, BackwardResult, ForwardResult, GateRequest, Request
from kda_core.triton_lib.run import INTERPRET

TRITON = SpecifierSet(">=3.6")
MAX_HEAD_DIM = 256


def _served_by(method: str) -> Any:
    """The hook that hands its request to this method of a backend's ``calls``."""

    @hookimpl
    def hook(self: TritonBackend, request: Any) -> Any:
        return getattr(self.calls, method)(request)

    return hook


class TritonBackend:
    """A backend's plugin. A subclass says where it runs and what else it rejects.

    Args:
        module: the module whose ``CALLS``, a ``triton_lib.calls.Calls``, serves the calls.
        distributions: names under which triton is distributed; the first that is installed counts.
        info: further fields of the ``BackendInfo``.
    """

    def __init__(self, module: str, distributions: tuple[str, ...] = ("triton",), **info: Any) -> None:
        self._module, self._distributions = module, distributions
        capabilities = Capabilities(
            features=FEATURES_1_2 | {Feature.CONTEXT_PARALLEL}, edges=True, max_head_dim_k=MAX_HEAD_DIM,
            max_head_dim_v=MAX_HEAD_DIM, dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        )  # fmt: skip
        kinds = ("cuda", "cpu") if INTERPRET else ("cuda",)
        self._info = BackendInfo(contract=SpecifierSet("~=1.2"), device_types=kinds, capabilities=capabilities, **info)

    def __getattr__(self, name: str) -> Any:
        # Not a property: pluggy reads every attribute that dir() lists, and this one imports triton.
        if name != "calls":
            raise AttributeError(name)
        self.calls = import_module(self._module).CALLS
        return self.calls

    def availability_on(self, device: torch.device, triton: str) -> Available | Unavailable:
        """Whether the backend runs on ``device`` with this version of triton, compiled."""
        raise NotImplementedError

    def rejection(self, request: AnyRequest) -> str | None:
        """Why a call, other than one of the gate, cannot be served, or None."""
        return None

    @hookimpl
    def kda_core_backend(self) -> BackendInfo:
        return self._info

    @hookimpl
    def kda_core_availability(self, device: torch.device) -> Available | Unavailable:
        version = self._triton_version()
        if version is None:
            return Unavailable(f"triton is not installed (triton{TRITON} is needed)")
        if not TRITON.contains(version, prereleases=True):
            return Unavailable(f"triton {version} is installed, triton{TRITON} is needed")
        if INTERPRET:
            return Available(f"triton {version}, interpreted on the CPU")
        return self.availability_on(device, version)

    def _triton_version(self) -> str | None:
        for distribution in self._distributions:
            try:
                return metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
        return None

    @hookimpl
    def kda_core_reject(self, request: AnyRequest) -> str | None:
        if not isinstance(request, GateRequest):
            return self.rejection(request)
        if request.g.dtype == torch.float64:
            return "computes in float32; a float64 gate input would lose digits"
        if request.g.shape[-1] > MAX_HEAD_DIM:
            return f"K = {request.g.shape[-1]} is above {MAX_HEAD_DIM}"
        return None

    kda_core_saved_spec = _served_by("saved_specs")

    @hookimpl
    def kda_core_chunk_finish(self, request: Request, kept: tuple[Tensor, ...], starts: Tensor | None) -> ForwardResult:
        return self.calls.chunk_finish(request, kept, starts)

    @hookimpl
    def kda_core_chunk_finish_backward(
        self, request: Request, kept: tuple[Tensor, ...], ends: Tensor | None
    ) -> BackwardResult:
        return self.calls.chunk_finish_backward(request, kept, ends)

    @hookimpl
    def kda_core_plan(self, request: AnyRequest, chip: str | None) -> tuple[CallPlan, ...]:
        return self.calls.describe(request, chip)


for _method in (
    *("chunk_forward", "chunk_backward", "chunk_begin", "chunk_begin_backward", "commit", "decode_step"),
    *("recurrent_forward", "recurrent_backward", "gate_forward", "gate_backward"),
    *("short_convolution_forward", "short_convolution_backward"),
    *("gated_rms_norm_forward", "gated_rms_norm_backward"),
):
    setattr(TritonBackend, f"kda_core_{_method}", _served_by(_method))

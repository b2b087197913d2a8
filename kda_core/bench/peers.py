"""Implementations of KDA that a benchmark compares. A peer's library is imported when the peer is asked for."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core import reference
from kda_core.bench.workload import Call, Problem, Work

OURS = "kda_core"
CHUNK = 64
BENCH_EXTRA = 'pip install "kda-core[bench]"'
Forward = tuple[Tensor, Tensor | None]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings and logs of a library's import."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def import_failure(module: str, install: str) -> str | None:
    """Why a module cannot be imported, with the command that installs it, or None."""
    try:
        with _quiet():
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: {install}"
    # An installed library may fail in any way while it looks for its own compiler or device.
    except Exception as error:
        return f"import failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def version_of(distribution: str) -> str:
    """The installed version, or "unknown"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


class Peer(ABC):
    """An implementation of KDA.

    Attributes:
        name: its name in tables and in ``--peers``.
        distribution: the installed distribution whose version is reported.
    """

    name: str
    distribution: str

    @abstractmethod
    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot run on the device, or None."""

    @abstractmethod
    def prepare(self, work: Work) -> Call:
        """Turn a problem's inputs into those that it takes; returns the call to be timed."""

    def version(self) -> str:
        """Its version; called only where it is available."""
        return version_of(self.distribution)

    def refuses(self, problem: Problem) -> str | None:
        """Why it does not take calls of this kind, or None."""
        return None

    def note(self, problem: Problem) -> str:
        """Work that is timed beside its kernels, or that was done before the timed call; "" if there is none."""
        return ""


class Ours(Peer):
    """``kda_core.chunk_kda``, served by the backend that is named or else by the one that the core chooses."""

    name = OURS

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def version(self) -> str:
        return kda_core.__version__

    def prepare(self, work: Work) -> Call:
        arguments: dict[str, Any] = work.tensors | work.options | {"backend": self.backend}
        return work.call(lambda: kda_core.chunk_kda(**arguments)[:2])


def with_pool(work: Work, function: Callable[[Tensor | None], Forward]) -> Callable[[], Forward]:
    """A call of a function that takes states: a pool's slots are gathered before and scattered after it, both timed."""
    if work.problem.training:
        return lambda: function(None)
    state = work.tensors["initial_state"]
    if not work.problem.shape.pool:
        return lambda: function(state)
    slots = work.tensors["ssm_state_indices"].long()

    def paged() -> Forward:
        o, final_state = function(state[slots])
        if final_state is None:
            raise RuntimeError("expected a final state, got None")
        state[slots] = final_state
        return o, final_state

    return paged


class GpuPeer(Peer):
    """A library of GPU kernels that takes states and no pool.

    Attributes:
        module: the module that must import.
        install: the command that installs it.
    """

    module: str
    install: str

    def unavailable(self, device: torch.device) -> str | None:
        return "its kernels need a GPU" if device.type == "cpu" else import_failure(self.module, self.install)

    def note(self, problem: Problem) -> str:
        return "states gathered and scattered in the call" if problem.shape.pool else ""


class Fla(GpuPeer):
    """``fla.ops.kda.chunk_kda`` with the same arguments as ours."""

    name = "fla"
    distribution = "fla-core"
    module = "fla.ops.kda"
    install = BENCH_EXTRA

    def unavailable(self, device: torch.device) -> str | None:
        # With FlashKDA installed fla would pass calls on to it; FlashKDA is a peer of its own.
        os.environ.setdefault("FLA_FLASH_KDA", "0")
        return super().unavailable(device)

    def refuses(self, problem: Problem) -> str | None:
        shape = problem.shape
        return f"K: at most 256, got {shape.K}" if shape.K > 256 else None

    def prepare(self, work: Work) -> Call:
        from fla.ops.kda import chunk_kda

        arguments: dict[str, Any] = {n: x for n, x in work.tensors.items() if n not in _STATE} | work.options
        dt_bias = arguments.pop("dt_bias", None)

        def forward(state: Tensor | None) -> Forward:
            bias = {} if dt_bias is None else {"dt_bias": dt_bias.view(-1)}
            return chunk_kda(initial_state=state, **arguments, **bias)

        return work.call(with_pool(work, forward))


_STATE = ("initial_state", "ssm_state_indices")


class FlashKda(GpuPeer):
    """``flash_kda.fwd`` (CUTLASS): inference with everything in the kernel."""

    name = distribution = module = "flash_kda"
    install = "build it from github.com/MoonshotAI/FlashKDA"

    def refuses(self, problem: Problem) -> str | None:
        shape = problem.shape
        if problem.training:
            return "it has no backward"
        if problem.gate != "bounded":
            return "it takes the bounded gate only"
        if problem.dtype != torch.bfloat16 or problem.gate_dtype != torch.bfloat16:
            return "it takes bfloat16 only"
        if (shape.K, shape.V) != (128, 128) or shape.H != shape.HV:
            return "it takes K = V = 128 and H = HV only"
        return None

    def prepare(self, work: Work) -> Call:
        import flash_kda

        x = work.tensors
        rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
        scale = x["q"].shape[-1] ** -0.5
        given = {n: x.get(n) for n in ("A_log", "dt_bias", "cu_seqlens")}

        def forward(state: Tensor | None) -> Forward:
            out, final_state = torch.empty_like(x["v"]), None if state is None else torch.empty_like(state)
            flash_kda.fwd(
                *rows,
                scale,
                out,
                lower_bound=work.options["lower_bound"],
                initial_state=state,
                final_state=final_state,
                **given,
            )
            return out, final_state

        return work.call(with_pool(work, forward))


class _TorchPeer(Peer):
    """Torch code that takes log decays and beta; gate, norms and sigmoid are computed in the timed call."""

    module: str

    def unavailable(self, device: torch.device) -> str | None:
        return import_failure(self.module, BENCH_EXTRA) if device.type == "cpu" else "torch code, timed on CPUs only"

    def refuses(self, problem: Problem) -> str | None:
        return "it takes no packed sequences" if problem.shape.lengths else None

    def note(self, problem: Problem) -> str:
        return "norms in torch" if problem.gate == "given" else "gate, norms and sigmoid in torch"

    @abstractmethod
    def function(self) -> Callable[..., Forward]:
        """A function of normalised q, k, then v, log decay, beta, initial_state (K first) and output_final_state."""

    def prepare(self, work: Work) -> Call:
        function = self.function()
        x = work.tensors

        def forward(state: Tensor | None) -> Forward:
            o, final_state = function(
                reference.l2norm(x["q"].float()).to(x["q"].dtype),
                reference.l2norm(x["k"].float()).to(x["k"].dtype),
                x["v"],
                work.log_decay(),
                work.beta(),
                initial_state=None if state is None else state.mT,
                output_final_state=state is not None,
            )
            return o.to(x["v"].dtype), None if final_state is None else final_state.mT

        return work.call(with_pool(work, forward))


class NaiveChunk(_TorchPeer):
    """fla's torch code of the chunk form."""

    name = "fla naive_chunk"
    distribution = "fla-core"
    module = "fla.ops.kda.naive"

    def refuses(self, problem: Problem) -> str | None:
        if problem.training:
            return "timed in inference only"
        if problem.shape.T % CHUNK:
            return f"it takes multiples of {CHUNK} tokens"
        return super().refuses(problem)

    def function(self) -> Callable[..., Forward]:
        from fla.ops.kda.naive import naive_chunk_kda

        return naive_chunk_kda


class NaiveRecurrent(_TorchPeer):
    """fla's torch code of the token recurrence."""

    name = "fla naive_recurrent"
    distribution = "fla-core"
    module = "fla.ops.kda.naive"

    def refuses(self, problem: Problem) -> str | None:
        return "timed in inference only" if problem.training else super().refuses(problem)

    def function(self) -> Callable[..., Forward]:
        from fla.ops.kda.naive import naive_recurrent_kda

        return naive_recurrent_kda


class Transformers(_TorchPeer):
    """The torch fallback of transformers' kimi_linear."""

    name = distribution = "transformers"
    module = "transformers.models.kimi_linear.modeling_kimi_linear"

    def refuses(self, problem: Problem) -> str | None:
        if problem.shape.H != problem.shape.HV:
            return "it takes H = HV only"
        return super().refuses(problem)

    def function(self) -> Callable[..., Forward]:
        with _quiet():
            model = importlib.import_module(self.module)
        # With fla installed the name is a wrapper of its GPU kernel; unwrapped it is the torch code.
        return inspect.unwrap(model.chunk_kimi_delta_attention)


def every_peer() -> list[Peer]:
    """All peers, in the order of the tables."""
    from kda_core.bench.cudnn_peer import CudnnFrontend

    return [Fla(), FlashKda(), CudnnFrontend(), Transformers(), NaiveChunk(), NaiveRecurrent()]


def chosen(names: tuple[str, ...] | None, device: torch.device) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can run on the device, and why the others cannot.

    Args:
        names: the peers that are asked for; None: all.

    Raises:
        ValueError: a name that no peer has.
    """
    known = {peer.name: peer for peer in every_peer()}
    if unknown := [n for n in names or () if n not in known]:
        raise ValueError(f"peers: expected some of {', '.join(known)} or none, got {', '.join(unknown)}")
    asked = [known[n] for n in (known if names is None else names)]
    reasons = {peer.name: peer.unavailable(device) for peer in asked}
    able = [peer for peer in asked if reasons[peer.name] is None]
    return able, {name: reason for name, reason in reasons.items() if reason is not None}

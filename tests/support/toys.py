"""Backends whose every answer can be set, none at all, and the requests that backends get."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from packaging.specifiers import SpecifierSet

from kda_core._plugins import registry
from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature
from kda_core.hookspecs import hookimpl
from kda_core.request import BackwardResult, ForwardResult


class Toy:
    """A backend that answers with a constant, and whose every answer can be set."""

    def __init__(self, name, priority=1000, features=(Feature.CHUNK,), **options):
        self.name, self.priority, self.features, self.options = name, priority, frozenset(features), options
        self.rejections = []
        self.value = options.get("value", 1.0)

    @hookimpl
    def kda_core_backend(self):
        return BackendInfo(
            self.name,
            "0.0",
            SpecifierSet(self.options.get("contract", "~=1.0")),
            self.options.get("device_types", ("cpu",)),
            self.priority,
            Capabilities(
                self.features, frozenset(self.options.get("dtypes", (torch.float32,))),
                self.options.get("max_head_dim"), self.options.get("max_head_dim"), self.options.get("closed", {}),
            ),
        )  # fmt: skip

    @hookimpl
    def kda_core_availability(self, device):
        answer = self.options.get("availability", Available())
        if isinstance(answer, Exception):
            raise answer
        return answer

    @hookimpl
    def kda_core_reject(self, request):
        self.rejections.append(request)
        reject = self.options.get("reject")
        if isinstance(reject, Exception):
            raise reject
        return reject

    @hookimpl
    def kda_core_chunk_forward(self, request):
        if isinstance(self.value, Exception):
            raise self.value
        if self.value is None:
            return None
        return ForwardResult(torch.full_like(request.v, self.value), saved=self.options.get("saved", ()))

    @hookimpl
    def kda_core_chunk_backward(self, request):
        return self.options.get("gradients", BackwardResult({"q": torch.ones_like(request.q)}))

    @hookimpl
    def kda_core_commit(self, request):
        return request.pool

    @hookimpl
    def kda_core_saved_spec(self, request):
        return ()


@contextmanager
def installed(*toys):
    """Backends that are registered inside of ``with``; answers the name of the last one."""
    registry.load()
    entries = []
    try:
        for toy in toys:
            entry = registry.register(toy)
            assert entry.state == "loaded", entry.reason
            entries.append(entry)
        yield entries[-1].name
    finally:
        for entry in entries:
            registry.unregister(entry.name)


@contextmanager
def no_wheels():
    """A process without any wheel of a backend."""
    taken = [(e, registry.named(e.name).plugin) for e in registry.ledger if e.state == "loaded" and e.distribution]
    for entry, _ in taken:
        registry.unregister(entry.name)
    try:
        yield
    finally:
        for entry, plugin in taken:
            registry.register(plugin, distribution=entry.distribution, entry_point=entry.entry_point)


class Watcher:
    """The requests that backends of a registry get inside of ``with``."""

    def __init__(self, registry=registry):
        self.registry, self.requests = registry, []

    def __enter__(self):
        self.registry.add_wrapper(self)
        return self.requests

    def __exit__(self, *error):
        self.registry.remove_wrapper(self)

    @hookimpl(wrapper=True)
    def kda_core_chunk_forward(self, request):
        self.requests.append(request)
        return (yield)

    kda_core_chunk_backward = kda_core_recurrent_forward = kda_core_recurrent_backward = kda_core_chunk_forward
    kda_core_gate_forward = kda_core_gate_backward = kda_core_short_convolution_forward = kda_core_chunk_forward
    kda_core_commit = kda_core_chunk_forward


class HalvesWatcher(Watcher):
    """The same for the hooks of calls in two halves."""

    kda_core_chunk_begin = kda_core_chunk_begin_backward = Watcher.kda_core_chunk_forward

    @hookimpl(wrapper=True)
    def kda_core_chunk_finish(self, request, kept, starts):
        self.requests.append(request)
        return (yield)

    @hookimpl(wrapper=True)
    def kda_core_chunk_finish_backward(self, request, kept, ends):
        self.requests.append(request)
        return (yield)


def inputs(T=3, dtype=torch.float32, K=4):
    q, k, v = torch.randn(3, 1, T, 2, K, dtype=dtype)
    return q, k, v, -q.abs(), torch.rand(1, T, 2, dtype=dtype)

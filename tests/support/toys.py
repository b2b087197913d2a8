"""Backends whose every answer can be set, and entry points that are made up."""

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
        return self.options.get("availability", Available())

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
    registry.load()
    for toy in toys:
        entry = registry.register(toy)
        assert entry.state == "loaded", entry.reason
    try:
        yield
    finally:
        for toy in toys:
            registry.unregister(toy.name)


def inputs(T=3, dtype=torch.float32, K=4):
    q, k, v = torch.randn(3, 1, T, 2, K, dtype=dtype)
    return q, k, v, -q.abs(), torch.rand(1, T, 2, dtype=dtype)


class EntryPoints(list):
    """The entry points that importlib.metadata finds."""

    @property
    def groups(self):
        return {e.group for e in self}

    def select(self, group):
        return [e for e in self if e.group == group]

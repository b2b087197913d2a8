"""Prints, as JSON, how kda_core behaves in an environment where the wheels of this folder are installed."""

import json
import os

import torch

import kda_core
from kda_core._plugins import ENVIRONMENT_VARIABLE, registry
from kda_core.hookspecs import hookimpl

T, K = 3, 4
q = torch.zeros(1, T, 1, K)
beta = torch.zeros(1, T, 1)
cu_seqlens = torch.tensor([0, 1, T])


class Watcher:
    """Sees every forward of every backend."""

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def kda_core_chunk_forward(self, request):
        result = yield
        self.seen.append([request.op, result.o.flatten()[0].item()])
        return result


def answer(**options):
    """The value that a call returns everywhere, or the error that it raises."""
    try:
        o, _ = kda_core.chunk_kda(q, q, q, q, beta, **options)
    except kda_core.KdaError as error:
        return f"{type(error).__name__}: {error}"
    return o.flatten()[0].item()


def with_variable(name):
    os.environ[ENVIRONMENT_VARIABLE] = name
    try:
        return answer()
    finally:
        del os.environ[ENVIRONMENT_VARIABLE]


def in_context(name):
    try:
        with kda_core.use_backend(name):
            return answer()
    except kda_core.KdaError as error:
        return f"{type(error).__name__}: {error}"


def watched():
    watcher = Watcher()
    registry.add_wrapper(watcher)
    for name in (None, "attic", "cpu", "reference"):
        answer(backend=name)
    registry.remove_wrapper(watcher)
    answer()
    return watcher.seen


names = [
    "attic", "cpu", "reference", "zenith", "raising", "outdated", "early", "successor", "hookless", "defaulted",
    "misspelt", "twin", "amd",
]  # fmt: skip
facts = {
    "core": kda_core.__file__,
    "backends": {f"{e.distribution or e.name}": [e.name, e.state, e.reason] for e in kda_core.backends()},
    "chosen": answer(), "packed": kda_core.explain(q, q, q, q, beta, cu_seqlens=cu_seqlens).chosen,
    "named": {name: answer(backend=name) for name in names}, "variable": {name: with_variable(name) for name in names},
    "context": {name: in_context(name) for name in names},
    "no fall-back": answer(backend="zenith", cu_seqlens=cu_seqlens), "watched": watched(),
}  # fmt: skip
print(json.dumps(facts))

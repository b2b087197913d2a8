"""A right backend that serves plain calls and answers VALUE; test_wheels.py writes its facts above, and breaks some."""

import torch
from packaging.specifiers import SpecifierSet

from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature
from kda_core.hookspecs import hookimpl
from kda_core.request import ForwardResult


@hookimpl
def kda_core_backend():
    capabilities = Capabilities(frozenset({Feature.CHUNK}), frozenset({torch.float32}))
    return BackendInfo(NAME, "1.0", SpecifierSet(CONTRACT), ("cpu",), PRIORITY, capabilities)  # noqa: F821


@hookimpl
def kda_core_availability(device):
    return Available()


@hookimpl
def kda_core_reject(request):
    return None


@hookimpl
def kda_core_chunk_forward(request):
    return ForwardResult(torch.full_like(request.v, VALUE))  # noqa: F821

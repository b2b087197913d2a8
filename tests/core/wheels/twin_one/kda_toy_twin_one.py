"""One of two wheels that claim the same name."""

import torch
from packaging.specifiers import SpecifierSet

from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature
from kda_core.hookspecs import hookimpl
from kda_core.request import ForwardResult


@hookimpl
def kda_core_backend():
    capabilities = Capabilities(frozenset({Feature.CHUNK}), frozenset({torch.float32}))
    return BackendInfo("twin", "1.0", SpecifierSet("~=1.0"), ("cpu",), 30, capabilities)


@hookimpl
def kda_core_availability(device):
    return Available()


@hookimpl
def kda_core_reject(request):
    return None


@hookimpl
def kda_core_chunk_forward(request):
    return ForwardResult(torch.full_like(request.v, 3.0))

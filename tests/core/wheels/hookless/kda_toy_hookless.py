"""A backend that declares chunk_kda and lacks the hook for it."""

import torch
from packaging.specifiers import SpecifierSet

from kda_core.capabilities import Available, BackendInfo, Capabilities, Feature
from kda_core.hookspecs import hookimpl


@hookimpl
def kda_core_backend():
    capabilities = Capabilities(frozenset({Feature.CHUNK}), frozenset({torch.float32}))
    return BackendInfo("hookless", "1.0", SpecifierSet("~=1.0"), ("cpu",), 30, capabilities)


@hookimpl
def kda_core_availability(device):
    return Available()


@hookimpl
def kda_core_reject(request):
    return None

"""Faults of a decoding step of a layer, for which these backends have a hook."""

from __future__ import annotations

from dataclasses import replace

import mutants
import torch
from torch import Tensor

from kda_core.hookspecs import hookimpl
from kda_core.nn import _decode
from kda_core.request import DecodeStepRequest


class DecodingMutant(mutants.Mutant):
    """Subclasses change the request."""

    abstract = True

    def step(self, r: DecodeStepRequest) -> DecodeStepRequest:
        raise NotImplementedError

    @hookimpl
    def kda_core_decode_step(self, request: DecodeStepRequest) -> Tensor:
        return _decode._in_parts(self.step(request), "cpu")


class InputsOneTokenOff(DecodingMutant):
    """The convolution's state is advanced by the inputs behind those of the accepted tokens."""

    def step(self, r: DecodeStepRequest) -> DecodeStepRequest:
        return r if r.commit_inputs is None else replace(r, commit_inputs=r.commit_inputs.roll(-1, 1))


class NothingIsCommittedByAStep(DecodingMutant):
    """A step with ``commit`` starts from its slots as they are."""

    def step(self, r: DecodeStepRequest) -> DecodeStepRequest:
        return r if r.num_committed is None else replace(r, num_committed=torch.zeros_like(r.num_committed))


class StepsAdvanceTheirDraft(DecodingMutant):
    """A draft with records writes the convolution's state."""

    @hookimpl
    def kda_core_decode_step(self, request: DecodeStepRequest) -> Tensor:
        o = _decode._in_parts(request, "cpu")
        if request.records is not None:
            places, first, masked = _decode._slots(request)
            _decode._keep_inputs(request, places, request.conv_state[first], masked)
        return o


class EpsilonOfTheNormIgnored(DecodingMutant):
    """The norm has its default epsilon."""

    def step(self, r: DecodeStepRequest) -> DecodeStepRequest:
        return replace(r, norm_eps=1e-5)
